"""A step that can run block by block, and its run on one block, in the process that calls it.

A block's result is what one pass over all rows gives for the block's rows. Where it cannot be,
`NotInBlocksError` has the reason. A block that takes long may be ended between two calls of the function, to
be made from parts (`block_parts`). Uses neither stores nor keys: those are `block_runner`'s.

Must never take an operator's own exception for such a reason.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import time
import traceback
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import pyarrow as pa
from datasets import arrow_dataset, arrow_writer
from datasets.table import InMemoryTable

from castore.adapters.datasets.block_entries import NotInBlocksError, make_stream, write_result
from castore.adapters.datasets.call_watch import CallWatch, EarlyCalls
from castore.adapters.datasets.cutting import Cut, is_small
from castore.adapters.datasets.descriptions import copy_format
from castore.adapters.datasets.lazy_table import LazyTable
from castore.adapters.datasets.named_files import file_sizes, may_name_files
from castore.adapters.datasets.operator_state import Loaded, OperatorState
from castore.adapters.datasets.row_block import MIXED_ANSWERS, MadeRows
from castore.adapters.datasets.tables import row_batches, rows_name_files, rows_size

# Formats in which a function sees Arrow's chunks, or what follows from them.
_AS_IT_LIES = ("arrow", "pandas", "polars")
#: A block that takes more seconds is slow; one that other processes would wait for, if it takes a tenth.
SLOW_SECONDS = 10.0
# By this much fewer where processes would have too few blocks to share.
_FEWER = 10
# With fewer blocks for each process, some would wait for others at the end.
_BLOCKS_A_PROCESS = 4
#: Rows whose features are taken for those of the result, until the first block is there.
GUESS_ROWS = 16
#: A column whose type no row has shown yet, in the JSON of features.
NULL_TYPE = '"dtype": "null"'
#: In the place of a result's features: the step has changed nothing.
UNCHANGED = "null"


@dataclasses.dataclass(frozen=True)
class BlockCall:
    """A block for an operator, with the place and the form of its result.

    Attributes:
        source: the step's input.
        table: the block.
        first: the number of its first row among all rows of the step's input.
        features: the features of the result; None to find them.
        file: the path for an Arrow file of the result.
        fingerprint: the fingerprint for the result.
        watch: for the calls of the function, but for coroutine functions.
    """

    source: datasets.Dataset
    table: pa.Table
    first: int
    features: datasets.Features | None
    file: Path
    fingerprint: str
    watch: CallWatch

    @functools.cached_property
    def rows(self) -> datasets.Dataset:
        """The block as a dataset, in the format of the input."""
        info, split = self.source.info.copy(), self.source.split
        block = datasets.Dataset(
            InMemoryTable(self.table), info=info, split=split, fingerprint=self.fingerprint
        )
        copy_format(self.source, block)
        return block

    def made(self, result: datasets.Dataset | MadeRows) -> MadeRows:
        """The result of the operator on the block."""
        if isinstance(result, MadeRows):
            return result
        return MadeRows(
            lambda: row_batches(result),
            len(result),
            result.features,
            result._indices is None and result._data.table is self.rows._data.table,
            lambda: rows_name_files(result),
        )


class BlockStep(NamedTuple):
    """A step over a dataset that can run on blocks.

    Attributes:
        dataset: the input, of at least one row.
        run: runs the step on one block.
        counted: what its result depends on beside the rows and the features, in the form of `castore.key`.
        rule: where blocks may end.
        state: of the operator.
        early: calls of runs that were ended; of this step alone.
        is_numbered: whether rows count by their number as well.
        has_features: whether the features of the result are known without running it.
        keeps_count: whether the result has a row for each row.
        at_once: rows that the function gets, or works on, at one time.
        is_async: whether the function is a coroutine function, whose calls nobody watches.
        num_proc: processes that share the blocks; 1 for this one.
        on_rows: a callback that receives the number of rows done.
        title: the title of the progress bar.
    """

    dataset: datasets.Dataset
    run: Callable[[BlockCall], datasets.Dataset | MadeRows]
    counted: Any
    rule: Cut
    state: OperatorState
    early: EarlyCalls
    is_numbered: bool = False
    has_features: bool = False
    keeps_count: bool = False
    at_once: int = 1
    is_async: bool = False
    num_proc: int = 1
    on_rows: Callable[[int], object] | None = None
    title: str = "Map"

    def decides_features(self, rows: int, features: str | None) -> bool:
        """Whether a block of so many rows is the first of several, and decides the features of all results.

        Args:
            rows: of the block.
            features: the features of the result, in JSON; None as long as they are not known.
        """
        return features is None and not self.has_features and rows < len(self.dataset)

    def slow_seconds(self, rows: int) -> float:
        """A block of so many rows is slow if it takes more seconds."""
        blocks = len(self.dataset) / rows
        are_few = self.num_proc > 1 and blocks < _BLOCKS_A_PROCESS * self.num_proc
        return SLOW_SECONDS / _FEWER if are_few else SLOW_SECONDS

    @staticmethod
    def may_be_slow(seconds: float) -> bool:
        """Whether a block that takes so many seconds is slow in some number of processes."""
        return seconds > SLOW_SECONDS / _FEWER


def can_cut(dataset: datasets.Dataset, *, small: bool = False) -> bool:
    """Whether a dataset is large enough for blocks, and its rows are all that a step gets to see.

    With ``small`` any size will do: nodes share the results of blocks, however few there are.

    A search index sees all rows. In Arrow's and pandas' formats a function sees how rows that were picked lie
    in memory.
    """
    if not len(dataset) or dataset.list_indexes() or not _is_json(dataset._format_kwargs):
        return False
    if dataset._format_type == "custom" or (
        dataset._indices is not None and dataset._format_type in _AS_IT_LIES
    ):
        return False
    if small:
        return True
    rows = len(dataset)
    size = rows_size(dataset)
    if not is_small(rows, size):
        return True
    table = dataset._data
    if not may_name_files(dataset.features) or (isinstance(table, LazyTable) and not table.names_files):
        return False
    tables = dataset.with_format("arrow").iter(rows)
    return not is_small(rows, size + sum(int(file_sizes(table, dataset.features).sum()) for table in tables))


def _is_json(value: Any) -> bool:
    """Whether a dataset with such a format can be kept."""
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


class Written(NamedTuple):
    """A block's result, an Arrow stream.

    Attributes:
        path: of its file, unless it is in memory.
        rows: rows in it.
        features: its features in JSON, or `UNCHANGED`.
        seconds: the time that the step took.
        names_files: whether its rows name local files.
        seconds_a_row: the time that the function alone took; None where that is not known.
        keys: the keys of the dicts that the function returned: all different sets of them, each in order.
        remembers: whether the operator was seen to remember rows.
        loaded: the objects that its operator had loaded.
        data: the stream, if it is in memory.
    """

    path: str
    rows: int
    features: str
    seconds: float
    names_files: bool
    seconds_a_row: float | None = None
    keys: frozenset[tuple[str, ...]] = frozenset()
    remembers: bool = False
    loaded: Loaded = frozenset()
    data: pa.Buffer | None = None


def parse_features(features: str) -> datasets.Features:
    """The features of a `Written`, unless they are `UNCHANGED`."""
    return datasets.Features.from_dict(json.loads(features))


def watch_whole(step: BlockStep) -> CallWatch:
    """Ends the run of a step in one piece, early on, if it is slow: by a `TooSlowError`."""
    step.state.begin()
    return _watch(step, 0, len(step.dataset), may_end=True)


def _watch(step: BlockStep, first: int, rows: int, *, may_end: bool) -> CallWatch:
    most = step.slow_seconds(rows) if may_end else math.inf
    return CallWatch(step.state, _early_calls(step), first, rows, step.at_once, most)


def _early_calls(step: BlockStep) -> EarlyCalls | None:
    """The place for calls of rows that run anew; None for none."""
    # A file that a row names may change before the run that begins anew.
    return None if may_name_files(step.dataset.features) else step.early


def run_block(
    step: BlockStep,
    rows: pa.Table,
    first: int,
    features: str | None,
    file: Path,
    key: str,
    may_end: bool = False,
    tell: Callable[[str | None], object] | None = None,
    *,
    in_memory: bool = False,
) -> Written:
    """Run a step on a block, and write its result.

    Args:
        step: the step.
        rows, first: the block, and the number of its first row.
        features: the features of the result, in JSON; None to find them.
        file, key: the path for the result, and its key.
        may_end: whether the run may end early.
        tell: receives the features of the first rows' result before the rest runs; see `_first_features`.
        in_memory: do not write a result to a file that was made in memory.

    Raises:
        TooSlowError: the block takes long, and ``may_end`` is set.
    """
    known = None if features is None or features == UNCHANGED else parse_features(features)
    step.state.begin()
    began = time.perf_counter()
    with _mixed_answers_refused(), _no_file_left_open():
        watch = _watch(step, first, len(rows), may_end=may_end)
        if tell is not None:
            tell(_first_features(step, rows, first, file, key))
        call = BlockCall(step.dataset, rows, first, known, file, key, watch)
        made = call.made(step.run(call))
    if step.at_once == 1 and len(watch.keys) > 1:
        # A further key is dropped, or is an error, by the first of the rows that `datasets` writes at once.
        raise _rare_key_error(repr(_rare_key(watch.keys)))
    if not made.features:
        raise NotInBlocksError("its result has no columns, and so no rows; have the function return some")
    found = _features_of(made)
    if features is not None and (found == UNCHANGED) != (features == UNCHANGED):
        raise NotInBlocksError(MIXED_ANSWERS)
    path, data = "", None
    if in_memory and made.is_in_memory:
        data = make_stream(made.batches(), made.features)
    else:
        path = write_result(made.batches(), made.features, str(file))
    seconds, names_files = time.perf_counter() - began, made.name_files()
    remembers = step.state.has_changed()
    return Written(
        path,
        made.rows,
        found,
        seconds,
        names_files,
        watch.seconds_a_row(),
        frozenset(watch.keys),
        remembers,
        step.state.loaded,
        data,
    )


@contextlib.contextmanager
def _mixed_answers_refused() -> Iterator[None]:
    """Refuse a block where `datasets` fails to write results of several forms: with other rows before, it
    might not.
    """
    try:
        yield
    except AttributeError as error:
        # The first row that a writer is needed for opens it, unless an earlier row got None.
        is_of_map = traceback.extract_tb(error.__traceback__)[-1].filename == arrow_dataset.__file__
        if is_of_map and "'NoneType' object has no attribute 'write" in str(error):
            raise NotInBlocksError(MIXED_ANSWERS) from error
        if not _is_of_writer(error):
            raise
        raise _several_types_error(error) from error
    except (pa.ArrowException, TypeError) as error:
        if not _is_of_writer(error):
            raise
        raise _several_types_error(error) from error
    except KeyError as error:
        if not _is_of_writer(error, last=True):
            raise
        raise _rare_key_error(str(error)) from error
    except ValueError as error:
        if not _is_of_writer(error):
            raise
        raise NotInBlocksError(
            f"the results of some rows do not fit those before ({error}), and what `datasets` makes of that "
            "depends on all rows; return the same keys for all rows"
        ) from error


def _several_types_error(error: Exception) -> NotInBlocksError:
    return NotInBlocksError(
        "values of several types are in one column, and how they are cast depends on all rows "
        f"({error}); convert them in the function"
    )


def _rare_key_error(key: str) -> NotInBlocksError:
    return NotInBlocksError(
        f"the function returns the key {key} for some rows only, and what `datasets` makes of that depends "
        "on all rows; return it for all rows"
    )


def _rare_key(keys: Collection[tuple[str, ...]]) -> str:
    """A key that some of several sets of keys lack."""
    every = {key for one in keys for key in one}
    return min(key for key in every if not all(key in one for one in keys))


def _features_of(made: MadeRows) -> str:
    """The features of a result in JSON, or `UNCHANGED`."""
    return UNCHANGED if made.is_unchanged else json.dumps(made.features.to_dict())


def tells_features(rows: int, features: str) -> bool:
    """Whether a result of so many rows, with those features, shows the types of all its columns."""
    return rows > 0 and NULL_TYPE not in features


def _first_features(step: BlockStep, rows: pa.Table, first: int, file: Path, key: str) -> str | None:
    """The features that the result of a block's first rows has, in JSON, so that other processes can begin.

    The calls are kept, and the run on the whole block takes their results: the function sees no row twice,
    unless a result cannot be copied.

    Returns:
        None if the first rows do not show the types of all columns, or no calls are kept of such a step.

    Raises:
        TooSlowError: the block takes long.
    """
    early, count = _early_calls(step), -(-GUESS_ROWS // step.at_once) * step.at_once
    if early is None or step.is_async or count >= len(rows):
        return None
    # The block is slow, not these rows.
    most = step.slow_seconds(len(rows)) * count / len(rows)
    watch = CallWatch(step.state, early, first, count, step.at_once, most, keeps_all=True)
    place = file.with_suffix(".first")
    call = BlockCall(step.dataset, rows.slice(0, count), first, None, place, key, watch)
    try:
        made = call.made(step.run(call))
    finally:
        place.unlink(missing_ok=True)
    watch.keep_calls()
    features = _features_of(made)
    return features if tells_features(made.rows, features) else None


@contextlib.contextmanager
def _no_file_left_open() -> Iterator[None]:
    """Close the file that `map` leaves open where its writer fails once more at the end."""
    try:
        yield
    except BaseException as error:
        for frame, _ in traceback.walk_tb(error.__traceback__):
            if frame.f_code.co_filename == arrow_dataset.__file__:
                left = frame.f_locals.get("tmp_file")
                if left is not None:
                    left.close()
        raise


def _is_of_writer(error: BaseException, *, last: bool = False) -> bool:
    """Whether an error was raised where `datasets` writes results, not by the operator itself.

    With ``last`` the writer itself has raised it, not a value of the operator's that the writer looked at.
    """
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    return arrow_writer.__file__ in (files[-1:] if last else files)
