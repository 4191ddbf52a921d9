"""Arenas and tallies: records are whole or missing, whatever happens to their writers; counts add up."""

from __future__ import annotations

import mmap
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from castore.errors import InvalidValueError
from castore.shm.arena import Arena
from castore.shm.segments import Segment
from castore.shm.tallies import Tallies

ITEMS = 50


@pytest.fixture
def segment() -> Iterator[Segment]:
    made = Segment(None, Arena.needed(ITEMS, 64 * 100), {}, reserve=False)
    yield made
    made.close()


@pytest.fixture
def arena(segment: Segment) -> Arena:
    return Arena(segment, 0, ITEMS, 64 * 100)


def held(arena: Arena, index: int) -> bytes | None:
    record = arena.read(index)
    return None if record is None else bytes(record)


def forked(task: Callable[[], object]) -> int:
    """Run ``task`` in a forked child; returns its wait status."""
    pid = os.fork()
    if not pid:
        status = 1
        try:
            task()
            status = 0
        finally:
            os._exit(status)
    return os.waitpid(pid, 0)[1]


def test_records_come_back_as_private_copies(segment: Segment, arena: Arena) -> None:
    with segment.lock():
        assert arena.append(3, [b"ab", b"", memoryview(b"cde")], 5)
    assert arena.holds(3)
    record = arena.read(3)
    assert record is not None
    record[0] = 0
    assert held(arena, 3) == b"abcde"
    assert arena.read(4) is None
    assert not arena.holds(4)


def test_an_arena_that_is_full_says_so_and_keeps_what_it_has(segment: Segment, arena: Arena) -> None:
    with segment.lock():
        taken = [index for index in range(ITEMS) if arena.append(index, [bytes([index]) * 200], 200)]
        assert len(taken) == 25  # 200 bytes take 256
        assert not arena.fits(257)
        assert not arena.append(40, [bytes(257)], 257)
        assert arena.count == 25
        assert arena.used == 25 * 256
    assert all(held(arena, index) == bytes([index]) * 200 for index in taken)


def test_a_replaced_record_is_gone_and_the_new_one_there(segment: Segment, arena: Arena) -> None:
    with segment.lock():
        arena.append(1, [b"one"], 3)
        arena.append(2, [b"two"], 3)
        extent = arena.extent(0)
        assert extent is not None
        assert extent == (1, 64)
        arena.replace(0, 7, [b"seven"], 5)
    assert arena.read(1) is None
    assert held(arena, 7) == b"seven"
    assert held(arena, 2) == b"two"


def test_a_removed_record_leaves_its_place_to_another(segment: Segment, arena: Arena) -> None:
    with segment.lock():
        arena.append(1, [b"one"], 3)
        arena.remove(1)
        arena.remove(9)
        assert arena.extent(0) is None
        assert arena.count == 1
        assert arena.capacity(0) == 64
        arena.replace(0, 5, [b"five"], 4)
    assert arena.read(1) is None
    assert held(arena, 5) == b"five"


def test_a_writer_killed_in_the_middle_leaves_no_half_record(segment: Segment, arena: Arena) -> None:
    with segment.lock():
        arena.append(1, [b"a" * 64], 64)

    class Killer(bytes):
        def __len__(self) -> int:
            os.kill(os.getpid(), signal.SIGKILL)
            return 0

    def die_writing() -> None:
        with segment.lock():
            arena.replace(0, 2, [b"b" * 32, Killer()], 64)

    assert os.WTERMSIG(forked(die_writing)) == signal.SIGKILL
    assert bytes(segment.buffer).count(b"b" * 32) == 1, "it was killed before it wrote: this tests nothing"
    assert arena.read(1) is None
    assert arena.read(2) is None
    with segment.lock():  # and its place is free
        assert arena.extent(0) is None
        arena.replace(0, 3, [b"c" * 64], 64)
    assert held(arena, 3) == b"c" * 64


def test_readers_never_see_half_a_record_while_writers_replace_it(segment: Segment, arena: Arena) -> None:
    size = 3000
    with segment.lock():
        arena.append(0, [bytes(size)], size)
        arena.append(1, [bytes(size)], size)
    over = mmap.mmap(-1, 1)  # which forked children share
    deadline = time.monotonic() + 60

    def write(seed: int) -> None:
        chance = random.Random(seed)
        while not over[0] and time.monotonic() < deadline:
            with segment.lock():
                arena.replace(
                    chance.randrange(2), chance.randrange(4), [bytes([chance.randrange(256)]) * size], size
                )

    def read() -> None:
        seen: set[int] = set()
        end = time.monotonic() + 1.0
        while time.monotonic() < end or len(seen) <= 10:
            assert time.monotonic() < deadline, "nothing was replaced: this tests nothing"
            for index in range(4):
                record = arena.read(index)
                if record is not None:
                    assert len(set(record)) == 1, "a reader saw two writers' bytes"
                    seen.add(record[0])

    pids = []
    for number in range(4):
        pid = os.fork()
        if not pid:
            status = 1
            try:
                write(number) if number < 2 else read()
                status = 0
            finally:
                os._exit(status)
        pids.append(pid)
    readers = [os.waitpid(pid, 0)[1] for pid in pids[2:]]
    over[0] = 1
    writers = [os.waitpid(pid, 0)[1] for pid in pids[:2]]
    assert (readers, writers) == ([0, 0], [0, 0])


def test_an_arena_lies_on_a_boundary(segment: Segment) -> None:
    with pytest.raises(InvalidValueError, match="multiple of 64"):
        Arena(segment, 8, 1, 64)


def test_pages_are_taken_as_they_are_needed() -> None:
    size = 256 << 20
    segment = Segment(None, Arena.needed(10, size), {}, reserve=False)
    arena = Arena(segment, 0, 10, size)
    file = os.stat(f"/dev/shm/castore-{os.geteuid()}-{segment.name}")
    assert file.st_size > size
    assert file.st_blocks * 512 < 1 << 20
    with segment.lock():
        assert arena.append(0, [bytes(20 << 20)], 20 << 20)
    taken = os.stat(f"/dev/shm/castore-{os.geteuid()}-{segment.name}").st_blocks * 512
    assert 20 << 20 <= taken < 60 << 20
    segment.close()


def test_part_of_a_record_is_taken_without_the_rest_and_counts_if_it_still_is(
    segment: Segment, arena: Arena
) -> None:
    with segment.lock():
        arena.append(3, [b"abcdef"], 6)
    record = arena.look(3)
    assert record is not None
    assert (record.owner, record.number, bytes(record.data[2:4])) == (3, 0, b"cd")
    assert arena.is_still(record)
    assert arena.look(4) is None
    changes: list[Callable[[], None]] = [
        lambda: arena.replace(0, 3, [b"abcdef"], 6),
        lambda: arena.remove(3),
    ]
    for change in changes:
        before = arena.look(3)
        with segment.lock():
            change()
        assert before is not None
        assert not arena.is_still(before), "the same bytes again are another record all the same"
    assert arena.look(3) is None


def test_an_extent_that_was_made_larger_takes_longer_records_later(segment: Segment, arena: Arena) -> None:
    with segment.lock():
        assert arena.append(1, [b"short"], 5, capacity=500)
        assert (arena.capacity(0), arena.used) == (512, 512)
        arena.replace(0, 2, [bytes(500)], 500)
        assert arena.append(1, [b"next"], 4)
    assert (held(arena, 2), held(arena, 1)) == (bytes(500), b"next")


# --- set, set again, forget all
# ------------------------------------------------------------------------------


@pytest.fixture
def wide() -> Iterator[Arena]:
    """An arena with room for many small records, or few large ones."""
    segment = Segment(None, Arena.needed(100, 10_000), {"kind": "test"}, reserve=False)
    yield Arena(segment, 0, 100, 10_000)
    segment.close()


def put(arena: Arena, index: int, record: bytes) -> bool:
    return arena.put(index, [record[:3], record[3:]], len(record))


def test_records_come_back_whole_in_any_order(wide: Arena) -> None:
    records = {index: random.Random(index).randbytes(index) for index in range(100)}
    assert all(put(wide, index, record) for index, record in records.items())
    for index in random.Random(0).sample(range(100), 100):
        assert held(wide, index) == records[index]


def test_a_record_that_fits_takes_the_place_of_the_one_before(wide: Arena) -> None:
    put(wide, 5, b"long" * 100)
    used = wide.used
    for text in (b"", b"short", b"long" * 100):
        assert put(wide, 5, text)
        assert held(wide, 5) == text
    assert wide.used == used


def test_a_record_that_outgrows_its_place_moves_and_its_neighbours_stay(wide: Arena) -> None:
    put(wide, 0, b"a" * 64)
    put(wide, 1, b"b" * 64)
    assert put(wide, 0, b"A" * 65)
    assert (held(wide, 0), held(wide, 1)) == (b"A" * 65, b"b" * 64)


def test_what_does_not_fit_is_not_there_and_the_rest_stays(wide: Arena) -> None:
    put(wide, 0, b"a" * 6000)
    assert not put(wide, 1, b"b" * 6000)
    assert held(wide, 1) is None
    assert not put(wide, 0, b"c" * 7000)
    assert held(wide, 0) is None, "an old record must not stand for a new one"
    assert put(wide, 2, b"d" * 2000)
    assert held(wide, 2) == b"d" * 2000


def test_clear_forgets_all_and_gives_the_room_back(wide: Arena) -> None:
    for round_ in range(20):
        for index in range(3):
            assert put(wide, index, bytes([round_]) * 3000)
        wide.clear()
        assert [held(wide, index) for index in range(3)] == [None] * 3
        assert (wide.used, wide.count) == (0, 0)


def test_an_index_whose_writer_died_halfway_takes_no_record_from_another(wide: Arena) -> None:
    put(wide, 0, b"first")
    put(wide, 1, b"second")
    for index in (1, 2):  # in an extent that it has, in a new one
        with pytest.raises(ZeroDivisionError):  # like a kill: nothing cleans up
            wide.put(index, [b"half", Dying()], 8)
        assert held(wide, index) is None
    assert all(put(wide, index, b"again") for index in (3, 2, 1))
    assert [held(wide, index) for index in range(4)] == [b"first", b"again", b"again", b"again"]


class Dying(bytes):
    """Bytes whose writer dies before it has written them."""

    def __len__(self) -> int:
        return 1 // 0


class _Meanwhile:
    """The bytes of an arena; a callback runs before they are copied, as another process might."""

    def __init__(self, data: memoryview, happens: Callable[[], object]) -> None:
        self._data = data
        self._happens = happens

    def __getitem__(self, place: slice) -> memoryview:
        self._happens()
        return self._data[place]


def test_a_reader_of_a_place_that_was_cleared_and_given_to_another_gets_nothing(
    wide: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(wide, 0, b"a" * 64)
    put(wide, 1, b"b" * 64)
    data = wide._data

    def clear_and_fill() -> None:
        monkeypatch.setattr(wide, "_data", data)
        wide.clear()
        assert put(wide, 2, b"c" * 128)  # covers the places of both

    monkeypatch.setattr(wide, "_data", _Meanwhile(data, clear_and_fill))
    assert held(wide, 1) is None
    assert bytes(data[64:128]) == b"c" * 64, "its place was not written over: this tests nothing"


# --- tallies ------------------------------------------------------------------------------------------------


def test_tallies_add_up_over_processes_also_of_the_dead() -> None:
    segment = Segment(None, Tallies.needed(2), {})
    tallies = Tallies(segment, 0, 2)
    hits, misses = tallies.tally(0), tallies.tally(1)
    hits.add()

    def count() -> None:
        for _ in range(100):
            hits.add()
        misses.add(7)
        os.kill(os.getpid(), signal.SIGKILL)

    for _ in range(20):
        assert os.WTERMSIG(forked(count)) == signal.SIGKILL
    assert (hits.value, misses.value) == (2001, 140)
    segment.close()


def test_tallies_of_more_processes_than_there_are_rows() -> None:
    # In a small process of its own: forking this one, which has torch, takes several times as long.
    script = """
import os
from castore.shm.segments import Segment
from castore.shm.tallies import Tallies
tallies = Tallies(Segment(None, Tallies.needed(1), {}), 0, 1)
for _ in range(1100):
    if not os.fork():
        tallies.add(0)
        os._exit(0)
    os.wait()
print(tallies.total(0))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100)
    assert (done.stdout, done.stderr) == ("1100\n", "")


def test_tallies_add_up_over_threads() -> None:
    segment = Segment(None, Tallies.needed(1), {})
    tallies = Tallies(segment, 0, 1)

    def count() -> None:
        for _ in range(5000):
            tallies.add(0)

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert tallies.total(0) == 20_000
    segment.close()
