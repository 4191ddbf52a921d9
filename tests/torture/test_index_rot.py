"""Bit rot in the index: reported in a sentence, never other bytes, and everything is back after a rebuild.

Names come back from the names journal, which lies beside the objects (docs/format.md). SQLite keeps no
checksums of its pages. So a flipped byte may be one that nothing reads, or may turn a value into another
valid one. Then the digest decides, and the worst outcome is a miss.
"""

from __future__ import annotations

import os
import random
import shutil
import sqlite3
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import NamedTuple

import pytest

import castore_fuse
from castore import CastoreError, Entry, Store, StoreError
from castore.repair import doctor
from tests.helpers import mixed, noise, overwrite, recount
from tests.torture.hurting import errno_of

Scale = Callable[[int, int], int]
Figure = Callable[[str], None]
PAGE = 2048
#: The first byte of a b-tree page: https://sqlite.org/fileformat2.html#b_tree_pages
_KINDS = {2: "interior of an index", 5: "interior of a table", 10: "leaf of an index", 13: "leaf of a table"}


class Healthy(NamedTuple):
    """A store before it is damaged: the bytes that were put, and its entries."""

    path: Path
    kept: dict[str, bytes]
    entries: list[Entry]


def filled(path: Path, packed: int) -> dict[str, bytes]:
    """A store with loose, packed and raw blobs; closed, so without a WAL."""
    kept = {f"folder-{n % 7}/{n:05d}": mixed(300 + n, n) for n in range(packed)}
    with Store(path, memory=0) as store:
        store.put_many(kept.items())
        for n in range(20):
            kept[f"large/{n}"] = noise(20_000 + n, n) if n % 2 else noise(300_000 + n, n)
            store.put(f"large/{n}", kept[f"large/{n}"], ttl=1e6, metadata={"number": n}, pin=n % 3 == 0)
        store.put("long metadata", b"x", metadata={"text": "y" * 10_000})
        kept["long metadata"] = b"x"
    return kept


def healthy(path: Path, packed: int) -> Healthy:
    kept = filled(path, packed)
    with Store(path, memory=0) as store:
        return Healthy(path, kept, [entry._replace(accessed=0) for entry in store.entries()])


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Healthy:
    """A store with index pages of every kind."""
    return healthy(tmp_path_factory.mktemp("index") / "store", 500)


@pytest.fixture
def path(good: Healthy, tmp_path: Path) -> Path:
    """A copy of the good store, to be damaged."""
    return Path(shutil.copytree(good.path, tmp_path / "store"))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Healthy:
    """A store with blobs of the same kinds, for damage that does not depend on pages."""
    return healthy(tmp_path_factory.mktemp("small") / "store", 50)


@pytest.fixture
def copied(small: Healthy, tmp_path: Path) -> Path:
    """A copy of the small store, to be damaged."""
    return Path(shutil.copytree(small.path, tmp_path / "store"))


def kinds_of_pages(index: Path) -> dict[str, list[int]]:
    """The pages of an index by kind. A table or index without rows has nothing to lose, and is not listed."""
    raw = index.read_bytes()
    kinds: dict[str, list[int]] = {"header": [0]}
    for page in range(1, len(raw) // PAGE):
        if raw[page * PAGE] in _KINDS and raw[page * PAGE + 3 : page * PAGE + 5] == b"\0\0":
            continue
        kinds.setdefault(_KINDS.get(raw[page * PAGE], "overflow or free"), []).append(page)
    return kinds


def told_of(path: Path, kept: Mapping[str, bytes | None]) -> str:
    """The outcome for a user of the store: 'error', 'miss' or 'right'; other bytes fail the test."""
    met = "right"
    try:
        with Store(path, memory=0) as store:
            for name, data in kept.items():
                try:
                    got = store.get(name)
                except CastoreError:
                    return "error"
                assert got in (None, data), f"other bytes under {name}"
                if got != data:
                    met = "miss"
            list(store.entries())
    except CastoreError:
        return "error"
    return met


def mend(path: Path) -> list[str]:
    """An operator's repair: `doctor`, and if it asks for that, `doctor --rebuild-index`."""
    said = [finding.what for finding in doctor.examine(path)]
    if any("rebuild-index" in finding.advice for finding in doctor.examine(path)):
        findings, _ = doctor.rebuild_index(path)
        said += [finding.what for finding in findings]
    return said


def all_back(path: Path, good: Healthy, *, unseen: bool = False) -> None:
    """Check that all entries are back.

    ``unseen`` allows undetectable changes: a letter of the metadata, a digit of a time.
    """
    kept = good.kept
    with Store(path, memory=0) as store:
        assert {name: store.get(name) for name in kept} == kept
        entries = [entry._replace(accessed=0) for entry in store.entries()]
        if unseen:
            assert [entry[:3] for entry in entries] == [entry[:3] for entry in good.entries]
        else:
            assert entries == good.entries
        assert store.verify().bad == []
        recount(store)
    assert doctor.examine(path) == []


def test_a_damaged_page_of_any_kind_is_reported_and_all_comes_back(
    good: Healthy, tmp_path: Path, scale: Scale, figure: Figure
) -> None:
    kinds = kinds_of_pages(good.path / "index.sqlite")
    assert set(_KINDS.values()) - {"interior of a table"} <= set(kinds), set(kinds)
    chance = random.Random(5)
    met: Counter[str] = Counter()
    path = tmp_path / "store"
    hows = ("noise", "byte", "zeros", "bit")[: scale(2, 4)]
    turns = [(kind, how) for kind in kinds for how in hows]
    for number, (kind, how) in enumerate(turns * 4):
        if number >= len(turns) and met["error"] >= len(kinds):
            break  # the pages that are hit differ from run to run
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(good.path, path)
        page = chance.choice(kinds[kind])
        size = 1 if how in ("byte", "bit") else PAGE
        at = page * PAGE + (chance.randrange(PAGE) if size == 1 else 0)
        overwrite(path / "index.sqlite", at, bytes(size) if how == "zeros" else chance.randbytes(size))
        answer = told_of(path, good.kept)
        met[answer] += 1
        said = mend(path)
        if size == PAGE:
            assert answer != "right" or kind == "overflow or free" or said, (
                f"{how} in the {kind}: nobody noticed"
            )
        all_back(path, good, unseen=size == 1 and not said)
    assert met["error"] >= len(kinds)
    figure(
        f"{met.total()} damaged pages of the index ({', '.join(sorted(kinds))}): "
        f"{met['error']} errors, {met['miss']} misses, {met['right']} not needed; 0 other "
        f"bytes; after doctor all {len(good.entries)} entries were back"
    )


def test_a_flipped_bit_anywhere_in_the_index_gives_nobody_other_bytes(
    tmp_path: Path, scale: Scale, figure: Figure
) -> None:
    path = tmp_path / "store"
    kept = {f"n/{number:02}": noise(100 + number, number) for number in range(40)}
    with Store(path, memory=0) as store:
        store.put_many(kept.items())
    good = (path / "index.sqlite").read_bytes()
    # Besides the names that were put: all names into which one flipped bit can turn them.
    asked = dict.fromkeys(f"n/{number:02}" for number in range(100)) | kept
    met: Counter[str] = Counter()
    chance = random.Random(8)
    content = [at for at in range(len(good)) if good[at]]
    for at in chance.sample(content, min(len(content), scale(100, 4_000))):
        damaged = bytearray(good)
        damaged[at] ^= 1 << chance.randrange(8)
        copy = shutil.copytree(path, tmp_path / "copy")
        (copy / "index.sqlite").write_bytes(damaged)
        met[told_of(copy, asked)] += 1
        shutil.rmtree(copy)
    figure(f"one bit of an index flipped, {met.total()} times: {dict(sorted(met.items()))}; no other bytes")
    assert min(met["right"], met["miss"], met["error"]) > met.total() / 20, met


def test_a_name_that_became_another_is_nobodys(good: Healthy, path: Path) -> None:
    with closing(sqlite3.connect(path / "index.sqlite", isolation_level=None)) as db:
        db.execute("UPDATE entries SET name = 'folder-0/00001' WHERE name = 'folder-0/00000'")
    with Store(path, memory=0) as store, castore_fuse.mounted(store) as root:
        assert store.get("folder-0/00001") is None
        assert store.get_many(["folder-0/00001", "folder-0/00007"]) == [None, good.kept["folder-0/00007"]]
        assert store.entry("folder-0/00001") is None
        assert errno_of((root / "folder-0/00001").read_bytes) == 5
        assert "00001" in os.listdir(root / "folder-0")
        with pytest.raises(StoreError, match="doctor"):
            store.index.snapshot_journal()
    assert mend(path)
    all_back(path, good)


@pytest.mark.parametrize("how", ["deleted", "empty", "cut", "text"])
def test_an_index_that_is_gone_or_cut_is_reported_and_all_comes_back(
    good: Healthy, path: Path, how: str
) -> None:
    index = path / "index.sqlite"
    if how == "deleted":
        index.unlink()
    else:
        content = {"empty": b"", "cut": index.read_bytes()[: 5 * PAGE + 77], "text": b"no database\n" * 1000}[
            how
        ]
        index.write_bytes(content)
    assert told_of(path, good.kept) == "error"
    assert "rebuild-index" in doctor.examine(path)[0].advice
    mend(path)
    all_back(path, good)


def test_a_damaged_log_loses_nothing_but_what_it_alone_knew(
    good: Healthy, path: Path, tmp_path: Path, scale: Scale, figure: Figure
) -> None:
    """The WAL is checksummed: SQLite stops reading it at the damage.

    The journal still has the names after that.
    """
    chance, turns, kept = random.Random(7), scale(3, 60), dict(good.kept)
    back: Counter[str] = Counter()
    for turn in range(turns):
        copy = tmp_path / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        late = {f"late/{turn}/{n}": noise(2_000, 1_000 * turn + n) for n in range(30)}
        with Store(path, memory=0) as store:
            for name, data in late.items():
                store.put(name, data)
            shutil.copytree(path, copy)  # as after a crash of the machine: the WAL is not in the index yet
        kept |= late
        log = copy / "index.sqlite-wal"
        assert log.stat().st_size > 10 * PAGE
        overwrite(log, chance.randrange(log.stat().st_size), chance.randbytes(1))
        assert told_of(copy, kept) in ("right", "miss", "error")
        mend(copy)
        doctor.rebuild_index(copy)
        with Store(copy, memory=0) as store:
            missing = [name for name, data in kept.items() if store.get(name) != data]
            assert store.verify().bad == []
            recount(store)
        back["all" if not missing else "some"] += 1
        assert set(missing) <= set(late)
        assert doctor.examine(copy) == []
    figure(f"{turns} damaged logs: 0 other bytes; {back['all']} times every entry was back")


def test_a_mount_answers_eio_on_a_broken_index_and_goes_on_after_the_rebuild(
    good: Healthy, path: Path
) -> None:
    kept = good.kept
    with castore_fuse.mounted(path) as root:
        assert (root / "large/1").read_bytes() == kept["large/1"]
        size = (path / "index.sqlite").stat().st_size
        overwrite(path / "index.sqlite", 0, noise(size))
        log = path / "index.sqlite-wal"
        if log.exists() and log.stat().st_size:
            overwrite(log, 0, noise(log.stat().st_size))
        errors = {errno_of((root / name).read_bytes) for name in list(kept)[:300]}
        assert errors <= {None, 5}
        assert 5 in errors
        doctor.rebuild_index(path)
        assert {name: (root / name).read_bytes() for name in kept} == kept


ROWS = {
    "a size below zero": "UPDATE blobs SET size = -1",
    "a size of an exabyte": "UPDATE blobs SET size = 1 << 60",
    "a stored length of an exabyte": "UPDATE blobs SET stored = 1 << 60",
    "a stored length below zero": "UPDATE blobs SET stored = -5",
    "an offset below zero": "UPDATE blobs SET offset = -1 WHERE pack > 0",
    "an offset behind the end": "UPDATE blobs SET offset = 1 << 40 WHERE pack > 0",
    "a pack that is not there": "UPDATE blobs SET pack = 77 WHERE pack > 0",
    "a pack below -1": "UPDATE blobs SET pack = -9",
    "a codec that is none": "UPDATE blobs SET codec = 'brotli'",
    "another codec": "UPDATE blobs SET codec = CASE codec WHEN 'zstd' THEN 'lz4' ELSE 'zstd' END",
    "text for a size": "UPDATE blobs SET size = 'many'",
    "an empty digest": "UPDATE entries SET digest = x'' WHERE name < 'folder-3'",
    "a short digest": "UPDATE OR REPLACE blobs SET digest = substr(digest, 1, 3)",
    "a path for a digest": "UPDATE entries SET digest = '../../etc/passwd'",
    "swapped digests": "UPDATE entries SET digest = (SELECT max(digest) FROM blobs)",
    "an entry's size below zero": "UPDATE entries SET size = -5",
    "text for an entry's size": "UPDATE entries SET size = 'many'",
    "text for times": "UPDATE entries SET created = 'now', accessed = 'now'",
    "text for an expiry": "UPDATE entries SET expires = 'soon'",
    "a time beyond all": "UPDATE entries SET created = 1e300, expires = 1e300",
    "text for a pin": "UPDATE entries SET pinned = 'x'",
    "a number for a serializer": "UPDATE entries SET serializer = 5",
    "metadata that is no JSON": "UPDATE entries SET metadata = '{'",
    "names that lead out": "UPDATE entries SET name = '../' || name",
    "names with a NUL": "UPDATE entries SET name = name || char(0) || 'x'",
    "no totals": "DELETE FROM totals",
    "checksums of other frames": "UPDATE checksums SET frames = x'00'",
    "no checksums": "DELETE FROM checksums",
    "counts that are off": "UPDATE totals SET stored = -1, entries = 7",
    "text for counts": "UPDATE totals SET entries = '', stored = 'x', packed = 'y'",
    "text for what has died in packs": "UPDATE packs SET dead = 'many'",
    "more that has died than there is": "UPDATE packs SET dead = 1 << 62",
    "text for a pack": "UPDATE blobs SET pack = ''",
    "text for a stored length": "UPDATE blobs SET stored = 'x'",
    "references that are off": "UPDATE blobs SET refs = 5",
    "released digests that are too short": "INSERT INTO released (digests) VALUES (x'0011')",
    "a number for released digests": "INSERT INTO released (digests) VALUES (5)",
    "an entry's metadata without end": "UPDATE entries SET metadata = replace(hex(zeroblob(9999)), '0', '[')",
}


@pytest.mark.parametrize("row", [row for row in ROWS if "entry" in row or "time" in row or "expiry" in row])
def test_a_name_whose_row_cannot_be_is_put_again_and_removed(copied: Path, row: str) -> None:
    with closing(sqlite3.connect(copied / "index.sqlite", isolation_level=None)) as db:
        db.execute(ROWS[row])
    with Store(copied, memory=0) as store:
        store.put("folder-0/00000", b"anew")
        store.put_many([("folder-0/00007", b"anew too"), ("folder-8/00000", b"new")])
        assert store.get("folder-0/00000") == b"anew"
        assert store.get("folder-0/00007") == b"anew too"
        assert store.delete("large/13")
        assert store.entry("large/13") is None


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, marks=[pytest.mark.matrix] * (number % 2))
        for number, row in enumerate(ROWS)
        if row != "a short digest"  # no entry is left under it
    ],
)
def test_gc_with_rows_that_cannot_be_ends_in_castores_words_and_makes_no_other_bytes(
    small: Healthy, copied: Path, row: str
) -> None:
    with closing(sqlite3.connect(copied / "index.sqlite")) as db:
        db.execute(ROWS[row])
        db.execute("UPDATE entries SET expires = 1.0 WHERE name LIKE 'folder-1%'")
        db.commit()
    with suppress(CastoreError), Store(copied, memory=0) as store:
        store.gc(grace=0, dry_run=True)
        with suppress(CastoreError):
            store.delete_many(name for name in small.kept if name.startswith("folder-2"))
        store.gc(grace=0)
        store.gc(grace=0, max_size=store.index.totals().stored // 2)
    doctor.rebuild_index(copied)
    with Store(copied, memory=0) as store:
        assert all(store.get(name) in (None, data) for name, data in small.kept.items())
        assert store.verify().bad == []


@pytest.mark.parametrize(
    "row", [pytest.param(row, marks=[pytest.mark.matrix] * (number % 2)) for number, row in enumerate(ROWS)]
)
def test_rows_that_cannot_be_are_misses_or_errors_and_are_mended(
    small: Healthy, copied: Path, tmp_path: Path, row: str
) -> None:
    with closing(sqlite3.connect(copied / "index.sqlite")) as db:
        db.execute(ROWS[row])
        db.commit()
    assert told_of(copied, small.kept) in ("right", "miss", "error")
    outside = sorted(os.listdir(tmp_path))
    try:
        with Store(copied, memory=0) as store:
            for entry in store.entries():
                f"{entry.size:d} {entry.created:f} {entry.accessed:f} {entry.expires or 0.0:f}"
            store.stat()
            if row != "a short digest":  # to gc, no blob is left under a key that rotted
                store.gc()
            store.verify()
    except CastoreError:
        pass
    assert sorted(os.listdir(tmp_path)) == outside
    mend(copied)
    doctor.rebuild_index(copied)
    all_back(copied, small)
