"""Operators and inputs of every kind, run in small blocks: each gives what plain `datasets` gives, errors
included, and runs nothing again but the blocks that rows were added to.
"""

from __future__ import annotations

import contextlib
import copy
import datetime
import functools
import gc
import itertools
import os
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import numpy as np
import pandas as pd
import PIL.Image
import pyarrow as pa
import pytest

from castore import Store
from castore.adapters.datasets import CacheWarning, cached_filter, cached_map, wait
from castore.adapters.datasets.block_entries import BLOCKS_FOLDER
from castore.adapters.datasets.cutting import Cut, cut
from castore.adapters.datasets.event_loops import loops_closed
from castore.errors import InvalidValueError
from tests.adapters.datasets.small_blocks import slow_blocks, small_blocks, told
from tests.helpers import flip, payload

#: Rows of the inputs. A block has about 30, and is a whole number of batches of 10 where batches count.
COUNT = 163
_WORDS = ["block", "cut", "row", "digest", "key", "step", "a much longer word than any of the others"]


class Ran:
    """Counts rows that ran in this process; the count does not count in keys."""

    def __init__(self) -> None:
        self.rows = 0

    def __castore_key__(self) -> str:
        return "Ran"

    def __call__(self, rows: int = 1) -> None:
        self.rows += rows


ran = Ran()


@pytest.fixture(autouse=True)
def _blocks() -> Iterator[None]:
    ran.rows = 0
    with small_blocks():
        yield


def rows(count: int = COUNT, first: int = 0) -> datasets.Dataset:
    """Rows of many types; row n is the same whatever the others are."""
    return copy.deepcopy(_made(count, first))


@functools.cache
def _made(count: int, first: int) -> datasets.Dataset:
    """Rows, made once."""
    numbers = range(first, first + count)
    features = datasets.Features(
        {
            "text": datasets.Value("string"),
            "number": datasets.Value("int64"),
            "label": datasets.ClassLabel(names=["bad", "good"]),
            "nested": {"b": datasets.Value("string"), "a": datasets.List({"x": datasets.Value("float32")})},
            "tags": datasets.List(datasets.Value("string")),
            "nothing": datasets.Value("null"),
        }
    )
    columns: dict[str, list[Any]] = {
        "text": [f"{n} " + _WORDS[n * 7 % 11 % 7] * (n % 5) for n in numbers],
        "number": list(numbers),
        "label": [n % 2 for n in numbers],
        "nested": [None if n % 13 == 0 else {"b": str(n), "a": [{"x": n / 2}] * (n % 3)} for n in numbers],
        "tags": [None if n % 17 == 0 else _WORDS[: n % 4] for n in numbers],
        "nothing": [None for n in numbers],
    }
    return datasets.Dataset.from_dict(columns, features=features, split=datasets.Split.TRAIN)


# --- functions ----------------------------------------------------------------------------------------------


def size(sample: dict[str, Any]) -> dict[str, Any]:
    ran()
    return {"size": len(sample["text"])}


def in_place(sample: Any) -> Any:
    ran()
    sample["text"] = sample["text"].upper()
    sample["before"] = sample["number"] - 1
    return sample


def other_types(sample: dict[str, Any]) -> dict[str, Any]:
    ran()
    return {"number": str(sample["number"]), "nothing": sample["number"] / 3, "tags": None, "label": 1}


def many_types(sample: dict[str, Any]) -> dict[str, Any]:
    ran()
    n = sample["number"]
    return {
        "z": {"d": {"c": [n, None]}, "a": [[{"k": "v"}], []]},
        "bytes": bytes([n % 256]),
        "when": datetime.datetime(2020, 1, 1, tzinfo=datetime.timezone.utc) + datetime.timedelta(days=n),
        "bool": n % 3 == 0,
        "numpy": np.float32(n),
        "array": np.arange(n % 4, dtype=np.int16),
        "matrix": np.full((2, 3), n, dtype=np.uint8),
        "none": None,
    }


def numbered(sample: dict[str, Any], number: int) -> dict[str, Any]:
    ran()
    return {"at": number}


def ranked(sample: dict[str, Any], number: int, rank: Any) -> dict[str, Any]:
    ran()
    return {"at": number, "rank": rank}


def of_columns(number: int, text: str, at: int, add: int = 0) -> dict[str, Any]:
    ran()
    return {"sum": number + add + at, "text": text[:3]}


def batch(samples: dict[str, list[Any]]) -> dict[str, Any]:
    ran(len(samples["text"]))
    return {
        "size": [len(text) for text in samples["text"]],
        "rows": [len(samples["text"])] * len(samples["text"]),
    }


def batch_numbered(samples: dict[str, list[Any]], numbers: list[int]) -> dict[str, Any]:
    ran(len(numbers))
    return {"at": numbers, "first": [numbers[0]] * len(numbers)}


def group_texts(samples: dict[str, list[Any]]) -> dict[str, Any]:
    ran(len(samples["text"]))
    joined = "".join(samples["text"])
    return {"piece": [joined[at : at + 50] for at in range(0, len(joined) // 50 * 50, 50)]}


def growing(samples: dict[str, list[Any]]) -> dict[str, Any]:
    ran(len(samples["text"]))
    return {"copy": [(n, k) for n in samples["number"] for k in range(n % 4)]}


def odd_ones(samples: dict[str, list[Any]]) -> dict[str, Any]:
    ran(len(samples["text"]))
    return {"number": [n for n in samples["number"] if n % 2 and n > 40]}


def none_at_all(samples: dict[str, list[Any]]) -> dict[str, Any]:
    ran(len(samples["text"]))
    return {"number": [n for n in samples["number"] if n < 0]}


def in_the_end(samples: dict[str, list[Any]]) -> dict[str, Any]:
    ran(len(samples["text"]))
    return {"late": [str(n) for n in samples["number"] if n >= 140]}


def table(samples: pa.Table) -> pa.Table:
    ran(len(samples))
    return pa.table({"twice": pa.compute.multiply(samples["number"], 2), "text": samples["text"]})


def table_of_some(samples: pa.Table) -> pa.Table:
    ran(len(samples))
    return samples.filter(pa.compute.greater(samples["number"], 60))


def row_of_table(sample: pa.Table) -> pa.Table:
    ran()
    return sample.select(["number"])


def frame(samples: pd.DataFrame) -> pd.DataFrame:
    ran(len(samples))
    return pd.DataFrame({"half": samples["number"] / 2, "text": samples["text"]})


def frame_of_some(samples: pd.DataFrame) -> pd.DataFrame:
    ran(len(samples))
    return samples[["number"]][samples["number"] > 60].reset_index(drop=True)


def of_arrays(sample: dict[str, Any]) -> dict[str, Any]:
    ran()
    return {"kind": type(sample["number"]).__name__, "twice": sample["number"] * 2}


def columns_seen(sample: dict[str, Any]) -> dict[str, Any]:
    ran()
    return {"seen": list(sample.keys()), "kinds": [type(sample[name]).__name__ for name in sample]}


def changes_nothing(sample: dict[str, Any]) -> None:
    ran()


async def later(sample: dict[str, Any]) -> dict[str, Any]:
    ran()
    return {"size": len(sample["text"])}


async def later_batch(samples: dict[str, list[Any]]) -> dict[str, Any]:
    ran(len(samples["text"]))
    return {"size": [len(text) for text in samples["text"]]}


async def later_numbered(sample: dict[str, Any], number: int) -> dict[str, Any]:
    ran()
    return {"at": number}


def fails_late(sample: dict[str, Any]) -> dict[str, Any]:
    ran()
    if sample["number"] == 133:
        raise ZeroDivisionError("row 133")
    return {"n": 1}


def fails_at_once(sample: dict[str, Any]) -> dict[str, Any]:
    raise LookupError("the first row")


def no_dict(sample: dict[str, Any]) -> Any:
    return 3


def null_then_texts(sample: dict[str, Any]) -> dict[str, Any]:
    ran()
    return {"x": None if sample["number"] < 80 else "text"}


def texts_then_none(sample: dict[str, Any]) -> dict[str, Any]:
    ran()
    return {"x": "text" if sample["number"] < 40 else None}


def integers_then_floats(sample: dict[str, Any]) -> dict[str, Any]:
    ran()
    return {"x": 1 if sample["number"] < 80 else 1.5}


def integers_then_whole_floats(sample: dict[str, Any]) -> dict[str, Any]:
    ran()
    return {"x": 1 if sample["number"] < 80 else 2.0}


def floats_then_integers(sample: dict[str, Any]) -> dict[str, Any]:
    ran()
    return {"x": 1.5 if sample["number"] < 80 else 1}


def numbers_of_two_widths(sample: dict[str, Any]) -> dict[str, Any]:
    ran()
    return {"x": np.int8(1) if sample["number"] < 80 else np.int64(7)}


def numbers_too_wide(sample: dict[str, Any]) -> dict[str, Any]:
    ran()
    return {"x": np.int8(1) if sample["number"] < 80 else np.int64(700)}


def mixed_at_once(sample: dict[str, Any]) -> dict[str, Any]:
    ran()
    return {"x": "a" if sample["number"] % 2 else {"b": sample["number"]}}


def mixed_late(sample: dict[str, Any]) -> dict[str, Any]:
    ran()
    n = sample["number"]
    return {"x": n if n < 80 or n % 2 else "text"}


def lists_empty_first(sample: dict[str, Any]) -> dict[str, Any]:
    ran()
    return {"x": [] if sample["number"] < 80 else ["a"]}


def lists_empty_last(sample: dict[str, Any]) -> dict[str, Any]:
    ran()
    return {"x": [] if sample["number"] > 80 else ["a"]}


def fields_that_come(sample: dict[str, Any]) -> dict[str, Any]:
    ran()
    return {"x": {"a": 1} if sample["number"] < 80 else {"a": 1, "b": 2}}


def fields_that_go(sample: dict[str, Any]) -> dict[str, Any]:
    ran()
    return {"x": {"b": 1, "a": 1} if sample["number"] < 80 else {"a": 1}}


def fields_in_turn(sample: dict[str, Any]) -> dict[str, Any]:
    ran()
    n = sample["number"]
    return {"x": {"b": 1, "a": 1} if n < 5 else {"ab"[n % 2]: 1}}


def columns_that_come(sample: dict[str, Any]) -> dict[str, Any]:
    ran()
    return {"x": 1} if sample["number"] < 80 else {"x": 1, "y": 2}


def columns_that_go(sample: dict[str, Any]) -> dict[str, Any]:
    ran()
    return {"x": 1, "y": 1} if sample["number"] < 85 else {"x": 1}


def columns_in_another_order(sample: dict[str, Any]) -> dict[str, Any]:
    ran()
    n = sample["number"]
    return {"y": n, "x": str(n)} if n < 80 else {"x": str(n), "y": n}


def batch_with_types_that_come(samples: dict[str, list[Any]]) -> dict[str, Any]:
    ran(len(samples["text"]))
    return {"x": [None if n < 80 else "text" for n in samples["number"]]}


def an_image(sample: dict[str, Any]) -> dict[str, Any]:
    ran()
    n = sample["number"]
    return {"image": None if n % 11 == 1 else PIL.Image.new("RGB", (2 + n % 3, 2), (n % 256, 0, 0))}


def label_as_text(sample: dict[str, Any]) -> dict[str, Any]:
    ran()
    return {"label": ["bad", "good"][sample["number"] % 2]}


def is_even(sample: dict[str, Any]) -> bool:
    ran()
    return bool(sample["number"] % 2 == 0)


def is_late(sample: dict[str, Any]) -> Any:
    ran()
    return np.bool_(sample["number"] >= 140)


def never(sample: dict[str, Any]) -> bool:
    ran()
    return False


def always(sample: dict[str, Any]) -> bool:
    ran()
    return True


def third_of_batch(samples: dict[str, list[Any]]) -> list[bool]:
    ran(len(samples["text"]))
    return [place % 3 == 0 for place in range(len(samples["text"]))]


def at_third(sample: dict[str, Any], number: int) -> bool:
    ran()
    return number % 3 == 0


def numbers_of_batch(numbers: list[int], places: list[int], rank: Any) -> list[bool]:
    ran(len(places))
    return [
        number == place and place % 7 == 0 and rank is None
        for number, place in zip(numbers, places, strict=True)
    ]


async def is_even_later(sample: dict[str, Any]) -> bool:
    ran()
    return bool(sample["number"] % 2 == 0)


# --- cases --------------------------------------------------------------------------------------------------


class Case(NamedTuple):
    """A step.

    Attributes:
        function: the operator.
        options: the arguments of `map`, or `filter`.
        prepare: makes the input of rows.
        is_filter: whether it is a filter.
        reuses: whether a step over more rows runs fewer than all of them.
    """

    function: Callable[..., Any]
    options: dict[str, Any] = {}  # noqa: RUF012
    prepare: Callable[[datasets.Dataset], datasets.Dataset] = lambda data: data
    is_filter: bool = False
    reuses: bool = True

    def plain(self, data: datasets.Dataset, **more: Any) -> Any:
        """The result of `datasets`."""
        with loops_closed(self.function) as function:
            return getattr(data, "filter" if self.is_filter else "map")(function, **self.options, **more)

    def cached(self, data: datasets.Dataset, store: Store, **more: Any) -> Any:
        """The result of castore."""
        step = cached_filter if self.is_filter else cached_map
        return step(data, self.function, store=store, **self.options, **more)


SMALL: dict[str, Any] = {"writer_batch_size": 20}
BATCHED: dict[str, Any] = {"batched": True, "batch_size": 10, "writer_batch_size": 20}
ALL_COLUMNS = ["text", "number", "label", "nested", "tags", "nothing"]


def two_columns(data: datasets.Dataset) -> datasets.Dataset:
    """Rows for functions whose results count: what is done with other columns, other cases show."""
    return data.select_columns(["text", "number"])


_GIVEN = datasets.Features(
    {
        "number": datasets.Value("int16"),
        "size": datasets.Value("float64"),
        "text": datasets.Value("large_string"),
    }
)

MAPS: dict[str, Case] = {
    "one new column": Case(size, SMALL),
    "in place": Case(in_place, SMALL),
    "other types": Case(other_types, SMALL),
    "many types": Case(many_types, SMALL),
    "removed columns": Case(in_place, {**SMALL, "remove_columns": ["nested", "text"]}),
    "all columns removed": Case(size, {**SMALL, "remove_columns": ALL_COLUMNS}),
    "all columns removed in place": Case(in_place, {**SMALL, "remove_columns": ["number", "text"]}),
    "given features": Case(
        size, {**SMALL, "remove_columns": ["label", "nested", "tags", "nothing"], "features": _GIVEN}
    ),
    "no nulls": Case(
        size, {**SMALL, "disable_nullable": True, "remove_columns": ["nested", "tags", "nothing"]}
    ),
    "original types not tried": Case(other_types, {**SMALL, "try_original_type": False}),
    "numbered": Case(numbered, {**SMALL, "with_indices": True}),
    "ranked": Case(ranked, {**SMALL, "with_indices": True, "with_rank": True}),
    "of columns": Case(
        of_columns,
        {**SMALL, "with_indices": True, "input_columns": ["number", "text"], "fn_kwargs": {"add": 7}},
    ),
    "batched": Case(batch, BATCHED),
    "batched, numbered": Case(batch_numbered, {**BATCHED, "with_indices": True}),
    "batched, the last dropped": Case(batch, {**BATCHED, "drop_last_batch": True}),
    "batches of all rows": Case(batch, {**BATCHED, "batch_size": -1}, reuses=False),
    "batches larger than blocks": Case(batch, {**BATCHED, "batch_size": 60}),
    "batches of one": Case(batch, {**BATCHED, "batch_size": 1}),
    "texts in groups": Case(group_texts, {**BATCHED, "remove_columns": ALL_COLUMNS}),
    "growing": Case(growing, {**BATCHED, "remove_columns": ALL_COLUMNS}),
    "shrinking, the first batches empty": Case(odd_ones, {**BATCHED, "remove_columns": ALL_COLUMNS}),
    "nothing is left": Case(none_at_all, {**BATCHED, "remove_columns": ALL_COLUMNS}),
    "empty but for the end": Case(in_the_end, {**BATCHED, "remove_columns": ALL_COLUMNS}),
    "too few rows in a batch": Case(odd_ones, BATCHED),
    "tables": Case(table, BATCHED, lambda data: data.with_format("arrow")),
    "tables of some": Case(table_of_some, BATCHED, lambda data: data.with_format("arrow")),
    "a table a row": Case(row_of_table, SMALL, lambda data: data.with_format("arrow")),
    "frames": Case(frame, BATCHED, lambda data: data.with_format("pandas")),
    "frames of some": Case(frame_of_some, BATCHED, lambda data: data.with_format("pandas")),
    "arrays": Case(of_arrays, SMALL, lambda data: data.with_format("numpy")),
    "some columns as arrays": Case(
        of_arrays, SMALL, lambda data: data.with_format("numpy", columns=["number"])
    ),
    "columns that a format shows": Case(
        columns_seen, SMALL, lambda data: data.with_format("numpy", columns=["number", "text"])
    ),
    "columns of two kinds": Case(
        columns_seen,
        SMALL,
        lambda data: data.with_format("numpy", columns=["number"], output_all_columns=True),
    ),
    "arrays of one type": Case(columns_seen, SMALL, lambda data: data.with_format("numpy", dtype="float16")),
    "some columns as arrays beside others": Case(
        size, SMALL, lambda data: data.with_format("numpy", columns=["number"], output_all_columns=True)
    ),
    "some columns": Case(of_arrays, SMALL, lambda data: data.with_format(None, columns=["number", "tags"])),
    "no change": Case(changes_nothing, SMALL),
    "coroutines": Case(later, SMALL, two_columns),
    "coroutines, batched": Case(later_batch, BATCHED, two_columns),
    "coroutines, numbered": Case(later_numbered, {**SMALL, "with_indices": True}, reuses=False),
    "images": Case(an_image, SMALL),
    "labels as text": Case(label_as_text, SMALL),
    "null, then texts": Case(null_then_texts, SMALL, two_columns),
    "texts, then None": Case(texts_then_none, SMALL, two_columns),
    "integers, then floats": Case(integers_then_floats, SMALL, two_columns),
    "integers, then whole floats": Case(integers_then_whole_floats, SMALL, two_columns),
    "floats, then integers": Case(floats_then_integers, SMALL, two_columns),
    "numbers of two widths": Case(numbers_of_two_widths, SMALL, two_columns),
    "numbers too wide": Case(numbers_too_wide, SMALL, two_columns),
    "mixed at once": Case(mixed_at_once, SMALL, two_columns),
    "mixed late": Case(mixed_late, SMALL, two_columns),
    "lists empty first": Case(lists_empty_first, SMALL, two_columns),
    "lists empty last": Case(lists_empty_last, SMALL, two_columns),
    "fields that come": Case(fields_that_come, SMALL, two_columns),
    "fields that go": Case(fields_that_go, SMALL, two_columns),
    "fields in turn": Case(fields_in_turn, SMALL, two_columns),
    "columns that come": Case(columns_that_come, SMALL, two_columns),
    "columns that go": Case(columns_that_go, SMALL, two_columns),
    "columns in another order": Case(columns_in_another_order, SMALL, two_columns),
    "batches whose types come": Case(batch_with_types_that_come, BATCHED, two_columns),
    "an error late": Case(fails_late, SMALL, two_columns),
    "an error at once": Case(fails_at_once, SMALL, two_columns),
    "no dictionary": Case(no_dict, SMALL, two_columns),
}
FILTERS: dict[str, Case] = {
    "rows": Case(is_even, SMALL, is_filter=True),
    "the last rows": Case(is_late, SMALL, two_columns, is_filter=True),
    "no rows": Case(never, SMALL, two_columns, is_filter=True),
    "all rows": Case(always, SMALL, is_filter=True),
    "by place in a batch": Case(third_of_batch, BATCHED, two_columns, is_filter=True),
    "numbered": Case(at_third, {**SMALL, "with_indices": True}, is_filter=True),
    "batched columns, numbered and ranked": Case(
        numbers_of_batch,
        {**BATCHED, "input_columns": "number", "with_indices": True, "with_rank": True},
        is_filter=True,
    ),
    "coroutines": Case(is_even_later, SMALL, two_columns, is_filter=True),
    "arrays": Case(
        is_even, SMALL, lambda data: data.with_format("numpy", columns=["number"]), is_filter=True
    ),
    "an error late": Case(fails_late, SMALL, two_columns, is_filter=True),
}
CASES = {f"map: {name}": case for name, case in MAPS.items()} | {
    f"filter: {name}": case for name, case in FILTERS.items()
}


def outcome(make: Callable[[], Any]) -> Any:
    """All that is seen of a result; the type of an error."""
    try:
        return told(make())
    except Exception as error:
        return type(error)


@pytest.mark.parametrize("name", CASES)
def test_a_step_gives_what_datasets_gives_also_over_more_rows_and_runs_few_again(
    name: str, store: Store
) -> None:
    case = CASES[name]
    for count in (COUNT, COUNT + 20):
        data = case.prepare(rows(count))
        plain = outcome(lambda: case.plain(data))  # noqa: B023
        before, ran.rows = len(list(store.entries(BLOCKS_FOLDER))), 0
        assert outcome(lambda: case.cached(data, store)) == plain  # noqa: B023
        wait()
        if isinstance(plain, dict) and case.reuses:
            assert len(list(store.entries(BLOCKS_FOLDER))) > before, "not run in blocks"
    if not isinstance(plain, dict):
        return
    assert not case.reuses or ran.rows <= (120 if "larger" in name else 90)
    ran.rows = 0
    assert outcome(lambda: case.cached(data, store)) == plain
    assert ran.rows == 0


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.matrix] * (number % 12 > 0 and " that " not in name))
        for number, name in enumerate(CASES)
    ],
)
def test_a_slow_step_is_made_in_parts_and_gives_what_datasets_gives(name: str, store: Store) -> None:
    case = CASES[name]
    data = case.prepare(rows())
    plain = outcome(lambda: case.plain(data))
    with slow_blocks(4):
        assert outcome(lambda: case.cached(data, store)) == plain
        data = case.prepare(rows(COUNT + 20))
        plain = outcome(lambda: case.plain(data))
        assert outcome(lambda: case.cached(data, store)) == plain
    ran.rows = 0
    assert outcome(lambda: case.cached(data, store)) == plain
    assert ran.rows == 0 or not isinstance(plain, dict)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.matrix] * (number % 3 > 0))
        for number, name in enumerate(sorted(CASES)[::6])
    ],
)
def test_steps_that_share_blocks_among_processes_give_the_same(name: str, store: Store) -> None:
    case = CASES[name]
    data = case.prepare(rows())
    plain = outcome(lambda: case.plain(data))
    if "rank" not in name and "last dropped" not in name:
        assert outcome(lambda: case.cached(data, store, num_proc=2)) == plain


def test_blocks_of_one_format_are_none_of_another(store: Store) -> None:
    for data in (rows(), rows().with_format("numpy"), rows().with_format("pandas")):
        case = Case(type_of_number, SMALL)
        assert told(case.cached(data, store)) == told(case.plain(data))


def type_of_number(sample: Any) -> dict[str, Any]:
    return {"kind": type(sample["number"]).__name__}


def test_a_step_that_is_to_run_afresh_runs_all_its_blocks(store: Store) -> None:
    case = Case(size, SMALL)
    for _ in range(2):
        ran.rows = 0
        case.cached(rows(), store, load_from_cache_file=False)
        assert ran.rows == COUNT
    ran.rows = 0
    case.cached(rows(), store)
    assert ran.rows == 0


def bools_below_0(samples: dict[str, list[Any]]) -> dict[str, Any]:
    return {"x": [True if n < 0 else n for n in samples["number"]]}


def test_blocks_whose_result_has_one_type_are_none_of_a_result_of_another(store: Store) -> None:
    case = Case(bools_below_0, BATCHED)
    for first in (-20, 0):
        data = large_rows(100, first)
        assert told(case.cached(data, store)) == told(case.plain(data))


def test_a_block_that_is_damaged_runs_again_and_no_other(store: Store) -> None:
    case = Case(size, SMALL)
    plain = told(case.plain(rows()))
    assert told(case.cached(rows(), store)) == plain
    for block in random.Random(0).sample(list(store.entries(BLOCKS_FOLDER)), 3):
        path, offset, length = payload(store, block.name)
        flip(path, offset + length // 2)
        ran.rows = 0
        with pytest.warns(CacheWarning, match="damaged and runs again"):
            result = case.cached(rows(), store)
        assert told(result) == plain
        assert ran.rows == block.metadata["rows_in"]


@pytest.mark.parametrize("fresh", [False, True])
def test_however_many_blocks_are_damaged_no_other_runs_again(fresh: bool, store: Store) -> None:
    case = Case(size, SMALL)
    plain = told(case.plain(rows()))
    case.cached(rows(), store)
    blocks = {entry.digest: entry for entry in store.entries(BLOCKS_FOLDER)}  # the first one has two names
    damaged = random.Random(1).sample(list(blocks.values()), 6)
    for block in damaged:
        path, offset, length = payload(store, block.name)
        flip(path, offset + length // 2)
    ran.rows = 0
    with pytest.warns(CacheWarning, match="damaged and runs again") as warned:
        assert told(case.cached(rows(), store, load_from_cache_file=not fresh)) == plain
    assert {warning.filename for warning in warned} == {__file__}
    assert ran.rows == sum(block.metadata["rows_in"] for block in damaged) + COUNT * fresh


@pytest.mark.parametrize("seed", range(2))
def test_a_damaged_block_of_an_earlier_step_runs_again_and_the_next_step_goes_on(
    seed: int, store: Store
) -> None:
    steps = [Case(size, SMALL), Case(is_even, SMALL, is_filter=True)]
    first = steps[0].cached(rows(), store)
    block = random.Random(seed).choice(list(store.entries(BLOCKS_FOLDER)))
    path, offset, length = payload(store, block.name)
    flip(path, offset + length // 2)
    with pytest.warns(CacheWarning, match="damaged and runs again"):
        first = steps[0].cached(rows(), store)
    assert told(steps[1].cached(first, store)) == told(steps[1].plain(steps[0].plain(rows())))


class _ApiError(Exception):
    """As those of many clients: pickle cannot make it anew of its message."""

    def __init__(self, code: int, body: str) -> None:
        super().__init__(f"{code}: {body}")


def _is_refused(row: dict[str, Any]) -> dict[str, Any]:
    raise _ApiError(429, "slow down")


def test_an_error_that_no_other_process_can_make_anew_is_told(store: Store) -> None:
    """Regression: its workers passed for killed ones, for want of memory."""
    with pytest.raises(_ApiError):
        cached_map(rows(), _is_refused, store=store)
    with pytest.raises(RuntimeError, match="the function has raised _ApiError: 429: slow down"):
        cached_map(rows(), _is_refused, store=store, num_proc=2)


def test_ranks_and_last_batches_of_processes_are_those_of_datasets(store: Store) -> None:
    for case in (MAPS["ranked"], Case(batch, {**BATCHED, "drop_last_batch": True})):
        plain, result = case.plain(rows(), num_proc=2), case.cached(rows(), store, num_proc=2)
        assert result.to_list() == plain.to_list()


# --- inputs -------------------------------------------------------------------------------------------------

#: Rows of most inputs, about four blocks.
FEW = 105

INPUTS: dict[str, Callable[[], Any]] = {
    "shuffled": lambda: rows(FEW).shuffle(seed=5),
    "selected": lambda: rows(2 * FEW).select(range(1, 2 * FEW, 2)),
    "a part in the middle": lambda: rows(2 * FEW).select(range(51, 51 + FEW)),
    "concatenated": lambda: datasets.concatenate_datasets([rows(40), rows(3), rows(60, first=30)]),
    "the same twice": lambda: datasets.concatenate_datasets([rows(50), rows(50)]),
    "joined side by side": lambda: datasets.concatenate_datasets(
        [rows(FEW), datasets.Dataset.from_dict({"more": list(range(FEW))})], axis=1
    ),
    "chosen, concatenated": lambda: datasets.concatenate_datasets(
        [rows(FEW).select(range(9, 90, 2)), rows(40)]
    ),
    "sorted": lambda: rows(FEW).sort("number", reverse=True),
    "a shard": lambda: rows(3 * FEW).shard(3, 1),
    "one column": lambda: rows(FEW).select_columns(["number"]),
    "renamed": lambda: rows(FEW).rename_column("text", "t").rename_column("t", "text"),
    "cast": lambda: rows(FEW).cast_column("number", datasets.Value("int32")),
    "splits": lambda: datasets.DatasetDict({"train": rows(FEW), "test": rows(40), "none": rows(0)}),
    "formatted": lambda: rows(FEW).with_format("numpy"),
    "described": lambda: _with_description(rows(FEW)),
    "matrices": lambda: _with_matrices(rows(FEW)),
    "large texts": lambda: rows(FEW).cast_column("text", datasets.Value("large_string")),
    "flattened": lambda: rows(FEW).select_columns(["number", "nested"]).flatten(),
    "equal rows": lambda: datasets.Dataset.from_dict({"number": [7] * FEW, "text": ["same"] * FEW}),
    "images of bytes": lambda: rows(FEW).map(an_image),
    "one large row among many": lambda: datasets.Dataset.from_dict(
        {"number": list(range(100)), "text": ["x" * (20_000 if n == 50 else 10) for n in range(100)]}
    ),
}


def _with_description(data: datasets.Dataset) -> datasets.Dataset:
    data.info.description = "what they are"
    data.info.version = "1.2.3"
    return data


def _with_matrices(data: datasets.Dataset) -> datasets.Dataset:
    features = datasets.Features(
        {
            "m": datasets.Array2D((2, 3), "float32"),
            "n": datasets.List(datasets.Array2D((1, 2), "int8")),
            "f": datasets.List(datasets.Value("int16"), length=3),
            "number": datasets.Value("int64"),
        }
    )
    numbers = data["number"][:]
    return datasets.Dataset.from_dict(
        {
            "m": [np.full((2, 3), n) for n in numbers],
            "n": [[[[n % 9, 1]]] * (n % 3) for n in numbers],
            "f": [[n, n, n] for n in numbers],
            "number": numbers,
        },
        features=features,
    )


def number_twice(sample: dict[str, Any]) -> dict[str, Any]:
    ran()
    return {"twice": 2 * sample["number"]}


def number_by_batch(samples: dict[str, list[Any]], places: list[int]) -> dict[str, Any]:
    ran(len(places))
    return {"of": [len(places)] * len(places), "at": places}


OVER_INPUTS: dict[str, Case] = {
    "rows": Case(number_twice, SMALL),
    "batches": Case(number_by_batch, {**BATCHED, "with_indices": True}),
    "filter": Case(is_even, SMALL, is_filter=True),
}


def _over_inputs() -> Iterator[Any]:
    """Each input with batches, which know their places, half of them with another step; `make torture` has
    all.
    """
    for name, other in zip(INPUTS, itertools.cycle(["rows", "batches", "filter", "batches"])):
        for step in OVER_INPUTS:
            yield pytest.param(name, step, marks=[pytest.mark.matrix] * (step not in ("batches", other)))


@pytest.mark.parametrize(("name", "step"), _over_inputs())
def test_inputs_of_every_kind_give_what_datasets_gives(name: str, step: str, store: Store) -> None:
    data, case = INPUTS[name](), OVER_INPUTS[step]
    plain = told(case.plain(data))
    for _ in range(2):
        assert told(case.cached(data, store)) == plain
        wait()


@pytest.mark.parametrize(
    "name",
    [
        "shuffled",
        pytest.param("the same twice", marks=pytest.mark.matrix),
        "matrices",
        pytest.param("described", marks=pytest.mark.matrix),
        "formatted",
    ],
)
def test_chains_give_what_datasets_gives_and_run_once(name: str, store: Store) -> None:
    """The blocks of one step's result are those of the next step: they are files of the store."""
    steps = [
        Case(number_twice, SMALL),
        Case(is_even, SMALL, is_filter=True),
        Case(number_by_batch, {**BATCHED, "with_indices": True}),
        Case(third_of_number, {**BATCHED, "remove_columns": "at"}),
        Case(in_third, SMALL, is_filter=True),
        Case(number_twice, {**SMALL, "remove_columns": "of"}),
    ]
    wanted = [INPUTS[name]()]
    for step in steps:
        wanted.append(step.plain(wanted[-1]))
    for again in range(2):
        result, ran.rows = INPUTS[name](), 0
        for step, plain in zip(steps, wanted[1:], strict=True):
            result = step.cached(result, store)
            assert again or told(result) == told(plain)
        assert told(result) == told(wanted[-1])
        assert (ran.rows == 0) == bool(again)
        wait()


def one_in_ten(sample: dict[str, Any]) -> bool:
    ran()
    return bool(sample["number"] % 10 == 0)


def test_few_rows_of_many_blocks_are_put_together_and_a_change_costs_those_around_it(store: Store) -> None:
    steps = [Case(one_in_ten, SMALL, is_filter=True), Case(number_twice, SMALL), Case(size, SMALL)]
    for edit in (None, 700, 300):
        data = large_rows(1000)
        if edit is not None:
            data = data.select([n for n in range(1000) if n != edit])
        plain, result = data, data
        for step in steps:
            plain = step.plain(plain)
        ran.rows = 0
        for step in steps:
            result = step.cached(result, store)
        assert told(result) == told(plain)
        assert edit is None or ran.rows < 100
    blocks = [entry.metadata["rows_in"] for entry in store.entries(BLOCKS_FOLDER)]
    assert sum(count in (10, 20) for count in blocks) > 5, "no files were put together"


def none_below_100(sample: dict[str, Any]) -> dict[str, Any]:
    return {"x": None if sample["number"] < 100 else "text"}


def test_types_follow_from_the_rows_that_are_written_first_however_few_a_kept_file_has(store: Store) -> None:
    steps = [Case(one_in_ten, SMALL, is_filter=True), Case(none_below_100, SMALL)]
    plain, result = rows(), rows()
    for step in steps:
        plain, result = step.plain(plain), step.cached(result, store)
    assert told(result) == told(plain)


CHANGES: dict[str, Callable[[datasets.Dataset], datasets.Dataset]] = {
    "shuffled": lambda data: data.shuffle(seed=3),
    "selected": lambda data: data.select(range(5, 95, 3)),
    "a part in the middle": lambda data: data.select(range(5, 95)),
    "sorted": lambda data: data.sort("number", reverse=True),
    "concatenated": lambda data: datasets.concatenate_datasets([data, data.select(range(20)), data]),
    "joined side by side": lambda data: datasets.concatenate_datasets(
        [data, data.select_columns("text").rename_column("text", "other")], axis=1
    ),
    "renamed": lambda data: data.rename_column("size", "length"),
    "a column less": lambda data: data.remove_columns("nested"),
    "cast": lambda data: data.cast_column("size", datasets.Value("int16")),
    "formatted": lambda data: data.with_format("numpy", columns=["number"]),
    "a column more": lambda data: data.add_column("more", list(range(len(data)))),
    "flattened": lambda data: data.flatten(),
    "filtered": lambda data: data.filter(lambda sample: sample["number"] % 3 > 0),
    "split": lambda data: data.train_test_split(0.5, seed=1)["test"],
}


NEXT_STEPS = (Case(number_twice, SMALL), Case(number_by_batch, {**BATCHED, "with_indices": True}))


class Kept(NamedTuple):
    """The result of a step, kept in a store, and what `datasets` gives; the next steps ran over both."""

    store: Store
    cached: datasets.Dataset
    plain: datasets.Dataset


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kept]:
    """One store for all changes of kept rows: each finds the blocks of the ones before it."""
    first = Case(size, SMALL)
    with small_blocks(), Store(tmp_path_factory.mktemp("kept") / "store", memory=0) as store:
        cached, plain = first.cached(rows(FEW), store), first.plain(rows(FEW))
        for case in NEXT_STEPS:
            assert told(case.cached(cached, store)) == told(case.plain(plain))
        wait()
        yield Kept(store, cached, plain)


@pytest.mark.parametrize(
    ("name", "step"),
    [
        # Batches, which know their places, behind each change, and rows behind half of them; `make torture`
        # has both.
        pytest.param(name, step, marks=[pytest.mark.matrix] * (step == 0 and number % 2))
        for number, name in enumerate(CHANGES)
        for step in range(len(NEXT_STEPS))
    ],
)
def test_kept_rows_that_are_changed_before_the_next_step_give_what_datasets_gives(
    name: str, step: int, kept: Kept
) -> None:
    case = NEXT_STEPS[step]
    made = case.cached(CHANGES[name](kept.cached), kept.store)
    assert told(made) == told(case.plain(CHANGES[name](kept.plain)))


def third_of_number(samples: dict[str, list[Any]]) -> dict[str, Any]:
    ran(len(samples["at"]))
    return {"third": [n // 3 for n in samples["number"]]}


def in_third(sample: dict[str, Any]) -> bool:
    ran()
    return bool(sample["third"] % 5)


def test_blocks_before_a_row_that_fails_are_kept(store: Store) -> None:
    data = rows()
    with pytest.raises(ZeroDivisionError):
        cached_map(data, fails_late, store=store, **SMALL)
    assert ran.rows == 134
    for _ in range(2):
        ran.rows = 0
        with pytest.raises(ZeroDivisionError):
            cached_map(data, fails_late, store=store, **SMALL)
        assert 0 < ran.rows <= 60


@pytest.mark.skipif(sys.version_info < (3, 11), reason="errors have no notes")
@pytest.mark.parametrize("num_proc", [None, 2])
@pytest.mark.parametrize(
    ("kind", "given", "words"),
    [
        ("map", {}, "in row 130 of"),
        ("filter", {}, "in row 130 of"),
        ("map", {"with_indices": True}, "in row 130 of"),
        ("map", {"batched": True, "batch_size": 8}, "in rows 128 to 135 of"),
        ("map", {"batched": True, "batch_size": 8, "rowwise": True}, "in rows 1"),
        ("refused", {}, "in row 130 of"),
    ],
)
def test_an_error_has_a_note_of_its_row(
    kind: str, given: dict[str, Any], words: str, num_proc: int | None, store: Store
) -> None:
    def fails(sample: Any, *_: int) -> Any:
        if 130 in (sample["number"] if isinstance(sample["number"], list) else [sample["number"]]):
            raise _ApiError(429, "slow down") if kind == "refused" else ValueError("slow down")
        return True if kind == "filter" else {"twice": sample["number"]}

    data = datasets.Dataset.from_dict({"number": list(range(COUNT)), "pad": ["pad"] * COUNT})
    step = cached_filter if kind == "filter" else cached_map
    for _ in range(2):
        with pytest.raises((ValueError, _ApiError, RuntimeError), match="slow down") as caught:
            step(data, fails, store=store, num_proc=num_proc, **given)
        [note] = getattr(caught.value, "__notes__", [])
        assert note.startswith(words)
        assert note.endswith("of the step's input")


def large_rows(count: int, first: int = 0) -> datasets.Dataset:
    """Rows of which ten are a block."""
    numbers = list(range(first, first + count))
    return datasets.Dataset.from_dict({"number": numbers, "text": [f"{n:04} " * 60 for n in numbers]})


def test_a_filter_of_few_large_rows_has_several_blocks(store: Store) -> None:
    """`datasets` writes 1,000 rows at a time, which decide a map's types; a filter's are known before."""
    data = large_rows(300)
    cached_filter(data, is_even, store=store)
    assert ran.rows == 300
    ran.rows = 0
    again = cached_filter(data.select(range(299)), is_even, store=store)
    assert ran.rows < 100
    assert again["number"][:] == [*range(0, 299, 2)]


@pytest.mark.parametrize("count", [3, 10, 55, 60, 61])
def test_a_last_batch_that_is_dropped_is_dropped_also_where_it_is_a_block_of_its_own(
    count: int, store: Store
) -> None:
    case = Case(batch, {**BATCHED, "drop_last_batch": True})
    data = large_rows(count)
    plain = told(case.plain(data))
    ran.rows = 0
    assert told(case.cached(data, store)) == plain
    assert ran.rows == count // 10 * 10
    assert told(case.cached(data, store)) == plain


def test_a_step_that_does_not_fit_into_the_store_runs_once_all_the_same(tmp_path: Path) -> None:
    chance = random.Random(0)
    texts = ["".join(chance.choices("abcdefghijklmnopqrstuvwxyz", k=300)) for _ in range(1000)]
    data = datasets.Dataset.from_dict({"number": list(range(1000)), "text": texts})
    case = Case(size, SMALL)
    plain = told(case.plain(data))
    with small_blocks(8192, 128):
        with Store(tmp_path / "large", memory=0) as store:
            case.cached(data, store)
            blocks = {entry.digest: entry.stored for entry in store.entries(BLOCKS_FOLDER)}
            stored = sum(blocks.values())
        for part in (0.1, 0.4, 0.8):
            ran.rows = 0
            with Store(tmp_path / f"{part}", memory=0, max_size=int(part * stored)) as store:
                with pytest.warns(CacheWarning, match="one piece.* no room for the results of all blocks"):
                    assert told(case.cached(data, store)) == plain
                with pytest.warns(CacheWarning, match="was not stored"):
                    wait()
            assert ran.rows < 1.2 * len(data)


def some_none(sample: dict[str, Any]) -> Any:
    ran()
    return None if sample["number"] % 10 in (3, 4, 5) else {"n": sample["number"]}


def none_at_first(sample: dict[str, Any]) -> Any:
    ran()
    return None if sample["number"] < 35 else {"n": sample["number"]}


def none_at_last(sample: dict[str, Any]) -> Any:
    ran()
    return None if sample["number"] >= 35 else {"n": sample["number"]}


def none_for_a_while(sample: dict[str, Any]) -> Any:
    ran()
    return None if 15 <= sample["number"] < 45 else {"n": sample["number"]}


@pytest.mark.parametrize("function", [some_none, none_at_first, none_at_last, none_for_a_while])
@pytest.mark.parametrize("count", [60, 65])
def test_a_function_that_returns_none_for_some_rows_gives_what_datasets_gives(
    function: Any, count: int, store: Store
) -> None:
    data = large_rows(count)
    plain = outcome(lambda: data.map(function, **SMALL))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", CacheWarning)
        for _ in range(2):
            assert outcome(lambda: cached_map(data, function, store=store, **SMALL)) == plain
            wait()
    said = [str(warning.message) for warning in caught]
    assert all("ran as one piece" in text and "returns None for some rows" in text for text in said)
    # `datasets` drops the rows of None behind a row with a result; so does each block that begins with one.
    assert len(said) == (isinstance(plain, dict) and (function, count) != (some_none, 60))


def bytes_and_dicts(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
    return {"v": [b"x" if number < 15 else {"a": None} for number in batch["number"]]}


def test_rows_are_tried_alone_with_the_types_of_their_batch(store: Store) -> None:
    """`datasets` makes one type of bytes and dicts, and cannot cast either alone to the other's."""
    data = large_rows(60)
    plain = outcome(lambda: data.map(bytes_and_dicts, batched=True, batch_size=20))
    assert isinstance(plain, dict)
    ours = cached_map(data, bytes_and_dicts, store=store, batched=True, batch_size=20, rowwise=True)
    assert told(ours) == plain


def small_rows(count: int) -> datasets.Dataset:
    """Rows of which at least eight are a block."""
    return datasets.Dataset.from_dict({"number": list(range(count))})


#: Rows that the functions below were given.
given_rows: list[int] = []


class _Rowwise:
    """A function of batches, which notes its rows."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __castore_key__(self) -> str:
        return self.name

    def __call__(self, batch: dict[str, list[Any]], indices: list[int] | None = None) -> Any:
        given_rows.extend(batch["number"])
        return getattr(self, self.name)(batch["number"], indices)

    def doubled(self, numbers: list[int], _: Any) -> Any:
        return {"n": [2 * n for n in numbers]}

    def numbered(self, numbers: list[int], indices: list[int]) -> Any:
        return {"n": [n + i for n, i in zip(numbers, indices, strict=True)]}

    def twice(self, numbers: list[int], _: Any) -> Any:
        return {"n": [n for n in numbers for _ in range(n % 3)]}

    def odd(self, numbers: list[int], _: Any) -> Any:
        return [n % 2 == 1 for n in numbers]

    def odd_numbered(self, numbers: list[int], indices: list[int]) -> Any:
        return [(n + i) % 3 == 1 for n, i in zip(numbers, indices, strict=True)]

    def large_batch(self, numbers: list[int], _: Any) -> Any:
        return {"n": [len(numbers) > 20] * len(numbers)}

    def first_of_its_kind(self, numbers: list[int], _: Any) -> Any:
        return {"n": [n % 5 not in {m % 5 for m in numbers[:at]} for at, n in enumerate(numbers)]}

    def distinct(self, numbers: list[int], _: Any) -> Any:
        return {"n": [*dict.fromkeys(n % 5 for n in numbers)]}

    def summed(self, numbers: list[int], _: Any) -> Any:
        return {"n": [sum(numbers)]}

    def keeps_first_of_its_kind(self, numbers: list[int], _: Any) -> Any:
        return [n % 5 not in {m % 5 for m in numbers[:at]} for at, n in enumerate(numbers)]


@pytest.mark.parametrize(
    ("kind", "name", "more"),
    [
        ("map", "doubled", 8), ("map", "numbered", 8), ("map", "twice", 40), ("filter", "odd", 8),
        ("filter", "odd_numbered", 8),
    ],
)  # fmt: skip
def test_a_rowwise_function_runs_once_and_for_some_rows_of_a_batch_alone(
    store: Store, kind: str, name: str, more: int
) -> None:
    data, function = small_rows(200), _Rowwise(name)
    arguments: dict[str, Any] = {"batched": True, "batch_size": 40, "with_indices": "numbered" in name}
    if name == "twice":
        arguments["remove_columns"] = data.column_names
    plain = told(getattr(data, kind)(function, **arguments))
    given_rows.clear()
    cached = cached_map if kind == "map" else cached_filter
    ours = cached(data, function, store=store, rowwise=True, **arguments)
    assert told(ours) == plain
    assert len(given_rows) == 200 + more, "a map whose rows move runs the batch again"


@pytest.mark.parametrize(
    ("kind", "name", "said"),
    [
        ("map", "large_batch", "'n' of row 0 is True in .* False alone"),
        ("map", "first_of_its_kind", r"'n' of row \d is False in .* True alone"),
        ("map", "distinct", "'n' of rows 0 to 39 is "),
        ("map", "summed", "'n' of rows 0 to 39 is "),
        ("filter", "keeps_first_of_its_kind", r"row \d is False in .* True alone"),
    ],
)
def test_what_depends_on_the_rows_beside_is_an_error_with_the_rows(
    store: Store, kind: str, name: str, said: str
) -> None:
    data = small_rows(200)
    removed = {"remove_columns": data.column_names} if kind == "map" else {}
    cached = cached_map if kind == "map" else cached_filter
    with pytest.raises(InvalidValueError, match=f"_Rowwise is said to be row-wise, and is not: .*{said}"):
        cached(data, _Rowwise(name), store=store, batched=True, batch_size=40, rowwise=True, **removed)


def times_by_number(samples: dict[str, list[Any]]) -> dict[str, Any]:
    ran(len(samples["number"]))
    return {"again": [n for n in samples["number"] for _ in range(n % 3)]}


def test_a_map_may_give_as_many_rows_as_it_gets_in_other_places(store: Store) -> None:
    """Regression: such a map was said not to be row-wise, since rows were compared by their places."""
    data = datasets.Dataset.from_dict({"number": range(999)})
    arguments: dict[str, Any] = {"batched": True, "remove_columns": ["number"]}
    ours = cached_map(data, times_by_number, store=store, rowwise=True, **arguments)
    assert ours["again"] == data.map(times_by_number, **arguments)["again"]


def rare_key(sample: dict[str, Any]) -> dict[str, Any]:
    ran()
    return {"x": 1, "note": "rare"} if sample["number"] == rare_key_at else {"x": 1}


rare_key_at = 0


def test_a_result_without_columns_is_what_map_gives(store: Store) -> None:
    data = datasets.Dataset.from_dict({"n": list(range(COUNT))})
    plain = data.map(lambda row: {}, remove_columns=["n"], load_from_cache_file=False)
    with pytest.warns(CacheWarning, match="ran as one piece.*no columns"):
        found = cached_map(data, lambda row: {}, remove_columns=["n"], store=store)
    assert (found.features, len(found)) == (plain.features, len(plain)) == ({}, 0)


def test_a_key_that_a_row_behind_the_first_block_adds_gives_what_datasets_gives(store: Store) -> None:
    global rare_key_at
    data = large_rows(100)
    blocks = cut([data.with_format("arrow")[:]], Cut(None, 20))
    begins = itertools.accumulate(len(block) for block in blocks)
    rare_key_at = next(begin for begin in begins if begin % 20)  # `datasets` writes 20 rows at a time
    assert rare_key_at < 100
    plain = told(data.map(rare_key, **SMALL))
    assert plain["columns"][-1] == "x"
    with pytest.warns(CacheWarning, match="ran as one piece.*the key 'note' for some rows only"):
        assert told(cached_map(data, rare_key, store=store, **SMALL)) == plain


@pytest.mark.filterwarnings("ignore:.*ran as one piece.*the key 'note':castore.errors.CacheWarning")
@pytest.mark.parametrize("at", [40, 41, 60, 99])
def test_a_key_of_one_row_alone_gives_what_datasets_gives(at: int, store: Store) -> None:
    """Rows 40 and 60 are the first of those that are written at once, where it is an error."""
    global rare_key_at
    data, rare_key_at = large_rows(100), at
    plain = outcome(lambda: told(data.map(rare_key, **SMALL)))
    assert (plain is KeyError) == (at in (40, 60))
    assert outcome(lambda: told(cached_map(data, rare_key, store=store, **SMALL))) == plain


class Lacking(list[int]):
    """A value that fails where the writer looks at it."""

    def __len__(self) -> int:
        raise KeyError("of the user's value")


def test_a_missing_key_of_the_operators_own_is_its_error_and_is_not_tried_twice(store: Store) -> None:
    def looks_up(sample: dict[str, Any]) -> dict[str, Any]:
        ran()
        return {"x": sample["absent"] if sample["number"] == 45 else 1}

    def gives(sample: dict[str, Any]) -> dict[str, Any]:
        ran()
        return {"x": Lacking() if sample["number"] == 45 else [1]}

    for function in (looks_up, gives):
        ran.rows = 0
        with warnings.catch_warnings():
            warnings.simplefilter("error", CacheWarning)
            with pytest.raises(KeyError, match=r"absent|user's value"):
                cached_map(large_rows(60), function, store=store, **SMALL)
        assert ran.rows <= 60


def test_blocks_of_coroutines_leave_no_sockets_open(store: Store) -> None:
    gc.collect()
    gc.disable()
    try:
        before = _sockets()
        cached_map(rows(), later, store=store, **SMALL)
        assert _sockets() == before
    finally:
        gc.enable()


def _sockets() -> int:
    found = 0
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found += os.readlink(link).startswith("socket:")
    return found


def test_blocks_are_reused_without_progress_bars_and_with_them(store: Store) -> None:
    data = large_rows(100)
    longer = datasets.concatenate_datasets([data, data.select([0])])
    step = Case(number_twice, SMALL)
    were_disabled = datasets.are_progress_bars_disabled()
    try:
        for change in (datasets.disable_progress_bars, datasets.enable_progress_bars):
            change()
            with Store(store.path.parent / change.__name__) as own:
                step.cached(data, own)
                ran.rows = 0
                assert told(step.cached(longer, own)) == told(step.plain(longer))
                assert datasets.are_progress_bars_disabled() == (change is datasets.disable_progress_bars)
    finally:
        (datasets.disable_progress_bars if were_disabled else datasets.enable_progress_bars)()


def test_a_format_that_json_cannot_hold_gives_what_datasets_gives(store: Store) -> None:
    data = large_rows(300).select_columns(["number"]).with_format("numpy", dtype=np.float32)
    step = Case(number_twice, SMALL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CacheWarning)
        assert step.cached(data, store)[:]["twice"].tolist() == step.plain(data)[:]["twice"].tolist()
        wait()


def test_picked_rows_in_the_format_of_pandas_have_the_types_that_datasets_gives(store: Store) -> None:
    nested = [{"p": None if n % 10 == 5 else n} for n in range(600)]
    features = datasets.Features({"id": datasets.Value("int64"), "nest": {"p": datasets.Value("int16")}})
    data = datasets.Dataset.from_dict({"id": list(range(600)), "nest": nested}, features=features)
    picked = data.shuffle(seed=1).with_format("pandas")

    def double(frame: Any) -> Any:
        return frame.assign(w=frame["id"] * 2)

    result = cached_map(picked, double, batched=True, store=store)
    plain = picked.map(double, batched=True)
    assert result.features == plain.features
    assert told(result)["rows"] == told(plain)["rows"]


@pytest.mark.parametrize("batched", [False, True])
def test_an_error_of_a_function_that_reads_as_one_of_datasets_is_its_own(batched: bool, store: Store) -> None:
    """Regression: it was taken for that of a function that returns None for some rows."""

    def writes(sample: dict[str, Any]) -> dict[str, Any]:
        number = sample["number"][0] if batched else sample["number"]
        file: Any = None if number >= 40 else sys.stdout
        file.write("")
        return {"n": sample["number"]}

    with pytest.raises(AttributeError, match=r"^'NoneType' object has no attribute 'write'"):
        cached_map(large_rows(60), writes, store=store, batched=batched, batch_size=5)
