"""A disk without a free byte, under every kind of use: a clear error, nothing torn, and automatic recovery.

The disk is a tmpfs of its own, so it is really full, for this process and for a mount's daemon.
"""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

import castore_fuse
from castore import CacheWarning, FullError, Store
from castore.repair import doctor
from castore.system.ballast import BALLAST_BYTES, full_disk_error
from tests.crowds.test_hardship import journal_agrees
from tests.helpers import mixed, noise, payload, recount, text

Figure = Callable[[str], None]
DISK = 64 * 1024 * 1024


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", os.fspath(folder)]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting a small disk takes root")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def free(disk: Path) -> int:
    status = os.statvfs(disk)
    return status.f_bavail * status.f_frsize


def fill_up(disk: Path) -> Path:
    """Fill the disk with another user's file, to the last byte."""
    filler = disk / f"filler-{len(os.listdir(disk))}"
    with suppress(OSError), closing(os.fdopen(os.open(filler, os.O_WRONLY | os.O_CREAT), "wb", 0)) as file:
        while True:
            file.write(bytes(4096))
    assert free(disk) == 0
    return filler


def whole(store: Store, kept: dict[str, bytes]) -> None:
    """Check that everything that was put is there with its bytes, and nothing is torn."""
    assert {name: store.get(name) for name in kept} == kept
    assert store.verify().bad == []
    assert journal_agrees(store)
    recount(store)


def in_a_batch(store: Store, source: Path) -> None:
    with store.batch() as batch:
        batch.put("batch/small", noise(3_000))
        batch.put_file("batch/file", source)


def test_on_a_full_disk_every_write_is_a_clear_error_and_tears_nothing(disk: Path, figure: Figure) -> None:
    kept = {f"old/{number}": mixed(500 + 40_000 * (number % 2), number) for number in range(100)}
    with Store(disk / "store", memory=0) as store:
        store.put_many(kept.items())
        filler = fill_up(disk)
        source = disk.with_name("source")
        source.write_bytes(noise(3_000_000))
        writes: dict[str, Callable[[], object]] = {
            "put": lambda: store.put("new", noise(100_000)),
            "put of a small blob": lambda: [store.put(f"new/{n}", noise(3_000, n)) for n in range(2_000)],
            "put_many": lambda: store.put_many((f"many/{n}", noise(3_000, n)) for n in range(2_000)),
            "put_file": lambda: store.put_file("file", source),
            "batch": lambda: in_a_batch(store, source),
            "replace": lambda: [store.put("old/1", noise(3_000, n)) for n in range(2_000)],
            "save": lambda: store.save("saved", {"x": list(range(100_000))}),
            "pin": lambda: list(map(store.pin, (f"old/{n % 100}" for n in range(50_000)))),
        }
        for what, write in writes.items():
            with pytest.raises(FullError, match=r"the disk of .*store is full"):
                write()
            for entry in store.entries():
                if entry.name not in kept or entry.name == "old/1":
                    data = store.get(entry.name)
                    assert data is not None, what
                    kept[entry.name] = data
            assert not any((store.path / "tmp").iterdir()), what
        with pytest.warns(
            CacheWarning, match=r"'computed' was computed and is not kept: the disk of .* full"
        ):
            assert store.get_or_compute("computed", lambda: noise(300_000, 5)) == noise(300_000, 5)
        assert "computed" not in store
        assert len(store.verify().bad) == 0
        whole(store, kept)
        filler.unlink()
        store.put("fits again", noise(100_000))
        whole(store, kept | {"fits again": noise(100_000)})
        assert doctor.examine(store.path) == []
    figure(f"full disk: {len(writes)} kinds of writes ended in FullError, {len(kept)} entries as they were")


@pytest.mark.parametrize("size", [3_000, 40_000], ids=["packed", "loose"])
def test_gc_makes_room_on_a_disk_without_a_free_byte(disk: Path, size: int, figure: Figure) -> None:
    count = 6_000 if size == 3_000 else 800
    with Store(disk / "store", memory=0) as store:
        store.put_many((f"n/{n:05d}", noise(size, n)) for n in range(count))
        for n in range(count):
            if n % 20 == 0:
                store.pin(f"n/{n:05d}")
    fill_up(disk)
    with Store(disk / "store", memory=0) as store:  # SQLite itself needs room to open its file
        assert free(disk) == 0
        assert store.get("n/00007") == noise(size, 7)
        before = store.stat().stored
        plan = store.gc(max_size=before // 20, grace=0)
        assert len(plan.evicted) > count // 2
        assert free(disk) > before // 3
        assert (store.path / "ballast").stat().st_size > 0
        whole(store, {f"n/{n:05d}": noise(size, n) for n in range(0, count, 20)})
        store.put("fits again", noise(100_000))
    figure(
        f"gc at 0 bytes free: {len(plan.evicted)} entries of {size} bytes "
        f"gone, {free(disk):,} bytes free after it"
    )


def test_gc_that_has_no_room_to_rewrite_a_pack_does_all_else_and_says_so(disk: Path) -> None:
    with Store(disk / "store", memory=0) as store:
        store.put_many((f"n/{n:05d}", noise(3_000, n)) for n in range(6_000))
        large = [Path(payload(store, store.put(f"large/{n}", noise(300_000, n)).name)[0]) for n in range(5)]
        fill_up(disk)
        store.delete_many(f"n/{n:05d}" for n in range(3_500))
        store.delete_many(f"large/{n}" for n in range(5))
        with pytest.raises(FullError, match=r"rewriting pack 1 .* takes .* for a moment; all else is done"):
            store.gc(grace=0)
        assert not any(path.exists() for path in large)
        assert store.gc(max_size=3_000_000, grace=0).packs == [1]  # the remaining records fit by now
        assert free(disk) > 10_000_000
        whole(
            store, {f"n/{n:05d}": noise(3_000, n) for n in range(5_990, 6_000) if store.entry(f"n/{n:05d}")}
        )


def test_names_are_removed_on_a_disk_without_a_free_byte(disk: Path, figure: Figure) -> None:
    with Store(disk / "store", memory=0) as store:
        store.put_many((f"n/{n:05d}", noise(3_000, n)) for n in range(4_000))
        fill_up(disk)
        for n in range(500):
            assert store.delete(f"n/{n:05d}")
        assert store.delete_many(f"n/{n:05d}" for n in range(500, 3_500)) == 3_000
        assert store.gc(grace=0).blobs == 3_500
        assert free(disk) > 5_000_000
        whole(store, {f"n/{n:05d}": noise(3_000, n) for n in range(3_500, 4_000)})
    figure(f"3,500 names removed at 0 bytes free, then gc: {free(disk):,} bytes free")


def test_the_ballast_is_made_again_when_there_is_room(disk: Path) -> None:
    with Store(disk / "store", memory=0) as store:
        ballast = store.path / "ballast"
        assert ballast.stat().st_size == BALLAST_BYTES
        assert ballast.stat().st_mode & 0o777 == 0o600
        store.put_many((f"n/{n}", noise(40_000, n)) for n in range(100))
        ballast.unlink()
        filler = fill_up(disk)
        with pytest.raises(FullError, match="free some space"):
            store.delete_many(f"n/{n}" for n in range(100))
        filler.unlink()
        store.gc()
        assert ballast.stat().st_size == BALLAST_BYTES


def test_damage_found_on_a_full_disk_is_a_miss_and_recorded_later(disk: Path) -> None:
    with Store(disk / "store", memory=0) as store:
        store.put("bad", noise(40_000), codec="none")
        store.put("good", noise(40_001), codec="none")
        (store.path / "ballast").unlink()
        filler = fill_up(disk)
        found = store.index.find("bad")
        assert found is not None
        path = Path(store.objects.loose.path(found.blob.digest, "none"))
        path.chmod(0o600)
        with path.open("r+b") as file:
            file.write(b"damage")
        assert store.get("bad") is None
        assert store.get("good") == noise(40_001)
        filler.unlink()
        assert store.get("bad") is None
        assert store.stat().corrupt >= 1
        store.put("bad", noise(40_000))
        whole(store, {"bad": noise(40_000), "good": noise(40_001)})


def test_a_rebuild_on_a_full_disk_fails_whole_and_succeeds_with_room(disk: Path, figure: Figure) -> None:
    kept = {f"n/{n:05d}": text(2_000, n) + b"%d" % n for n in range(4_000)}
    with Store(disk / "store", memory=0) as store:
        store.put_many(kept.items())
    path = disk / "store"
    (path / "ballast").unlink()
    index = path / "index.sqlite"
    with index.open("r+b") as file:
        file.write(bytes(4096))
    filler = fill_up(disk)
    refused = 0
    for _ in range(2):
        with pytest.raises(FullError, match=r"the disk of .* is full"):
            doctor.rebuild_index(path)
        refused += 1
    filler.unlink()
    doctor.rebuild_index(path)
    with Store(path, memory=0) as store:
        whole(store, kept)
    assert doctor.examine(path) == []
    figure(f"rebuild on a full disk: {refused} times a clear error, then {len(kept)} entries back")


def test_a_store_that_init_makes_has_its_ballast(disk: Path) -> None:
    subprocess.run([sys.executable, "-m", "castore", "--store", disk / "store", "init"], check=True)
    assert (disk / "store" / "ballast").stat().st_size == BALLAST_BYTES


@pytest.mark.parametrize("ballast", [True, False], ids=["ballast", "no ballast"])
def test_doctor_takes_a_full_disk_for_no_damage(disk: Path, ballast: bool) -> None:
    path, kept = disk / "store", {f"n/{n}": noise(3_000, n) for n in range(50)}
    with Store(path, memory=0) as store:
        store.put_many(kept.items())
    if not ballast:
        (path / "ballast").unlink()
    filler = fill_up(disk)
    if ballast:
        assert doctor.examine(path) == []
        found, rebuilt = doctor.rebuild_index(path)
        assert (found, rebuilt.entries) == ([], len(kept))
        assert free(disk) < BALLAST_BYTES
        with Store(path, memory=0) as store:
            whole(store, kept)
    else:
        for look in (doctor.examine, doctor.rebuild_index):
            with pytest.raises(FullError, match=r"the disk of .*store is full; free some space there"):
                look(path)
    assert not any((path / "quarantine").iterdir())
    filler.unlink()
    with Store(path, memory=0) as store:
        whole(store, kept)
    assert doctor.examine(path) == []


def test_a_damaged_index_is_rebuilt_on_a_full_disk_with_the_ballast(disk: Path) -> None:
    path, kept = disk / "store", {f"n/{n}": noise(3_000, n) for n in range(50)}
    with Store(path, memory=0) as store:
        store.put_many(kept.items())
    index = path / "index.sqlite"
    damaged = bytes(4096) + index.read_bytes()[4096:]
    index.write_bytes(damaged)
    fill_up(disk)
    (finding,), rebuilt = doctor.rebuild_index(path)
    assert "it is kept as" in finding.what
    assert rebuilt.entries == len(kept)
    assert [file.read_bytes() for file in (path / "quarantine").iterdir()] == [damaged]
    with Store(path, memory=0) as store:
        whole(store, kept)


def test_a_rebuild_that_fails_puts_the_damaged_index_back(disk: Path) -> None:
    path = disk / "store"
    with Store(path, memory=0) as store:
        store.put_many((f"n/{n}", noise(3_000, n)) for n in range(50))
    index = path / "index.sqlite"
    damaged = bytes(4096) + index.read_bytes()[4096:]
    index.write_bytes(damaged)
    (path / "ballast").unlink()
    filler = fill_up(disk)
    with pytest.raises(FullError, match=r"the disk of .* is full"):
        doctor.rebuild_index(path)
    assert index.read_bytes() == damaged
    assert [file.name for file in path.glob("index.sqlite*")] == [index.name]
    assert not any((path / "quarantine").iterdir())
    filler.unlink()
    (finding,), rebuilt = doctor.rebuild_index(path)
    assert "it is kept as" in finding.what
    assert rebuilt.entries == 50
    assert doctor.examine(path) == []


def test_a_mount_over_a_full_disk_serves_and_comes_and_goes(disk: Path) -> None:
    kept = {f"n/{n}": mixed(300_000 if n % 7 == 0 else 2_000, n) for n in range(60)}
    with Store(disk / "store", memory=0) as store:
        store.put_many(kept.items())
        with castore_fuse.mounted(store) as root:
            fill_up(disk)
            assert {name: (root / name).read_bytes() for name in kept} == kept
    with castore_fuse.mounted(disk / "store") as root:
        assert {name: (root / name).read_bytes() for name in kept} == kept
        assert len(list((root / "n").iterdir())) == len(kept)
    with Store(disk / "store", memory=0) as store:
        whole(store, kept)


def test_a_mount_that_meets_a_full_disk_says_so_in_a_sentence(disk: Path, tmp_path: Path) -> None:
    """The daemon writes a heartbeat to the index now and then; here at every scan, to save waiting."""
    kept = mixed(300_000)
    with Store(disk / "store", memory=0) as store:
        store.put("n", kept)
    program = (
        "import sys\nfrom castore_fuse import follower\nfrom castore_fuse.__main__ import main\n"
        "follower.HEARTBEAT_SECONDS = 0.0\nsys.exit(main(sys.argv[1:]))"
    )
    words = ["--store", disk / "store", "--cache-size", "1000000", tmp_path / "mnt"]
    (tmp_path / "mnt").mkdir()
    log = tmp_path / "log"
    with (
        log.open("wb") as errors,
        subprocess.Popen([sys.executable, "-c", program, *map(str, words)], stderr=errors) as daemon,
    ):
        try:
            _until((tmp_path / "mnt/n").exists)
            filler = fill_up(disk)
            _until(lambda: b"is full" in log.read_bytes())
            assert (tmp_path / "mnt/n").read_bytes() == kept
            filler.unlink()
        finally:
            subprocess.run(["umount", "-l", tmp_path / "mnt"])
        assert daemon.wait(60) == 0
    told = log.read_text()
    assert "Traceback" not in told, told
    (line,) = [line for line in told.splitlines() if "is full" in line]
    assert line.endswith("free some space there; the mount goes on, and tries again")


def _until(is_so: Callable[[], bool]) -> None:
    until = time.monotonic() + 120
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.01)


_LIMITED = """
import os, resource, sys
from castore import FullError, Store

store = Store(sys.argv[1], memory=0)
store.put("before", b"1")
resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))
said = set()
for number in range(100):
    try:
        store.put(str(number), os.urandom(int(sys.argv[2])))
    except FullError as error:
        said.add(str(error))
print(*said)
assert store.get("before") == b"1"
"""


@pytest.mark.parametrize("size", [400, 5_000, 400_000], ids=["index", "pack", "loose"])
def test_a_limit_on_the_size_of_files_is_a_full_disk(tmp_path: Path, size: int) -> None:
    """As a quota, it gives another errno than a full disk, and SQLite says nothing but "disk I/O error"."""
    command = [sys.executable, "-c", _LIMITED, os.fspath(tmp_path / "store"), str(size)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "the limit on the size of files (`ulimit -f`" in ended.stdout
    with Store(tmp_path / "store") as store:
        assert store.get("before") == b"1"
        assert not store.verify().bad


@pytest.mark.parametrize(
    ("number", "words"),
    [(errno.ENOSPC, "the disk of /s is full"), (errno.EDQUOT, "the quota for the disk of /s is used up")],
)
def test_a_quota_that_is_used_up_is_a_full_disk(number: int, words: str) -> None:
    error = full_disk_error(Path("/s"), OSError(number, os.strerror(number)))
    assert str(error).startswith(words)
    assert full_disk_error(Path("/s"), OSError(errno.EIO, "Input/output error")) is None
