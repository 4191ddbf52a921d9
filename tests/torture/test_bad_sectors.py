"""A disk that fails on sectors (`EIO` from read(2)) or on writing, simulated by bad_sectors_fs.py.

An object on such a sector is damaged like any other: a miss, on record, and no more than that. Nothing else
fails with it, and reading needs no writable disk.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import pytest

import castore_fuse
from castore import CorruptError, Store, StoreError
from castore.records import HEAD_SIZE
from castore.repair import doctor
from tests.helpers import flip, mixed, noise, payload
from tests.torture.bad_sectors_fs import READ_ONLY
from tests.torture.hurting import errno_of, shim

Figure = Callable[[str], None]
PAGE = 4096
SMALL = {f"small/{number:03}": noise(700 + number, number) for number in range(200)}
LARGE = {"large": mixed(1_500_000, 1), "raw": noise(1_500_000, 2), "one": mixed(60_000, 3)}
VALUES = SMALL | LARGE


class Disk:
    """The mounted file system, and its bad sectors."""

    def __init__(self, behind: Path, root: Path, bad: Path) -> None:
        self._behind, self._root, self._bad = behind, root, bad
        self._held: list[BinaryIO] = []
        self.store = root / "store"
        self.heal()

    def spoil(self, *sectors: tuple[Path, int]) -> None:
        """Make exactly the pages at those offsets unreadable from now on."""
        bad: dict[str, list[tuple[int, int]]] = {}  # by inode
        for path, offset in sectors:
            # Open, so that no later file gets this inode's number, and with it the bad sectors.
            self._held.append((self._behind / path.relative_to(self._root)).open("rb"))
            number = os.fstat(self._held[-1].fileno()).st_ino
            bad.setdefault(str(number), []).append((offset - offset % PAGE, PAGE))
        self._bad.write_text(json.dumps(bad))

    def close(self) -> None:
        """Let go of the spoiled files."""
        for file in self._held:
            file.close()

    def freeze(self) -> None:
        """Make the file system read-only from now on."""
        self._bad.write_text(json.dumps(READ_ONLY))

    def heal(self) -> None:
        """Make all sectors readable."""
        self._bad.write_text("{}")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    """A store with VALUES on a disk without bad sectors."""
    folder, root, bad = tmp_path / "behind", tmp_path / "root", tmp_path / "bad.json"
    folder.mkdir()
    root.mkdir()
    disk = Disk(folder, root, bad)
    with shim(root, "-m", "tests.torture.bad_sectors_fs", folder, root, bad):
        with Store(disk.store, memory=0) as store:
            for name, data in VALUES.items():
                store.put(name, data)
        yield disk
        disk.close()


def spoil_objects(disk: Disk) -> tuple[set[str], set[str]]:
    """Make a bad sector in each kind of object.

    Returns the names whose bytes are hit, and those of which only the head is.
    """
    with Store(disk.store, memory=0) as store:
        places = [payload(store, name) for name in SMALL]
        # The page's last bytes are the head of a record, or a part of it.
        pack, page = next(
            (pack, start - start % PAGE - PAGE) for pack, start, _ in places[50:] if start % PAGE < HEAD_SIZE
        )
        (large, _, length), (raw, _, _), (one, _, _) = (payload(store, name) for name in LARGE)
        hit, head = set(LARGE), set()
        for name, (_, start, stored) in zip(SMALL, places, strict=True):
            if start < page + PAGE and page < start + stored:
                hit.add(name)
            elif start - HEAD_SIZE < page + PAGE and page < start:
                head.add(name)
    disk.spoil((pack, page), (large, length // 2), (raw, 800_000), (one, PAGE))
    assert len(hit) > len(LARGE) + 3
    return hit, head


def missing(store: Store) -> set[str]:
    """The names that give nothing; the others must give their bytes."""
    got = dict(zip(VALUES, store.get_many(VALUES), strict=True))
    assert all(data in (None, VALUES[name]) for name, data in got.items())
    return {name for name, data in got.items() if data is None}


def test_what_lies_on_a_bad_sector_is_a_miss_and_all_else_is_read(disk: Disk, figure: Figure) -> None:
    hit, head = spoil_objects(disk)
    with Store(disk.store, memory=0) as store:
        for name in ("large", "raw"):
            with store.open(name) as file:
                assert file.read(100_000) == VALUES[name][:100_000]
                file.seek(800_000 if name == "raw" else 740_000)
                with pytest.raises(CorruptError, match="cannot be read"):
                    file.read(100_000)
        for _ in range(2):
            assert missing(store) == hit
        assert {name for finding in store.verify().bad for name in finding.names} == hit | head  # healed
        assert store.stat().corrupt == len(hit)
        for name in hit:
            store.put(name, VALUES[name])
        assert missing(store) == set()
    figure(
        f"a bad sector in a pack and in 3 objects: {len(hit)} of "
        f"{len(VALUES)} are misses, and heal with a put"
    )


def test_a_mount_over_bad_sectors_answers_eio_for_them_alone(disk: Disk, mountpoint: Path) -> None:
    hit, _ = spoil_objects(disk)
    with castore_fuse.mounted(disk.store, mountpoint) as root:
        for name, data in VALUES.items():
            if name in hit:
                assert errno_of((root / name).read_bytes) == errno.EIO
            else:
                assert (root / name).read_bytes() == data


def test_gc_moves_all_that_can_be_read_off_a_bad_pack(disk: Disk, figure: Figure) -> None:
    hit, head = spoil_objects(disk)
    gone = [name for number, name in enumerate(SMALL) if number % 2 and name not in hit | head][:95]
    with Store(disk.store, memory=0) as store:
        store.delete_many([*gone, *LARGE])
        store.delete_many([name for name in SMALL if name not in hit | head and name > "small/120"])
        left = {entry.name for entry in store.entries()}
        assert store.gc(grace=0).packs
        assert missing(store) & left == hit & left
        assert store.gc(grace=0).packs == []
    assert head
    assert doctor.examine(disk.store)[0].what.startswith(f"{len(hit & left)} blobs of")
    figure(
        f"gc over a bad sector: {len(left - hit)} records moved, {len(head)} of them with an unreadable head"
    )


def test_a_rebuild_over_bad_sectors_costs_what_lies_on_them(disk: Disk, figure: Figure) -> None:
    hit, head = spoil_objects(disk)
    _, rebuilt = doctor.rebuild_index(disk.store)
    # Without an index, a record whose head is gone cannot be found. A rebuild reads no large objects except
    # raw ones.
    assert hit - {"large", "one"} <= set(rebuilt.lost) <= hit | head
    with Store(disk.store, memory=0) as store:
        assert hit <= missing(store) <= hit | head
    disk.heal()
    assert doctor.examine(disk.store)[0].what.endswith("are lost: damaged or missing")
    figure(f"a rebuild over bad sectors: {len(rebuilt.lost)} of {len(VALUES)} names lost, which lay on them")


def test_bad_sectors_of_the_journal_cost_no_name_that_the_index_has(disk: Disk) -> None:
    with Store(disk.store, memory=0) as store:
        segments = [store.index.journal.path(number) for number in store.index.journal.segments()]
    disk.spoil(*((path, 0) for path in segments))
    (finding,) = doctor.examine(disk.store)
    assert finding.mended
    assert "journal" in finding.what
    assert doctor.examine(disk.store) == []
    with Store(disk.store, memory=0) as store:
        assert missing(store) == set()
    disk.heal()
    assert doctor.rebuild_index(disk.store)[1].entries == len(VALUES)


def test_a_bad_sector_of_the_index_is_reported_and_a_rebuild_mends_it(disk: Disk) -> None:
    size = (disk.store / "index.sqlite").stat().st_size
    disk.spoil(*((disk.store / "index.sqlite", at) for at in range(0, size, PAGE)))
    with pytest.raises(StoreError, match="castore doctor"), Store(disk.store, memory=0) as store:
        store.get("small/000")
    (finding,) = doctor.examine(disk.store)
    assert "--rebuild-index" in finding.advice
    _, rebuilt = doctor.rebuild_index(disk.store)
    assert (rebuilt.entries, rebuilt.lost) == (len(VALUES), [])
    with Store(disk.store, memory=0) as store:
        assert missing(store) == set()
    assert doctor.examine(disk.store) == []


@pytest.mark.parametrize(
    ("name", "advice"), [("castore.json", "`castore doctor` sets it aside"), ("locks/beacon", "delete it")]
)
def test_a_file_of_the_store_on_a_bad_sector_is_reported_and_can_be_made_again(
    disk: Disk, name: str, advice: str
) -> None:
    disk.spoil((disk.store / name, 0))
    with pytest.raises(StoreError, match=f"{name} cannot be read .*; {advice}"):
        Store(disk.store, memory=0)
    if name == "castore.json":
        assert "castore.json was damaged" in doctor.examine(disk.store)[0].what
    else:
        (disk.store / name).unlink()
    disk.heal()  # another file may get its inode
    with Store(disk.store, memory=0) as store:
        assert missing(store) == set()
    assert doctor.examine(disk.store) == []


def test_who_reads_goes_on_when_the_disk_turns_read_only(
    disk: Disk, mountpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with castore_fuse.mounted(disk.store, mountpoint) as root, Store(disk.store, memory=0) as store:
        hits = store.stat().disk_hits
        damaged = payload(store, "small/007")
        flip(*damaged[:2], 1)
        disk.freeze()
        for turn in range(3):
            store._usage.due = 0.0  # the next read writes the counted uses
            for name, data in VALUES.items():
                assert store.get(name) == (None if name == "small/007" else data)
                if name != "small/007":
                    assert (root / name).read_bytes() == data
            assert missing(store) == {"small/007"}
            assert store.stat().disk_hits >= hits, turn
        assert "could not be written yet" in caplog.text
        assert "the index could not record it" in caplog.text
        with pytest.raises((StoreError, OSError)):
            store.put("new", b"new")
        disk.heal()
        store.put("new", b"new")
        assert store.get("small/007") is None
        store.flush()
        assert store.stat().disk_hits - hits >= 6 * (len(VALUES) - 1)
        assert store.stat().corrupt == 1
    assert doctor.examine(disk.store)[0].what.startswith("1 blobs of 1 entries are lost")
