"""A store beside a dictionary: whatever is done to both in whatever order, the store says what the
dictionary says.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from castore import NameConflictError, NotFoundError, Store
from castore.objects.codecs import FRAME_SIZE
from castore.objects.packs import PACK_LIMIT
from tests.helpers import LONG, mixed, noise, object_files, recount, text

NAMES = st.sampled_from(["a", "a/b", "a/b/c", "ab", "d/e", "d/f", "ä/\U0010ffff", "z"])
SIZES = st.sampled_from(
    [0, 1, 500, PACK_LIMIT, PACK_LIMIT + 1, FRAME_SIZE, FRAME_SIZE + 1, 4 * FRAME_SIZE + 5]
)
BLOBS = st.builds(
    lambda make, size, seed: make(size, seed), st.sampled_from([text, noise, mixed]), SIZES, st.integers(0, 2)
)
CODECS = st.sampled_from(["auto", "zstd", "lz4", "gzip", "none"])


class Model(RuleBasedStateMachine):
    """`self.kept` holds what must be readable; `self.maybe` what gc with a budget was free to take."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="castore-model-"))
        self.kept: dict[str, bytes] = {}
        self.pinned: set[str] = set()
        self.expired: set[str] = set()  # stand in the index, but are a miss
        self.handles: list[tuple[Any, bytes]] = []

    @initialize(memory=st.sampled_from([0, 400_000, 64_000_000]), codec=CODECS)
    def make(self, memory: int, codec: str) -> None:
        self.memory = memory
        self.store = Store(self.folder / "store", codec=codec, memory=memory)

    def teardown(self) -> None:
        for file, _ in self.handles:
            file.close()
        if hasattr(self, "store"):
            self.store.close()
        shutil.rmtree(self.folder)

    # Actions

    def in_the_way(self, name: str) -> bool:
        standing = set(self.kept) | (self.expired & self.pinned)
        return any(other.startswith(name + "/") or name.startswith(other + "/") for other in standing)

    def specified(self, name: str, data: bytes, pin: bool = False) -> None:
        gone = {
            other for other in self.expired if other.startswith(name + "/") or name.startswith(other + "/")
        }
        self.expired -= gone | {name}
        self.kept[name] = data
        if pin:
            self.pinned.add(name)

    @rule(name=NAMES, data=BLOBS, codec=CODECS, pin=st.booleans())
    def put(self, name: str, data: bytes, codec: str, pin: bool) -> None:
        try:
            entry = self.store.put(name, data, codec=codec, pin=pin)
        except NameConflictError:
            assert self.in_the_way(name)
            return
        assert not self.in_the_way(name)
        self.specified(name, data, pin)
        assert entry == self.store.entry(name)

    @rule(name=NAMES, data=BLOBS)
    def put_file(self, name: str, data: bytes) -> None:
        source = self.folder / "source"
        source.write_bytes(data)
        if not self.in_the_way(name):
            self.store.put_file(name, source)
            self.specified(name, data)

    @rule(blobs=st.lists(BLOBS, max_size=5), codec=CODECS)
    def put_many(self, blobs: list[bytes], codec: str) -> None:
        items = [(f"many/{number}", data) for number, data in enumerate(blobs)]
        self.store.put_many(items, codec=codec)
        for name, data in items:
            self.specified(name, data)

    @rule(name=NAMES, data=BLOBS)
    def put_what_expires(self, name: str, data: bytes) -> None:
        if self.in_the_way(name):
            return
        self.store.put(name, data, ttl=0.001)
        time.sleep(0.002)
        self.specified(name, data)
        del self.kept[name]
        self.expired.add(name)

    @rule(name=NAMES)
    def delete(self, name: str) -> None:
        assert self.store.delete(name) == (name in self.kept or name in self.expired)
        self.kept.pop(name, None)
        self.expired.discard(name)
        self.pinned.discard(name)

    @rule(name=NAMES, pin=st.booleans())
    def pin(self, name: str, pin: bool) -> None:
        try:
            (self.store.pin if pin else self.store.unpin)(name)
        except NotFoundError:
            assert name not in self.kept
            return
        (self.pinned.add if pin else self.pinned.discard)(name)

    @rule(budget=st.sampled_from([None, 0, 50_000, 1_000_000]), dry=st.booleans())
    def gc(self, budget: int | None, dry: bool) -> None:
        told = self.store.gc(budget, dry_run=True, grace=0)
        assert not (set(told.expired) | set(told.evicted)) & self.pinned
        if budget is None:
            assert not told.evicted
        if dry:
            return
        done = self.store.gc(budget, grace=0)
        assert (done.expired, done.evicted, done.freed) == (told.expired, told.evicted, told.freed)
        assert set(done.expired) == self.expired - self.pinned
        assert set(done.evicted) <= set(self.kept)
        for name in done.evicted:
            del self.kept[name]
        self.expired &= self.pinned
        assert self.store.index.totals().stored == done.remaining
        if budget is not None and not self.pinned:
            assert done.remaining <= budget
        self.handed_over()

    def handed_over(self) -> None:
        """After a gc without grace: what is on disk is what rows mean."""
        loose = {
            self.store.objects.loose.path(b.digest, b.codec) for b in self.store.index.blobs() if b.pack == 0
        }
        assert {str(path) for path in object_files(self.store)} == loose
        named = {entry.digest for entry in self.store.entries()}
        held = {bytes.fromhex(digest) for digest in named}
        extra = {blob.digest for blob in self.store.index.blobs()} - held
        assert len(extra) <= len(self.expired)

    @rule()
    def reopen(self) -> None:
        self.store.close()
        self.store = Store(self.folder / "store", memory=self.memory)

    @rule(repair=st.booleans())
    def verify(self, repair: bool) -> None:
        report = self.store.verify(repair=repair)
        assert (report.bad, report.dropped) == ([], [])
        assert report.checked == self.store.index.totals().blobs

    @rule(name=NAMES)
    def hold_open(self, name: str) -> None:
        if name in self.kept and len(self.handles) < 3:
            self.handles.append((self.store.open(name), self.kept[name]))

    # Invariants

    @invariant()
    def reads_give_exactly_what_was_put(self) -> None:
        if not hasattr(self, "store"):
            return
        names = [
            "a",
            "a/b",
            "a/b/c",
            "ab",
            "d/e",
            "d/f",
            "ä/\U0010ffff",
            "z",
            *(f"many/{i}" for i in range(5)),
        ]
        for name in names:
            assert self.store.get(name) == self.kept.get(name)
        assert self.store.get_many(names) == [self.kept.get(name) for name in names]
        listed = {entry.name: entry for entry in self.store.entries()}
        assert list(listed) == sorted(self.kept, key=str.encode)
        for name, entry in listed.items():
            assert entry.size == len(self.kept[name])
            assert entry.pinned == (name in self.pinned)

    @invariant()
    def open_files_keep_their_bytes(self) -> None:
        for file, data in self.handles:
            file.seek(0)
            assert file.read() == data

    @invariant()
    def totals_are_right(self) -> None:
        if hasattr(self, "store"):
            recount(self.store)


Model.TestCase.settings = settings(
    max_examples=40 if LONG else 20,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
TestModel = pytest.mark.torture(Model.TestCase)
