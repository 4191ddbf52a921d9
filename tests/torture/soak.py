"""The processes of a soak: readers of a mount, writers to its store, a gc each second; and their gauges.

Each process works until it is told to end, reports in shared memory how far it has come, and returns its
counts.
"""

from __future__ import annotations

import errno
import functools
import gc
import mmap
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from castore import Store
from tests.helpers import mixed
from tests.mount.conftest import forget_pages

NAMES = 24
VERSIONS = 4
_SIZES = [300, 9_000, 80_000, 700_000]
#: Errors of reads through a mount whose daemon is dead, or was killed in the middle of an answer.
_DEAD = {errno.ENOTCONN, errno.ECONNABORTED, errno.EIO, errno.ENOENT}


@functools.cache
def value(number: int, version: int) -> bytes:
    """The value of name ``number`` in a version."""
    return b"%d %d " % (number, version) + mixed(_SIZES[number % 4], 10 * number + version)


class Gauges(NamedTuple):
    """A process's descriptors (loose objects, removed ones of them, packs, others) and bytes of memory."""

    objects: int
    removed: int
    packs: int
    others: int
    resident: int


def gauges(pid: int | str = "self") -> Gauges:
    """Read them from /proc."""
    targets = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            targets.append(os.readlink(link))
        except FileNotFoundError:
            continue  # the descriptor that lists the folder
    packs = sum("/objects/packs/" in target for target in targets)
    objects = [target for target in targets if "/objects/" in target and "/names/" not in target]
    objects = [target for target in objects if "/packs/" not in target]
    removed = sum(target.endswith(" (deleted)") for target in objects)
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    others = len(targets) - packs - len(objects)
    return Gauges(len(objects), removed, packs, others, pages * os.sysconf("SC_PAGE_SIZE"))


class Board:
    """Messages that processes exchange while they work, in memory that they share."""

    def __init__(self, processes: int) -> None:
        self._words = memoryview(mmap.mmap(-1, 8 * (1 + 2 * processes))).cast("Q")
        self._processes = processes

    @property
    def is_over(self) -> bool:
        """Whether all are to end."""
        return bool(self._words[0])

    def end(self) -> None:
        """Have all processes end."""
        self._words[0] = 1

    def report(self, process: int, done: int, retries: int = 0) -> None:
        """Tell how much a process has done, and how many kills it has felt."""
        self._words[1 + 2 * process], self._words[2 + 2 * process] = done, retries

    def done(self) -> list[int]:
        """The work that each process has done."""
        return list(self._words[1::2])

    def retries(self) -> int:
        """The kills that were felt."""
        return sum(self._words[2::2])


class Retry(NamedTuple):
    """A read that failed: when it began, when it failed, and its error."""

    asked: float
    failed: float
    error: str


class Worked(NamedTuple):
    """A process's work: operations done, retries, and gauges after warming and at the end."""

    done: int
    retries: list[Retry]
    began: Gauges
    ended: Gauges


def read(root: Path, process: int, board: Board) -> Worked:
    """Read files of the mount, whole and in part; retry while the mount is dead."""
    chance, done, retries, began = random.Random(process), 0, list[Retry](), gauges()
    while not board.is_over:
        number = chance.randrange(NAMES)
        asked = time.monotonic()
        try:
            # Buffered: a read that a kill interrupts returns the bytes so far, and the next read gives the
            # error.
            with (root / f"n/{number}").open("rb") as file:
                if chance.random() < 0.1:  # the kernel's cache would hide missing bytes
                    forget_pages(file.fileno())
                if chance.random() < 0.3:  # a label, then a part of the middle
                    version = int(file.read(20).split(b" ")[1])
                    start = chance.randrange(_SIZES[number % 4])
                    file.seek(start)
                    assert file.read(5_000) == value(number, version)[start : start + 5_000]
                else:
                    data = file.read()
                    assert data == value(number, int(data[:20].split(b" ")[1]))
        except OSError as error:
            if error.errno not in _DEAD:
                raise
            retries.append(Retry(asked, time.monotonic(), str(error)))
            board.report(process, done, len(retries))
            time.sleep(0.05)
            continue
        done += 1
        board.report(process, done, len(retries))
        if done == 20:
            began = gauges()
    return Worked(done, retries, began, gauges())


def write(path: Path, process: int, board: Board) -> Worked:
    """Put names again, one and many at a time, and check that they can be read back."""
    chance = random.Random(process)

    def step(store: Store) -> None:
        numbers = chance.sample(range(NAMES), 3 if chance.random() < 0.2 else 1)
        store.put_many((f"n/{number}", value(number, chance.randrange(VERSIONS))) for number in numbers)
        assert store.get(f"n/{numbers[0]}") in {value(numbers[0], version) for version in range(VERSIONS)}
        time.sleep(0.01)

    return _work(path, step, process, board, warm=20)


def collect(path: Path, process: int, board: Board) -> Worked:
    """A gc each second."""

    def step(store: Store) -> None:
        store.gc(grace=0)
        time.sleep(1.0)

    return _work(path, step, process, board, warm=2)


def _work(path: Path, step: Callable[[Store], None], process: int, board: Board, warm: int) -> Worked:
    """Repeat a step with a store of its own.

    Descriptors are counted before the store is opened and after it is gone.
    """
    began, done = gauges(), 0
    with Store(path, memory="4MB") as store:
        while not board.is_over:
            step(store)
            done += 1
            board.report(process, done)
            if done == warm:
                began = began._replace(resident=gauges().resident)
    del store
    gc.collect()  # unmaps the store's mappings
    return Worked(done, [], began, gauges())
