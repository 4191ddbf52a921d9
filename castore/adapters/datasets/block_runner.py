"""Runs a step block by block: blocks whose results are kept do not run again.

The result of a block follows from its rows, the operator, and the features of the step's result. Those are
decided by the first rows that come out, as in `datasets`: the first block runs as it is, and each later block
with the features of the first. So results are equal to those of one pass over all rows, whatever a block
alone would have looked like.

A block's result is kept as soon as it is there. So a run that ends early leaves all its blocks but those in
flight, and the next run goes on after them.

Must never keep a result that an operator's exception, or a dead worker, has cut short.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import pyarrow as pa
from datasets.features.features import require_storage_embed
from datasets.table import InMemoryTable

from castore.adapters.datasets import scratch
from castore.adapters.datasets.block_entries import (
    BlockResult,
    NoRoomError,
    find_result,
    put_result,
    write_result,
)
from castore.adapters.datasets.cutting import Cut, is_small
from castore.adapters.datasets.dataset_entries import StorageOptions
from castore.adapters.datasets.dataset_fingerprint import format_digest
from castore.adapters.datasets.private_copies import own_copy
from castore.adapters.datasets.source_blocks import SourceBlock, source_blocks
from castore.adapters.datasets.tables import DatasetPart, KeptFile, describe_dataset
from castore.adapters.mapped_check import note_new
from castore.keys.encoder import key
from castore.store import Store
from castore.system import worker_processes

_VERSION = 1
# One block in so many rows may be unlike the others; so much of a step says how large its result will be.
_SHOWS_SIZE = 1 / 20
# Formats in which a function sees Arrow's chunks, or what follows from them.
_AS_IT_LIES = ("arrow", "pandas", "polars")
# In the place of a result's features: the step has changed nothing.
_UNCHANGED = "null"


class MixedAnswersError(Exception):
    """A function returns None for some rows and results for others.

    What `datasets` makes of that depends on the first row and the last one of all.
    """


class BlockCall(NamedTuple):
    """A block for an operator, with the place and the form of its result.

    Attributes:
        rows: the block.
        first: the number of its first row among all rows of the step's input.
        features: the features of the result; None to find them.
        file: the path for an Arrow file of the result.
        fingerprint: the fingerprint for the result.
    """

    rows: datasets.Dataset
    first: int
    features: datasets.Features | None
    file: Path
    fingerprint: str


class BlockStep(NamedTuple):
    """A step over a dataset that can run on blocks.

    Attributes:
        dataset: the input, of at least one row.
        run: runs the step on one block.
        counted: what its result depends on beside the rows and the features, in the form of `castore.key`.
        rule: where blocks may end.
        is_numbered: whether rows count by their number as well.
        has_features: whether the features of the result are known without running it.
        keeps_count: whether the result has a row for each row.
        num_proc: processes that share the blocks; 1 for this one.
        tell: a callback that receives the number of rows done.
        title: the title of the progress bar.
    """

    dataset: datasets.Dataset
    run: Callable[[BlockCall], datasets.Dataset]
    counted: Any
    rule: Cut
    is_numbered: bool = False
    has_features: bool = False
    keeps_count: bool = False
    num_proc: int = 1
    tell: Callable[[int], object] | None = None
    title: str = "Map"


def can_cut(dataset: datasets.Dataset) -> bool:
    """Whether a dataset is large enough for blocks, and its rows say all that a step gets to see.

    Rows of images may name files, which count too. A search index sees all rows. In Arrow's and pandas'
    formats a function sees how rows that were picked lie in memory.
    """
    if not len(dataset) or dataset.list_indexes() or not _is_json(dataset._format_kwargs):
        return False
    if dataset._format_type == "custom" or (
        dataset._indices is not None and dataset._format_type in _AS_IT_LIES
    ):
        return False
    if any(require_storage_embed(feature) for feature in dataset.features.values()):
        return False
    average = int(dataset._data.nbytes) / max(1, len(dataset._data))
    return not is_small(len(dataset), int(average * len(dataset)))


def _is_json(value: Any) -> bool:
    """Whether a dataset with such a format can be kept."""
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


class _Written(NamedTuple):
    """A result in a file, and the seconds that the step took for it."""

    path: str
    rows: int
    features: str
    seconds: float


class BlockRun:
    """A run of a step.

    Args:
        store: keeps the results.
        step: the step.
        options: the storage options of results.
        temp_dir: the folder of uncompressed files; by default below the store.
        fresh: run all blocks, also those whose results are kept.
    """

    def __init__(
        self,
        store: Store,
        step: BlockStep,
        options: StorageOptions,
        temp_dir: str | os.PathLike[str] | None = None,
        *,
        fresh: bool = False,
    ) -> None:
        self._store = store
        self._step = step
        self.options = options
        self._format = format_digest(step.dataset)
        self._temp_dir = temp_dir
        self._fresh = fresh
        self._begin()

    def _begin(self) -> None:
        self._features: str | None = None
        self._done: list[BlockResult | Future[BlockResult]] = []
        self._waiting: deque[Future[BlockResult]] = deque()
        self._rows_kept, self._bytes_kept = 0, 0

    def run(self) -> list[BlockResult]:
        """The results of all blocks, in order, all of them kept.

        Raises:
            NoRoomError: the store has no room for a result.
            MixedAnswersError: the step cannot run block by block.
            Exception: an exception of the operator; the blocks before that one are kept.
        """
        self._begin()
        started, dataset = time.time(), self._step.dataset
        with contextlib.ExitStack() as stack:
            bar = stack.enter_context(
                datasets.utils.tqdm(desc=self._step.title, total=len(dataset), unit=" examples")
            )
            stack.enter_context(_no_other_bars())
            # One thread: compression uses all cores by itself.
            keeper = stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix="castore-blocks"))
            workers = stack.enter_context(_workers(self._step))
            first = reused = 0
            for block in source_blocks(dataset, self._step.rule):
                rows = self._take(block, first, keeper, workers)
                first += rows
                if isinstance(self._done[-1], BlockResult) and not bar.disable:
                    bar.initial += rows  # the rate is that of rows that run
                    reused += rows
                    bar.set_postfix_str(f"{reused:,} reused", refresh=False)
                bar.update(rows)
            results = [item if isinstance(item, BlockResult) else item.result() for item in self._done]
        if len({result.features == _UNCHANGED for result in results}) > 1:
            raise MixedAnswersError
        new = [self._store.blob(result.digest) for result in results if not result.reused]
        note_new(self._store, [blob for blob in new if blob is not None], started)
        return results

    def find(
        self, blocks: Iterable[SourceBlock | None]
    ) -> Iterator[tuple[SourceBlock | None, BlockResult | None]]:
        """Blocks with their results, as far as those are kept. Runs nothing.

        Ends where nothing more is known before a run: the features of the result are in the keys of all
        blocks but the first.

        Args:
            blocks: the blocks of the input, in order; None for one that is not known.
        """
        self._begin()
        first = 0
        for block in blocks:
            found = None if block is None else find_result(self._store, self._key(block, first))
            if found is None and self._features is None and not self._step.has_features:
                return
            if found is not None:
                self._learn(found.features, found.rows)
            if self._step.is_numbered and block is not None:
                first += len(block.read()) if found is None else found.rows_in
            yield block, found

    def part(self, results: Sequence[BlockResult], fingerprint: str) -> DatasetPart:
        """The step's result, for the store that has its blocks.

        Args:
            results: the results of all blocks, in order.
            fingerprint: the fingerprint of the result.
        """
        dataset = self._step.dataset
        told = own_copy(dataset)
        told._info.features = self.features_of(results)
        told._fingerprint = fingerprint
        if dataset._format_columns is not None:  # as `map` does: new columns are shown
            hidden = set(dataset.column_names).difference(dataset._format_columns)
            told._format_columns = sorted(set(told._info.features) - hidden)
        rows = sum(result.rows for result in results)
        return DatasetPart(
            lambda: [KeptFile(result.digest) for result in _with_rows(results)],
            lambda digests: describe_dataset(told, len(digests), rows),
        )

    def features_of(self, results: Sequence[BlockResult]) -> datasets.Features:
        """The features of the step's result, from the results of some of its blocks, at least one."""
        features = _with_rows(results)[0].features
        return self._step.dataset.features.copy() if features == _UNCHANGED else _parse(features)

    def _take(self, block: SourceBlock, first: int, keeper: Executor, workers: Executor | None) -> int:
        """Find the result of a block, or begin to make it; returns the block's rows."""
        digits = self._key(block, first)
        found = None if self._fresh else find_result(self._store, digits)
        if found is not None:
            self._done.append(found)
            self._learn(found.features, found.rows)
            if self._step.tell is not None:
                self._step.tell(found.rows_in)
            return found.rows_in
        rows = block.read()
        file = scratch.new_file(self._store, self._temp_dir)
        given = rows, first, self._features, file, digits
        is_shared = workers is not None and (self._features is not None or self._step.has_features)
        if is_shared:
            assert workers is not None
            written = workers.submit(_run_in_worker, _as_stream(rows), *given[1:])
        else:
            written = Future()
            try:
                written.set_result(_run_block(self._step, *given))
            except BaseException:
                scratch.remove(file)
                raise
        future = keeper.submit(self._keep, written, digits, len(rows), file, counted=not is_shared)
        self._done.append(future)
        self._waiting.append(future)
        if self._features is None and not self._step.has_features:
            made = written.result()
            self._learn(made.features, made.rows)
        while len(self._waiting) > self._step.num_proc + 1:
            self._waiting.popleft().result()
        return len(rows)

    def _learn(self, features: str, rows: int) -> None:
        """Remember the features of the first result that has rows."""
        if self._features is None and rows and not self._step.has_features:
            self._features = features

    def _key(self, block: SourceBlock, first: int) -> str:
        return key(
            {
                "version": _VERSION,
                "rows": block.digest,
                "features": str(self._step.dataset.features),
                "format": self._format,
                "step": self._step.counted,
                "result": self._features,
                "first": first if self._step.is_numbered else None,
            }
        )

    def _keep(
        self, written: Future[_Written], digits: str, rows: int, file: Path, counted: bool
    ) -> BlockResult:
        try:
            made = written.result()
            result = put_result(
                self._store, digits, made.path, rows, made.rows, made.features, self.options, made.seconds
            )
        finally:
            scratch.remove(file)
        self._check_room(result)
        if not counted and self._step.tell is not None:
            self._step.tell(rows)
        return result

    def _check_room(self, result: BlockResult) -> None:
        """Raise NoRoomError if not all results will fit: later blocks would push earlier ones out."""
        self._rows_kept += result.rows_in
        self._bytes_kept += result.stored
        rows, most = len(self._step.dataset), self._store.settings.max_size
        if most is None or self._rows_kept < rows * _SHOWS_SIZE:
            return
        if self._bytes_kept * rows > most * self._rows_kept:
            raise NoRoomError


def _parse(features: str) -> datasets.Features:
    return datasets.Features.from_dict(json.loads(features))


def _with_rows(results: Sequence[BlockResult]) -> Sequence[BlockResult]:
    """The results that have rows; the first one if none has."""
    return [result for result in results if result.rows] or results[:1]


def _run_block(
    step: BlockStep,
    rows: pa.Table,
    first: int,
    features: str | None,
    file: Path,
    digits: str,
) -> _Written:
    """Run a step on a block, and write its result to a file."""
    dataset = step.dataset
    block = datasets.Dataset(
        InMemoryTable(rows), info=dataset.info.copy(), split=dataset.split, fingerprint=digits
    )
    for name in ("_format_type", "_format_kwargs", "_format_columns", "_output_all_columns"):
        setattr(block, name, getattr(dataset, name))
    known = None if features is None or features == _UNCHANGED else _parse(features)
    began = time.perf_counter()
    try:
        result = step.run(BlockCall(block, first, known, file, digits))
    except AttributeError as error:
        # The first row that a writer is needed for opens it, unless an earlier row got None.
        if "'NoneType' object has no attribute 'write" in str(error):
            raise MixedAnswersError from error
        raise
    is_unchanged = result._indices is None and result._data.table is block._data.table
    if features is not None and is_unchanged != (features == _UNCHANGED):
        raise MixedAnswersError
    made = _UNCHANGED if is_unchanged else json.dumps(result.features.to_dict())
    path = write_result(result, str(file))
    return _Written(path, len(result), made, time.perf_counter() - began)


# --- other processes ----------------------------------------------------------------------------------------

# The step, in a worker. Forked, not pickled: an operator may hold what pickle cannot take.
_own: BlockStep | None = None


@contextlib.contextmanager
def _workers(step: BlockStep) -> Iterator[Executor | None]:
    if step.num_proc == 1:
        yield None
        return
    context = multiprocessing.get_context("fork")
    with worker_processes.bound_to_thread():
        pool = ProcessPoolExecutor(step.num_proc, context, _begin_worker, (step,))
        try:
            yield pool
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in list((pool._processes or {}).values()):
                process.kill()
            raise
        finally:
            pool.shutdown()


def _begin_worker(step: BlockStep) -> None:
    global _own
    _own = step


def _as_stream(rows: pa.Table) -> pa.Buffer:
    """Rows as bytes: a table that is pickled takes along all that it was cut from."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema) as writer:
        writer.write_table(rows)
    return sink.getvalue()


def _run_in_worker(rows: pa.Buffer, *given: Any) -> _Written:
    assert _own is not None
    return _run_block(_own, pa.ipc.open_stream(rows).read_all(), *given)


@contextlib.contextmanager
def _no_other_bars() -> Iterator[None]:
    """Keep `datasets` from showing a bar for each block."""
    if datasets.are_progress_bars_disabled():
        yield
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        datasets.disable_progress_bars()
    try:
        yield
    finally:
        datasets.enable_progress_bars()
