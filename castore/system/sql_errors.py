"""Classifies errors of SQLite and of files: full disk, lock, or damage. Handles none of them."""

from __future__ import annotations

import errno
import sqlite3

from castore.errors import FullError

#: Errors of SQLite, and the error of Python's sqlite3 for text of a damaged file that is not UTF-8.
SQL_ERRORS = (sqlite3.Error, UnicodeDecodeError)


# Users of a shared machine meet their quota long before the disk is full.
_FULL = {
    errno.ENOSPC: "the disk of {} is full",
    errno.EDQUOT: "the quota for the disk of {} is used up",
    errno.EFBIG: "the limit on the size of files (`ulimit -f`, or the file system's) is reached in {}",
}


def is_full(error: BaseException) -> bool:
    """Whether SQLite or a file ran out of space: of the disk, of a quota, or of the limit on files."""
    if isinstance(error, FullError):
        return False  # already the error for the user
    return getattr(error, "errno", None) in _FULL or "disk is full" in str(error)


def no_space_in(folder: object, error: BaseException) -> str:
    """The beginning of a sentence for an error that `is_full` recognizes.

    >>> no_space_in("/data", OSError(errno.ENOSPC, "No space left on device"))
    'the disk of /data is full'
    """
    return _FULL.get(getattr(error, "errno", None) or errno.ENOSPC, _FULL[errno.ENOSPC]).format(folder)


def is_locked(error: BaseException) -> bool:
    """Whether another connection holds the lock that SQLite needs, so that a later attempt may succeed."""
    return isinstance(error, sqlite3.OperationalError) and any(
        word in str(error) for word in ("locked", "busy")
    )


def is_damage(error: BaseException) -> bool:
    """Whether SQLite cannot use its file, for a reason other than a lock, a full disk, or wrong use."""
    if isinstance(error, UnicodeDecodeError):
        return True
    if type(error) is sqlite3.OperationalError:
        return not any(word in str(error) for word in ("locked", "busy", "interrupted", "disk is full"))
    return type(error) is sqlite3.DatabaseError
