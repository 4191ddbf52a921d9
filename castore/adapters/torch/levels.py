"""The two levels that keep samples: records in shared memory, and in a store on the local disk.

Both levels count their answers, and both ask one `Policy` which sample gives way. A level without room and
without a victim refuses the record and keeps what it has: no sample is ever evicted for a sample that is used
no more than others. Neither level depends on the content of a record, nor on the other level.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from castore import Buffer, Store
from castore.adapters.torch.policy import Policy
from castore.errors import FullError, TooLargeError, warn
from castore.shm.arena import Arena, Table
from castore.shm.extents import Extents
from castore.shm.tallies import Tallies

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

    def count_late(self, length: int) -> None:
        """Count the last miss as a hit of so many bytes: the record has come meanwhile."""
        self.misses.add(-1)
        self.hits.add()
        self.bytes_read.add(length)

    def recount(self, length: int) -> None:
        """Count the last hit, of so many bytes, as a miss."""
        self.hits.add(-1)
        self.bytes_read.add(-length)
        self.misses.add()

    def _warn(self, error: Exception) -> None:
        # Once a process: a cache that cannot grow deserves a warning, and does not stop a training run.
        if not self._warned:
            self._warned = True
            warn(f"no more samples are cached for now: {error}", RuntimeWarning)


class MemoryLevel(Level):
    """The samples of a `BiLevelCachedDataset` in shared memory: its ``memory_cache``.

    Attributes:
        hits, misses: samples found and not found, over all workers and ranks; ``hits.value`` is the number.
        bytes_read: bytes of the samples found, in the same way.
    """

    def __init__(self, arena: Arena, policy: Policy, tallies: Tallies, first: int) -> None:
        # The slot of a record in the arena is the sample's index.
        super().__init__(tallies, first)
        self._lock = arena.lock
        self._records = Extents(arena)
        self._policy = policy

    def __contains__(self, index: int) -> bool:
        return self._records.holds(index)

    @property
    def limit(self) -> int:
        """Bytes that the level's records may take."""
        return self._records.size

    @property
    def _values_cache(self) -> MemoryLevel:
        # BiLevelCache's users access its levels by this name.
        return self

    def peek(self, index: int) -> bytearray | None:
        """As `get`, without counting."""
        return self._records.read(index)

    def get(self, index: int) -> bytearray | None:
        """A private copy of the record, or None."""
        record = self._records.read(index)
        if record is None:
            self.misses.add()
        else:
            self.hits.add()
            self.bytes_read.add(len(record))
        return record

    def has_room(self, length: int) -> bool:
        """Whether the level would take a record of so many bytes without evicting another."""
        return self._records.fits(length)

    def offer(self, index: int, record: Buffer) -> tuple[bool, tuple[int, bytearray] | None]:
        """Take a record, if there is room or another record gives way.

        Returns:
            whether the record is there now; the evicted index with its record.
        """
        length, records = len(record), self._records
        # Most offers are refused once the level is full: decide that without the lock.
        if not records.fits(length) and self._victim(index, length) is None:
            return records.holds(index), None
        with self._lock():
            if records.holds(index):
                return True, None
            try:
                if records.append(index, [record], length):
                    return True, None
            except FullError as error:
                self._warn(error)
            number = self._victim(index, length)
            if number is None:
                return False, None
            victim = records.extent(number)
            gone = records.read(victim.owner) if victim else None
            records.replace(number, index, [record], length)
        return True, (victim.owner, gone) if victim and gone is not None else None

    def remove(self, index: int) -> None:
        """Remove a sample."""
        with self._lock():
            self._records.remove(index)

    def _victim(self, index: int, length: int) -> int | None:
        """The number of an extent for a sample: a free one, or that of a sample that is used less."""
        records = self._records
        free: list[int] = []

        def resident(number: int) -> int | None:
            # A far too large extent would be wasted on a small sample.
            if not length <= records.capacity(number) <= 2 * length + 1024:
                return None
            extent = records.extent(number)
            if extent is None:
                free.append(number)
                return None
            return extent.owner

        victim = self._policy.victim(index, records.count, resident)
        return free[0] if free else victim

    def stats(self) -> LevelStats:
        """The level's counters and contents."""
        samples = sum(1 for number in range(self._records.count) if self._records.extent(number))
        return LevelStats(
            self.hits.value,
            self.misses.value,
            self.bytes_read.value,
            samples,
            self._records.used,
            self.limit,
        )


class DiskTable:
    """The contents of a disk level, in shared memory: the samples on disk, and the bytes they take.

    Args:
        arena: an arena whose layout has the `tables`.
    """

    def __init__(self, arena: Arena) -> None:
        self.lock = arena.lock
        self._totals = arena.table("totals on disk")
        self._units = arena.table("units on disk")
        self.items = len(self._units)

    @staticmethod
    def tables(items: int) -> list[Table]:
        """The tables for so many samples."""
        return [Table("totals on disk", "Q", 2), Table("units on disk", "I", items)]

    def holds(self, index: int) -> bool:
        """Whether the sample is on disk, as far as is known."""
        return self._units[index] != 0

    @property
    def used(self) -> int:
        """Bytes that all samples take on disk."""
        return self._totals[0] * _UNIT

    @property
    def count(self) -> int:
        """How many samples are on disk."""
        return self._totals[1]

    def set(self, index: int, stored: int) -> None:
        """Record a sample's bytes on disk; 0 for a removed sample. The caller holds the lock."""
        units = -(-stored // _UNIT)
        before = self._units[index]
        self._units[index] = units
        self._totals[0] += units - before
        self._totals[1] += bool(units) - bool(before)


class DiskLevel(Level):
    """The samples of a `BiLevelCachedDataset` on disk, one entry of a store each: its ``disk_cache``.

    Attributes:
        hits, misses: samples found and not found, over all workers and ranks; ``hits.value`` is the number.
        bytes_read: bytes of the samples found, in the same way.
        limit: bytes that the level's records may take.
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
        """Open the level.

        Args:
            store: the store; its ``max_size`` is the limit, so that it evicts samples of earlier versions of
                a dataset by itself.
            limit: the same limit in bytes.
            name_of: the entry's name for an index.
            table: which samples are on disk.
            policy, tallies, first: as in `MemoryLevel`.
        """
        super().__init__(tallies, first)
        self._store = store
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

    def bring(self, indices: list[int]) -> dict[int, bytes]:
        """The records of those of some indices that the store's remote has. Counts nothing."""
        names = {self._name_of(index): index for index in indices}
        self._store.find_shared(names)
        found = {}
        for name, record in zip(names, self._store.get_many(names), strict=True):
            entry = None if record is None else self._store.entry(name)
            if record is not None and entry is not None:
                found[names[name]] = record
                with self._table.lock():
                    self._table.set(names[name], max(1, entry.stored))
        return found

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
