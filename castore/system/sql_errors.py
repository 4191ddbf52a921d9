"""Classifies errors of SQLite and of files: full disk, lock, or damage. Handles none of them."""

from __future__ import annotations

import errno
import sqlite3

from castore.errors import FullError

#: Errors of SQLite, and the error of Python's sqlite3 for text of a damaged file that is not UTF-8.
SQL_ERRORS = (sqlite3.Error, UnicodeDecodeError)


def is_full(error: BaseException) -> bool:
    """Whether SQLite or a file ran out of space."""
    if isinstance(error, FullError):
        return False  # already the error for the user
    return getattr(error, "errno", None) == errno.ENOSPC or "disk is full" in str(error)


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
