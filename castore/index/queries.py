"""What can be asked of the index: names, blobs, sums. Changes nothing.

Each question is asked on the calling thread's connection, which `index.Index` keeps. Digests are raw bytes, names are
already checked, times are seconds since the epoch. A row may be damaged: what comes of it has the types that it should have,
and what it says may be anything.
"""

from __future__ import annotations

import json
import logging
import sqlite3
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from typing import Any, NamedTuple, NoReturn

from castore.index.connections import BUSY_SECONDS, PAUSE_SECONDS
from castore.index.statements import BLOB_COLUMNS, BLOB_OF
from castore.records import LOST, Blob, Entry, entry_check
from castore.system.forks import unforked
from castore.system.sql_errors import SQL_ERRORS, is_locked

log = logging.getLogger("castore")

# Numbers come as numbers whatever a damaged row holds: a time that is none is 0, long ago, so that name is a miss.
_ENTRY_COLUMNS = (
    "e.name, coalesce(CAST(e.digest AS BLOB), x''), coalesce(CAST(e.size AS INTEGER), 0), coalesce(b.stored, 0),"
    " coalesce(b.codec, 'none'), coalesce(e.created + 0.0, 0.0), e.expires + 0.0, coalesce(e.accessed + 0.0, 0.0),"
    " coalesce(CAST(e.serializer AS TEXT), ''), e.metadata, e.pinned"
)
_ENTRY = f"SELECT {_ENTRY_COLUMNS} FROM entries e LEFT JOIN blobs b ON b.digest = e.digest"
_CHECKED_ENTRY = _ENTRY.replace(" FROM ", ", e.checked FROM ")
_FIND = (
    "SELECT b.digest, b.size, b.stored, b.codec, b.pack, b.offset, e.expires + 0.0, e.serializer, e.checked"
    " FROM entries e JOIN blobs b ON b.digest = e.digest WHERE e.name = ?"
)
# One parameter for all names is quicker than one each, and one statement serves any number of them.
_FIND_MANY = _FIND.replace("SELECT ", "SELECT e.name, ").replace("= ?", "IN (SELECT value FROM json_each(?))")


class Found(NamedTuple):
    """What a read needs to know of a name."""

    blob: Blob
    expires: float | None
    serializer: str


_BLOBS = f"SELECT {BLOB_COLUMNS} FROM blobs WHERE digest > ? ORDER BY digest LIMIT 2000"
_BLOBS_BETWEEN = f"SELECT {BLOB_COLUMNS} FROM blobs WHERE digest BETWEEN ? AND ? AND pack != ? LIMIT ?"
# Numbers, whatever a damaged row holds: `doctor` counts again.
_TOTALS = "SELECT {} FROM totals".format(
    ", ".join(
        f"coalesce(CAST({column} AS INTEGER), 0)"
        for column in ("entries", "logical", "blobs", "uniq", "stored", "packed")
    )
)


class Totals(NamedTuple):
    """Sums over all rows. ``logical`` counts a blob once a name, ``unique`` once; all in bytes but the counts.

    ``packed`` is what the records of blobs take in packs, heads included.
    """

    entries: int
    logical: int
    blobs: int
    unique: int
    stored: int
    packed: int


def below(name: str) -> tuple[str, str]:
    """Bounds of all names strictly inside the folder ``name``: ``0`` follows ``/`` in the order of bytes."""
    return name + "/", name + "0"


def to_entry(row: tuple[Any, ...]) -> Entry:
    """A row of `_ENTRY` as the value users see."""
    name, digest, size, stored, codec, created, expires, accessed, serializer, metadata, pinned = row
    meta = parse_metadata(metadata)
    return Entry(
        name, digest.hex(), size, stored, codec, created, expires, accessed, serializer, meta, bool(pinned)
    )


def parse_metadata(text: Any) -> dict[str, Any]:
    """The metadata that a row's text stands for. That of a damaged row is given as it is: `doctor` tells what to do."""
    try:
        found = json.loads(text) if text else {}
    except (TypeError, ValueError):
        found = None
    return found if isinstance(found, dict) else {"damaged": str(text)}


def _belong(name: str, digest: bytes, checked: int) -> bool:
    """Whether a row's name and digest belong together: one where they do not is as good as none."""
    if checked == entry_check(name, digest):
        return True
    log.warning(
        "the index's row of %r has been damaged: it counts as none; `castore doctor` tells more", name
    )
    return False


class Questions:
    """The reading half of an index."""

    def connection(self) -> sqlite3.Connection:
        """The calling thread's."""
        raise NotImplementedError

    def fail(self, error: BaseException) -> NoReturn:
        """Raise what the user should see of an error."""
        raise NotImplementedError

    def all(self, sql: str, parameters: Sequence[Any] = ()) -> list[Any]:
        """The rows of a question, or of a statement that changes no table of the index.

        All at once: between two rows this process might fork, and the child would take the open read for its own.

        Raises:
            StoreError: the index is damaged.
        """
        until = 0.0
        while True:
            try:
                db = self.connection()
                with unforked():
                    return db.execute(sql, parameters).fetchall()
            except SQL_ERRORS as error:
                now = time.monotonic()
                until = until or now + BUSY_SECONDS
                if not is_locked(error) or now > until:
                    self.fail(error)
            time.sleep(PAUSE_SECONDS)

    def _one(self, sql: str, parameters: tuple[Any, ...] = ()) -> Any:
        """The first row, or None. See `all`."""
        rows = self.all(sql, parameters)
        return rows[0] if rows else None

    def rows(self, sql: str, parameters: Sequence[Any] = ()) -> Iterator[Any]:
        """`all`, one after the other."""
        return iter(self.all(sql, parameters))

    def stream(self, sql: str, parameters: Sequence[Any] = ()) -> Generator[Any]:
        """`rows` for more of them than memory should hold. Until its end no fork happens: the caller closes it soon."""
        db = self.connection()
        with unforked(), closing(db.cursor()) as cursor:
            try:
                yield from cursor.execute(sql, parameters)
            except SQL_ERRORS as error:
                self.fail(error)

    def pages(self, sql: str, after: Any, *parameters: Any) -> Iterator[list[Any]]:
        """The rows of a question in pages, so that no long read holds up the WAL.

        Args:
            sql: a page of rows in the order of their first column, which is to be greater than the first parameter.
            after: the first parameter of the first page.
            parameters: the others.

        Raises:
            StoreError: the rows are in another order: the index is damaged, and there might be no end to them.
        """
        while page := self.all(sql, (after, *parameters)):
            yield page
            after = self.behind(after, page[-1][0])

    def behind(self, last: Any, key: Any) -> Any:
        """``key``, which must come behind the last one.

        Raises:
            StoreError: it does not.
        """
        if type(key) is not type(last) or not last < key:
            self.fail(sqlite3.DatabaseError(f"the row of {key!r} comes behind that of {last!r}"))
        return key

    def find(self, name: str) -> Found | None:
        """The blob a name points to, whether expired or not, or None."""
        rows = self.all(_FIND, (name,))
        if not rows:
            return None
        digest, size, stored, codec, pack, offset, expires, serializer, checked = rows[0]
        if not _belong(name, digest, checked):
            return None
        return Found(Blob(digest, size, stored, codec, pack, offset), expires, serializer)

    def find_digest(self, name: str) -> bytes | None:
        """The digest a name points to, or None."""
        row = self._one("SELECT digest, checked FROM entries WHERE name = ?", (name,))
        return row[0] if row and _belong(name, *row) else None

    def find_many(self, names: list[str]) -> dict[str, Found]:
        """`find` for many names, in one query."""
        return {
            row[0]: Found(Blob._make(row[1:7]), row[7], row[8])
            for row in self.rows(_FIND_MANY, (json.dumps(names),))
            if _belong(row[0], row[1], row[9])
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
        """Every blob, in the order of digests."""
        for page in self.pages(_BLOBS, b""):
            yield from map(Blob._make, page)

    def blobs_between(self, low: bytes, high: bytes, limit: int) -> list[Blob]:
        """The first blobs with digests from ``low`` to ``high``, without those that are lost."""
        return [Blob(*row) for row in self.rows(_BLOBS_BETWEEN, (low, high, LOST, limit))]

    def is_named(self, digest: bytes) -> bool:
        """Whether an entry names a blob: gc leaves it alone then."""
        row = self._one("SELECT refs FROM blobs WHERE digest = ?", (digest,))
        return row is not None and row[0] != 0

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
        row = self._one(f"{_CHECKED_ENTRY} WHERE e.name = ?", (name,))
        return to_entry(row[:-1]) if row and _belong(name, row[1], row[-1]) else None

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
        low = prefix + "/" if prefix else ""
        for page in self.pages(sql, max(low, after), high, now):
            yield from map(to_entry, page)

    def totals(self) -> Totals:
        """Sums over all rows; as quick at ten million entries as at ten."""
        return Totals(*self._one(_TOTALS))

    def counters(self) -> dict[str, int]:
        """Counts added up over processes and runs."""
        return dict(self.rows("SELECT name, value FROM counters"))
