"""A slow block is made from parts: a kill, an error or a change of a row costs a part of it."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import random
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import datasets
import numpy as np
import pytest

from castore import Store
from castore.adapters.datasets import Pipeline, block_step, cached_filter, cached_map, call_watch
from castore.adapters.datasets.block_entries import BLOCKS_FOLDER
from castore.adapters.datasets.block_parts import PARTS_FOLDER
from tests.adapters.datasets.small_blocks import slow_blocks, small_blocks, told
from tests.helpers import flip

#: Rows of the input, of a block and of a part, on average.
COUNT, ROWS, PART = 600, 100, 6


class Ran:
    """Counts rows in a file, whatever process they run in; does not count in keys."""

    def __init__(self) -> None:
        self.file = -1

    def __castore_key__(self) -> str:
        return "Ran"

    def __call__(self) -> None:
        os.write(self.file, b".")

    def take(self) -> int:
        """How many rows have run since the last call."""
        size = os.fstat(self.file).st_size
        os.ftruncate(self.file, 0)
        return size


ran = Ran()


@pytest.fixture(autouse=True)
def _counted(tmp_path: Path) -> Iterator[None]:
    ran.file = os.open(tmp_path / "ran", os.O_RDWR | os.O_CREAT | os.O_APPEND)
    with small_blocks(ROWS * 64, ROWS):
        yield
    os.close(ran.file)


def texts(count: int = COUNT) -> list[str]:
    return [f"{number} " + "word " * (number * 7 % 13) for number in range(count)]


def rows(values: list[Any]) -> datasets.Dataset:
    return datasets.Dataset.from_dict({"text": values})


def measured(row: dict[str, Any]) -> dict[str, Any]:
    ran()
    return {"size": len(row["text"])}


def is_odd(row: dict[str, Any]) -> bool:
    ran()
    return bool(len(row["text"]) % 2)


def stored(store: Store, folder: str) -> dict[str, int]:
    return {entry.name: entry.size for entry in store.entries(folder)}


@pytest.mark.parametrize("num_proc", [1, 2])
def test_a_changed_inserted_or_deleted_row_runs_a_part(store: Store, num_proc: int) -> None:
    values = texts()
    with slow_blocks(ROWS // PART):
        cached_map(rows(values), measured, store=store, num_proc=num_proc)
        assert COUNT <= ran.take() < 1.2 * COUNT  # of each first block the rows that told that it is slow
        for place in (0, 130, 333, COUNT - 1):
            changed = random.Random(place).choice(
                [[*values[:place], "new", *values[place + 1 :]], [*values[:place], "new", *values[place:]],
                 values[:place] + values[place + 1 :]]
            )  # fmt: skip
            data = rows(changed)
            assert told(cached_map(data, measured, store=store, num_proc=num_proc)) == told(data.map(_plain))
            assert ran.take() < ROWS


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    return {"size": len(row["text"])}


def fails_at(number: int) -> Any:
    """A function that fails at that row, and has the same key as without failing."""

    def function(row: dict[str, Any]) -> dict[str, Any]:
        if failing.at is not None and row["text"].startswith(f"{failing.at} "):
            raise RuntimeError(f"row {failing.at}")
        return measured(row)

    failing.at = number
    return function


class _Failing:
    at: int | None = None

    def __castore_key__(self) -> str:
        return "failing"


failing = _Failing()


def test_an_error_leaves_the_parts_before_it(store: Store) -> None:
    data = rows(texts())
    function = fails_at(COUNT - 20)
    with slow_blocks(ROWS // PART):
        with pytest.raises(RuntimeError, match="row 580"):
            cached_map(data, function, store=store)
        before = ran.take()
        failing.at = None
        assert told(cached_map(data, function, store=store)) == told(data.map(_plain))
    assert ran.take() < COUNT - before + 6 * PART


@pytest.mark.parametrize("num_proc", [1, 2])
@pytest.mark.parametrize(("count", "at"), [(600, 580), (2500, 900), (2500, 1700)])
def test_explain_foretells_the_rows_of_parts_that_an_error_has_left(
    store: Store, count: int, at: int, num_proc: int
) -> None:
    data, function = rows(texts(count)), fails_at(at)
    with slow_blocks(ROWS // PART):
        with pytest.raises(RuntimeError, match=f"row {at}"):
            Pipeline([function], store=store, num_proc=num_proc).run(data)
        failing.at = None
        [foretold] = Pipeline([function], store=store).explain(data)
        [step] = Pipeline([function], store=store).run(data).steps
    assert foretold.rows_reused == step.rows_reused
    assert step.rows_reused > at - 6 * PART - (ROWS if num_proc > 1 else 0)


def loads_a_model(row: dict[str, Any]) -> dict[str, Any]:
    """Takes long for the first rows, and little time for the others."""
    ran()
    time.sleep(0.004 if int(row["text"].split()[0]) < 12 else 0.0005)
    return {"size": len(row["text"])}


@pytest.mark.parametrize(("first", "second"), [(2, 1), (1, 2), (3, 2), (1, 1)])
def test_parts_are_found_again_in_however_many_processes(store: Store, first: int, second: int) -> None:
    """Regression: more processes had begun more parts before they were cut anew, at another row."""
    values = texts(1500)
    with slow_blocks(), mock.patch.object(block_step, "SLOW_SECONDS", 0.1):
        Pipeline([loads_a_model], store=store, num_proc=first).run(rows(values))
        assert stored(store, PARTS_FOLDER)
        for place in (1499, 700, 20):
            changed = rows([*values[:place], f"{place} new", *values[place + 1 :]])
            [foretold] = Pipeline([loads_a_model], store=store, num_proc=second).explain(changed)
            ran.take()
            # A process that takes long for a row on a busy machine would end its run, and another begin anew.
            with mock.patch.object(call_watch, "_TELLING_SECONDS", math.inf):
                [step] = Pipeline([loads_a_model], store=store, num_proc=second).run(changed).steps
            assert foretold.rows_reused == step.rows_reused
            assert ran.take() == 1500 - step.rows_reused < 500


def test_explain_foretells_the_rows_of_parts_behind_a_changed_row(store: Store) -> None:
    data = rows(texts())
    with slow_blocks(ROWS // PART):
        Pipeline([measured], store=store).run(data)
        for place in (0, 130, 333, COUNT - 1):
            changed = rows([*texts()[:place], "new", *texts()[place + 1 :]])
            [foretold] = Pipeline([measured], store=store).explain(changed)
            [step] = Pipeline([measured], store=store).run(changed).steps
            assert foretold.rows_reused == step.rows_reused > COUNT - ROWS


def test_bytes_of_a_part_that_are_damaged_are_made_again(store: Store) -> None:
    data = rows(texts(ROWS))
    function = fails_at(ROWS - 5)
    with slow_blocks(ROWS // PART), pytest.raises(RuntimeError):
        cached_map(data, function, store=store, num_proc=1)
    before = len(stored(store, PARTS_FOLDER))
    assert before > 2
    for file in (store.path / "objects").rglob("*"):
        for place in range(16, file.stat().st_size if file.is_file() else 0, 64):
            flip(file, place)
    ran.take()
    failing.at = None
    with slow_blocks(ROWS // PART):
        assert told(cached_map(data, function, store=store)) == told(data.map(_plain))
    assert ran.take() >= ROWS - 2 * PART


def test_parts_take_no_space_once_their_block_is_there(tmp_path: Path) -> None:
    data = rows(texts())
    with Store(tmp_path / "whole", memory=0) as whole, Store(tmp_path / "parts", memory=0) as parts:
        cached_map(data, measured, store=whole)
        with slow_blocks(ROWS // PART):
            cached_map(data, measured, store=parts)
        assert stored(parts, BLOCKS_FOLDER) == stored(whole, BLOCKS_FOLDER)
        assert stored(whole, PARTS_FOLDER) == {}
        assert set(stored(parts, PARTS_FOLDER).values()) == {0}
        # But for the blob of no bytes that the parts have in common.
        assert parts.stat().blobs == whole.stat().blobs + 1


def test_a_quick_function_runs_each_row_once_and_makes_no_parts(store: Store) -> None:
    cached_map(rows(texts()), measured, store=store)
    assert ran.take() == COUNT
    assert stored(store, PARTS_FOLDER) == {}


@functools.cache
def seen() -> set[Any]:
    """Memory that is in nobody's key."""
    return set()


class Lean:
    """Remembers rows in what does not count as its state."""

    def __init__(self) -> None:
        self.seen: set[str] = set()

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.seen = set()

    def __call__(self, row: dict[str, Any]) -> bool:
        ran()
        is_new = row["text"] not in self.seen
        self.seen.add(row["text"])
        return is_new


def is_new(row: dict[str, Any]) -> bool:
    ran()
    known = row["text"] in seen()
    seen().add(row["text"])
    return not known


@pytest.mark.parametrize("way", ["cached_filter", "Pipeline", "in one piece at first"])
@pytest.mark.parametrize("function", [is_new, Lean()], ids=["a singleton", "left out of its state"])
def test_a_function_with_hidden_memory_sees_each_row_once_in_a_first_run(
    store: Store, way: str, function: Any
) -> None:
    """Regression: the rows that told that a block is slow ran twice, so a filter took them for repeated."""
    seen().clear()
    getattr(function, "seen", seen()).clear()
    data = rows([f"w{number}" for number in range(150)])
    with contextlib.ExitStack() as stack:
        if way == "in one piece at first":
            stack.enter_context(small_blocks(1 << 20, 10_000))
        stack.enter_context(slow_blocks(20))
        if way == "Pipeline":
            made: Any = Pipeline([_Filter(function)], store=store).run(data).dataset
        else:
            made = cached_filter(data, function, store=store)
    assert made["text"][:] == data["text"][:]
    assert ran.take() == 150


class _Filter:
    """An operator that is a filter, as Data-Juicer's are."""

    def __init__(self, function: Any) -> None:
        self.function = function

    def compute_stats(self, row: dict[str, Any]) -> dict[str, Any]:
        return row

    def process(self, row: dict[str, Any]) -> bool:
        return bool(self.function(row))


def new_dict(row: dict[str, Any]) -> dict[str, Any]:
    ran()
    return {"size": len(row["text"])}


def changes_the_row(row: dict[str, Any]) -> dict[str, Any]:
    ran()
    row["text"] = row["text"].upper()
    row["size"] = len(row["text"])
    return row


def changes_the_row_and_returns_another(row: dict[str, Any]) -> dict[str, Any]:
    ran()
    row["text"] = row["text"].upper()
    row["more"] = 1
    return {"size": len(row["text"])}


def deletes_a_column(row: dict[str, Any]) -> dict[str, Any]:
    ran()
    size = len(row["text"])
    del row["text"]
    return {"size": size, "n": row["n"]}


shared: dict[str, Any] = {}


def returns_one_dict_again_and_again(row: dict[str, Any]) -> dict[str, Any]:
    ran()
    shared["size"] = len(row["text"])
    return shared


def uses_the_number(row: dict[str, Any], number: int) -> dict[str, Any]:
    ran()
    return {"size": number + len(row["text"])}


def of_a_column(text: str) -> dict[str, Any]:
    ran()
    return {"size": len(text)}


def of_a_batch(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
    ran()
    batch["n"] = [number + 1 for number in batch["n"]]
    return {"size": [len(text) for text in batch["text"]]}


@functools.cache
def buffer() -> np.ndarray[Any, Any]:
    """Memory that a function fills again and again, as models do; in nobody's key."""
    return np.zeros((5, 2))


def fills_one_buffer(batch: dict[str, list[Any]]) -> dict[str, Any]:
    ran()
    buffer()[:] = np.array(batch["n"])[:, None]
    return {"vector": buffer()}


@functools.cache
def one_list() -> list[list[int]]:
    """A list that a function fills again and again; in nobody's key."""
    return [[] for _ in range(5)]


def fills_one_list(batch: dict[str, list[Any]]) -> dict[str, Any]:
    ran()
    for filled, number in zip(one_list(), batch["n"], strict=True):
        filled[:] = [number]
    return {"vector": one_list()}


def returns_nothing(row: dict[str, Any]) -> None:
    ran()


def returns_a_copy_of_the_row(row: Any) -> Any:
    ran()
    other = row.copy()
    row["text"] = "of no account"
    other["size"] = len(other["text"])
    return other


def of_numpy(batch: dict[str, Any]) -> dict[str, Any]:
    ran()
    batch["n"] += 1
    return {"size": batch["n"] * 2}


@pytest.mark.filterwarnings("ignore:.*remembers rows")  # a dict that it returns again is a state
@pytest.mark.parametrize("is_small", [False, True])
@pytest.mark.parametrize(
    ("function", "options", "calls"),
    [
        (new_dict, {}, COUNT),
        (changes_the_row, {}, COUNT),
        (changes_the_row_and_returns_another, {}, COUNT),
        (deletes_a_column, {"remove_columns": ["text"]}, COUNT),
        (returns_one_dict_again_and_again, {}, COUNT),
        (uses_the_number, {"with_indices": True}, COUNT),
        (of_a_column, {"input_columns": "text"}, COUNT),
        (of_a_batch, {"batched": True, "batch_size": 5}, COUNT // 5),
        (fills_one_buffer, {"batched": True, "batch_size": 5}, COUNT // 5),
        (returns_nothing, {}, COUNT),
        (returns_a_copy_of_the_row, {}, COUNT),
        (of_numpy, {"batched": True, "batch_size": 5}, COUNT // 5),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_no_row_runs_twice_and_the_result_is_that_of_one_pass(
    store: Store, function: Any, options: dict[str, Any], calls: int, is_small: bool
) -> None:
    data = datasets.Dataset.from_dict({"text": texts(), "n": list(range(COUNT))})
    if function is of_numpy:
        data = data.with_format("numpy")
    plain = told(data.map(function, **options))
    ran.take()
    shared.clear()
    with contextlib.ExitStack() as stack:
        if is_small:
            stack.enter_context(small_blocks(1 << 20, 10_000))
        stack.enter_context(slow_blocks(20))
        made = cached_map(data, function, store=store, **options)
    assert told(made) == plain
    assert ran.take() == calls


@pytest.mark.filterwarnings("ignore:.*remembers rows")
@pytest.mark.parametrize("function", [fills_one_list, fills_one_buffer])
def test_what_several_calls_have_given_in_one_place_is_kept_of_each(store: Store, function: Any) -> None:
    """The run ends after some calls, and the next one takes their results."""
    data = datasets.Dataset.from_dict({"text": texts(), "n": list(range(COUNT))})
    how: dict[str, Any] = {"batched": True, "batch_size": 5}
    plain = told(data.map(function, **how))

    def slowly(batch: dict[str, list[Any]]) -> dict[str, Any]:
        time.sleep(0.004)
        return dict(function(batch))

    ran.take()
    with (
        small_blocks(1 << 20, 10_000),
        slow_blocks(20),
        mock.patch.object(call_watch, "_TELLING_SECONDS", 0.02),
    ):
        made = cached_map(data, slowly, store=store, **how)
    assert told(made) == plain
    assert ran.take() == COUNT // 5


def test_a_function_that_takes_long_at_first_is_soon_known_to_be_quick(store: Store) -> None:
    @functools.cache
    def load(number: int) -> None:
        time.sleep(0.6)  # more than the time that tells

    def loads(row: dict[str, Any]) -> dict[str, Any]:
        if (number := int(row["text"].split()[0])) < 2:
            load(number)
        return measured(row)

    with small_blocks(1 << 20, 10_000), mock.patch.object(block_step, "SLOW_SECONDS", 10.0):
        data = rows(texts(4000))
        made = cached_map(data, loads, store=store, fingerprint="loads")
    assert told(made) == told(data.map(_plain))
    assert len(data) <= ran.take() < 1.1 * len(data)
    assert 0 < len(stored(store, PARTS_FOLDER)) < 200  # of thousands


def test_rows_of_which_some_take_long_are_kept_in_parts(store: Store) -> None:
    def in_turns(row: dict[str, Any]) -> dict[str, Any]:
        if int(row["text"].split()[0]) % 100 > 70:
            time.sleep(0.005)
        if int(row["text"].split()[0]) == 990:
            raise RuntimeError("the end")
        return measured(row)

    with (
        small_blocks(1 << 17, 1000),
        mock.patch.object(block_step, "SLOW_SECONDS", 0.5),
        mock.patch.object(call_watch, "_TELLING_SECONDS", 0.02),
        pytest.raises(RuntimeError, match="the end"),
    ):
        cached_map(rows(texts(1000)), in_turns, store=store, fingerprint="turns")
    kept = sum(entry.metadata["rows"] for entry in store.entries(PARTS_FOLDER))
    assert kept > 800


@pytest.mark.parametrize("way", ["cached_map", "Pipeline", "Pipeline of one process", "processes"])
def test_few_rows_of_a_slow_function_are_kept_in_parts_too(store: Store, way: str) -> None:
    """They are not cut into blocks, unless a function turns out to be slow."""
    data, function = rows(texts(90)), fails_at(70)

    def run() -> datasets.Dataset:
        if way.startswith("Pipeline"):
            num_proc = None if way == "Pipeline" else 1
            return Pipeline([function], store=store, num_proc=num_proc).run(data).dataset
        return cached_map(data, function, store=store, num_proc=2 if way == "processes" else None)

    with small_blocks(1 << 20, 10_000), slow_blocks(4096):
        with pytest.raises(RuntimeError, match="row 70"):
            run()
        kept = sum(entry.metadata["rows"] for entry in store.entries(PARTS_FOLDER))
        assert kept >= 60
        failing.at = None
        ran.take()
        assert told(run()) == told(data.map(_plain))
    assert ran.take() <= len(data) - kept + 10
    run()
    assert ran.take() == 0


def test_processes_share_the_parts_of_one_block(store: Store, tmp_path: Path) -> None:
    folder = tmp_path / "pids"
    folder.mkdir()

    def wait_for_another(row: dict[str, Any]) -> dict[str, Any]:
        number = int(row["text"].split()[0])
        (folder / f"{os.getpid()}").touch()
        while number > 10 and len(os.listdir(folder)) < 2:
            time.sleep(0.001)
        return {"pid": os.getpid()}

    with small_blocks(1 << 20, 1000), slow_blocks(20):
        made = cached_map(rows(texts(400)), wait_for_another, store=store, num_proc=2, fingerprint="pids")
    assert len(stored(store, BLOCKS_FOLDER)) <= 2  # with its second name
    assert len(set(made["pid"])) == 2


def test_a_column_that_has_no_value_in_some_parts_takes_its_type_from_the_others(store: Store) -> None:
    def sparse(row: dict[str, Any]) -> dict[str, Any]:
        is_rare = row["text"].startswith("77 ")
        return {"mark": row["text"] if is_rare else None, "list": [1] if is_rare else [], "n": {"x": None}}

    values = texts(ROWS)
    for changed in (values, [text for text in values if not text.startswith("77 ")], values[5:], values):
        data = rows(changed)
        with slow_blocks(ROWS // PART):
            assert told(cached_map(data, sparse, store=store)) == told(data.map(sparse))


def by_number(values: dict[int, Any], default: Any) -> Any:
    """A function that gives those values for some rows."""

    def function(row: dict[str, Any]) -> dict[str, Any]:
        ran()
        return {"value": values.get(int(row["text"].split()[0]), default)}

    return function


@pytest.mark.filterwarnings("ignore:.*ran as one piece.*several types")
@pytest.mark.parametrize(
    ("values", "default"),
    [
        ({30: "x"}, None), ({5: "x"}, None), ({30: 0.5}, 1), ({5: 0.5}, 1), ({5: 0.5}, 2**60 + 1),
        ({30: "x"}, 1), ({5: "x"}, 1), ({30: [1]}, []), ({5: [1]}, []), ({5: [0.5]}, [1]),
        ({5: {"b": 1}}, {"a": 1}), ({30: {"a": 0.5}}, {"a": 1}), ({5: {"a": 0.5}}, {"a": 1}),
    ],
)  # fmt: skip
def test_the_first_rows_that_are_written_decide_the_types_as_in_datasets(
    store: Store, values: dict[int, Any], default: Any
) -> None:
    """`map` writes 20 rows at once: a value among these counts for the type, and a later one does not."""
    data, function = rows(texts(60)), by_number(values, default)

    def outcome(make: Any) -> Any:
        try:
            return told(make(function, writer_batch_size=20))
        except Exception as error:
            return type(error)

    plain = outcome(data.map)
    with small_blocks(1 << 20, 10_000), slow_blocks(4096):
        assert outcome(partial(cached_map, data, store=store)) == plain


@pytest.mark.filterwarnings("ignore:.*ran as one piece.*several types")
def test_a_first_batch_that_gives_no_rows_decides_no_types(store: Store) -> None:
    def late(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        return {"text": [len(text) for text in batch["text"] if int(text.split()[0]) >= 25]}

    data = rows(texts(60))
    options: dict[str, Any] = {"batched": True, "batch_size": 10}
    with small_blocks(1 << 20, 10_000), slow_blocks(4096):
        made = cached_map(data, late, store=store, **options)
    assert told(made) == told(data.map(late, **options))
    assert made.features["text"].dtype == "int64"


@pytest.mark.filterwarnings("ignore:.*ran as one piece")
@pytest.mark.parametrize("place", [5, *range(40, 48), 59])
def test_a_key_that_is_missing_behind_the_first_rows_is_what_it_is_in_datasets(
    store: Store, place: int
) -> None:
    """An error of one kind or another, as the row lies in what `map` writes at once: 20 rows here."""

    def vanishes(row: dict[str, Any]) -> dict[str, Any]:
        return {"n": 1} if row["text"].startswith(f"{place} ") else {"m": 2, "n": 1}

    data = rows(texts(60))

    def outcome(make: Any) -> Any:
        try:
            return told(make(vanishes, writer_batch_size=20))
        except Exception as error:
            return type(error)

    with small_blocks(1 << 20, 10_000), slow_blocks(4096):
        assert outcome(partial(cached_map, data, store=store)) == outcome(data.map)


def test_rows_with_other_keys_run_twice_at_most(store: Store) -> None:
    def appears(row: dict[str, Any]) -> dict[str, Any]:
        ran()
        return {"n": 1, "m": 2} if row["text"].startswith("40 ") else {"m": 2, "n": 1}

    def vanishes(row: dict[str, Any]) -> dict[str, Any]:
        ran()
        return {"n": 1} if row["text"].startswith("40 ") else {"m": 2, "n": 1}

    data = rows(texts(60))
    with small_blocks(1 << 20, 10_000), slow_blocks(4096):
        made = cached_map(data, appears, store=store)
        assert made.column_names == ["text", "m", "n"]
        assert ran.take() <= 60 + 2  # another order is none
        with pytest.raises(KeyError):
            cached_map(data, vanishes, store=store)
    assert ran.take() <= 2 * 60


def test_filters_and_pipelines_are_made_in_parts(store: Store) -> None:
    data = rows(texts())

    class Odd:
        def compute_stats(self, sample: dict[str, Any]) -> dict[str, Any]:
            ran()
            sample["__dj__stats__"]["length"] = len(sample["text"])
            return sample

        def process(self, sample: dict[str, Any]) -> bool:
            return bool(sample["__dj__stats__"]["length"] % 2)

    with slow_blocks(ROWS // PART):
        kept = cached_filter(data, is_odd, store=store)
        assert told(kept) == told(data.filter(lambda row: len(row["text"]) % 2))
        result = Pipeline([measured, Odd()], store=store).run(data).dataset
        ran.take()
        changed = rows([*texts()[:300], "new", *texts()[301:]])
        cached_filter(changed, is_odd, store=store)
        assert ran.take() < ROWS
        again = Pipeline([measured, Odd()], store=store).run(changed)
        assert ran.take() < 2 * ROWS
        first = again.steps[0]
        assert first.rows_in is not None
        assert 0 < first.rows_in - first.rows_reused < ROWS
    assert len(result) == len(kept)
