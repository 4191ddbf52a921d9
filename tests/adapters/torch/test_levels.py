"""Two levels of records: what fits stays, what is used more gets in, and nothing comes back changed."""

from __future__ import annotations

import os
import pickle
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from castore import Store
from castore.adapters.torch.levels import DiskTable
from castore.adapters.torch.tiers import TwoLevels
from castore.errors import SegmentError
from castore.shm.arena import Arena, Layout
from tests.adapters.torch.records import (
    ITEMS,
    LENGTH,
    SPACE,
    open_levels,
    shuffled,
    visit,
)
from tests.helpers import in_processes, noise


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "levels"


@pytest.fixture
def half() -> Iterator[TwoLevels]:
    levels = open_levels(ITEMS // 2, 0, None)
    yield levels
    levels.close()


def test_half_the_memory_hits_half_of_every_shuffled_epoch(half: TwoLevels) -> None:
    assert [visit(half, shuffled(epoch)) for epoch in range(8)] == [ITEMS] + [ITEMS // 2] * 7
    assert half.memory is not None
    stats = half.memory.stats()
    assert (stats.hits, stats.misses, stats.samples) == (7 * 50, ITEMS + 7 * 50, 50)
    assert stats.bytes_read == 7 * 50 * LENGTH
    assert stats.hit_rate == 350 / 800
    assert stats.bytes_held <= stats.limit
    assert half.reads.value == ITEMS + 7 * 50


def test_half_the_memory_hits_half_of_every_sequential_epoch(half: TwoLevels) -> None:
    assert [visit(half, list(range(ITEMS))) for _ in range(8)] == [ITEMS] + [ITEMS // 2] * 7


def test_what_is_used_more_takes_the_place_of_what_is_used_less(half: TwoLevels) -> None:
    visit(half, list(range(ITEMS)))
    late = [index for index in range(ITEMS) if index not in half]
    favourites = late[:20]
    for _ in range(10):
        visit(half, favourites)
    assert all(index in half for index in favourites)
    assert visit(half, favourites) == 0


def test_what_memory_does_not_keep_is_kept_on_disk(folder: Path) -> None:
    levels = open_levels(30, 40 * SPACE, folder)
    assert [visit(levels, shuffled(epoch)) for epoch in range(4)] == [100, 30, 30, 30]
    assert levels.memory is not None
    assert levels.disk is not None
    disk = levels.disk.stats()
    assert (levels.memory.stats().samples, disk.samples) == (30, 40)
    assert disk.bytes_held <= disk.limit == 40 * SPACE
    assert levels.store is not None
    assert levels.store.stat().stored <= 40 * SPACE
    assert levels.memory.hits.value + levels.disk.hits.value + levels.reads.value == 400
    levels.close()


def test_what_leaves_memory_is_written_to_disk(folder: Path) -> None:
    levels = open_levels(10, 90 * SPACE, folder)
    visit(levels, list(range(ITEMS)))
    assert levels.memory is not None
    assert levels.disk is not None
    assert not any(index in levels.disk for index in range(10))
    for _ in range(5):
        visit(levels, [60, 61])
    gone = [index for index in range(10) if index not in levels.memory]
    assert len(gone) == 2
    assert all(index in levels.disk for index in gone)
    assert visit(levels, shuffled(1)) == 0
    levels.close()


def test_records_of_all_sizes_come_back_and_the_limits_hold(folder: Path) -> None:
    """In no order: what leaves memory is larger or smaller than what takes its place."""
    chance = random.Random(5)
    records = [noise(chance.randrange(20, 5000), index) for index in range(ITEMS)]
    levels = open_levels(60, 60 * SPACE, folder, codec="none")
    for _ in range(3000):
        index = min(chance.randrange(ITEMS), chance.randrange(ITEMS))
        found = levels.get(index)
        if found is None:
            levels.put(index, records[index])
        else:
            assert bytes(found) == records[index]
    assert levels.memory is not None
    assert levels.disk is not None
    memory, disk = levels.memory.stats(), levels.disk.stats()
    assert memory.hits > 500
    assert disk.hits > 500
    assert memory.hits + disk.hits + levels.reads.value == 3000
    assert memory.bytes_held <= memory.limit
    assert disk.bytes_held <= disk.limit
    levels.close()


def test_write_through_puts_everything_on_disk_at_once(folder: Path) -> None:
    levels = open_levels(ITEMS, ITEMS * LENGTH * 2, folder, write_through=True)
    visit(levels, list(range(20)))
    assert levels.disk is not None
    assert levels.disk.stats().samples == 20
    levels.close()
    again = open_levels(ITEMS, ITEMS * LENGTH * 2, folder)
    assert visit(again, list(range(20))) == 0
    again.close()


def test_flush_writes_what_is_only_in_memory(folder: Path) -> None:
    with_memory = open_levels(ITEMS, ITEMS * LENGTH * 2, folder)
    visit(with_memory, list(range(20)))
    with_memory.flush()
    with_memory.close()
    later = open_levels(0, ITEMS * LENGTH * 2, folder)
    assert visit(later, list(range(30))) == 10
    later.close()


def test_samples_of_another_key_are_not_found_and_make_room(folder: Path) -> None:
    limit = 50 * SPACE
    old = open_levels(0, limit, folder, key="old")
    visit(old, list(range(ITEMS)))
    old.close()
    new = open_levels(0, limit, folder, key="new")
    assert visit(new, list(range(ITEMS))) == ITEMS
    visit(new, list(range(ITEMS)))
    assert new.store is not None
    assert new.store.stat().stored <= limit
    visit(new, list(range(ITEMS)))
    assert visit(new, list(range(ITEMS))) == 50
    new.close()


def test_without_keep_a_run_takes_its_samples_along(folder: Path) -> None:
    levels = open_levels(0, "1MB", folder, keep=False)
    visit(levels, list(range(10)))
    assert levels.store is not None
    assert len(list(levels.store.entries())) == 10
    levels.close()
    assert not list(Store(folder).entries())


def test_without_keep_a_killed_runs_samples_are_removed_by_the_next(folder: Path) -> None:
    pid = os.fork()
    if not pid:
        visit(open_levels(0, "1MB", folder, keep=False), list(range(10)))
        os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL
    assert len(list(Store(folder).entries())) == 10
    mine = open_levels(0, "1MB", folder, keep=False)
    assert not list(Store(folder).entries())
    mine.close()


def test_a_damaged_record_on_disk_is_read_anew_and_healed(folder: Path) -> None:
    levels = open_levels(0, "1MB", folder)
    visit(levels, [5])
    assert levels.store is not None
    pack = next((folder / "objects" / "packs").rglob("*.pack"))
    data = bytearray(pack.read_bytes())
    data[-LENGTH // 2] ^= 1
    pack.write_bytes(data)
    assert levels.get(5) is None
    assert 5 not in levels
    assert visit(levels, [5, 5]) == 1
    levels.close()


def test_an_entry_that_gc_took_is_a_miss(folder: Path) -> None:
    levels = open_levels(0, "1MB", folder)
    visit(levels, [1, 2, 3])
    assert levels.store is not None
    levels.store.gc(max_size=0)
    assert visit(levels, [1, 2, 3]) == 3
    levels.close()


def test_processes_share_levels_by_name_and_their_counts_add_up(folder: Path) -> None:
    name = f"test-levels-{os.getpid()}"
    holder = open_levels(40, 40 * SPACE, folder, name=name)

    def run(number: int) -> int:
        levels = open_levels(40, 40 * SPACE, folder, name=name)
        return sum(visit(levels, shuffled(10 * number + epoch)) for epoch in range(5))

    reads = in_processes(4, run)
    assert holder.memory is not None
    assert holder.disk is not None
    hits = holder.memory.hits.value + holder.disk.hits.value
    assert hits + sum(reads) == 4 * 5 * ITEMS
    assert holder.reads.value == sum(reads)
    assert holder.memory.stats().samples == 40
    # Four at once may read a sample that none of them has yet; later epochs miss the 20 that fit nowhere.
    assert 4 * 5 * 20 <= sum(reads) <= 4 * ITEMS + 4 * 4 * 30
    # The other three may each have found the same last room on the disk, where the store's budget decides.
    assert sum(index in holder for index in range(ITEMS)) <= 80 + 3
    holder.close()


def test_another_size_under_the_same_name_is_an_error() -> None:
    name = f"test-levels-{os.getpid()}"
    levels = open_levels(10, 0, None, name=name)
    with pytest.raises(SegmentError, match="memory_cache_size="):
        open_levels(11, 0, None, name=name)
    levels.close()


def test_a_pickle_holds_no_records_and_works_elsewhere(folder: Path) -> None:
    levels = open_levels(50, 50 * SPACE, folder)
    visit(levels, list(range(ITEMS)))
    pickled = pickle.dumps(levels)
    assert len(pickled) < 2000
    again = pickle.loads(pickled)
    assert visit(again, list(range(ITEMS))) == 0
    again.close()
    levels.close()


def test_a_table_of_disk_counts_what_it_holds() -> None:
    arena = Arena(None, Layout(0, tables=DiskTable.tables(5)), 0, {})
    table = DiskTable(arena)
    table.set(2, 100)
    table.set(3, 1)
    table.set(2, 10)
    assert (table.count, table.used) == (2, 128)
    table.set(2, 0)
    assert (table.count, table.used, table.holds(2), table.holds(3)) == (1, 64, False, True)
    arena.close()
