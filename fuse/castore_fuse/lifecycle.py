"""The life of a mount as a user sees it: refuse what cannot work, start the daemon, wait for it, end it.

The daemon is always a fresh process, never a fork of the caller, whose threads and locks a fork would
inherit. The caller's command line decides what the daemon serves: this module knows processes and mountpoints
only. The daemon's half of the protocol is in `daemon`.

Must never be called from the process that serves the mount.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from castore.errors import MissingDependencyError
from castore.system.mount_table import FSTYPE
from castore_fuse import libfuse, mountpoints
from castore_fuse.daemon import READY, DaemonRecord
from castore_fuse.errors import MountError

START_TIMEOUT = 60.0
"""Seconds a daemon may take until its mount answers."""
END_TIMEOUT = 15.0
"""Seconds a daemon may take to end after its mount was taken away."""
_LOG_LIMIT = 1 << 20

# Daemons started here, to be reaped once they have ended.
_started: list[subprocess.Popen[bytes]] = []


def _reap_daemons() -> None:
    _started[:] = [daemon for daemon in _started if daemon.poll() is None]


@atexit.register
def _disown_daemons() -> None:
    """Let daemons outlive this process; without a return code, Python would warn of running children."""
    _reap_daemons()
    for daemon in _started:
        daemon.returncode = 0


def mount_background(
    command: Sequence[str],
    mountpoint: str | os.PathLike[str],
    *,
    log_path: Path,
    timeout: float = START_TIMEOUT,
) -> int:
    """Start a daemon in a session of its own and return once its mount answers.

    Args:
        command: the daemon's command line. `MOUNTPOINT --ready-fd N` is appended to it, for `daemon.serve`.
        mountpoint: the path that `prepare_mountpoint` returned.
        log_path: the daemon's output is appended to this file.
        timeout: seconds to wait.

    Returns:
        The daemon's process id.

    Raises:
        MountError: the mount failed; with the daemon's own message if it sent one.
    """
    path = Path(os.path.realpath(mountpoint))
    with _open_log(log_path) as log:
        process = _start(command, path, log.fileno(), (), timeout, f"see {log_path}")
    _reap_daemons()
    _started.append(process)
    return process.pid


@contextlib.contextmanager
def mounted(
    command: Sequence[str],
    mountpoint: str | os.PathLike[str] | None = None,
    *,
    timeout: float = START_TIMEOUT,
) -> Iterator[Path]:
    """A mount for the length of a `with` block, served by a child process.

    The mount needs a process of its own: a process that reads its own mount while it holds the GIL (a page
    fault in a mapped file is enough) waits for itself. The child unmounts when this process and all its forks
    are gone, however they ended.

    Args:
        command: the daemon's command line. `MOUNTPOINT --ready-fd N --lifeline-fd N` is appended, for
            `daemon.serve`.
        mountpoint: a prepared folder; None for a temporary one.
        timeout: seconds to wait for the mount.

    Yields:
        The mountpoint.
    """
    owner = os.getpid()
    with contextlib.ExitStack() as cleanup:
        if mountpoint is None:
            folder = tempfile.mkdtemp(prefix="castore-")
            cleanup.callback(lambda: os.rmdir(folder) if os.getpid() == owner else None)
            mountpoint = folder
        path = Path(os.path.realpath(mountpoint))
        lifeline_read, lifeline_write = os.pipe()
        cleanup.callback(os.close, lifeline_write)
        try:
            process = _start(
                command, path, 2, (lifeline_read,), timeout, "its messages are on standard error"
            )
        finally:
            os.close(lifeline_read)
        # A fork of this process that leaves the block must not take the mount away from the others.
        cleanup.callback(lambda: _stop(process, path) if os.getpid() == owner else None)
        yield path


def _start(
    command: Sequence[str],
    mountpoint: Path,
    output: int,
    lifeline: tuple[int, ...],
    timeout: float,
    hint: str,
) -> subprocess.Popen[bytes]:
    """Start the daemon and wait until its mount answers. On failure, leave no process and no mount behind."""
    ready_read, ready_write = os.pipe()
    arguments = [*command, os.fspath(mountpoint), "--ready-fd", str(ready_write)]
    for descriptor in lifeline:
        arguments += ["--lifeline-fd", str(descriptor)]
    try:
        process = subprocess.Popen(
            arguments,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,  # the terminal's Ctrl-C is for the foreground process, not for its mounts
            cwd="/",  # keeps no folder busy, and imports nothing from the caller's working folder
            env=os.environ | {"PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)},
            pass_fds=(ready_write, *lifeline),
        )
    finally:
        os.close(ready_write)
    try:
        with open(ready_read, "rb", buffering=0) as pipe:
            _await_ready(process, pipe.fileno(), time.monotonic() + timeout, hint)
        _await_answer(mountpoint, timeout)
    except BaseException:
        _stop(process, mountpoint)
        raise
    return process


def _await_ready(process: subprocess.Popen[bytes], pipe: int, deadline: float, hint: str) -> None:
    received = b""
    while not received.endswith(b"\n"):
        readable, _, _ = select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))
        if not readable:
            raise MountError(f"the mount's daemon did not get ready in time; {hint}")
        piece = os.read(pipe, 4096)
        if not piece:
            code = process.wait()
            raise MountError(f"the mount's daemon ended with exit code {code} before it was ready; {hint}")
        received += piece
    sentence = received.decode(errors="replace").strip()
    if sentence != READY:
        raise MountError(sentence)


def _await_answer(mountpoint: Path, timeout: float) -> None:
    answer = mountpoints.answer_of(mountpoint, timeout)
    if answer is None:
        raise MountError(f"the mount at {mountpoint} does not answer")
    if answer:
        raise MountError(f"the mount at {mountpoint} answers with an error: {os.strerror(answer)}")


def _stop(process: subprocess.Popen[bytes], mountpoint: Path) -> None:
    """End a daemon that was started here: SIGTERM first, then SIGKILL. A dead mount is detached."""
    process.terminate()
    try:
        process.wait(END_TIMEOUT)
    except subprocess.TimeoutExpired:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_TIMEOUT)
    found = mountpoints.mount_at(mountpoint)
    if found is not None and found.fstype == FSTYPE and mountpoints.is_dead(mountpoint, orphaned=True):
        mountpoints.detach(mountpoint, dead=True)
    process.wait()


def _open_log(path: Path) -> BinaryIO:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    long = path.exists() and path.stat().st_size > _LOG_LIMIT
    return open(path, "wb" if long else "ab", opener=lambda name, flags: os.open(name, flags, 0o600))


def check_fuse() -> None:
    """Check that this machine can mount at all.

    Raises:
        MissingDependencyError: libfuse 3 or fusermount3 is missing; the message names what to install.
        MountError: /dev/fuse is missing or closed to this user; the message gives the remedy.
    """
    libfuse.load()
    if not os.path.exists("/dev/fuse"):
        raise MountError(
            "/dev/fuse is missing: run `modprobe fuse`, or start the container with --device /dev/fuse"
        )
    if os.geteuid() != 0 and shutil.which("fusermount3") is None:
        raise MissingDependencyError(
            f"Mounting as an ordinary user needs fusermount3; {libfuse.INSTALL_HINT}"
        )
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        raise MountError(
            "/dev/fuse is closed to you: ask root to `chmod 666 /dev/fuse`, as distributions set it"
        )


def prepare_mountpoint(
    mountpoint: str | os.PathLike[str], store: str | os.PathLike[str], *, record_path: Path | None = None
) -> Path:
    """Check that the mountpoint can be used, clear what a killed daemon left there, and return the real path.

    A missing folder is created (as `mkdir -p` does).

    Args:
        mountpoint: the folder.
        store: the folder of the store, which must lie apart from the mountpoint.
        record_path: where an earlier daemon of this mountpoint left its `DaemonRecord`, if there was one.

    Raises:
        MountError: the mountpoint is in use, not a folder, not empty, or overlaps the store.
    """
    path, home = mountpoints.real_path(mountpoint), Path(os.path.realpath(store))
    try:
        os.fspath(path).encode()
    except UnicodeEncodeError:
        # The store's list of mounts holds text.
        raise MountError(f"the mountpoint {os.fspath(path)!r} is not UTF-8; choose another folder") from None
    # A mount over its own store would read its bytes through itself and wait for ever.
    if home.is_relative_to(path) or path.is_relative_to(home):
        raise MountError(f"the mountpoint {path} and the store {home} must lie apart; choose another folder")
    _clear_dead(path, record_path)
    mountpoints.check_free(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
        entries = os.listdir(path)
    except (FileExistsError, NotADirectoryError):
        raise MountError(f"the mountpoint {path} is not a folder") from None
    except OSError as error:
        raise MountError(f"the mountpoint {path} cannot be used: {error.strerror}") from error
    if entries:
        raise MountError(
            f"the mountpoint {path} is not empty ({entries[0]!r} is in it); choose an empty folder"
        )
    return path


def _clear_dead(path: Path, record_path: Path | None) -> None:
    found = mountpoints.mount_at(path)
    if found is None or not _is_dead(path, record_path):
        return
    if found.fstype != FSTYPE:
        raise MountError(
            f"a dead {found.fstype} mount of {found.source} is at {path}; "
            "unmount it with the tool that made it"
        )
    mountpoints.detach(path, dead=True)
    if record_path is not None and record_path.exists():  # a read-only store has no record
        record_path.unlink(missing_ok=True)


def _is_dead(path: Path, record_path: Path | None) -> bool:
    record = DaemonRecord.read(record_path) if record_path else None
    return mountpoints.is_dead(path, orphaned=record is not None and not record.alive())


def umount(mountpoint: str | os.PathLike[str], *, record_path: Path | None = None) -> None:
    """End a mount, live or dead, and wait until its daemon is gone.

    Args:
        mountpoint: the folder.
        record_path: where its daemon left its `DaemonRecord`; without it, this function does not wait for the
            daemon.

    Raises:
        BusyError: processes use files in it; the message names them.
        MountError: there is no castore mount, or it may not be ended.
    """
    path = mountpoints.real_path(mountpoint)
    found = mountpoints.mount_at(path)
    if found is None:
        raise MountError(f"nothing is mounted at {path}")
    if found.fstype != FSTYPE:
        raise MountError(
            f"the mount at {path} is of type {found.fstype}, not a castore;"
            " unmount it with the tool that made it"
        )
    record = DaemonRecord.read(record_path) if record_path else None
    mountpoints.detach(path, dead=_is_dead(path, record_path))
    deadline = time.monotonic() + END_TIMEOUT
    while record is not None and record.alive():
        if time.monotonic() > deadline:
            raise MountError(f"{path} is unmounted, but its daemon (pid {record.pid}) still runs")
        time.sleep(0.01)
    _reap_daemons()
    if record_path is not None and record_path.exists():  # a read-only store has no record
        record_path.unlink(missing_ok=True)


def mount_options(source: str, *, allow_other: bool = False) -> list[str]:
    """Mount options of every castore mount.

    A FUSE mount is open only to the user who made it. `allow_other` lets other users in;
    `default_permissions` then has the kernel check the modes that the files show.
    """
    options = ["ro", "nosuid", "nodev", "default_permissions", f"fsname={source}", "subtype=castore"]
    return options + (["allow_other"] if allow_other else [])


def default_log_path(mountpoint: Path) -> Path:
    """The log of a `castore mount`: `~/.local/state/castore/log/mount-<mountpoint>.log`."""
    import platformdirs

    name = os.fspath(mountpoint).strip("/").replace("/", "-")[-100:]
    return platformdirs.user_log_path("castore") / f"mount-{name}.log"
