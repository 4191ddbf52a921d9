"""The two levels that keep samples: records in shared memory, and in a store on the local disk.

Both levels count their answers, and both ask one `Policy` which sample gives way. A level without room and
without a victim refuses the record and keeps what it has: no sample is ever evicted for a sample that is used
no more than others. Neither level knows the content of a record, nor the other level.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import NamedTuple

from castore import Store
from castore.adapters.torch.policy import Policy
from castore.errors import FullError, TooLargeError
from castore.shm.arena import Arena
from castore.shm.segments import Segment
from castore.shm.tallies import Tallies

Buffer = bytes | bytearray | memoryview

#: The number of counters that each level has.
TALLIES = 3
_HITS, _MISSES, _BYTES = range(TALLIES)
_UNIT = 64
# At most so many samples give way to one on disk.
_VICTIMS = 8


class LevelStats(NamedTuple):
    """The counters of a level over all workers and ranks, and its contents.

    Attributes:
        hits, misses: samples found and not found.
        bytes_read: bytes of the samples found, uncompressed.
        samples: how many samples the level holds.
        bytes_held: bytes that those take: in memory uncompressed, on disk compressed.
        limit: bytes that the samples may take.
    """

    hits: int
    misses: int
    bytes_read: int
    samples: int
    bytes_held: int
    limit: int

    @property
    def hit_rate(self) -> float:
        """The fraction of requested samples that was found."""
        asked = self.hits + self.misses
        return self.hits / asked if asked else 0.0


class Level:
    """The counters that both levels have."""

    def __init__(self, tallies: Tallies, first: int) -> None:
        self.hits = tallies.tally(first + _HITS)
        self.misses = tallies.tally(first + _MISSES)
        self.bytes_read = tallies.tally(first + _BYTES)
        self._warned = False

    def recount(self, length: int) -> None:
        """Count the last hit, of so many bytes, as a miss."""
        self.hits.add(-1)
        self.bytes_read.add(-length)
        self.misses.add()

    def _warn(self, error: Exception) -> None:
        # Once a process: a cache that cannot grow deserves a warning, and does not stop a training run.
        if not self._warned:
            self._warned = True
            warnings.warn(f"no more samples are cached for now: {error}", RuntimeWarning, stacklevel=4)


class MemoryLevel(Level):
    """Records in an arena of a segment."""

    def __init__(self, segment: Segment, arena: Arena, policy: Policy, tallies: Tallies, first: int) -> None:
        super().__init__(tallies, first)
        self._segment = segment
        self._arena = arena
        self._policy = policy

    def __contains__(self, index: int) -> bool:
        return self._arena.holds(index)

    @property
    def limit(self) -> int:
        """Bytes that the level's records may take."""
        return self._arena.size

    @property
    def _values_cache(self) -> MemoryLevel:
        # BiLevelCache's users access its levels by this name.
        return self

    def peek(self, index: int) -> bytearray | None:
        """As `get`, without counting."""
        return self._arena.read(index)

    def get(self, index: int) -> bytearray | None:
        """A private copy of the record, or None."""
        record = self._arena.read(index)
        if record is None:
            self.misses.add()
        else:
            self.hits.add()
            self.bytes_read.add(len(record))
        return record

    def has_room(self, length: int) -> bool:
        """Whether the level would take a record of so many bytes without evicting another."""
        return self._arena.fits(length)

    def offer(self, index: int, record: Buffer) -> tuple[bool, tuple[int, bytearray] | None]:
        """Take a record, if there is room or another record gives way.

        Returns:
            whether the record is there now; the evicted index with its record.
        """
        length = len(record)
        # Most offers are refused once the level is full: decide that without the lock.
        if not self._arena.fits(length) and self._victim(index, length) is None:
            return self._arena.holds(index), None
        with self._segment.lock():
            if self._arena.holds(index):
                return True, None
            try:
                if self._arena.append(index, [record], length):
                    return True, None
            except FullError as error:
                self._warn(error)
            place = self._victim(index, length)
            if place is None:
                return False, None
            victim = self._arena.extent(place)
            gone = self._arena.read(victim.owner) if victim else None
            self._arena.replace(place, index, [record], length)
        return True, (victim.owner, gone) if victim and gone is not None else None

    def remove(self, index: int) -> None:
        """Remove a sample."""
        with self._segment.lock():
            self._arena.remove(index)

    def _victim(self, index: int, length: int) -> int | None:
        arena = self._arena
        empty: list[int] = []

        def resident(place: int) -> int | None:
            # A far too large extent would be wasted on a small sample.
            if not length <= arena.capacity(place) <= 2 * length + 1024:
                return None
            extent = arena.extent(place)
            if extent is None:  # its writer died
                empty.append(place)
                return None
            return extent.owner

        victim = self._policy.victim(index, arena.count, resident)
        return empty[0] if empty else victim

    def stats(self) -> LevelStats:
        """The level's counters and contents."""
        samples = sum(1 for place in range(self._arena.count) if self._arena.extent(place))
        return LevelStats(
            self.hits.value,
            self.misses.value,
            self.bytes_read.value,
            samples,
            self._arena.used,
            self.limit,
        )


class DiskTable:
    """The contents of a disk level, in shared memory: the samples on disk, and the bytes they take.

    Args:
        segment: the segment that holds the table; its pages must be reserved.
        start: the offset of the table's first byte, a multiple of 8.
        items: the number of samples in the dataset.
    """

    def __init__(self, segment: Segment, start: int, items: int) -> None:
        self.lock = segment.lock
        self.items = items
        self._words = segment.buffer[start : start + 16].cast("Q")
        self._units = segment.buffer[start + 16 : start + 16 + 4 * items].cast("I")

    @staticmethod
    def needed(items: int) -> int:
        """Bytes of a segment that the table takes."""
        return 16 + 4 * items

    def holds(self, index: int) -> bool:
        """Whether the sample is on disk, as far as is known."""
        return self._units[index] != 0

    @property
    def used(self) -> int:
        """Bytes that all samples take on disk."""
        return self._words[0] * _UNIT

    @property
    def count(self) -> int:
        """How many samples are on disk."""
        return self._words[1]

    def set(self, index: int, stored: int) -> None:
        """Record a sample's bytes on disk; 0 for a removed sample. The caller holds the lock."""
        units = -(-stored // _UNIT)
        before = self._units[index]
        self._units[index] = units
        self._words[0] += units - before
        self._words[1] += bool(units) - bool(before)


class DiskLevel(Level):
    """Records in a store, one entry a sample.

    Args:
        store: the store; its ``max_size`` is the limit, so that it evicts samples of earlier versions of a
            dataset by itself.
        limit: the same limit in bytes.
        name_of: the entry's name for an index.
        table: which samples are on disk.
        policy, tallies, first: as in `MemoryLevel`.
    """

    def __init__(
        self,
        store: Store,
        limit: int,
        name_of: Callable[[int], str],
        table: DiskTable,
        policy: Policy,
        tallies: Tallies,
        first: int,
    ) -> None:
        super().__init__(tallies, first)
        self._store = store
        #: Bytes that the level's records may take.
        self.limit = limit
        self._name_of = name_of
        self._table = table
        self._policy = policy

    def __contains__(self, index: int) -> bool:
        return self._table.holds(index)

    def get(self, index: int) -> bytes | None:
        """The record, checked, or None."""
        record = self._store.get(self._name_of(index)) if self._table.holds(index) else None
        if record is None:
            if self._table.holds(index):  # gc removed the entry, or it was damaged
                with self._table.lock():
                    self._table.set(index, 0)
            self.misses.add()
        else:
            self.hits.add()
            self.bytes_read.add(len(record))
        return record

    def has_room(self, length: int) -> bool:
        """Whether the level would take a record of so many bytes without evicting another."""
        return self._table.used + length <= self.limit

    def offer(self, index: int, record: Buffer) -> bool:
        """Take a record, if there is room or others give way; return whether it is there now."""
        if self._table.holds(index):
            return True
        if not self.has_room(len(record)) and not self._clear(index, len(record)):
            return False
        try:
            entry = self._store.put(self._name_of(index), record)
        except (FullError, TooLargeError) as error:
            self._warn(error)
            return False
        with self._table.lock():
            self._table.set(index, max(1, entry.stored))
        return True

    def _clear(self, index: int, length: int) -> bool:
        """Evict less used samples until ``length`` bytes fit."""
        table = self._table
        for _ in range(_VICTIMS):
            victim = self._policy.victim(index, table.items, lambda i: i if table.holds(i) else None)
            if victim is None:
                return False
            self.remove(victim)
            if self.has_room(length):
                return True
        return False

    def remove(self, index: int) -> None:
        """Remove a sample."""
        self._store.delete(self._name_of(index))
        with self._table.lock():
            self._table.set(index, 0)

    def stats(self) -> LevelStats:
        """The level's counters and contents."""
        table = self._table
        return LevelStats(
            self.hits.value, self.misses.value, self.bytes_read.value, table.count, table.used, self.limit
        )
