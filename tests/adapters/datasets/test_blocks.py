"""Steps in blocks, over an input that is edited at random, in runs that are killed at random: results are
those of plain `datasets`, and only blocks that an edit touched run.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import datasets
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from castore import Store
from castore.adapters.datasets import CacheWarning, block_step, cached_filter, cached_map, wait
from castore.adapters.datasets.block_entries import BLOCKS_FOLDER
from castore.adapters.datasets.cutting import Cut, cut
from castore.keys.table_digest import table_digest
from tests.adapters.datasets.small_blocks import slow_blocks, small_blocks, told
from tests.helpers import LONG, flip, payload

pytestmark = [pytest.mark.torture, pytest.mark.timeout(1800 if LONG else 600)]
#: Rows that are written at a time, so that the types of a result follow from so many.
_FIRST = 16
_BATCH = 7


class Ran:
    """Counts rows in a file, whatever process runs them; does not count in keys."""

    file = -1

    def __castore_key__(self) -> str:
        return "Ran"

    def __call__(self, rows: int = 1) -> None:
        sys.audit("tests.ran")
        os.write(self.file, b"." * rows)


ran = Ran()


class Operator:
    """An operator with a parameter."""

    def __init__(self, parameter: int) -> None:
        self.parameter = parameter


class Adds(Operator):
    """A map of one row at a time."""

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        ran()
        return {"sum": sample["number"] + self.parameter, "text": sample["text"] + "!"}


class Types(Operator):
    """A map whose types follow from the rows; may be an error."""

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        ran()
        n = sample["number"] % 50
        return {"type": None if n < 15 * self.parameter else {"b": n, "a": [n / 2] * (n % 2)}}


class Keeps(Operator):
    """A filter."""

    def __call__(self, sample: dict[str, Any]) -> Any:
        ran()
        return sample["number"] % (self.parameter + 2) == 0


class Groups(Operator):
    """A map whose result depends on what else is in the batch."""

    def __call__(self, samples: dict[str, list[Any]]) -> dict[str, Any]:
        ran(len(samples["text"]))
        joined, size = "".join(samples["text"]), 10 + self.parameter
        return {"piece": [joined[at : at + size] for at in range(0, len(joined), size)]}


class Numbers(Operator):
    """A map of rows and their numbers."""

    def __call__(self, sample: dict[str, Any], number: int) -> dict[str, Any]:
        ran()
        return {"at": number * self.parameter}


class Spreads(Operator):
    """A filter that sees batches, and the numbers of their rows."""

    def __call__(self, samples: dict[str, list[Any]], numbers: list[int]) -> list[bool]:
        ran(len(numbers))
        return [number % (self.parameter + 2) == 0 for number in numbers]


_BATCHED = {"batched": True, "batch_size": _BATCH}
#: Each step's operator, arguments, and cut; a step without a cut is not counted.
STEPS: dict[str, tuple[type[Operator], str, dict[str, Any], Cut]] = {
    "adds": (Adds, "map", {}, Cut(None, _FIRST)),
    "types": (Types, "map", {"remove_columns": ["text"]}, Cut(None, _FIRST)),
    "keeps": (Keeps, "filter", {}, Cut(None, _FIRST)),
    "groups": (
        Groups,
        "map",
        {**_BATCHED, "remove_columns": ["text", "number", "words"]},
        Cut(_BATCH, _FIRST),
    ),
    "numbers": (Numbers, "map", {"with_indices": True}, Cut(1, _FIRST)),
    "spreads": (Spreads, "filter", {**_BATCHED, "with_indices": True}, Cut(_BATCH, _FIRST)),
}
NUMBERED = {"numbers", "spreads"}
_FEATURES = datasets.Features(
    {
        "text": datasets.Value("string"),
        "number": datasets.Value("int64"),
        "words": datasets.List(datasets.Value("string")),
    }
)


def die_with_workers(moment: int) -> None:
    """Kill this process and its children at their call number ``moment`` of those that run a row, or open,
    rename, link, lock or remove a file.
    """
    os.setsid()
    left = moment

    def count(event: str, _: object) -> None:
        nonlocal left
        if event == "tests.ran" or event in ("open", "os.rename", "os.link", "os.remove", "fcntl.flock"):
            left -= 1
            if left < 0:
                os.killpg(0, signal.SIGKILL)

    sys.addaudithook(count)


def outcome(make: Callable[[], Any]) -> Any:
    """All that is seen of a result; the type of an error."""
    try:
        return told(make())
    except Exception as error:
        return type(error)


class Edits(RuleBasedStateMachine):
    """Edits the input, the operators' parameters and the store between runs."""

    @initialize(rows=st.integers(1, 300 if LONG else 180))
    def begin(self, rows: int) -> None:
        # Processes begin with the features of fewer rows than decide them, and so with wrong ones at times.
        self.blocks = contextlib.ExitStack()
        self.blocks.enter_context(small_blocks())
        self.blocks.enter_context(mock.patch.object(block_step, "GUESS_ROWS", _FIRST // 4))
        self.folder = tempfile.TemporaryDirectory(prefix="castore blocks ")
        self.counter = Path(self.folder.name, "ran")
        Ran.file = os.open(self.counter, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
        self.store = Store(f"{self.folder.name}/store", memory=0)
        self.next = 0
        self.rows: list[dict[str, Any]] = []
        #: The blocks that must be in the store: for each step, by their digests, the features of the result
        #: and, where it counts, the number of the first row.
        self.known: set[tuple[Any, ...]] = set()
        self.append(rows)

    def teardown(self) -> None:
        if hasattr(self, "store"):
            wait()
            self.store.close()
            os.close(Ran.file)
            self.folder.cleanup()
            self.blocks.close()

    def fresh(self, count: int) -> list[dict[str, Any]]:
        numbers = range(self.next, self.next + count)
        self.next += count
        return [
            {
                "text": f"{n} " + "word " * (n * 31 % 17),
                "number": n,
                "words": None if n % 19 == 0 else ["w"] * (n % 3),
            }
            for n in numbers
        ]

    # --- edits of the input

    @rule(rows=st.integers(1, 60))
    def append(self, rows: int) -> None:
        self.rows += self.fresh(rows)

    @rule(place=st.integers(0, 400), rows=st.integers(1, 20))
    def insert(self, place: int, rows: int) -> None:
        place %= len(self.rows) + 1
        self.rows[place:place] = self.fresh(rows)

    @rule(place=st.integers(0, 400), rows=st.integers(1, 20))
    def delete(self, place: int, rows: int) -> None:
        place %= len(self.rows) + 1
        del self.rows[place : place + rows]

    @rule(place=st.integers(0, 400))
    def change(self, place: int) -> None:
        if self.rows:
            place %= len(self.rows)
            self.rows[place] = {**self.rows[place], "text": self.rows[place]["text"] + "changed"}

    @rule(seed=st.integers(0, 9))
    def shuffle(self, seed: int) -> None:
        random.Random(seed).shuffle(self.rows)

    @precondition(lambda self: len(self.rows) < (250 if LONG else 150))
    @rule(place=st.integers(0, 400))
    def repeat(self, place: int) -> None:
        self.rows += self.rows[place % (len(self.rows) + 1) :]

    @rule(begin=st.integers(0, 100), step=st.sampled_from([1, 1, 1, 2]))
    def select(self, begin: int, step: int) -> None:
        self.rows = self.rows[begin % (len(self.rows) + 1) :: step]

    # --- what happens to the store

    @rule()
    def open_anew(self) -> None:
        wait()
        self.store.close()
        self.store = Store(f"{self.folder.name}/store", memory=0)

    @rule(seed=st.integers(0, 9), steps=st.booleans())
    def lose_blocks(self, seed: int, steps: bool) -> None:
        chance = random.Random(seed)
        names = [entry.name for entry in self.store.entries(BLOCKS_FOLDER)]
        self.store.delete_many(chance.sample(names, len(names) // 3))
        if steps:
            self.store.delete_many([entry.name for entry in self.store.entries("steps")])
            self.store.gc(grace=0)
        self.known.clear()

    @rule(seed=st.integers(0, 9))
    def damage_a_block(self, seed: int) -> None:
        names = sorted(entry.name for entry in self.store.entries(BLOCKS_FOLDER))
        if names:
            path, offset, length = payload(self.store, random.Random(seed).choice(names))
            flip(path, offset + length // 2)
        self.known.clear()

    @rule()
    def lose_the_steps(self) -> None:
        """Blocks stay, and put the steps together again."""
        self.store.delete_many([entry.name for entry in self.store.entries("steps")])

    # --- runs

    def input(self, shape: int) -> datasets.Dataset:
        """The rows as a dataset: of one table, of several ones, or a selection of another one."""
        info = datasets.DatasetInfo(description="rows", features=_FEATURES)
        table = pa.Table.from_pylist(self.rows, _FEATURES.arrow_schema)
        data = datasets.Dataset(datasets.table.InMemoryTable(table), info=info, split=datasets.Split.TRAIN)
        if shape == 1 and len(data) > 2:
            third = len(data) // 3
            pieces = [data.select(range(third)), data.select(range(third, len(data)))]
            data = datasets.concatenate_datasets(pieces)
        elif shape == 2:
            data = data.select(range(len(data) - 1, -1, -1)).select(range(len(data) - 1, -1, -1))
        return data.with_format("numpy") if shape == 3 else data

    @rule(
        name=st.sampled_from(sorted(STEPS)),
        parameter=st.sampled_from([0, 1, 1, 1, 2]),
        shape=st.integers(0, 3),
        num_proc=st.sampled_from([1] * 18 + [2, 3]),
        fresh=st.sampled_from([False] * 9 + [True]),
    )
    def run(self, name: str, parameter: int, shape: int, num_proc: int, fresh: bool) -> None:
        cut_rule = STEPS[name][-1]
        data = self.input(shape)
        plain = self._plain(name, parameter, data)
        before = self.counter.stat().st_size
        more: dict[str, Any] = {"load_from_cache_file": False} if fresh else {}
        assert self._cached(name, parameter, data, num_proc=num_proc, **more) == plain
        count = self.counter.stat().st_size - before
        if not isinstance(plain, dict) or not len(data):
            return
        wait()
        run = 0
        for first, block in self._blocks(data, cut_rule):
            about: tuple[Any, ...] = (
                name,
                parameter,
                shape == 3,
                first == 0 or plain["features"],
                table_digest(block),
            )
            about += (first,) if name in NUMBERED else ()
            run += len(block) if fresh or about not in self.known else 0
            self.known.add(about)
        # A wrong guess costs the blocks that begin with it.
        assert count <= run * (1 if num_proc == 1 else 2), "blocks that are there ran again"

    def _blocks(self, data: datasets.Dataset, cut_rule: Cut) -> list[tuple[int, pa.Table]]:
        found, first = [], 0
        for block in cut([data.with_format("arrow")[:]], cut_rule):
            found.append((first, block))
            first += len(block)
        return found

    @rule(
        name=st.sampled_from(sorted(STEPS)),
        parameter=st.sampled_from([0, 1, 1, 1, 2]),
        shape=st.integers(0, 3),
        num_proc=st.sampled_from([1] * 4 + [2]),
        moment=st.integers(0, 250),
        parts=st.booleans(),
    )
    def run_killed(
        self, name: str, parameter: int, shape: int, num_proc: int, moment: int, parts: bool
    ) -> None:
        """A run that is killed, unless it ends before, and another one behind it."""
        data = self.input(shape)
        plain = self._plain(name, parameter, data)
        wait()
        with slow_blocks(4) if parts else contextlib.nullcontext():
            if not (child := os.fork()):
                try:
                    tempfile.tempdir = self.folder.name  # what a killed pool leaves
                    die_with_workers(moment)
                    self._cached(name, parameter, data, num_proc=num_proc)
                    wait()
                finally:
                    os._exit(0)
            assert os.waitpid(child, 0)[1] in (0, signal.SIGKILL)
            assert self._cached(name, parameter, data) == plain

    def _plain(self, name: str, parameter: int, data: datasets.Dataset) -> Any:
        operator, kind, options, _ = STEPS[name]
        options = {**options, "writer_batch_size": _FIRST, "load_from_cache_file": False}
        return outcome(lambda: getattr(data, kind)(operator(parameter), **options))

    def _cached(self, name: str, parameter: int, data: datasets.Dataset, **more: Any) -> Any:
        operator, kind, options, _ = STEPS[name]
        step = cached_map if kind == "map" else cached_filter
        options = {**options, "writer_batch_size": _FIRST, "store": self.store, **more}
        return self._quietly(lambda: step(data, operator(parameter), **options))

    @rule(parameter=st.sampled_from([0, 1, 2]), shape=st.integers(0, 2))
    def run_chain(self, parameter: int, shape: int) -> None:
        data = self.input(shape)
        small = {"writer_batch_size": _FIRST}
        steps: list[tuple[str, Any, dict[str, Any]]] = [
            ("map", Adds(1), small),
            ("filter", Keeps(parameter), small),
            ("map", Numbers(parameter), {**small, "with_indices": True}),
            ("filter", Spreads(0), {**small, **_BATCHED, "with_indices": True}),
        ]

        def cached() -> datasets.Dataset:
            result = data
            for kind, operator, options in steps:
                step = cached_map if kind == "map" else cached_filter
                result = step(result, operator, store=self.store, **options)
            return result

        plain = data
        for kind, operator, options in steps:
            plain = getattr(plain, kind)(operator, load_from_cache_file=False, **options)
        assert self._quietly(cached) == told(plain)

    def _quietly(self, make: Callable[[], Any]) -> Any:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "the cached step .* is damaged", CacheWarning)
            return outcome(make)


Edits.TestCase.settings = settings(
    max_examples=300 if LONG else 8,
    stateful_step_count=40 if LONG else 20,
    deadline=None,
    derandomize=not LONG,
    suppress_health_check=list(HealthCheck),
)
TestEdits = Edits.TestCase
