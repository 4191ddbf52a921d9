"""Entries that gc has removed while their blobs still count them: the table `released`.

Entries that go together often lie together in the index, but their blobs lie anywhere. So gc removes the
entries in order of their names and only notes their digests. gc then sorts the digests, and lowers the
reference counts in the order of the B-tree of blobs. The tree is so written once instead of three times
(measured in docs/benchmarks/missed-goals.md).

Each row stands for itself: the transaction that removes a row also lowers the counts of its digests. The
order of the rows matters only for speed. So the next gc finishes the work of a killed one, and two at once
share the work.
"""

from __future__ import annotations

from castore.index.database import Index
from castore.index.transaction import Write
from castore.records import DIGEST_SIZE

#: Digests in one sorted row, and so in one transaction.
_ROW = 500


def exist(index: Index) -> bool:
    """Whether any blob still counts entries that gc removed."""
    return next(index.file.rows("SELECT 1 FROM released LIMIT 1"), None) is not None


def add(txn: Write, digests: list[bytes]) -> None:
    """Note a digest for each entry that this transaction removes.

    Values of another length, from damaged rows, are skipped: no blob has them.
    """
    if joined := b"".join(digest for digest in digests if len(digest) == DIGEST_SIZE):
        txn.execute("INSERT INTO released (digests) VALUES (?)", (joined,))


def pop_first(txn: Write) -> list[bytes]:
    """Remove the first row and return its digests; an empty list if there is no row."""
    row = txn.execute(
        "DELETE FROM released WHERE id = (SELECT min(id) FROM released) RETURNING CAST(digests AS BLOB)"
    ).fetchone()
    return _split(row[0]) if row else []


def sort(index: Index) -> None:
    """Sort the digests of all rows. Changes nothing if another gc adds or removes rows meanwhile."""
    rows = list(index.file.rows("SELECT id, CAST(digests AS BLOB) FROM released"))
    if len(rows) < 2:
        return
    digests = sorted(digest for row in rows for digest in _split(row[1]))  # before the lock is taken
    with index.write() as txn:
        if txn.execute("SELECT id FROM released").fetchall() == [row[:1] for row in rows]:
            txn.execute("DELETE FROM released")
            for start in range(0, len(digests), _ROW):
                add(txn, digests[start : start + _ROW])


def _split(joined: bytes) -> list[bytes]:
    return [joined[start : start + DIGEST_SIZE] for start in range(0, len(joined), DIGEST_SIZE)]
