"""Operators as steps: the kind of each, the part that counts for its key, and its pass over a dataset.

An operator is a function from a sample to a sample, or an object with Data-Juicer's methods:

- ``process(sample)`` (or ``process_batched(samples)``): a mapper;
- ``compute_stats(sample)`` and ``process(sample) -> bool``: a filter, whose statistics pass is a step of its
  own;
- ``compute_hash(sample)`` and ``process(dataset)``: a deduplicator;
- ``process(dataset)`` of a selector or a grouper of Data-Juicer's, recognised by its class.

Assumes nothing of a store. Must never change a dataset that it receives.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
import re
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import datasets

from castore.adapters.datasets import juicer
from castore.adapters.datasets.call_watch import CallWatch, CallWatched
from castore.adapters.datasets.event_loops import loops_closed
from castore.adapters.datasets.row_block import MadeRows, RowBlock
from castore.errors import InvalidValueError
from castore.system import worker_processes

#: Data-Juicer's column for what filters measure.
STATS = "__dj__stats__"
#: Rows of a batch, and rows that are written at a time: `datasets`' defaults.
BATCH_ROWS = 1000
#: Rows for which a coroutine function works at one time: `datasets`' default.
AWAITED_ROWS = 1000
#: The kinds of steps whose operators see rows one by one, or batch by batch, and the methods that do.
BLOCK_KINDS = {"map": "process", "stats": "compute_stats", "filter": "process"}
_ROW_METHODS = {**BLOCK_KINDS, "deduplicate": "compute_hash"}


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """Options of a step's run. The rows of the result are the same with all of them.

    Attributes:
        num_proc: processes that share the rows, or None.
        file: the path of the step's Arrow file; None for memory.
        count: a callback that receives the number of rows done, where that can be known.
        fingerprint: the fingerprint of the result; `datasets` would derive one by pickling the operator.
        features: the features of the result; None to find them.
        watch: for the calls of the operator, where they can be watched.
    """

    num_proc: int | None = None
    file: str | None = None
    count: Callable[[int], object] | None = None
    fingerprint: str | None = None
    features: datasets.Features | None = None
    watch: CallWatch | None = None

    def keywords(self) -> dict[str, Any]:
        """Arguments for `datasets.Dataset.map` and `filter`; datasets' own cache is not used."""
        place = {"keep_in_memory": True} if self.file is None else {"cache_file_name": self.file}
        fingerprint = self.fingerprint or uuid.uuid4().hex
        known = {} if self.features is None else {"features": self.features}
        return {
            **known,
            "num_proc": self.num_proc,
            "load_from_cache_file": False,
            "new_fingerprint": fingerprint,
            **place,
        }


@dataclasses.dataclass(frozen=True)
class Step:
    """One pass over a dataset.

    Attributes:
        name: the operator's name; a statistics pass has the suffix " (stats)".
        kind: ``"map"``, ``"stats"``, ``"filter"``, ``"deduplicate"`` or ``"select"``.
        operator: the function or object.
        hashed: the part of the operator that counts for the key.
    """

    name: str
    kind: str
    operator: Any
    hashed: Any

    def run(self, dataset: datasets.Dataset, options: RunOptions) -> datasets.Dataset:
        """The dataset after this step."""
        with worker_processes.bound_to_thread() if options.num_proc else contextlib.nullcontext():
            return _PASSES[self.kind](self.operator, dataset, options)

    def run_rows(self, rows: RowBlock, options: RunOptions) -> MadeRows:
        """The rows of a block after this step, of `BLOCK_KINDS`, whose operator is no coroutine function."""
        made: MadeRows = _PASSES[self.kind](self.operator, rows, options)
        return made

    def sees_batches(self) -> bool:
        """Whether the operator sees `BATCH_ROWS` rows at a time, not one: of a step of `BLOCK_KINDS`, or of a
        deduplicator that hashes rows.
        """
        if not hasattr(self.operator, "process") and not hasattr(self.operator, "process_batched"):
            return False  # a function
        return _method(self.operator, _ROW_METHODS[self.kind])[1]

    def rows_at_once(self) -> int:
        """Rows that the operator gets, or works on, at one time; of the same steps."""
        if self.sees_batches():
            return BATCH_ROWS
        return AWAITED_ROWS if self.is_async() else 1

    def is_async(self) -> bool:
        """Whether the operator is a coroutine function."""
        return inspect.iscoroutinefunction(self.operator)


def steps_of(operator: Any) -> list[Step]:
    """The steps of an operator.

    Raises:
        InvalidValueError: the operator is neither callable nor an object with `process`.
    """
    name = operator_name(operator)
    if inspect.isclass(operator):
        raise InvalidValueError(f"{name} is a class, not an operator: pass an object, {name}(...)")
    if juicer.whole_dataset_use(operator):
        return [Step(name, "select", operator, operator.process)]
    if hasattr(operator, "compute_hash"):
        methods = [operator.compute_hash, _required_method(operator, "process")]
        return [Step(name, "deduplicate", operator, methods)]
    if hasattr(operator, "compute_stats") or hasattr(operator, "compute_stats_batched"):
        stats = _method(operator, "compute_stats")[0]
        return [
            Step(f"{name} (stats)", "stats", operator, stats),
            Step(name, "filter", operator, _method(operator, "process")[0]),
        ]
    if hasattr(operator, "process") or hasattr(operator, "process_batched"):
        return [Step(name, "map", operator, _method(operator, "process")[0])]
    if callable(operator):
        return [Step(name, "map", operator, operator)]
    if isinstance(operator, str):
        raise InvalidValueError(
            f"{operator!r} is text, not an operator: pass castore.recipes.make({operator!r})"
        )
    raise InvalidValueError(
        f"{operator!r} is not an operator: pass a function, or an object with a method process, "
        "compute_stats or compute_hash"
    )


def operator_name(operator: Any) -> str:
    """The name of an operator in reports."""
    own = getattr(operator, "_name", None)
    if isinstance(own, str) and own:
        return own
    function = getattr(operator, "func", operator)  # the function of a functools.partial
    return str(getattr(function, "__qualname__", type(operator).__name__)).rpartition(".<locals>.")[2]


def _required_method(operator: Any, name: str) -> Callable[..., Any]:
    method: Callable[..., Any] | None = getattr(operator, name, None)
    if method is None:
        raise InvalidValueError(f"the operator {operator_name(operator)!r} has no method {name}; add it")
    return method


def _method(operator: Any, name: str) -> tuple[Callable[..., Any], bool]:
    """A method of an operator, and whether it takes batches."""
    wants = getattr(operator, "is_batched_op", None)
    only = hasattr(operator, f"{name}_batched") and not hasattr(operator, name)
    batched = bool(wants()) if callable(wants) else only
    if not batched and juicer.is_juicer_operator(operator) and hasattr(operator, f"{name}_single"):
        # Data-Juicer's `process` takes a sample whose columns are lists of one length for a batch.
        name = f"{name}_single"
    return _required_method(operator, f"{name}_batched" if batched else name), batched


# The sentence of `datasets` about the result of a function of `map`.
_TELLS_BOOL = re.compile(r"returns a variable of type <class '(numpy\.)?bool_?'>")


def _map(operator: Any, dataset: datasets.Dataset, options: RunOptions) -> datasets.Dataset:
    plain = not (hasattr(operator, "process") or hasattr(operator, "process_batched"))
    function, batched = (operator, False) if plain else _method(operator, "process")
    for column in juicer.tag_columns(operator):
        function = (_AddColumnToBatch if batched else _AddColumn)(function, column)
    try:
        with loops_closed(_observed(function, batched, options)) as called:
            return dataset.map(called, batched=batched, **options.keywords())
    except TypeError as error:
        if not plain or not _TELLS_BOOL.search(str(error)):
            raise
        raise InvalidValueError(
            f"{operator_name(operator)!r} returns True or False, as a filter does, but a function in a"
            " pipeline is a map; give it to cached_filter, or pass an object with compute_stats and process"
        ) from error


def _stats(operator: Any, dataset: datasets.Dataset, options: RunOptions) -> datasets.Dataset:
    function, batched = _method(operator, "compute_stats")
    with_room = (_AddColumnToBatch if batched else _AddColumn)(function, STATS)
    # The column's type grows with each filter that measures something new.
    return dataset.map(
        _observed(with_room, batched, options),
        batched=batched,
        try_original_type=False,
        **options.keywords(),
    )


def _filter(operator: Any, dataset: datasets.Dataset, options: RunOptions) -> datasets.Dataset:
    function, batched = _method(operator, "process")
    function = _AsList(function) if batched else function
    return dataset.filter(_observed(function, batched, options), batched=batched, **options.keywords())


def _deduplicate(operator: Any, dataset: datasets.Dataset, options: RunOptions) -> datasets.Dataset:
    if not len(dataset):
        return dataset  # `map` would not have added the columns that process reads
    return drop_duplicates(operator, hash_rows(operator, dataset, options), dataset.column_names)


def hash_rows(
    operator: Any, rows: datasets.Dataset | RowBlock, options: RunOptions
) -> datasets.Dataset | MadeRows:
    """The first pass of a deduplicator: the rows with the columns that its `process` reads."""
    function, batched = _method(operator, "compute_hash")
    return rows.map(_observed(function, batched, options), batched=batched, **options.keywords())


def drop_duplicates(operator: Any, hashed: datasets.Dataset, columns: Sequence[str]) -> datasets.Dataset:
    """The second pass of a deduplicator: the rows that remain, in columns of those names.

    Raises:
        InvalidValueError: the operator returns no dataset.
    """
    # Data-Juicer's own deduplicators return the duplicates that they found, too.
    result = operator.process(hashed)
    kept = result[0] if isinstance(result, tuple) else result
    if not isinstance(kept, datasets.Dataset):
        raise InvalidValueError(
            f"process of the deduplicator {operator_name(operator)!r} must return the remaining dataset,"
            f" not {type(kept).__name__}"
        )
    return kept.remove_columns([name for name in kept.column_names if name not in columns])


def _select(operator: Any, dataset: datasets.Dataset, options: RunOptions) -> datasets.Dataset:
    # Data-Juicer moves a dataset's attributes to its own class; a copy is a plain dataset, whatever this one
    # is.
    dataset = copy.copy(dataset)
    if juicer.whole_dataset_use(operator) == "group":
        groups = operator.process(dataset)
        return datasets.Dataset.from_list(groups) if groups else dataset.select([])
    chosen = operator.process(dataset)
    if not isinstance(chosen, datasets.Dataset):
        raise InvalidValueError(
            f"process of the selector {operator_name(operator)!r} must return the remaining dataset,"
            f" not {type(chosen).__name__}"
        )
    # A dataset of Data-Juicer's own class would run the next steps in its own way.
    return datasets.Dataset(
        chosen._data,
        info=chosen._info,
        split=chosen._split,
        indices_table=chosen._indices,
        fingerprint=chosen._fingerprint,
    )


_PASSES: dict[str, Callable[[Any, datasets.Dataset, RunOptions], datasets.Dataset]] = {
    "map": _map,
    "stats": _stats,
    "filter": _filter,
    "deduplicate": _deduplicate,
    "select": _select,
}


class _AddColumn:
    """Adds the column for statistics, or for tags, to a sample before an operator writes into it."""

    def __init__(self, function: Callable[..., Any], column: str) -> None:
        self._function = function
        self._column = column

    def __call__(self, sample: dict[str, Any]) -> Any:
        sample[self._column] = dict(sample.get(self._column) or {})
        return self._function(sample)


class _AddColumnToBatch:
    """Adds the same column to a batch, with one dictionary for each sample."""

    def __init__(self, function: Callable[..., Any], column: str) -> None:
        self._function = function
        self._column = column

    def __call__(self, samples: dict[str, list[Any]]) -> Any:
        rows = len(next(iter(samples.values())))
        samples[self._column] = [dict(given or {}) for given in samples.get(self._column) or [None] * rows]
        return self._function(samples)


class _AsList:
    """Data-Juicer's batched filters return an iterator of bools; `filter` wants a list."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, samples: dict[str, list[Any]]) -> list[bool]:
        return list(self._function(samples))


class _CountRows:
    """Reports how many rows have gone through a function."""

    def __init__(self, function: Callable[..., Any], batched: bool, count: Callable[[int], object]) -> None:
        self._function = function
        self._batched = batched
        self._count = count

    def __call__(self, sample: dict[str, Any]) -> Any:
        rows = len(next(iter(sample.values()))) if self._batched else 1
        result = self._function(sample)
        self._count(rows)
        return result


def _observed(function: Callable[..., Any], batched: bool, options: RunOptions) -> Callable[..., Any]:
    """The function with the callbacks of its run."""
    # Other processes cannot report, and `map` inspects coroutines itself.
    if options.num_proc or inspect.iscoroutinefunction(function):
        return function
    if options.count is not None:
        function = _CountRows(function, batched, options.count)
    return function if options.watch is None else CallWatched(function, options.watch)
