"""A collector, pushes and pulls at once, in any order of their calls: no ref ever names a missing object."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from castore import Store
from castore.errors import (
    ConflictError,
    NotFoundError,
    RemoteError,
    RemoteMissingError,
    RemoteUnreachableError,
)
from castore.remote import collect as collecting
from castore.remote import collection_state
from castore.remote import push as pushing
from castore.remote.base import Base
from castore.remote.collect import collect
from castore.remote.keys import hint_key
from castore.remote.page_cache import PageCache
from castore.remote.pull import pull
from castore.remote.push import push
from tests.helpers import text
from tests.remote.simulation import Inline, MemoryBucket, World

GRACE = 86_400.0


class Cast:
    """Stores with names in common, and the calls that actors make with them."""

    def __init__(self, folder: Path) -> None:
        self.stores = [Store(folder / str(number), memory=0) for number in range(3)]
        contents = {f"{part}/{number}": text(400, number) for part in "ab" for number in range(3)}
        self.stores[0].put_many(contents.items())
        self.stores[1].put_many({name: data for name, data in contents.items() if name[0] == "a"}.items())
        self.stores[2].put("c", b"other")
        self.reader = Store(folder / "reader", memory=0)

    def _pages(self, store: Store, bucket: MemoryBucket) -> PageCache:
        return PageCache(store.path, bucket, Inline(), (0o700, 0o600))

    def _base(self, world: World, number: int, ref: str) -> Base:
        return Base(world.remotes[number], "team", ref)

    def push(self, world: World, number: int, prefix: str, ref: str, delete: bool) -> None:
        bucket, store = MemoryBucket(world, loses_answers=True), self.stores[number]
        try:
            push(
                store.parts, bucket, self._pages(store, bucket), Inline(), ref=ref, prefix=prefix, note="",
                delete=delete, restore=False, base=self._base(world, number, ref), bad=set(), remote="team",
                progress=lambda *bytes_: None,
            )  # fmt: skip
        except (ConflictError, NotFoundError, RemoteUnreachableError):
            pass
        except RemoteError as error:
            if "does not end" not in str(error):  # the collector was killed
                raise

    def collect(self, world: World, runs: int) -> None:
        bucket = MemoryBucket(world, loses_answers=True)
        for _ in range(runs):
            try:
                collect(
                    bucket, self._pages(self.reader, bucket), keep_commits=1, grace=world.grace,
                    dry_run=False, clock=world.clock.monotonic,
                )  # fmt: skip
            except RemoteUnreachableError:
                pass
            except RemoteError as error:
                if "another collector" not in str(error):
                    raise

    def pull(self, world: World, ref: str) -> None:
        bucket = MemoryBucket(world)
        with suppress(ConflictError, RemoteMissingError):
            pull(
                self.reader.parts, bucket, self._pages(self.reader, bucket), Inline(), ref=ref, start=None,
                hint=partial(_hint, bucket, ref) if world.chance.random() < 0.5 else None, prefix="",
                below="", replace=True, began=math.inf, lazy=None, base=self._base(world, -1, ref),
                require_remote=lambda: None, progress=lambda *bytes_: None,
            )  # fmt: skip

    def close(self) -> None:
        for store in (*self.stores, self.reader):
            store.close()


def _hint(bucket: MemoryBucket, ref: str) -> bytes | None:
    try:
        return bucket.get(hint_key(ref)).data
    except RemoteMissingError:
        return None


@pytest.fixture(scope="module")
def cast(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cast]:
    made = Cast(tmp_path_factory.mktemp("cast"))
    yield made
    made.close()


def interleave(cast: Cast, seed: int, patch: pytest.MonkeyPatch) -> World:
    """Run pushes to two refs, collectors and a reader, once objects of an earlier push are garbage."""
    world = World(seed, GRACE)
    for module in (pushing, collection_state, collecting):
        patch.setattr(module, "time", world.clock)
    chance = world.chance
    cast.push(world, 0, "", "main", False)
    if chance.random() < 0.7:
        cast.push(world, 2, "", "main", True)  # removes all but one name
    world.now += chance.choice([0, GRACE / 2, 2 * GRACE])
    if chance.random() < 0.5:
        cast.collect(world, 1)
        world.now += chance.choice([0, GRACE / 2, 2 * GRACE])

    def pushes() -> None:
        for _ in range(chance.choice([1, 1, 2, 3])):
            number = chance.randrange(3)
            prefix = chance.choice(["", "a", "b"] if number == 0 else [""])
            cast.push(world, number, prefix, chance.choice(["main", "main", "dev"]), chance.random() < 0.4)

    actors: dict[str, Any] = {
        "first": pushes,
        "second": pushes,
        "collector": partial(cast.collect, world, chance.choice([1, 2, 3])),
        "reader": partial(cast.pull, world, "main"),
    }
    if chance.random() < 0.4:
        actors["rival"] = partial(cast.collect, world, 2)
    world.run(actors, kills=chance.random() < 0.5)
    world.check()
    return world


def test_no_interleaving_of_pushes_and_collections_leaves_a_ref_without_its_objects(
    cast: Cast,
    monkeypatch: pytest.MonkeyPatch,
    scale: Callable[[int, int], int],
    figure: Callable[[str], None],
) -> None:
    deleted = calls = 0
    count = scale(40, 10_000)
    for seed in range(count):
        world = interleave(cast, seed, monkeypatch)
        deleted += sum(": delete packs/" in line or ": delete trees/" in line for line in world.trace)
        calls += len(world.trace)
    assert deleted > count / 8, "collectors had something to do"
    figure(f"{count:,} interleavings of {calls:,} calls, {deleted:,} objects deleted: no ref lacked one")
