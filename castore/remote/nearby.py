"""Blobs that come along with small ones that somebody reads: those near them in their packs.

They were pushed together, and are read together. Looks at the index, and never asks a bucket.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from castore.index import places
from castore.index.places import RemotePlace
from castore.parts import Parts
from castore.remote.pack_window import PackWindow
from castore.remote.pages import Place, Row

# Blobs that come along: at least so many, and so many for each blob that is read.
_FEWEST, _SHARE = 8000, 4


class Nearby:
    """Finds them. Threads may share it.

    Args:
        parts: of the store.
    """

    def __init__(self, parts: Parts) -> None:
        self._index = parts.index
        self._windows = PackWindow(parts)

    def of(self, wanted: Sequence[RemotePlace]) -> list[RemotePlace]:
        """The places near those that are wanted, without these. Counts a miss in each pack."""
        found: dict[bytes, RemotePlace] = {}
        room = max(_FEWEST, _SHARE * len(wanted))
        seen: dict[bytes, list[tuple[int, int]]] = defaultdict(list)
        for place in wanted:
            covered = seen[place.object]
            if place.offset and room > 0 and not any(start <= place.offset < end for start, end in covered):
                covered.append(self._windows.around(place.object, place.offset))
                near = places.near(self._index, place, *covered[-1], room)
                room -= len(near)
                found |= {other.digest: other for other in near}
        for place in wanted:
            found.pop(place.digest, None)
        return list(found.values())


def row_of(place: RemotePlace) -> Row:
    """A row for a blob whose name does not matter."""
    where = Place(place.object, place.offset, place.stored, place.codec, place.frames)
    name = f"blob {place.digest.hex()}"
    return Row(name, place.digest, place.size, "bytes", None, 0.0, None, where)
