"""Runs a step block by block: blocks whose results are kept do not run again.

The result of a block follows from its rows, the operator, and the features of the step's result. Those are
decided by the first rows that come out, as in `datasets`: the first block runs as it is, and each later block
with the features of the first. So results are equal to those of one pass over all rows, whatever a block
alone would have looked like.

A block's result is kept as soon as it is there. So a run that ends early leaves all its blocks but those in
flight, and the next run goes on after them.

Runs of one step at once, in any threads and processes, share its blocks. A run claims each block that it
makes, passes over blocks that others have claimed, and waits for those at its end. A claim is a lock: it ends
with its process, and then the block is free again.

Must never keep a result that an operator's exception, or a dead worker, has cut short.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import threading
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import datasets
import pyarrow as pa
from datasets import arrow_writer
from datasets.features.features import require_storage_embed
from datasets.table import InMemoryTable

from castore.adapters.datasets import scratch
from castore.adapters.datasets.block_entries import (
    BLOCKS_FOLDER,
    NO_ROOM,
    BlockResult,
    NotInBlocksError,
    find_result,
    put_result,
    write_result,
)
from castore.adapters.datasets.cutting import LARGEST_BYTES, Cut, is_small
from castore.adapters.datasets.dataset_entries import StorageOptions
from castore.adapters.datasets.dataset_fingerprint import format_digest
from castore.adapters.datasets.mapped_files import store_locks
from castore.adapters.datasets.private_copies import own_copy
from castore.adapters.datasets.source_blocks import ReadAhead, SourceBlock, source_blocks
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
_MIXED_ANSWERS = (
    "the function returns None for some rows and results for others, and what `datasets` makes of that "
    "depends on the first row and the last one of all; return None for all rows or for none"
)

Release: TypeAlias = Callable[[], None]


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


def bytes_at_once(num_proc: int) -> int:
    """The most bytes of a step's result that lie uncompressed at one time; more only if its rows grow."""
    return (num_proc + 2) * LARGEST_BYTES


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


class _Elsewhere(NamedTuple):
    """A block that another run has claimed: its place, and the key of its result."""

    number: int
    key: str


_Item: TypeAlias = "BlockResult | Future[BlockResult] | _Elsewhere"


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
        self._temp_dir = temp_dir
        self._fresh = fresh

    def run(self) -> list[BlockResult]:
        """The results of all blocks, in order, all of them kept.

        Raises:
            NotInBlocksError: the step cannot run block by block, or the store has no room.
            Exception: an exception of the operator; the blocks before that one are kept.
        """
        started, step = time.time(), self._step
        with contextlib.ExitStack() as stack:
            bar = stack.enter_context(
                datasets.utils.tqdm(desc=step.title, total=len(step.dataset), unit=" examples")
            )
            stack.enter_context(_no_other_bars())
            maker = _Maker(self._store, step, self.options, self._temp_dir, _Progress(step, bar))
            stack.enter_context(maker)
            while (results := self._try_all(maker)) is None:
                continue  # another run has ended without a block that it had claimed
        if len({result.features == _UNCHANGED for result in results}) > 1:
            raise NotInBlocksError(_MIXED_ANSWERS)
        new = [self._store.blob(result.digest) for result in results if not result.reused]
        note_new(self._store, [blob for blob in new if blob is not None], started)
        return results

    def _try_all(self, maker: _Maker) -> list[BlockResult] | None:
        """Take the results that are there, and make those that nobody else makes.

        Returns:
            All results; None if another run has claimed a block, and not kept it.
        """
        keys, first = _Keys(self._step), 0
        done: list[_Item] = []
        ahead = ReadAhead(source_blocks(self._step.dataset, self._step.rule))
        with contextlib.closing(iter(ahead)) as blocks:
            for block in blocks:
                item, rows = self._take(block, len(done), first, keys, maker)
                done.append(item)
                first += rows
                ahead.wants_rows = not isinstance(item, BlockResult)
        kept = [item.result() if isinstance(item, Future) else item for item in done]
        results = []
        for item in kept:
            result = self._wait_for(item.key) if isinstance(item, _Elsewhere) else item
            if result is None:
                return None
            if isinstance(item, _Elsewhere):
                maker.note(item.number, result)
            results.append(result._replace(reused=result.key not in maker.made))
        return results

    def _take(
        self, block: SourceBlock, number: int, first: int, keys: _Keys, maker: _Maker
    ) -> tuple[_Item, int]:
        """The result of a block if it is there, or a place for it; and the number of the block's rows."""
        digits = keys.of(block, first)
        found = self._find_or_claim(digits, keys)
        if isinstance(found, BlockResult):
            keys.learn(found)
            maker.note(number, found)
            return found, found.rows_in
        rows = _read(block, found)
        if found is None:
            return _Elsewhere(number, digits), len(rows)
        made = maker.make(number, rows, first, keys.features, digits, found)
        if not keys.are_final:
            keys.learn(made.result())
        return made, len(rows)

    def _find_or_claim(self, digits: str, keys: _Keys) -> BlockResult | Release | None:
        """The result of a block; or a claim of it; None if another run has claimed it."""
        if self._fresh:
            return lambda: None
        locks, name = store_locks(self._store), _claim_of(digits)
        while (found := find_result(self._store, digits)) is None:
            release = locks.claim(name)
            if release is not None:
                if (found := find_result(self._store, digits)) is None:
                    return release
                release()  # it was kept a moment ago
            elif keys.are_final:
                return None
            else:
                self._wait_for(digits)  # the keys of all other blocks need its features
        return found

    def _wait_for(self, digits: str) -> BlockResult | None:
        """The result of a block that another run has claimed; None if that run ends without it."""
        with store_locks(self._store).hold(_claim_of(digits)):
            return find_result(self._store, digits)

    def find(
        self, blocks: Iterable[SourceBlock | None]
    ) -> Iterator[tuple[SourceBlock | None, BlockResult | None]]:
        """Blocks with their results, as far as those are kept. Runs nothing.

        Ends where nothing more is known before a run: the features of the result are in the keys of all
        blocks but the first.

        Args:
            blocks: the blocks of the input, in order; None for one that is not known.
        """
        keys, first = _Keys(self._step), 0
        for block in blocks:
            found = None if block is None else find_result(self._store, keys.of(block, first))
            if found is None and not keys.are_final:
                return
            if found is not None:
                keys.learn(found)
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


class _Keys:
    """The keys of a step's blocks. Those behind the first have the features of the result in them."""

    def __init__(self, step: BlockStep) -> None:
        self._step = step
        self._format = format_digest(step.dataset)
        #: The features of the first result that has rows, in JSON; None if none is known, or needed.
        self.features: str | None = None

    @property
    def are_final(self) -> bool:
        """Whether no result of another block can change them any more."""
        return self.features is not None or self._step.has_features

    def learn(self, result: BlockResult) -> None:
        """Take note of the features of a result."""
        if result.rows and not self.are_final:
            self.features = result.features

    def of(self, block: SourceBlock, first: int) -> str:
        """The key of the next block, whose first row has that number."""
        return key(
            {
                "version": _VERSION,
                "rows": block.digest,
                "features": str(self._step.dataset.features),
                "format": self._format,
                "step": self._step.counted,
                "result": self.features,
                "first": first if self._step.is_numbered else None,
            }
        )


class _Progress:
    """The rows that are done, for a bar and a callback. Each block counts once, however often it is seen."""

    def __init__(self, step: BlockStep, bar: Any) -> None:
        self._tell, self._bar = step.tell, bar
        self._seen: set[int] = set()
        self._reused = 0
        self._guard = threading.Lock()

    def count(self, block: int, rows: int, *, reused: bool) -> None:
        """Count a block whose result is there."""
        with self._guard:
            if block in self._seen:
                return
            self._seen.add(block)
            if reused and not self._bar.disable:
                self._bar.initial += rows  # the rate is that of rows that run
                self._reused += rows
                self._bar.set_postfix_str(f"{self._reused:,} reused", refresh=False)
            self._bar.update(rows)
            if self._tell is not None:
                self._tell(rows)


def _read(block: SourceBlock, release: Release | None) -> pa.Table:
    """The rows of a block; its claim ends if they cannot be read."""
    try:
        return block.read()
    except BaseException:
        if release is not None:
            release()
        raise


def _claim_of(digits: str) -> str:
    """The name of the lock that is the claim of a block."""
    return f"{BLOCKS_FOLDER}/{digits}"


class _Maker:
    """Makes the results of blocks, here or in the step's processes, and has them kept; a context.

    Args:
        store, step, options, temp_dir: of the run.
        progress: counts blocks.
    """

    def __init__(
        self,
        store: Store,
        step: BlockStep,
        options: StorageOptions,
        temp_dir: str | os.PathLike[str] | None,
        progress: _Progress,
    ) -> None:
        self._store = store
        self._step = step
        self._options = options
        self._temp_dir = temp_dir
        self._progress = progress
        self._stack = contextlib.ExitStack()
        self._waiting: deque[Future[BlockResult]] = deque()
        self._rows_kept, self._bytes_kept = 0, 0
        #: The keys of all results that were made.
        self.made: set[str] = set()

    def __enter__(self) -> _Maker:
        # One thread: compression uses all cores by itself.
        self._keeper = self._stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix="castore-blocks"))
        self._workers = self._stack.enter_context(_workers(self._step))
        return self

    def __exit__(self, *exc: Any) -> None:
        self._stack.__exit__(*exc)

    def note(self, number: int, found: BlockResult) -> None:
        """Count a block whose result was there."""
        self._progress.count(number, found.rows_in, reused=found.key not in self.made)

    def make(
        self,
        number: int,
        rows: pa.Table,
        first: int,
        features: str | None,
        digits: str,
        release: Release,
    ) -> Future[BlockResult]:
        """Make a block's result; waits while many others are being made.

        Args:
            number: the block's place.
            rows, first: the block, and the number of its first row.
            features: the features of the result, in JSON; None to find them.
            digits: the result's key.
            release: ends the claim of the block.
        """
        try:
            file = scratch.new_file(self._store, self._temp_dir)
            try:
                written = self._run(rows, first, features, file, digits)
            except BaseException:
                scratch.remove(file)
                raise
        except BaseException:
            release()
            raise
        made = self._keeper.submit(self._keep, number, written, digits, len(rows), file, release)
        self._waiting.append(made)
        while len(self._waiting) > self._step.num_proc + 1:
            self._waiting.popleft().result()
        return made

    def _run(
        self, rows: pa.Table, first: int, features: str | None, file: Path, digits: str
    ) -> Future[_Written]:
        if self._workers is not None:  # the first block too: an operator's crash must not end this process
            return self._workers.submit(_run_in_worker, _as_stream(rows), first, features, file, digits)
        written: Future[_Written] = Future()
        written.set_result(_run_block(self._step, rows, first, features, file, digits))
        return written

    def _keep(
        self, number: int, written: Future[_Written], digits: str, rows: int, file: Path, release: Release
    ) -> BlockResult:
        try:
            made = written.result()
            result = put_result(
                self._store, digits, made.path, rows, made.rows, made.features, self._options, made.seconds
            )
            self.made.add(digits)
        finally:
            scratch.remove(file)
            release()
        self._check_room(result)
        self._progress.count(number, rows, reused=False)
        return result

    def _check_room(self, result: BlockResult) -> None:
        """Check that all results will fit: later ones would push earlier ones out."""
        self._rows_kept += result.rows_in
        self._bytes_kept += result.stored
        rows, most = len(self._step.dataset), self._store.settings.max_size
        if most is None or self._rows_kept < rows * _SHOWS_SIZE:
            return
        if self._bytes_kept * rows > most * self._rows_kept:
            raise NotInBlocksError(NO_ROOM)


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
            raise NotInBlocksError(_MIXED_ANSWERS) from error
        raise
    except pa.ArrowException as error:
        if not _is_of_writer(error):
            raise
        raise NotInBlocksError(
            "values of several types are in one column, and how they are cast depends on all rows "
            f"({error}); convert them in the function"
        ) from error
    is_unchanged = result._indices is None and result._data.table is block._data.table
    if features is not None and is_unchanged != (features == _UNCHANGED):
        raise NotInBlocksError(_MIXED_ANSWERS)
    made = _UNCHANGED if is_unchanged else json.dumps(result.features.to_dict())
    path = write_result(result, str(file))
    return _Written(path, len(result), made, time.perf_counter() - began)


def _is_of_writer(error: BaseException) -> bool:
    """Whether an error was raised where `datasets` writes results, not by the operator itself."""
    return any(frame.filename == arrow_writer.__file__ for frame in traceback.extract_tb(error.__traceback__))


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
            # The processes are forked now: a thread that reads ahead may hold locks later on.
            pool.submit(int).result()
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
