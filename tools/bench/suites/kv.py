"""Small values by name: castore beside diskcache and LMDB.

Values are put under fresh names and with fresh content in every round, so nobody profits from deduplication or
from overwriting. No contestant syncs to the disk on each put; all survive a killed process.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import diskcache
import lmdb

import castore
from tools.bench import corpus
from tools.bench.harness import Bench, Contestant, Goal, Row, microseconds_each

TITLE = "Small values"
ABOUT = (
    "JSON records with fresh names and content in every round. castore compresses, hashes and (on reads) verifies; "
    "its peers do not. diskcache runs with its defaults (`set`, `get`) and without a size limit; LMDB with "
    "`sync=False`, one transaction a value. `RAM hit` is castore's memory tier against the same `get` of diskcache."
)


@dataclass
class Peers:
    """One open store of each kind, on the same disk."""

    disk_only: castore.Store
    with_memory: castore.Store
    cache: diskcache.Cache
    tree: lmdb.Environment

    @classmethod
    def open(cls, folder: Path, stack: ExitStack) -> Peers:
        store = folder / "castore"
        return cls(
            stack.enter_context(closing(castore.Store(store, memory=0))),
            stack.enter_context(closing(castore.Store(store, memory="512MB"))),
            stack.enter_context(closing(diskcache.Cache(str(folder / "diskcache"), size_limit=2**40))),
            stack.enter_context(closing(lmdb.open(str(folder / "lmdb"), map_size=2**34, sync=False))),
        )

    def lmdb_put(self, name: str, value: bytes) -> None:
        with self.tree.begin(write=True) as transaction:
            transaction.put(name.encode(), value)

    def lmdb_get(self, name: str) -> bytes | None:
        with self.tree.begin() as transaction:
            found: bytes | None = transaction.get(name.encode())
            return found


class Batch:
    """The items of the next run: renewed by `fresh`, which is a contestant's `prepare`."""

    def __init__(self, calls: int, size: int) -> None:
        self._calls, self._size, self._turn = calls, size, count()
        self.items: list[tuple[str, bytes]] = []

    def fresh(self) -> None:
        stamp = f"{self._size}-{next(self._turn)}"
        values = corpus.records(self._calls, self._size, stamp)
        self.items = [(f"{stamp}/{number:06}", value) for number, value in enumerate(values)]


def rows(bench: Bench) -> Iterator[Row]:
    for size, label, calls in [
        (2048, "2 KB", bench.size(2000, 300)),
        (32_768, "32 KB", bench.size(500, 100)),
    ]:
        with ExitStack() as stack:
            peers = Peers.open(bench.work / label.replace(" ", ""), stack)
            yield from _puts(peers, Batch(calls, size), label, calls)
            yield from _gets(peers, Batch(calls, size), label, calls)


def _puts(peers: Peers, batch: Batch, label: str, calls: int) -> Iterator[Row]:
    def each(put: Callable[[str, bytes], object]) -> Callable[[], None]:
        def work() -> None:
            for name, value in batch.items:
                put(name, value)

        return work

    def cache_many() -> None:
        with peers.cache.transact():
            for name, value in batch.items:
                peers.cache.set(name, value)

    def tree_many() -> None:
        with peers.tree.begin(write=True) as transaction:
            for name, value in batch.items:
                transaction.put(name.encode(), value)

    yield Row(
        f"put, {label}",
        microseconds_each(calls),
        [
            Contestant("castore put", each(peers.disk_only.put), batch.fresh, ours=True),
            Contestant("diskcache set", each(peers.cache.set), batch.fresh),
            Contestant("LMDB put", each(peers.lmdb_put), batch.fresh),
        ],
        reference="diskcache set",
        goals=[Goal("castore put", 2.0, "diskcache set")] if label == "2 KB" else [],
    )
    yield Row(
        f"put_many, {label}",
        microseconds_each(calls),
        [
            Contestant(
                "castore put_many",
                lambda: _done(peers.disk_only.put_many(batch.items)),
                batch.fresh,
                ours=True,
            ),
            Contestant("diskcache set in transact()", cache_many, batch.fresh),
            Contestant("LMDB, one transaction", tree_many, batch.fresh),
        ],
        reference="diskcache set in transact()",
    )


def _done(_: object) -> None:
    """Turns a call's answer into none: a work function that returns a number would be timing itself."""


def _gets(peers: Peers, batch: Batch, label: str, calls: int) -> Iterator[Row]:
    batch.fresh()
    peers.disk_only.put_many(batch.items)
    for name, value in batch.items:
        peers.cache.set(name, value)
        peers.lmdb_put(name, value)
    values = dict(batch.items)
    order = sorted(values)
    random.Random(corpus.SEED).shuffle(order)

    def each(get: Callable[[str], object]) -> Callable[[], None]:
        for name in order:  # an answer that is wrong is not fast; and this fills the memory tier
            if get(name) != values[name]:
                raise RuntimeError(f"{get} gave other bytes than were put for {name}")

        def work() -> None:
            for name in order:
                get(name)

        return work

    yield Row(
        f"get, {label}",
        microseconds_each(calls),
        [
            Contestant("castore get", each(peers.disk_only.get), ours=True),
            Contestant("diskcache get", each(peers.cache.get)),
            Contestant("LMDB get", each(peers.lmdb_get)),
        ],
        reference="diskcache get",
    )
    yield Row(
        f"RAM hit, {label}",
        microseconds_each(calls),
        [
            Contestant("castore get, in memory", each(peers.with_memory.get), ours=True),
            Contestant("diskcache get", each(peers.cache.get)),
            Contestant("LMDB get", each(peers.lmdb_get)),
        ],
        reference="diskcache get",
        goals=[Goal("castore get, in memory", 8.0, "diskcache get")] if label == "2 KB" else [],
    )
