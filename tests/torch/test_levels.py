"""Two levels of records: what fits stays, what is used more gets in, and nothing comes back changed."""

from __future__ import annotations

import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from castore import Store
from castore.adapters.torch.levels import DiskTable
from castore.adapters.torch.sizing import Size, disk_bytes, is_off, memory_bytes
from castore.adapters.torch.twolevels import TwoLevels, fixed_bytes
from castore.errors import InvalidValueError, SegmentError, StoreError
from castore.shm.room import shm_free
from tests.helpers import in_processes, noise

ITEMS = 100
LENGTH = 1000
SPACE = 1024  # what a record of LENGTH takes in memory


def record(index: int) -> bytes:
    return noise(LENGTH, index)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "levels"


def open_levels(
    memory: int, disk: Size, folder: Path | None, *, items: int = ITEMS, **options: Any
) -> TwoLevels:
    """Levels that hold ``memory`` records in RAM."""
    size = fixed_bytes(items) + memory * SPACE if memory else 0
    defaults = {"name": None, "key": "data", "write_through": False, "keep": True, "codec": "auto"}
    return TwoLevels(items, size, disk, folder, **{**defaults, **options})


def visit(levels: TwoLevels, indices: list[int]) -> int:
    """Use these records as a dataset would; how many had to be read."""
    reads = 0
    for index in indices:
        found = levels.get(index)
        if found is None:
            reads += 1
            levels.put(index, record(index))
        else:
            assert bytes(found) == record(index)
    return reads


def shuffled(seed: int, items: int = ITEMS) -> list[int]:
    return random.Random(seed).sample(range(items), items)


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
    assert sum(index in holder for index in range(ITEMS)) <= 80
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


SMALL_DISK = """
import sys, warnings
from castore.adapters.torch.twolevels import TwoLevels
from castore.errors import FullError
from tests.helpers import noise
options = dict(name=None, key="data", write_through=False, keep=True, codec="auto")
import os
with open(sys.argv[1] + "/hog", "wb") as hog:
    left = os.statvfs(sys.argv[1])
    os.posix_fallocate(hog.fileno(), 0, (left.f_bavail - 2) * left.f_frsize)
try:
    TwoLevels(100, 0, "1GB", sys.argv[1] + "/a", **options)
except FullError as error:
    print(error)
os.unlink(sys.argv[1] + "/hog")
levels = TwoLevels(4000, 0, "6MB", sys.argv[1] + "/b", **options)
with open(sys.argv[1] + "/hog", "wb", buffering=0) as hog:  # somebody else takes the space that was free
    hog.truncate(0)
    left = os.statvfs(sys.argv[1]); os.posix_fallocate(hog.fileno(), 0, left.f_bavail * left.f_frsize - (1 << 20))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for epoch in range(2):
        for index in range(4000):
            found = levels.get(index)
            if found is None:
                levels.put(index, noise(1000, index))
            else:
                assert found == noise(1000, index)
print(len(caught), caught[0].message)
print(levels.disk.hits.value)
os.unlink(sys.argv[1] + "/hog")
for index in range(4000):
    if levels.get(index) is None:
        levels.put(index, noise(1000, index))
print(levels.disk.stats().samples)
"""


def test_a_full_disk_is_an_error_at_the_start_and_a_warning_later(tmp_path: Path) -> None:
    place = tmp_path / "small"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24M", "tmpfs", place], check=True)
    try:
        done = subprocess.run(
            [sys.executable, "-c", SMALL_DISK, place], capture_output=True, text=True, timeout=100
        )
    finally:
        subprocess.run(["umount", place], check=True)
    assert done.returncode == 0, done.stderr
    refused, warned, hits, samples = done.stdout.splitlines()
    assert refused.startswith("the disk of ")
    assert refused.endswith("free: make room")
    assert warned.startswith("1 no more samples are cached for now: "), "one warning, not thousands"
    assert "full" in warned
    assert int(hits) > 50
    assert int(samples) > 3000, "it goes on once there is space again"


def test_a_read_only_folder_is_an_error(tmp_path: Path) -> None:
    place = tmp_path / "fixed"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", place], check=True)
    try:
        with pytest.raises(StoreError, match=r"[Rr]ead-only"):
            open_levels(0, "1MB", place / "store")
    finally:
        subprocess.run(["umount", place], check=True)


def test_sizes_are_bytes_texts_or_fractions_of_what_is_free(tmp_path: Path) -> None:
    assert memory_bytes(10_000, "m") == 10_000
    assert memory_bytes("1 MiB", "m") == 1 << 20
    assert 0 < memory_bytes(0.01, "m") <= 0.011 * shm_free()
    free = shutil.disk_usage(tmp_path).free
    assert abs(disk_bytes(0.5, "d", tmp_path / "not" / "yet") - free / 2) < free / 20
    assert disk_bytes(1.0, "d", tmp_path, held=1000) > free * 0.9
    assert is_off(0, "m")
    assert is_off("0", "m")
    assert is_off(0.0, "m")
    assert not is_off(0.5, "m")


@pytest.mark.parametrize("bad", [-1, 1.5, -0.5, "many", float("nan"), True])
def test_sizes_that_make_no_sense_say_which_argument(bad: Any) -> None:
    with pytest.raises(InvalidValueError, match="memory_cache_size"):
        memory_bytes(bad, "memory_cache_size")


def test_limits_beyond_what_there_is_are_cut_with_a_word(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    levels = TwoLevels(
        10, "900TB", "900PB", folder, name=None, key="k", write_through=False, keep=True, codec="auto"
    )
    assert levels.memory is not None
    assert levels.disk is not None
    assert levels.memory.stats().limit <= shm_free()
    assert levels.disk.stats().limit <= shutil.disk_usage(folder).free * 1.1
    assert len(caplog.records) == 2
    assert "memory_cache_size='900TB' is more than /dev/shm (or the machine's memory) has free" in caplog.text
    assert "disk_cache_size='900PB' is more than the disk of" in caplog.text
    assert visit(levels, list(range(10))) == 10
    assert visit(levels, list(range(10))) == 0
    levels.close()


def test_a_table_of_disk_counts_what_it_holds() -> None:
    from castore.shm.segments import Segment

    segment = Segment(None, DiskTable.needed(5), {})
    table = DiskTable(segment, 0, 5)
    table.set(2, 100)
    table.set(3, 1)
    table.set(2, 10)
    assert (table.count, table.used) == (2, 128)
    table.set(2, 0)
    assert (table.count, table.used, table.holds(2), table.holds(3)) == (1, 64, False, True)
    segment.close()


def test_memory_that_cannot_grow_warns_once_and_goes_on() -> None:
    script = """
import warnings
from castore.adapters.torch.twolevels import TwoLevels
levels = TwoLevels(1000, "60MB", 0, None, name=None, key="", write_through=False, keep=True, codec="auto")
import os
hog = os.open("/dev/shm/hog", os.O_RDWR | os.O_CREAT)
left = os.statvfs("/dev/shm"); os.posix_fallocate(hog, 0, left.f_bavail * left.f_frsize - (1 << 20))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for index in range(1000):
        assert levels.get(index) is None
        levels.put(index, bytes(60_000))
print(len(caught), caught[0].message)
"""
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=66M tmpfs /dev/shm && exec "$0" -c "$1"', sys.executable, script],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("1 no more samples are cached for now: /dev/shm has ")
