"""Extents: records of any length in an arena, found by slot, read without a lock.

Space is allocated from the front in *extents*. A removed record leaves its extent to another record that
fits, so a caller that evicts must choose a victim that is large enough. Extents move only in `Extents.put`,
for a caller that does not evict: records that outgrow their extents leave free ones between the others, and
once these are an eighth of the space, the records move together.

The slot's state shows whether its record is valid, as in `castore.shm.slots`. An extent is in use if the slot
that owns it is READY and refers to it. All other extents are free: those of removed records, of records that
moved, and of writers that died. A reader notes the slot's word, copies, and compares the word again: bytes of
an extent change only after the word of its owner has changed. The caller decides which record to evict.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from castore.records import Buffer
from castore.shm.arena import ALIGNMENT, EXTENT_ROW, Arena, round_up
from castore.shm.slots import STATE, SlotState

_READY = int(SlotState.READY)
# Columns of an extent's row.
_OWNER, _OFFSET, _END, _LENGTH = range(EXTENT_ROW)
# The end of the row before a row: extents follow one another without gaps.
_END_BEFORE = _END - EXTENT_ROW
# Bytes by which pages are reserved ahead: fewer system calls, and at most this much unused memory.
_AHEAD = 1 << 24
# Records move together once the bytes between them are this part of the space. So a byte that is put costs
# moving eight at the most.
_WASTED_PART = 8


class Extent(NamedTuple):
    """An extent in use: the slot that owns it, and its capacity in bytes."""

    owner: int
    capacity: int


class Record(NamedTuple):
    """A record in place. A copy taken from ``data`` is valid if `Extents.is_unchanged` is true afterwards."""

    slot: int
    extent: int
    word: int
    data: memoryview


class Extents:
    """The records of an arena whose layout has extents.

    The caller must hold ``arena.lock()`` for `extent` and for all methods that change something.
    """

    def __init__(self, arena: Arena) -> None:
        self._segment = arena.segment
        self._slots = arena.slots
        self._words = arena.slots.words
        self._limit = arena.layout.extents or 0
        self._data_at = arena.layout.data_at
        self._rows_at = arena.layout.offset("rows")
        self._data = arena.data
        #: Bytes for records.
        self.size = arena.size
        # A record's bytes fit if its extent does, as both ends of an extent are on a boundary.
        self._space = arena.size - arena.size % ALIGNMENT
        #: The only number to change when space is allocated: a kill leaves an extent allocated, or not.
        self._allocated = arena.table("allocated")
        # Bytes in extents that no record of `put` takes, since records were moved together last. Only a hint:
        # a kill may lose a change.
        self._wasted = arena.table("wasted")
        # The last extent of each slot. It is the slot's if it was allocated and names the slot as its owner.
        self._extent_of = arena.table("extent of slot")
        self._rows = arena.table("rows")

    def fits(self, length: int) -> bool:
        """Whether `append` would find space for ``length`` bytes. Only a hint without the lock."""
        count = self._allocated[0]
        end = self._rows[count * EXTENT_ROW + _END_BEFORE] if count else 0
        return count < self._limit and end + length <= self._space

    @property
    def count(self) -> int:
        """Number of extents allocated so far."""
        return self._allocated[0]

    @property
    def used(self) -> int:
        """Bytes of all extents."""
        count = self._allocated[0]
        return self._rows[count * EXTENT_ROW + _END_BEFORE] if count else 0

    def holds(self, slot: int) -> bool:
        """Whether ``slot`` has a record now."""
        return bool(self._words[slot] & _READY)

    def read(self, slot: int) -> bytearray | None:
        """Return a copy of the record of ``slot``; None if there is none, or it is being changed."""
        words = self._words
        word = words[slot]
        if not word & _READY:
            return None
        row = self._extent_of[slot] * EXTENT_ROW
        offset, length = self._rows[row + _OFFSET], self._rows[row + _LENGTH]
        # The two numbers belong together if the word is unchanged: else the slice could reach into bytes that
        # no memory backs.
        if words[slot] != word:
            return None
        record = bytearray(self._data[offset : offset + length])
        return record if words[slot] == word else None

    def view(self, slot: int) -> Record | None:
        """Return the record of ``slot`` in place, to copy a part of it; None as in `read`.

        Call `is_unchanged` after copying.
        """
        words = self._words
        word = words[slot]
        if not word & _READY:
            return None
        extent = self._extent_of[slot]
        row = extent * EXTENT_ROW
        offset, length = self._rows[row + _OFFSET], self._rows[row + _LENGTH]
        if words[slot] != word:
            return None
        return Record(slot, extent, word, self._data[offset : offset + length])

    def is_unchanged(self, record: Record) -> bool:
        """Whether a record is unchanged since `view`, so that a copy taken in between is valid."""
        return self._words[record.slot] == record.word

    def append(self, slot: int, parts: Sequence[Buffer], length: int, *, capacity: int = 0) -> int:
        """Write a record of ``slot`` into a new extent.

        Args:
            slot: the record's slot.
            parts: the record's bytes, in pieces.
            length: bytes of all parts together.
            capacity: bytes of the extent, if longer records are to fit later. Default: ``length``.

        Returns:
            The slot's word, as from `Slots.publish`; 0 if the arena has no space. Then nothing has changed.

        Raises:
            FullError: the arena has space, but ``/dev/shm`` or the machine's memory has not.
        """
        number, rows = self._allocated[0], self._rows
        row = number * EXTENT_ROW
        offset = rows[row + _END_BEFORE] if number else 0
        end = offset + round_up(max(length, capacity))
        if number == self._limit or end > self._space:
            return 0
        # Reserved ahead, so that most appends need no system call.
        self._reserve(self._data_at, offset, end, self._space)
        self._reserve(self._rows_at, 8 * row, 8 * (row + EXTENT_ROW), 8 * EXTENT_ROW * self._limit)
        self._slots.claim(slot)
        rows[row + _OWNER] = slot
        rows[row + _OFFSET] = offset
        rows[row + _END] = end
        self._extent_of[slot] = number
        # The owner is not READY. If this process is killed from here on, the extent is allocated, and free.
        self._allocated[0] = number + 1
        return self._write(number, slot, parts, length)

    def replace(self, number: int, slot: int, parts: Sequence[Buffer], length: int) -> int:
        """Write a record of ``slot`` into extent ``number``, in place of its record. The bytes must fit.

        Returns:
            The slot's word, as from `Slots.publish`.
        """
        owner = self._rows[number * EXTENT_ROW + _OWNER]
        if owner != slot and self._extent_of[owner] == number:
            self.remove(owner)
        self._slots.claim(slot)
        self._rows[number * EXTENT_ROW + _OWNER] = slot
        self._extent_of[slot] = number
        return self._write(number, slot, parts, length)

    def put(self, slot: int, parts: Sequence[Buffer], length: int) -> int:
        """Write a record of ``slot``, into its extent if the bytes fit there, else into a new one.

        A record that outgrows its extent leaves the extent free. If there is no space for a new extent, and
        enough is free between the others, their records move together.

        Returns:
            The slot's word, as from `Slots.publish`; 0 if there is no space. Then ``slot`` has no record.

        Raises:
            FullError: the arena has space, but ``/dev/shm`` or the machine's memory has not.
        """
        number = self._extent_of[slot]
        row = number * EXTENT_ROW
        # An extent that names the slot as its owner is the slot's own, even if its last writer died.
        is_own = number < self.count and self._rows[row + _OWNER] == slot
        stays = is_own and self.capacity(number) >= length
        if is_own and self.holds(slot):
            freed = round_up(self._rows[row + _LENGTH]) - (round_up(length) if stays else 0)
            self._wasted[0] = max(0, self._wasted[0] + freed)
        if stays:
            return self.replace(number, slot, parts, length)
        self.remove(slot)
        word = self.append(slot, parts, length)
        if not word and self._is_wasteful(length):
            self._move_together()
            word = self.append(slot, parts, length)
        return word

    def _is_wasteful(self, length: int) -> bool:
        """Whether moving records together makes room for ``length`` bytes, and costs little for each byte
        that was put since it was done last.
        """
        wasted = self._wasted[0]
        enough = wasted >= self._space // _WASTED_PART or (wasted > 0 and self.count == self._limit)
        return enough and self.used - wasted + round_up(length) <= self._space

    def _move_together(self) -> None:
        """Move all records to the front, one after another, so that all free space is behind them.

        A kill loses the record that is being moved, and leaves the others where they are: before a row grows,
        those behind it have given up its bytes, so no two extents ever overlap.
        """
        rows, count = self._rows, self._allocated[0]
        live = [number for number in range(count) if self.extent(number) is not None]
        for number in set(range(count)).difference(live):
            rows[number * EXTENT_ROW + _OFFSET] = rows[number * EXTENT_ROW + _END]
        end = 0
        for place, number in enumerate(live):
            row = number * EXTENT_ROW
            offset, length = rows[row + _OFFSET], rows[row + _LENGTH]
            start, end = end, end + round_up(length)
            if (place, start) == (number, offset):
                rows[row + _END] = end
                continue
            slot = rows[row + _OWNER]
            self._slots.claim(slot)
            rows[row + _OFFSET] = rows[row + _END]
            target = place * EXTENT_ROW
            rows[target + _OWNER] = slot
            rows[target + _LENGTH] = length
            rows[target + _OFFSET] = start
            rows[target + _END] = end
            self._extent_of[slot] = place
            self._data[start : start + length] = self._data[offset : offset + length]
            self._slots.publish(slot)
        self._allocated[0] = len(live)
        self._wasted[0] = 0

    def clear(self) -> None:
        """Remove all records and free their space. The memory stays with the segment."""
        self._slots.clear()
        # Last, because a record that can still be found must not be overwritten.
        self._allocated[0] = 0
        self._wasted[0] = 0

    def remove(self, slot: int) -> None:
        """Remove the record of ``slot``. Its extent stays, free, for another record."""
        if self._words[slot] & STATE:
            self._slots.release(slot)

    def extent(self, number: int) -> Extent | None:
        """Describe extent ``number``; None if it is free."""
        row = number * EXTENT_ROW
        owner = self._rows[row + _OWNER]
        if not self._words[owner] & _READY or self._extent_of[owner] != number:
            return None
        return Extent(owner, self._rows[row + _END] - self._rows[row + _OFFSET])

    def capacity(self, number: int) -> int:
        """Capacity of extent ``number`` in bytes."""
        row = number * EXTENT_ROW
        return self._rows[row + _END] - self._rows[row + _OFFSET]

    def _write(self, number: int, slot: int, parts: Sequence[Buffer], length: int) -> int:
        """Write a record of a claimed slot, and publish it."""
        row, data = number * EXTENT_ROW, self._data
        self._rows[row + _LENGTH] = length
        place = self._rows[row + _OFFSET]
        for part in parts:
            end = place + len(part)
            data[place:end] = part
            place = end
        return self._slots.publish(slot)

    def _reserve(self, base: int, start: int, end: int, limit: int) -> None:
        """Reserve bytes ``start`` to ``end`` behind ``base``, and on to a multiple of _AHEAD.

        All bytes before ``start`` have been reserved so, and with them the rest of its step.
        """
        if -start % _AHEAD < end - start:
            self._segment.reserve(base + start, base + min(limit, -(-end // _AHEAD) * _AHEAD))
