"""Bytes of remotes that a store keeps because somebody read them, under names that no listing shows.

Such bytes are entries as all others, so the budget, gc, verification and crash safety are those of the store:
what was read least recently goes first, and is fetched again when it is read again. A blob of moderate size
is kept whole. The stored bytes of a larger object are kept in *parts* of some frames each, cut in the same
way by everybody, so that readers of one object share them. Nothing here fetches anything.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

from castore.index.database import Index
from castore.names import RESERVED
from castore.remote.pages import FRAME, Place

#: Blobs of at most this many stored bytes are kept whole, larger ones in parts.
WHOLE_LIMIT = 4 << 20
#: A part ends with the first frame that brings it to this many stored bytes, or to this many frames.
PART_BYTES, PART_FRAMES = 1 << 20, 64
#: The folder of the parts. Those of one object lie in a folder that is called as the object is.
PARTS = f"{RESERVED}/parts"
#: Bytes that no part has: a stored frame is hardly longer than its content.
LARGEST_PART = 2 * PART_BYTES
# Parts that are dropped in one transaction.
_DROPPED = 1000


def blob_name(digest: bytes) -> str:
    """The name of a blob that is kept whole."""
    return f"{RESERVED}/blobs/{digest.hex()}"


class Part(NamedTuple):
    """Neighbouring frames of an object that are fetched and kept together.

    Attributes:
        start, end: where they lie in the object, in bytes.
        first: number of the first frame.
        frames: a `FRAME` for each frame.
    """

    start: int
    end: int
    first: int
    frames: bytes

    @property
    def is_sound(self) -> bool:
        """Whether it can be a part of any object, however its tree lies."""
        size = sum(length for length, _ in FRAME.iter_unpack(self.frames))
        return self.start >= 0 and 0 < size <= LARGEST_PART and size == self.end - self.start

    def name(self, digest: bytes) -> str:
        """The name under which the part of an object of that digest is kept."""
        return f"{PARTS}/{digest.hex()}/{self.start:x}-{self.end:x}"

    def locate(self, frame: int) -> tuple[int, int]:
        """Where a frame of the part lies in the part, in bytes: its beginning and its length."""
        before = self.frames[: (frame - self.first) * FRAME.size]
        start = sum(length for length, _ in FRAME.iter_unpack(before))
        return start, FRAME.unpack(self.frame(frame))[0]

    def frame(self, number: int) -> bytes:
        """The `FRAME` of a frame of the part."""
        at = (number - self.first) * FRAME.size
        return self.frames[at : at + FRAME.size]


class Division:
    """An object of its own, cut into parts. The seek table behind the frames is in none of them.

    Args:
        place: of the blob.
    """

    def __init__(self, place: Place) -> None:
        lengths = [length for length, _ in FRAME.iter_unpack(place.frames)]
        ends = [0, *accumulate(lengths)]
        self._firsts: list[int] = []
        parts: list[Part] = []
        first = 0
        for number in range(1, len(ends)):
            is_full = ends[number] - ends[first] >= PART_BYTES or number - first >= PART_FRAMES
            if is_full or number == len(lengths):
                frames = place.frames[first * FRAME.size : number * FRAME.size]
                parts.append(Part(ends[first], ends[number], first, frames))
                self._firsts.append(first)
                first = number
        #: In the order of the object.
        self.parts: Sequence[Part] = parts

    def part_of(self, frame: int) -> int:
        """The number of the part that has a frame."""
        return bisect_right(self._firsts, frame) - 1


def drop_parts(index: Index, places: Iterable[Place]) -> None:
    """Drop what readers have kept of blobs that are whole in the store now."""
    large = [place for place in places if place.stored > WHOLE_LIMIT]
    names = [part.name(place.object) for place in large for part in Division(place).parts]
    for start in range(0, len(names), _DROPPED):
        with index.write() as txn:
            for name in names[start : start + _DROPPED]:
                txn.delete_entry(name)


def bytes_here(index: Index, place: Place) -> int:
    """Stored bytes of the parts of an object that a store keeps; 0 for a small one, which has no parts."""
    if place.stored <= WHOLE_LIMIT:
        return 0
    names = [part.name(place.object) for part in Division(place).parts]
    found = index.find_many(names)
    # The seek table is in no part, and nobody needs it once all parts are here.
    if len(found) == len(names):
        return place.stored
    return sum(one.blob.stored for one in found.values())
