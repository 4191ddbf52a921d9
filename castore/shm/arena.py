"""An arena: records of any length in shared memory, found by index, read without a lock.

Space is allocated from the front in *extents* that never move, split or grow. A removed record leaves its
extent to another record that fits. So nothing fragments, and a caller that evicts must choose a victim that
is large enough.

An extent's version is odd while it is written. Writers hold the segment's lock from the first byte to the
last, so an odd version seen under the lock belongs to a writer that died, and its extent is free. A reader
notes the version, copies, and compares the version again: a copy of changed bytes is discarded. The caller
decides which record to evict.
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
# Columns of an extent's row.
_VERSION, _OWNER, _OFFSET, _CAPACITY, _LENGTH = range(5)
_ROW = 5
# Bytes by which pages are reserved ahead: fewer system calls, and at most this much unused memory.
_AHEAD = 1 << 24


class Extent(NamedTuple):
    """An extent in use: the index that it belongs to, and its capacity in bytes."""

    owner: int
    capacity: int


class Record(NamedTuple):
    """A record in place. A copy taken from ``data`` is valid if `Arena.is_still` is true afterwards."""

    owner: int
    number: int
    version: int
    data: memoryview


class Arena:
    """Records of ``items`` indices in a part of a segment that was created with ``reserve=False``.

    The caller must hold ``segment.lock()`` for `extent` and for all methods that change something.

    Args:
        segment: the segment that holds the arena.
        start: offset in bytes of the arena in the segment, a multiple of 64.
        items: number of indices.
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
        # The rest is reserved as extents are allocated. Reserving the tables twice is harmless.
        segment.reserve(start, self._rows_at)
        buffer = segment.buffer
        self._words = buffer[words : words + 8 * _WORDS].cast("Q")
        #: The number of each index's extent plus one; 0 if the index has no record.
        self._places = buffer[places : places + 4 * items].cast("I")
        self._rows = buffer[self._rows_at : self._rows_at + 8 * _ROW * items].cast("Q")
        self._data = buffer[self._data_at : self._data_at + size]

    @staticmethod
    def needed(items: int, size: int) -> int:
        """Bytes that an arena takes in a segment."""
        return _round_up(8 * _WORDS) + _round_up(4 * items) + _round_up(8 * _ROW * items) + size

    @property
    def size(self) -> int:
        """Bytes for records."""
        return self._size

    def fits(self, length: int) -> bool:
        """Whether `append` would find room for ``length`` bytes. Without the lock this may change at once."""
        return self._words[_USED] + _round_up(length) <= self._size and self._words[_COUNT] < self._items

    @property
    def count(self) -> int:
        """Number of extents allocated so far."""
        return self._words[_COUNT]

    @property
    def used(self) -> int:
        """Bytes of all extents."""
        return self._words[_USED]

    def holds(self, index: int) -> bool:
        """Whether ``index`` has a record now."""
        return self._places[index] != 0

    def read(self, index: int) -> bytearray | None:
        """Return a copy of the record of ``index``; None if there is none, or it is being changed."""
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
        """Return the record of ``index`` in place, to copy a part of it; None as in `read`.

        Call `is_still` after copying.
        """
        place = self._places[index]
        if not place:
            return None
        number = place - 1
        version, owner, offset, _, length = self._rows[number * _ROW : place * _ROW]
        if version & 1 or owner != index:
            return None
        return Record(index, number, version, self._data[offset : offset + length])

    def is_still(self, record: Record) -> bool:
        """Whether a record is unchanged since `look`, so that a copy taken in between is valid."""
        return self._rows[record.number * _ROW] == record.version

    def append(self, index: int, parts: Sequence[Buffer], length: int, *, capacity: int = 0) -> bool:
        """Write a record of ``index`` into a new extent; False if the arena has no room.

        Args:
            index: the record's index.
            parts: the record's bytes, in pieces.
            length: bytes of all parts together.
            capacity: bytes of the extent, if longer records are to fit later. Default: ``length``.

        Raises:
            FullError: the arena has room, but ``/dev/shm`` or the machine's memory has not.
        """
        number, offset = self._words[_COUNT], self._words[_USED]
        capacity = _round_up(max(length, capacity))
        if offset + capacity > self._size or number == self._items:
            return False
        # Reserved ahead, so that most appends need no system call.
        self._reserve(self._data_at, offset, capacity, self._size)
        self._reserve(self._rows_at, number * 8 * _ROW, 8 * _ROW, self._items * 8 * _ROW)
        row = number * _ROW
        # Odd until the record is written. If this process is killed from here on, the extent is allocated
        # once, and empty.
        self._rows[row] |= 1
        self._rows[row + _OFFSET] = offset
        self._rows[row + _CAPACITY] = capacity
        self._words[_USED] = offset + capacity
        self._words[_COUNT] = number + 1
        self._write(number, index, parts, length)
        return True

    def replace(self, number: int, index: int, parts: Sequence[Buffer], length: int) -> None:
        """Write a record of ``index`` into extent ``number``, in place of its record. The bytes must fit."""
        self._drop(number)
        self._write(number, index, parts, length)

    def put(self, index: int, parts: Sequence[Buffer], length: int) -> bool:
        """Write a record of ``index``, into its extent if the bytes fit there, else into a new one.

        A record that outgrows its extent leaves the extent empty.

        Returns:
            False if there is no room. Then ``index`` has no record.

        Raises:
            FullError: the arena has room, but ``/dev/shm`` or the machine's memory has not.
        """
        number = self._places[index] - 1
        if number >= 0 and self.capacity(number) >= length:
            self.replace(number, index, parts, length)
            return True
        self.remove(index)
        return self.append(index, parts, length)

    def clear(self) -> None:
        """Remove all records and free their space. The memory stays with the segment."""
        self._places[:] = memoryview(bytes(self._places.nbytes)).cast("I")
        # New extents will overlap the old ones: a reader that is copying from an old extent must notice.
        for number in range(self.count):
            self._spoil(number)
        # Last, because a record that can still be found must not be overwritten. The count comes before the
        # used bytes: after a kill in between, space is lost until the next `clear`, but no extents overlap.
        self._words[_COUNT] = 0
        self._words[_USED] = 0

    def remove(self, index: int) -> None:
        """Remove the record of ``index``. Its extent stays, empty, for another record."""
        place = self._places[index]
        if place:
            self._drop(place - 1)

    def extent(self, number: int) -> Extent | None:
        """Describe extent ``number``; None if it is empty, or its writer died."""
        row = number * _ROW
        owner = self._rows[row + _OWNER]
        if self._rows[row] & 1 or self._places[owner] != number + 1:
            return None
        return Extent(owner, self._rows[row + _CAPACITY])

    def capacity(self, number: int) -> int:
        """Capacity of extent ``number`` in bytes."""
        return self._rows[number * _ROW + _CAPACITY]

    def _spoil(self, number: int) -> None:
        """Make concurrent readers of extent ``number`` discard their copies."""
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
        """Reserve ``length`` bytes at ``place``, and on to a multiple of _AHEAD. All before are reserved."""
        if not place or place // _AHEAD != (place + length - 1) // _AHEAD or place % _AHEAD == 0:
            end = min(limit, -(-(place + length) // _AHEAD) * _AHEAD)
            self._segment.reserve(base + place, base + end)


def _round_up(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
