"""Entries by a key in their metadata: those with a link for their file, those computed from files.

Metadata is JSON text to SQLite, so this reads every entry's row; rows without the key are not taken apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from castore.index.database import Index, parse_metadata
from castore.index.name_ranges import LAST
from castore.names import below

_PAGE = 1000
_NOTED = (
    "SELECT name, coalesce(CAST(digest AS BLOB), x''), pinned, metadata FROM entries"
    " WHERE name > ? AND name < ? AND metadata LIKE ? ORDER BY name LIMIT ?"
)


class Noted(NamedTuple):
    """What an entry says of itself. ``digest`` is in hex, as in an `Entry`."""

    name: str
    digest: str
    pinned: bool
    metadata: dict[str, Any]


def noted(index: Index, key: str, prefix: str = "") -> Iterator[Noted]:
    """Entries below a prefix, expired or not, whose metadata has a key of that name, at the top or deeper.

    Read in pages by name. What a value quotes may look like the key: callers look at the metadata again.
    """
    low, high = below(prefix) if prefix else ("", LAST)
    for page in index.file.pages(_NOTED, low, high, f'%"{key}": %', _PAGE):
        for name, digest, pinned, metadata in page:
            yield Noted(name, digest.hex(), bool(pinned), parse_metadata(metadata))
