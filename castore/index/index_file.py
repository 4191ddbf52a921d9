"""The file of the index: each thread has its own connection to it, and opens another when it is replaced.

Knows no table: the other modules have the statements, and the meaning of rows. A query that finds the file
locked by others is retried. An error of SQLite becomes a sentence for the user.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from castore.errors import StoreError
from castore.index.beacon import EPOCH, Beacon
from castore.index.connections import BUSY_SECONDS, PAUSE_SECONDS, Connections, retry_while_locked
from castore.index.schema import SCHEMA_VERSION, find_mismatch, migrate
from castore.system.ballast import full_disk_error
from castore.system.forks import block_forks, fork_gate, reset_after_fork
from castore.system.local_files import raise_if_gone
from castore.system.sql_errors import SQL_ERRORS, is_damage, is_locked
from castore.system.temporary import check_regular, open_with_mode


def _read_version(db: sqlite3.Connection) -> int:
    with block_forks():
        return int(db.execute("PRAGMA user_version").fetchone()[0])


def _migrate(db: sqlite3.Connection) -> None:
    with fork_gate:
        migrate(db)


def _schema_mismatch(db: sqlite3.Connection) -> str | None:
    with block_forks():
        return find_mismatch(db)


class IndexFile:
    """The SQLite file of one index.

    Args:
        path: of ``index.sqlite``.
        beacon: its epoch changes when another file has taken this one's place.
        mode: permission bits of a new file; SQLite gives its WAL the same.
        is_empty: whether there are no objects, so that an index without rows is right.
        durable: commits survive a power cut.
        rebuilding: open the file as it is, with tables or without. For `rebuild`, whose transaction completes
            it.
        read_only: the file's folder cannot be written to.

    Attributes:
        has_written: whether this object wrote more than usage counters. If not, it leaves a small WAL in
            place when it is closed.

    Raises:
        StoreError: the file is damaged or of another version.
    """

    def __init__(
        self,
        path: Path,
        beacon: Beacon,
        *,
        mode: int,
        is_empty: Callable[[], bool],
        durable: bool,
        rebuilding: bool,
        read_only: bool,
    ) -> None:
        self.path = path
        self.read_only = read_only
        self.has_written = rebuilding
        self._beacon = beacon
        self._words = beacon.words
        self._rebuilding = rebuilding
        self._connections = Connections(path, durable, read_only=read_only)
        self._after_fork()
        reset_after_fork(self)
        # An existing file is never opened and closed here: closing any descriptor of it would drop the locks
        # that SQLite holds on it in this process, for another `Store` of the same folder.
        for suffix in ("", "-wal", "-shm", "-journal"):
            check_regular(f"{path}{suffix}")
        if not path.exists():
            # An empty file would pass for a damaged index afterwards. Another process may have just made one.
            is_lost = not rebuilding and not is_empty() and not path.exists()
            if read_only or is_lost:
                raise self._missing_index_error()
            os.close(open_with_mode(path, os.O_RDWR, mode))
        if not rebuilding:
            self._prepare(is_empty)

    def _after_fork(self) -> None:
        self._forget_connections()

    def _forget_connections(self) -> None:
        self._local = threading.local()

    def _prepare(self, is_empty: Callable[[], bool]) -> None:
        """Make the tables of a new index, or bring an older one up to date."""
        epoch = self._epoch()
        db = self._local.db = self._connect()
        self._local.epoch = epoch
        try:
            version = retry_while_locked(partial(_read_version, db))
        except SQL_ERRORS as error:
            self.raise_for(error)
        if version > SCHEMA_VERSION:
            raise StoreError(
                f"{self.path} was written by a newer castore"
                f" (schema {version}, this one knows {SCHEMA_VERSION}); upgrade castore"
            )
        # Read again if there are objects: another process may have just made the index and put them.
        if version == 0 and not is_empty() and retry_while_locked(partial(_read_version, db)) == 0:
            raise self._missing_index_error()
        if version < SCHEMA_VERSION and self.read_only:
            raise StoreError(
                f"{self.path} was written by an older castore"
                f" (schema {version}, this one knows {SCHEMA_VERSION});"
                " open the store once where it can be written to, which migrates it"
            )
        try:
            if version < SCHEMA_VERSION:
                self.has_written = True
                retry_while_locked(partial(_migrate, db))
            if (wrong := retry_while_locked(partial(_schema_mismatch, db))) is not None:
                raise self.damaged(wrong)
        except SQL_ERRORS as error:
            self.raise_for(error)

    def _missing_index_error(self) -> StoreError:
        return StoreError(
            f"the index {self.path} is missing or being rebuilt, and an empty one would make garbage of all"
            " objects; `castore doctor --rebuild-index` makes a new one from them"
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
        try:
            if not self._rebuilding and retry_while_locked(partial(_read_version, db)) != SCHEMA_VERSION:
                raise self._missing_index_error()
        except sqlite3.ProgrammingError:
            if self._local is local:
                raise
            return self.connection()  # another thread has just closed all connections
        local.db, local.epoch = db, opened_to
        return db

    def _epoch(self) -> object:
        """The identity of the current file: `connection` opens a new connection once this has changed."""
        epoch = self._words[EPOCH]
        return (epoch, self._connections.unlogged_identity()) if self.read_only else epoch

    def is_whole(self) -> bool:
        """Whether a rebuild has committed, or the index was whole before it. Raises nothing."""
        try:
            return _read_version(self.connection()) == SCHEMA_VERSION
        except (StoreError, OSError, *SQL_ERRORS):
            return False

    def _connect(self) -> sqlite3.Connection:
        self._beacon.require_in_place()
        try:
            return self._connections.open()
        except SQL_ERRORS as error:
            self.raise_for(error)

    def damaged(self, why: object) -> StoreError:
        """The error for a damaged index."""
        return StoreError(f"the index {self.path} cannot be used ({why}); `castore doctor` tells more")

    def raise_for(self, error: BaseException) -> NoReturn:
        """Raise the error that the user should see in place of ``error``."""
        raise_if_gone(self.path.parent, error)
        if self.read_only and "unable to open" in str(error):
            raise StoreError(
                f"{self.path} has a WAL, which cannot be read without {self.path.name}-shm where"
                " nothing can be written; open the store once where it can be written to (`castore stat`)"
            ) from error
        if (no_room := full_disk_error(self.path.parent, error)) is not None:
            raise no_room from error
        if is_damage(error):
            raise self.damaged(error) from error
        raise error

    def _is_open(self, db: sqlite3.Connection) -> bool:
        """Whether no other thread has closed this thread's connection: then `connection` gives a new one.

        The answer holds for as long as this thread holds the lock of `block_forks`.
        """
        return getattr(self._local, "db", None) is db

    def close(self) -> None:
        """Close every thread's connection, those of other threads once these are not inside SQLite."""
        self._connections.close(
            self._forget_connections, leave_wal=not self.has_written and not self.read_only
        )

    # Asking

    def all(self, sql: str, parameters: Sequence[Any] = ()) -> list[Any]:
        """The rows of a query, or of a statement that changes no table of the index.

        Fetches all rows at once: this process might fork between two rows, and the child would inherit the
        open read.

        Raises:
            StoreError: the index is damaged.
        """
        until = 0.0
        while True:
            try:
                db = self.connection()
                with block_forks():
                    if self._is_open(db):
                        return db.execute(sql, parameters).fetchall()
                continue
            except SQL_ERRORS as error:
                now = time.monotonic()
                until = until or now + BUSY_SECONDS
                if not is_locked(error) or now > until:
                    self.raise_for(error)
            time.sleep(PAUSE_SECONDS)

    def one(self, sql: str, parameters: tuple[Any, ...] = ()) -> Any:
        """The first row, or None. See `all`."""
        rows = self.all(sql, parameters)
        return rows[0] if rows else None

    def rows(self, sql: str, parameters: Sequence[Any] = ()) -> Iterator[Any]:
        """The rows of `all`, as an iterator."""
        return iter(self.all(sql, parameters))

    def stream(self, sql: str, parameters: Sequence[Any] = ()) -> Generator[Any]:
        """`rows` for results larger than memory. No fork happens until the stream ends: close it soon."""
        while True:
            db = self.connection()
            with block_forks():
                if not self._is_open(db):
                    continue
                with closing(db.cursor()) as cursor:
                    try:
                        yield from cursor.execute(sql, parameters)
                    except SQL_ERRORS as error:
                        self.raise_for(error)
                return

    def pages(self, sql: str, after: Any, *parameters: Any, rows: int = 1000) -> Iterator[list[Any]]:
        """The rows of a query in pages, so that no long read keeps the WAL from being checkpointed.

        Args:
            sql: selects all rows whose first column is greater than the first parameter, in the order of that
                column, without LIMIT.
            after: the first parameter of the first page.
            parameters: the others.
            rows: of a page, at most.

        Raises:
            StoreError: the rows are in another order: the index is damaged, and the pages might never end.
        """
        while page := self.all(f"{sql} LIMIT {rows}", (after, *parameters)):
            yield page
            if len(page) < rows:
                return
            after = self.require_order(after, page[-1][0])

    def require_order(self, last: Any, key: Any) -> Any:
        """Return ``key`` after checking that it sorts behind ``last``.

        Raises:
            StoreError: it does not.
        """
        if type(key) is not type(last) or not last < key:
            self.raise_for(sqlite3.DatabaseError(f"the row of {key!r} does not sort behind that of {last!r}"))
        return key
