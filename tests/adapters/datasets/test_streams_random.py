"""Streams with kept calls over an input that is edited at random, broken off and resumed anywhere: rows are
those of plain `datasets`, and a pass over rows that were all seen runs nothing.
"""

from __future__ import annotations

import gc
import itertools
import random
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import datasets
import pytest
from datasets.distributed import split_dataset_by_node
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from castore import Store
from castore.adapters.datasets import call_blocks
from castore.adapters.datasets.call_blocks import CALLS_FOLDER, keep_left_over
from tests.adapters.datasets import stream_cases
from tests.adapters.datasets.stream_cases import STEPS, Step, cached, plain, ran, told
from tests.helpers import LONG, flip, payload

pytestmark = [pytest.mark.torture, pytest.mark.timeout(1800 if LONG else 600)]

#: Steps that give the columns back that they take, so that a chain of them has them all.
CHAINED = ["map", "keywords", "itself", "odd", "indices", "columns", "filter", "filter batches"]
LAST = sorted(set(STEPS) - {"coroutine", "coroutine filter"})
#: Errors of a chain whose steps do not fit together.
_MISFITS = (TypeError, ValueError, KeyError)


class Streams(RuleBasedStateMachine):
    """The rows by shard, a store, and what plain `datasets` makes of the rows."""

    @initialize(shards=st.lists(st.integers(0, 40), min_size=1, max_size=4))
    def begin(self, shards: list[int]) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.store = Store(f"{self.folder.name}/store", memory=0)
        self.numbers = itertools.count()
        self.shards = [[next(self.numbers) for _ in range(count)] for count in shards]
        patched = {"TARGET_CALLS": 8, "TARGET_BYTES": 1600}
        self.patches = [mock.patch.object(call_blocks, name, value) for name, value in patched.items()]
        for patch in self.patches:
            patch.start()

    def teardown(self) -> None:
        """Remove the store."""
        if hasattr(self, "folder"):
            for patch in self.patches:
                patch.stop()
            self.store.close()
            self.folder.cleanup()

    # --- edits

    @rule(shard=st.integers(0, 9), place=st.integers(0, 50), count=st.integers(1, 12))
    def insert(self, shard: int, place: int, count: int) -> None:
        rows = self.shards[shard % len(self.shards)]
        at = place % (len(rows) + 1)
        rows[at:at] = [next(self.numbers) for _ in range(count)]

    @rule(shard=st.integers(0, 9), place=st.integers(0, 50), count=st.integers(1, 12))
    def delete(self, shard: int, place: int, count: int) -> None:
        rows = self.shards[shard % len(self.shards)]
        del rows[place % (len(rows) + 1) :][:count]

    @rule(shard=st.integers(0, 9), seed=st.integers(0, 9))
    def shuffle(self, shard: int, seed: int) -> None:
        random.Random(seed).shuffle(self.shards[shard % len(self.shards)])

    @rule(seed=st.integers(0, 9))
    def order_shards(self, seed: int) -> None:
        random.Random(seed).shuffle(self.shards)

    @rule(shard=st.integers(0, 9))
    def repeat(self, shard: int) -> None:
        if sum(map(len, self.shards)) < 200:
            self.shards.append(list(self.shards[shard % len(self.shards)]))

    @rule(value=st.integers(0, 3), count=st.integers(2, 20))
    def repeat_a_row(self, value: int, count: int) -> None:
        self.shards[-1] += [value] * count

    # --- what happens to the store

    @rule(seed=st.integers(0, 9))
    def lose_blocks(self, seed: int) -> None:
        names = [entry.name for entry in self.store.entries(CALLS_FOLDER)]
        self.store.delete_many(random.Random(seed).sample(names, len(names) // 3))

    @rule(seed=st.integers(0, 9))
    def damage_a_block(self, seed: int) -> None:
        names = sorted(entry.name for entry in self.store.entries(CALLS_FOLDER))
        if names:
            path, offset, length = payload(self.store, random.Random(seed).choice(names))
            flip(path, offset + length // 2)

    @rule()
    def open_anew(self) -> None:
        self.store.close()
        self.store = Store(f"{self.folder.name}/store", memory=0)

    # --- passes

    @rule(
        chain=st.tuples(st.lists(st.sampled_from(CHAINED), max_size=2), st.sampled_from(LAST)),
        before=st.sampled_from(["", "", "shuffle", "skip", "shard"]),
        behind=st.sampled_from(["", "", "shuffle", "take", "skip", "node"]),
        epoch=st.sampled_from([0, 0, 1, 2]),
        stops=st.lists(st.integers(0, 60), max_size=2),
    )
    def run(
        self, chain: tuple[list[str], str], before: str, behind: str, epoch: int, stops: list[int]
    ) -> None:
        def build(step: Step) -> Any:
            if not sum(map(len, self.shards)):
                return None
            source = datasets.IterableDataset.from_generator(
                stream_cases.made_rows, gen_kwargs={"shards": [list(rows) for rows in self.shards]}
            )
            stream = self._changed(source, before)
            for name in [*chain[0], chain[1]]:
                kind, function, arguments = STEPS[name]
                stream = step(stream, kind, function, **arguments)
            stream = self._changed(stream, behind)
            stream.set_epoch(epoch)
            return stream

        if build(plain) is None:
            return
        expected = self._passes(build, plain, stops)
        assert self._passes(build, cached(self.store), stops) == expected
        whole = self._passes(build, plain, [])
        assert self._passes(build, cached(self.store), []) == whole
        ran()
        assert self._passes(build, cached(self.store), []) == whole
        if not isinstance(whole[-1], str):
            assert ran() == 0, "rows that were seen ran again"

    def _passes(self, build: Any, step: Step, stops: list[int]) -> Any:
        """The rows of a pass that stops at some places, and goes on in another object with its state."""
        rows: list[Any] = []
        state = None
        try:
            for stop in [*stops, None]:
                stream = build(step)
                if state is not None:
                    stream.load_state_dict(state)
                rows.append([told(row) for row in itertools.islice(stream, stop)])
                state = stream.state_dict()
        except _MISFITS as error:
            rows.append(f"{type(error).__name__}: {error}")
        gc.collect()  # an iteration in which a later step has failed may live until then
        keep_left_over()
        return rows

    def _changed(self, stream: Any, how: str) -> Any:
        return {
            "": lambda: stream,
            "shuffle": lambda: stream.shuffle(seed=5, buffer_size=6),
            "take": lambda: stream.take(30),
            "skip": lambda: stream.skip(9),
            "shard": lambda: stream.shard(num_shards=min(2, stream.num_shards), index=0),
            "node": lambda: split_dataset_by_node(stream, rank=1, world_size=2),
        }[how]()


Streams.TestCase.settings = settings(
    max_examples=400 if LONG else 20,
    stateful_step_count=20 if LONG else 10,
    deadline=None,
    derandomize=not LONG,
    suppress_health_check=list(HealthCheck),
)


TestStreams = Streams.TestCase


def test_two_interleaved_streams_of_one_function_leave_each_other_whole(tmp_path: Path) -> None:
    with Store(tmp_path / "store", memory=0) as store:

        def build(step: Step) -> Any:
            return datasets.interleave_datasets(
                [
                    step(stream_cases.from_python(), "map", stream_cases.adds).remove_columns(["nested"])
                    for _ in range(2)
                ]
            )

        expected = [told(row) for row in build(plain)]
        for _ in range(2):
            assert [told(row) for row in build(cached(store))] == expected
        ran()
        assert [told(row) for row in build(cached(store))] == expected
        assert ran() == 0
