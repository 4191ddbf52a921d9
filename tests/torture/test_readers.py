"""gc, readers and writers do not wait for one another, and none breaks another, not even one that hangs."""

from __future__ import annotations

import contextlib
import io
import mmap
import random
import sqlite3
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO

import numpy as np
import pytest

import castore_fuse
from castore import Store
from castore.index.transaction import Write
from castore.objects.codecs import FRAME_SIZE
from tests.helpers import agrees_with_disk, in_processes, mixed, noise, object_files, text
from tests.mount.conftest import finish, forget_pages, program, until
from tests.torture.kills import after, pause, paused
from tests.warm import WarmPython

KINDS = {
    "zstd": (mixed(5 * FRAME_SIZE + 5), "zstd"),
    "lz4": (mixed(3 * FRAME_SIZE, 1), "lz4"),
    "gzip": (text(2 * FRAME_SIZE + 9, 2), "gzip"),
    "raw": (noise(4 * FRAME_SIZE + 1, 3), "none"),
    "packed": (text(3000, 4), "zstd"),
    "packed raw": (noise(3000, 5), "none"),
}
DATA = {name: data for name, (data, _) in KINDS.items()}
#: Reads bytes ``[start, end)`` of something that is held open.
Range = Callable[[int, int], bytes]


def put_kinds(store: Store) -> None:
    for name, (data, codec) in KINDS.items():
        store.put(name, data, codec=codec)


def whole(file: IO[bytes]) -> Range:
    def read(start: int, end: int) -> bytes:
        file.seek(start)
        return file.read(end - start)

    return read


def uncached(file: io.FileIO) -> Range:
    """Reads that the kernel cannot answer from its cache."""

    def read(start: int, end: int) -> bytes:
        forget_pages(file.fileno())
        file.seek(start)
        return file.read(end - start)

    return read


def mapped(over: mmap.mmap) -> Range:
    return lambda start, end: over[start:end]


@contextlib.contextmanager
def held(store: Store, root: Path) -> Iterator[list[tuple[str, Range]]]:
    """Every kind of object, open in each way: a file of the store, a file of the mount, a map of that."""
    with contextlib.ExitStack() as stack:
        ways: list[tuple[str, Range]] = []
        for name in KINDS:
            opened = stack.enter_context(store.open(name))
            file = stack.enter_context((root / name).open("rb", buffering=0))
            over = stack.enter_context(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
            ways += [(name, whole(opened)), (name, uncached(file)), (name, mapped(over))]
        yield ways


def reads_on_while_gc_removes_everything(
    store: Store, tmp_path: Path, warm: WarmPython, seconds: float, figure: Callable[[str], None]
) -> None:
    """Hold everything open in every way, let gc remove all of it, and assert that reads continue."""
    pytest.importorskip("torch")
    tokens = np.random.default_rng(0).integers(0, 50_000, 600_000, dtype=np.int32)
    np.save(tmp_path / "tokens.npy", tokens)
    put_kinds(store)
    store.put_file("tokens.npy", tmp_path / "tokens.npy")
    chance = random.Random(0)

    def collect_until(end: float) -> int:
        removed = 0
        while not removed or time.monotonic() < end:  # a busy machine may begin behind the end
            store.put(f"churn/{removed}", noise(20_000, removed))
            removed += len(store.gc(max_size=0, grace=0).evicted)
        return removed

    with castore_fuse.mounted(store) as root, held(store, root) as ways:
        with program(warm, "tests.mount.training", root / "tokens.npy", "epochs") as training:
            end = time.monotonic() + seconds
            with ThreadPoolExecutor(1) as pool:
                collecting = pool.submit(in_processes, 1, lambda _: collect_until(end), timeout=seconds + 300)
                reads = 0
                while not collecting.done():
                    name, read = chance.choice(ways)
                    start = chance.randrange(len(DATA[name]))
                    stop = start + chance.randrange(400_000)
                    assert read(start, stop) == DATA[name][start:stop], name
                    reads += 1
                (removed,) = collecting.result()
            assert finish(training, "go on\n") == f"{int(tokens.sum(dtype=np.int64))}\ngood\n"
        assert store.stat().blobs == 0
        assert object_files(store) == []
        until(lambda: not any((root / name).exists() for name in KINDS))
        for name in KINDS:
            with pytest.raises(FileNotFoundError):
                (root / name).open()
    assert removed > len(KINDS)
    figure(
        f"{reads:,} reads through {len(ways)} handles and maps, and a "
        f"DataLoader's, while gc removed {removed}"
    )


def test_files_maps_and_a_data_loader_read_on_while_gc_removes_everything(
    store: Store,
    tmp_path: Path,
    warm_torch: WarmPython,
    scale: Callable[[float, float], float],
    figure: Callable[[str], None],
) -> None:
    reads_on_while_gc_removes_everything(store, tmp_path, warm_torch, scale(0.7, 60.0), figure)


def test_a_name_that_is_replaced_all_the_time_is_never_a_miss(
    store: Store, scale: Callable[[float, float], float], figure: Callable[[str], None]
) -> None:
    """Regression: gc removed the old bytes between a reader's query and its open, and the reader gave up."""
    seconds = scale(0.7, 30.0)
    store.put("name", noise(20_000))

    def act(process: int) -> int:
        end, turns = time.monotonic() + seconds, 0
        while time.monotonic() < end:
            turns += 1
            if process < 2:
                store.put("name", noise(20_000, turns % 7))
                store.gc(grace=0)
            elif process == 2:
                with store.open("name") as file:
                    assert len(file.read()) == 20_000
            else:
                assert store.get("name") is not None
                assert store.get_many(["name"]) != [None]
        return turns

    turns = in_processes(4, act, timeout=seconds + 300)
    figure(
        f"{sum(turns[2:]):,} reads of a name that was replaced and "
        f"collected {sum(turns[:2]):,} times: no miss"
    )


def test_a_name_replaced_and_collected_a_moment_ago_opens_in_a_mount_with_its_new_bytes(store: Store) -> None:
    """Regression: the kernel still knew the old blob, and opening it failed with "no such file"."""
    store.put("name", noise(20_000))
    with castore_fuse.mounted(store) as root:
        for turn in range(50):
            assert (root / "name").stat().st_size == 20_000 + turn  # so that the kernel knows it
            store.put("name", noise(20_001 + turn, turn))
            store.gc(grace=0)
            assert (root / "name").read_bytes() == noise(20_001 + turn, turn)


def test_a_wedged_reader_keeps_nobody_waiting_and_reads_on(
    store: Store, figure: Callable[[str], None]
) -> None:
    """It hangs with open files, a map, and in the middle of a query of the index."""
    put_kinds(store)
    with castore_fuse.mounted(store) as root:

        def read() -> None:
            with Store(store.path, memory=0) as own, held(own, root) as ways:
                question = own.index.connection().execute("SELECT name FROM entries ORDER BY name")
                first = question.fetchone()
                pause()
                assert [first[0], *(name for (name,) in question)] == sorted(KINDS)
                for name, way in ways:
                    assert way(0, len(DATA[name])) == DATA[name], name

        with paused(read):
            began = time.monotonic()
            assert sorted(store.gc(max_size=0, grace=0).evicted) == sorted(KINDS)
            for turn in range(50):
                store.put(f"new/{turn}", noise(20_000, turn))
            store.gc(max_size=300_000, grace=0)
            agrees_with_disk(store)
            figure(f"gc and 50 puts beside a wedged reader: {time.monotonic() - began:.2f} s")
            assert object_files(store) != []
    agrees_with_disk(store)


def test_a_wedged_gc_keeps_nobody_waiting_between_its_transactions(store: Store) -> None:
    names = {f"0/{number:04}": b"%d" % number for number in range(1_200)}
    store.put_many(names.items())
    put_kinds(store)

    def collect() -> None:
        with Store(store.path, memory=0) as own:
            own.gc(max_size=0, grace=0)

    with paused(collect, after(Write, "evict_entries", then=after(Write, "commit", then=pause))):
        assert sum(data is None for data in store.get_many(list(names))) == 500
        assert [store.get(name) for name in KINDS] == list(DATA.values())
        store.put("new", noise(40_000))
        assert in_processes(1, lambda _: len(store.gc(max_size=100_000, grace=0).evicted))[0] > 0
        agrees_with_disk(store)
        assert store.get("new") == noise(40_000)
    assert store.get("new") == noise(40_000), "it was put after the wedged gc had chosen"
    agrees_with_disk(store)


def test_a_gc_wedged_inside_a_transaction_keeps_readers_reading(store: Store) -> None:
    """Writers wait as long as gc holds the lock; readers of the store and of a mount never do."""
    put_kinds(store)
    with castore_fuse.mounted(store) as root:

        def collect() -> None:
            with Store(store.path, memory=0) as own:
                own.gc(max_size=0, grace=0)

        with paused(collect, after(Write, "evict_entries", then=pause)):
            assert [store.get(name) for name in KINDS] == list(DATA.values())
            assert [(root / name).read_bytes() for name in KINDS] == list(DATA.values())
            with pytest.raises(sqlite3.OperationalError, match="locked"), store.index.write(timeout=0.1):
                pass
        store.put("new", b"x")
        assert [entry.name for entry in store.entries()] == ["new"]
    agrees_with_disk(store)
