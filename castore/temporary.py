"""Files that are on their way: names that tell who makes them, so that what the dead left can be told from the rest.

Also what goes with them: whether a process still runs, and how a file of the store is opened: as a regular file that is
reached by no link (who may write to a shared store could plant one that leads elsewhere, or a pipe that never answers),
with its permission bits whatever the umask says.
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


def create_temporary(folder: Path, suffix: str = "part") -> tuple[int, Path]:
    """A new file in ``folder``, open for writing, whose name tells who makes it, and by its end, without ``-``, what for."""
    # The random part keeps two threads, or two processes that got the same PID in turn, from meeting.
    started = process_started(os.getpid()) or 0
    path = folder / f"{pid_namespace()}-{os.getpid()}-{started}-{os.urandom(16).hex()}.{suffix}"
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), path


class Stray(NamedTuple):
    """A file that no living writer accounts for."""

    path: Path
    size: int


def left_behind(folder: Path) -> Iterator[Stray]:
    """Temporary files in ``folder`` whose writer is gone."""
    for path in folder.iterdir():
        try:
            status = path.lstat()
        except FileNotFoundError:
            continue  # its writer just finished
        if _writer_gone(path.name, status.st_mtime):
            yield Stray(path, status.st_size)


def left_folders(folder: Path) -> Iterator[Path]:
    """Folders in ``folder``, named like `create_temporary`'s files, whose process is gone.

    Those of other PID namespaces stay: nothing about a folder tells that somebody still writes to a file in it.
    """
    for path in folder.iterdir() if folder.is_dir() else ():
        parts = path.name.split("-")
        ours = len(parts) == 4 and all(map(str.isdigit, parts[:3])) and int(parts[0]) == pid_namespace()
        if ours and process_started(int(parts[1])) != int(parts[2]):
            yield path


def _writer_gone(name: str, modified: float) -> bool:
    parts = name.split("-")
    if len(parts) == 4 and all(part.isdigit() for part in parts[:3]) and int(parts[0]) == pid_namespace():
        return process_started(int(parts[1])) != int(parts[2])
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
        fd = os.open(path, flags | os.O_CREAT | _NO_DETOUR, mode)
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


def sync_folder(folder: Path) -> None:
    """Have the names in a folder survive a power cut."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
