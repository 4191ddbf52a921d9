"""SQLite connections to the index, and what a fork does to them.

A connection belongs to one process and one thread: each thread opens its own, a forked child starts with none. The child
must neither use nor close what it inherits, and still counts as one who uses the file.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
import threading
import time
from pathlib import Path

from castore.forks import reset_after_fork
from castore.sqlerrors import SQL_ERRORS

#: Seconds a writer waits for others.
BUSY_SECONDS = 120.0
#: Pages in the log with which a commit brings it into the index, which takes a tenth of a second or more.
CHECKPOINT_PAGES = 8000
# Bytes of a log that is left behind: whoever opens the index reads it, which takes a fraction of a millisecond.
_LOG_LEFT = 256 * 1024
# Where SQLite's shared locks lie in the file, and how many bytes they are.
_SHARED_FIRST, _SHARED_SIZE = 0x40000002, 510

# Connections of a parent, kept so that a child never closes them: closing would drop SQLite's locks and could delete
# the WAL under the parent.
_inherited: list[object] = []


def checkpoint_at(db: sqlite3.Connection, pages: int) -> None:
    """Have the commits of a connection bring the log into the index once it has that many pages."""
    db.execute(f"PRAGMA wal_autocheckpoint = {pages}")


class Connections:
    """The connections of one process to one index.

    Args:
        path: of ``index.sqlite``.
        durable: commits survive a power cut.
    """

    def __init__(self, path: Path, durable: bool) -> None:
        self._path = path
        self._durable = durable
        self._after_fork()
        reset_after_fork(self)

    def _after_fork(self) -> None:
        if getattr(self, "_open", None):
            _inherited.append(self._open)
            self._share_lock()
        self._open: list[tuple[threading.Thread, sqlite3.Connection]] = []
        self._lock = threading.Lock()

    def _share_lock(self) -> None:
        """Lock in a forked child what SQLite there believes to be locked.

        Its table of locks is copied into the child, the kernel's locks are not: the child's connections would count
        on a shared lock that nobody holds, and the last of the others to close would delete the WAL under them. The
        bytes are those of https://sqlite.org/fileformat2.html#the_lock_byte_page; the descriptor stays open, since
        closing any would drop the lock.
        """
        try:
            fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return  # the store was removed: there is nothing to lock, and opening it again will say so
        fcntl.lockf(fd, fcntl.LOCK_SH, _SHARED_SIZE, _SHARED_FIRST)
        _inherited.append(fd)

    def open(self) -> sqlite3.Connection:
        """A new connection, for this thread.

        Raises:
            sqlite3.DatabaseError: the file cannot be used.
        """
        # check_same_thread is off only so that this object can close every thread's connection.
        db = sqlite3.connect(
            self._path,
            timeout=BUSY_SECONDS,
            isolation_level=None,
            cached_statements=256,
            check_same_thread=False,
        )
        # Small pages: a commit writes whole pages, and a put touches one of each table.
        db.execute("PRAGMA page_size = 2048")
        _use_wal(db)
        db.execute(f"PRAGMA synchronous = {'FULL' if self._durable else 'NORMAL'}")
        checkpoint_at(db, CHECKPOINT_PAGES)
        db.execute("PRAGMA cache_size = -8192")
        with self._lock:
            # Threads come and go; what the gone ones leave open would use up the process's descriptors.
            for thread, left in self._open:
                if not thread.is_alive():
                    left.close()
            self._open = [(thread, kept) for thread, kept in self._open if thread.is_alive()]
            self._open.append((threading.current_thread(), db))
        return db

    def close(self, *, leave_log: bool = False) -> None:
        """Close every thread's connection.

        Args:
            leave_log: leave a small log to whoever opens the index next, even if nobody else has it open now.
        """
        with self._lock:
            connections, self._open = self._open, []
        last = self._reader() if leave_log and connections else None
        for _, db in connections:
            db.close()
        if last is not None:
            last.close()

    def _reader(self) -> sqlite3.Connection | None:
        """A connection that may only read: the last one to close brings the log into the index, unless it is of those.

        That waits for the disk three times, and a fourth time when the log is begun anew.
        """
        with contextlib.suppress(OSError, *SQL_ERRORS):  # then the log is not left
            if os.stat(f"{self._path}-wal").st_size <= _LOG_LEFT:
                db = sqlite3.connect(f"{self._path.as_uri()}?mode=ro", uri=True, check_same_thread=False)
                db.execute("PRAGMA user_version").fetchone()  # only now is the file open, with a lock on it
                return db
        return None


def _use_wal(db: sqlite3.Connection) -> None:
    # Only the first connection to a new index changes its mode, and SQLite then answers "locked" at once to others
    # who are just doing the same, however long they are willing to wait.
    deadline = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            db.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.005)
