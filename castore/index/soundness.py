"""Checks whether castore can have written an index: runs SQLite's integrity check, finds impossible rows.

Opens the file with a connection of its own, since a damaged index may not open through `Index`.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Container
from contextlib import closing
from pathlib import Path

from castore.errors import StoreError
from castore.index import schema
from castore.names import check_known_name
from castore.records import entry_check
from castore.system.ballast import full_disk_error
from castore.system.forks import block_forks
from castore.system.sql_errors import SQL_ERRORS, is_locked

#: Seconds to wait for others who hold the file.
_BUSY_SECONDS = 120.0

# Queries for rows that castore never writes. SQLite keeps no checksums of its pages, so a flipped bit in a
# value can make such a row.
_IMPOSSIBLE_BLOB = (
    "SELECT 1 FROM blobs WHERE typeof(digest) != 'blob' OR length(digest) != 32"
    " OR typeof(size) != 'integer' OR size NOT BETWEEN 0 AND 1 << 50"
    " OR typeof(stored) != 'integer' OR stored NOT BETWEEN 0 AND 1 << 50"
    " OR typeof(pack) != 'integer' OR pack < -2 OR typeof(offset) != 'integer' OR offset < 0"
    " OR typeof(refs) != 'integer' OR refs < 0 OR codec NOT IN ('zstd', 'lz4', 'gzip', 'none') LIMIT 1"
)
_IMPOSSIBLE_ENTRY = (
    "SELECT 1 FROM entries WHERE typeof(digest) != 'blob' OR length(digest) != 32"
    " OR typeof(size) != 'integer' OR typeof(created) != 'real' OR typeof(accessed) != 'real'"
    " OR typeof(expires) NOT IN ('real', 'null')"
    " OR abs(created) > 1e12 OR typeof(pinned) != 'integer'"
    " OR NOT EXISTS (SELECT 1 FROM blobs b WHERE b.digest = entries.digest) LIMIT 1"
)
_IMPOSSIBLE_CHECKSUMS = (
    "SELECT 1 FROM blobs b LEFT JOIN checksums c ON c.digest = b.digest WHERE b.codec = 'none' AND b.pack = 0"
    " AND b.size > ?1 AND (typeof(c.frames) != 'blob' OR length(c.frames) % 8) LIMIT 1"
)
_IMPOSSIBLE_RELEASED = (
    "SELECT 1 FROM released WHERE typeof(digests) != 'blob' OR length(digests) % 32 LIMIT 1"
)
_IMPOSSIBLE_PLACE = (
    "SELECT 1 FROM blobs b WHERE b.pack = -2"
    " AND NOT EXISTS (SELECT 1 FROM places p WHERE p.digest = b.digest)"
    " UNION ALL SELECT 1 FROM places p WHERE typeof(p.digest) != 'blob' OR length(p.digest) != 32"
    " OR typeof(p.offset) != 'integer' OR p.offset < 0 OR typeof(p.stored) != 'integer' OR p.stored < 0"
    " OR typeof(p.frames) != 'blob' OR length(p.frames) % 20 OR typeof(p.fetched) != 'real'"
    " OR p.codec NOT IN ('zstd', 'lz4', 'gzip', 'none')"
    " OR NOT EXISTS (SELECT 1 FROM origins o WHERE o.id = p.origin)"
    " UNION ALL SELECT 1 FROM origins WHERE typeof(object) != 'blob' OR length(object) != 32"
    " OR typeof(remote) != 'text' LIMIT 1"
)
_IMPOSSIBLE = (_IMPOSSIBLE_BLOB, _IMPOSSIBLE_ENTRY, _IMPOSSIBLE_RELEASED, _IMPOSSIBLE_PLACE)
_ENTRIES = "SELECT name, digest, serializer, metadata, checked FROM entries"


def find_damage(file: Path, frame_size: int, serializers: Container[str]) -> str | None:
    """The damage that SQLite finds in the index, or an impossible row; None if the index is sound.

    Args:
        file: the index. If an older castore wrote it, it is migrated first, as opening the store would.
        frame_size: bytes of a frame: a larger loose raw blob has checksums.
        serializers: names of the known serializers.

    Raises:
        FullError: there is no room to open it.
        StoreError: it cannot be opened, for a reason other than damage.
    """
    if not file.exists():
        return f"there is no {file}"
    try:
        with block_forks(), closing(sqlite3.connect(file, timeout=_BUSY_SECONDS, isolation_level=None)) as db:
            if 0 < db.execute("PRAGMA user_version").fetchone()[0] < schema.SCHEMA_VERSION:
                schema.migrate(db)
            (row,) = db.execute("PRAGMA integrity_check(1)").fetchone()
            if row != "ok":
                return str(row)
            return schema.find_mismatch(db) or _find_impossible_row(db, frame_size, serializers)
    except SQL_ERRORS as error:
        if (no_room := full_disk_error(file.parent, error)) is not None:
            raise no_room from error
        if is_locked(error) or "unable to open" in str(error) or "readonly" in str(error):
            raise StoreError(
                f"the index {file} cannot be checked ({error});"
                " run this as the store's owner, while nobody holds it"
            ) from error
        return str(error)


def _find_impossible_row(db: sqlite3.Connection, frame_size: int, serializers: Container[str]) -> str | None:
    queries = [(sql, ()) for sql in _IMPOSSIBLE] + [(_IMPOSSIBLE_CHECKSUMS, (frame_size,))]
    if any(db.execute(sql, parameters).fetchone() for sql, parameters in queries):
        return "it has rows with impossible values"
    for name, digest, serializer, metadata, checked in db.execute(_ENTRIES):
        try:
            check_known_name(name)
            sound = checked == entry_check(name, digest) and serializer in serializers
            sound = sound and (metadata is None or type(json.loads(metadata)) is dict)
        except (ValueError, RecursionError):
            sound = False
        if not sound:
            return f"its row of the name {name!r} has impossible values"
    return None
