"""The index: the records of names and blobs, and write transactions on them.

Reads are methods of `Index`; every change is a method of `transaction.Write`. Reads never wait for changes.
Statements run on the calling thread's connection, which `index_file.IndexFile` keeps. The connections are
plain sqlite3; schema.py makes and migrates the schema.

Where a name is not found, or names are listed, the store's folder must still be the one that was opened.
Digests are raw bytes here, names are already checked, times are seconds since the epoch. A row may be
damaged: its values have the right types when they leave this module, and may be anything otherwise.
"""

from __future__ import annotations

import json
import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, TypeVar

from castore.errors import StoreError, read_only_error
from castore.index.beacon import CHANGED, Beacon
from castore.index.connections import BUSY_SECONDS, CHECKPOINT_PAGES, PAUSE_SECONDS, checkpoint_at
from castore.index.index_file import IndexFile
from castore.index.journal import Journal, pack_record
from castore.index.statements import BLOB_COLUMNS, BLOB_OF, LISTED
from castore.index.transaction import Write
from castore.names import RESERVED, below
from castore.records import AWAY, LOST, Blob, Entry, Found, Totals, entry_check, parse_metadata
from castore.system import log
from castore.system.forks import fork_gate, reset_after_fork
from castore.system.sql_errors import is_damage, is_full

T = TypeVar("T")

# The files to which the thread that holds `fork_gate` writes.
_writing: list[str] = []

#: A time that lies further ahead than this, in seconds, came from a clock that has been set back since.
CLOCK_SLACK = 60.0

# Numbers come as numbers whatever a damaged row holds. A time that is not a number is 0: the name is a miss.
_ENTRY_COLUMNS = (
    "e.name, coalesce(CAST(e.digest AS BLOB), x''), coalesce(CAST(e.size AS INTEGER), 0),"
    " coalesce(b.stored, 0), coalesce(b.codec, 'none'), coalesce(e.created + 0.0, 0.0), e.expires + 0.0,"
    " coalesce(e.accessed + 0.0, 0.0), coalesce(CAST(e.serializer AS TEXT), ''), e.metadata, e.pinned,"
    f" coalesce(b.pack = {AWAY}, 0)"
)
_ENTRY = f"SELECT {_ENTRY_COLUMNS} FROM entries e LEFT JOIN blobs b ON b.digest = e.digest"
_CHECKED_ENTRY = _ENTRY.replace(" FROM ", ", e.checked FROM ")
# Bytes that are not recorded as lost.
_NOT_LOST = f"AND b.pack != {LOST}"
# Sorts behind every name: no part of a name is this long.
_LAST = "\U0010ffff" * 64
#: Names of one query: few behind a folder, since its other names are skipped; many among files.
_FEW, _MANY = 8, 1000
_FIND = (
    "SELECT b.digest, b.size, b.stored, b.codec, b.pack, b.offset, e.expires + 0.0, e.serializer, e.checked"
    " FROM entries e JOIN blobs b ON b.digest = e.digest WHERE e.name = ?"
)
# One parameter for all names is quicker than one each, and one statement serves any number of them.
_FIND_MANY = _FIND.replace("SELECT ", "SELECT e.name, ").replace("= ?", "IN (SELECT value FROM json_each(?))")


_COUNT_OF = "SELECT count(*) FROM entries WHERE name IN (SELECT value FROM json_each(?))"
_CONTENTS = (
    "SELECT e.name, e.digest, e.serializer, e.metadata FROM entries e JOIN blobs b ON b.digest = e.digest"
    f" WHERE e.name IN (SELECT value FROM json_each(?)) AND (e.expires IS NULL OR e.expires > ?) {_NOT_LOST}"
)
_BLOBS = f"SELECT {BLOB_COLUMNS} FROM blobs WHERE digest > ? ORDER BY digest"
_BLOBS_BETWEEN = f"SELECT {BLOB_COLUMNS} FROM blobs WHERE digest BETWEEN ? AND ? AND pack != ? LIMIT ?"
# Numbers, whatever a damaged row holds: `doctor` counts again.
_TOTALS = "SELECT {} FROM totals".format(
    ", ".join(
        f"coalesce(CAST({column} AS INTEGER), 0)"
        for column in ("entries", "logical", "blobs", "uniq", "stored", "packed")
    )
)


def _to_entry(row: tuple[Any, ...]) -> Entry:
    """A row of `_ENTRY` as the value users see."""
    name, digest, size, stored, codec, created, expires, accessed, serializer, metadata, pinned, away = row
    meta = parse_metadata(metadata)
    return Entry(
        name, digest.hex(), size, stored, codec, created, expires, accessed, serializer, meta, bool(pinned),
        bool(away),
    )  # fmt: skip


def _is_row_intact(name: str, digest: bytes, checked: int) -> bool:
    """Whether a row's name and digest belong together. A row that fails this check counts as no row."""
    if checked == entry_check(name, digest):
        return True
    log.warning("the index row of %r is damaged and ignored; `castore doctor` tells more", name)
    return False


class Index:
    """The index of one store.

    Args:
        path: of ``index.sqlite``.
        beacon: each commit that changes names is announced here.
        journal: each transaction appends to it.
        mode: permission bits of a new index.
        is_empty: whether there are no objects, so that an index without rows is right.
        durable: commits survive a power cut.
        rebuilding: open the file as it is, with tables or without. For `rebuild`, whose transaction completes
            it.
        read_only: the store's folder cannot be written to; `write` raises then.

    Attributes:
        file: runs statements; for the other modules of `castore.index`.

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
        self._file_id = os.path.realpath(path)
        self.beacon = beacon
        self.journal = journal
        self.durable = durable
        self.read_only = read_only
        self._words = beacon.words
        self.file = IndexFile(
            path,
            beacon,
            mode=mode,
            is_empty=is_empty,
            durable=durable,
            rebuilding=rebuilding,
            read_only=read_only,
        )
        self._after_fork()
        reset_after_fork(self)

    def _after_fork(self) -> None:
        self._folders: set[str] = set()
        self._folders_seen = 0

    def connection(self) -> sqlite3.Connection:
        """This thread's connection, to the file that is the index now.

        Raises:
            StoreError: the index was replaced and is not whole again yet.
        """
        return self.file.connection()

    def require_writable(self) -> None:
        """Check that the store can be changed.

        Raises:
            StoreError: it is read-only.
        """
        if self.read_only:
            raise read_only_error(self.path.parent)

    def close(self) -> None:
        """Close every thread's connection."""
        self.file.close()

    # Reading

    def find(self, name: str) -> Found | None:
        """The blob a name points to, whether expired or not, or None."""
        self.beacon.require_in_place()  # an index that was removed answers for as long as it is open
        rows = self.file.all(_FIND, (name,))
        if not rows:
            return None
        digest, size, stored, codec, pack, offset, expires, serializer, checked = rows[0]
        if not _is_row_intact(name, digest, checked):
            return None
        return Found(Blob(digest, size, stored, codec, pack, offset), expires, serializer)

    def find_digest(self, name: str) -> bytes | None:
        """The digest a name points to, or None."""
        row = self.file.one("SELECT digest, checked FROM entries WHERE name = ?", (name,))
        if not row:
            self.beacon.require_in_place()
        return row[0] if row and _is_row_intact(name, *row) else None

    def find_many(self, names: list[str]) -> dict[str, Found]:
        """`find` for many names, in one query."""
        self.beacon.require_in_place()
        rows = self.file.all(_FIND_MANY, (json.dumps(names),))
        return {
            row[0]: Found(Blob._make(row[1:7]), row[7], row[8])
            for row in rows
            if _is_row_intact(row[0], row[1], row[9])
        }

    def count_of(self, names: list[str]) -> int:
        """How many of some names there are, expired and lost ones too."""
        return int(self.file.all(_COUNT_OF, (json.dumps(names),))[0][0])

    def contents_of(self, names: list[str], now: float) -> dict[str, tuple[bytes, str, str | None]]:
        """Digest, serializer and metadata, as text, of names that are not expired and whose bytes are not
        recorded as lost.
        """
        return {row[0]: row[1:] for row in self.file.all(_CONTENTS, (json.dumps(names), now))}

    def blob(self, digest: bytes) -> Blob | None:
        """A blob, lost or not, or None."""
        row = self.file.one(BLOB_OF, (digest,))
        return Blob._make(row) if row else None

    def blobs_of(self, digests: list[bytes]) -> dict[bytes, Blob]:
        """The blobs of up to a thousand digests, lost or not. Unknown digests are left out."""
        sql = BLOB_OF.replace("= ?", f"IN ({','.join('?' * len(digests))})")
        return {row[0]: Blob._make(row) for row in self.file.rows(sql, digests)}

    def blobs(self) -> Iterator[Blob]:
        """Every blob, in the order of digests."""
        for page in self.file.pages(_BLOBS, b""):
            yield from map(Blob._make, page)

    def blobs_between(self, low: bytes, high: bytes, limit: int) -> list[Blob]:
        """The first ``limit`` blobs with digests from ``low`` to ``high``, lost ones left out."""
        return [Blob(*row) for row in self.file.rows(_BLOBS_BETWEEN, (low, high, LOST, limit))]

    def is_named(self, digest: bytes) -> bool:
        """Whether an entry names a blob: gc keeps such a blob."""
        row = self.file.one("SELECT refs FROM blobs WHERE digest = ?", (digest,))
        return row is not None and row[0] != 0

    def checksums(self, digest: bytes) -> bytes | None:
        """Frame checksums of a raw blob."""
        row = self.file.one("SELECT frames FROM checksums WHERE digest = ?", (digest,))
        return row[0] if row else None

    def has_loose_of_size(self, size: int) -> bool:
        """Whether the index knows a loose blob of this size: else no file of that size holds a known blob."""
        sql = "SELECT 1 FROM blobs WHERE size = ? AND pack = 0 LIMIT 1"
        return self.file.one(sql, (size,)) is not None

    def entry(self, name: str) -> Entry | None:
        """One entry, expired or not, or None."""
        self.beacon.require_in_place()
        row = self.file.one(f"{_CHECKED_ENTRY} WHERE e.name = ?", (name,))
        return _to_entry(row[:-1]) if row and _is_row_intact(name, row[1], row[-1]) else None

    def names_of(self, digest: bytes) -> list[str]:
        """The names that point to a blob. Scans all entries: for repair and reports."""
        return [row[0] for row in self.file.rows("SELECT name FROM entries WHERE digest = ?", (digest,))]

    def entries(self, prefix: str, now: float, *, after: str = "", damaged: bool = True) -> Iterator[Entry]:
        """Entries at or below a prefix that are not expired, by name, read in pages.

        Args:
            damaged: also yield entries whose bytes are recorded as lost.
        """
        self.beacon.require_in_place()
        low, high = (prefix, prefix + "0") if prefix else ("", _LAST)
        sql = (
            f"{_ENTRY} WHERE e.name > ? AND e.name < ? AND (e.expires IS NULL OR e.expires > ?)"
            f" AND {LISTED} {'' if damaged else _NOT_LOST} ORDER BY e.name"
        )
        whole = self.entry(prefix) if prefix else None
        if whole is not None and (whole.expires is None or whole.expires > now):
            blob = None if damaged else self.blob(bytes.fromhex(whole.digest))
            if damaged or (blob is not None and blob.pack != LOST):
                yield whole
        low = prefix + "/" if prefix else ""
        for page in self.file.pages(sql, max(low, after), high, now):
            yield from map(_to_entry, page)

    def own_entries(self, folder: str) -> Iterator[Entry]:
        """The entries below a folder of castore's own names, which no listing shows, read in pages."""
        low, high = below(folder)
        sql = f"{_ENTRY} WHERE e.name > ? AND e.name < ? ORDER BY e.name"
        for page in self.file.pages(sql, low, high):
            yield from map(_to_entry, page)

    def children(self, folder: str, now: float) -> Iterator[Entry | str]:
        """The direct contents of a folder: entries, and the paths of folders.

        Leaves out expired and lost entries. Skips the names below each inner folder, however many they are.
        """
        start = f"{folder}/" if folder else ""
        # SQLite sorts every blob, even the empty one, behind all text.
        low, high = below(folder) if folder else ("", b"")
        sql = (
            f"{_ENTRY} WHERE e.name >= ? AND e.name < ? AND (e.expires IS NULL OR e.expires > ?)"
            f" AND {LISTED} {_NOT_LOST} ORDER BY e.name LIMIT ?"
        )
        limit = _FEW
        while rows := self.file.all(sql, (low, high, now, limit)):
            is_last = len(rows) < limit
            limit = _MANY
            for row in rows:
                part, slash, _ = row[0][len(start) :].partition("/")
                if slash:
                    yield start + part
                    low = self.file.require_order(low, below(start + part)[1])
                    limit, is_last = _FEW, False
                    break
                yield _to_entry(row)
                low = row[0] + "\0"
            if is_last:
                return

    def entries_with_key(self, key: str, prefix: str = "") -> Iterator[Entry]:
        """Entries below a prefix ("" for all), expired or not, whose metadata has a key of that name.

        The key may lie at the top or deeper, and text inside a value may look like it: callers check the
        metadata. Metadata is JSON text to SQLite, so this reads the row of every entry, in pages. It parses
        the metadata of matching rows only.
        """
        low, high = below(prefix) if prefix else ("", _LAST)
        sql = f"{_ENTRY} WHERE e.name > ? AND e.name < ? AND e.metadata LIKE ? AND {LISTED} ORDER BY e.name"
        for page in self.file.pages(sql, low, high, f'%"{key}": %'):
            yield from map(_to_entry, page)

    def names(self, now: float) -> Iterator[str]:
        """Names that are not expired and whose bytes are not recorded as lost, in their order.

        Reads the names in pages.
        """
        self.beacon.require_in_place()
        sql = (
            "SELECT e.name FROM entries e JOIN blobs b ON b.digest = e.digest WHERE e.name > ?"
            f" AND (e.expires IS NULL OR e.expires > ?) AND {LISTED} {_NOT_LOST} ORDER BY e.name"
        )
        for page in self.file.pages(sql, "", now):
            yield from (name for (name,) in page)

    def count(self, now: float) -> int:
        """How many entries are not expired."""
        (expired,) = self.file.one("SELECT count(*) FROM entries WHERE expires <= ?", (now,))
        return max(0, self.totals().entries - int(expired) - self.count_kept())

    def count_kept(self) -> int:
        """How many entries no listing shows: bytes kept of remotes, and held for links. Reads each of their
        rows.
        """
        # Not `NOT (LISTED)`: SQLite reads all rows for a condition that is negated twice.
        sql = "SELECT count(*) FROM entries WHERE name > ? AND name < ?"
        return int(self.file.one(sql, below(RESERVED))[0])

    def size_below(self, folder: str) -> int:
        """The sum of the sizes of entries below a folder, in bytes. Reads each of their rows."""
        sql = "SELECT coalesce(sum(size), 0) FROM entries WHERE name > ? AND name < ?"
        return int(self.file.one(sql, below(folder))[0])

    def totals(self) -> Totals:
        """Sums over all rows; as quick at ten million entries as at ten."""
        self.beacon.require_in_place()
        return Totals(*self.file.one(_TOTALS))

    def counters(self) -> dict[str, int]:
        """The counters, summed over processes and runs."""
        return dict(self.file.rows("SELECT name, value FROM counters"))

    # Writing

    def is_folder(self, folder: str) -> bool:
        """Whether this process saw, since names last changed, that no part of ``folder`` is a file.

        The caller holds the write lock. Adding names under a folder cannot make it a file. Removing or
        re-pointing a name can, and such a change is announced before it is committed.
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
        """Empty the memory of `is_folder`, since a transaction rolled back or removed names."""
        self._folders = set()

    def write(self, timeout: float = BUSY_SECONDS) -> AbstractContextManager[Write]:
        """A write transaction: commits at the end of the block, rolls back on an error.

        Args:
            timeout: seconds to wait for other writers before entering raises sqlite3.OperationalError.

        Raises:
            FullError: the disk is full.
        """
        self.file.has_written = True
        return self._transaction(timeout)

    @contextmanager
    def _transaction(self, timeout: float) -> Iterator[Write]:
        self.require_writable()
        if timeout < BUSY_SECONDS:
            if not fork_gate.acquire(blocking=False):
                raise sqlite3.OperationalError("database is locked by another thread")
            fork_gate.release()
        # Everything behind the `with` is inside the `try`: a Ctrl-C can come between any two instructions,
        # and must leave neither the gate closed nor the transaction open.
        until = time.monotonic() + timeout
        while True:
            self._require_outermost(timeout)
            with fork_gate:
                txn = Write(self)
                try:
                    _writing.append(self._file_id)
                    if txn.begin(until):
                        yield txn
                        txn.commit()
                        return
                except BaseException as error:
                    self._roll_back(txn, error)
                    raise
                finally:
                    if self._file_id in _writing:  # a Ctrl-C may come before it is there
                        _writing.remove(self._file_id)
            time.sleep(PAUSE_SECONDS)  # forks and other threads may pass the gate

    def transact(self, work: Callable[[Write], T]) -> T:
        """Call ``work`` in a write transaction and return its result: `write` for callers on a fast path."""
        self.file.has_written = True
        self.require_writable()
        until = time.monotonic() + BUSY_SECONDS
        while True:
            self._require_outermost(BUSY_SECONDS)
            with fork_gate:
                txn = Write(self)
                try:
                    _writing.append(self._file_id)
                    if txn.begin(until):
                        result = work(txn)
                        txn.commit()
                        return result
                except BaseException as error:
                    self._roll_back(txn, error)
                    raise
                finally:
                    if self._file_id in _writing:  # a Ctrl-C may come before it is there
                        _writing.remove(self._file_id)
            time.sleep(PAUSE_SECONDS)

    def _require_outermost(self, timeout: float) -> None:
        """Check that this thread changes the store in no other transaction. Signal handlers and finalisers
        run between any two instructions, also of a transaction.

        Raises:
            StoreError: the thread does.
            sqlite3.OperationalError: the same, where the caller does not wait for others.
        """
        if not fork_gate._is_owned():  # which other threads' transactions hold
            return
        if self._file_id in _writing:
            if timeout < BUSY_SECONDS:
                raise sqlite3.OperationalError("database is locked by this thread")
            raise StoreError(
                f"a change of the store {self.path.parent} interrupts another one of the same thread, as a "
                "signal handler or a `__del__` may; nothing was changed here. Set a flag there, and change "
                "the store once the interrupted call has ended"
            )

    def _roll_back(self, txn: Write, error: BaseException) -> None:
        txn.abandon(error)
        if is_full(error) or is_damage(error):
            self.file.raise_for(error)

    # Batched bookkeeping

    def record_use(
        self, touched: dict[str, float], counts: dict[str, int], timeout: float = BUSY_SECONDS
    ) -> None:
        """Add last accesses and counts in one transaction.

        Readers call this. They leave checkpoints to writers, and run one only at four times the usual WAL
        size.
        """
        db = self.connection()
        checkpoint_at(db, 4 * CHECKPOINT_PAGES)
        try:
            with self._transaction(timeout) as txn:
                self.beacon.settle_all()  # a writer may have been killed before it did this
                txn.touch_older(list(touched.items()), CLOCK_SLACK)
                txn.count(counts)
        finally:
            checkpoint_at(db, CHECKPOINT_PAGES)

    def truncate_wal(self) -> None:
        """Run a checkpoint and truncate the WAL, unless a reader still needs it after the busy time."""
        until = time.monotonic() + BUSY_SECONDS
        while self.file.one("PRAGMA wal_checkpoint(TRUNCATE)")[0] and time.monotonic() < until:
            time.sleep(PAUSE_SECONDS)

    def snapshot_journal(self) -> None:
        """Replace the names journal by a snapshot of the index."""
        with self.write():
            number = self.journal.switch()
        self.journal.write_snapshot(number, self._name_records())

    def _name_records(self) -> Iterator[bytes]:
        sql = (
            "SELECT name, digest, serializer, metadata, created, expires, pinned, checked FROM entries"
            " WHERE name > ? ORDER BY name"
        )
        for page in self.file.pages(sql, ""):
            for *row, checked in page:
                if checked != entry_check(row[0], row[1]):
                    # The journal still has the right record: a snapshot must not overwrite it with a damaged
                    # one.
                    raise self.file.damaged(f"its row of {row[0]!r} fails its check")
                yield pack_record(row)
