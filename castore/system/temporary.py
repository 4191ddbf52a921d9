"""Files that are on their way: names that tell who makes them, so that what the dead left can be told from the rest.

Also what goes with them: whether a process still runs, and how a file of the store is opened: as a regular file that is
reached by no link (who may write to a shared store could plant one that leads elsewhere, or a pipe that never answers),
with its permission bits whatever the umask says. What root makes in somebody's store belongs to that store's owner.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from castore.errors import StoreError

# A link is an error, and a pipe or a device is not waited for.
_NO_DETOUR = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
# What opening a link, a folder, a socket, or something below a file ends with.
_NO_FILE = (errno.ELOOP, errno.EISDIR, errno.ENXIO, errno.ENOTDIR)
_OTHER = "{} is a link, a folder or a pipe where a file of the store belongs; `castore doctor` sets it aside"
#: A file, or a mount, of another PID namespace (a container's, say) counts as left behind after this many seconds
#: without a sign of life: its processes cannot be looked up from here.
FOREIGN_AGE = 3600.0


@lru_cache(maxsize=1)
def pid_namespace() -> int:
    """What tells this process's PIDs from those of other containers."""
    return os.stat("/proc/self/ns/pid").st_ino


def process_started(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot, or None if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def is_running(pid: int, started: int | None = None) -> bool:
    """Whether a process of that PID, and of that start time if one is given, still runs.

    Where ``/proc`` hides other users' processes (``hidepid``), any process of that PID is taken for the one in question.
    """
    try:
        found = process_started(pid)
    except PermissionError:
        return True
    if found is None:
        return not os.path.exists(f"/proc/{pid}") and _is_hidden(pid)
    return started is None or found == started


def _is_hidden(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (ProcessLookupError, OverflowError):
        pass
    return False


def is_of_live_process(name: str) -> bool:
    """Whether a file or folder is named after a process, as `create_temporary` names it, that runs here now."""
    who = _maker(name)
    return who is not None and is_running(*who)


def _maker(name: str) -> tuple[int, int] | None:
    """PID and start of the process that a name tells; None if it tells none of this PID namespace."""
    parts = name.split("-")
    if len(parts) != 4 or not all(part.isascii() and part.isdigit() for part in parts[:3]):
        return None
    return (int(parts[1]), int(parts[2])) if int(parts[0]) == pid_namespace() else None


def create_temporary(folder: Path, suffix: str = "part") -> tuple[int, Path]:
    """A new file in ``folder``, open for writing, whose name tells who makes it, and by its end, without ``-``, what for."""
    # The random part keeps two threads, or two processes that got the same PID in turn, from meeting.
    started = process_started(os.getpid()) or 0
    path = folder / f"{pid_namespace()}-{os.getpid()}-{started}-{os.urandom(16).hex()}.{suffix}"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    give_to_owner(fd, folder)
    return fd, path


class Stray(NamedTuple):
    """A file that no living writer accounts for."""

    path: Path
    size: int


def left_behind(folder: Path) -> Iterator[Stray]:
    """Temporary files in ``folder`` whose writer is gone. A folder is none: `doctor` looks at those."""
    for path in folder.iterdir():
        try:
            status = path.lstat()
        except FileNotFoundError:
            continue  # its writer just finished
        if not stat.S_ISDIR(status.st_mode) and _writer_gone(path.name, status.st_mtime):
            yield Stray(path, status.st_size)


def left_folders(folder: Path) -> Iterator[Path]:
    """Folders in ``folder``, named like `create_temporary`'s files, whose process is gone.

    Those of other PID namespaces stay: nothing about a folder tells that somebody still writes to a file in it.
    """
    for path in folder.iterdir() if folder.is_dir() else ():
        who = _maker(path.name)
        if who is not None and not is_running(*who):
            yield path


def _writer_gone(name: str, modified: float) -> bool:
    who = _maker(name)
    if who is not None:
        return not is_running(*who)
    return abs(time.time() - modified) > FOREIGN_AGE


def open_here(path: str | os.PathLike[str]) -> int:
    """What lies there and is no link, open for reading: a file, or what reads as no file's bytes.

    Raises:
        FileNotFoundError: there is nothing, or a link.
    """
    try:
        return os.open(path, os.O_RDONLY | _NO_DETOUR)
    except OSError as error:
        if error.errno not in _NO_FILE:
            raise
        raise FileNotFoundError(error.errno, "it is not a file", os.fspath(path)) from error


def open_regular(path: str | os.PathLike[str]) -> int:
    """A file of the store, open for reading.

    Raises:
        FileNotFoundError: there is none, or something else in its place.
    """
    fd = open_here(path)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise FileNotFoundError(errno.EINVAL, "it is not a file", os.fspath(path))
    return fd


def check_regular(path: str) -> None:
    """See that a file of the store, which somebody else opens, is one if it is there.

    Raises:
        StoreError: there is something else.
    """
    with suppress(FileNotFoundError):
        if not stat.S_ISREG(os.lstat(path).st_mode):
            raise StoreError(_OTHER.format(path))


def open_with_mode(path: Path, flags: int, mode: int) -> int:
    """`os.open` that gives a file it makes exactly ``mode``: a shared store must not depend on anybody's umask.

    Raises:
        StoreError: there is something else than a regular file.
    """
    try:
        fd = _open_or_make(path, flags | _NO_DETOUR, mode)
    except OSError as error:
        if error.errno not in _NO_FILE:
            raise
        raise StoreError(_OTHER.format(path)) from error
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        os.close(fd)
        raise StoreError(_OTHER.format(path))
    if status.st_mode & 0o777 != mode and status.st_uid == os.geteuid():
        os.fchmod(fd, mode)
    return fd


def _open_or_make(path: Path, flags: int, mode: int) -> int:
    while True:
        try:
            fd = os.open(path, flags | os.O_CREAT | os.O_EXCL, mode)
        except FileExistsError:
            if flags & os.O_EXCL:
                raise
        else:
            give_to_owner(fd, path.parent)
            return fd
        try:
            return os.open(path, flags)
        except FileNotFoundError:
            continue  # somebody has just removed it


def make_folder(path: Path, mode: int) -> None:
    """Make a folder of the store if it is missing, with exactly these permission bits."""
    try:
        path.mkdir()
    except FileExistsError:
        if path.stat().st_mode & 0o7777 == mode:
            return
    else:
        give_to_owner(path, path.parent)
    path.chmod(mode)


def give_to_owner(made: int | Path, folder: Path) -> None:
    """Have what root has just made in a folder of a store belong to whom the folder belongs, who else could not use it.

    Nothing that was there before is ever given away: it may be a second name of root's own file.

    Args:
        made: a file's descriptor, or the path of a folder or a socket.
        folder: that it is in.
    """
    if os.geteuid():
        return
    if isinstance(made, int):
        _give(made, made, folder)
        return
    fd = os.open(made, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):  # else the folder's owner has put it there meanwhile
            _give(f"/proc/self/fd/{fd}", fd, folder)
    finally:
        os.close(fd)


def _give(place: int | str, fd: int, folder: Path) -> None:
    mine, owner = os.fstat(fd), os.stat(folder)
    if (mine.st_uid, mine.st_gid) == (owner.st_uid, owner.st_gid):
        return
    try:
        os.chown(place, owner.st_uid, owner.st_gid)
    except OSError as error:
        # The root of a container may be no more than another user to the rest of the machine.
        if error.errno not in (errno.EPERM, errno.EINVAL):
            raise


def sync_folder(folder: Path) -> None:
    """Have the names in a folder survive a power cut."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
