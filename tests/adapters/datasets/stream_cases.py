"""Streams for tests: sources, functions that note each row they run on, and pipelines of plain `datasets`
that are built with or without kept calls.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections import UserDict
from collections.abc import Callable, Iterator
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
from datasets.distributed import split_dataset_by_node
from PIL import Image

from castore import Store
from castore.adapters.datasets import cached_filter, cached_map
from tests.adapters.datasets.noting import log

ROWS = 66

#: A step: given a stream, "map" or "filter", a function and its arguments, the stream behind it.
Step = Callable[..., Any]


def plain(dataset: Any, kind: str, function: Any, **arguments: Any) -> Any:
    """A step of plain `datasets`."""
    arguments.pop("rowwise", None)
    return getattr(dataset, kind)(function, **arguments)


def cached(store: Store) -> Step:
    """The step that keeps calls in a store."""

    def step(dataset: Any, kind: str, function: Any, **arguments: Any) -> Any:
        return {"map": cached_map, "filter": cached_filter}[kind](dataset, function, store=store, **arguments)

    return step


def told(value: Any) -> Any:
    """A value with the types of all that it holds, to be compared."""
    if isinstance(value, dict):
        return {name: told(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value).__name__, [told(part) for part in value]
    if isinstance(value, pa.Table):
        return "table", str(value.schema.remove_metadata()), value.to_pylist()
    if isinstance(value, Image.Image):
        return "image", value.mode, value.size, value.tobytes()
    if hasattr(value, "dtype"):
        return type(value).__name__, str(value.dtype), told(np.asarray(value).tolist())
    if hasattr(value, "to_dict"):  # a frame of pandas, or of polars
        return type(value).__name__, str(value.to_dict())
    return type(value).__name__, repr(value)


# --- sources ------------------------------------------------------------------------------------------------


def row(number: int) -> dict[str, Any]:
    """A row of values of many types, the same for the same number."""
    return {
        "number": number,
        "text": f"text {number} " * (number % 5),
        "score": None if number % 7 == 0 else number / 3,
        "words": [f"w{n}" for n in range(number % 4)],
        "nested": {"a": number, "b": [bytes([number % 256])], "c": None},
    }


def made_rows(shards: list[list[int]]) -> Iterator[dict[str, Any]]:
    """The rows of some shards."""
    for numbers in shards:
        for number in numbers:
            yield row(number)


def odd_rows(shards: list[list[int]]) -> Iterator[dict[str, Any]]:
    """Rows of values that Arrow would change."""
    for numbers in shards:
        for number in numbers:
            yield {
                "number": number,
                "big": 10**30 + number,
                "pair": (number, "x"),
                "array": np.arange(number % 3, dtype=np.float32),
                "image": Image.new("L", (2, 2), number % 256),
                "any": [number, "text", None, {"deep": (1.5,)}][number % 4],
            }


def split(count: int, shards: int) -> list[list[int]]:
    """Numbers of rows in shards of different lengths."""
    ends = [0, *sorted((place * 37) % count for place in range(1, shards)), count]
    return [list(range(*pair)) for pair in itertools.pairwise(ends)]


@functools.cache
def _generated(rows: Callable[..., Any], count: int, shards: int) -> datasets.IterableDataset:
    return datasets.IterableDataset.from_generator(rows, gen_kwargs={"shards": split(count, shards)})


@functools.cache
def _of_tables(count: int, shards: int) -> datasets.IterableDataset:
    rows = datasets.Dataset.from_list([row(number) for number in range(count)])
    return rows.to_iterable_dataset(num_shards=shards)


def _anew(stream: datasets.IterableDataset) -> datasets.IterableDataset:
    """The same stream at its beginning: of one that nobody has iterated.

    The rows are shared, for to make them takes longer than most tests; the place in them is each one's own.
    """
    stream = copy.copy(stream)
    assert not hasattr(stream._ex_iterable, "ex_iterable"), "its place would be shared"
    stream._ex_iterable = copy.copy(stream._ex_iterable)
    return stream


def from_python(count: int = ROWS, shards: int = 3) -> datasets.IterableDataset:
    """A stream of Python objects."""
    return _anew(_generated(made_rows, count, shards))


def from_odd(count: int = ROWS, shards: int = 2) -> datasets.IterableDataset:
    """A stream of Python objects that Arrow would change."""
    return _anew(_generated(odd_rows, count, shards))


def from_arrow(count: int = ROWS, shards: int = 3) -> datasets.IterableDataset:
    """A stream of Arrow tables, with features."""
    return _anew(_of_tables(count, shards))


# --- functions ----------------------------------------------------------------------------------------------


def adds(sample: dict[str, Any], by: int = 1) -> dict[str, Any]:
    """A new column."""
    log.info("adds")
    return {"sum": sample["number"] + by, "upper": sample["text"].upper()}


def adds_noise(sample: dict[str, Any]) -> dict[str, Any]:
    """A new column that cannot be compressed."""
    log.info("adds_noise")
    return {"noise": np.random.default_rng(sample["number"]).bytes(1000)}


def returns_it(sample: dict[str, Any]) -> dict[str, Any]:
    """The row itself, changed, with a column less and values changed in place."""
    log.info("returns_it")
    sample["text"] += "!"
    sample["words"].append("more")
    del sample["score"]
    return sample


def odd_values(sample: dict[str, Any]) -> dict[str, Any]:
    """Values that Arrow would change."""
    log.info("odd_values")
    number = sample["number"]
    return {
        "float or int": number if number % 2 else number / 2,
        "tuple": (number, None),
        "array": np.arange(number % 3),
        "scalar": np.float32(number),
        "big": 2**70 + number,
        "set": {"x"},
        "image": Image.new("RGB", (1, 2), (number % 256, 0, 0)),
    } | ({"sometimes": 1} if number % 5 == 0 else {})


def user_dict(sample: dict[str, Any]) -> Any:
    """A mapping that is no dict, as tokenizers return."""
    log.info("user_dict")
    return UserDict({"ids": [len(sample["text"])]})


def numbered(sample: dict[str, Any], number: int) -> dict[str, Any]:
    """A column of row numbers."""
    log.info("numbered")
    return {"at": number}


def of_columns(text: str, number: int) -> dict[str, Any]:
    """Columns, not a row."""
    log.info("of_columns")
    return {"both": f"{text}{number}"}


def keeps(sample: dict[str, Any]) -> bool:
    """A filter."""
    log.info("keeps")
    return bool(sample["number"] % 3)


def keeps_array(samples: dict[str, list[Any]]) -> Any:
    """A filter of batches that returns an array."""
    log.info("keeps_array")
    return np.asarray(samples["number"]) % 3 != 0


def groups(samples: dict[str, list[Any]]) -> dict[str, Any]:
    """A batch whose result depends on the whole batch, and has another number of rows."""
    log.info("groups")
    joined = "".join(samples["text"])
    return {"piece": [joined[at : at + 11] for at in range(0, len(joined), 11)]}


def each_alone(samples: dict[str, list[Any]]) -> dict[str, Any]:
    """A batched function that treats each row alone."""
    for _ in samples["text"]:
        log.info("each_alone")
    lengths = tuple(len(text) for text in samples["text"])
    return {"length": lengths, "row": np.asarray(samples["number"]) * 2}


def keeps_alone(samples: dict[str, list[Any]], numbers: list[int]) -> list[bool]:
    """A batched filter that treats each row alone."""
    for _ in numbers:
        log.info("keeps_alone")
    return [number % 4 != 0 for number in numbers]


def changes_columns(samples: dict[str, list[Any]]) -> dict[str, Any]:
    """A batch that is changed in place, and returned."""
    log.info("changes_columns")
    for place, text in enumerate(samples["text"]):
        samples["text"][place] = text[::-1]
    return samples


async def waits(sample: dict[str, Any]) -> dict[str, Any]:
    """A coroutine function."""
    log.info("waits")
    return {"waited": sample["number"]}


async def keeps_waiting(sample: dict[str, Any]) -> bool:
    """A coroutine function as a filter."""
    log.info("keeps_waiting")
    return bool(sample["number"] % 2)


def of_table(table: pa.Table) -> pa.Table:
    """Tables in, tables out."""
    log.info("of_table")
    return table.append_column("twice", pa.compute.multiply(table["number"], 2))


def mask_of_table(table: pa.Table) -> Any:
    """A mask for a table."""
    log.info("mask_of_table")
    return pa.compute.greater(table["number"], 20)


def of_frame(frame: Any) -> Any:
    """A frame of pandas in, one out."""
    log.info("of_frame")
    return frame.assign(twice=frame["number"] * 2)


def mask_of_frame(frame: Any) -> Any:
    """A mask for a frame of pandas."""
    log.info("mask_of_frame")
    return frame["number"] > 20


def of_arrays(sample: dict[str, Any]) -> dict[str, Any]:
    """Arrays in, arrays out."""
    log.info("of_arrays")
    return {"half": sample["number"] / 2, "sum": sample["score"]}


# --- pipelines ----------------------------------------------------------------------------------------------

_GROUPS = {"batched": True, "batch_size": 7}
_ALL = ["number", "text", "score", "words", "nested"]
_FEATURES = datasets.Features(
    {"number": datasets.Value("int32"), "sum": datasets.Value("float32"), "upper": datasets.Value("string")}
)

#: Functions of one step each: the kind, the function, the arguments.
STEPS: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "map": ("map", adds, {}),
    "remove": ("map", adds, {"remove_columns": ["text", "words"]}),
    "keywords": ("map", adds, {"fn_kwargs": {"by": 5}}),
    "features": ("map", adds, {"features": _FEATURES, "remove_columns": _ALL[1:]}),
    "itself": ("map", returns_it, {}),
    "itself without": ("map", returns_it, {"remove_columns": ["text", "nested"]}),
    "odd": ("map", odd_values, {}),
    "mapping": ("map", user_dict, {}),
    "indices": ("map", numbered, {"with_indices": True}),
    "columns": ("map", of_columns, {"input_columns": ["text", "number"]}),
    "filter": ("filter", keeps, {}),
    "filter batches": ("filter", keeps_array, _GROUPS),
    "groups": ("map", groups, {**_GROUPS, "remove_columns": _ALL}),
    "groups dropped": ("map", groups, {**_GROUPS, "remove_columns": _ALL, "drop_last_batch": True}),
    "all rows": ("map", groups, {"batched": True, "batch_size": None, "remove_columns": _ALL}),
    "batch itself": ("map", changes_columns, {**_GROUPS, "remove_columns": ["words"]}),
    "rowwise": ("map", each_alone, {**_GROUPS, "rowwise": True}),
    "rowwise filter": ("filter", keeps_alone, {**_GROUPS, "rowwise": True, "with_indices": True}),
    "rowwise itself": ("map", changes_columns, {**_GROUPS, "rowwise": True, "remove_columns": ["words"]}),
    "coroutine": ("map", waits, {}),
    "coroutine filter": ("filter", keeps_waiting, {}),
}

#: Steps over streams with a format.
FORMATTED: dict[str, tuple[str, str, Any, dict[str, Any]]] = {
    "arrow": ("arrow", "map", of_table, {}),
    "arrow batches": ("arrow", "map", of_table, _GROUPS),
    "arrow filter": ("arrow", "filter", mask_of_table, _GROUPS),
    "pandas": ("pandas", "map", of_frame, _GROUPS),
    "pandas filter": ("pandas", "filter", mask_of_frame, _GROUPS),
    "numpy": ("numpy", "map", of_arrays, {}),
    "numpy batches": ("numpy", "filter", keeps_array, _GROUPS),
}


def one_step(name: str) -> Callable[[Any, Step], Any]:
    """The pipeline of one step of `STEPS` or `FORMATTED`."""

    def build(source: Any, step: Step) -> Any:
        if name in STEPS:
            kind, function, arguments = STEPS[name]
            return step(source, kind, function, **arguments)
        form, kind, function, arguments = FORMATTED[name]
        return step(source.with_format(form), kind, function, **arguments)

    return build


def _two_of(combine: Any) -> Callable[[Any, Step], Any]:
    def build(source: Any, step: Step) -> Any:
        one = step(source, "map", adds, remove_columns=_ALL)
        other = step(source, "map", adds, remove_columns=_ALL, fn_kwargs={"by": 2})
        return combine([one, other])

    return build


#: Longer pipelines.
PIPELINES: dict[str, Callable[[Any, Step], Any]] = {
    "shuffle before": lambda source, step: step(source.shuffle(seed=3, buffer_size=10), "map", adds),
    "shuffle behind": lambda source, step: step(source, "map", adds).shuffle(seed=3, buffer_size=10),
    "take": lambda source, step: step(source, "map", adds).take(25),
    "skip": lambda source, step: step(source.skip(13), "map", adds).skip(20),
    "node": lambda source, step: split_dataset_by_node(
        step(source, "filter", keeps), rank=1, world_size=2
    ),
    "shard": lambda source, step: step(source, "map", adds).shard(num_shards=2, index=1),
    "three steps": lambda source, step: step(
        step(step(source, "map", returns_it), "filter", keeps), "map", groups, batched=True, batch_size=4,
        remove_columns=_ALL,
    ),
    "interleave": _two_of(functools.partial(datasets.interleave_datasets, probabilities=[0.3, 0.7], seed=1)),
    "in turn": _two_of(datasets.interleave_datasets),
    "concatenate": _two_of(datasets.concatenate_datasets),
    "repeat": lambda source, step: step(source, "map", adds).repeat(2),
    "batch": lambda source, step: step(source, "map", adds).batch(4),
    "cast": lambda source, step: step(source, "map", adds, remove_columns=_ALL).rename_column("sum", "s"),
    "format behind": lambda source, step: step(source, "map", adds, remove_columns=_ALL).with_format("numpy"),
}  # fmt: skip


def ran() -> int:
    """How many rows or batches have run since the last question."""
    from tests.adapters.datasets.noting import calls

    count = len(calls)
    calls.clear()
    return count
