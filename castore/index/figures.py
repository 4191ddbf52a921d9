"""Figures for reports: entries that expire, the largest prefixes, lost blobs. Changes nothing."""

from __future__ import annotations

from typing import NamedTuple

from castore.index.database import Index
from castore.names import LINKS, below
from castore.records import LOST


class PrefixSize(NamedTuple):
    """All entries that share the first part of their names."""

    prefix: str
    entries: int
    logical: int


class LostBlobs(NamedTuple):
    """The number of blobs whose bytes are lost, and of entries that name them."""

    blobs: int
    entries: int


def expired_count(index: Index, now: float) -> int:
    """The number of entries that have expired and that gc has not removed yet."""
    ((count,),) = index.file.all("SELECT count(*) FROM entries WHERE expires <= ?", (now,))
    return int(count)


def next_expiries(index: Index, now: float) -> list[tuple[str, float]]:
    """Names and times of the five entries that expire next."""
    sql = "SELECT name, expires FROM entries WHERE expires > ? AND expires < 1e12 ORDER BY expires LIMIT 5"
    return [(name, when) for name, when in index.file.rows(sql, (now,))]


def largest_prefixes(index: Index) -> list[PrefixSize]:
    """The eight top folders with the most bytes. Reads every entry's row. Entries that hold bytes for
    links do not count.
    """
    rows = index.file.rows(
        "SELECT substr(name, 1, instr(name || '/', '/') - 1) AS prefix, count(*), sum(size) FROM entries"
        " WHERE NOT (name > ? AND name < ?) GROUP BY prefix ORDER BY 3 DESC LIMIT 8",
        below(LINKS),
    )
    return [PrefixSize(*row) for row in rows]


def lost_blobs(index: Index) -> LostBlobs:
    """Blobs that were found damaged or missing. Reads every blob's row."""
    ((blobs, entries),) = index.file.all(
        "SELECT count(*), coalesce(sum(refs), 0) FROM blobs WHERE pack = ?", (LOST,)
    )
    return LostBlobs(blobs, entries)
