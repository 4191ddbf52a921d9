"""The life of a mount of a toy file system: start, end, clearing, refusals, and users."""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from castore_fuse import mountpoints
from castore_fuse.daemon import DaemonRecord
from castore_fuse.errors import BusyError, MountError
from castore_fuse.lifecycle import mount_background, mounted, prepare_mountpoint, umount
from tests.mount.conftest import until
from tests.mount.toys import PATTERN, command

# --- the life of a mount ---------------------------------------------------------------------------


def test_umount_returns_when_the_daemon_is_gone(mountpoint: Path, tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    pid = mount_background(command("--record", os.fspath(record)), mountpoint, log_path=tmp_path / "log")
    written = DaemonRecord.read(record)
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
    written = DaemonRecord.read(record)
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


@pytest.mark.parametrize("clear", ["mount", "umount"])
def test_daemon_killed_while_it_takes_a_name_back_is_cleared_too(
    mountpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clear: str
) -> None:
    """Regression: its thread waits in the kernel for a look-up without an answer, so the mount stays."""
    monkeypatch.setattr(mountpoints, "_HUNG_SECONDS", 0.5)  # it never answers, however long one waits
    record, orders = tmp_path / "record.json", tmp_path / "orders"
    os.mkfifo(orders)
    daemon = command("--record", os.fspath(record), "--orders", os.fspath(orders))
    log = tmp_path / "log"
    pid = mount_background(daemon, mountpoint, log_path=log)
    written = DaemonRecord.read(record)
    assert written is not None
    with (
        subprocess.Popen(["stat", mountpoint / "slow"], stderr=subprocess.PIPE) as reader,
        _answers_no_more(mountpoint),
    ):
        # Only the look-up holds the folder's lock, for which the order waits. Before it, the reader waits for
        # the folder's attributes.
        until(lambda: "a slow look-up" in log.read_text())
        orders.write_text("remove hello.txt\n")
        until(lambda: _waits_in_the_kernel(pid))
        os.kill(pid, signal.SIGKILL)
        until(lambda: not written.alive())
        assert mountpoints.answer_of(mountpoint, 0.5) is None, "the kernel let go of it by itself"
        if clear == "mount":
            assert prepare_mountpoint(mountpoint, tmp_path / "store", record_path=record) == mountpoint
        else:
            umount(mountpoint, record_path=record)
        assert reader.wait(60) != 0
        assert os.listdir(mountpoint) == []


@contextlib.contextmanager
def _answers_no_more(mountpoint: Path) -> Iterator[None]:
    """Cut the mount off at the end: a reader that a failed test left in the kernel would wait for ever."""
    try:
        yield
    finally:
        while mountpoints.mount_at(mountpoint):
            mountpoints.detach(mountpoint, lazy=True, dead=True)


def _waits_in_the_kernel(pid: int) -> bool:
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # the thread has ended
            if "inval" in (task / "wchan").read_text():
                return True
    return False


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


def test_defect_that_every_request_meets_is_logged_once(mountpoint: Path, tmp_path: Path) -> None:
    mount_background(command(), mountpoint, log_path=tmp_path / "log")
    for _ in range(50):
        with pytest.raises(OSError, match="Input/output error"):
            (mountpoint / "broken").stat()
    assert (tmp_path / "log").read_text().count("Traceback") == 1
    umount(mountpoint)


def test_sigterm_unmounts_and_serves_open_handles_to_their_end(mountpoint: Path, tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    daemon = command("--record", os.fspath(record), "--grace", "200")
    pid = mount_background(daemon, mountpoint, log_path=tmp_path / "log")
    written = DaemonRecord.read(record)
    assert written is not None
    with (mountpoint / "pattern").open("rb", buffering=0) as held:
        held.read(1)
        os.kill(pid, signal.SIGTERM)
        until(lambda: mountpoints.mount_at(mountpoint) is None)
        held.seek(900_000)
        assert held.read(1000) == PATTERN[900_000:901_000]
    until(lambda: not written.alive(), seconds=100)
    assert "cut off" not in (tmp_path / "log").read_text()


def test_second_sigterm_does_not_wait_for_open_handles(mountpoint: Path, tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    daemon = command("--record", os.fspath(record), "--grace", "200")
    pid = mount_background(daemon, mountpoint, log_path=tmp_path / "log")
    written = DaemonRecord.read(record)
    assert written is not None
    with (mountpoint / "pattern").open("rb", buffering=0):
        os.kill(pid, signal.SIGTERM)
        until(lambda: mountpoints.mount_at(mountpoint) is None)
        os.kill(pid, signal.SIGTERM)
        until(lambda: not written.alive(), seconds=100)


def test_mount_of_a_killed_program_goes_away(mountpoint: Path) -> None:
    program = (
        "import sys, os, signal\nfrom pathlib import Path\nfrom castore_fuse.lifecycle import mounted\n"
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
    sleeper = [sys.executable, "-c", "import time; time.sleep(500)"]
    started = time.monotonic()
    with pytest.raises(MountError, match="did not get ready in time"):
        mount_background(sleeper, mountpoint, log_path=tmp_path / "log", timeout=0.5)
    assert time.monotonic() - started < 100


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
    with pytest.raises(MountError, match="is of type proc, not a castore"):
        umount("/proc")


# --- ordinary users --------------------------------------------------------------------------------


PROGRAM_OF_ANYBODY = """
import os, signal, sys, time
from pathlib import Path
from castore_fuse import mountpoints
from castore_fuse.errors import BusyError
from castore_fuse.lifecycle import check_fuse, mount_background, prepare_mountpoint, umount

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
    # With that one capability the user can run a Python that lies in root's home; it does not help with
    # mounting.
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
