"""Mounting a store: start, kill, end and refuse; a mount's other contents; and its users."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import castore_fuse
from castore import Store
from castore.errors import InvalidNameError, InvalidValueError
from castore.objects.codecs import FRAME_SIZE
from castore.system.mount_table import mounts
from castore_fuse import BusyError, MountError, mountpoints
from castore_fuse.daemon import DaemonRecord
from tests.helpers import mixed, noise, text
from tests.mount.conftest import forget_pages, until


def daemon(store: Store) -> DaemonRecord:
    """The record of the process that serves the one background mount of a store."""
    record = DaemonRecord.read(next((store.path / "locks").glob("mount-*.json")))
    assert record is not None
    return record


@pytest.fixture
def background(store: Store, mountpoint: Path) -> Iterator[Path]:
    """The store, mounted as `castore mount` does it."""
    store.put("a/b", b"content")
    yield castore_fuse.mount(store, mountpoint)
    if mountpoints.mount_at(mountpoint):
        castore_fuse.umount(mountpoint)


# --- the life of a mount ---------------------------------------------------------------------------


def test_umount_leaves_no_mount_no_process_and_no_record(background: Path, store: Store) -> None:
    served_by = daemon(store)
    assert (background / "a/b").read_bytes() == b"content"
    assert store.stat().mounts == [str(background)]
    castore_fuse.umount(background)
    assert not served_by.alive()
    assert mountpoints.mount_at(background) is None
    assert os.listdir(background) == []
    assert list((store.path / "locks").glob("mount-*.json")) == []
    assert store.stat().mounts == []


def test_killed_daemon_needs_no_manual_step(background: Path, store: Store) -> None:
    assert (
        background / "a/b"
    ).read_bytes() == b"content"  # from its first answer on, the kernel closes without asking
    with (background / "a/b").open("rb", buffering=0) as held:
        for _ in range(2):
            first = daemon(store)
            os.kill(first.pid, signal.SIGKILL)
            until(lambda: not first.alive() and mountpoints.is_dead(background))  # noqa: B023
            assert castore_fuse.mount(store, background) == background
            assert (background / "a/b").read_bytes() == b"content"
            assert daemon(store).pid != first.pid
        assert len([mount for mount in mounts() if mount.mountpoint == background]) == 1
        forget_pages(held.fileno())
        with pytest.raises(OSError) as caught:  # noqa: PT011
            held.read()
        assert caught.value.errno in (errno.ENOTCONN, errno.ECONNABORTED)
    assert store.stat().mounts == [str(background)]


def test_umount_of_a_busy_mount_says_who_and_changes_nothing(background: Path) -> None:
    with (
        (background / "a/b").open("rb") as held,
        pytest.raises(BusyError, match=rf"pid {os.getpid()}, .*a/b"),
    ):
        castore_fuse.umount(background)
    assert held.closed
    assert (background / "a/b").read_bytes() == b"content"
    castore_fuse.umount(background)


@pytest.mark.skipif(os.geteuid() != 0, reason="another user does not see all processes")
def test_umount_of_a_mount_whose_daemon_does_not_answer_names_no_hidden_process(
    background: Path, store: Store
) -> None:
    """Regression: "a process that you may not see", which root does not have."""
    pid = daemon(store).pid
    os.kill(pid, signal.SIGSTOP)
    try:
        with subprocess.Popen(["cat", background / "a/new"], stderr=subprocess.DEVNULL) as reading:
            syscall = Path(f"/proc/{reading.pid}/stack")
            until(lambda: "fuse" in syscall.read_text())  # it waits for the daemon
            with pytest.raises(
                BusyError, match=r"a request that is under way; wait for it, or end the mount's"
            ):
                mountpoints.detach(background)
            os.kill(pid, signal.SIGCONT)
    finally:
        os.kill(pid, signal.SIGCONT)
    castore_fuse.umount(background)


def test_inodes_are_the_same_everywhere_and_after_a_remount(background: Path, store: Store) -> None:
    store.put("two/names", b"content")
    store.put("other", b"other")

    def inodes() -> dict[str, int]:
        found = {}
        for folder, folders, files in os.walk(background):
            listed = {entry.name: entry.inode() for entry in os.scandir(folder)}
            for name in folders + files:
                path = Path(folder, name)
                assert path.stat().st_ino == listed[name]
                found[path.relative_to(background).as_posix()] = listed[name]
        return found

    first = inodes()
    assert set(first) == {"a", "a/b", "two", "two/names", "other"}
    assert first["a/b"] == first["two/names"]
    assert len(set(first.values())) == 4
    if os.access("/proc/sys/vm/drop_caches", os.W_OK):
        Path("/proc/sys/vm/drop_caches").write_text("2")
        assert inodes() == first
    castore_fuse.umount(background)
    castore_fuse.mount(store, background, pin=True)
    assert inodes() == first


def test_options_reach_the_daemon(store: Store, mountpoint: Path) -> None:
    store.put_many([("data/x", b"x"), ("other/y", b"y")])
    castore_fuse.mount(store, mountpoint, prefix="data/", pin=True, cache_size="2MB", threads=1)
    try:
        assert os.listdir(mountpoint) == ["x"]
        assert (mountpoint / "x").read_bytes() == b"x"
        words = Path(f"/proc/{daemon(store).pid}/cmdline").read_text().split("\0")
        assert words[words.index("--prefix") + 1] == "data"
        assert words[words.index("--cache-size") + 1] == "2000000"
        threads = os.listdir(f"/proc/{daemon(store).pid}/task")
        assert len(threads) <= 3  # the main one, one for requests, one that follows changes
    finally:
        castore_fuse.umount(mountpoint)


# --- refusals --------------------------------------------------------------------------------------


def test_mountpoint_and_store_must_lie_apart(store: Store, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(store.path)
    for overlap in (store.path, store.path / "objects", tmp_path, tmp_path / "link" / "new"):
        with pytest.raises(MountError, match="must lie apart"):
            castore_fuse.mount(store, overlap)
    assert not (store.path / "new").exists()
    assert not any(mount.mountpoint.is_relative_to(tmp_path) for mount in mounts())


def test_what_cannot_be_mounted_is_refused_in_a_sentence(store: Store, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thing").write_text("")
    with pytest.raises(MountError, match="is not empty"):
        castore_fuse.mount(store, tmp_path / "full")
    with pytest.raises(MountError, match="there is no store at"):
        castore_fuse.mount(tmp_path / "nothing", tmp_path / "mnt")
    with pytest.raises(InvalidNameError):
        castore_fuse.mount(store, tmp_path / "mnt", prefix="../up")
    with pytest.raises(InvalidValueError):
        castore_fuse.mount(store, tmp_path / "mnt", threads=0)
    assert not (tmp_path / "nothing").exists()


def test_second_mount_at_the_same_place_is_refused(background: Path, store: Store) -> None:
    with pytest.raises(MountError, match=r"is mounted at .* already"):
        castore_fuse.mount(store, background)
    assert (background / "a/b").read_bytes() == b"content"


def test_of_two_mounts_at_one_moment_one_is_made(store: Store, tmp_path: Path) -> None:
    with Store(tmp_path / "other") as other:
        other.put("b", b"other")
    store.put("a", b"content")
    for name in map(str, range(3)):
        place = tmp_path / name
        command = [sys.executable, "-m", "castore", "--store"]
        both = [
            subprocess.Popen(
                [*command, path, "mount", place], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
            for path in (store.path, other.path)
        ]
        told = [process.communicate(timeout=300) for process in both]
        codes = [process.returncode for process in both]
        try:
            assert sorted(codes) == [0, 1], told
            assert "is mounted at" in told[codes.index(1)][1]
            assert os.listdir(place) == [["a"], ["b"]][codes.index(0)]
            assert len([mount for mount in mounts() if mount.mountpoint == place]) == 1
        finally:
            while mountpoints.mount_at(place):
                castore_fuse.umount(place)


def test_mount_is_read_only(live: Path, store: Store) -> None:
    store.put("x", b"x")
    for change in (
        (live / "x").unlink,
        (live / "folder").mkdir,
        lambda: (live / "x").open("ab"),
        lambda: (live / "x").rename(live / "y"),
        lambda: os.truncate(live / "x", 0),
        lambda: (live / "x").chmod(0o777),
    ):
        with pytest.raises(OSError) as caught:  # noqa: PT011
            change()
        assert caught.value.errno == errno.EROFS
    assert store.get("x") == b"x"


# --- beside the files ------------------------------------------------------------------------------


def test_blobs_are_reached_by_digest(live: Path, store: Store) -> None:
    data = mixed(3 * FRAME_SIZE)
    digest = store.put("name", data).digest
    objects = live / ".castore" / "objects"
    assert (objects / digest[:2] / digest).read_bytes() == data
    assert ".castore" not in os.listdir(live)
    assert os.listdir(objects / digest[:2]) == []
    for path in (
        objects / "00" / digest,
        objects / digest[:2] / digest[1:],
        objects / digest[:2] / digest.upper(),
    ):
        assert not path.exists()
    assert (objects / ".." / ".." / "name").read_bytes() == data
    with pytest.raises(FileNotFoundError):
        (live / ".castore" / "castore.json").open()
    with pytest.raises(FileNotFoundError):
        (live / ".castore" / "index.sqlite").open()


def test_stat_file_is_new_at_each_look(live: Path, store: Store) -> None:
    path = live / ".castore" / "stat.json"
    assert json.loads(path.read_bytes())["entries"] == 0
    store.put_many((str(number), b"") for number in range(2000))
    assert json.loads(path.read_bytes())["entries"] == 2000
    assert path.stat().st_size == len(path.read_bytes())


def test_xattrs_tell_of_entry_and_blob(live: Path, store: Store) -> None:
    entry = store.put("x", text(5000), codec="zstd", ttl=1000, metadata={"ü": [1]})
    attributes = {name: os.getxattr(live / "x", name).decode() for name in os.listxattr(live / "x")}
    assert attributes == {
        "user.castore.digest": entry.digest,
        "user.castore.size": "5000",
        "user.castore.stored": str(entry.stored),
        "user.castore.codec": "zstd",
        "user.castore.serializer": "bytes",
        "user.castore.pinned": "0",
        "user.castore.expires": repr(entry.expires),
        "user.castore.metadata": '{"ü": [1]}',
    }
    with pytest.raises(OSError) as caught:  # noqa: PT011
        os.getxattr(live / "x", "user.castore.nothing")
    assert caught.value.errno == errno.ENODATA


def test_df_shows_the_store(tmp_path: Path) -> None:
    with Store(tmp_path / "store", max_size="64MiB", memory=0) as store:
        store.put("x", noise(4 << 20))
        with castore_fuse.mounted(store) as root:
            shown = os.statvfs(root)
            assert shown.f_blocks * shown.f_frsize == 64 << 20
            assert (shown.f_blocks - shown.f_bfree) * shown.f_frsize == 4 << 20
            assert shown.f_files == 1


# --- reading ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "cache", [0, FRAME_SIZE + 400, 4 * FRAME_SIZE], ids=["none", "one frame", "three frames"]
)
def test_readers_get_the_right_bytes_from_a_tiny_cache(store: Store, cache: int) -> None:
    files = {
        f"{codec}": mixed(9 * FRAME_SIZE + seed, seed) for seed, codec in enumerate(("zstd", "lz4", "none"))
    }
    for codec, data in files.items():
        store.put(codec, data, codec=codec)

    def sequential(name: str) -> bool:
        with (root / name).open("rb", buffering=0) as file:
            for _ in range(3):
                forget_pages(file.fileno())
                file.seek(0)
                pieces = iter(lambda: file.read(100_000), b"")
                if b"".join(pieces) != files[name]:
                    return False
        return True

    def scattered(name: str) -> bool:
        chance, data = random.Random(name), files[name]
        with (root / name).open("rb", buffering=0) as file:
            for number in range(60):
                if number % 10 == 0:
                    forget_pages(file.fileno())
                offset, size = chance.randrange(len(data)), chance.randrange(1, 400_000)
                file.seek(offset)
                if file.read(size) != data[offset : offset + size]:
                    return False
        return True

    with castore_fuse.mounted(store, cache_size=cache) as root, ThreadPoolExecutor(6) as pool:
        done = [pool.submit(read, name) for name in files for read in (sequential, scattered)]
        assert all(future.result() for future in done)


# --- other users -----------------------------------------------------------------------------------


def test_other_users_are_let_in_only_with_allow_other(anybody: tuple[Path, str], store: Store) -> None:
    folder, user = anybody
    store.put("x", b"for you")
    (folder / "mnt").mkdir()
    for allow_other in (False, True):
        with castore_fuse.mounted(store, folder / "mnt", allow_other=allow_other):
            done = subprocess.run(
                ["cat", folder / "mnt" / "x"], user=user, extra_groups=[], capture_output=True
            )
            assert done.stdout == (b"for you" if allow_other else b"")
            assert done.returncode == (0 if allow_other else 1)


PROGRAM_OF_ANYBODY = """
import os, sys
from pathlib import Path
import castore, castore_fuse

folder = Path(sys.argv[1])
store = castore.Store(folder / "store", memory=0)
store.put("mine", b"content")
root = castore_fuse.mount(store, folder / "mnt")
assert (root / "mine").read_bytes() == b"content"
assert (root / "mine").stat().st_uid == os.getuid()
store.put("mine", b"changed")
while (root / "mine").read_bytes() != b"changed":
    pass
try:
    castore_fuse.mount(store, folder / "other", allow_other=True)
except castore_fuse.MountError as error:
    assert "user_allow_other" in str(error), error
    print("refused")
castore_fuse.umount(root)
with castore_fuse.mounted(store, pin=True) as root:
    assert (root / "mine").read_bytes() == b"changed"
print("all well")
"""


def test_ordinary_user_mounts_a_store_of_his_own(anybody: tuple[Path, str]) -> None:
    folder, user = anybody
    # With that one capability the user can run a Python that lies in root's home; it does not help with
    # mounting.
    become = ["setpriv", "--reuid", user, "--regid", "nogroup", "--clear-groups"]
    become += ["--inh-caps", "+dac_read_search", "--ambient-caps", "+dac_read_search"]
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [*become, sys.executable, "-c", PROGRAM_OF_ANYBODY, folder],
        cwd="/",
        env=environment | {"HOME": os.fspath(folder)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "all well"
    conf = Path("/etc/fuse.conf")
    allowed = conf.exists() and "user_allow_other" in [line.strip() for line in conf.read_text().splitlines()]
    assert ("refused" in done.stdout) != allowed


def test_a_program_that_has_loaded_libfuse_2_may_mount() -> None:
    """As one does where both are installed: s3fs and sshfs bring libfuse 2."""
    script = (
        "import os; os.environ['FUSE_LIBRARY_NAME'] = 'fuse3'\n"
        "import mfusepy; mfusepy.fuse_version_major = 2\n"
        "from castore_fuse import libfuse; print(libfuse.load().version[0], mfusepy.fuse_version_major)"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (ran.stdout, ran.stderr) == ("3 2\n", "")
