"""A file that is read in order has the next frames decoded ahead; one that is read here and there has not."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest

from castore import CorruptError, Store
from castore.objects.codecs import FRAME_SIZE
from castore.read.blob_file import AHEAD_FRAMES
from tests.helpers import flip, in_processes, mixed, payload

DATA = mixed(40 * FRAME_SIZE + 77)


def held(file: Any) -> int:
    """How many decoded frames a file keeps."""
    cache = file.raw._reader._cache
    return 0 if cache is None else len(cache)


def until_held(file: Any, count: int) -> None:
    """Wait until so many decoded frames are there."""
    while held(file) < count:
        time.sleep(0.001)


@pytest.mark.parametrize("codec", ["zstd", "lz4", "gzip"])
def test_who_reads_in_order_finds_the_next_frames_decoded(store: Store, codec: str) -> None:
    store.put("a", DATA, codec=codec)
    with store.open("a") as file:
        assert file.read(2 * FRAME_SIZE) == DATA[: 2 * FRAME_SIZE]
        assert held(file) == 0
        file.read(FRAME_SIZE)
        until_held(file, AHEAD_FRAMES)
        assert file.read(37 * FRAME_SIZE) == DATA[3 * FRAME_SIZE : 40 * FRAME_SIZE]
        assert file.read() == DATA[40 * FRAME_SIZE :]
        file.seek(0)
        assert file.read() == DATA


@pytest.mark.parametrize("step", [1, 4_096, FRAME_SIZE - 1, FRAME_SIZE + 1, 5 * FRAME_SIZE])
def test_what_is_read_in_order_is_the_same_whatever_the_step(store: Store, step: int) -> None:
    data = DATA if step > 1 else DATA[: 4 * FRAME_SIZE + 5]
    store.put("a", data)
    with store.open("a") as file:
        assert b"".join(iter(lambda: file.read(step), b"")) == data


def test_who_reads_here_and_there_pays_for_nothing_else(store: Store) -> None:
    store.put("a", DATA)
    chance = random.Random(1)
    with store.open("a") as file:
        for _ in range(200):
            start = chance.randrange(len(DATA) // 3) * 3
            file.seek(start)
            assert file.read(1_000) == DATA[start : start + 1_000]
        if held(file):  # three frames in order by chance
            assert held(file) <= 2 * AHEAD_FRAMES


@pytest.mark.parametrize("codec", ["none", "lz4", "zstd"])
def test_damage_ahead_is_told_by_the_read_that_comes_to_it(store: Store, codec: str) -> None:
    store.put("a", DATA, codec=codec)
    path, offset, length = payload(store, "a")
    flip(path, offset + length * 3 // 4)
    read: list[bytes] = []
    with store.open("a") as file, pytest.raises(CorruptError):
        read.extend(iter(lambda: file.read(FRAME_SIZE), b""))
    assert len(read) > 20
    assert DATA.startswith(b"".join(read))


def test_a_file_is_closed_and_forked_while_frames_are_read_ahead(store: Store) -> None:
    store.put("a", DATA)
    for _ in range(20):
        with store.open("a") as file:
            file.read(4 * FRAME_SIZE)
    with store.open("a") as file:
        file.read(4 * FRAME_SIZE)

        def read_on(number: int) -> bool:
            return file.read() == DATA[4 * FRAME_SIZE :]

        assert in_processes(3, read_on) == [True] * 3
        assert file.read() == DATA[4 * FRAME_SIZE :]
