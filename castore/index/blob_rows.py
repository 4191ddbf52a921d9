"""The blobs' half of a write transaction: which bytes there are, where they lie, and which packs are open to more.

Keeps the sums that follow from its rows beside them; `transaction.Write`, the other half, adds them to the index's when it
commits. Knows no names.
"""

from __future__ import annotations

import sqlite3
import time
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

from castore.index.statements import (
    ADD_BLOB,
    ADD_BLOBS,
    BLOB_COLUMNS,
    BLOB_OF,
    UNCOUNT_REFS,
)
from castore.records import HEAD_SIZE, LOST, Blob

#: Keys of one question: each is a parameter of its statement.
_KEYS = 1000


class BlobRows:
    """Rows of blobs and packs, on a connection that has begun a transaction."""

    #: The connection that the transaction runs on, once it has begun.
    db: sqlite3.Connection

    def __init__(self) -> None:
        self._announce = False
        self._blobs = self._unique = self._stored = self._packed = 0
        self._dead: dict[int, int] = {}

    def blob(self, digest: bytes) -> Blob | None:
        """The blob, lost or not, or None."""
        row = self.db.execute(BLOB_OF, (digest,)).fetchone()
        return Blob._make(row) if row else None

    def add_blob(self, blob: Blob, checksums: bytes | None = None) -> bool:
        """Record a blob whose bytes are in place; False if it is known already, or its pack has been retired.

        It counts as named once: `set_entry` for the name that brought it follows in the same transaction.
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
        """The blobs among ``digests`` that there are, lost or not."""
        rows = self._among(
            "SELECT digest, size, stored, codec, pack, offset FROM blobs WHERE digest", digests
        )
        return {row[0]: Blob._make(row) for row in rows}

    def add_blobs(self, blobs: Sequence[Blob]) -> None:
        """`add_blob` for many in registered packs that are known not to be there."""
        # In the order of the tree, which then comes by each of its pages once.
        self.db.executemany(ADD_BLOBS, sorted(blobs))
        self._blobs += len(blobs)
        stored = sum(blob.stored for blob in blobs)
        self._unique += sum(blob.size for blob in blobs)
        self._stored += stored
        self._packed += stored + HEAD_SIZE * len(blobs)

    def move_blob(self, blob: Blob, checksums: bytes | None = None) -> bool:
        """Record where a known blob's bytes lie now; False if the pack they were moved to has been retired."""
        sql = "SELECT CAST(size AS INTEGER), CAST(stored AS INTEGER), CAST(pack AS INTEGER) FROM blobs WHERE digest = ?"
        before = self.db.execute(sql, (blob.digest,)).fetchone()
        moved = self.db.execute(
            "UPDATE blobs SET size = ?2, stored = ?3, codec = ?4, pack = ?5, offset = ?6 WHERE digest = ?1"
            " AND (?5 = 0 OR EXISTS (SELECT 1 FROM packs WHERE id = ?5))",
            blob,
        ).rowcount
        if moved:
            self._unique += blob.size - before[0]
            self._stored += blob.stored - before[1]
            self._record_dies(*before[1:])
            if blob.pack > 0:
                self._packed += blob.stored + HEAD_SIZE
            if checksums is not None:
                self._keep_checksums(blob.digest, checksums)
        return moved == 1

    def _keep_checksums(self, digest: bytes, checksums: bytes) -> None:
        self.db.execute("INSERT OR REPLACE INTO checksums VALUES (?, ?)", (digest, checksums))

    def lose_blob(self, blob: Blob) -> None:
        """Record that a blob's bytes are gone or bad: a miss, until they are put again."""
        sql = "UPDATE blobs SET stored = 0, pack = ?, offset = 0 WHERE digest = ?"
        if self.db.execute(sql, (LOST, blob.digest)).rowcount:
            self._stored -= _number(blob.stored)
            self._record_dies(_number(blob.stored), _number(blob.pack))
        self._announce = True

    def drop_blob(self, blob: Blob) -> bool:
        """Forget a blob that no entry names; False if one does."""
        if self.db.execute("DELETE FROM blobs WHERE digest = ? AND refs = 0", (blob.digest,)).rowcount == 0:
            return False
        self._blob_gone(blob)
        return True

    def unnamed(self, digests: Iterable[bytes]) -> list[bytes]:
        """Those of ``digests`` that there are and that no entry names."""
        return [row[0] for row in self._among("SELECT digest FROM blobs WHERE refs = 0 AND digest", digests)]

    def uncount(self, names: Counter[bytes], going: Container[bytes]) -> list[Blob]:
        """Take off each blob as many names as it has lost to gc, and forget those of ``going`` that have none left.

        Returns:
            The blobs that were forgotten.
        """
        rows = self._among(
            f"SELECT {BLOB_COLUMNS}, refs FROM blobs WHERE digest", [one for one in names if one in going]
        )
        last = [Blob._make(row[:-1]) for row in rows if row[-1] == names[row[0]]]
        self.db.executemany("DELETE FROM blobs WHERE digest = ?", [(blob.digest,) for blob in last])
        for blob in last:
            self._blob_gone(blob)
        # It was gc that let go of the others: nobody is about to name them, so no grace is owed, and an orphan is as old
        # as time.
        dropped = {blob.digest for blob in last}
        kept = [(digest, 0.0, count) for digest, count in names.items() if digest not in dropped]
        self.db.executemany(UNCOUNT_REFS, kept)
        return last

    def _blob_gone(self, blob: Blob) -> None:
        stored, pack = _number(blob.stored), _number(blob.pack)
        if pack <= 0:  # what lies in packs never has any
            self.db.execute("DELETE FROM checksums WHERE digest = ?", (blob.digest,))
        self._blobs -= 1
        self._unique -= _number(blob.size)
        self._stored -= stored
        self._record_dies(stored, pack)

    def _record_dies(self, stored: int, pack: int) -> None:
        if pack > 0:
            self._packed -= stored + HEAD_SIZE
            self._dead[pack] = self._dead.get(pack, 0) + stored + HEAD_SIZE

    def new_pack(self) -> int:
        """Register a pack about to be written, and return its id. Ids are never used twice."""
        return self.db.execute("INSERT INTO packs (created) VALUES (?)", (time.time(),)).lastrowid or 0

    def has_pack(self, pack: int) -> bool:
        """Whether the pack may be written to and read from."""
        return self.db.execute("SELECT 1 FROM packs WHERE id = ?", (pack,)).fetchone() is not None

    def set_dead(self, dead: dict[int, int]) -> None:
        """Say how many bytes of each of these packs are no live record's, once they have been counted."""
        self.db.executemany("UPDATE packs SET dead = ?2 WHERE id = ?1", dead.items())

    def retire_pack(self, pack: int) -> None:
        """Forget a pack that holds no live blob; whoever still writes to it has to start another."""
        self.db.execute("DELETE FROM packs WHERE id = ?", (pack,))

    def _among(self, sql: str, keys: Iterable[Any]) -> Iterator[Any]:
        """The rows of a question that is to end with "IN (keys)"."""
        remaining = iter(keys)
        while part := tuple(islice(remaining, _KEYS)):
            yield from self.db.execute(f"{sql} IN ({','.join('?' * len(part))})", part).fetchall()


def _number(value: Any) -> int:
    """A number of a row; nothing for what only a damaged row can hold: `doctor` counts again."""
    return value if isinstance(value, int) else 0
