"""Sixteen processes that put, get, list, delete, verify and collect the same few names, all at once."""

from __future__ import annotations

import functools
import random
import time

from castore import Store
from tests.helpers import agrees_with_disk, in_processes, noise

PROCESSES = 16
_VERSIONS = 6
# Operations of each process, however long they take: nobody starves.
_AT_LEAST = 20


@functools.cache
def value(number: int, version: int) -> bytes:
    """The value of name ``number`` in a version: from a packed blob to a blob of two frames."""
    size = [50, 2_000, 30_000, 300_000][number % 4]
    return b"%d %d " % (number, version) + noise(size // 2, number) * 2


def _is_right(number: int, data: bytes) -> bool:
    return any(data == value(number, version) for version in range(_VERSIONS))


def _act(store: Store, process: int, chance: random.Random) -> None:
    number, what = chance.randrange(24), chance.random()
    name = f"n/{number}"
    if process == 0 and what < 0.3:
        store.gc(max_size=1_500_000, grace=0)
    elif process == 1 and what < 0.1:
        assert store.verify(sample=0.2).bad == []
    elif what < 0.4:
        data = value(number, chance.randrange(_VERSIONS))
        assert store.put(name, data, codec=chance.choice(["zstd", "lz4", "none"])).size == len(data)
    elif what < 0.45:
        store.put_many((f"n/{i}", value(i, chance.randrange(_VERSIONS))) for i in range(number, 24, 7))
    elif what < 0.5:
        store.delete(name)
    elif what < 0.55:
        names = [entry.name for entry in store.entries("n")]
        assert names == sorted(names)
    else:
        answer = store.get(name)
        assert answer is None or _is_right(number, answer)


def crowd(store: Store, seconds: float) -> int:
    """Let them run for so long, and longer until each has done its least. Afterwards every name has right
    bytes, and index and disk agree exactly.

    Returns:
        The number of their operations.
    """

    def act(process: int) -> int:
        chance = random.Random(process)
        end = time.monotonic() + seconds
        done = 0
        while time.monotonic() < end or done < _AT_LEAST:
            _act(store, process, chance)
            done += 1
        return done

    for number in range(24):
        for version in range(_VERSIONS):
            value(number, version)  # computed once, not by every process
    done = in_processes(PROCESSES, act, timeout=seconds + 300)
    assert store.stat().corrupt == 0
    agrees_with_disk(store)
    for entry in store.entries():
        data = store.get(entry.name)
        assert data is not None
        assert _is_right(int(entry.name.split("/")[1]), data)
    return sum(done)
