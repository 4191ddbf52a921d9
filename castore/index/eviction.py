"""Gc's queries: entries that may go, blobs that no entry names, and whether there is anything to do.

Changes nothing. Rows may be damaged: sizes and counts come as numbers whatever a row holds.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import closing
from itertools import islice
from operator import itemgetter
from typing import NamedTuple

from castore.index.database import Index
from castore.records import AWAY

#: Blobs of one query.
_BATCH = 500
# An entry that no pin and no live pinned mount holds.
_FREE = (
    "e.pinned = 0 AND NOT EXISTS (SELECT 1 FROM mounts m WHERE m.pinned AND"
    " (m.prefix = '' OR e.name = m.prefix OR (e.name > m.prefix || '/' AND e.name < m.prefix || '0')))"
)
# Numbers, whatever a damaged row holds.
_STORED, _REFS, _PACK = (f"CAST(b.{column} AS INTEGER)" for column in ("stored", "refs", "pack"))
_CANDIDATE = (
    "SELECT e.name, CAST(e.digest AS BLOB), e.accessed,"
    f" coalesce({_STORED}, 0), coalesce({_REFS}, 1), coalesce({_PACK}, 0), %s"
    f" FROM entries e LEFT JOIN blobs b ON b.digest = e.digest %s WHERE {_FREE} %s"
    " ORDER BY %s <= ?, %s"
)
_BY_LAST_USE = _CANDIDATE % ("0", "", "", "e.accessed", "e.accessed")
# Bytes of a remote count as used when they came, too: those that are fetched ahead are read after that. Bytes
# that are away free nothing.
_BY_LAST_FETCH = _CANDIDATE % (
    "p.digest IS NOT NULL",
    "LEFT JOIN places p ON p.digest = e.digest",
    f"AND coalesce({_PACK}, 0) != {AWAY}",
    *["max(e.accessed, coalesce(p.fetched, 0.0))"] * 2,
)
_EXPIRED = f"SELECT name, CAST(digest AS BLOB), accessed FROM entries e WHERE {_FREE} AND expires <= ?"
_BLOBS = f"SELECT digest, {_STORED}, {_REFS}, {_PACK} FROM blobs b WHERE digest IN (%s)"
_ORPHANS = (
    f"SELECT digest, {_STORED}, {_PACK}, CAST(orphaned AS REAL) FROM blobs b"
    " WHERE orphaned IS NOT NULL AND refs = 0"
)
_NO_BLOB = (0, 1, 0)
_WORK = (
    "SELECT EXISTS (SELECT 1 FROM entries WHERE expires <= ?1 AND pinned = 0)"
    " OR EXISTS (SELECT 1 FROM blobs WHERE orphaned <= ?2)"
)


class Candidate(NamedTuple):
    """An entry that may go.

    Attributes:
        name, digest, accessed: of the entry.
        stored, refs, pack: of its blob: stored bytes, the number of entries that name it, and its pack.
        is_in_remote: a remote has the bytes, so the entry may stay without them.
    """

    name: str
    digest: bytes
    accessed: float
    stored: int
    refs: int
    pack: int
    is_in_remote: bool = False


class Orphan(NamedTuple):
    """A blob that no entry names, and the time at which it lost its last name."""

    digest: bytes
    stored: int
    pack: int
    since: float


def by_last_use(index: Index, ahead: float) -> Generator[Candidate]:
    """Free entries, least recently used first; before them those last used after ``ahead``, a future time.

    A stream: no fork happens until its end, so the caller closes it soon.
    """
    has_places = bool(index.file.all("SELECT 1 FROM places LIMIT 1", ()))
    with closing(index.file.stream(_BY_LAST_FETCH if has_places else _BY_LAST_USE, (ahead,))) as rows:
        yield from map(Candidate._make, rows)


def expired(index: Index, now: float) -> Iterator[Candidate]:
    """Free entries that have expired, in the order of digests, which is that of the B-tree of blobs."""
    rows = iter(sorted(index.file.rows(_EXPIRED, (now,)), key=itemgetter(1)))
    while some := list(islice(rows, _BATCH)):
        digests = [digest for _, digest, _ in some]
        found = index.file.rows(_BLOBS % ",".join("?" * len(digests)), digests)
        blobs = {digest: known for digest, *known in found}
        for name, digest, accessed in some:
            yield Candidate(name, digest, accessed, *blobs.get(digest, _NO_BLOB))


def orphans(index: Index) -> Iterator[Orphan]:
    """Every blob that no entry names."""
    return map(Orphan._make, index.file.rows(_ORPHANS))


def has_work(index: Index, now: float, orphaned_before: float) -> bool:
    """Whether an unpinned entry has expired, or a blob lost its last name before ``orphaned_before``."""
    ((work,),) = index.file.all(_WORK, (now, orphaned_before))
    return bool(work)
