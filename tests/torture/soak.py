"""The processes of a soak: readers of a mount, writers to its store, a gc each second; and their gauges.

Each process works until a moment on the monotonic clock, which all processes of a machine share, and returns
its counts.
"""

from __future__ import annotations

import errno
import functools
import gc
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


def read(root: Path, seed: int, until: float) -> Worked:
    """Read files of the mount, whole and in part; retry while the mount is dead."""
    chance, done, retries, began = random.Random(seed), 0, list[Retry](), gauges()
    while time.monotonic() < until:
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
            time.sleep(0.05)
            continue
        done += 1
        if done == 20:
            began = gauges()
    return Worked(done, retries, began, gauges())


def write(path: Path, seed: int, until: float) -> Worked:
    """Put names again, one and many at a time, and check that they can be read back."""
    chance = random.Random(seed)

    def step(store: Store) -> None:
        numbers = chance.sample(range(NAMES), 3 if chance.random() < 0.2 else 1)
        store.put_many((f"n/{number}", value(number, chance.randrange(VERSIONS))) for number in numbers)
        assert store.get(f"n/{numbers[0]}") in {value(numbers[0], version) for version in range(VERSIONS)}
        time.sleep(0.01)

    return _work(path, step, until, warm=20)


def collect(path: Path, until: float) -> Worked:
    """A gc each second."""

    def step(store: Store) -> None:
        store.gc(grace=0)
        time.sleep(max(0.0, min(1.0, until - time.monotonic())))

    return _work(path, step, until, warm=2)


def _work(path: Path, step: Callable[[Store], None], until: float, warm: int) -> Worked:
    """Repeat a step with a store of its own.

    Descriptors are counted before the store is opened and after it is gone.
    """
    began, done = gauges(), 0
    with Store(path, memory="4MB") as store:
        while time.monotonic() < until:
            step(store)
            done += 1
            if done == warm:
                began = began._replace(resident=gauges().resident)
    del store
    gc.collect()  # unmaps the store's mappings
    return Worked(done, [], began, gauges())
