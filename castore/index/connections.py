"""SQLite connections to the index, and their handling across a fork.

A connection belongs to one process and one thread: each thread opens its own, and a forked child starts with
none. The child must neither use nor close the connections it inherits, and its locks must still mark it as a
user of the file. No thread is inside SQLite when this process forks (forks.py). So no call waits in SQLite
for longer than a turn, and longer waits are loops in Python.
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
from typing import Any, NamedTuple, TypeVar

from castore.system.forks import block_forks, finalise, fork_gate, reset_after_fork
from castore.system.sql_errors import SQL_ERRORS, is_locked

T = TypeVar("T")

#: Seconds that a reader or writer waits for others.
BUSY_SECONDS = 120.0
#: Busy timeout of one turn in SQLite, in seconds: a fork waits as long. Then the pause between two turns.
ATTEMPT_SECONDS = 0.25
PAUSE_SECONDS = 0.001
#: Seconds that closing waits for threads that are inside SQLite.
CLOSE_SECONDS = 5.0
#: Pages in the WAL at which a commit runs a checkpoint, which takes a tenth of a second or more.
CHECKPOINT_PAGES = 8000
# Largest WAL to leave in place, in bytes: the next process to open the index reads it in a fraction of a
# millisecond.
_MAX_WAL_LEFT = 256 * 1024
# First byte and number of bytes of SQLite's shared locks in the database file.
_SHARED_FIRST, _SHARED_SIZE = 0x40000002, 510
# The byte of the wal-index on which each process that uses it holds a shared lock. A process that finds no
# lock there truncates the wal-index.
_DEADMAN_SWITCH = 128

# Connections of a parent, kept so that a child never closes them: closing would drop SQLite's locks and could
# delete the WAL under the parent.
_inherited: list[object] = []
# All connections open here. Python's collector runs finalisers in any order. Without this set, a connection's
# own finaliser could close it, with no regard for forks, before its `Connections` did.
_connected: set[sqlite3.Connection] = set()


def checkpoint_at(db: sqlite3.Connection, pages: int) -> None:
    """Have the commits of a connection run a checkpoint once the WAL has that many pages."""
    with block_forks():
        try:
            db.execute(f"PRAGMA wal_autocheckpoint = {pages}")
        except sqlite3.ProgrammingError:
            # Another thread may have closed the connection; the next one has the usual setting.
            if db in _connected:
                raise


def retry_while_locked(work: Callable[[], T]) -> T:
    """Retry ``work`` while others have the index locked, and return its result.

    This process may fork between two tries.
    """
    until = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            return work()
        except sqlite3.OperationalError as error:
            if not is_locked(error) or time.monotonic() > until:
                raise
        time.sleep(PAUSE_SECONDS)


class _Open(NamedTuple):
    """A connection, its thread, and the lock that this thread holds while it is inside SQLite."""

    thread: threading.Thread
    busy: Any
    db: sqlite3.Connection


class Connections:
    """The connections of one process to one index.

    Args:
        path: of ``index.sqlite``.
        durable: commits survive a power cut.
        read_only: the file's folder cannot be written to.
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
            self._retake_locks()
        self._open: list[_Open] = []
        # Connections that are not set up yet, which `close` must not touch.
        self._starting: set[sqlite3.Connection] = set()
        self._lock = threading.Lock()

    def _retake_locks(self) -> None:
        """Take in a forked child the locks that SQLite there believes it holds.

        The fork copies SQLite's table of locks into the child, but not the kernel's locks. The child's
        connections would rely on a shared lock that nobody holds. The last other process to close the file
        would then delete the WAL under them. The next process to open it would take the wal-index for one of
        dead processes, and truncate it under them. The bytes are those of
        https://sqlite.org/fileformat2.html#the_lock_byte_page and https://sqlite.org/walformat.html.
        """
        _hold_shared_lock(self._path, _SHARED_FIRST, _SHARED_SIZE)
        _hold_shared_lock(f"{self._path}-shm", _DEADMAN_SWITCH, 1)

    def open(self) -> sqlite3.Connection:
        """A new connection, for this thread.

        Raises:
            sqlite3.DatabaseError: the file cannot be used.
        """
        # The list holds a connection before that connection takes its first lock, so a fork finds them all.
        busy = block_forks()
        with self._lock, busy:
            # Threads come and go: connections of ended threads would use up the process's descriptors.
            # Each thread is asked once: one that ended between two questions would leave its connection open.
            for opened in [opened for opened in self._open if not opened.thread.is_alive()]:
                _disconnect(opened.db)
                self._open.remove(opened)
            # check_same_thread is off only so that this object can close every thread's connection.
            db = sqlite3.connect(
                self._address(),
                uri=self.read_only,
                timeout=ATTEMPT_SECONDS,
                isolation_level=None,
                cached_statements=256,
                check_same_thread=False,
            )
            _connected.add(db)
            self._starting.add(db)
            self._open.append(_Open(threading.current_thread(), busy, db))
        try:
            self._set_up(db)
        except BaseException:
            with self._lock, block_forks():
                self._open = [opened for opened in self._open if opened.db is not db]
                _disconnect(db)
            raise
        finally:
            self._starting.discard(db)
        return db

    def unlogged_identity(self) -> tuple[int, int, int] | None:
        """Inode, size and modification time of an index without a WAL: they change when the index does.

        None for an index with a WAL: SQLite then sees changes itself.
        """
        if self._has_wal():
            return None
        found = os.stat(self._path)
        return found.st_ino, found.st_size, found.st_mtime_ns

    def _has_wal(self) -> bool:
        try:
            return os.stat(f"{self._path}-wal").st_size > 0
        except FileNotFoundError:
            return False

    def _address(self) -> str | Path:
        if not self.read_only:
            return self._path
        # Without a WAL, SQLite would have to make one in order to read. `immutable` asserts that nobody
        # writes.
        return f"{self._path.as_uri()}?mode=ro{'' if self._has_wal() else '&immutable=1'}"

    def _set_up(self, db: sqlite3.Connection) -> None:
        if self.read_only:
            return
        # Only the first connection to a new index changes its journal mode. To others that try the same at
        # that moment SQLite returns SQLITE_BUSY at once, whatever their busy timeout. Small pages: a commit
        # writes whole pages, and a put touches one page of each table.
        for pragma in (
            "page_size = 2048",
            "journal_mode = WAL",
            f"synchronous = {'FULL' if self._durable else 'NORMAL'}",
            f"wal_autocheckpoint = {CHECKPOINT_PAGES}",
            "cache_size = -8192",
        ):
            retry_while_locked(partial(_run_pragma, db, pragma))

    def close(self, forget: Callable[[], object], *, leave_wal: bool) -> None:
        """Close every thread's connection, once that thread is not inside SQLite.

        A connection that its thread uses for longer than `CLOSE_SECONDS` stays, until that thread has ended
        or the next `close`.

        Args:
            forget: has all threads ask for a new connection from now on. Those are not closed.
            leave_wal: leave a small WAL to the next process that opens the index, even if no other has it
                open now.
        """
        with self._lock:
            old = {opened.db for opened in self._open}
        forget()
        until = time.monotonic() + CLOSE_SECONDS
        while not self._close_idle(old, leave_wal) and time.monotonic() < until:
            time.sleep(PAUSE_SECONDS)

    def _close_idle(self, old: set[sqlite3.Connection], leave_wal: bool) -> bool:
        """Close those connections that no thread is using; whether that were all.

        Waits for nobody: a thread inside SQLite may wait for what this thread holds.
        """
        with self._lock, block_forks():
            left = [opened for opened in self._open if opened.db in old]
            if not fork_gate.acquire(blocking=False):
                return not left  # a thread is in the middle of a write transaction
            idle: list[_Open] = []
            try:
                idle.extend(
                    opened
                    for opened in left
                    if opened.db not in self._starting and opened.busy.acquire(blocking=False)
                )
                # Only the last connection to close may run a checkpoint.
                last = self._open_reader() if leave_wal and idle and len(idle) == len(left) else None
                for opened in idle:
                    _disconnect(opened.db)
                    self._open.remove(opened)
                    old.remove(opened.db)
                if last is not None:
                    last.close()
            finally:
                for opened in idle:
                    opened.busy.release()
                fork_gate.release()
            return not any(opened.db in old for opened in left)

    def _finalise(self) -> None:
        with self._lock, block_forks():
            for opened in self._open:
                _disconnect(opened.db)
            self._open = []

    def __del__(self) -> None:
        # The last reference to a connection would close it too, while another thread forks.
        if getattr(self, "_open", None):  # a Ctrl-C may come before the first line of `__init__`
            reset_after_fork(
                self
            )  # the collector has struck this object off the list, and a fork may come first
            finalise(self._finalise)

    def _open_reader(self) -> sqlite3.Connection | None:
        """A read-only connection. The last connection to close runs a checkpoint, unless it is read-only.

        A checkpoint waits for the disk three times, and the next start of a WAL for a fourth time.
        """
        with contextlib.suppress(OSError, *SQL_ERRORS):  # then the WAL is not left
            if os.stat(f"{self._path}-wal").st_size <= _MAX_WAL_LEFT:
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


def _hold_shared_lock(path: str | os.PathLike[str], first: int, size: int) -> None:
    """Take a shared lock for as long as this process lives.

    The descriptor stays open: closing any descriptor of the file would drop the lock.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return  # the store was removed: there is nothing to lock, and opening it again raises the error
    fcntl.lockf(fd, fcntl.LOCK_SH, size, first)
    _inherited.append(fd)


def _run_pragma(db: sqlite3.Connection, pragma: str) -> None:
    with block_forks():
        db.execute(f"PRAGMA {pragma}")
