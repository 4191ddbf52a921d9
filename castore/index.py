"""The index: SQLite in WAL mode, the one record of which names and blobs there are.

Here are the questions; every change is a method of `transaction.Write`, for which reads never wait. Each thread asks on a
connection of its own (connections.py). Statements are plain sqlite3; sqlite-utils makes and migrates the schema (schema.py).

Digests are raw bytes here, names are already checked, times are seconds since the epoch.
"""

from __future__ import annotations

import json
import os
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

from castore.ballast import free_bytes
from castore.beacon import CHANGED, EPOCH, Beacon
from castore.connections import BUSY_SECONDS, Connections
from castore.errors import FullError, StoreError
from castore.forks import fork_gate, reset_after_fork
from castore.journal import Journal, pack_record
from castore.records import Blob, Entry
from castore.schema import SCHEMA_VERSION, foreign, migrate
from castore.sqlerrors import is_damage, is_full
from castore.statements import BLOB_OF
from castore.temporary import check_regular, open_with_mode
from castore.transaction import Write

T = TypeVar("T")
# More than what SQLite asks for at once to open its file.
_SHM_BYTES = 64 * 1024

#: A time that lies further ahead than this, in seconds, was written by a clock that has been set back since.
CLOCK_SLACK = 60.0

# Numbers come as numbers whatever a damaged row holds: a time that is none is 0, long ago, so that name is a miss.
_ENTRY_COLUMNS = (
    "e.name, CAST(e.digest AS BLOB), CAST(e.size AS INTEGER), coalesce(b.stored, 0), coalesce(b.codec, 'none'),"
    " e.created + 0.0, e.expires + 0.0, e.accessed + 0.0, CAST(e.serializer AS TEXT), e.metadata, e.pinned"
)
_ENTRY = f"SELECT {_ENTRY_COLUMNS} FROM entries e LEFT JOIN blobs b ON b.digest = e.digest"
_FIND = (
    "SELECT b.digest, b.size, b.stored, b.codec, b.pack, b.offset, e.expires + 0.0, e.serializer"
    " FROM entries e JOIN blobs b ON b.digest = e.digest WHERE e.name = ?"
)
# One parameter for all names is quicker than one each, and one statement serves any number of them.
_FIND_MANY = _FIND.replace("SELECT ", "SELECT e.name, ").replace("= ?", "IN (SELECT value FROM json_each(?))")


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


def to_entry(row: tuple[Any, ...]) -> Entry:
    """A row of `_ENTRY` as the value users see."""
    name, digest, size, stored, codec, created, expires, accessed, serializer, metadata, pinned = row
    try:
        meta = json.loads(metadata) if metadata else {}
    except (TypeError, ValueError):  # a damaged row: it is told as it is, and `doctor` tells what to do
        meta = {"damaged": str(metadata)}
    return Entry(
        name, digest.hex(), size, stored, codec, created, expires, accessed, serializer, meta, bool(pinned)
    )


def _version(db: sqlite3.Connection) -> int:
    return int(db.execute("PRAGMA user_version").fetchone()[0])


class Index:
    """The index of one store.

    Args:
        path: of ``index.sqlite``.
        beacon: told of changes after they are committed.
        journal: appended to within each transaction.
        mode: permission bits of a new index; SQLite gives its WAL the same.
        is_empty: tells whether there are no objects, so that an index without rows is right.
        durable: commits survive a power cut.
        rebuilding: open it as it is, tables or not: for `rebuild`, whose transaction makes it whole.

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
    ) -> None:
        self.path = path
        self.beacon = beacon
        self._words = beacon.words
        self.journal = journal
        self.durable = durable
        self._rebuilding = rebuilding
        self._connections = Connections(path, durable)
        self._after_fork()
        reset_after_fork(self)
        # Never opened and closed if it is there: closing any descriptor of the file would drop the locks that SQLite
        # holds on it in this process, for another `Store` of the same folder.
        for suffix in ("", "-wal", "-shm", "-journal"):
            check_regular(f"{path}{suffix}")
        if not path.exists():
            os.close(open_with_mode(path, os.O_RDWR, mode))
        if not rebuilding:
            self._prepare(is_empty)

    def _after_fork(self) -> None:
        self._local = threading.local()
        self._folders: set[str] = set()
        self._folders_seen = 0

    def _prepare(self, is_empty: Callable[[], bool]) -> None:
        """Make the tables of a new index, or bring an older one up to date."""
        db = self._local.db = self._connect()
        self._local.epoch = self._words[EPOCH]
        try:
            version = _version(db)
        except sqlite3.DatabaseError as error:
            self.fail(error)
        if version > SCHEMA_VERSION:
            raise StoreError(
                f"{self.path} was written by a newer castore (schema {version}, this one knows {SCHEMA_VERSION});"
                " upgrade castore"
            )
        # Looked at again if there are objects: another process may have made the index and put them just now.
        if version == 0 and not is_empty() and _version(db) == 0:
            raise self._no_index()
        try:
            if version < SCHEMA_VERSION:
                migrate(db)
            elif (wrong := foreign(db)) is not None:
                raise self.damaged(wrong)
        except sqlite3.DatabaseError as error:
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
        db = self._connect()
        if not self._rebuilding and _version(db) != SCHEMA_VERSION:
            raise self._no_index()
        local.db, local.epoch = db, epoch
        return db

    def damaged(self, why: object) -> StoreError:
        """What to tell the user of an index that is not what it should be."""
        return StoreError(f"the index {self.path} cannot be used ({why}); `castore doctor` tells more")

    def fail(self, error: BaseException) -> NoReturn:
        """Raise what the user should see of an error."""
        # SQLite says no more than "disk I/O error" where there is no room for its shared memory.
        if is_full(error) or (
            isinstance(error, sqlite3.OperationalError) and free_bytes(self.path.parent) < _SHM_BYTES
        ):
            raise FullError(f"the disk of {self.path.parent} is full; free some space there") from error
        if is_damage(error):
            raise self.damaged(error) from error
        raise error

    def close(self) -> None:
        """Close every thread's connection."""
        self._local = threading.local()
        self._connections.close()

    def _connect(self) -> sqlite3.Connection:
        try:
            return self._connections.open()
        except sqlite3.DatabaseError as error:
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

    @contextmanager
    def write(self, patience: float = BUSY_SECONDS) -> Iterator[Write]:
        """A write transaction: commits at the end of the block, takes everything back on an error.

        Args:
            patience: seconds to wait for other writers before entering raises sqlite3.OperationalError.

        Raises:
            FullError: the disk is full.
        """
        if patience < BUSY_SECONDS:
            if not fork_gate.acquire(blocking=False):
                raise sqlite3.OperationalError("database is locked by another thread")
            fork_gate.release()
        # Everything behind the `with` is inside the `try`: a Ctrl-C can strike between any two instructions, and must
        # leave neither the gate closed nor the transaction open.
        with fork_gate:
            txn = Write(self)
            try:
                txn.begin(patience)
                yield txn
                txn.commit()
            except BaseException as error:
                self._take_back(txn, error)
                raise

    def transact(self, work: Callable[[Write], T]) -> T:
        """What ``work`` returns, done in a write transaction: `write` for callers in a hurry."""
        with fork_gate:
            txn = Write(self)
            try:
                txn.begin(BUSY_SECONDS)
                result = work(txn)
                txn.commit()
                return result
            except BaseException as error:
                self._take_back(txn, error)
                raise

    def _take_back(self, txn: Write, error: BaseException) -> None:
        txn.abandon(error)
        if is_full(error) or is_damage(error):
            self.fail(error)

    # Reads

    def _one(self, sql: str, parameters: tuple[Any, ...] = ()) -> Any:
        """The first row, or None. See `rows`."""
        try:
            return self.connection().execute(sql, parameters).fetchone()
        except sqlite3.Error as error:
            self.fail(error)

    def rows(self, sql: str, parameters: Sequence[Any] = ()) -> Iterator[Any]:
        """The rows of a question, one after the other; StoreError if the index is damaged."""
        try:
            yield from self.connection().execute(sql, parameters)
        except sqlite3.Error as error:
            self.fail(error)

    def find(self, name: str) -> Found | None:
        """The blob a name points to, whether expired or not, or None."""
        try:
            row = self.connection().execute(_FIND, (name,)).fetchone()
        except sqlite3.Error as error:
            self.fail(error)
        if row is None:
            return None
        digest, size, stored, codec, pack, offset, expires, serializer = row
        return Found(Blob(digest, size, stored, codec, pack, offset), expires, serializer)

    def find_digest(self, name: str) -> bytes | None:
        """The digest a name points to, or None."""
        row = self._one("SELECT digest FROM entries WHERE name = ?", (name,))
        return row[0] if row else None

    def find_many(self, names: list[str]) -> dict[str, Found]:
        """`find` for many names, in one query."""
        return {
            row[0]: Found(Blob._make(row[1:7]), row[7], row[8])
            for row in self.rows(_FIND_MANY, (json.dumps(names),))
        }

    def blob(self, digest: bytes) -> Blob | None:
        """A blob, lost or not, or None."""
        row = self._one(BLOB_OF, (digest,))
        return Blob._make(row) if row else None

    def blobs_of(self, digests: list[bytes]) -> dict[bytes, Blob]:
        """The blobs of up to a thousand digests, lost or not, as far as they are known."""
        sql = BLOB_OF.replace("= ?", f"IN ({','.join('?' * len(digests))})")
        return {row[0]: Blob._make(row) for row in self.rows(sql, digests)}

    def blobs(self) -> Iterator[Blob]:
        """Every blob, in the order of digests, read in pages so that no long read holds up the WAL."""
        last = b""
        sql = "SELECT digest, size, stored, codec, pack, offset FROM blobs WHERE digest > ? ORDER BY digest LIMIT 2000"
        while rows := list(self.rows(sql, (last,))):
            yield from map(Blob._make, rows)
            last = rows[-1][0]

    def checksums(self, digest: bytes) -> bytes | None:
        """Frame checksums of a raw blob."""
        row = self._one("SELECT frames FROM checksums WHERE digest = ?", (digest,))
        return row[0] if row else None

    def has_loose_of_size(self, size: int) -> bool:
        """Whether a loose blob of exactly this size is known: only then may a file of that size be one."""
        sql = "SELECT 1 FROM blobs WHERE size = ? AND pack = 0 LIMIT 1"
        return self._one(sql, (size,)) is not None

    def entry(self, name: str) -> Entry | None:
        """One entry, expired or not, or None."""
        row = self._one(f"{_ENTRY} WHERE e.name = ?", (name,))
        return to_entry(row) if row else None

    def names_of(self, digest: bytes) -> list[str]:
        """The names that point to a blob. Scans all entries: for repair and reports."""
        return [row[0] for row in self.rows("SELECT name FROM entries WHERE digest = ?", (digest,))]

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
        while rows := list(self.rows(sql, (max(low, last), high, now))):
            yield from map(to_entry, rows)
            last = rows[-1][0]

    def totals(self) -> Totals:
        """Sums over all rows; as quick at ten million entries as at ten."""
        sql = "SELECT entries, logical, blobs, uniq, stored FROM totals"
        return Totals(*self._one(sql))

    def counters(self) -> dict[str, int]:
        """Counts added up over processes and runs."""
        return dict(self.rows("SELECT name, value FROM counters"))

    # Batched bookkeeping

    def record_use(
        self, touched: dict[str, float], counts: dict[str, int], patience: float = BUSY_SECONDS
    ) -> None:
        """Add last accesses and counts in one transaction."""
        with self.write(patience) as txn:
            self.beacon.settle_all()  # in case that a writer was killed before it could
            txn.executemany(
                "UPDATE entries SET accessed = ?1 WHERE name = ?2 AND (accessed < ?1 OR accessed > ?1 + ?3)",
                [(when, name, CLOCK_SLACK) for name, when in list(touched.items())],
            )
            txn.executemany(
                "INSERT INTO counters VALUES (?1, ?2) ON CONFLICT (name) DO UPDATE SET value = value + ?2",
                list(counts.items()),
            )

    def shrink_log(self) -> None:
        """Bring what the log holds into the index and give its room back to the disk, unless a reader needs it."""
        next(self.rows("PRAGMA wal_checkpoint(TRUNCATE)"), None)

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
        while rows := list(self.rows(sql, (last,))):
            for row in rows:
                yield pack_record(row)
            last = rows[-1][0]
