"""The packs that the index knows, and how many bytes of each are live."""

from __future__ import annotations

from castore.index.database import Index
from castore.index.transaction import Write
from castore.records import DIGEST_SIZE, HEAD_SIZE

_COUNT_LIVE = (
    f"INSERT INTO temp.live SELECT pack, stored + {HEAD_SIZE} FROM blobs"
    " WHERE pack > 0 AND digest BETWEEN ? AND ?"
    " ON CONFLICT (pack) DO UPDATE SET bytes = bytes + excluded.bytes"
)


def pack_ids(index: Index) -> list[int]:
    """Ids of all registered packs, oldest first."""
    return [row[0] for row in index.file.rows("SELECT id FROM packs ORDER BY id")]


def recorded_dead_bytes(index: Index) -> dict[int, int]:
    """The dead bytes noted for each registered pack. A number, whatever a damaged row holds."""
    return dict(index.file.rows("SELECT id, coalesce(CAST(dead AS INTEGER), 0) FROM packs"))


def live_bytes(index: Index) -> dict[int, int]:
    """Bytes of each pack's live records, heads included. Reads every blob's row."""
    # GROUP BY would sort the rows by pack first, which takes four times as long.
    index.file.all("CREATE TEMP TABLE live (pack PRIMARY KEY, bytes) WITHOUT ROWID")
    try:
        # In 256 parts: while a query runs, the WAL cannot be reset and grows.
        for first in range(256):
            index.file.all(_COUNT_LIVE, (bytes([first]), bytes([first]) + b"\xff" * DIGEST_SIZE))
        return dict(index.file.rows("SELECT pack, bytes FROM temp.live"))
    finally:
        index.file.all("DROP TABLE temp.live")


def digests_in(txn: Write, pack: int) -> list[bytes]:
    """Digests of the blobs in a pack. No index leads from packs to blobs: this reads every blob's row."""
    return [row[0] for row in txn.execute("SELECT digest FROM blobs WHERE pack = ?", (pack,)).fetchall()]
