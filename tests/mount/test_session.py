"""Real mounts of a toy file system: the promises of a session, with no store behind it."""

from __future__ import annotations

import errno
import hashlib
import mmap
import os
import random
import stat
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from castore.system.mount_table import FSTYPE
from castore_fuse import mountpoints
from castore_fuse.lifecycle import mounted
from tests.mount.conftest import until
from tests.mount.toys import PATTERN, Toy, command, toy_at


@pytest.fixture(params=["default", "pinned"])
def toy(request: pytest.FixtureRequest, mountpoint: Path) -> Iterator[Toy]:
    with toy_at(mountpoint, *(["--pinned"] if request.param == "pinned" else [])) as toy:
        yield toy


# --- files ---------------------------------------------------------------------------------------


def test_files_read_seek_and_map_like_plain_ones(toy: Toy) -> None:
    assert (toy.root / "hello.txt").read_bytes() == b"hello\n"
    assert (toy.root / "empty").read_bytes() == b""
    with (toy.root / "pattern").open("rb", buffering=0) as file:
        for offset in [
            *random.Random(0).sample(range(len(PATTERN)), 64),
            len(PATTERN) - 1,
            len(PATTERN),
            2 << 20,
        ]:
            file.seek(offset)
            assert file.read(5000) == PATTERN[offset : offset + 5000]
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            assert hashlib.sha256(mapped).digest() == hashlib.sha256(PATTERN).digest()


def test_direct_io_reads_the_same_bytes(toy: Toy) -> None:
    page_aligned = mmap.mmap(-1, 1 << 20)
    descriptor = os.open(toy.root / "pattern", os.O_RDONLY | os.O_DIRECT)
    try:
        assert os.readv(descriptor, [page_aligned]) == len(PATTERN)
    finally:
        os.close(descriptor)
    assert page_aligned[: len(PATTERN)] == PATTERN


def test_many_threads_read_the_right_bytes_at_once(mountpoint: Path) -> None:
    with toy_at(mountpoint, "--big", str(8 << 20)) as toy:
        block = b"".join(b"%015d\n" % n for n in range((1 << 20) // 16))

        def reads(seed: int) -> bool:
            chance = random.Random(seed)
            with (toy.root / "big").open("rb", buffering=0) as file:
                for _ in range(200):
                    offset, size = chance.randrange(8 << 20), chance.randrange(1, 70_000)
                    file.seek(offset)
                    start = offset % len(block)
                    want = (block + block)[start : start + min(size, (8 << 20) - offset)]
                    if file.read(size) != want:
                        return False
            return True

        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(reads, range(8)))


def test_stat_shows_what_the_file_system_says(toy: Toy) -> None:
    found = (toy.root / "pattern").stat()
    assert stat.S_IMODE(found.st_mode) == 0o444
    assert stat.S_ISREG(found.st_mode)
    assert (found.st_size, found.st_nlink, found.st_uid) == (len(PATTERN), 1, os.getuid())
    assert found.st_mtime_ns == 1_700_000_000_123_456_789
    assert found.st_blocks == (len(PATTERN) + 511) // 512
    df = os.statvfs(toy.root)
    assert (df.f_blocks, df.f_bavail, df.f_files, df.f_frsize, df.f_namemax) == (1000, 250, 77, 4096, 255)


def test_large_folder_lists_every_name_once(mountpoint: Path) -> None:
    names = {f"shard-{n:06d}.tar" for n in range(20_000)}
    with toy_at(mountpoint, "--many", "20000") as toy:
        listed = os.listdir(toy.root / "many")
        assert len(listed) == len(names)
        assert set(listed) == names
        with os.scandir(toy.root / "many") as entries:
            assert all(entry.is_file() and entry.stat().st_size == 1 for entry in entries)
        found = subprocess.run(
            ["find", ".", "-size", "1c"], cwd=toy.root / "many", capture_output=True, text=True
        )
        assert {line[2:] for line in found.stdout.splitlines()} == names


def test_the_kernel_gives_back_every_reference_it_was_given(mountpoint: Path) -> None:
    with toy_at(mountpoint, "--many", "3000") as toy:

        def listed() -> int:
            subprocess.run(["ls", "-lR", toy.root], stdout=subprocess.DEVNULL, check=True)
            return toy.count("references")

        # Again where another test has the kernel drop its caches meanwhile: they are the whole machine's.
        until(lambda: listed() > 3000)
        # Reading /proc/sys/vm/drop_caches is for root only. A dropped inode is a reference given back.
        if os.geteuid() != 0:
            pytest.skip("dropping the kernel's caches needs root")
        Path("/proc/sys/vm/drop_caches").write_text("2")
        until(lambda: toy.count("references") == 0)


def test_xattrs_answer_and_say_what_is_missing(toy: Toy) -> None:
    assert os.listxattr(toy.root / "pattern") == ["user.castore.length"]
    assert os.getxattr(toy.root / "pattern", "user.castore.length") == b"1000003"
    assert os.listxattr(toy.root) == []
    for name, error in [("user.other", errno.ENODATA), ("security.selinux", errno.ENOTSUP)]:
        with pytest.raises(OSError) as caught:  # noqa: PT011 (the errno is checked below)
            os.getxattr(toy.root / "pattern", name)
        assert caught.value.errno == error


# --- names that change -----------------------------------------------------------------------------


def test_open_handle_keeps_its_bytes_when_its_name_is_repointed(toy: Toy) -> None:
    old = "old " * 5000
    toy.order(f"point sample {old}")
    with (toy.root / "sample").open("rb", buffering=0) as held:
        assert held.read(4) == b"old "
        mapped = mmap.mmap(held.fileno(), 0, access=mmap.ACCESS_READ)
        toy.order("point sample new")
        assert (toy.root / "sample").read_bytes() == b"new"
        assert (toy.root / "sample").stat().st_size == 3
        assert os.fstat(held.fileno()).st_size == len(old)
        held.seek(0)
        assert held.read() == old.encode()
        assert mapped[:] == old.encode()
        mapped.close()


def test_names_that_come_and_go_show_in_listings_the_kernel_keeps(toy: Toy) -> None:
    before = set(os.listdir(toy.root))
    assert "fresh" not in before
    toy.order("point fresh 1")
    assert set(os.listdir(toy.root)) == before | {"fresh"}
    toy.order("remove fresh")
    assert set(os.listdir(toy.root)) == before
    assert not (toy.root / "fresh").exists()


def test_removed_name_stays_readable_through_its_open_handle(toy: Toy) -> None:
    toy.order("point gone still here")
    with (toy.root / "gone").open("rb") as held:
        toy.order("remove gone")
        assert not (toy.root / "gone").exists()
        assert held.read() == b"still here"


# --- what the kernel need not ask ------------------------------------------------------------------


def test_default_mode_holds_a_handle_for_each_open_file(mountpoint: Path) -> None:
    with toy_at(mountpoint) as toy:
        with (toy.root / "hello.txt").open("rb"), (toy.root / "hello.txt").open("rb"):
            assert toy.count("handles") == 2
        until(lambda: toy.count("handles") == 0)
        assert toy.count("opens") == 2


def test_pinned_mode_asks_for_one_open_at_most(mountpoint: Path) -> None:
    with toy_at(mountpoint, "--pinned") as toy:
        for _ in range(5):
            assert (toy.root / "hello.txt").read_bytes() == b"hello\n"
            assert (toy.root / "pattern").read_bytes() == PATTERN
        assert toy.count("opens") == 1


def test_defect_in_a_handler_is_an_io_error_and_the_mount_lives(toy: Toy) -> None:
    for _ in range(20):
        with pytest.raises(OSError, match="Input/output error"):
            (toy.root / "broken").stat()
    assert (toy.root / "hello.txt").read_bytes() == b"hello\n"


def test_mount_is_read_only_and_trusts_no_file(toy: Toy) -> None:
    flags = os.statvfs(toy.root).f_flag
    assert flags & os.ST_RDONLY
    assert flags & os.ST_NOSUID
    assert flags & os.ST_NODEV
    for change in (
        lambda: (toy.root / "hello.txt").open("r+"),
        lambda: (toy.root / "new").write_bytes(b""),
        (toy.root / "hello.txt").unlink,
        (toy.root / "new").mkdir,
        lambda: os.setxattr(toy.root / "hello.txt", "user.x", b""),
    ):
        with pytest.raises(OSError) as caught:  # noqa: PT011
            change()
        assert caught.value.errno == errno.EROFS


def test_hostile_store_path_is_shown_whole_in_the_mount_table(mountpoint: Path) -> None:
    source = "castore:/data/a,allow_other,b\\c d"
    with mounted(command("--source", source), mountpoint):
        found = mountpoints.mount_at(mountpoint)
        assert found is not None
        assert (found.source, found.fstype) == (source, FSTYPE)
        options = Path("/proc/self/mountinfo").read_text()
        line = next(line for line in options.splitlines() if os.fspath(mountpoint) in line)
        assert "allow_other" not in line.rpartition(" ")[2]
