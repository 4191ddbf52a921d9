"""Entries by the order of their names: files, folders, prefixes, names that begin with some letters.

Folders are not in the index: a folder exists as long as a name lies in it. Changes nothing. Names are already
checked, times are seconds since the epoch. A row may be damaged: its values may be anything.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import NamedTuple

from castore.index.database import Index
from castore.index.statements import LISTED
from castore.names import below
from castore.records import FileRow

_FILE = "SELECT {} FROM entries WHERE name = ? AND (expires IS NULL OR expires > ?)".format(
    "name, digest, size, created, expires, checked"
)
_FILES = (
    "SELECT name, digest, size, created, expires, checked FROM entries"
    f" WHERE name >= ? AND name < ? AND (expires IS NULL OR expires > ?) AND {LISTED} ORDER BY name LIMIT ?"
)
_COUNT = "SELECT count(*) FROM entries WHERE name > ?1 AND name < ?2 AND (expires IS NULL OR expires > ?3)"
_BEGINNING = (
    f"SELECT name FROM entries WHERE name >= ?1 AND name < ?1 || char(1114111) AND {LISTED}"
    " ORDER BY name LIMIT ?2"
)
_SIZED = f"SELECT name, digest, size FROM entries WHERE name > ? AND name < ? AND {LISTED} ORDER BY name"
_SIZED_ONE = "SELECT name, digest, size FROM entries WHERE name = ?"

#: Sorts behind all names: no part of a name is this long.
LAST = "\U0010ffff" * 64
#: Sorts behind all text: SQLite sorts every BLOB, even the empty one, behind all text.
AFTER_TEXT = b""


class Sized(NamedTuple):
    """An entry with the size of its blob, in bytes."""

    name: str
    digest: bytes
    size: int


def file(index: Index, name: str, now: float) -> FileRow | None:
    """The entry of a name, unless it has expired by ``now``."""
    rows = index.file.all(_FILE, (name, now))
    return rows[0] if rows else None


def files(index: Index, low: str, high: str | bytes, now: float, limit: int) -> list[FileRow]:
    """The first entries from ``low`` on, and before ``high``, that have not expired by ``now``, by name."""
    return index.file.all(_FILES, (low, high, now, limit))


def require_order(index: Index, last: str, key: str) -> str:
    """Return ``key``, the start of the next `files`, after checking that it sorts behind ``last``.

    Raises:
        StoreError: it does not: the index is damaged, and the listing might never end.
    """
    return index.file.require_order(last, key)  # type: ignore[no-any-return]


def is_folder(index: Index, path: str, now: float) -> bool:
    """Whether a name that has not expired by ``now`` lies inside ``path``."""
    return bool(files(index, *below(path), now, 1))


def count_inside(index: Index, folder: str, now: float) -> int:
    """The number of entries inside a folder that have not expired by ``now``. Reads each row."""
    ((count,),) = index.file.all(_COUNT, (*below(folder), now))
    return int(count)


def names_beginning(index: Index, text: str, limit: int) -> list[str]:
    """The first names that begin with ``text``, expired or not."""
    return [row[0] for row in index.file.rows(_BEGINNING, (text, limit))]


def sized_pages(index: Index, prefix: str, page: int) -> Iterator[list[Sized]]:
    """Entries at or below a prefix ("" for all), expired or not, by name, at most ``page`` at a time."""
    low, high = below(prefix) if prefix else ("", LAST)
    if prefix and (own := index.file.all(_SIZED_ONE, (prefix,))):
        yield [Sized(*row) for row in own]
    for rows in index.file.pages(_SIZED, low, high, rows=page):
        yield [Sized(*row) for row in rows]


def small_digests(index: Index, prefix: str, largest: int, limit: int) -> list[bytes]:
    """The first digests, in their own order, of entries of 1 to ``largest`` bytes at or below a prefix.

    A digest that several entries have is in the list several times.
    """
    where, bounds = f"size BETWEEN 1 AND ? AND {LISTED}", (largest,)
    if prefix:
        where += " AND (name = ? OR (name >= ? AND name < ?))"
        bounds += (prefix, *below(prefix))  # type: ignore[assignment]
    sql = f"SELECT digest FROM entries WHERE {where} ORDER BY digest LIMIT ?"
    return [row[0] for row in index.file.rows(sql, (*bounds, limit))]


def digests_of_names(index: Index) -> Generator[tuple[str, bytes]]:
    """Every name with its digest. A stream: no fork happens until its end, so the caller closes it soon."""
    return index.file.stream("SELECT name, digest FROM entries")
