"""SQLite connections to the index, and what a fork does to them.

A connection belongs to one process and one thread: each thread opens its own, a forked child starts with none. The child
must neither use nor close what it inherits, and still counts as one who uses the file. No thread is inside SQLite when
this process forks (forks.py), so nothing waits in SQLite for longer than a turn: longer waits are loops of Python's.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

from castore.system.forks import finalise, reset_after_fork, unforked
from castore.system.sql_errors import SQL_ERRORS, is_locked

T = TypeVar("T")

#: Seconds that a reader or writer waits for others.
BUSY_SECONDS = 120.0
#: Seconds of these that SQLite waits in one go, and a fork with it; and those between two such turns.
TURN_SECONDS = 0.25
PAUSE_SECONDS = 0.001
#: Pages in the log with which a commit brings it into the index, which takes a tenth of a second or more.
CHECKPOINT_PAGES = 8000
# Bytes of a log that is left behind: whoever opens the index reads it, which takes a fraction of a millisecond.
_LOG_LEFT = 256 * 1024
# Where SQLite's shared locks lie in the file, and how many bytes they are.
_SHARED_FIRST, _SHARED_SIZE = 0x40000002, 510
# Where in the shared memory every process that uses it holds a shared lock: whoever finds none there empties it.
_DEAD_MAN = 128

# Connections of a parent, kept so that a child never closes them: closing would drop SQLite's locks and could delete
# the WAL under the parent.
_inherited: list[object] = []
# All that are open here. The collector finalises what it collects in any order: a connection that nothing else held would
# be closed by its own finaliser, with no regard for forks, before the `Connections` that it belongs to could close it.
_connected: set[sqlite3.Connection] = set()


def checkpoint_at(db: sqlite3.Connection, pages: int) -> None:
    """Have the commits of a connection bring the log into the index once it has that many pages."""
    with unforked():
        db.execute(f"PRAGMA wal_autocheckpoint = {pages}")


def patiently(work: Callable[[], T]) -> T:
    """What ``work`` returns, tried again as long as others have the index locked. This process may fork in between."""
    until = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            return work()
        except sqlite3.OperationalError as error:
            if not is_locked(error) or time.monotonic() > until:
                raise
        time.sleep(PAUSE_SECONDS)


class Connections:
    """The connections of one process to one index.

    Args:
        path: of ``index.sqlite``.
        durable: commits survive a power cut.
        read_only: nothing can be written where the file lies.
    """

    def __init__(self, path: Path, durable: bool, *, read_only: bool = False) -> None:
        self._path = path
        self.read_only = read_only
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
        on a shared lock that nobody holds, and the last of the others to close would delete the WAL under them; the
        next to open would take the shared memory for left behind by dead ones, and cut it off under them. The bytes
        are those of https://sqlite.org/fileformat2.html#the_lock_byte_page and https://sqlite.org/walformat.html.
        """
        _share(self._path, _SHARED_FIRST, _SHARED_SIZE)
        _share(f"{self._path}-shm", _DEAD_MAN, 1)

    def open(self) -> sqlite3.Connection:
        """A new connection, for this thread.

        Raises:
            sqlite3.DatabaseError: the file cannot be used.
        """
        # A fork finds every connection on the list, from the first lock that it takes on the file.
        with self._lock, unforked():
            # Threads come and go; what the gone ones leave open would use up the process's descriptors.
            for thread, left in self._open:
                if not thread.is_alive():
                    _disconnect(left)
            self._open = [(thread, kept) for thread, kept in self._open if thread.is_alive()]
            # check_same_thread is off only so that this object can close every thread's connection.
            db = sqlite3.connect(
                self._where(),
                uri=self.read_only,
                timeout=TURN_SECONDS,
                isolation_level=None,
                cached_statements=256,
                check_same_thread=False,
            )
            _connected.add(db)
            self._open.append((threading.current_thread(), db))
        try:
            self._set_up(db)
        except BaseException:
            with self._lock, unforked():
                self._open = [(thread, kept) for thread, kept in self._open if kept is not db]
                _disconnect(db)
            raise
        return db

    def frozen(self) -> tuple[int, int, int] | None:
        """What tells one state of an index without a log from another; None for one with a log, of which SQLite takes care."""
        if self._has_log():
            return None
        found = os.stat(self._path)
        return found.st_ino, found.st_size, found.st_mtime_ns

    def _has_log(self) -> bool:
        try:
            return os.stat(f"{self._path}-wal").st_size > 0
        except FileNotFoundError:
            return False

    def _where(self) -> str | Path:
        if not self.read_only:
            return self._path
        # Without a log SQLite would have to make one, to be read through: it is told that nobody writes.
        return f"{self._path.as_uri()}?mode=ro{'' if self._has_log() else '&immutable=1'}"

    def _set_up(self, db: sqlite3.Connection) -> None:
        if self.read_only:
            return
        # Only the first connection to a new index changes its mode, and SQLite then answers "locked" at once to others
        # who are just doing the same, however long they are willing to wait. Small pages: a commit writes whole pages,
        # and a put touches one of each table.
        for pragma in (
            "page_size = 2048",
            "journal_mode = WAL",
            f"synchronous = {'FULL' if self._durable else 'NORMAL'}",
            f"wal_autocheckpoint = {CHECKPOINT_PAGES}",
            "cache_size = -8192",
        ):
            patiently(partial(_set, db, pragma))

    def close(self, *, leave_log: bool = False) -> None:
        """Close every thread's connection.

        Args:
            leave_log: leave a small log to whoever opens the index next, even if nobody else has it open now.
        """
        with self._lock, unforked():
            connections, self._open = self._open, []
            last = self._reader() if leave_log and connections else None
            for _, db in connections:
                _disconnect(db)
            if last is not None:
                last.close()

    def __del__(self) -> None:
        # The last reference to a connection would close it too, while another thread forks.
        if self._open:
            reset_after_fork(
                self
            )  # the collector has struck this object off the list, and a fork may come first
            finalise(self.close)

    def _reader(self) -> sqlite3.Connection | None:
        """A connection that may only read: the last one to close brings the log into the index, unless it is of those.

        That waits for the disk three times, and a fourth time when the log is begun anew.
        """
        with contextlib.suppress(OSError, *SQL_ERRORS):  # then the log is not left
            if os.stat(f"{self._path}-wal").st_size <= _LOG_LEFT:
                db = sqlite3.connect(f"{self._path.as_uri()}?mode=ro", uri=True, check_same_thread=False)
                try:
                    db.execute(
                        "PRAGMA user_version"
                    ).fetchone()  # only now is the file open, with a lock on it
                except BaseException:
                    db.close()
                    raise
                return db
        return None


def _disconnect(db: sqlite3.Connection) -> None:
    db.close()
    _connected.discard(db)


def _share(path: str | os.PathLike[str], first: int, size: int) -> None:
    """Take a shared lock, for as long as this process lives: closing any descriptor of the file would drop it."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return  # the store was removed: there is nothing to lock, and opening it again will say so
    fcntl.lockf(fd, fcntl.LOCK_SH, size, first)
    _inherited.append(fd)


def _set(db: sqlite3.Connection, pragma: str) -> None:
    with unforked():
        db.execute(f"PRAGMA {pragma}")
