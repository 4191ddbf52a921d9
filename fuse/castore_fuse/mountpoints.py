"""Mounts and mountpoints: list them, find the processes that use them, unmount. Knows no libfuse, no store.

Reads /proc only. Must never access a mount that might hang or be dead; `answer_of` and `is_dead` are the
exceptions.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import shlex
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from castore.system.mount_table import FSTYPE, MountInfo, mounts
from castore_fuse.errors import BusyError, MountError

_MNT_FORCE, _MNT_DETACH, _UMOUNT_NOFOLLOW = 1, 2, 8
# Seconds after which a mount counts as hung.
_HUNG_SECONDS = 5.0
# Seconds for which a mount is busy without a process that can be seen to use it, until that is an error.
_BUSY_SECONDS = 1.0
_libc = ctypes.CDLL(None, use_errno=True)


class Holder(NamedTuple):
    """A process that uses something below a mountpoint."""

    pid: int
    name: str
    path: str


def mount_at(mountpoint: Path) -> MountInfo | None:
    """The topmost mount whose root is exactly this (real) path."""
    return next((mount for mount in reversed(mounts()) if mount.mountpoint == mountpoint), None)


def real_path(path: str | os.PathLike[str]) -> Path:
    """The real path of a mountpoint. Never accesses what is mounted there, which may hang."""
    folder, name = os.path.split(os.path.abspath(path))
    here = Path(os.path.realpath(folder), name)
    return here if mount_at(here) is not None else Path(os.path.realpath(here))


def check_free(mountpoint: Path) -> None:
    """Check that no castore is mounted there.

    Raises:
        MountError: one is.
    """
    found = mount_at(mountpoint)
    if found is not None and found.fstype == FSTYPE:
        raise MountError(
            f"{found.source} is mounted at {mountpoint} already; run `castore "
            f"umount {shlex.quote(os.fspath(mountpoint))}` first"
        )


@contextmanager
def claimed(mountpoint: Path) -> Iterator[None]:
    """Let one process at a time mount there: two mounts at one moment would lie on one another.

    Raises:
        MountError: a castore is mounted there, or there is no folder.
    """
    try:
        folder = os.open(mountpoint, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise MountError(f"cannot mount at {mountpoint}: {error.strerror}") from error
    try:
        with suppress(OSError):  # of file systems without locks of folders, such as NFS
            fcntl.flock(folder, fcntl.LOCK_EX)
        check_free(mountpoint)
        yield
    finally:
        os.close(folder)


def answer_of(mountpoint: Path, seconds: float) -> int | None:
    """The answer of a mount to statvfs: 0 or an errno; None if there is no answer in time.

    A thread asks, because a process that waits for a hung mount cannot be interrupted.
    """
    numbers: list[int] = []

    def ask() -> None:
        try:
            os.statvfs(mountpoint)  # the kernel may answer os.stat from its cache of the root
            numbers.append(0)
        except OSError as error:
            numbers.append(error.errno or errno.EIO)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(seconds)
    return numbers[0] if numbers else None


def is_dead(mountpoint: Path, *, orphaned: bool = False) -> bool:
    """Whether the daemon behind a mountpoint is gone. Asks the mount itself.

    Args:
        mountpoint: its real path.
        orphaned: the last known daemon of this mountpoint is gone, so no answer means dead as well. A daemon
            may be killed while it invalidates a name in a folder where another process looks up a name. A
            thread of the daemon then waits for that look-up, and the look-up waits for the daemon: the kernel
            would keep the mount for ever.
    """
    answer = answer_of(mountpoint, _HUNG_SECONDS)
    return orphaned if answer is None else answer in (errno.ENOTCONN, errno.ECONNABORTED)


def detach(mountpoint: Path, *, lazy: bool = False, dead: bool = False) -> None:
    """Unmount: by system call where this process may, through fusermount3 otherwise.

    Args:
        mountpoint: its real path.
        lazy: unmount even while files are open; they work as long as the daemon does.
        dead: the daemon is gone: `lazy`, and requests that still wait get an error (as root only).

    A process that only calls ``stat`` on the mount uses it for a moment: without a process that can be seen
    to use it, a mount that is busy is tried again for a second.

    Raises:
        BusyError: processes use files in it; the message names them.
        MountError: any other failure, with the reason that the kernel or fusermount3 gives.
    """
    until = time.monotonic() + _BUSY_SECONDS
    while not _try_to_detach(mountpoint, lazy=lazy or dead, dead=dead):
        users = holders(mountpoint)
        if users or time.monotonic() > until:
            raise BusyError(_busy_message(mountpoint, users))
        time.sleep(_BUSY_SECONDS / 20)


def _try_to_detach(mountpoint: Path, *, lazy: bool, dead: bool) -> bool:
    """Unmount; False if the mount is busy.

    Raises:
        MountError: any other failure.
    """
    flags = _UMOUNT_NOFOLLOW | (_MNT_DETACH if lazy else 0) | (_MNT_FORCE if dead else 0)
    if _libc.umount2(os.fsencode(mountpoint), flags) == 0:
        return True
    error = ctypes.get_errno()
    reason = os.strerror(error)
    if error == errno.EPERM:
        fusermount = shutil.which("fusermount3")
        if fusermount is None:
            raise MountError("unmounting as an ordinary user needs fusermount3: apt-get install fuse3")
        command = [fusermount, "-u", *(["-z"] if lazy else []), "--", os.fspath(mountpoint)]
        english = os.environ | {"LC_ALL": "C"}  # only the English word "busy" distinguishes the failures
        done = subprocess.run(
            command, check=False, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=english
        )
        if done.returncode == 0:
            return True
        reason = done.stderr.strip() or f"fusermount3 exited with {done.returncode}"
        error = errno.EBUSY if "busy" in reason else error
    if error == errno.EBUSY:
        return False
    raise MountError(f"cannot unmount {mountpoint}: {reason}")


def _busy_message(mountpoint: Path, found: list[Holder]) -> str:
    named = [f"{holder.name} (pid {holder.pid}, {holder.path})" for holder in found]
    users = ", ".join(named[:5]) + (f" and {len(named) - 5} more" if len(named) > 5 else "")
    if not users and os.geteuid() == 0:  # to root no process is hidden
        return (
            f"{mountpoint} is in use by a request that is under way; wait for it, or end the mount's daemon"
            " if that does not answer"
        )
    return (
        f"{mountpoint} is in use by {users or 'a process that you may not see'}; end it or leave that folder "
        "first"
    )


def holders(mountpoint: Path) -> list[Holder]:
    """Processes with an open or mapped file, working folder or program below the mountpoint, each once.

    Reads /proc only and never accesses the mount, so a hung mount does no harm. Only root sees other users'
    processes.
    """
    below = os.fspath(mountpoint).rstrip("/")
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            for path in _paths(process):
                if path == below or path.startswith(below + "/"):
                    found.append(Holder(int(process.name), _name(process), path))
                    break
    return found


def _name(process: Path) -> str:
    try:
        return (process / "comm").read_text().strip()
    except OSError:
        return "?"


def _paths(process: Path) -> Iterator[str]:
    """The paths that a process holds; none if it has ended or belongs to another user."""
    links = [process / "cwd", process / "root", process / "exe"]
    with suppress(OSError):
        links.extend((process / "fd").iterdir())
    for link in links:
        with suppress(OSError):
            yield os.readlink(link)
    with suppress(OSError), open(process / "maps", encoding="utf-8", errors="surrogateescape") as maps:
        for line in maps:
            fields = line.rstrip("\n").split(" ", 5)
            if len(fields) == 6:
                yield fields[5].lstrip()
