"""An arena: records of any length in shared memory, found by index, read without a lock.

Space is handed out from the front in *extents* that never move, split or grow; a record that goes leaves its extent to
another that fits. So nothing fragments, and whoever evicts looks for a victim that is large enough.

An extent's version is odd while it is written. Writers hold the segment's lock from first to last byte, so an odd version
seen under the lock is that of a writer who died, and its extent is free. A reader takes the version, copies, and looks
again: what changed meanwhile was never read. Which record gives way to which is the caller's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from castore.errors import InvalidValueError
from castore.shm.segments import Segment

Buffer = bytes | bytearray | memoryview

_ALIGNMENT = 64
_WORDS = 2
_USED, _COUNT = range(_WORDS)
# An extent's row.
_VERSION, _OWNER, _OFFSET, _CAPACITY, _LENGTH = range(5)
_ROW = 5
# Pages are reserved this far ahead: fewer system calls, and at most this much more than is used.
_AHEAD = 1 << 24


class Extent(NamedTuple):
    """What an extent holds: the index it belongs to, and how many bytes fit."""

    owner: int
    capacity: int


class Record(NamedTuple):
    """A record as it lies in the arena, not copied: what was taken from ``data`` counts if `Arena.is_still` says so after."""

    owner: int
    number: int
    version: int
    data: memoryview


class Arena:
    """Records of ``items`` indices in a part of a segment that was made with ``reserve=False``.

    All methods that change something, and `extent`, assume that the caller holds ``segment.lock()``.

    Args:
        segment: where it lies.
        start: the place of its first byte in the segment, a multiple of 64.
        items: how many indices there are.
        size: bytes for records.
    """

    def __init__(self, segment: Segment, start: int, items: int, size: int) -> None:
        if start % _ALIGNMENT:
            raise InvalidValueError(f"an arena starts at a multiple of {_ALIGNMENT}, not at {start}")
        self._segment = segment
        self._items = items
        self._size = size
        words = start
        places = words + _round_up(8 * _WORDS)
        self._rows_at = places + _round_up(4 * items)
        self._data_at = self._rows_at + _round_up(8 * _ROW * items)
        # Whoever comes first; the rest follows as it is handed out.
        segment.reserve(start, self._rows_at)
        buffer = segment.buffer
        self._words = buffer[words : words + 8 * _WORDS].cast("Q")
        #: For each index the number of its extent plus one; 0 if it has none.
        self._places = buffer[places : places + 4 * items].cast("I")
        self._rows = buffer[self._rows_at : self._rows_at + 8 * _ROW * items].cast("Q")
        self._data = buffer[self._data_at : self._data_at + size]

    @staticmethod
    def needed(items: int, size: int) -> int:
        """Bytes of a segment that an arena takes."""
        return _round_up(8 * _WORDS) + _round_up(4 * items) + _round_up(8 * _ROW * items) + size

    @property
    def size(self) -> int:
        """Bytes for records."""
        return self._size

    def fits(self, length: int) -> bool:
        """Whether `append` would find room for so many bytes, as far as can be told without the lock."""
        return self._words[_USED] + _round_up(length) <= self._size and self._words[_COUNT] < self._items

    @property
    def count(self) -> int:
        """Extents handed out so far."""
        return self._words[_COUNT]

    @property
    def used(self) -> int:
        """Bytes of all extents."""
        return self._words[_USED]

    def holds(self, index: int) -> bool:
        """Whether a record of ``index`` is there now."""
        return self._places[index] != 0

    def read(self, index: int) -> bytearray | None:
        """A copy of the record of ``index``, or None: it is not there, or goes just now."""
        place = self._places[index]
        if not place:
            return None
        row = (place - 1) * _ROW
        rows = self._rows
        version = rows[row]
        if version & 1 or rows[row + _OWNER] != index:
            return None
        offset = rows[row + _OFFSET]
        record = bytearray(self._data[offset : offset + rows[row + _LENGTH]])
        return record if rows[row] == version else None

    def look(self, index: int) -> Record | None:
        """The record of ``index`` where it lies, or None: for who wants part of it. `is_still` has to be asked afterwards."""
        place = self._places[index]
        if not place:
            return None
        number = place - 1
        version, owner, offset, _, length = self._rows[number * _ROW : place * _ROW]
        if version & 1 or owner != index:
            return None
        return Record(index, number, version, self._data[offset : offset + length])

    def is_still(self, record: Record) -> bool:
        """Whether nothing of a record has changed since `look`: what was copied from it is whole."""
        return self._rows[record.number * _ROW] == record.version

    def append(self, index: int, parts: Sequence[Buffer], length: int, *, capacity: int = 0) -> bool:
        """Give ``index`` a new extent with the bytes of ``parts``, ``length`` in all, in it; False if there is no room for it.

        Args:
            capacity: bytes of the extent, if it is to take longer records later.

        Raises:
            FullError: there is room in the arena, but not in ``/dev/shm``.
        """
        number, offset = self._words[_COUNT], self._words[_USED]
        capacity = _round_up(max(length, capacity))
        if offset + capacity > self._size or number == self._items:
            return False
        # Crossing into new pages: reserved ahead, so that most appends ask the kernel nothing.
        self._reserve(self._data_at, offset, capacity, self._size)
        self._reserve(self._rows_at, number * 8 * _ROW, 8 * _ROW, self._items * 8 * _ROW)
        row = number * _ROW
        # Odd until it is written: if we are killed from here on, the extent is there and empty, and nobody's twice.
        self._rows[row] |= 1
        self._rows[row + _OFFSET] = offset
        self._rows[row + _CAPACITY] = capacity
        self._words[_USED] = offset + capacity
        self._words[_COUNT] = number + 1
        self._write(number, index, parts, length)
        return True

    def replace(self, number: int, index: int, parts: Sequence[Buffer], length: int) -> None:
        """Put these bytes into extent ``number`` in place of what it holds; they must fit."""
        self._drop(number)
        self._write(number, index, parts, length)

    def put(self, index: int, parts: Sequence[Buffer], length: int) -> bool:
        """Give ``index`` these bytes, in the extent it has if they fit there, else in a new one; False if there is no room.

        A record that outgrows its extent leaves that empty. If there is no room, ``index`` has no record.

        Raises:
            FullError: there is room in the arena, but not in ``/dev/shm``.
        """
        number = self._places[index] - 1
        if number >= 0 and self.capacity(number) >= length:
            self.replace(number, index, parts, length)
            return True
        self.remove(index)
        return self.append(index, parts, length)

    def clear(self) -> None:
        """Forget all records; their space is free again. The memory stays with the segment."""
        self._places[:] = memoryview(bytes(self._places.nbytes)).cast("I")
        # Extents will lie elsewhere from now on, over one another's old places: whoever is copying one must notice.
        for number in range(self.count):
            self._spoil(number)
        # Only now: a record that can still be found must not be written over. Nor may an extent that still counts lie
        # over a new one: if we are killed in between, their space is lost until the next `clear`.
        self._words[_COUNT] = 0
        self._words[_USED] = 0

    def remove(self, index: int) -> None:
        """Forget the record of ``index``; its extent stays, empty, for another."""
        place = self._places[index]
        if place:
            self._drop(place - 1)

    def extent(self, number: int) -> Extent | None:
        """What extent ``number`` holds; None if it is empty, or its writer died."""
        row = number * _ROW
        owner = self._rows[row + _OWNER]
        if self._rows[row] & 1 or self._places[owner] != number + 1:
            return None
        return Extent(owner, self._rows[row + _CAPACITY])

    def capacity(self, number: int) -> int:
        """Bytes that fit into extent ``number``."""
        return self._rows[number * _ROW + _CAPACITY]

    def _spoil(self, number: int) -> None:
        """Have whoever is reading extent ``number`` take nothing of it."""
        self._rows[number * _ROW] |= 1

    def _drop(self, number: int) -> None:
        self._spoil(number)
        owner = self._rows[number * _ROW + _OWNER]
        if self._places[owner] == number + 1:
            self._places[owner] = 0

    def _write(self, number: int, index: int, parts: Sequence[Buffer], length: int) -> None:
        row, rows = number * _ROW, self._rows
        rows[row] |= 1
        rows[row + _OWNER] = index
        rows[row + _LENGTH] = length
        place = rows[row + _OFFSET]
        for part in parts:
            end = place + len(part)
            self._data[place:end] = part
            place = end
        rows[row] += 1
        self._places[index] = number + 1

    def _reserve(self, base: int, place: int, length: int, limit: int) -> None:
        """Reserve ``length`` bytes at ``place``, whose predecessors are reserved, up to the next multiple of _AHEAD."""
        if not place or place // _AHEAD != (place + length - 1) // _AHEAD or place % _AHEAD == 0:
            end = min(limit, -(-(place + length) // _AHEAD) * _AHEAD)
            self._segment.reserve(base + place, base + end)


def _round_up(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
