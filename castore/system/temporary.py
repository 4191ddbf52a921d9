"""Temporary files: each name states the writing process, so leftovers of dead processes are recognised.

This module also checks whether a process still runs, and opens and creates the files of a store. A file is
opened only if it is a regular file and no symbolic link: a user who may write to a shared store could plant a
link that leads elsewhere, or a pipe that blocks. A new file gets its permission bits whatever the umask is. A
file that root creates in a store belongs to the owner of its folder.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from castore.errors import StoreError

# A symbolic link is an error, and a pipe or a device does not block.
_SAFE_OPEN = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
# Errors when opening a symbolic link, a folder, a socket, or a path below a file.
_NO_FILE = (errno.ELOOP, errno.EISDIR, errno.ENXIO, errno.ENOTDIR)
_NOT_A_FILE = (
    "{} is a link, a folder or a pipe where a file of the store belongs; `castore doctor` sets it aside"
)
#: Seconds without a sign of life after which a file or mount of another PID namespace (for example a
#: container's) counts as left behind: its process cannot be looked up from here.
OTHER_NAMESPACE_SECONDS = 3600.0
# The folders in which this process has created temporary files.
_folders: set[Path] = set()


@lru_cache(maxsize=1)
def pid_namespace() -> int:
    """Number of this process's PID namespace. It distinguishes PIDs of different containers."""
    return os.stat("/proc/self/ns/pid").st_ino


def process_started(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot; None if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def is_running(pid: int, started: int | None = None) -> bool:
    """Whether a process with that PID, and with that start time if one is given, still runs.

    If ``/proc`` hides other users' processes (``hidepid``), the start time cannot be compared: any process
    with that PID counts.
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
    """Whether a name, in the form of `create_temporary`, states a process that runs in this PID namespace."""
    writer = _writer_of(name)
    return writer is not None and is_running(*writer)


def _writer_of(name: str) -> tuple[int, int] | None:
    """PID and start time of the process that a name states; None if it states none of this PID namespace."""
    parts = name.split("-")
    if len(parts) != 4 or not all(part.isascii() and part.isdigit() for part in parts[:3]):
        return None
    return (int(parts[1]), int(parts[2])) if int(parts[0]) == pid_namespace() else None


def create_temporary(folder: Path, suffix: str = "part") -> tuple[int, Path]:
    """Create a file in ``folder``, open for reading and writing; returns ``(descriptor, path)``.

    The name states this process.

    Args:
        folder: where to create the file.
        suffix: purpose of the file, which ends the name; must not contain ``-``. Default "part".
    """
    _folders.add(folder)
    path = folder / f"{_own_start()}{os.urandom(16).hex()}.{suffix}"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    give_to_owner(fd, folder)
    return fd, path


def write_whole(
    path: Path, pieces: Iterable[bytes], folder: Path, mode: int, *, durable: bool = True
) -> None:
    """Write a file of the store, or put another in its place: whole or, after any error, not at all.

    Args:
        path: the file.
        pieces: its bytes, in order.
        folder: the store's folder of temporary files, on the same file system.
        mode: permission bits of the file.
        durable: sync the bytes and the name to disk, so that a power cut leaves the old file or the new one.
            False for files whose readers check the bytes. Default True.
    """
    fd, temporary = create_temporary(folder)
    try:
        with os.fdopen(fd, "wb", buffering=1 << 20) as file:
            os.fchmod(fd, mode)
            file.writelines(pieces)
            file.flush()
            if durable:
                os.fsync(fd)
        temporary.rename(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if durable:
        sync_folder(path.parent)


def _own_start() -> str:
    """The begin of the names of this process's files. Behind it comes a random part, which makes names of
    different threads differ, and names of successive processes with the same PID.
    """
    return f"{pid_namespace()}-{os.getpid()}-{_this_process_started()}-"


@lru_cache(maxsize=1)
def _this_process_started() -> int:
    return process_started(os.getpid()) or 0


os.register_at_fork(after_in_child=_this_process_started.cache_clear)


def abandon(path: Path) -> None:
    """Leave a file of `create_temporary` to whoever goes on with it, as if this process were gone."""
    namespace, pid, _, rest = path.name.split("-")
    path.rename(path.with_name(f"{namespace}-{pid}-0-{rest}"))  # no process starts at tick 0 but the first


def take_over(folder: Path, suffix: str) -> tuple[int, Path] | None:
    """Take over a temporary file that a process left behind when it ended.

    The caller checks the bytes of the file before it uses them. A file of another user is not taken: its
    owner may still write to it.

    Args:
        folder: where `create_temporary` made the file.
        suffix: purpose of the file.

    Returns:
        A descriptor for reading and writing, and the new path, which states this process; None if no such
        file was left.
    """
    _folders.add(folder)
    for left in folder.glob(f"*.{suffix}"):
        writer, path = _writer_of(left.name), folder / f"{_own_start()}{os.urandom(16).hex()}.{suffix}"
        try:
            if writer is None or is_running(*writer) or not _is_own_file(left.lstat(), folder):
                continue
            left.rename(path)
        except FileNotFoundError:
            continue  # another process has just taken or removed it
        fd = os.open(path, os.O_RDWR | _SAFE_OPEN)
        if _is_own_file(os.fstat(fd), folder):
            return fd, path
        os.close(fd)
    return None


def _is_own_file(status: os.stat_result, folder: Path) -> bool:
    """Whether a file in ``folder`` is one that `create_temporary` has made, for this user."""
    is_file = stat.S_ISREG(status.st_mode) and status.st_nlink == 1
    return is_file and status.st_uid in (os.geteuid(), folder.stat().st_uid)


def remove_own() -> None:
    """Remove the temporary files of this process. For a process that an interrupt ends, at its very end.

    A Ctrl-C may come when a file has just been created, and no variable refers to it yet.
    """
    for folder in _folders:
        for path in folder.glob(f"{_own_start()}*"):
            path.unlink(missing_ok=True)


class LeftoverFile(NamedTuple):
    """A file without a live writer, and its size in bytes."""

    path: Path
    size: int


def leftover_files(folder: Path) -> Iterator[LeftoverFile]:
    """Yield the temporary files in ``folder`` whose writer is gone. Skips folders: `doctor` handles those."""
    for path in folder.iterdir():
        try:
            status = path.lstat()
        except FileNotFoundError:
            continue  # its writer has just finished
        if not stat.S_ISDIR(status.st_mode) and _writer_gone(path.name, status.st_mtime):
            yield LeftoverFile(path, status.st_size)


def leftover_folders(folder: Path) -> Iterator[Path]:
    """Yield folders in ``folder``, named like `create_temporary`'s files, whose process is gone.

    Folders of other PID namespaces are left out: a folder does not show whether a process still writes in it.
    """
    for path in folder.iterdir() if folder.is_dir() else ():
        writer = _writer_of(path.name)
        if writer is not None and not is_running(*writer):
            yield path


def _writer_gone(name: str, modified: float) -> bool:
    writer = _writer_of(name)
    if writer is not None:
        return not is_running(*writer)
    return abs(time.time() - modified) > OTHER_NAMESPACE_SECONDS


def open_no_follow(path: str | os.PathLike[str]) -> int:
    """Open a path for reading, without following a symbolic link. Does not check that it is a regular file.

    Raises:
        FileNotFoundError: there is nothing, or a link, a socket, or a path below a file.
    """
    try:
        return os.open(path, os.O_RDONLY | _SAFE_OPEN)
    except OSError as error:
        if error.errno not in _NO_FILE:
            raise
        raise FileNotFoundError(error.errno, "it is not a file", os.fspath(path)) from error


def open_regular(path: str | os.PathLike[str]) -> int:
    """Open a file of the store for reading.

    Raises:
        FileNotFoundError: there is no such file, or something else than a regular file.
    """
    fd = open_no_follow(path)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise FileNotFoundError(errno.EINVAL, "it is not a file", os.fspath(path))
    return fd


def check_regular(path: str) -> None:
    """Check that a file of the store, which other code will open, is a regular file or missing.

    Raises:
        StoreError: there is something else.
    """
    with suppress(FileNotFoundError):
        if not stat.S_ISREG(os.lstat(path).st_mode):
            raise StoreError(_NOT_A_FILE.format(path))


def open_with_mode(path: Path, flags: int, mode: int) -> int:
    """`os.open` that creates a missing file with exactly ``mode``: a shared store must not depend on a umask.

    Raises:
        StoreError: there is something else than a regular file.
    """
    try:
        fd = _open_or_make(path, flags | _SAFE_OPEN, mode)
    except OSError as error:
        if error.errno not in _NO_FILE:
            raise
        raise StoreError(_NOT_A_FILE.format(path)) from error
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        os.close(fd)
        raise StoreError(_NOT_A_FILE.format(path))
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
            continue  # another process has just removed it


def make_folder(path: Path, mode: int) -> None:
    """Create a folder of the store if it is missing, and give it exactly these permission bits."""
    try:
        path.mkdir()
    except FileExistsError:
        if path.stat().st_mode & 0o7777 == mode:
            return
    else:
        give_to_owner(path, path.parent)
    path.chmod(mode)


def give_to_owner(made: int | Path, folder: Path) -> None:
    """If root has just created a file or folder in a store, give it to the owner of its parent folder.

    Otherwise the owner could not use it. Must never: give away anything that existed before, since it may be
    a hard link to a file of root.

    Args:
        made: descriptor of a new file, or path of a new folder or socket.
        folder: the parent folder.
    """
    if os.geteuid():
        return
    if isinstance(made, int):
        _give(made, made, folder)
        return
    fd = os.open(made, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):  # the folder's owner may have put a file there meanwhile
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
        # The root user of a container may have no special rights outside it.
        if error.errno not in (errno.EPERM, errno.EINVAL):
            raise


def sync_folder(folder: Path) -> None:
    """Sync a folder to disk, so that the names in it survive a power cut."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
