"""The SQL of write transactions. Text only: transaction.py decides when each statement runs."""

from __future__ import annotations

from castore.index.many_rows import ManyRows
from castore.names import RESERVED

#: The condition of names that are listed: those below `RESERVED` are castore's own.
LISTED = f"NOT (name >= '{RESERVED}/' AND name < '{RESERVED}0')"
BLOB_COLUMNS = "digest, size, stored, codec, pack, offset"
BLOB_OF = f"SELECT {BLOB_COLUMNS} FROM blobs WHERE digest = ?"
ADD_BLOB = (
    "INSERT INTO blobs (digest, size, stored, codec, pack, offset, refs) SELECT ?1, ?2, ?3, ?4, ?5, ?6, 1"
    " WHERE ?5 <= 0 OR EXISTS (SELECT 1 FROM packs WHERE id = ?5)"
    " ON CONFLICT (digest) DO NOTHING"
)
ADD_BLOBS = ManyRows(
    "INSERT INTO blobs (digest, size, stored, codec, pack, offset, refs) VALUES ", "(?, ?, ?, ?, ?, ?, 1)"
)
BRING_BLOBS = ManyRows(
    "UPDATE blobs SET size = column2, stored = column3, codec = column4, pack = column5, offset = column6"
    " FROM (VALUES ",
    "(?, ?, ?, ?, ?, ?)",
    ") WHERE digest = column1",
)
# Both tables: INSERT first, SELECT only if that fails. Most puts bring a new name and a new blob, and a
# SELECT costs as much as the INSERT.
_INTO_ENTRIES = (
    "INSERT INTO entries"
    " (name, digest, size, serializer, metadata, created, expires, pinned, checked, accessed)"
)
ADD_ENTRY = (
    f"{_INTO_ENTRIES} SELECT ?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?6"
    " WHERE NOT EXISTS (SELECT 1 FROM entries WHERE name > ?1 || '/' AND name < ?1 || '0')"
    " ON CONFLICT (name) DO NOTHING"
)
# `ADD_ENTRY` for many names, sorted, so that a folder comes before what is in it.
ADD_ENTRIES = ManyRows(
    f"{_INTO_ENTRIES} SELECT column1, column2, column3, column4, column5, column6, column7, column8, column9,"
    " column6 FROM (VALUES ",
    "(?, ?, ?, ?, ?, ?, ?, ?, ?)",
    ") WHERE NOT EXISTS (SELECT 1 FROM entries WHERE name > column1 || '/' AND name < column1 || '0')"
    " ON CONFLICT (name) DO NOTHING",
)
# For names that are known to be new and not to be folders.
ADD_NEW_ENTRIES = ManyRows(
    f"{_INTO_ENTRIES} SELECT column1, column2, column3, column4, column5, column6, column7, column8, column9,"
    " column6 FROM (VALUES ",
    "(?, ?, ?, ?, ?, ?, ?, ?, ?)",
    ")",
)
BETWEEN = "SELECT 1 FROM entries WHERE name >= ? AND name < ? LIMIT 1"
UPDATE_ENTRY = (
    "UPDATE entries SET digest = ?2, size = ?3, serializer = ?4, metadata = ?5, expires = ?7, accessed = ?6,"
    " checked = ?9, pinned = max(pinned, ?8), created = CASE WHEN digest = ?2 THEN created ELSE ?6 END"
    " WHERE name = ?1 RETURNING created, pinned"
)
COUNT_REF = "UPDATE blobs SET refs = refs + 1, orphaned = NULL WHERE digest = ?"
LOSE = (
    "UPDATE blobs SET stored = 0, offset = 0,"
    " pack = CASE WHEN EXISTS (SELECT 1 FROM places p WHERE p.digest = blobs.digest) THEN ?3 ELSE ?2 END"
    " WHERE digest = ?1"
)
UNCOUNT_REFS = (
    "UPDATE blobs SET orphaned = CASE WHEN refs = ?3 THEN ?2 END, refs = refs - ?3 WHERE digest = ?1"
)
# `UNCOUNT_REFS` for digests that differ.
UNCOUNT_MANY_REFS = ManyRows(
    "UPDATE blobs SET orphaned = CASE WHEN refs = column3 THEN column2 END, refs = refs - column3"
    " FROM (VALUES ",
    "(?, ?, ?)",
    ") WHERE digest = column1",
)
ADD_TOTALS = (
    "UPDATE totals SET entries = entries + ?, logical = logical + ?, blobs = blobs + ?, uniq = uniq + ?,"
    " stored = stored + ?, packed = packed + ?"
)
# AUTOINCREMENT notes the greatest id of all time, also if the statement gives it.
NEW_PACK = (
    "INSERT INTO packs (id, created) SELECT id + (id % 2 != ?2), ?1 FROM"
    " (SELECT coalesce(max(seq), 0) + 1 AS id FROM sqlite_sequence WHERE name = 'packs')"
)
ADD_DEAD = "UPDATE packs SET dead = dead + ?2 WHERE id = ?1"
TOUCH_OLDER = ManyRows(
    "UPDATE entries SET accessed = column2 FROM (VALUES ",
    "(?, ?, ?)",
    ") WHERE name = column1 AND (accessed < column2 OR accessed > column2 + column3)",
)
DELETE_ENTRIES = ManyRows("DELETE FROM entries WHERE name IN (", "?", ")")
DELETE_BLOBS, DELETE_CHECKSUMS, DELETE_PLACES = (
    ManyRows(f"DELETE FROM {table} WHERE digest IN (", "?", ")") for table in ("blobs", "checksums", "places")
)
ADD_COUNTS = "INSERT INTO counters VALUES (?1, ?2) ON CONFLICT (name) DO UPDATE SET value = value + ?2"
