"""What an error of SQLite or of a file means: no room, or damage. Decides nothing else, and handles nothing."""

from __future__ import annotations

import errno
import sqlite3

from castore.errors import FullError

#: What SQLite raises, and Python where it quotes text of a damaged file that is no UTF-8.
SQL_ERRORS = (sqlite3.Error, UnicodeDecodeError)


def is_full(error: BaseException) -> bool:
    """Whether SQLite or a file ran out of space."""
    if isinstance(error, FullError):
        return False  # said already
    return getattr(error, "errno", None) == errno.ENOSPC or "disk is full" in str(error)


def is_locked(error: BaseException) -> bool:
    """Whether somebody else has the lock that SQLite needs: later it may have it."""
    return isinstance(error, sqlite3.OperationalError) and any(
        word in str(error) for word in ("locked", "busy")
    )


def is_damage(error: BaseException) -> bool:
    """Whether SQLite cannot use its file: not for others' locks, nor for a mistake of ours."""
    if isinstance(error, UnicodeDecodeError):
        return True
    if type(error) is sqlite3.OperationalError:
        return not any(word in str(error) for word in ("locked", "busy", "interrupted", "disk is full"))
    return type(error) is sqlite3.DatabaseError
