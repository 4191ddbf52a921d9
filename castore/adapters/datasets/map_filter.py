"""cached_map and cached_filter: `Dataset.map` and `Dataset.filter` with results from a store.

The key covers the input's rows, the function's code and state, and the arguments that can change the result.
Arguments that cannot change it are ignored: `num_proc` (unless ranks are used, or last batches are dropped),
`writer_batch_size`, `batch_size` of a map that takes one sample at a time, `desc`, and the places where
`datasets` would keep its own cache.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import datasets
from datasets.dataset_dict import bind

from castore.adapters.datasets import dataset_entries, step_runner
from castore.adapters.datasets.background import pending_puts
from castore.adapters.datasets.block_step import BlockCall, BlockStep, can_cut
from castore.adapters.datasets.call_blocks import KeptCalls
from castore.adapters.datasets.call_watch import CallWatch, CallWatched, EarlyCalls
from castore.adapters.datasets.cutting import Cut
from castore.adapters.datasets.dataset_fingerprint import dataset_fingerprint
from castore.adapters.datasets.event_loops import loops_closed
from castore.adapters.datasets.operator_description import describe
from castore.adapters.datasets.operator_keys import RANDOM_ADVICE, operator_fingerprint
from castore.adapters.datasets.operator_state import OperatorState
from castore.adapters.datasets.row_block import KNOWN_ARGUMENTS, MadeRows, RowForm
from castore.adapters.datasets.rowwise import check_alike, is_worth_trying, parts_of, tried_rows
from castore.adapters.datasets.steps import AWAITED_ROWS, operator_name
from castore.adapters.datasets.streams import keep_calls
from castore.adapters.datasets.tables import fingerprint_of_key
from castore.errors import InvalidValueError
from castore.objects.codecs import check_codec
from castore.store import Store
from castore.system.worker_processes import allowed

# Arguments of datasets' own cache, which is not used.
_REPLACED_ARGUMENTS = {
    "load_from_cache_file",
    "keep_in_memory",
    "cache_file_name",
    "suffix_template",
    "new_fingerprint",
}
# Arguments that decide where and how the work is done, not its result.
_IGNORED_ARGUMENTS = _REPLACED_ARGUMENTS | {"self", "function", "num_proc", "writer_batch_size", "desc"}


def cached_map(
    dataset: Any,
    function: Any = None,
    *,
    store: Store | None = None,
    fingerprint: str | None = None,
    codec: str = "zstd",
    rowwise: bool = False,
    **map_kwargs: Any,
) -> Any:
    """``dataset.map(function, **map_kwargs)``, run only if its result is not in the store.

    The result can be used at once. A background thread compresses it into the store; `wait` and the end of
    the program wait for that thread.

    Of an iterable dataset the result is an iterable one. Its function runs for rows whose results are not in
    the store, and these are kept as they pass.

    Args:
        dataset: a `datasets.Dataset` or `datasets.IterableDataset`, or a dictionary of them, split by split.
        function: as for `map`; anything `operator_fingerprint` takes.
        store: the store; by default the default store.
        fingerprint: identifies the function in place of its code and state, for functions that cannot be
            hashed. Pass another one when the function changes.
        codec: the codec of kept results.
        rowwise: a batched function treats each row alone, whatever rows are beside it in the batch. A row
            that is inserted or deleted then costs its own block, and not all that follow. Some rows of a
            batch are tried alone. For an iterable dataset the function must give one row for each.
        **map_kwargs: as for `map`; ``load_from_cache_file=False`` runs the function again.
            ``cache_file_name``, ``suffix_template`` and ``keep_in_memory`` are accepted and ignored, for they
            decide where `datasets` would keep its own copy. A dictionary of datasets takes the arguments of
            its own `map`, ``with_split`` and ``cache_file_names`` among them.

    Raises:
        UnhashableError: a part of the function, or of an argument, has no stable hash.
        InvalidValueError: `map` has no such argument, or a function that is declared row-wise is not; of an
            iterable dataset, the latter is raised by the iteration.

    Warns:
        CacheWarning: (while a stream is iterated) results are not kept; the message has the reason.
    """
    return _run_cached("map", dataset, function, store, fingerprint, codec, rowwise, map_kwargs)


def cached_filter(
    dataset: Any,
    function: Any = None,
    *,
    store: Store | None = None,
    fingerprint: str | None = None,
    codec: str = "zstd",
    rowwise: bool = False,
    **filter_kwargs: Any,
) -> Any:
    """``dataset.filter(function, **filter_kwargs)``, run only if it is not stored: see `cached_map`."""
    return _run_cached("filter", dataset, function, store, fingerprint, codec, rowwise, filter_kwargs)


def _run_cached(
    kind: str,
    dataset: Any,
    function: Any,
    store: Store | None,
    fingerprint: str | None,
    codec: str,
    rowwise: bool,
    given: dict[str, Any],
) -> Any:
    pending_puts.warn()
    store = step_runner.store_or_default(store)
    if isinstance(dataset, datasets.DatasetDict | datasets.IterableDatasetDict):
        return _run_each_split(kind, dataset, function, store, fingerprint, codec, rowwise, given)
    if not isinstance(dataset, datasets.Dataset | datasets.IterableDataset):
        raise InvalidValueError(
            f"cached_{kind} takes a datasets.Dataset or IterableDataset, not {type(dataset).__name__}; "
            "make it one, for example with Dataset.from_list(...)"
        )
    arguments = _all_arguments(type(dataset), kind, given)
    name = "identity" if function is None else operator_name(function)
    description = describe(function, name, fingerprint)
    if description.doubts is not None:
        description.doubts.compare(store, name, RANDOM_ADVICE)
    options = dataset_entries.StorageOptions(*check_codec(codec, None), store.settings.ttl)
    if isinstance(dataset, datasets.IterableDataset):
        stream = getattr(dataset, kind)(function, **given)
        if function is None:
            return stream
        # A keyword without a hash is an error here, not in the first pass.
        operator_fingerprint(arguments["fn_kwargs"] or {}, f"{kind}(..., fn_kwargs=...)")
        kept = KeptCalls(store, name, kind, fingerprint, options)
        keep_calls(stream, kept, rowwise=rowwise and arguments["batched"])
        return stream
    source = dataset_fingerprint(dataset, store)
    parameters = {
        argument: operator_fingerprint(value, f"{kind}(..., {argument}=...)", texts=description.texts)
        for argument, value in _counting_arguments(arguments).items()
    }
    key = step_runner.step_key(source, name, kind, description.fingerprint, parameters)

    def make(file: Path, watch: CallWatch | None, *, in_order: bool = False) -> datasets.Dataset:
        left_out = {*_REPLACED_ARGUMENTS, "num_proc"} if in_order else _REPLACED_ARGUMENTS
        passed = {name: value for name, value in given.items() if name not in left_out}
        with loops_closed(function) as own:
            if watch is not None and not inspect.iscoroutinefunction(function):
                own = CallWatched(own, watch)  # noqa: PLW2901
                passed.pop("num_proc", None)  # 1: another process would load a model once more
            return getattr(dataset, kind)(
                own,
                **passed,
                load_from_cache_file=False,
                cache_file_name=str(file),
                new_fingerprint=fingerprint_of_key(key),
            )

    counted = {"kind": kind, "operator": description.fingerprint, "parameters": parameters}
    blocks = _in_blocks(
        kind, dataset, function, arguments, given, counted, rowwise=rowwise, is_named=fingerprint is not None
    )
    is_small = not can_cut(dataset, small=store.is_shared)
    record = {"step": name, "kind": kind, "key": key, "input": source, "operator": description.fingerprint}
    step = step_runner.step_name(name, key)
    outcome = step_runner.run_or_load(
        store,
        step,
        make,
        {**record, "parts": description.parts},
        options,
        rows_in=len(dataset),
        fresh=given.get("load_from_cache_file") is False,
        blocks=blocks,
        only_if_slow=is_small and blocks is not None and blocks.num_proc == 1,
        info=dataset.info,
        files=step_runner.InputFiles(dataset),
    )
    return step_runner.without_large_file(store, step, outcome, dataset.info).dataset


def _run_each_split(
    kind: str,
    splits: Any,
    function: Any,
    store: Store,
    fingerprint: str | None,
    codec: str,
    rowwise: bool,
    given: dict[str, Any],
) -> Any:
    """A dictionary of the results of all splits."""
    # A dictionary's defaults are not those of its parts.
    of_part = _all_arguments(type(splits), kind, given)
    has_split = of_part.pop("with_split", False)
    for name in ("self", "function", "cache_file_names"):
        of_part.pop(name, None)
    parts = {}
    for split, part in splits.items():
        called = bind(function, split) if has_split else function
        parts[split] = _run_cached(kind, part, called, store, fingerprint, codec, rowwise, of_part)
    return type(splits)(parts)


def _in_blocks(
    kind: str,
    dataset: datasets.Dataset,
    function: Any,
    arguments: dict[str, Any],
    given: dict[str, Any],
    counted: dict[str, Any],
    *,
    rowwise: bool,
    is_named: bool,
) -> BlockStep | None:
    """The step as one that runs block by block; None if its result depends on more than a block's rows.

    Args:
        kind: ``"map"`` or ``"filter"``.
        dataset, function: the input, and the function.
        arguments, given: all arguments of `map` or `filter`, and those that the caller gave.
        counted: what the result depends on beside the rows.
        rowwise: as for `cached_map`.
        is_named: whether the caller has said what identifies the function.
    """
    if not (can_cut(dataset, small=True) and _depends_on_block_alone(function, arguments)):
        return None
    num_proc = allowed(arguments["num_proc"])
    is_batched, size = arguments["batched"], arguments["batch_size"]
    is_numbered, is_async = arguments["with_indices"], inspect.iscoroutinefunction(function)
    drops = is_batched and bool(arguments.get("drop_last_batch"))
    is_rowwise = is_batched and rowwise and not drops
    tried = 0

    form = RowForm.of(dataset) if _takes_rows(function, arguments, given, dataset) else None

    def run(call: BlockCall) -> datasets.Dataset | MadeRows:
        nonlocal tried
        if drops and call.first and len(call.rows) < size:
            return call.rows.select([])  # `map` gives rows back where it drops all of them
        passed = {name: value for name, value in given.items() if name not in _REPLACED_ARGUMENTS}
        passed.pop("num_proc", None)
        if call.features is not None:
            passed["features"] = call.features
        with loops_closed(function) as own:
            watched = own if is_async else CallWatched(own, call.watch)

            def numbered(places: Sequence[int]) -> Any:
                if not is_numbered:
                    return watched
                return _Numbered(watched, [call.first + n for n in places], bool(arguments["with_rank"]))

            count = min(len(call.table), size) if is_batched else 1
            tries = is_rowwise and is_worth_trying(count, tried)
            alone = None if form is None or tries else form.block(call.table, call.file)
            if alone is not None:
                made: MadeRows = getattr(alone, kind)(numbered(range(len(call.table))), **passed)
                return made

            def run_rows(places: Sequence[int], **more: Any) -> datasets.Dataset:
                called = numbered(places)
                rows = call.rows if len(places) == len(call.rows) else call.rows.select(places)
                return getattr(rows, kind)(
                    called,
                    **{**passed, **more},
                    load_from_cache_file=False,
                    new_fingerprint=call.fingerprint,
                )

            # A filter gives the numbers of rows, which are few enough for memory.
            place: dict[str, Any] = (
                {"keep_in_memory": True} if kind == "filter" else {"cache_file_name": str(call.file)}
            )
            result = run_rows(range(len(call.rows)), **place)
            if tries:
                _try_rowwise(operator_name(function), kind, call, count, result, run_rows)
                tried = count
            return result

    has_features = kind == "filter" or arguments["features"] is not None
    # Features that are not known follow from the rows that `map` writes first.
    first_rows = max(arguments["writer_batch_size"] or 1000, size if is_batched else 1)
    multiple = size if is_batched and not is_rowwise else 1 if is_numbered else None
    return BlockStep(
        dataset,
        run,
        counted,
        Cut(multiple, 0 if has_features else first_rows),
        OperatorState([function, arguments["fn_kwargs"]], operator_name(function), is_named=is_named),
        EarlyCalls(),
        is_numbered=is_numbered or drops,
        has_features=has_features,
        at_once=size if is_batched else AWAITED_ROWS if is_async else 1,
        is_async=is_async,
        num_proc=num_proc,
        title=arguments["desc"] or kind.title(),
    )


def _takes_rows(
    function: Any, arguments: dict[str, Any], given: dict[str, Any], dataset: datasets.Dataset
) -> bool:
    """Whether rows can go through a function as `RowBlock` does it."""
    if given.keys() - {"with_rank"} - KNOWN_ARGUMENTS or arguments["with_rank"]:
        return False
    if inspect.iscoroutinefunction(function):
        return False
    if arguments.get("features") is not None:
        return False  # as the caller writes them: `datasets` may have to make others of them
    named: list[str] = []
    for argument in ("input_columns", "remove_columns"):
        names = arguments.get(argument)
        named += [names] if isinstance(names, str) else names or []
    return arguments["input_columns"] != [] and {*named} <= {*dataset.column_names}


def _depends_on_block_alone(function: Any, arguments: dict[str, Any]) -> bool:
    """Whether a block's result depends on its rows, and the number of its first one, alone."""
    num_proc, size = allowed(arguments["num_proc"]), arguments["batch_size"]
    is_batched = arguments["batched"]
    if function is None or num_proc < 1 or (is_batched and (size is None or size <= 0)):
        return False  # with less than one process, `map` raises the error
    if arguments["with_indices"] and inspect.iscoroutinefunction(function):
        return False
    drops = is_batched and bool(arguments.get("drop_last_batch"))
    return num_proc == 1 or not (arguments["with_rank"] or drops)


def _try_rowwise(
    title: str,
    kind: str,
    call: BlockCall,
    count: int,
    result: datasets.Dataset,
    run_rows: Callable[..., datasets.Dataset],
) -> None:
    """Run some rows of a block's first batch alone, and compare them with the block's result.

    Args:
        title: the function's name.
        kind: ``"map"`` or ``"filter"``.
        call: the block.
        count: rows of its first batch.
        result: the block's result.
        run_rows: runs the step on the rows at some places of the block.

    Raises:
        InvalidValueError: the results differ.
    """
    places = tried_rows(count)
    if kind == "filter":
        alone = run_rows(places, batch_size=1, keep_in_memory=True)
        kept, kept_alone = ({*part._indices.column(0).to_pylist()} for part in (result, alone))
        for place in places:
            row = f"row {call.first + place}"
            check_alike(title, "its result", row, place in kept, place in kept_alone)
        return
    given = {"keep_in_memory": True, "features": result.features}
    differs: InvalidValueError | None = None
    if len(result) == len(call.rows):
        one, other = _values(result.select(places)), _values(run_rows(places, batch_size=1, **given))
        try:
            for column in {**one, **other}:
                _check_values(title, call, places, column, one.get(column, []), other.get(column, []))
            return
        except InvalidValueError as error:
            differs = error  # unless rows have moved, and as many were left out as were added
    # All rows of the batch run again, to find those that have moved.
    parts = [_values(run_rows(part, batch_size=len(part), **given)) for part in parts_of(count)]
    other = {column: [value for part in parts for value in part[column]] for column in parts[0]}
    length = max(map(len, other.values()))
    one = _values(result.select(range(min(length, len(result)))))
    rows = f"rows {call.first} to {call.first + count - 1}"
    try:
        for column in {**one, **other}:
            check_alike(title, column, rows, one.get(column, []), other.get(column, []))
    except InvalidValueError as error:
        raise differs or error from None


def _check_values(
    title: str, call: BlockCall, places: list[int], column: str, together: list[Any], alone: list[Any]
) -> None:
    if not len(together) == len(alone) == len(places):
        check_alike(
            title, column, f"rows {call.first + places[0]} to {call.first + places[-1]}", together, alone
        )
    for place, *pair in zip(places, together, alone, strict=True):
        check_alike(title, column, f"row {call.first + place}", *pair)


def _values(dataset: datasets.Dataset) -> dict[str, list[Any]]:
    values: dict[str, list[Any]] = dataset.with_format(None)[:]
    return values


class _Numbered:
    """A function that takes numbers of rows, on rows that have these numbers."""

    def __init__(self, function: Any, numbers: Sequence[int], has_rank: bool) -> None:
        self._function = function
        self._numbers = numbers
        self._place = -2 if has_rank else -1

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        passed = list(arguments)
        given, numbers = passed[self._place], self._numbers
        passed[self._place] = [numbers[n] for n in given] if isinstance(given, list) else numbers[given]
        return self._function(*passed, **keywords)


def _all_arguments(cls: type, kind: str, given: dict[str, Any]) -> dict[str, Any]:
    """All arguments of a dataset class's `map` or `filter`, defaults included."""
    signature = inspect.signature(getattr(cls, kind))
    unknown = [name for name in given if name not in signature.parameters]
    if unknown:
        raise InvalidValueError(
            f"{cls.__name__}.{kind} has no argument {unknown[0]!r}; it has {', '.join(signature.parameters)}"
        )
    if given.get("new_fingerprint") is not None:
        raise InvalidValueError(
            "new_fingerprint belongs to datasets' own cache; identify the function with fingerprint=..."
        )
    bound = signature.bind(None, None, **given)
    bound.apply_defaults()
    return dict(bound.arguments)


def _counting_arguments(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments that can change the result."""
    matter = {name: value for name, value in arguments.items() if name not in _IGNORED_ARGUMENTS}
    if not arguments["batched"]:
        del matter["batch_size"]
    for name in ("input_columns", "remove_columns"):
        if isinstance(matter.get(name), str):
            matter[name] = [matter[name]]
    matter["fn_kwargs"] = matter["fn_kwargs"] or {}
    # Ranks are numbers of processes, and each process drops the last batch of its own rows.
    if arguments["with_rank"] or (arguments["batched"] and arguments.get("drop_last_batch")):
        matter["num_proc"] = arguments["num_proc"] or 1
    # A batch of all rows is one batch for each process.
    size, num_proc = arguments["batch_size"], arguments["num_proc"] or 1
    if arguments["batched"] and (size is None or size <= 0) and num_proc > 1:
        matter["num_proc"] = num_proc
    return matter
