"""Rewrites all rows, and recomputes the values derived from rows. For `castore.repair` alone.

`transaction.Write` keeps sizes, reference counts and totals in step with each change. A rebuild leaves them
out, and calls `recount` once at its end.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from castore.index.database import Index
from castore.index.journal import NameRecord
from castore.index.schema import apply_migrations
from castore.index.transaction import Write
from castore.records import HEAD_SIZE, Blob, entry_check
from castore.system.forks import block_forks

_TABLES = ("entries", "blobs", "checksums", "packs", "released", "places", "origins")
_ADD_BLOB = "INSERT OR REPLACE INTO blobs VALUES (?, ?, ?, ?, ?, ?, 0, NULL)"
_ADD_CHECKSUMS = "INSERT OR REPLACE INTO checksums VALUES (?, ?)"
_SET_NAME = (
    "INSERT OR REPLACE INTO entries"
    " (name, digest, size, serializer, metadata, created, expires, accessed, pinned, checked)"
    " VALUES (?1, ?2, 0, ?3, ?4, ?5, ?6, ?5, ?7, ?8)"
)
_DROP_NAME = "DELETE FROM entries WHERE name = ?"
_NAMELESS = "SELECT name FROM entries e WHERE NOT EXISTS (SELECT 1 FROM blobs b WHERE b.digest = e.digest)"
_SKIP_IDS = "INSERT INTO packs (id, created) SELECT max(?, coalesce(max(id), 0) + 1), 0 FROM packs"

_PACKED = f"coalesce(sum(CASE WHEN pack > 0 THEN stored + {HEAD_SIZE} END), 0)"
_RECOUNT_SIZES = (
    "UPDATE entries SET size = coalesce((SELECT size FROM blobs b WHERE b.digest = entries.digest), size)"
)
_RECOUNT_REFS = (
    "UPDATE blobs SET refs = coalesce((SELECT refs FROM named n WHERE n.digest = blobs.digest), 0)"
)
_RECOUNT_TOTALS = (
    "UPDATE totals SET (entries, logical) = (SELECT count(*), coalesce(sum(size), 0) FROM entries),"
    " (blobs, uniq, stored, packed) ="
    f" (SELECT count(*), coalesce(sum(size), 0), coalesce(sum(stored), 0), {_PACKED} FROM blobs)"
)
_SUMS = (
    "SELECT (SELECT count(*) FROM entries), (SELECT coalesce(sum(size), 0) FROM entries), count(*),"
    f" coalesce(sum(size), 0), coalesce(sum(stored), 0), {_PACKED}, coalesce(sum(refs), 0),"
    " (SELECT coalesce(sum(length(digests) / 32), 0) FROM released) FROM blobs"
)
# One digest for each reference that a blob counts: from the entries, and from entries that gc has removed but
# not yet uncounted.
_NAMED = (
    "SELECT digest FROM entries UNION ALL SELECT digest FROM (WITH RECURSIVE cut (digest, rest) AS ("
    "SELECT substr(digests, 1, 32), substr(digests, 33) FROM released UNION ALL"
    " SELECT substr(rest, 1, 32), substr(rest, 33) FROM cut WHERE length(rest) > 0) SELECT digest FROM cut)"
)
_WRONG = (
    f"SELECT 1 FROM (SELECT digest, count(*) AS named FROM ({_NAMED}) GROUP BY digest) n"
    " JOIN blobs b ON b.digest = n.digest WHERE b.refs != n.named"
    " UNION ALL SELECT 1 FROM blobs WHERE (refs = 0) != (orphaned IS NOT NULL)"
    " UNION ALL SELECT 1 FROM entries e JOIN blobs b ON b.digest = e.digest WHERE e.size != b.size LIMIT 1"
)


def clear(index: Index, txn: Write) -> None:
    """Remove every row of names, blobs and packs, and make the tables if the file has none."""
    apply_migrations(index.connection())
    for table in _TABLES:
        txn.execute(f"DELETE FROM {table}")


def add_pack(txn: Write, pack: int) -> None:
    """Register an existing pack."""
    txn.execute("INSERT INTO packs (id, created) VALUES (?, ?)", (pack, time.time()))


def add_blob(txn: Write, blob: Blob, checksums: bytes | None) -> None:
    """Record a blob, replacing one of the same digest. Its reference count starts at 0."""
    txn.execute(_ADD_BLOB, blob)
    if checksums is not None:
        txn.execute(_ADD_CHECKSUMS, (blob.digest, checksums))


def skip_pack_ids(txn: Write) -> None:
    """Have new packs take ids that no pack ever had: a process may have a removed pack open."""
    txn.execute(_SKIP_IDS, (int(time.time()),))
    txn.execute("DELETE FROM packs WHERE created = 0")


def replay(txn: Write, record: NameRecord) -> None:
    """Apply a record of the names journal."""
    if record.digest is None:
        txn.execute(_DROP_NAME, (record.name,))
    else:
        txn.execute(_SET_NAME, (*record, entry_check(record.name, record.digest)))


def names_without_blob(txn: Write) -> list[str]:
    """Names whose digest has no row in `blobs`."""
    return [row[0] for row in txn.execute(_NAMELESS)]


def drop_names(txn: Write, names: Iterable[str]) -> None:
    """Remove names without uncounting their blobs."""
    txn.executemany(_DROP_NAME, ((name,) for name in names))


def recount(txn: Write) -> None:
    """Recompute the derived values (sizes, reference counts, totals) from the rows."""
    txn.execute(_RECOUNT_SIZES)
    txn.execute("DROP TABLE IF EXISTS temp.named")
    txn.execute("CREATE TEMP TABLE named (digest BLOB PRIMARY KEY, refs INTEGER) WITHOUT ROWID")
    txn.execute("INSERT INTO named SELECT digest, count(*) FROM entries GROUP BY digest")
    txn.execute(_RECOUNT_REFS)
    txn.execute("UPDATE blobs SET orphaned = NULL WHERE refs > 0")
    txn.execute("UPDATE blobs SET orphaned = ? WHERE refs = 0 AND orphaned IS NULL", (time.time(),))
    txn.execute("DROP TABLE temp.named")
    txn.execute("DELETE FROM released")
    txn.execute(_RECOUNT_TOTALS)


def has_right_counts(index: Index) -> bool:
    """Whether the derived values equal those that `recount` would compute. Reads every row."""
    db = index.connection()
    with block_forks():
        db.execute("BEGIN")  # one snapshot for all queries
        try:
            totals = index.totals()
            row = db.execute(_SUMS).fetchone()
            # First totals, then the sum of the reference counts, then each count.
            if tuple(row[:6]) != tuple(totals) or row[6] != row[0] + row[7]:
                return False
            return db.execute(_WRONG).fetchone() is None
        finally:
            db.execute("ROLLBACK")
