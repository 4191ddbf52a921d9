"""Entries by a key in their metadata, such as those whose file became a link or those computed from files.

Metadata is JSON text to SQLite, so this reads every entry's row. It parses the metadata only of rows with the
key.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from castore.index.database import Index, parse_metadata
from castore.index.name_ranges import LAST
from castore.names import below

_PAGE = 1000
_WITH_KEY = (
    "SELECT name, coalesce(CAST(digest AS BLOB), x''), pinned, metadata FROM entries"
    " WHERE name > ? AND name < ? AND metadata LIKE ? ORDER BY name LIMIT ?"
)


class KeyedEntry(NamedTuple):
    """An entry's name and metadata. ``digest`` is in hex, as in an `Entry`."""

    name: str
    digest: str
    pinned: bool
    metadata: dict[str, Any]


def entries_with_key(index: Index, key: str, prefix: str = "") -> Iterator[KeyedEntry]:
    """Entries below a prefix, expired or not, whose metadata has a key of that name, at the top or deeper.

    Reads pages in the order of names. Text inside a value may look like the key: callers check the metadata.
    """
    low, high = below(prefix) if prefix else ("", LAST)
    for page in index.file.pages(_WITH_KEY, low, high, f'%"{key}": %', _PAGE):
        for name, digest, pinned, metadata in page:
            yield KeyedEntry(name, digest.hex(), bool(pinned), parse_metadata(metadata))
