"""The index: SQLite in WAL mode, the one record of which names and blobs there are.

A connection belongs to one process and one thread: each thread opens its own at first use, a forked child starts with
none. Every write happens inside `Index.write()`, a BEGIN IMMEDIATE transaction that also appends to the names journal
and moves files into place; so the write lock orders index, journal and object directory alike. Reads never wait for
it. Statements here are plain sqlite3; sqlite-utils makes and migrates the schema (schema.py).

Digests are raw bytes here, names are already checked, times are seconds since the epoch.
"""

from __future__ import annotations

import json
import os
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from castore.beacon import CHANGED, EPOCH, Beacon
from castore.errors import NameConflictError, StoreError
from castore.forks import reset_after_fork
from castore.journal import Journal, NameRecord, gone, pack_record
from castore.records import LOST, Blob, Entry, Pointing

SCHEMA_VERSION = 1
_BUSY_SECONDS = 120.0

# Connections of a parent, kept so that a child never closes them: closing would drop SQLite's locks and could delete
# the WAL under the parent.
_inherited: list[object] = []

_ENTRY_COLUMNS = (
    "e.name, e.digest, e.size, coalesce(b.stored, 0), coalesce(b.codec, 'none'), e.created, e.expires, e.accessed,"
    " e.serializer, e.metadata, e.pinned"
)
_ENTRY = f"SELECT {_ENTRY_COLUMNS} FROM entries e LEFT JOIN blobs b ON b.digest = e.digest"
_BLOB = "SELECT digest, size, stored, codec, pack, offset FROM blobs WHERE digest = ?"
_FIND = (
    "SELECT b.digest, b.size, b.stored, b.codec, b.pack, b.offset, e.expires, e.serializer"
    " FROM entries e JOIN blobs b ON b.digest = e.digest WHERE e.name = ?"
)
_LOOK = (
    "SELECT e.digest, e.size, (SELECT name FROM entries WHERE name > ?1 || '/' AND name < ?1 || '0' LIMIT 1),"
    " b.digest, b.size, b.stored, b.codec, b.pack, b.offset"
    " FROM (SELECT 1) LEFT JOIN entries e ON e.name = ?1 LEFT JOIN blobs b ON b.digest = ?2"
)
_ADD_BLOB = (
    "INSERT INTO blobs (digest, size, stored, codec, pack, offset, refs) SELECT ?1, ?2, ?3, ?4, ?5, ?6, 1"
    " WHERE ?5 = 0 OR EXISTS (SELECT 1 FROM packs WHERE id = ?5)"
    " ON CONFLICT (digest) DO NOTHING"
)
_ADD_ENTRY = (
    "INSERT INTO entries (name, digest, size, serializer, metadata, created, expires, accessed, pinned)"
    " VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?6, ?8)"
)
_POINT_ENTRY = (
    "UPDATE entries SET digest = ?2, size = ?3, serializer = ?4, metadata = ?5, expires = ?7, accessed = ?6,"
    " pinned = max(pinned, ?8), created = CASE WHEN digest = ?2 THEN created ELSE ?6 END"
    " WHERE name = ?1 RETURNING created, pinned"
)


_COUNT_REF = "UPDATE blobs SET refs = refs + 1, orphaned = NULL WHERE digest = ?"
_UNCOUNT_REF = "UPDATE blobs SET orphaned = CASE WHEN refs = 1 THEN ?2 END, refs = refs - 1 WHERE digest = ?1"
_ADD_TOTALS = (
    "UPDATE totals SET entries = entries + ?, logical = logical + ?, blobs = blobs + ?, uniq = uniq + ?,"
    " stored = stored + ?"
)


class Standing(NamedTuple):
    """What a put finds: where its name points, a name below it that makes it a folder, and its blob if known."""

    digest: bytes | None
    size: int
    child: str | None
    blob: Blob | None


class Found(NamedTuple):
    """What a read needs to know of a name."""

    blob: Blob
    expires: float | None
    serializer: str


class Totals(NamedTuple):
    """Sums over all rows. ``logical`` counts a blob once a name, ``unique`` once; all in bytes but the counts."""

    entries: int
    logical: int
    blobs: int
    unique: int
    stored: int


def below(name: str) -> tuple[str, str]:
    """Bounds of all names strictly inside the folder ``name``: ``0`` follows ``/`` in the order of bytes."""
    return name + "/", name + "0"


def _parents(name: str) -> list[str]:
    parts = name.split("/")
    return ["/".join(parts[:i]) for i in range(1, len(parts))]


def to_entry(row: tuple[Any, ...]) -> Entry:
    """A row of `_ENTRY` as the value users see."""
    name, digest, size, stored, codec, created, expires, accessed, serializer, metadata, pinned = row
    meta = json.loads(metadata) if metadata else {}
    return Entry(
        name, digest.hex(), size, stored, codec, created, expires, accessed, serializer, meta, bool(pinned)
    )


def _use_wal(db: sqlite3.Connection) -> None:
    # Only the first connection to a new index changes its mode, and SQLite then answers "locked" at once to others
    # who are just doing the same, however long they are willing to wait.
    deadline = time.monotonic() + _BUSY_SECONDS
    while True:
        try:
            db.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.005)


class Write:
    """One write transaction: everything in it is seen together, or not at all. Made by `Index.write`."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._records: list[bytes] = []
        self._new_folders: list[str] = []
        self._announce = False
        #: Whether what was done here has come true.
        self.committed = False
        self._entries = self._logical = self._blobs = self._unique = self._stored = 0

    def __enter__(self) -> Write:
        self._db = self._index.connection()
        try:
            self._db.execute("BEGIN IMMEDIATE")
        except BaseException:
            # A Ctrl-C while we wait is only raised once the lock is ours; kept, it would shut everybody else out.
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._db.execute("ROLLBACK")
            return
        journal, index = self._index.journal, self._index
        records = b""
        totals = (self._entries, self._logical, self._blobs, self._unique, self._stored)
        try:
            if any(totals):
                self._db.execute(_ADD_TOTALS, totals)
            if self._records:
                records = self._records[0] if len(self._records) == 1 else b"".join(self._records)
                journal.append(records, durable=index.durable)
            if self._announce:
                index.beacon.announce()  # for the next writer, which looks while it holds the lock
            elif self._new_folders:
                # Still under the lock: a moment later another process may have made a file of one of them.
                index.remember_folders(self._new_folders)
            self._db.execute("COMMIT")
            self.committed = True
        except BaseException as failure:
            index.forget_folders()
            # A Ctrl-C can arrive just behind the COMMIT: then there is nothing to take back.
            if self._db.in_transaction or isinstance(failure, sqlite3.Error):
                self._take_back(records)
            raise
        if self._announce:
            index.beacon.announce()  # for readers, which may have looked between the first time and the commit

    def _take_back(self, records: bytes) -> None:
        # On a full disk SQLite may have rolled back by itself, and let go of the lock that the journal needs.
        if not self._db.in_transaction:
            self._db.execute("BEGIN IMMEDIATE")
        self._index.journal.retract(records)
        self._db.execute("ROLLBACK")

    def look(self, name: str, digest: bytes) -> Standing:
        """What `set_entry` and whoever places the blob need to know, in one question."""
        row = self._db.execute(_LOOK, (name, digest)).fetchone()
        return Standing(row[0], row[1], row[2], Blob._make(row[3:]) if row[3] is not None else None)

    # Blobs

    def blob(self, digest: bytes) -> Blob | None:
        """The blob, lost or not, or None."""
        row = self._db.execute(_BLOB, (digest,)).fetchone()
        return Blob._make(row) if row else None

    def add_blob(self, blob: Blob, checksums: bytes | None = None) -> bool:
        """Record a blob whose bytes are in place; False if it is known already, or its pack has been retired.

        It counts as named once: `set_entry` for the name that brought it follows in the same transaction.
        """
        if self._db.execute(_ADD_BLOB, blob).rowcount != 1:
            return False
        self._blobs += 1
        self._unique += blob.size
        self._stored += blob.stored
        self._keep_checksums(blob.digest, checksums)
        return True

    def move_blob(self, blob: Blob, checksums: bytes | None = None) -> bool:
        """Record where a known blob's bytes lie now; False if the pack they were moved to has been retired."""
        before = self._db.execute("SELECT stored FROM blobs WHERE digest = ?", (blob.digest,)).fetchone()
        moved = self._db.execute(
            "UPDATE blobs SET stored = ?2, codec = ?3, pack = ?4, offset = ?5 WHERE digest = ?1"
            " AND (?4 = 0 OR EXISTS (SELECT 1 FROM packs WHERE id = ?4))",
            (blob.digest, blob.stored, blob.codec, blob.pack, blob.offset),
        ).rowcount
        if moved:
            self._stored += blob.stored - before[0]
            self._keep_checksums(blob.digest, checksums)
        return moved == 1

    def _keep_checksums(self, digest: bytes, checksums: bytes | None) -> None:
        if checksums is not None:
            self._db.execute("INSERT OR REPLACE INTO checksums VALUES (?, ?)", (digest, checksums))

    def lose_blob(self, blob: Blob) -> None:
        """Record that a blob's bytes are gone or bad: a miss, until they are put again."""
        sql = "UPDATE blobs SET stored = 0, pack = ?, offset = 0 WHERE digest = ?"
        self._stored -= blob.stored * self._db.execute(sql, (LOST, blob.digest)).rowcount
        self._announce = True

    def drop_blob(self, blob: Blob) -> bool:
        """Forget a blob that no entry names; False if one does."""
        if self._db.execute("DELETE FROM blobs WHERE digest = ? AND refs = 0", (blob.digest,)).rowcount == 0:
            return False
        self._db.execute("DELETE FROM checksums WHERE digest = ?", (blob.digest,))
        self._blobs -= 1
        self._unique -= blob.size
        self._stored -= blob.stored
        return True

    # Packs

    def new_pack(self) -> int:
        """Register a pack about to be written, and return its id. Ids are never used twice."""
        return self._db.execute("INSERT INTO packs (created) VALUES (?)", (time.time(),)).lastrowid or 0

    def has_pack(self, pack: int) -> bool:
        """Whether the pack may be written to and read from."""
        return self._db.execute("SELECT 1 FROM packs WHERE id = ?", (pack,)).fetchone() is not None

    def retire_pack(self, pack: int) -> None:
        """Forget a pack that holds no live blob; whoever still writes to it has to start another."""
        self._db.execute("DELETE FROM packs WHERE id = ?", (pack,))

    # Names

    def set_entry(self, pointing: Pointing, blob: Blob, now: float, standing: Standing) -> tuple[float, bool]:
        """Point a name at a blob; returns when it was created and whether it is pinned.

        Raises:
            NameConflictError: the name is a folder of others, or a part of it is a file.
        """
        name, serializer, metadata, expires, pin = pointing
        created, pinned = now, int(pin)
        row = (name, blob.digest, blob.size, serializer, metadata, now, expires, pinned)
        if standing.digest is None:
            self._check_conflict(name, standing.child, now)
            self._db.execute(_ADD_ENTRY, row)
            if standing.blob is not None:
                self._db.execute(_COUNT_REF, (blob.digest,))
            self._entries += 1
            self._logical += blob.size
        else:
            self._announce = True
            created, pinned = self._db.execute(_POINT_ENTRY, row).fetchone()
            if standing.digest != blob.digest:
                self._db.execute(_UNCOUNT_REF, (standing.digest, now))
                if standing.blob is not None:
                    self._db.execute(_COUNT_REF, (blob.digest,))
                self._logical += blob.size - standing.size
        self._records.append(
            pack_record(NameRecord(name, blob.digest, serializer, metadata, created, expires, pinned))
        )
        return created, bool(pinned)

    def _check_conflict(self, name: str, child: str | None, now: float) -> None:
        if child is not None:
            child = self._standing_in_the_way("name > ?1 || '/' AND name < ?1 || '0'", [name], now)
        if child is not None:
            raise NameConflictError(
                f"{name!r} cannot be a file: it is the folder of {child!r}; choose another name or delete that one"
            )
        folder = name.rpartition("/")[0]
        if not folder or self._index.is_folder(folder):
            return
        parents = _parents(name)
        marks = ",".join("?" * len(parents))
        file = self._standing_in_the_way(f"name IN ({marks})", parents, now)
        if file is not None:
            raise NameConflictError(
                f"{name!r} cannot lie inside {file!r}, which is a file; choose another name or delete that one"
            )
        self._new_folders.append(folder)

    def _standing_in_the_way(self, condition: str, parameters: list[str], now: float) -> str | None:
        """One of the names that match and still stand; those that have expired are in nobody's way, and go."""
        expired = []
        sql = f"SELECT name, expires, pinned FROM entries WHERE {condition}"
        for name, expires, pinned in self._db.execute(sql, parameters):
            if pinned or expires is None or expires > now:
                return str(name)
            expired.append(name)
        for name in expired:
            self.delete_entry(name)
        return None

    def delete_entry(self, name: str) -> bool:
        """Remove a name; False if there is none."""
        sql = "DELETE FROM entries WHERE name = ? RETURNING digest, size"
        return self._entry_gone(name, self._db.execute(sql, (name,)).fetchone(), time.time())

    def evict_entry(self, name: str, digest: bytes, accessed: float | None, now: float) -> bool:
        """Remove an entry that gc chose, unless it changed since: was touched, pinned, or points elsewhere.

        Args:
            name: of the entry.
            digest: what gc saw it point to.
            accessed: last access that gc saw, for an entry chosen as least recently used; None for an expired one,
                which must still be expired at ``now``.
            now: when gc looked.
        """
        unchanged = "expires <= ?" if accessed is None else "accessed <= ?"
        row = self._db.execute(
            f"DELETE FROM entries WHERE name = ? AND digest = ? AND pinned = 0 AND {unchanged}"
            " RETURNING digest, size",
            (name, digest, now if accessed is None else accessed),
        ).fetchone()
        # It was gc that let go of the blob: nobody is about to name it, so no grace is owed, and its orphan is as
        # old as time.
        return self._entry_gone(name, row, 0.0)

    def _entry_gone(self, name: str, row: tuple[bytes, int] | None, orphaned: float) -> bool:
        if row is None:
            return False
        self._db.execute(_UNCOUNT_REF, (row[0], orphaned))
        self._entries -= 1
        self._logical -= row[1]
        self._records.append(gone(name))
        self._announce = True
        return True

    def set_pinned(self, name: str, pinned: bool) -> bool:
        """Pin or unpin a name; False if there is none."""
        row = self._db.execute(
            "UPDATE entries SET pinned = ? WHERE name = ?"
            " RETURNING name, digest, serializer, metadata, created, expires, pinned",
            (int(pinned), name),
        ).fetchone()
        if row is None:
            return False
        self._records.append(pack_record(NameRecord(*row)))
        return True

    def announce(self) -> None:
        """Have every RAM tier ask the index again once this is committed."""
        self._announce = True

    def execute(self, sql: str, parameters: Iterable[Any] = ()) -> sqlite3.Cursor:
        """A statement of a caller that keeps its own tables here (counters, mounts, rebuilding)."""
        return self._db.execute(sql, tuple(parameters))

    def executemany(self, sql: str, rows: Iterable[Iterable[Any]]) -> None:
        """The same for many rows."""
        self._db.executemany(sql, map(tuple, rows))


class Index:
    """The index of one store.

    Args:
        path: of ``index.sqlite``.
        beacon: told of changes after they are committed.
        journal: appended to within each transaction.
        mode: permission bits of a new index; SQLite gives its WAL the same.
        durable: commits survive a power cut.

    Raises:
        StoreError: the file is damaged or of another version.
    """

    def __init__(
        self, path: Path, beacon: Beacon, journal: Journal, *, mode: int, durable: bool = False
    ) -> None:
        self.path = path
        self.beacon = beacon
        self.journal = journal
        self.durable = durable
        self._after_fork()
        reset_after_fork(self)
        if not path.exists():
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, mode))
            path.chmod(mode)
        self._prepare()

    def _after_fork(self) -> None:
        _inherited.append(getattr(self, "_open", None))
        self._local = threading.local()
        self._open: list[tuple[threading.Thread, sqlite3.Connection]] = []
        self._lock = threading.Lock()
        self._folders: set[str] = set()
        self._folders_seen = 0

    def _prepare(self) -> None:
        db = self.connection()
        version = db.execute("PRAGMA user_version").fetchone()[0]
        if version > SCHEMA_VERSION:
            raise StoreError(
                f"{self.path} was written by a newer castore (schema {version}, this one knows {SCHEMA_VERSION});"
                " upgrade castore"
            )
        if version < SCHEMA_VERSION:
            from castore.schema import migrate

            migrate(db)

    def connection(self) -> sqlite3.Connection:
        """This thread's connection, to the file that is the index now."""
        local = self._local
        db: sqlite3.Connection | None = getattr(local, "db", None)
        if db is None or local.epoch != self.beacon.words[EPOCH]:
            local.epoch = self.beacon.words[EPOCH]
            db = local.db = self._connect()
        return db

    def _connect(self) -> sqlite3.Connection:
        try:
            # check_same_thread is off only so that this object can close every thread's connection.
            db = sqlite3.connect(
                self.path,
                timeout=_BUSY_SECONDS,
                isolation_level=None,
                cached_statements=256,
                check_same_thread=False,
            )
            # Small pages: a commit writes whole pages, and a put touches one of each table.
            db.execute("PRAGMA page_size = 2048")
            _use_wal(db)
            db.execute(f"PRAGMA synchronous = {'FULL' if self.durable else 'NORMAL'}")
            db.execute("PRAGMA wal_autocheckpoint = 8000")
            db.execute("PRAGMA cache_size = -8192")
        except sqlite3.DatabaseError as error:
            raise self.damaged(error) from error
        with self._lock:
            # Threads come and go; what the gone ones leave open would use up the process's descriptors.
            for thread, left in self._open:
                if not thread.is_alive():
                    left.close()
            self._open = [(thread, kept) for thread, kept in self._open if thread.is_alive()]
            self._open.append((threading.current_thread(), db))
        return db

    def damaged(self, error: sqlite3.Error) -> StoreError:
        """What to tell the user of an SQLite error."""
        return StoreError(f"the index {self.path} cannot be used ({error}); `castore doctor` tells more")

    def close(self) -> None:
        """Close every thread's connection."""
        with self._lock:
            connections, self._open = self._open, []
        self._local = threading.local()
        for _, db in connections:
            db.close()

    def is_folder(self, folder: str) -> bool:
        """Whether this process saw, since names last changed, that no part of ``folder`` is a file.

        The caller holds the write lock. Adding names under a folder cannot make it a file, and what can (removing
        or re-pointing) is announced before it is committed.
        """
        changed = self.beacon.words[CHANGED]
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

    def write(self) -> Write:
        """A write transaction, to be used as a context manager."""
        return Write(self)

    def barrier(self) -> None:
        """Return once every transaction that has appended to the journal by now is over."""
        with self.write():
            pass

    # Reads

    def find(self, name: str) -> Found | None:
        """The blob a name points to, whether expired or not, or None."""
        row = self.connection().execute(_FIND, (name,)).fetchone()
        return Found(Blob._make(row[:6]), row[6], row[7]) if row else None

    def find_digest(self, name: str) -> bytes | None:
        """The digest a name points to, or None."""
        row = self.connection().execute("SELECT digest FROM entries WHERE name = ?", (name,)).fetchone()
        return row[0] if row else None

    def find_many(self, names: list[str]) -> dict[str, Found]:
        """`find` for many names, in one query a thousand."""
        found: dict[str, Found] = {}
        db = self.connection()
        for start in range(0, len(names), 1000):
            part = names[start : start + 1000]
            sql = _FIND.replace("SELECT ", "SELECT e.name, ").replace(
                "= ?", f"IN ({','.join('?' * len(part))})"
            )
            for row in db.execute(sql, part):
                found[row[0]] = Found(Blob._make(row[1:7]), row[7], row[8])
        return found

    def blob(self, digest: bytes) -> Blob | None:
        """A blob, lost or not, or None."""
        row = self.connection().execute(_BLOB, (digest,)).fetchone()
        return Blob._make(row) if row else None

    def blobs(self) -> Iterator[Blob]:
        """Every blob, in the order of digests, read in pages so that no long read holds up the WAL."""
        last = b""
        sql = "SELECT digest, size, stored, codec, pack, offset FROM blobs WHERE digest > ? ORDER BY digest LIMIT 2000"
        while rows := self.connection().execute(sql, (last,)).fetchall():
            yield from map(Blob._make, rows)
            last = rows[-1][0]

    def checksums(self, digest: bytes) -> bytes | None:
        """Frame checksums of a raw blob."""
        row = self.connection().execute("SELECT frames FROM checksums WHERE digest = ?", (digest,)).fetchone()
        return row[0] if row else None

    def has_loose_of_size(self, size: int) -> bool:
        """Whether a loose blob of exactly this size is known: only then may a file of that size be one."""
        sql = "SELECT 1 FROM blobs WHERE size = ? AND pack = 0 LIMIT 1"
        return self.connection().execute(sql, (size,)).fetchone() is not None

    def entry(self, name: str) -> Entry | None:
        """One entry, expired or not, or None."""
        row = self.connection().execute(f"{_ENTRY} WHERE e.name = ?", (name,)).fetchone()
        return to_entry(row) if row else None

    def names_of(self, digest: bytes) -> list[str]:
        """The names that point to a blob. Scans all entries: for repair and reports."""
        return [
            row[0]
            for row in self.connection().execute("SELECT name FROM entries WHERE digest = ?", (digest,))
        ]

    def entries(self, prefix: str, now: float, *, after: str = "") -> Iterator[Entry]:
        """Entries at or below a prefix that are not expired, by name, read in pages."""
        # No part of a name is long enough for as many of the last character.
        low, high = (prefix, prefix + "0") if prefix else ("", "\U0010ffff" * 64)
        sql = (
            f"{_ENTRY} WHERE e.name > ? AND e.name < ? AND (e.expires IS NULL OR e.expires > ?)"
            " ORDER BY e.name LIMIT 1000"
        )
        if prefix and (whole := self.entry(prefix)) and (whole.expires is None or whole.expires > now):
            yield whole
        low, last = (prefix + "/" if prefix else ""), after
        while rows := self.connection().execute(sql, (max(low, last), high, now)).fetchall():
            yield from map(to_entry, rows)
            last = rows[-1][0]

    def totals(self) -> Totals:
        """Sums over all rows; as quick at ten million entries as at ten."""
        sql = "SELECT entries, logical, blobs, uniq, stored FROM totals"
        return Totals(*self.connection().execute(sql).fetchone())

    def counters(self) -> dict[str, int]:
        """Counts added up over processes and runs."""
        return dict(self.connection().execute("SELECT name, value FROM counters").fetchall())

    # Batched bookkeeping

    def record_use(self, touched: dict[str, float], counts: dict[str, int]) -> None:
        """Add last accesses and counts in one transaction."""
        with self.write() as txn:
            txn.executemany(
                "UPDATE entries SET accessed = ?1 WHERE name = ?2 AND accessed < ?1",
                [(when, name) for name, when in list(touched.items())],
            )
            txn.executemany(
                "INSERT INTO counters VALUES (?1, ?2) ON CONFLICT (name) DO UPDATE SET value = value + ?2",
                list(counts.items()),
            )

    def snapshot_journal(self) -> None:
        """Replace the names journal by what the index says now."""
        with self.write():
            number = self.journal.switch()
        self.journal.write_snapshot(number, self._name_records())

    def _name_records(self) -> Iterator[bytes]:
        last = ""
        sql = (
            "SELECT name, digest, serializer, metadata, created, expires, pinned FROM entries"
            " WHERE name > ? ORDER BY name LIMIT 2000"
        )
        while rows := self.connection().execute(sql, (last,)).fetchall():
            for row in rows:
                yield pack_record(NameRecord(*row))
            last = rows[-1][0]
