"""Real mounts of a toy file system: what a session and the mount's life cycle promise, with no store behind them."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import mmap
import os
import pwd
import random
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from castore.errors import CastoreError
from castore_fuse import mountpoints
from castore_fuse.daemon import Record
from castore_fuse.errors import BusyError, MountError
from castore_fuse.mount import check_fuse, mount_background, mounted, prepare_mountpoint, umount

TOYFS = Path(__file__).with_name("toyfs.py")
PATTERN = b"".join(b"%015d\n" % n for n in range(1_000_003 // 16 + 1))[:1_000_003]

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module", autouse=True)
def _can_mount() -> None:
    try:
        check_fuse()
    except CastoreError as error:
        pytest.skip(str(error))


def command(*arguments: str) -> list[str]:
    return [sys.executable, os.fspath(TOYFS), *arguments]


@pytest.fixture
def mountpoint(tmp_path: Path) -> Iterator[Path]:
    """An empty folder that is free again after the test, whatever the test did to it."""
    path = tmp_path / "mnt"
    path.mkdir()
    yield path
    while mountpoints.mount_at(path):
        mountpoints.detach(path, lazy=True)


class Toy:
    """A mounted toy file system that takes orders."""

    def __init__(self, root: Path, orders: Path) -> None:
        self.root = root
        self._orders = orders
        self._given = 0

    def order(self, line: str) -> None:
        self._given += 1
        self._orders.write_text(line + "\n")
        done = self._orders.with_suffix(".done")
        until(lambda: done.exists() and done.read_text() == str(self._given))

    def count(self, what: str) -> int:
        return int(os.getxattr(self.root, f"user.castore.{what}"))


@contextlib.contextmanager
def toy_at(mountpoint: Path, *arguments: str) -> Iterator[Toy]:
    orders = mountpoint.with_name("orders")
    os.mkfifo(orders)
    with mounted(command("--orders", os.fspath(orders), *arguments), mountpoint) as root:
        yield Toy(root, orders)


@pytest.fixture(params=["default", "pinned"])
def toy(request: pytest.FixtureRequest, mountpoint: Path) -> Iterator[Toy]:
    with toy_at(mountpoint, *(["--pinned"] if request.param == "pinned" else [])) as toy:
        yield toy


def until(true: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.005)


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
        subprocess.run(["ls", "-lR", toy.root], stdout=subprocess.DEVNULL, check=True)
        assert toy.count("references") > 3000
        # Reading /proc/sys/vm/drop_caches is for root only; an inode dropped is a reference given back.
        if os.geteuid() != 0:
            pytest.skip("dropping the kernel's caches needs root")
        Path("/proc/sys/vm/drop_caches").write_text("2")
        until(lambda: toy.count("references") == 0)


def test_xattrs_answer_and_say_what_is_missing(toy: Toy) -> None:
    assert os.listxattr(toy.root / "pattern") == ["user.castore.length"]
    assert os.getxattr(toy.root / "pattern", "user.castore.length") == b"1000003"
    assert os.listxattr(toy.root) == []
    for name, error in [("user.other", errno.ENODATA), ("security.selinux", errno.ENOTSUP)]:
        with pytest.raises(OSError) as caught:  # noqa: PT011 (the errno is looked at below)
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
        assert (found.source, found.fstype) == (source, mountpoints.FSTYPE)
        options = Path("/proc/self/mountinfo").read_text()
        line = next(line for line in options.splitlines() if os.fspath(mountpoint) in line)
        assert "allow_other" not in line.rpartition(" ")[2]


# --- the life of a mount ---------------------------------------------------------------------------


def test_umount_returns_when_the_daemon_is_gone(mountpoint: Path, tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    pid = mount_background(command("--record", os.fspath(record)), mountpoint, log_path=tmp_path / "log")
    written = Record.read(record)
    assert written is not None
    assert (written.pid, written.mountpoint, written.alive()) == (pid, os.fspath(mountpoint), True)
    assert (mountpoint / "hello.txt").read_text() == "hello\n"
    umount(mountpoint, record_path=record)
    assert not written.alive()
    assert os.listdir(mountpoint) == []
    assert not record.exists()
    assert "unmounted from" in (tmp_path / "log").read_text()


@pytest.mark.parametrize("by", ["umount", "fusermount3"])
def test_daemon_ends_when_others_unmount(by: str, mountpoint: Path, tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    mount_background(command("--record", os.fspath(record)), mountpoint, log_path=tmp_path / "log")
    written = Record.read(record)
    assert written is not None
    subprocess.run([by, *(["-u"] if by == "fusermount3" else []), mountpoint], check=True)
    until(lambda: not written.alive())


def test_killed_daemon_is_cleared_by_the_next_mount(mountpoint: Path, tmp_path: Path) -> None:
    pid = mount_background(command(), mountpoint, log_path=tmp_path / "log")
    os.kill(pid, signal.SIGKILL)
    until(lambda: mountpoints.is_dead(mountpoint))
    assert prepare_mountpoint(mountpoint, tmp_path / "store") == mountpoint
    with mounted(command(), mountpoint):
        assert (mountpoint / "hello.txt").read_text() == "hello\n"


def test_killed_daemon_is_cleared_by_umount(mountpoint: Path, tmp_path: Path) -> None:
    pid = mount_background(command(), mountpoint, log_path=tmp_path / "log")
    os.kill(pid, signal.SIGKILL)
    until(lambda: mountpoints.is_dead(mountpoint))
    umount(mountpoint)
    assert os.listdir(mountpoint) == []


def test_busy_mount_stays_and_umount_names_who_uses_it(mountpoint: Path, tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    mount_background(command("--record", os.fspath(record)), mountpoint, log_path=tmp_path / "log")
    with (mountpoint / "hello.txt").open() as held:
        with pytest.raises(BusyError, match=rf"in use by .*pid {os.getpid()}, .*hello\.txt"):
            umount(mountpoint, record_path=record)
        assert held.read() == "hello\n"
    mapping = (mountpoint / "pattern").open("rb")
    with mapping, mmap.mmap(mapping.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        mapping.close()
        with pytest.raises(BusyError, match=rf"pid {os.getpid()}, .*pattern"):
            umount(mountpoint, record_path=record)
        assert mapped[:16] == PATTERN[:16]
    umount(mountpoint, record_path=record)


def test_sigterm_unmounts_and_serves_open_handles_to_their_end(mountpoint: Path, tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    pid = mount_background(command("--record", os.fspath(record)), mountpoint, log_path=tmp_path / "log")
    written = Record.read(record)
    assert written is not None
    with (mountpoint / "pattern").open("rb", buffering=0) as held:
        held.read(1)
        os.kill(pid, signal.SIGTERM)
        until(lambda: mountpoints.mount_at(mountpoint) is None)
        held.seek(900_000)
        assert held.read(1000) == PATTERN[900_000:901_000]
    until(lambda: not written.alive(), seconds=2.0)


def test_second_sigterm_does_not_wait_for_open_handles(mountpoint: Path, tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    pid = mount_background(command("--record", os.fspath(record)), mountpoint, log_path=tmp_path / "log")
    written = Record.read(record)
    assert written is not None
    with (mountpoint / "pattern").open("rb", buffering=0):
        os.kill(pid, signal.SIGTERM)
        until(lambda: mountpoints.mount_at(mountpoint) is None)
        os.kill(pid, signal.SIGTERM)
        until(lambda: not written.alive(), seconds=2.0)


def test_mount_of_a_killed_program_goes_away(mountpoint: Path) -> None:
    program = (
        "import sys, os, signal\nfrom pathlib import Path\nfrom castore_fuse.mount import mounted\n"
        "with mounted(sys.argv[2:], sys.argv[1]):\n    print('mounted', flush=True)\n    signal.pause()\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", program, mountpoint, *command()],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    with child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"mounted\n"
        assert (mountpoint / "hello.txt").exists()
        child.kill()
    until(lambda: mountpoints.mount_at(mountpoint) is None)


def test_fork_that_leaves_the_block_takes_no_mount_away(mountpoint: Path) -> None:
    mount = mounted(command(), mountpoint)
    with mount as root:
        if (child := os.fork()) == 0:
            try:
                mount.__exit__(None, None, None)
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        assert (root / "hello.txt").read_text() == "hello\n"


def test_temporary_mountpoint_is_removed_with_its_mount() -> None:
    with mounted(command()) as root:
        assert (root / "hello.txt").read_text() == "hello\n"
    assert not root.exists()


# --- refusals --------------------------------------------------------------------------------------


def test_daemon_that_cannot_mount_says_why(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    with pytest.raises(MountError, match=r"cannot mount at .*missing: .*No such file or directory"):
        mount_background(command(), missing, log_path=tmp_path / "log")


def test_daemon_that_dies_at_once_is_reported(mountpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(MountError, match=r"ended with exit code 3 before it was ready; see .*log"):
        mount_background([sys.executable, "-c", "raise SystemExit(3)"], mountpoint, log_path=tmp_path / "log")


def test_daemon_that_never_gets_ready_is_ended(mountpoint: Path, tmp_path: Path) -> None:
    sleeper = [sys.executable, "-c", "import time; time.sleep(60)"]
    started = time.monotonic()
    with pytest.raises(MountError, match="did not get ready in time"):
        mount_background(sleeper, mountpoint, log_path=tmp_path / "log", timeout=0.5)
    assert time.monotonic() - started < 10


def test_mountpoint_that_overlaps_its_store_is_refused(tmp_path: Path) -> None:
    store = tmp_path / "store"
    (store / "inside").mkdir(parents=True)
    (tmp_path / "link").symlink_to(store)
    for overlap in (store, store / "inside", tmp_path, tmp_path / "link" / "inside"):
        with pytest.raises(MountError, match="must lie apart"):
            prepare_mountpoint(overlap, store)


def test_mountpoint_must_be_an_empty_folder(tmp_path: Path) -> None:
    store = tmp_path / "store"
    (tmp_path / "file").write_text("")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thing").write_text("")
    with pytest.raises(MountError, match="is not a folder"):
        prepare_mountpoint(tmp_path / "file", store)
    with pytest.raises(MountError, match="is not a folder"):
        prepare_mountpoint(tmp_path / "file" / "below", store)
    with pytest.raises(MountError, match=r"is not empty .'thing' is in it.*choose an empty folder"):
        prepare_mountpoint(tmp_path / "full", store)
    assert prepare_mountpoint(tmp_path / "new" / "folder", store).is_dir()


def test_second_mount_at_the_same_place_is_refused(mountpoint: Path, tmp_path: Path) -> None:
    with (
        mounted(command(), mountpoint),
        pytest.raises(MountError, match=r"castore:toy is mounted at .* already; run `castore umount"),
    ):
        prepare_mountpoint(mountpoint, tmp_path / "store")


def test_umount_touches_no_mount_but_ours(tmp_path: Path) -> None:
    with pytest.raises(MountError, match="nothing is mounted at"):
        umount(tmp_path)
    with pytest.raises(MountError, match="is no castore but proc"):
        umount("/proc")


# --- ordinary users --------------------------------------------------------------------------------


@pytest.fixture
def anybody() -> Iterator[tuple[Path, str]]:
    """A folder of the user nobody, and that name. /dev/fuse is as open as distributions ship it."""
    if os.geteuid() != 0:
        pytest.skip("becoming another user needs root")
    folder = Path(tempfile.mkdtemp(prefix="castore-nobody-"))
    user = pwd.getpwnam("nobody")
    os.chown(folder, user.pw_uid, user.pw_gid)
    mode = stat.S_IMODE(os.stat("/dev/fuse").st_mode)
    os.chmod("/dev/fuse", 0o666)
    yield folder, user.pw_name
    os.chmod("/dev/fuse", mode)
    if mountpoints.mount_at(folder / "mnt"):
        mountpoints.detach(folder / "mnt", lazy=True)
    shutil.rmtree(folder)


PROGRAM_OF_ANYBODY = """
import os, signal, sys, time
from pathlib import Path
from castore_fuse import mountpoints
from castore_fuse.errors import BusyError
from castore_fuse.mount import check_fuse, mount_background, prepare_mountpoint, umount

check_fuse()
folder, command = Path(sys.argv[1]), sys.argv[2:]
path = prepare_mountpoint(folder / "mnt", folder / "store")
pid = mount_background(command, path, log_path=folder / "log")
assert (path / "hello.txt").read_text() == "hello\\n"
with (path / "hello.txt").open():
    try:
        umount(path)
    except BusyError as error:
        assert str(os.getpid()) in str(error), error
    else:
        raise AssertionError("a busy mount was taken away")
umount(path)
assert not list(path.iterdir())

pid = mount_background(command, path, log_path=folder / "log")
os.kill(pid, signal.SIGKILL)
while not mountpoints.is_dead(path):
    time.sleep(0.01)
prepare_mountpoint(path, folder / "store")
pid = mount_background(command, path, log_path=folder / "log")
assert (path / "hello.txt").read_text() == "hello\\n"
os.kill(pid, signal.SIGTERM)
while mountpoints.mount_at(path):
    time.sleep(0.01)
print("all well")
"""


def test_ordinary_user_mounts_remounts_and_unmounts(anybody: tuple[Path, str]) -> None:
    folder, user = anybody
    # The one capability lets that user run a Python that lies in root's home; it helps with no mount.
    become = ["setpriv", "--reuid", user, "--regid", "nogroup", "--clear-groups"]
    become += ["--inh-caps", "+dac_read_search", "--ambient-caps", "+dac_read_search"]
    done = subprocess.run(
        [*become, sys.executable, "-c", PROGRAM_OF_ANYBODY, folder, *command()],
        cwd="/",
        capture_output=True,
        text=True,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert (done.returncode, done.stdout) == (0, "all well\n"), done.stderr


def test_other_users_cannot_look_into_a_private_mount(anybody: tuple[Path, str]) -> None:
    folder, user = anybody
    mountpoint = folder / "mnt"
    mountpoint.mkdir()
    for arguments, code in (((), 1), (("--allow-other",), 0)):
        with mounted(command(*arguments), mountpoint):
            done = subprocess.run(
                ["cat", mountpoint / "hello.txt"], user=user, extra_groups=[], capture_output=True
            )
            assert done.returncode == code
