"""A process that repeats one operation, to be observed from outside by strace or py-spy.

    python -m tools.bench.operations OPERATION FOLDER CALLS

The process prepares, prints ``ready``, waits for a line on standard input, makes the calls, prints ``done``,
and waits for another line. Preparing costs the same for any number of calls, so the difference of two runs
with different numbers is the cost of the additional calls.
"""

from __future__ import annotations

import sys
from pathlib import Path

import diskcache

import castore
from tools.bench import corpus, suite_operations
from tools.bench.suite_operations import Operation, Work

#: Size of a value, in bytes.
SIZE = 2048
#: Number of values to read.
FILLED = 512
TOGETHER = 64

Items = list[tuple[str, bytes]]


def main() -> None:
    operation, folder, calls = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    work = OPERATIONS[operation].prepare(folder, calls)
    print("ready", flush=True)
    sys.stdin.readline()
    run_calls(work, calls)
    print("done", flush=True)
    sys.stdin.readline()


def run_calls(work: Work, calls: int) -> None:
    """Make the calls that are observed."""
    for number in range(calls):
        work(number)


def _items(stamp: str, count: int) -> Items:
    """Names and values, no two of which are the same."""
    # A value is a fixed record with its own number in front: cheap to make, no two the same.
    (record,) = corpus.records(1, SIZE, stamp)
    return [(f"{stamp}/{number:06}", b"%08d%b" % (number, record)) for number in range(count)]


def _store(folder: Path, memory: int | str = 0) -> tuple[castore.Store, list[str]]:
    store, filled = castore.Store(folder, memory=memory), _items("filled", FILLED)
    store.put_many(filled)
    names = [name for name, _ in filled]
    for name in names:  # the first reads, which open files and fill caches, are not observed
        store.get(name)
    return store, names


def _put(folder: Path, calls: int) -> Work:
    (store, _), fresh = _store(folder), _items("fresh", calls)
    return lambda number: store.put(*fresh[number])


def _put_many(folder: Path, calls: int) -> Work:
    """All values with the first call, as one batch (of at most 2,000 a commit)."""
    (store, _), fresh = _store(folder), _items("fresh", calls)
    return lambda number: store.put_many(fresh) if number == 0 else None


def _get(folder: Path, _: int) -> Work:
    store, names = _store(folder)
    return lambda number: store.get(names[number % FILLED])


def _get_many(folder: Path, _: int) -> Work:
    """64 values with every 64th call."""
    store, names = _store(folder)

    def work(number: int) -> None:
        if number % TOGETHER == 0:
            store.get_many(names[number % FILLED :][:TOGETHER])

    return work


def _ram_hit(folder: Path, _: int) -> Work:
    store, names = _store(folder, "64MB")
    return lambda number: store.get(names[number % FILLED])


class _Cache(diskcache.Cache):  # type: ignore[misc]  # it has no types
    """A cache that closes its connection when it ends: Python 3.13 warns of one that is left open."""

    def __del__(self) -> None:
        self.close()


def _cache(folder: Path) -> tuple[_Cache, list[str]]:
    cache, filled = _Cache(str(folder), size_limit=2**40), _items("filled", FILLED)
    for name, value in filled:
        cache.set(name, value)
    return cache, [name for name, _ in filled]


def _diskcache_set(folder: Path, calls: int) -> Work:
    (cache, _), fresh = _cache(folder), _items("fresh", calls)
    return lambda number: cache.set(*fresh[number])


def _diskcache_get(folder: Path, _: int) -> Work:
    cache, names = _cache(folder)
    return lambda number: cache.get(names[number % FILLED])


#: By name. The names of castore's operations begin with castore.
OPERATIONS: dict[str, Operation] = {
    "castore put": Operation(_put),
    "castore put_many": Operation(_put_many),
    "castore get": Operation(_get),
    "castore get_many of 64": Operation(_get_many),
    "castore get, RAM hit": Operation(_ram_hit, 0.05),
    "diskcache set": Operation(_diskcache_set),
    "diskcache get": Operation(_diskcache_get),
    **suite_operations.OPERATIONS,
}

if __name__ == "__main__":
    main()
