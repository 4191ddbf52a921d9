"""Write transactions: everything that changes a row of the index is a method of `Write`.

A transaction starts with BEGIN IMMEDIATE, so only one runs at a time on a machine. The caller of a
transaction moves files into place meanwhile, and `commit` appends to the names journal first: the write lock
orders index, journal and object directory alike. The values derived from rows (how many entries name a blob,
the totals) are updated here, in the same transaction.

Digests are raw bytes, names are already checked, times are seconds since the epoch.
"""

from __future__ import annotations

import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import islice
from typing import Any, Protocol

from castore.errors import NameConflictError
from castore.index.beacon import Beacon
from castore.index.connections import ATTEMPT_SECONDS, retry_while_locked
from castore.index.journal import Journal, pack_record, pack_records, pack_removals
from castore.index.many_rows import ManyRows
from castore.index.statements import (
    ADD_BLOB,
    ADD_BLOBS,
    ADD_COUNTS,
    ADD_DEAD,
    ADD_ENTRIES,
    ADD_ENTRY,
    ADD_NEW_ENTRIES,
    ADD_TOTALS,
    BETWEEN,
    BLOB_COLUMNS,
    BLOB_OF,
    BRING_BLOBS,
    COUNT_REF,
    DELETE_BLOBS,
    DELETE_CHECKSUMS,
    DELETE_ENTRIES,
    DELETE_PLACES,
    LOSE,
    NEW_PACK,
    TOUCH_OLDER,
    UNCOUNT_MANY_REFS,
    UNCOUNT_REFS,
    UPDATE_ENTRY,
)
from castore.records import AWAY, HEAD_SIZE, LOST, Blob, EntrySpec, entry_check, parse_metadata
from castore.system.sql_errors import is_locked

#: Keys of one query: each is a parameter of its statement.
_KEYS = 1000
_EXABYTE = 1 << 60
# Sizes are numbers whatever a damaged row holds: putting or removing its name must work.
_DIGEST_AND_SIZE = "digest, CAST(size AS INTEGER)"
_SELECT_COUNTED = f"SELECT {_DIGEST_AND_SIZE} FROM entries WHERE name = ?"
_NO_ENTRY: tuple[Any, ...] = (None, 0, None, None)

# Name, digest, size, serializer, metadata, now, expires, pinned, check.
_Row = tuple[str, bytes, int, str, str | None, float, float | None, int, int]


class Host(Protocol):
    """The parts of an index that a write transaction needs."""

    beacon: Beacon
    journal: Journal
    durable: bool

    def connection(self) -> sqlite3.Connection:
        """The calling thread's connection."""

    def is_folder(self, folder: str) -> bool:
        """Whether this process saw, since names last changed, that no part of ``folder`` is a file."""

    def remember_folders(self, folders: list[str]) -> None:
        """Have `is_folder` answer for these until names change."""

    def forget_folders(self) -> None:
        """Empty the memory of `is_folder`."""


class Write:
    """One write transaction: others see all of its changes or none. Made by `Index.write`."""

    #: The connection that the transaction runs on, once it has begun.
    db: sqlite3.Connection

    def __init__(self, index: Host) -> None:
        self._index = index
        self._records: list[bytes] = []
        self._appended = b""
        self._new_folders: list[str] = []
        self._announce = False
        self._announced: int | None = None
        #: Whether the transaction has committed.
        self.committed = False
        self._before_commit: list[Callable[[], None]] = []
        # Changes to the totals, and to the dead bytes of packs; `commit` writes them.
        self._entries = self._logical = 0
        self._blobs = self._unique = self._stored = self._packed = 0
        self._dead: dict[int, int] = {}

    def begin(self, until: float) -> bool:
        """Take SQLite's write lock; False if others kept it for a whole turn and ``until`` has not passed.

        Args:
            until: a time of the monotonic clock.

        Raises:
            sqlite3.OperationalError: others kept the lock past ``until``.
            StoreError: the store's folder was removed, moved or made anew.
        """
        # Objects are found by their paths: with the index of a folder that is gone, they would be another
        # store's.
        self._index.beacon.require_in_place()
        db = self.db = self._index.connection()
        left = until - time.monotonic()
        try:
            if left >= ATTEMPT_SECONDS:
                db.execute("BEGIN IMMEDIATE")
            else:
                _begin_within(db, max(left, 0))
        except sqlite3.OperationalError as error:
            if not is_locked(error) or time.monotonic() >= until:
                raise
            return False
        return True

    def commit(self) -> None:
        """Append to the journal, then COMMIT."""
        index = self._index
        totals = (self._entries, self._logical, self._blobs, self._unique, self._stored, self._packed)
        for prepare in self._before_commit:
            prepare()
        if any(totals):
            try:
                self.db.execute(ADD_TOTALS, totals)
            except OverflowError:
                # Damaged rows had claimed exabytes before they were replaced. `doctor` recounts.
                self.db.execute(ADD_TOTALS, [max(-_EXABYTE, min(_EXABYTE, total)) for total in totals])
        if self._dead:
            dead = [(pack, min(_EXABYTE, size)) for pack, size in self._dead.items()]
            self.db.executemany(ADD_DEAD, dead)
        if self._records:
            records = self._appended = (
                self._records[0] if len(self._records) == 1 else b"".join(self._records)
            )
            index.journal.append(records, durable=index.durable)
        if self._announce:
            self._announced = index.beacon.announce()
        elif self._new_folders:
            # Still under the lock: later, another process may have made one of the folders a file.
            index.remember_folders(self._new_folders)
        self.db.execute("COMMIT")
        self.committed = True
        if self._announced is not None:
            index.beacon.settle(self._announced)

    def abandon(self, error: BaseException) -> None:
        """Roll back, wherever the error or Ctrl-C came. After the COMMIT only the beacon is settled."""
        db: sqlite3.Connection | None = getattr(self, "db", None)
        if db is None:
            return
        self._index.forget_folders()
        if not db.in_transaction and isinstance(error, sqlite3.Error) and self._appended:
            # On a full disk SQLite may have rolled back by itself, and released the lock that the journal
            # needs.
            retry_while_locked(lambda: db.execute("BEGIN IMMEDIATE"))
        if db.in_transaction:
            if self._appended:
                self._index.journal.retract(self._appended)
            self._index.beacon.settle_all()  # the announced change does not happen
            db.execute("ROLLBACK")
        elif self._announced is not None:
            self._index.beacon.settle(self._announced)

    def before_commit(self, prepare: Callable[[], None]) -> None:
        """Have `commit` call ``prepare`` first, under the lock."""
        self._before_commit.append(prepare)

    # Names

    def set_entry(self, spec: EntrySpec, blob: Blob, now: float, *, added: bool) -> tuple[float, bool]:
        """Point a name at a blob; returns when it was created and whether it is pinned.

        Args:
            spec: the entry's specification: its name and attributes.
            blob: the name's blob from now on.
            now: the current time, recorded as the last access.
            added: whether `add_blob` has just added the blob, and so counted this name already.

        Raises:
            NameConflictError: the name is a folder of others, or a part of it is a file.
        """
        name, serializer, metadata, expires, pin = spec
        digest, size = blob[:2]
        created, pinned, before = now, int(pin), None
        check = entry_check(name, digest)
        row = (name, digest, size, serializer, metadata, now, expires, pinned, check)
        if self.db.execute(ADD_ENTRY, row).rowcount != 1:
            before = self.db.execute(_SELECT_COUNTED, (name,)).fetchone()
            if before is None:
                self._require_no_name_below(name, now)
                self.db.execute(ADD_ENTRY, row)
        if before is None:
            self._require_no_file_above(name, now)
            self._entries += 1
            self._logical += size
        else:
            self._announce = True
            created, pinned = self.db.execute(UPDATE_ENTRY, row).fetchone()
            if before[0] != digest:
                self.db.execute(UNCOUNT_REFS, (before[0], now, 1))
                self._logical += size - before[1]
        if not added and (before is None or before[0] != digest):
            self.db.execute(COUNT_REF, (digest,))
        self._records.append(pack_record((name, digest, serializer, metadata, created, expires, pinned)))
        return created, bool(pinned)

    def set_entries(
        self, specs: Sequence[EntrySpec], placed: Sequence[tuple[Blob, bool]], now: float
    ) -> list[tuple[float, bool]]:
        """`set_entry` for many, each with its blob and whether that was added; quicker for new names."""
        names = {spec.name for spec in specs}
        alone = self._nothing_between(min(names), max(name + "0" for name in names))
        taken = (
            set()
            if alone
            else {row[0] for row in self._select_among("SELECT name FROM entries WHERE name", names)}
        )
        if len(names) < len(specs):
            taken = names  # some names occur twice: then their order counts
        rows, again = [], []
        for (name, serializer, metadata, expires, pin), (blob, added) in zip(specs, placed, strict=True):
            if name not in taken:
                check = entry_check(name, blob[0])
                rows.append((name, blob[0], blob[1], serializer, metadata, now, expires, int(pin), check))
                if not added:
                    again.append((blob[0],))
        if rows:
            rows.sort()  # as in add_blobs; names are distinct here
            self._add_entries(ADD_NEW_ENTRIES if alone else ADD_ENTRIES, rows, now)
            self.db.executemany(COUNT_REF, again)
        return [
            self.set_entry(spec, blob, now, added=added) if spec.name in taken else (now, spec.pinned)
            for spec, (blob, added) in zip(specs, placed, strict=True)
        ]

    def _nothing_between(self, low: str, high: str) -> bool:
        return self.db.execute(BETWEEN, (low, high)).fetchone() is None

    def _add_entries(self, statement: ManyRows, rows: Sequence[_Row], now: float) -> None:
        """Add names that have no entry yet."""
        if statement.run(self.db, rows) != len(rows):
            for row in rows:  # some names are folders of existing entries
                self._require_no_name_below(row[0], now)
                self.db.execute(ADD_ENTRY, row)
        for name in {row[0].rpartition("/")[0]: row[0] for row in rows}.values():
            self._require_no_file_above(name, now)
        self._entries += len(rows)
        self._logical += sum(row[2] for row in rows)
        self._records.append(
            pack_records((row[0], row[1], row[3], row[4], now, row[6], row[7]) for row in rows)
        )

    def _require_no_name_below(self, name: str, now: float) -> None:
        child = self._find_conflict("name > ?1 || '/' AND name < ?1 || '0'", [name], now)
        if child is not None:
            raise NameConflictError(
                f"{name!r} cannot be a file: it is the folder of {child!r};"
                " choose another name or delete that one"
            )

    def _require_no_file_above(self, name: str, now: float) -> None:
        folder = name.rpartition("/")[0]
        if not folder or self._index.is_folder(folder):
            return
        parents = _parents(name)
        marks = ",".join("?" * len(parents))
        file = self._find_conflict(f"name IN ({marks})", parents, now)
        if file is not None:
            raise NameConflictError(
                f"{name!r} cannot lie inside {file!r}, which is a file;"
                " choose another name or delete that one"
            )
        self._new_folders.append(folder)

    def _find_conflict(self, condition: str, parameters: list[str], now: float) -> str | None:
        """A matching name that has not expired, or None. Removes matching names that have expired."""
        expired = []
        sql = f"SELECT name, expires + 0.0, pinned FROM entries WHERE {condition}"
        for name, expires, pinned in self.db.execute(sql, parameters):
            if pinned or expires is None or expires > now:
                return str(name)
            expired.append(name)
        for name in expired:
            self.delete_entry(name)
        return None

    def digest_of(self, name: str) -> bytes | None:
        """The digest a name points to, expired or not, or None."""
        row = self.db.execute("SELECT digest FROM entries WHERE name = ?", (name,)).fetchone()
        return row[0] if row else None

    def holds(self, name: str, digest: bytes | None, now: float) -> bool:
        """Whether a name points to ``digest``, as `Index.entry` has it; for None, whether readers miss it.

        An expired name points nowhere. A name whose bytes are lost is missing, and still points to its
        digest: both expectations hold, and the put that depends on one of them heals the name.
        """
        sql = (
            "SELECT e.digest, e.checked, b.pack FROM entries e LEFT JOIN blobs b ON b.digest = e.digest"
            " WHERE e.name = ? AND (e.expires IS NULL OR e.expires + 0.0 > ?)"
        )
        row = self.db.execute(sql, (name, now)).fetchone()
        if row is None or row[1] != entry_check(name, row[0]):
            return digest is None
        return row[2] in (None, LOST) if digest is None else row[0] == digest

    def delete_entry(self, name: str) -> bool:
        """Remove a name; False if there is none."""
        sql = f"DELETE FROM entries WHERE name = ? RETURNING {_DIGEST_AND_SIZE}"
        row = self.db.execute(sql, (name,)).fetchone()
        if row is None:
            return False
        self.db.execute(UNCOUNT_REFS, (row[0], time.time(), 1))
        self._record_removals([name], row[1])
        return True

    def delete_unchanged(self, name: str, digest: bytes, metadata: dict[str, Any]) -> bool:
        """Remove a name if it still has that digest and that metadata; False if not."""
        row = self.db.execute("SELECT digest, metadata FROM entries WHERE name = ?", (name,)).fetchone()
        if row is None or row[0] != digest or parse_metadata(row[1]) != metadata:
            return False
        return self.delete_entry(name)

    def evict_entries(
        self, chosen: Sequence[tuple[str, bytes, float | None]], now: float
    ) -> list[tuple[str, bytes]]:
        """Remove the entries that gc chose, except those touched, pinned or re-pointed since.

        Their blobs still count them: in this transaction, the caller must note them for a later `uncount`.

        Args:
            chosen: for each entry its name, the digest that gc saw, and the last access that gc saw. The
                access is None for an expired entry, which must still be expired at ``now``.
            now: the time at which gc chose.

        Returns:
            Names and digests of the entries that were removed.
        """
        free = (
            "SELECT name, CAST(digest AS BLOB), CAST(size AS INTEGER), accessed, expires FROM entries"
            " WHERE pinned = 0 AND name"
        )
        rows = {row[0]: row[1:] for row in self._select_among(free, [name for name, _, _ in chosen])}
        removed = []
        for name, digest, used in chosen:
            now_digest, size, accessed, expires = rows.get(name, _NO_ENTRY)
            # As in SQL: a value that is not a number sorts behind every number, so it has not expired.
            over = isinstance(expires, float) and expires <= now
            if now_digest == digest and (over if used is None else accessed == used):
                removed.append((name, digest, size))
        DELETE_ENTRIES.run(self.db, [(name,) for name, _, _ in removed])
        if removed:
            self._record_removals([name for name, _, _ in removed], sum(size for _, _, size in removed))
        return [(name, digest) for name, digest, _ in removed]

    def _record_removals(self, names: list[str], size: int) -> None:
        self._index.forget_folders()
        self._entries -= len(names)
        self._logical -= size
        self._records.append(pack_removals(names))
        self._announce = True

    def set_pinned(self, name: str, pinned: bool, now: float) -> bool:
        """Pin or unpin a name; False if there is none. One that has expired at ``now`` cannot be pinned."""
        row = self.db.execute(
            "UPDATE entries SET pinned = ?1 WHERE name = ?2 AND (?1 = 0 OR expires IS NULL OR expires > ?3)"
            " RETURNING name, digest, serializer, metadata, created, expires, pinned",
            (int(pinned), name, now),
        ).fetchone()
        if row is None:
            return False
        self._records.append(pack_record(row))
        return True

    def touch(self, name: str, when: float) -> None:
        """Set a name's last access."""
        self.db.execute("UPDATE entries SET accessed = ? WHERE name = ?", (when, name))

    def touch_older(self, touched: Iterable[tuple[str, float]], slack: float) -> None:
        """`touch` for many, except names with a later access already.

        Args:
            touched: names and times in seconds since the epoch.
            slack: an access more than this many seconds ahead came from a clock that has been set back since,
                and is replaced.
        """
        TOUCH_OLDER.run(self.db, [(name, when, slack) for name, when in touched])

    def count(self, counts: Mapping[str, int]) -> None:
        """Add to the counters of these names."""
        self.db.executemany(ADD_COUNTS, list(counts.items()))

    # Blobs and packs

    def blob(self, digest: bytes) -> Blob | None:
        """The blob, lost or not, or None."""
        row = self.db.execute(BLOB_OF, (digest,)).fetchone()
        return Blob._make(row) if row else None

    def add_blob(self, blob: Blob, checksums: bytes | None = None) -> bool:
        """Record a blob whose bytes are in place, or away; False if it is known, or its pack was retired.

        Its reference count starts at 1: `set_entry` for its name must follow in the same transaction.
        """
        if self.db.execute(ADD_BLOB, blob).rowcount != 1:
            return False
        self._blobs += 1
        self._unique += blob.size
        self._stored += blob.stored
        if blob.pack > 0:
            self._packed += blob.stored + HEAD_SIZE
        if checksums is not None:
            self._keep_checksums(blob.digest, checksums)
        return True

    def blobs(self, digests: Iterable[bytes]) -> dict[bytes, Blob]:
        """The known blobs among ``digests``, lost or not."""
        rows = self._select_among(f"SELECT {BLOB_COLUMNS} FROM blobs WHERE digest", digests)
        return {row[0]: Blob._make(row) for row in rows}

    def add_blobs(self, blobs: Sequence[Blob]) -> None:
        """`add_blob` for many blobs that are known to be new, and lie in registered packs or are away."""
        # In the order of the B-tree, so that each of its pages is visited once.
        ADD_BLOBS.run(self.db, sorted(blobs))
        self._blobs += len(blobs)
        stored = sum(blob.stored for blob in blobs)
        self._unique += sum(blob.size for blob in blobs)
        self._stored += stored
        self._packed += stored + HEAD_SIZE * sum(blob.pack > 0 for blob in blobs)

    def move_blob(self, blob: Blob, checksums: bytes | None = None) -> bool:
        """Record where a known blob's bytes are now, or that they are away; False if the pack was retired."""
        sql = (
            "SELECT CAST(size AS INTEGER), CAST(stored AS INTEGER), CAST(pack AS INTEGER) FROM blobs"
            " WHERE digest = ?"
        )
        before = self.db.execute(sql, (blob.digest,)).fetchone()
        moved = self.db.execute(
            "UPDATE blobs SET size = ?2, stored = ?3, codec = ?4, pack = ?5, offset = ?6 WHERE digest = ?1"
            " AND (?5 <= 0 OR EXISTS (SELECT 1 FROM packs WHERE id = ?5))",
            blob,
        ).rowcount
        if moved:
            if blob.size != before[0]:  # a remote's tree had lied
                self._resize_entries(blob)
            self._unique += blob.size - before[0]
            self._stored += blob.stored - before[1]
            self._count_dead(*before[1:])
            if blob.pack > 0:
                self._packed += blob.stored + HEAD_SIZE
            if checksums is not None:
                self._keep_checksums(blob.digest, checksums)
        return moved == 1

    def _resize_entries(self, blob: Blob) -> None:
        """Correct the size that entries have for a blob. Reads all entries."""
        sql = "SELECT count(*), coalesce(sum(CAST(size AS INTEGER)), 0) FROM entries WHERE digest = ?"
        names, logical = self.db.execute(sql, (blob.digest,)).fetchone()
        self.db.execute("UPDATE entries SET size = ?2 WHERE digest = ?1", blob[:2])
        self._logical += names * blob.size - logical

    def bring_blobs(self, blobs: Sequence[Blob], known: Mapping[bytes, Blob]) -> None:
        """`move_blob` for many blobs that are away, and whose bytes lie in registered packs now.

        Args:
            blobs: as they are now.
            known: their rows as they were.
        """
        BRING_BLOBS.run(self.db, sorted(blobs))
        self._unique += sum(blob.size - _number(known[blob.digest].size) for blob in blobs)
        self._stored += sum(blob.stored - _number(known[blob.digest].stored) for blob in blobs)
        self._packed += sum(blob.stored + HEAD_SIZE for blob in blobs)

    def _keep_checksums(self, digest: bytes, checksums: bytes) -> None:
        self.db.execute("INSERT OR REPLACE INTO checksums VALUES (?, ?)", (digest, checksums))

    def mark_lost(self, blob: Blob) -> None:
        """Record that a blob's bytes are missing or damaged.

        Reading it is a miss until it is put again, unless a remote has it: then it is fetched again.
        """
        if self.db.execute(LOSE, (blob.digest, LOST, AWAY)).rowcount:
            self._stored -= _number(blob.stored)
            self._count_dead(_number(blob.stored), _number(blob.pack))
        self._announce = True

    def drop_blob(self, blob: Blob) -> bool:
        """Forget a blob that no entry names; False if one does."""
        if self.db.execute("DELETE FROM blobs WHERE digest = ? AND refs = 0", (blob.digest,)).rowcount == 0:
            return False
        self._record_removals_of_blobs([blob])
        return True

    def unnamed(self, digests: Iterable[bytes]) -> list[bytes]:
        """The known blobs among ``digests`` that no entry names."""
        return [
            row[0]
            for row in self._select_among("SELECT digest FROM blobs WHERE refs = 0 AND digest", digests)
        ]

    def uncount(self, names: Counter[bytes], chosen: Container[bytes]) -> list[Blob]:
        """Lower the reference counts by the names that gc removed, and drop blobs of ``chosen`` that reach 0.

        Returns:
            The blobs that were dropped.
        """
        rows = self._select_among(
            f"SELECT {BLOB_COLUMNS}, refs FROM blobs WHERE digest", [one for one in names if one in chosen]
        )
        last = [Blob._make(row[:-1]) for row in rows if row[-1] == names[row[0]]]
        DELETE_BLOBS.run(self.db, [(blob.digest,) for blob in last])
        self._record_removals_of_blobs(last)
        # gc removed the entries, so there is no grace period: orphaned = 0.
        dropped = {blob.digest for blob in last}
        kept = [(digest, 0.0, count) for digest, count in names.items() if digest not in dropped]
        UNCOUNT_MANY_REFS.run(self.db, kept)
        return last

    def _record_removals_of_blobs(self, blobs: Sequence[Blob]) -> None:
        # Packed blobs have no checksums.
        DELETE_CHECKSUMS.run(self.db, [(blob.digest,) for blob in blobs if _number(blob.pack) <= 0])
        if self._has_places:
            DELETE_PLACES.run(self.db, [(blob.digest,) for blob in blobs])
        for blob in blobs:
            stored = _number(blob.stored)
            self._blobs -= 1
            self._unique -= _number(blob.size)
            self._stored -= stored
            self._count_dead(stored, _number(blob.pack))

    @cached_property
    def _has_places(self) -> bool:
        """Whether any blob is known to be in a remote. Most stores have none, and need not ask for each."""
        return self.db.execute("SELECT 1 FROM places LIMIT 1").fetchone() is not None

    def _count_dead(self, stored: int, pack: int) -> None:
        if pack > 0:
            self._packed -= stored + HEAD_SIZE
            self._dead[pack] = self._dead.get(pack, 0) + stored + HEAD_SIZE

    def new_pack(self, *, received: bool = False) -> int:
        """Register a pack that is about to be written, and return its id. Ids are never reused.

        Args:
            received: the pack is for bytes that came from a remote, and has an even id (`Blob.is_own`).
        """
        return self.db.execute(NEW_PACK, (time.time(), not received)).lastrowid or 0

    def has_pack(self, pack: int) -> bool:
        """Whether the pack may be written to and read from."""
        return self.db.execute("SELECT 1 FROM packs WHERE id = ?", (pack,)).fetchone() is not None

    def set_dead(self, dead: dict[int, int]) -> None:
        """Set the dead bytes of packs, once they have been counted."""
        self.db.executemany("UPDATE packs SET dead = ?2 WHERE id = ?1", dead.items())

    def retire_pack(self, pack: int) -> None:
        """Forget a pack that holds no live blob. A writer that still writes to it must start another."""
        self.db.execute("DELETE FROM packs WHERE id = ?", (pack,))

    # Everything else

    def announce(self) -> None:
        """Have every RAM tier query the index again once this is committed."""
        self._announce = True

    def execute(self, sql: str, parameters: Iterable[Any] = ()) -> sqlite3.Cursor:
        """Run a statement of another module of this package (mounts, released rows, rebuilding)."""
        return self.db.execute(sql, tuple(parameters))

    def executemany(self, sql: str, rows: Iterable[Iterable[Any]]) -> None:
        """`execute` for many rows."""
        self.db.executemany(sql, map(tuple, rows))

    def _select_among(self, sql: str, keys: Iterable[Any]) -> Iterator[Any]:
        """The rows of a query, given without its ending "IN (keys)"."""
        remaining = iter(keys)
        while part := tuple(islice(remaining, _KEYS)):
            yield from self.db.execute(f"{sql} IN ({','.join('?' * len(part))})", part).fetchall()


def _begin_within(db: sqlite3.Connection, seconds: float) -> None:
    db.execute(f"PRAGMA busy_timeout = {int(seconds * 1000)}")
    try:
        db.execute("BEGIN IMMEDIATE")
    finally:
        db.execute(f"PRAGMA busy_timeout = {int(ATTEMPT_SECONDS * 1000)}")


def _parents(name: str) -> list[str]:
    parts = name.split("/")
    return ["/".join(parts[:i]) for i in range(1, len(parts))]


def _number(value: Any) -> int:
    """A row's value if it is an int, else 0: only a damaged row holds others, and `doctor` recounts."""
    return value if isinstance(value, int) else 0
