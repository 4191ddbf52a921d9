"""Extents: records are whole or missing, whatever happens to their writers."""

from __future__ import annotations

import mmap
import os
import random
import signal
import time
from collections.abc import Callable, Iterator

import pytest

from castore.shm.arena import Arena, Layout
from castore.shm.extents import Extents
from castore.shm.segments import path_of
from tests.helpers import LONG
from tests.shm.forks import forked

ITEMS = 50


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena(None, Layout(ITEMS, extents=ITEMS), 64 * 100, {})
    yield made
    made.close()


@pytest.fixture
def extents(arena: Arena) -> Extents:
    return Extents(arena)


def held(extents: Extents, index: int) -> bytes | None:
    record = extents.read(index)
    return None if record is None else bytes(record)


def test_records_come_back_as_private_copies(arena: Arena, extents: Extents) -> None:
    with arena.lock():
        assert extents.append(3, [b"ab", b"", memoryview(b"cde")], 5)
    assert extents.holds(3)
    record = extents.read(3)
    assert record is not None
    record[0] = 0
    assert held(extents, 3) == b"abcde"
    assert extents.read(4) is None
    assert not extents.holds(4)


def test_an_arena_that_is_full_says_so_and_keeps_what_it_has(arena: Arena, extents: Extents) -> None:
    with arena.lock():
        taken = [index for index in range(ITEMS) if extents.append(index, [bytes([index]) * 200], 200)]
        assert len(taken) == 25  # 200 bytes take 256
        assert not extents.fits(257)
        assert not extents.append(40, [bytes(257)], 257)
        assert extents.count == 25
        assert extents.used == 25 * 256
    assert all(held(extents, index) == bytes([index]) * 200 for index in taken)


def test_a_replaced_record_is_gone_and_the_new_one_there(arena: Arena, extents: Extents) -> None:
    with arena.lock():
        extents.append(1, [b"one"], 3)
        extents.append(2, [b"two"], 3)
        extent = extents.extent(0)
        assert extent is not None
        assert extent == (1, 64)
        extents.replace(0, 7, [b"seven"], 5)
    assert extents.read(1) is None
    assert held(extents, 7) == b"seven"
    assert held(extents, 2) == b"two"


def test_a_removed_record_leaves_its_place_to_another(arena: Arena, extents: Extents) -> None:
    with arena.lock():
        extents.append(1, [b"one"], 3)
        extents.remove(1)
        extents.remove(9)
        assert extents.extent(0) is None
        assert extents.count == 1
        assert extents.capacity(0) == 64
        extents.replace(0, 5, [b"five"], 4)
    assert extents.read(1) is None
    assert held(extents, 5) == b"five"


def test_a_writer_killed_in_the_middle_leaves_no_half_record(arena: Arena, extents: Extents) -> None:
    with arena.lock():
        extents.append(1, [b"a" * 64], 64)

    class Killer(bytes):
        def __len__(self) -> int:
            os.kill(os.getpid(), signal.SIGKILL)
            return 0

    def die_writing() -> None:
        with arena.lock():
            extents.replace(0, 2, [b"b" * 32, Killer()], 64)

    assert os.WTERMSIG(forked(die_writing)) == signal.SIGKILL
    assert bytes(arena.data).count(b"b" * 32) == 1, "it was killed before it wrote: this tests nothing"
    assert extents.read(1) is None
    assert extents.read(2) is None
    with arena.lock():  # and its place is free
        assert extents.extent(0) is None
        extents.replace(0, 3, [b"c" * 64], 64)
    assert held(extents, 3) == b"c" * 64


@pytest.mark.parametrize("way", ["replace", "put"])
def test_readers_never_see_half_a_record_while_writers_replace_it(
    arena: Arena, extents: Extents, way: str
) -> None:
    size = 3000
    with arena.lock():
        extents.append(0, [bytes(size)], size)
        extents.append(1, [bytes(size)], size)
    over = mmap.mmap(-1, 1)  # which forked children share
    deadline = time.monotonic() + 240

    def write(seed: int) -> None:
        chance = random.Random(seed)
        while not over[0] and time.monotonic() < deadline:
            byte = bytes([chance.randrange(256)])
            with arena.lock():
                if way == "replace":
                    extents.replace(chance.randrange(2), chance.randrange(4), [byte * size], size)
                else:  # of changing length, so that records move together again and again
                    length = chance.randrange(1, 1000)
                    extents.put(chance.randrange(4), [byte * length], length)

    def read() -> None:
        seen: set[int] = set()
        end = time.monotonic() + (1.0 if LONG else 0.4)
        while time.monotonic() < end or len(seen) <= 10:
            assert time.monotonic() < deadline, "nothing was replaced: this tests nothing"
            for index in range(4):
                record = extents.read(index)
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


def test_pages_are_taken_as_they_are_needed() -> None:
    size = 256 << 20
    arena = Arena(None, Layout(10, extents=10), size, {})
    file = os.stat(path_of(arena.name))
    assert file.st_size > size
    assert file.st_blocks * 512 < 1 << 20
    with arena.lock():
        assert Extents(arena).append(0, [bytes(20 << 20)], 20 << 20)
    taken = os.stat(path_of(arena.name)).st_blocks * 512
    assert 20 << 20 <= taken < 60 << 20
    arena.close()


def test_part_of_a_record_is_taken_without_the_rest_and_counts_if_it_still_is(
    arena: Arena, extents: Extents
) -> None:
    with arena.lock():
        extents.append(3, [b"abcdef"], 6)
    record = extents.view(3)
    assert record is not None
    assert (record.slot, record.extent, bytes(record.data[2:4])) == (3, 0, b"cd")
    assert extents.is_unchanged(record)
    assert extents.view(4) is None
    changes: list[Callable[[], object]] = [
        lambda: extents.replace(0, 3, [b"abcdef"], 6),
        lambda: extents.remove(3),
    ]
    for change in changes:
        before = extents.view(3)
        with arena.lock():
            change()
        assert before is not None
        assert not extents.is_unchanged(before), "the same bytes again are another record all the same"
    assert extents.view(3) is None


def test_an_extent_that_was_made_larger_takes_longer_records_later(arena: Arena, extents: Extents) -> None:
    with arena.lock():
        assert extents.append(1, [b"short"], 5, capacity=500)
        assert (extents.capacity(0), extents.used) == (512, 512)
        extents.replace(0, 2, [bytes(500)], 500)
        assert extents.append(1, [b"next"], 4)
    assert (held(extents, 2), held(extents, 1)) == (bytes(500), b"next")


# --- set, set again, forget all
# ------------------------------------------------------------------------------


@pytest.fixture
def wide() -> Iterator[Extents]:
    """Extents with space for many small records, or few large ones."""
    arena = Arena(None, Layout(100, extents=100), 10_000, {"kind": "test"})
    yield Extents(arena)
    arena.close()


def put(extents: Extents, index: int, record: bytes) -> int:
    return extents.put(index, [record[:3], record[3:]], len(record))


def test_records_come_back_whole_in_any_order(wide: Extents) -> None:
    records = {index: random.Random(index).randbytes(index) for index in range(100)}
    assert all(put(wide, index, record) for index, record in records.items())
    for index in random.Random(0).sample(range(100), 100):
        assert held(wide, index) == records[index]


def test_a_record_that_fits_takes_the_place_of_the_one_before(wide: Extents) -> None:
    put(wide, 5, b"long" * 100)
    used = wide.used
    for text in (b"", b"short", b"long" * 100):
        assert put(wide, 5, text)
        assert held(wide, 5) == text
    assert wide.used == used


def test_a_record_that_outgrows_its_place_moves_and_its_neighbours_stay(wide: Extents) -> None:
    put(wide, 0, b"a" * 64)
    put(wide, 1, b"b" * 64)
    assert put(wide, 0, b"A" * 65)
    assert (held(wide, 0), held(wide, 1)) == (b"A" * 65, b"b" * 64)


def test_what_does_not_fit_is_not_there_and_the_rest_stays(wide: Extents) -> None:
    put(wide, 0, b"a" * 6000)
    assert not put(wide, 1, b"b" * 6000)
    assert held(wide, 1) is None
    assert not put(wide, 0, b"c" * 10_000)
    assert held(wide, 0) is None, "an old record must not stand for a new one"
    assert put(wide, 2, b"d" * 2000)
    assert held(wide, 2) == b"d" * 2000


def test_records_that_outgrow_their_places_are_kept_until_the_space_is_used(wide: Extents) -> None:
    """Space that they leave is used again; a put fails only where live records leave less than an eighth."""
    chance = random.Random(0)
    records: dict[int, bytes] = {}
    refused = 0
    for _ in range(4000):
        index = chance.randrange(20)
        record = chance.randbytes(chance.randrange(900))
        records.pop(index, None)
        if put(wide, index, record):
            records[index] = record
        else:
            refused += 1
            live = sum(-(-len(kept) // 64) * 64 for kept in records.values())
            assert live + 10_000 // 8 + len(record) + 64 > 9_984
        assert wide.used <= wide.size
    assert {index: held(wide, index) for index in range(20)} == {
        index: records.get(index) for index in range(20)
    }
    assert 0 < refused < 2000


def test_one_record_may_outgrow_its_place_more_often_than_there_are_extents() -> None:
    arena = Arena(None, Layout(2, extents=4), 10_000, {"kind": "test"})
    extents = Extents(arena)
    with arena.lock():
        assert put(extents, 1, b"neighbour")
        for length in range(64, 4800, 64):
            assert put(extents, 0, bytes([length % 251]) * length)
            assert held(extents, 0) == bytes([length % 251]) * length
        assert not put(extents, 0, bytes(10_000))
    assert (held(extents, 0), held(extents, 1)) == (None, b"neighbour")
    arena.close()


def test_clear_forgets_all_and_gives_the_room_back(wide: Extents) -> None:
    for round_ in range(20):
        for index in range(3):
            assert put(wide, index, bytes([round_]) * 3000)
        wide.clear()
        assert [held(wide, index) for index in range(3)] == [None] * 3
        assert (wide.used, wide.count) == (0, 0)


def test_an_index_whose_writer_died_halfway_takes_no_record_from_another(wide: Extents) -> None:
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
    wide: Extents, monkeypatch: pytest.MonkeyPatch
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


def test_a_reader_of_a_record_that_moves_meanwhile_gets_nothing(
    wide: Extents, monkeypatch: pytest.MonkeyPatch
) -> None:
    for index, byte in enumerate((b"a", b"b", b"c")):
        put(wide, index, byte * 3000)
    data = wide._data

    def move_together() -> None:
        monkeypatch.setattr(wide, "_data", data)
        put(wide, 0, b"short")
        assert put(wide, 3, b"d" * 3000), "it has space only if the others move"

    monkeypatch.setattr(wide, "_data", _Meanwhile(data, move_together))
    assert held(wide, 1) is None
    assert [held(wide, index) for index in range(4)] == [b"short", b"b" * 3000, b"c" * 3000, b"d" * 3000]
