"""A process that does one operation over and over, for others to look at from outside: strace, py-spy.

    python -m tools.bench.operations OPERATION FOLDER CALLS

What is prepared costs the same for any number of calls, so two runs with different numbers tell what one call costs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import diskcache

import castore
from tools.bench import corpus

#: Of the values, in bytes.
SIZE = 2048
#: Values that are there to be read.
FILLED = 512
TOGETHER = 64

Items = list[tuple[str, bytes]]
Work = Callable[[int], object]


def main() -> None:
    operation, folder, calls = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    prepare = OPERATIONS[operation]
    filled = make_items("filled", FILLED)
    fresh = make_items("fresh", calls if "put" in operation or "set" in operation else 0)
    run_calls(prepare(folder, filled, fresh), calls)


def run_calls(work: Work, calls: int) -> None:
    """What is looked at; a function of its own, so that a profile can leave out the rest."""
    for number in range(calls):
        work(number)


def make_items(stamp: str, count: int) -> Items:
    """Names and values of which no two are the same."""
    # A value is a fixed record with its own number in front: cheap to make, no two the same.
    (record,) = corpus.records(1, SIZE, stamp)
    return [(f"{stamp}/{number:06}", b"%08d%b" % (number, record)) for number in range(count)]


def _store(folder: Path, filled: Items, memory: int | str) -> castore.Store:
    store = castore.Store(folder, memory=memory)
    store.put_many(filled)
    for name, _ in filled:  # so that the first reads, which open and learn, are behind it
        store.get(name)
    return store


def _put(folder: Path, filled: Items, fresh: Items) -> Work:
    store = _store(folder, filled, 0)
    return lambda number: store.put(*fresh[number])


def _put_many(folder: Path, filled: Items, fresh: Items) -> Work:
    """All values with the first call, as one batch (of at most 2,000 a commit)."""
    store = _store(folder, filled, 0)
    return lambda number: store.put_many(fresh) if number == 0 else None


def _get(folder: Path, filled: Items, _: Items) -> Work:
    store, names = _store(folder, filled, 0), [name for name, _ in filled]
    return lambda number: store.get(names[number % FILLED])


def _get_many(folder: Path, filled: Items, _: Items) -> Work:
    """64 values with every 64th call."""
    store, names = _store(folder, filled, 0), [name for name, _ in filled]

    def work(number: int) -> None:
        if number % TOGETHER == 0:
            store.get_many(names[number % FILLED :][:TOGETHER])

    return work


def _ram_hit(folder: Path, filled: Items, _: Items) -> Work:
    store, names = _store(folder, filled, "64MB"), [name for name, _ in filled]
    return lambda number: store.get(names[number % FILLED])


def _cache(folder: Path, filled: Items) -> diskcache.Cache:
    cache = diskcache.Cache(str(folder), size_limit=2**40)
    for name, value in filled:
        cache.set(name, value)
    return cache


def _diskcache_set(folder: Path, filled: Items, fresh: Items) -> Work:
    cache = _cache(folder, filled)
    return lambda number: cache.set(*fresh[number])


def _diskcache_get(folder: Path, filled: Items, _: Items) -> Work:
    cache, names = _cache(folder, filled), [name for name, _ in filled]
    return lambda number: cache.get(names[number % FILLED])


OPERATIONS: dict[str, Callable[[Path, Items, Items], Work]] = {
    "castore put": _put,
    "castore put_many": _put_many,
    "castore get": _get,
    "castore get_many of 64": _get_many,
    "castore get, RAM hit": _ram_hit,
    "diskcache set": _diskcache_set,
    "diskcache get": _diskcache_get,
}

if __name__ == "__main__":
    main()
