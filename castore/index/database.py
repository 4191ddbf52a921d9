"""The index: SQLite in WAL mode, the one record of which names and blobs there are.

Queries are in queries.py; every change is a method of `transaction.Write`, for which reads never wait. Each thread
asks on a connection of its own (connections.py). Statements are plain sqlite3; sqlite-utils makes and migrates the schema (schema.py).

Digests are raw bytes here, names are already checked, times are seconds since the epoch.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import NoReturn, TypeVar

from castore.errors import StoreError, unchangeable
from castore.index.beacon import CHANGED, EPOCH, Beacon
from castore.index.connections import (
    BUSY_SECONDS,
    CHECKPOINT_PAGES,
    PAUSE_SECONDS,
    Connections,
    checkpoint_at,
    patiently,
)
from castore.index.journal import Journal, pack_record
from castore.index.queries import Questions
from castore.index.schema import SCHEMA_VERSION, foreign, migrate
from castore.index.transaction import Write
from castore.records import entry_check
from castore.system.ballast import full
from castore.system.forks import fork_gate, reset_after_fork, unforked
from castore.system.sql_errors import SQL_ERRORS, is_damage, is_full
from castore.system.temporary import check_regular, open_with_mode

T = TypeVar("T")

#: A time that lies further ahead than this, in seconds, was written by a clock that has been set back since.
CLOCK_SLACK = 60.0


def _version(db: sqlite3.Connection) -> int:
    with unforked():
        return int(db.execute("PRAGMA user_version").fetchone()[0])


def _migrate(db: sqlite3.Connection) -> None:
    with fork_gate:
        migrate(db)


def _foreign(db: sqlite3.Connection) -> str | None:
    with unforked():
        return foreign(db)


class Index(Questions):
    """The index of one store.

    Args:
        path: of ``index.sqlite``.
        beacon: told of changes after they are committed.
        journal: appended to within each transaction.
        mode: permission bits of a new index; SQLite gives its WAL the same.
        is_empty: tells whether there are no objects, so that an index without rows is right.
        durable: commits survive a power cut.
        rebuilding: open it as it is, tables or not: for `rebuild`, whose transaction makes it whole.
        read_only: nothing can be written where the store lies; `write` raises then.

    Raises:
        StoreError: the file is damaged or of another version.
    """

    def __init__(
        self,
        path: Path,
        beacon: Beacon,
        journal: Journal,
        *,
        mode: int,
        is_empty: Callable[[], bool],
        durable: bool = False,
        rebuilding: bool = False,
        read_only: bool = False,
    ) -> None:
        self.path = path
        self.beacon = beacon
        self._words = beacon.words
        self.journal = journal
        self.durable = durable
        self.read_only = read_only
        self._rebuilding = self._has_written = rebuilding
        self._connections = Connections(path, durable, read_only=read_only)
        self._after_fork()
        reset_after_fork(self)
        # Never opened and closed if it is there: closing any descriptor of the file would drop the locks that SQLite
        # holds on it in this process, for another `Store` of the same folder.
        for suffix in ("", "-wal", "-shm", "-journal"):
            check_regular(f"{path}{suffix}")
        if not path.exists():
            if read_only:
                raise self._no_index()
            os.close(open_with_mode(path, os.O_RDWR, mode))
        if not rebuilding:
            self._prepare(is_empty)

    def _after_fork(self) -> None:
        self._local = threading.local()
        self._folders: set[str] = set()
        self._folders_seen = 0

    def _prepare(self, is_empty: Callable[[], bool]) -> None:
        """Make the tables of a new index, or bring an older one up to date."""
        epoch = self._epoch()
        db = self._local.db = self._connect()
        self._local.epoch = epoch
        try:
            version = patiently(partial(_version, db))
        except SQL_ERRORS as error:
            self.fail(error)
        if version > SCHEMA_VERSION:
            raise StoreError(
                f"{self.path} was written by a newer castore (schema {version}, this one knows {SCHEMA_VERSION});"
                " upgrade castore"
            )
        # Looked at again if there are objects: another process may have made the index and put them just now.
        if version == 0 and not is_empty() and patiently(partial(_version, db)) == 0:
            raise self._no_index()
        if version < SCHEMA_VERSION and self.read_only:
            raise StoreError(
                f"{self.path} was written by an older castore (schema {version}, this one knows {SCHEMA_VERSION});"
                " open the store once where it can be written to, which brings it up to date"
            )
        try:
            if version < SCHEMA_VERSION:
                self._has_written = True
                patiently(partial(_migrate, db))
            if (wrong := patiently(partial(_foreign, db))) is not None:
                raise self.damaged(wrong)
        except SQL_ERRORS as error:
            self.fail(error)

    def _no_index(self) -> StoreError:
        return StoreError(
            f"the index {self.path} is missing or being rebuilt, and to an empty one all objects would be garbage;"
            " `castore doctor --rebuild-index` makes a new one from them"
        )

    def connection(self) -> sqlite3.Connection:
        """This thread's connection, to the file that is the index now.

        Raises:
            StoreError: the index was replaced and is not whole again yet.
        """
        local = self._local
        epoch = self._words[EPOCH]
        try:
            if local.epoch == epoch:
                return local.db  # type: ignore[no-any-return]
        except AttributeError:
            pass  # this thread's first use
        opened_to = self._epoch() if self.read_only else epoch
        if self.read_only and getattr(local, "epoch", None) == opened_to:
            return local.db  # type: ignore[no-any-return]
        db = self._connect()
        if not self._rebuilding and patiently(partial(_version, db)) != SCHEMA_VERSION:
            raise self._no_index()
        local.db, local.epoch = db, opened_to
        return db

    def _epoch(self) -> object:
        """What a connection was opened to: `connection` opens another once this has changed."""
        epoch = self._words[EPOCH]
        return (epoch, self._connections.frozen()) if self.read_only else epoch

    def is_whole(self) -> bool:
        """Whether a rebuild has committed its transaction, or the index was whole before it. Raises nothing."""
        try:
            return _version(self.connection()) == SCHEMA_VERSION
        except (StoreError, OSError, *SQL_ERRORS):
            return False

    def see_writable(self) -> None:
        """See that the store can be changed.

        Raises:
            StoreError: it is read-only.
        """
        if self.read_only:
            raise unchangeable(self.path.parent)

    def damaged(self, why: object) -> StoreError:
        """What to tell the user of an index that is not what it should be."""
        return StoreError(f"the index {self.path} cannot be used ({why}); `castore doctor` tells more")

    def fail(self, error: BaseException) -> NoReturn:
        """Raise what the user should see of an error."""
        if self.read_only and "unable to open" in str(error):
            raise StoreError(
                f"{self.path} has a log, which cannot be read without {self.path.name}-shm where nothing can be written;"
                " open the store once where it can be written to (`castore stat`)"
            ) from error
        if (no_room := full(self.path.parent, error)) is not None:
            raise no_room from error
        if is_damage(error):
            raise self.damaged(error) from error
        raise error

    def close(self) -> None:
        """Close every thread's connection. Who has only read, and written down what, leaves the log to the next writer."""
        self._local = threading.local()
        self._connections.close(leave_log=not self._has_written and not self.read_only)

    def _connect(self) -> sqlite3.Connection:
        try:
            return self._connections.open()
        except SQL_ERRORS as error:
            self.fail(error)

    def is_folder(self, folder: str) -> bool:
        """Whether this process saw, since names last changed, that no part of ``folder`` is a file.

        The caller holds the write lock. Adding names under a folder cannot make it a file, and what can (removing
        or re-pointing) is announced before it is committed.
        """
        changed = self._words[CHANGED]
        if changed != self._folders_seen:
            self._folders, self._folders_seen = set(), changed
        return folder in self._folders

    def remember_folders(self, folders: list[str]) -> None:
        """Have `is_folder` answer for these until names change."""
        if len(self._folders) > 10_000:
            self._folders = set()
        self._folders.update(folders)

    def forget_folders(self) -> None:
        """Have `is_folder` look again: what made them folders did not come true."""
        self._folders = set()

    def write(self, patience: float = BUSY_SECONDS) -> AbstractContextManager[Write]:
        """A write transaction: commits at the end of the block, takes everything back on an error.

        Args:
            patience: seconds to wait for other writers before entering raises sqlite3.OperationalError.

        Raises:
            FullError: the disk is full.
        """
        self._has_written = True
        return self._transaction(patience)

    @contextmanager
    def _transaction(self, patience: float) -> Iterator[Write]:
        self.see_writable()
        if patience < BUSY_SECONDS:
            if not fork_gate.acquire(blocking=False):
                raise sqlite3.OperationalError("database is locked by another thread")
            fork_gate.release()
        # Everything behind the `with` is inside the `try`: a Ctrl-C can strike between any two instructions, and must
        # leave neither the gate closed nor the transaction open.
        until = time.monotonic() + patience
        while True:
            with fork_gate:
                txn = Write(self)
                try:
                    if txn.begin(until):
                        yield txn
                        txn.commit()
                        return
                except BaseException as error:
                    self._take_back(txn, error)
                    raise
            time.sleep(PAUSE_SECONDS)  # the gate is open to a fork, and to other threads

    def transact(self, work: Callable[[Write], T]) -> T:
        """What ``work`` returns, done in a write transaction: `write` for callers in a hurry."""
        self._has_written = True
        self.see_writable()
        until = time.monotonic() + BUSY_SECONDS
        while True:
            with fork_gate:
                txn = Write(self)
                try:
                    if txn.begin(until):
                        result = work(txn)
                        txn.commit()
                        return result
                except BaseException as error:
                    self._take_back(txn, error)
                    raise
            time.sleep(PAUSE_SECONDS)

    def _take_back(self, txn: Write, error: BaseException) -> None:
        txn.abandon(error)
        if is_full(error) or is_damage(error):
            self.fail(error)

    # Batched bookkeeping

    def record_use(
        self, touched: dict[str, float], counts: dict[str, int], patience: float = BUSY_SECONDS
    ) -> None:
        """Add last accesses and counts in one transaction.

        It is readers who do this: they leave checkpoints to writers for as long as there are any.
        """
        db = self.connection()
        checkpoint_at(db, 4 * CHECKPOINT_PAGES)
        try:
            with self._transaction(patience) as txn:
                self.beacon.settle_all()  # in case that a writer was killed before it could
                txn.touch_older(list(touched.items()), CLOCK_SLACK)
                txn.count(counts)
        finally:
            checkpoint_at(db, CHECKPOINT_PAGES)

    def shrink_log(self) -> None:
        """Bring what the log holds into the index and give its room back to the disk, unless a reader needs it."""
        until = time.monotonic() + BUSY_SECONDS
        while self._one("PRAGMA wal_checkpoint(TRUNCATE)")[0] and time.monotonic() < until:
            time.sleep(PAUSE_SECONDS)

    def snapshot_journal(self) -> None:
        """Replace the names journal by what the index says now."""
        with self.write():
            number = self.journal.switch()
        self.journal.write_snapshot(number, self._name_records())

    def _name_records(self) -> Iterator[bytes]:
        sql = (
            "SELECT name, digest, serializer, metadata, created, expires, pinned, checked FROM entries"
            " WHERE name > ? ORDER BY name LIMIT 2000"
        )
        for page in self.pages(sql, ""):
            for *row, checked in page:
                if checked != entry_check(row[0], row[1]):
                    # The journal knows better, and must not learn it.
                    raise self.damaged(f"its row of {row[0]!r} fails its check")
                yield pack_record(row)
