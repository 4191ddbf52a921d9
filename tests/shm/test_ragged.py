"""Records of any length that are set, set again, and forgotten all at once."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest

from castore.shm.ragged import RaggedArena
from castore.shm.segments import Segment


@pytest.fixture
def arena() -> Iterator[RaggedArena]:
    segment = Segment(None, RaggedArena.needed(100, 10_000), {"kind": "test"}, reserve=False)
    yield RaggedArena(segment, 0, 100, 10_000)
    segment.close()


def _read(arena: RaggedArena, index: int) -> bytes | None:
    record = arena.read(index)
    return None if record is None else bytes(record)


def _put(arena: RaggedArena, index: int, record: bytes) -> bool:
    return arena.put(index, [record[:3], record[3:]], len(record))


def test_records_come_back_whole_in_any_order(arena: RaggedArena) -> None:
    records = {index: random.Random(index).randbytes(index) for index in range(100)}
    assert all(_put(arena, index, record) for index, record in records.items())
    for index in random.Random(0).sample(range(100), 100):
        assert _read(arena, index) == records[index]


def test_a_record_that_fits_takes_the_place_of_the_one_before(arena: RaggedArena) -> None:
    _put(arena, 5, b"long" * 100)
    used = arena.used
    for text in (b"", b"short", b"long" * 100):
        assert _put(arena, 5, text)
        assert _read(arena, 5) == text
    assert arena.used == used


def test_a_record_that_outgrows_its_place_moves_and_its_neighbours_stay(arena: RaggedArena) -> None:
    _put(arena, 0, b"a" * 64)
    _put(arena, 1, b"b" * 64)
    assert _put(arena, 0, b"A" * 65)
    assert (_read(arena, 0), _read(arena, 1)) == (b"A" * 65, b"b" * 64)


def test_what_does_not_fit_is_not_there_and_the_rest_stays(arena: RaggedArena) -> None:
    _put(arena, 0, b"a" * 6000)
    assert not _put(arena, 1, b"b" * 6000)
    assert _read(arena, 1) is None
    assert not _put(arena, 0, b"c" * 7000)
    assert _read(arena, 0) is None, "an old record must not stand for a new one"
    assert _put(arena, 2, b"d" * 2000)
    assert _read(arena, 2) == b"d" * 2000


def test_clear_forgets_all_and_gives_the_room_back(arena: RaggedArena) -> None:
    for round_ in range(20):
        for index in range(3):
            assert _put(arena, index, bytes([round_]) * 3000)
        arena.clear()
        assert [_read(arena, index) for index in range(3)] == [None] * 3
        assert (arena.used, arena.count) == (0, 0)


def test_an_index_whose_writer_died_halfway_takes_no_record_from_another(arena: RaggedArena) -> None:
    _put(arena, 0, b"first")
    # What `append` leaves if its process dies just before the counts go up: the place is given, the extent is not.
    _put(arena, 1, b"dies here")
    arena._words[0], arena._words[1] = 64, 1
    assert _put(arena, 2, b"takes the extent")
    assert _put(arena, 1, b"again")
    assert [_read(arena, index) for index in range(3)] == [b"first", b"again", b"takes the extent"]


class _Meanwhile:
    """The bytes of an arena; before they are copied, something happens, as another process might do it."""

    def __init__(self, data: memoryview, happens: Callable[[], object]) -> None:
        self._data = data
        self._happens = happens

    def __getitem__(self, place: slice) -> memoryview:
        self._happens()
        return self._data[place]


def test_a_reader_of_a_place_that_was_cleared_and_given_to_another_gets_nothing(
    arena: RaggedArena, monkeypatch: pytest.MonkeyPatch
) -> None:
    _put(arena, 0, b"a" * 64)
    _put(arena, 1, b"b" * 64)
    data = arena._data

    def clear_and_fill() -> None:
        monkeypatch.setattr(arena, "_data", data)
        arena.clear()
        assert _put(arena, 2, b"c" * 128)  # lies over the places of both

    monkeypatch.setattr(arena, "_data", _Meanwhile(data, clear_and_fill))
    assert _read(arena, 1) is None
    assert bytes(data[64:128]) == b"c" * 64, "its place was not written over: this tests nothing"
