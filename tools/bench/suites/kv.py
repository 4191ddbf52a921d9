"""Small values by name: castore beside diskcache, LMDB, joblib and plain files.

Values are put under fresh names and with fresh content in every round, so no contestant profits from
deduplication or from overwriting. No contestant syncs to the disk on each put. All puts survive a killed
process, except the last write of the plain files.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import diskcache
import joblib
import lmdb

import castore
from tools.bench import corpus
from tools.bench.harness import Bench, Contestant, Goal, Row, microseconds_each

TITLE = "Small values"
ABOUT = (
    "JSON records with fresh names and content in every round; random bytes where a row says so, which no "
    "codec makes smaller. castore compresses (zstd, or lz4 where named), hashes and (on reads) verifies; its "
    "peers do not. diskcache runs with its defaults (`set`, `get`) and without a size limit; LMDB with "
    "`sync=False`, one transaction a value or for all. A plain file is opened, written or read, and closed; "
    "nobody indexes, replaces or checks it. `RAM hit` is castore's memory tier against the same `get` of "
    "diskcache. A cached function returns 2 KB: castore's `cached`, `joblib.Memory` and diskcache's "
    "`memoize` each look for the result of a call, and keep it if it is the first."
)
_SET, _GET = "diskcache set", "diskcache get"
_DISK, _TMPFS = "plain files on the disk", "plain files on tmpfs"
_TOGETHER = 64


@dataclass
class Files:
    """Plain files below a folder: the least work that can be done."""

    root: Path

    def put(self, name: str, value: bytes) -> None:
        with open(f"{self.root}/{name}", "wb", buffering=0) as file:
            file.write(value)

    def get(self, name: str) -> bytes:
        with open(f"{self.root}/{name}", "rb", buffering=0) as file:
            return file.read()


@dataclass
class Peers:
    """One open store of each kind, on the same disk, and one set of files in memory."""

    disk_only: castore.Store
    with_memory: castore.Store
    lz4: castore.Store
    cache: diskcache.Cache
    tree: lmdb.Environment
    files: Files
    tmpfs: Files

    @classmethod
    def open(cls, folder: Path, stack: ExitStack) -> Peers:
        store = folder / "castore"
        (folder / "files").mkdir(parents=True)
        return cls(
            stack.enter_context(closing(castore.Store(store, memory=0))),
            stack.enter_context(closing(castore.Store(store, memory="512MB"))),
            stack.enter_context(closing(castore.Store(folder / "castore-lz4", codec="lz4", memory=0))),
            stack.enter_context(closing(diskcache.Cache(str(folder / "diskcache"), size_limit=2**40))),
            stack.enter_context(closing(lmdb.open(str(folder / "lmdb"), map_size=2**34, sync=False))),
            Files(folder / "files"),
            Files(Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm")))),
        )

    def make_folder(self, stamp: str) -> None:
        """Make the folder of the next plain files; the other contestants need none."""
        for files in (self.files, self.tmpfs):
            (files.root / stamp).mkdir()

    def lmdb_put(self, name: str, value: bytes) -> None:
        with self.tree.begin(write=True) as transaction:
            transaction.put(name.encode(), value)

    def lmdb_get(self, name: str) -> bytes | None:
        with self.tree.begin() as transaction:
            found: bytes | None = transaction.get(name.encode())
            return found

    def lmdb_get_many(self, names: list[str]) -> list[bytes | None]:
        with self.tree.begin() as transaction:
            return [transaction.get(name.encode()) for name in names]


@dataclass
class Batch:
    """The items of the next run, renewed by `fresh`, which is a contestant's `prepare`."""

    peers: Peers
    calls: int
    size: int
    shrinks: bool = True
    items: list[tuple[str, bytes]] = field(default_factory=list)
    _turn: Iterator[int] = field(default_factory=count)

    def fresh(self) -> None:
        stamp = f"{self.size}-{next(self._turn)}"
        make = corpus.records if self.shrinks else corpus.noise
        values = make(self.calls, self.size, stamp)
        self.items = [(f"{stamp}/{number:06}", value) for number, value in enumerate(values)]
        self.peers.make_folder(stamp)


def rows(bench: Bench) -> Iterator[Row]:
    for size, label, calls, shrinks in [
        (2048, "2 KB", bench.size(2000, 300), True),
        (32_768, "32 KB", bench.size(500, 100), True),
        (32_768, "32 KB of random bytes", bench.size(500, 100), False),
    ]:
        with ExitStack() as stack:
            peers = Peers.open(bench.work / label.replace(" ", ""), stack)
            batch = Batch(peers, calls, size, shrinks)
            yield _put(peers, batch, label)
            if shrinks:
                yield _put_many(peers, batch, label)
            yield from _gets(peers, batch, label)
    yield from _functions(bench)


def _put(peers: Peers, batch: Batch, label: str) -> Row:
    def each(name: str, put: Callable[[str, bytes], object]) -> Contestant:
        def work() -> None:
            for key, value in batch.items:
                put(key, value)

        return Contestant(name, work, batch.fresh, ours=name.startswith("castore"))

    with_lz4 = [each("castore put, lz4", peers.lz4.put)] if label == "32 KB" else []
    return Row(
        f"put, {label}",
        microseconds_each(batch.calls),
        [
            each("castore put", peers.disk_only.put),
            *with_lz4,
            each(_SET, peers.cache.set),
            each("LMDB put", peers.lmdb_put),
            each(_DISK, peers.files.put),
            each(_TMPFS, peers.tmpfs.put),
        ],
        reference=_SET,
    )


def _put_many(peers: Peers, batch: Batch, label: str) -> Row:
    def cache_each() -> None:
        for name, value in batch.items:
            peers.cache.set(name, value)

    def cache_many() -> None:
        with peers.cache.transact():
            cache_each()

    def tree_many() -> None:
        with peers.tree.begin(write=True) as transaction:
            for name, value in batch.items:
                transaction.put(name.encode(), value)

    def castore_many() -> None:
        peers.disk_only.put_many(batch.items)

    return Row(
        f"put_many, {label}",
        microseconds_each(batch.calls),
        [
            Contestant("castore put_many", castore_many, batch.fresh, ours=True),
            Contestant(_SET, cache_each, batch.fresh),
            Contestant("diskcache set in transact()", cache_many, batch.fresh),
            Contestant("LMDB, one transaction", tree_many, batch.fresh),
        ],
        reference=_SET,
        goals=[Goal("castore put_many", 5.0, _SET)] if label == "2 KB" else [],
    )


def _gets(peers: Peers, batch: Batch, label: str) -> Iterator[Row]:
    batch.fresh()
    for store in (peers.disk_only, peers.lz4):
        store.put_many(batch.items)
    for name, value in batch.items:
        for put in (peers.cache.set, peers.lmdb_put, peers.files.put, peers.tmpfs.put):
            put(name, value)
    values = dict(batch.items)
    order = sorted(values)
    random.Random(corpus.SEED).shuffle(order)
    unit = microseconds_each(len(order))

    def each(name: str, get: Callable[[str], object]) -> Contestant:
        for key in order:  # checks the answers, and fills the memory tier
            if get(key) != values[key]:
                raise RuntimeError(f"{name} gave other bytes than were put for {key}")

        def work() -> None:
            for key in order:
                get(key)

        return Contestant(name, work, ours=name.startswith("castore"))

    theirs = [each(_GET, peers.cache.get), each("LMDB get", peers.lmdb_get)]
    plain = [each(_DISK, peers.files.get), each(_TMPFS, peers.tmpfs.get)]
    with_lz4 = [each("castore get, lz4", peers.lz4.get)] if label == "32 KB" else []
    factors = {"2 KB": 0.8, "32 KB": 1.2}
    yield Row(
        f"get, {label}",
        unit,
        [each("castore get", peers.disk_only.get), *with_lz4, *theirs, *plain],
        reference=_GET,
        goals=[Goal("castore get", factors[label], _GET)] if label in factors else [],
    )
    if not batch.shrinks:
        return
    yield _get_many(peers, values, order, label)
    in_memory = "castore get, in memory"
    yield Row(
        f"RAM hit, {label}",
        unit,
        [each(in_memory, peers.with_memory.get), *theirs],
        reference=_GET,
        goals=[Goal(in_memory, 10.0, _GET)] if label == "2 KB" else [],
    )


def _get_many(peers: Peers, values: dict[str, bytes], order: list[str], label: str) -> Row:
    batches = [order[start : start + _TOGETHER] for start in range(0, len(order), _TOGETHER)]

    def batched(name: str, get_many: Callable[[list[str]], list[Any]]) -> Contestant:
        for names in batches:
            if get_many(names) != [values[key] for key in names]:
                raise RuntimeError(f"{name} gave other bytes than were put")

        def work() -> None:
            for names in batches:
                get_many(names)

        return Contestant(name, work, ours=name.startswith("castore"))

    ours, theirs = f"castore get_many of {_TOGETHER}", f"{_TOGETHER} diskcache gets"
    return Row(
        f"get_many, {label}",
        microseconds_each(len(order)),
        [
            batched(ours, peers.disk_only.get_many),
            batched(theirs, lambda names: [peers.cache.get(name) for name in names]),
            batched("LMDB, one transaction", peers.lmdb_get_many),
        ],
        reference=theirs,
        goals=[Goal(ours, 1.5, theirs)] if label == "2 KB" else [],
    )


# --- results of functions -----------------------------------------------------------------------------------


def _record(number: int) -> bytes:
    """The result of the cached function: 2 KB of hexadecimal digits, computed in a few microseconds."""
    return random.Random(number).randbytes(1024).hex().encode()


def _functions(bench: Bench) -> Iterator[Row]:
    calls, folder = bench.size(500, 100), bench.work / "functions"
    with ExitStack() as stack:
        disk_only = stack.enter_context(closing(castore.Store(folder / "castore", memory=0)))
        with_memory = stack.enter_context(closing(castore.Store(folder / "castore")))
        cache = stack.enter_context(closing(diskcache.Cache(str(folder / "diskcache"), size_limit=2**40)))
        functions = {
            "castore cached": disk_only.cached()(_record),
            "castore cached, in memory": with_memory.cached()(_record),
            "joblib.Memory": joblib.Memory(folder / "joblib", verbose=0).cache(_record),
            "diskcache memoize": cache.memoize()(_record),
        }
        turn = count(1)

        def first(function: Callable[[int], bytes]) -> Callable[[], None]:
            def work() -> None:
                start = next(turn) * calls
                for number in range(start, start + calls):
                    function(number)

            return work

        def again(name: str, function: Callable[[int], bytes]) -> Callable[[], None]:
            for number in range(calls):
                if function(number) != function(number) or function(number) != _record(number):
                    raise RuntimeError(f"{name} gave another result than the function")

            def work() -> None:
                for number in range(calls):
                    function(number)

            return work

        def row(
            what: str, work: Callable[[str, Callable[[int], bytes]], Callable[[], None]], wanted: list[str]
        ) -> Row:
            contestants = [
                Contestant(name, work(name, functions[name]), ours=name.startswith("castore"))
                for name in wanted
            ]
            return Row(
                f"cached function, {what}", microseconds_each(calls), contestants, reference="joblib.Memory"
            )

        wanted = [name for name in functions if "in memory" not in name]
        yield row("first call", lambda _, function: first(function), wanted)
        yield row("hit", again, list(functions))
