"""TwoLevels: records by index, in shared memory and on disk, shared by all workers and ranks of a node.

One arena holds the memory level and the state that all processes share: the place of each record, its uses,
the hits. A record moves up when its use is so far ahead of another's that it takes the other's place, and
down when it loses its own; nothing else moves. Knows indices and bytes, not samples or datasets.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from castore import Store
from castore.adapters.torch.level_sizes import Size, disk_bytes, is_off, memory_bytes, refuse_full_disk
from castore.adapters.torch.levels import TALLIES, DiskLevel, DiskTable, MemoryLevel
from castore.adapters.torch.policy import Policy
from castore.adapters.torch.samples import record_name
from castore.errors import InvalidValueError, warn
from castore.records import Buffer
from castore.shm.arena import Arena, Layout, Table
from castore.shm.segments import is_alive
from castore.units import format_size

# Numbers that the levels share: whether the disk level is set up, its limit, the policy's clock.
_READY, _DISK_LIMIT, _CLOCK, _STATE = range(4)
_RUN = "run-"


class TwoLevels:
    """The levels of one dataset on one node.

    Args:
        items: how many indices there are.
        memory_cache_size, disk_cache_size, disk_cache_path, write_through, keep, codec, remote: as in
            `BiLevelCachedDataset`.
        name: the arena's name; None for an arena of this process and its children alone.
        key: what identifies the data: the folder of its entries in the store.
        sharers: how many such levels divide the size of the disk level.

    Raises:
        As `BiLevelCachedDataset`.
    """

    def __init__(
        self,
        items: int,
        memory_cache_size: Size,
        disk_cache_size: Size,
        disk_cache_path: str | os.PathLike[str] | None,
        *,
        name: str | None,
        key: str,
        write_through: bool,
        keep: bool,
        codec: str,
        remote: str | None = None,
        sharers: int = 1,
    ) -> None:
        self._items = items
        self._sharers = sharers
        self._write_through = write_through
        self._keep = keep
        description = {
            "kind": "two levels",
            "items": items,
            "key": key,
            "memory_cache_size": str(memory_cache_size),
            "disk_cache_size": str(disk_cache_size),
            "disk_cache_path": None if disk_cache_path is None else os.path.abspath(disk_cache_path),
        }

        in_memory = not is_off(memory_cache_size, "memory_cache_size")
        layout = _layout(items, in_memory=in_memory)

        def size() -> int:
            return _memory_bytes(memory_cache_size, items) - layout.data_at if in_memory else 0

        advice = "give each of the caches a name of its own (name=...)"
        self._arena = Arena(name, layout, size, description, advice=advice)
        try:
            self._prefix = key if keep else f"{_RUN}{self._arena.name}"
            self._store = None
            if disk_cache_path is not None and not is_off(disk_cache_size, "disk_cache_size"):
                self._store = self._set_up_disk(disk_cache_size, disk_cache_path, codec, remote)
            self._lay_out()
        except BaseException:
            self._arena.close()
            raise

    def _set_up_disk(
        self, size: Size, folder: str | os.PathLike[str], codec: str, remote: str | None
    ) -> Store:
        """The bounded store. The first process to come decides the limit, and scans the store for samples."""
        if not os.path.exists(folder):
            refuse_full_disk(folder)
        state = self._arena.table("state")
        with Store(folder, codec=codec, memory=0, remote="") as store, self._arena.lock():
            if not state[_READY]:
                state[_DISK_LIMIT] = disk_bytes(size, "disk_cache_size", folder, store.stat().stored)
                _clear_dead_runs(store)
                if not self._keep:  # a killed run of this name may have had other data
                    store.delete_many(entry.name for entry in store.entries(self._prefix))
                self._note_stored(store)
                state[_READY] = 1
        # The store keeps the limit too. It evicts the least recently used entries: samples of earlier
        # versions.
        return Store(folder, codec=codec, memory=0, max_size=state[_DISK_LIMIT], remote=remote)

    def _note_stored(self, store: Store) -> None:
        """Note the samples that the store has from earlier runs."""
        table = DiskTable(self._arena)
        for entry in store.entries(self._prefix):
            number = entry.name.rpartition("/")[2].partition(".")[0]
            if number.isdigit() and int(number) < self._items and self.name_of(int(number)) == entry.name:
                table.set(int(number), max(1, entry.stored))

    def _lay_out(self) -> None:
        """Set up the parts over the arena, in every process that has a copy."""
        arena, state = self._arena, self._arena.table("state")
        policy = Policy(arena.table("uses"), state[_CLOCK:])
        self._use = policy.use
        tallies = arena.tallies()
        #: Records that neither level had.
        self.reads = tallies.tally(2 * TALLIES)
        self.memory: MemoryLevel | None = None
        self.disk: DiskLevel | None = None
        if arena.size:
            self.memory = MemoryLevel(arena, policy, tallies, 0)
        if self._store is not None:
            self.disk = DiskLevel(
                self._store,
                state[_DISK_LIMIT] // self._sharers,
                self.name_of,
                DiskTable(arena),
                policy,
                tallies,
                TALLIES,
            )
        self._largest = max(level.limit for level in (self.memory, self.disk) if level is not None)
        self._warned_too_large = False

    def __getstate__(self) -> dict[str, Any]:
        kept = ("_items", "_sharers", "_write_through", "_keep", "_arena", "_prefix", "_store")
        return {name: getattr(self, name) for name in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lay_out()

    @property
    def store(self) -> Store | None:
        """The store of the disk level."""
        return self._store

    def name_of(self, index: int) -> str:
        """The name of an index's entry in the store."""
        return record_name(self._prefix, index)

    def __contains__(self, index: int) -> bool:
        return any(level is not None and index in level for level in (self.memory, self.disk))

    def has_room(self, length: int) -> bool:
        """Whether a record of so many bytes would be kept without evicting another."""
        return any(level is not None and level.has_room(length) for level in (self.memory, self.disk))

    def get(self, index: int) -> bytearray | bytes | None:
        """The record of an index (bytearray from memory, bytes from disk), or None. Counts as a use."""
        self._use(index)
        if self.memory is not None:
            record = self.memory.get(index)
            if record is not None:
                return record
        if self.disk is not None:
            found = self.disk.get(index)
            if found is not None:
                if self.memory is not None:
                    self._offer_memory(index, found)
                return found
        self.reads.add()
        return None

    def reject(self, index: int, record: bytearray | bytes) -> None:
        """Forget a record that the caller of `get` cannot read: count a miss in place of the hit."""
        level = self.memory if isinstance(record, bytearray) else self.disk
        assert level is not None
        level.recount(len(record))
        self.reads.add()
        # A record from disk may have moved up on its way.
        for level in (self.memory, self.disk):
            if level is not None and index in level:
                level.remove(index)

    def put(self, index: int, record: Buffer) -> None:
        """Offer the record of an index to the levels. Warns if the record is larger than either level."""
        if len(record) > self._largest:
            self._warn_too_large(index, len(record))
            return
        kept = self.memory is not None and self._offer_memory(index, record)
        if self.disk is not None and (self._write_through or self.is_shared or not kept):
            self.disk.offer(index, record)

    @property
    def is_shared(self) -> bool:
        """Whether nodes share records over a remote. Records of one run alone are nobody else's."""
        return self._keep and self._store is not None and self._store.is_shared

    def bring(
        self, indices: list[int], accept: Callable[[int, bytes], bool], *, missed: bool
    ) -> dict[int, bytes]:
        """The records of those of some indices that other nodes have read.

        Args:
            indices: of records that no level has.
            accept: returns whether a record can be read; one that cannot is forgotten.
            missed: `get` was asked for them, and counted misses.
        """
        if not self.is_shared or self.disk is None:
            return {}
        found = {}
        for index, record in self.disk.bring(indices).items():
            if not accept(index, record):
                self.disk.remove(index)
                continue
            found[index] = record
            if self.memory is not None:
                self._offer_memory(index, record)
            if missed:
                self.disk.count_late(len(record))
                self.reads.add(-1)
        return found

    def share(self, indices: list[int]) -> None:
        """Offer the records of some indices to other nodes, as far as they are on disk."""
        if self.is_shared and self.disk is not None and self._store is not None:
            self._store.offer_shared([self.name_of(index) for index in indices if index in self.disk])

    def _warn_too_large(self, index: int, length: int) -> None:
        # Once a process, as for a level that cannot grow: a cache that keeps nothing must not be silent about
        # it.
        if not self._warned_too_large:
            self._warned_too_large = True
            warn(
                f"sample {index} takes {format_size(length)}, and a level holds {format_size(self._largest)} "
                "in all: it is not cached; raise memory_cache_size or disk_cache_size",
                RuntimeWarning,
            )

    def flush(self) -> None:
        """Write records that are only in memory to disk, as far as there is room."""
        if self.memory is None or self.disk is None:
            return
        for index in range(self._items):
            record = self.memory.peek(index)
            if record is not None and index not in self.disk:
                self.disk.offer(index, record)

    def _offer_memory(self, index: int, record: Buffer) -> bool:
        assert self.memory is not None
        kept, gone = self.memory.offer(index, record)
        if gone is not None and self.disk is not None and not self.disk.offer(*gone) and index in self.disk:
            # Records change places: the one that moved up no longer needs its copy on disk.
            self.disk.remove(index)
            self.disk.offer(*gone)
        return kept

    def close(self) -> None:
        """Leave the levels. With ``keep=False`` the last process to leave removes the samples from disk."""
        if self._arena.segment.closed:
            return
        self.memory = self.disk = None
        self._arena.close()
        if self._store is not None:
            if not self._keep and not is_alive(self._arena.name):
                self._store.delete_many(entry.name for entry in self._store.entries(self._prefix))
            self._store.close()


def _memory_bytes(size: Size, items: int) -> int:
    """Bytes of a segment with a memory level."""
    found = memory_bytes(size, "memory_cache_size")
    if found <= fixed_bytes(items):
        raise InvalidValueError(
            f"memory_cache_size={size!r} is below the {format_size(fixed_bytes(items))} that the tables for "
            f"{items} samples take, so no sample would fit; raise it, or take 0 for no memory level"
        )
    return found


def fixed_bytes(items: int) -> int:
    """Bytes of a memory level's tables, whatever the level holds."""
    return _layout(items, in_memory=True).data_at


def _layout(items: int, *, in_memory: bool) -> Layout:
    tables = [Table("state", "Q", _STATE), Table("uses", "B", items), *DiskTable.tables(items)]
    if not in_memory:
        return Layout(0, counters=2 * TALLIES + 1, tables=tables)
    return Layout(items, extents=items, counters=2 * TALLIES + 1, tables=tables)


def _clear_dead_runs(store: Store) -> None:
    """Remove samples that killed runs with ``keep=False`` left."""
    runs = {entry.name.partition("/")[0] for entry in store.entries() if entry.name.startswith(_RUN)}
    for run in runs:
        if not is_alive(run.removeprefix(_RUN)):
            store.delete_many(entry.name for entry in store.entries(run))
