"""Decoded frames that the processes of a node share: random reads of several processes, and their memory."""

from __future__ import annotations

import multiprocessing
import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

import castore
from castore.objects.decode import BlobReader
from castore.system.ram_cache import MemoryLRU
from tools.bench import corpus
from tools.bench.harness import Bench, Contestant, Goal, Row, Study, per_second
from tools.bench.peers import Mount

TITLE = "Frames that processes share"
ABOUT = (
    "Four processes read 64 KiB at random places of the first quarter of one large zstd object through "
    "`Store.open`, each for itself and all at once. `decoding anew` is a store without shared memory; `a "
    "cache in each process` keeps all frames of that quarter decoded in every process (nothing that ships "
    "does so); `shared memory` keeps them once (`Store(shared_memory=…)`); through the mount the kernel's "
    "page cache does. All caches are warm. In the second row each process gets a blob whole, over and over, "
    "without a memory tier of its own."
)
_PROCESSES, _PIECE = 4, 64 * 1024
_ANEW, _OWN, _SHARED, _MOUNT = (
    "castore, decoding anew",
    "a cache in each process",
    "castore, shared memory",
    "castore, through a mount",
)
_NAME = "archive.tar"
_WHOLE = "part.tar"


def rows(bench: Bench) -> Iterator[Row | Study]:
    size = bench.size(1000, 64) * 10**6
    hot, tier = size // 4, size * 3 // 8
    folder, root = bench.work / "castore", bench.work / "mount"
    source = corpus.archive(bench.work.parent / "corpus", size)
    whole = bench.work / _WHOLE
    with source.open("rb") as file:
        whole.write_bytes(file.read(size // 16))
    with castore.Store(folder) as store:
        store.put_file(_NAME, source, codec="zstd")
        store.put_file(_WHOLE, whole, codec="zstd")
    reads = bench.size(2000, 400)
    with ExitStack() as stack:
        stack.enter_context(Mount.of_store(folder, root))
        ways: dict[str, Callable[[], Any]] = {
            _ANEW: partial(_open_new_store, folder, None),
            _OWN: partial(_open_own, folder, tier),
            _SHARED: partial(_open_new_store, folder, tier),
            _MOUNT: partial(_open_mounted, root),
        }
        crews = {
            name: stack.enter_context(Crew(partial(_random_reads, way, hot, reads)))
            for name, way in ways.items()
        }
        yield Row(
            f"{_PROCESSES} processes, random 64 KiB of {hot // 10**6} MB",
            per_second(_PROCESSES * reads, "reads/s"),
            [Contestant(name, crew.work, ours=name != _OWN) for name, crew in crews.items()],
            reference=_ANEW,
            goals=[Goal(_SHARED, factor=3, against=_ANEW)],
            conclude=lambda _: _memory(crews),
        )
        gets = bench.size(8, 4)
        crews = {
            name: stack.enter_context(Crew(partial(_whole_gets, folder, shared, gets)))
            for name, shared in ((_ANEW, None), (_SHARED, tier))
        }
        yield Row(
            f"{_PROCESSES} processes, whole get of {whole.stat().st_size // 10**6} MB",
            per_second(_PROCESSES * gets, "gets/s"),
            [Contestant(name, crew.work, ours=True) for name, crew in crews.items()],
            reference=_ANEW,
        )


class Crew:
    """Processes that do the same job on request, at the same time."""

    def __init__(self, job: Callable[[], Callable[[], None]]) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self.processes = []
        for _ in range(_PROCESSES):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(job, there), daemon=True)
            process.start()
            self._pipes.append(here)
            self.processes.append(process)
        self.work()  # a process that answers is set up, and has done its work once

    def work(self) -> float:
        """Have all processes do their work; returns the seconds until the last is done."""
        start = time.perf_counter()
        for pipe in self._pipes:
            pipe.send("go")
        for pipe in self._pipes:
            pipe.recv()
        return time.perf_counter() - start

    def pss(self) -> tuple[float, float]:
        """PSS of the processes in bytes, and the part of it that is shared memory.

        A page that n processes use counts as an n-th for each.
        """
        whole = shared = 0.0
        for process in self.processes:
            found = psutil.Process(process.pid)
            whole += found.memory_full_info().pss
            shared += sum(place.pss for place in found.memory_maps() if place.path.startswith("/dev/shm/"))
        return whole, shared

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self.processes:
            process.join()


def _serve(job: Callable[[], Callable[[], None]], pipe: Connection) -> None:
    work = job()
    while True:
        try:
            pipe.recv()
        except EOFError:
            return
        work()
        pipe.send("done")


def _random_reads(opened: Callable[[], Any], hot: int, reads: int) -> Callable[[], None]:
    file = opened()
    for place in range(0, hot, _PIECE):  # warms the caches
        file.seek(place)
        file.read(_PIECE)
    chance = random.Random()

    def work() -> None:
        for _ in range(reads):
            file.seek(chance.randrange(hot - _PIECE))
            file.read(_PIECE)

    return work


def _whole_gets(folder: Path, shared: int | None, gets: int) -> Callable[[], None]:
    store = castore.Store(folder, memory=0, shared_memory=shared)

    def work() -> None:
        for _ in range(gets):
            store.get(_WHOLE)

    return work


def _open_new_store(folder: Path, shared: int | None) -> Any:
    return castore.Store(folder, memory=0, shared_memory=shared).open(_NAME)


def _open_mounted(root: Path) -> Any:
    return (root / _NAME).open("rb", buffering=0)


class _OwnFrames:
    """A file that keeps decoded frames in this process."""

    def __init__(self, reader: BlobReader) -> None:
        self._reader = reader
        self._place = 0

    def seek(self, place: int) -> None:
        self._place = place

    def read(self, size: int) -> bytes:
        return self._reader.read(self._place, size)


def _open_own(folder: Path, size: int) -> _OwnFrames:
    store = castore.Store(folder, memory=0)
    found = store.index.find(_NAME)
    assert found is not None
    return _OwnFrames(store.source.open_here(found.blob, cache=MemoryLRU(size)))


def _memory(crews: dict[str, Crew]) -> Study:
    found = {name: crew.pss() for name, crew in crews.items()}
    lines = [
        [f"**{name}**" if name != _OWN else name, f"{whole / 1e6:.0f} MB", f"{shared / 1e6:.0f} MB"]
        for name, (whole, shared) in found.items()
    ]
    return Study(
        f"Memory of the {_PROCESSES} processes",
        ["", "PSS in all", "of that shared memory"],
        lines,
        note="PSS counts a page that processes share once in all. "
        "PSS leaves out the memory of the kernel and of the mount's daemon.",
    )
