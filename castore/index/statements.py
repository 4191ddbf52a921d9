"""The SQL of write transactions. Text only: transaction.py decides when each statement runs."""

from __future__ import annotations

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
ADD_BLOBS = "INSERT INTO blobs (digest, size, stored, codec, pack, offset, refs) VALUES (?, ?, ?, ?, ?, ?, 1)"
BRING_BLOB = "UPDATE blobs SET size = ?2, stored = ?3, codec = ?4, pack = ?5, offset = ?6 WHERE digest = ?1"
# Both tables: INSERT first, SELECT only if that fails. Most puts bring a new name and a new blob, and a
# SELECT costs as much as the INSERT.
ADD_ENTRY = (
    "INSERT INTO entries"
    " (name, digest, size, serializer, metadata, created, expires, accessed, pinned, checked)"
    " SELECT ?1, ?2, ?3, ?4, ?5, ?6, ?7, ?6, ?8, ?9"
    " WHERE NOT EXISTS (SELECT 1 FROM entries WHERE name > ?1 || '/' AND name < ?1 || '0')"
    " ON CONFLICT (name) DO NOTHING"
)
# For names that are known to be new and not to be folders.
ADD_ENTRIES = (
    "INSERT INTO entries"
    " (name, digest, size, serializer, metadata, created, expires, accessed, pinned, checked)"
    " VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?6, ?8, ?9)"
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
ADD_TOTALS = (
    "UPDATE totals SET entries = entries + ?, logical = logical + ?, blobs = blobs + ?, uniq = uniq + ?,"
    " stored = stored + ?, packed = packed + ?"
)
ADD_DEAD = "UPDATE packs SET dead = dead + ?2 WHERE id = ?1"
TOUCH_OLDER = "UPDATE entries SET accessed = ?1 WHERE name = ?2 AND (accessed < ?1 OR accessed > ?1 + ?3)"
ADD_COUNTS = "INSERT INTO counters VALUES (?1, ?2) ON CONFLICT (name) DO UPDATE SET value = value + ?2"
