"""The ballast: disk space that a store reserves, so that the store can be opened and emptied on a full disk.

SQLite writes before it frees space: the WAL when names are removed, the shared-memory file when the database
is opened. If the disk is full, work that frees space, or needs very little, is repeated without the ballast.
Afterwards the ballast is allocated again. Another program may take the space meanwhile: then the error
stands.
"""

from __future__ import annotations

import errno
import os
import sqlite3
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from castore.errors import FullError
from castore.system.sql_errors import is_full, no_space_in
from castore.system.temporary import open_with_mode

T = TypeVar("T")

#: Bytes reserved: the WAL of about a thousand removed names.
BALLAST_BYTES = 2 * 1024 * 1024
# Free bytes that the disk must have for a ballast to be created: the ballast must be a small part of them.
_MADE_WITH_FREE = 16 * BALLAST_BYTES

# More bytes than SQLite needs at once for its shared-memory file.
_SHM_BYTES = 64 * 1024


def free_bytes(folder: Path) -> int:
    """Bytes that may still be written to the disk of ``folder``; `sys.maxsize` if unknown."""
    status = os.statvfs(folder)
    # Some file systems report no sizes.
    return status.f_bavail * status.f_frsize if status.f_blocks else sys.maxsize


def is_short(folder: Path) -> bool:
    """Whether the disk has so little space that removing must go in small steps."""
    return free_bytes(folder) < _MADE_WITH_FREE


def full_disk_error(folder: Path, error: BaseException) -> FullError | None:
    """Return a FullError if a full disk of ``folder`` explains the error, else None."""
    if not is_full(error):
        # SQLite reports only "disk I/O error" if there is no space for its shared-memory file, or if a quota
        # is used up.
        refusal = _refusal(folder) if isinstance(error, sqlite3.OperationalError) else None
        if refusal is None:
            return None
        error = refusal
    return FullError(f"{no_space_in(folder, error)}; free some space there")


def _refusal(folder: Path) -> OSError | None:
    """The error that the system gives for more bytes behind the largest file of ``folder``, or None."""
    if free_bytes(folder) < _SHM_BYTES:
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    try:
        end = max((entry.stat().st_size for entry in os.scandir(folder) if entry.is_file()), default=0)
        fd = os.open(folder, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        try:
            os.pwrite(fd, bytes(_SHM_BYTES), end)
        finally:
            os.close(fd)
    except OSError as error:  # also of a file system that makes no files without names: it says nothing then
        return error if is_full(error) else None
    return None


class Ballast:
    """The ballast of one store.

    Args:
        path: path of the file, which need not exist.
        mode: permission bits of the file.
    """

    def __init__(self, path: Path, mode: int) -> None:
        self._path = path
        self._mode = mode

    def keep(self) -> None:
        """Create the ballast if it is missing and the disk has enough space."""
        if self._size() < BALLAST_BYTES and not is_short(self._path.parent):
            self._allocate(BALLAST_BYTES)

    def relieve(self, work: Callable[[], T], settle: Callable[[], None] = lambda: None) -> T:
        """Return the result of ``work``. If it raises FullError, call it once more without the ballast.

        Args:
            work: the work to do. It may be called twice.
            settle: frees space that the work used temporarily; called before the ballast is allocated again.

        Raises:
            FullError: the ballast's space was not enough, or there is no ballast.
        """
        try:
            return work()
        except FullError:
            given = self._size()
            if not given:
                raise
        self._path.unlink(missing_ok=True)
        try:
            result = work()
            settle()
            return result
        finally:
            self._allocate(given)

    def _size(self) -> int:
        try:
            return self._path.lstat().st_size
        except FileNotFoundError:
            return 0

    def _allocate(self, size: int) -> None:
        """Allocate ``size`` bytes, or as many as are free."""
        with suppress(OSError):  # a smaller ballast is better than none, and none is no reason to fail
            size = min(size, free_bytes(self._path.parent))
            fd = open_with_mode(self._path, os.O_WRONLY, self._mode)
            try:
                if size:
                    os.posix_fallocate(fd, 0, size)
            finally:
                os.close(fd)
