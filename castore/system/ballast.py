"""The ballast: room on the disk that a store holds back, so that it can be opened and emptied when there is not a byte left.

SQLite writes before it frees: its log when names are removed, its shared memory when the file is opened. So on a full disk
work that frees room, or needs next to none, is done once more without the ballast, which takes its place again afterwards.
Whatever else writes to the disk may take the room meanwhile: then the error is what it was.
"""

from __future__ import annotations

import os
import sqlite3
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from castore.errors import FullError
from castore.system.sql_errors import is_full
from castore.system.temporary import open_with_mode

T = TypeVar("T")

#: Bytes held back: the log of some thousand removed names.
BALLAST_BYTES = 2 * 1024 * 1024
# It is made where it is a small part of what is free, so never on a disk that is small or nearly full.
_MADE_WITH_FREE = 16 * BALLAST_BYTES

# More than what SQLite asks for at once to open its file.
_SHM_BYTES = 64 * 1024


def free_bytes(folder: Path) -> int:
    """What may still be written to the disk of ``folder``."""
    status = os.statvfs(folder)
    # Some file systems do not tell.
    return status.f_bavail * status.f_frsize if status.f_blocks else sys.maxsize


def is_short(folder: Path) -> bool:
    """Whether there is so little room that removing has to go in small steps."""
    return free_bytes(folder) < _MADE_WITH_FREE


def full(folder: Path, error: BaseException) -> FullError | None:
    """What to tell the user of an error that a full disk of ``folder`` explains; None for any other."""
    # SQLite says no more than "disk I/O error" where there is no room for its shared memory.
    if is_full(error) or (isinstance(error, sqlite3.OperationalError) and free_bytes(folder) < _SHM_BYTES):
        return FullError(f"the disk of {folder} is full; free some space there")
    return None


class Ballast:
    """The ballast of one store.

    Args:
        path: the file; it need not exist.
        mode: its permission bits.
    """

    def __init__(self, path: Path, mode: int) -> None:
        self._path = path
        self._mode = mode

    def keep(self) -> None:
        """Make the ballast if it is missing and the disk has room enough."""
        if self._size() < BALLAST_BYTES and not is_short(self._path.parent):
            self._take(BALLAST_BYTES)

    def relieve(self, work: Callable[[], T], settle: Callable[[], None] = lambda: None) -> T:
        """What ``work`` returns; if the disk is full for it, it is called once more without the ballast.

        Args:
            settle: gives back what the work took for a while, before the ballast takes its place again.

        Raises:
            FullError: that was not enough.
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
            self._take(given)

    def _size(self) -> int:
        try:
            return self._path.lstat().st_size
        except FileNotFoundError:
            return 0

    def _take(self, size: int) -> None:
        """Hold back so much, or what there is of it."""
        with suppress(OSError):  # half of it is better than none, and none is no reason to fail
            size = min(size, free_bytes(self._path.parent))
            fd = open_with_mode(self._path, os.O_WRONLY, self._mode)
            try:
                if size:
                    os.posix_fallocate(fd, 0, size)
            finally:
                os.close(fd)
