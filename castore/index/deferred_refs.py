"""Entries that gc has removed and whose blobs still count them: the table `released`.

Entries that go together often lie together in the index, their blobs lie anywhere. So gc removes the entries in order
of their names and only notes their digests; these it sorts, and then takes a name off each blob in the order of the
blobs' own tree, which so is written once where it would be written three times (measured in docs/benchmarks/missed-goals.md).

Each row stands for itself: whoever takes it out takes its names off in the same transaction, and only speed depends on
how rows are sorted. So the next gc ends what a killed one began, and two at once share the work.
"""

from __future__ import annotations

from castore.index.database import Index
from castore.index.transaction import Write
from castore.records import DIGEST_SIZE

#: Digests of a row of sorted ones: what one transaction takes off.
_ROW = 500


def are_there(index: Index) -> bool:
    """Whether any blob counts names that are gone."""
    return next(index.file.rows("SELECT 1 FROM released LIMIT 1"), None) is not None


def note(txn: Write, digests: list[bytes]) -> None:
    """Note what the entries pointed to that this transaction removes: a digest for each of them.

    What is no digest, in a damaged row, is that of no blob.
    """
    if joined := b"".join(digest for digest in digests if len(digest) == DIGEST_SIZE):
        txn.execute("INSERT INTO released (digests) VALUES (?)", (joined,))


def take(txn: Write) -> list[bytes]:
    """Take out the first row; nothing if there is none."""
    row = txn.execute(
        "DELETE FROM released WHERE id = (SELECT min(id) FROM released) RETURNING CAST(digests AS BLOB)"
    ).fetchone()
    return _split(row[0]) if row else []


def sort(index: Index) -> None:
    """Put all of them in order. Left as it is if another gc takes some out, or notes some, meanwhile."""
    rows = list(index.file.rows("SELECT id, CAST(digests AS BLOB) FROM released"))
    if len(rows) < 2:
        return
    digests = sorted(digest for row in rows for digest in _split(row[1]))  # before the lock is taken
    with index.write() as txn:
        if txn.execute("SELECT id FROM released").fetchall() == [row[:1] for row in rows]:
            txn.execute("DELETE FROM released")
            for start in range(0, len(digests), _ROW):
                note(txn, digests[start : start + _ROW])


def _split(joined: bytes) -> list[bytes]:
    return [joined[start : start + DIGEST_SIZE] for start in range(0, len(joined), DIGEST_SIZE)]
