"""Runs one step once: its result comes from the cache, from a pending put, or from a run now.

A step's name is ``steps/<operator>_<key>``. The process that runs the step holds the lock of that name until
the result is stored, so another process that finds nothing yet waits and then finds the result. Locks only
save work: two processes that do not see each other's locks both run the step, and put the same result.

The store gets a private snapshot, taken when the step ends; every caller gets its own dataset
(`private_copies`).

The key of a step has the rows of its input, and not its description (`datasets.DatasetInfo`). So a result
gets the description of the present input, as in `datasets`, whichever run has kept it. Parts of a description
that an operator gives its result stay.

Must never hand out a damaged result, nor keep the result of a failed step, nor one that a caller has changed.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import datasets

from castore import layout
from castore.adapters.datasets import dataset_entries, scratch
from castore.adapters.datasets.background import PendingPut, pending_puts
from castore.adapters.datasets.block_entries import NO_ROOM, NotInBlocksError, RemembersError, saved_by
from castore.adapters.datasets.block_runner import BlockRun, features_of, has_memory, require_no_memory
from castore.adapters.datasets.block_step import BlockStep, watch_whole
from castore.adapters.datasets.call_watch import CallWatch, TooSlowError
from castore.adapters.datasets.dataset_fingerprint import files_named
from castore.adapters.datasets.descriptions import describe_like, other_fields
from castore.adapters.datasets.mapped_files import store_locks
from castore.adapters.datasets.operator_state import OperatorState
from castore.adapters.datasets.private_copies import own_copy, private_copy
from castore.adapters.datasets.tables import (
    fingerprint_of_key,
    make_part,
)
from castore.errors import (
    CacheWarning,
    CorruptError,
    FullError,
    InvalidValueError,
    NotFoundError,
    TooLargeError,
    read_only_error,
    warn,
)
from castore.keys.encoder import key as key_of
from castore.store import Store
from castore.system.sql_errors import is_full, no_space_in

#: The folder of kept steps.
STEPS_FOLDER = "steps"
#: In a step's record: its operator remembers rows that it has seen.
REMEMBERS = "remembers"
# Why an operator sees all rows in one pass from the start.
_AGAIN = "the function remembers rows that it has seen, as an earlier run has found"
# A step whose input's files have changed while it ran, and the seconds after which gc removes its folder.
_UNKEPT, _UNKEPT_SECONDS = "unkept", 86400.0
_VERSION = 1
# Runs of a step of which gc takes blocks before they have the step's name.
_ATTEMPTS = 3
#: Bytes of a result up to which its uncompressed file may stay for as long as the program runs.
SMALL_FILE_BYTES = 64 << 20
_NAME_LENGTH = 60
# In a record: the parts of the result's description that are not its input's.
_OWN_INFO = "own_info"
#: Bytes that a disk on which a step could not write has left at most: the step writes less than that at once.
_ROOM = 1 << 30


class StepFunction(Protocol):
    """Runs a step."""

    def __call__(self, file: Path, watch: CallWatch | None, *, in_order: bool = False) -> datasets.Dataset:
        """The result, given a path for its Arrow file, and what `BlockCall.watch` is, or None.

        With ``in_order`` this process alone runs it, whatever ``num_proc`` says.
        """


class StepOutcome(NamedTuple):
    """A step's result.

    Attributes:
        dataset: the rows.
        hit: whether nothing had to be run.
        record: the record of the step; see `run_or_load`.
        size: the result's size in the store, once it is there; None if the result could not be stored.
        rows_reused: rows of the input that did not have to be run.
        seconds_saved: time that those rows took when they ran.
        file: the uncompressed file that the dataset is mapped from; None where there is none.
    """

    dataset: datasets.Dataset
    hit: bool
    record: dict[str, Any]
    size: Future[dataset_entries.DatasetSize | None]
    rows_reused: int = 0
    seconds_saved: float = 0.0
    file: Path | None = None


def store_or_default(given: Store | None) -> Store:
    """The given store, or the default one.

    Raises:
        InvalidValueError: the value is no store.
    """
    if given is not None and not isinstance(given, Store):
        raise InvalidValueError(
            f"store must be a castore.Store, not {type(given).__name__}: pass store=Store({given!r})"
        )
    return Store() if given is None else given


class InputFiles:
    """The files that rows of an input name, as they were when the first step over it began.

    Args:
        source: the input; None for none.
    """

    def __init__(self, source: datasets.Dataset | None) -> None:
        self._source = source
        self._states: list[list[Any]] | None = None

    def begin(self) -> None:
        """Take note of their states, the first time."""
        if self._states is None:
            self._states = [] if self._source is None else files_named(self._source)

    def have_changed(self) -> bool:
        """Whether they are others now: then no result may be kept under a key that has the states before."""
        return bool(self._states) and files_named(self._source) != self._states


def _random_digits() -> str:
    return (uuid.uuid4().hex + uuid.uuid4().hex)[:40]


def _warn_of_files(name: str) -> None:
    warn(
        f"the result of the step {name!r} is not kept: files that rows of the input name have changed "
        "while it ran; run it again when nobody writes to them",
        CacheWarning,
    )


def step_key(input_fingerprint: str, name: str, kind: str, operator: str, parameters: Any = None) -> str:
    """40 hexadecimal digits of a step's input, its operator and each parameter that affects the result."""
    counted = {
        "version": _VERSION,
        "input": input_fingerprint,
        "name": name,
        "kind": kind,
        "operator": operator,
    }
    return key_of({**counted, "parameters": parameters})


def step_name(name: str, key: str) -> str:
    """The name under which the result of a step is kept."""
    plain = re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip("-.")[:_NAME_LENGTH]
    return f"{STEPS_FOLDER}/{plain or 'step'}_{key}"


def load_step(store: Store, name: str, info: datasets.DatasetInfo | None = None) -> StepOutcome | None:
    """A step's result if it is kept and intact, or pending.

    Args:
        store, name: the store, and the result's name in it.
        info: the description of the input, of this step or of an earlier one; None for that of the run that
            has kept the result.

    Warns:
        CacheWarning: the result was kept and is damaged; it is dropped.
    """
    coming = pending_puts.find(store.path, name)
    if coming is not None:
        return _pending_outcome(coming, info)
    record = dataset_entries.metadata_of(store, name)
    if record is None:
        return None
    try:
        files = dataset_entries.find_files(store, name)
        dataset = dataset_entries.load_files(store, files)
    except NotFoundError:
        dataset_entries.drop(store, name)  # gc removed a part of it
        return None
    except CorruptError as error:
        with contextlib.suppress(NotFoundError, CorruptError):
            dataset_entries.set_damaged_aside(store, name)
        dataset_entries.drop(store, name)
        warn(f"the cached step {name!r} is damaged and runs again: {error}", CacheWarning)
        return None
    _describe(dataset, record, info)
    size = _done_future(files.size)
    return StepOutcome(dataset, True, record, size, record.get("rows_in") or 0, work_seconds(record))


def _describe(dataset: datasets.Dataset, record: dict[str, Any], info: datasets.DatasetInfo | None) -> None:
    if info is not None:
        describe_like(dataset, info, record.get(_OWN_INFO, ()))


def own_description(record: dict[str, Any]) -> dict[str, Any]:
    """The part of a step's record that the record of the step after it has, too."""
    return {_OWN_INFO: record[_OWN_INFO]} if _OWN_INFO in record else {}


def work_seconds(record: dict[str, Any]) -> float:
    """The time that a step took for all its rows, in whatever runs they ran; 0 where that is not known."""
    return float(record.get("work_seconds", record.get("seconds", 0.0)))


def _done_future(size: dataset_entries.DatasetSize | None) -> Future[dataset_entries.DatasetSize | None]:
    """A future of a size that is known already."""
    future: Future[dataset_entries.DatasetSize | None] = Future()
    future.set_result(size)
    return future


class _Wanted(NamedTuple):
    """The result that a call of `run_or_load` wants. The fields are that function's arguments."""

    store: Store
    name: str
    record: dict[str, Any]
    options: dataset_entries.StorageOptions
    rows_in: int
    temp_dir: str | os.PathLike[str] | None
    fresh: bool
    info: datasets.DatasetInfo | None
    files: InputFiles


def run_or_load(
    store: Store,
    name: str,
    make: StepFunction,
    record: dict[str, Any],
    options: dataset_entries.StorageOptions,
    *,
    rows_in: int,
    temp_dir: str | os.PathLike[str] | None = None,
    fresh: bool = False,
    blocks: BlockStep | None = None,
    only_if_slow: bool = False,
    info: datasets.DatasetInfo | None = None,
    files: InputFiles | None = None,
) -> StepOutcome:
    """The result of a step: kept, computed by another process, or computed now and stored in the background.

    Args:
        store, name: the store, and the result's name in it.
        make: runs the step.
        record: metadata to keep with the result; ``rows_in``, ``rows_out`` and ``seconds`` are added.
        options: the storage options.
        rows_in: rows of the step's input.
        temp_dir: the folder of the uncompressed file; by default below the store.
        fresh: run the step even if its result is kept.
        blocks: the step as one that runs block by block; None if it cannot.
        only_if_slow: run block by block only once it has turned out to take long.
        info: the description of the input; None where it is not known.
        files: that rows of the input name, whose state is in ``name``; None for none.

    Raises:
        StoreError: the store is read-only, and the result is not kept.
        Exception: an exception of ``make``; nothing is kept then, but for blocks that were finished.
    """
    found = pending_puts.find(store.path, name)  # this thread itself may hold the lock for it
    if found is not None and not fresh:
        return _pending_outcome(found, info)
    if found is not None:
        found.size.result()
    if not fresh and (hit := load_step(store, name, info)) is not None:
        return hit
    if store.read_only:
        raise read_only_error(store.path)
    state, files = None if blocks is None else blocks.state, files or InputFiles(None)
    files.begin()
    wanted = _Wanted(store, name, record, options, rows_in, temp_dir, fresh, info, files)
    as_one = partial(_run_as_one, wanted, state)
    why, seconds_a_row, in_order = "", None, False
    if blocks is not None and has_memory(store, blocks):
        blocks, why, in_order = None, _AGAIN, True
    if blocks is not None and only_if_slow:
        try:
            return as_one(partial(make, watch=watch_whole(blocks)))
        except TooSlowError as error:
            seconds_a_row = error.seconds_a_row
    if blocks is not None:
        run = BlockRun(store, blocks, options, temp_dir, fresh=fresh, seconds_a_row=seconds_a_row)
        try:
            with _explain_full(store.path / layout.WORK if temp_dir is None else Path(temp_dir)):
                return _run_in_blocks(wanted, run)
        except NotInBlocksError as error:
            why, in_order = str(error), isinstance(error, RemembersError)
            require_no_memory(blocks, why)
    return as_one(partial(make, watch=None, in_order=in_order), why)


def _run_as_one(
    wanted: _Wanted, state: OperatorState | None, make: Callable[[Path], datasets.Dataset], why: str = ""
) -> StepOutcome:
    """Run a step in one pass over all rows, unless another process has, and store it in the background.

    Args:
        wanted: the result.
        state: of the operator; None where nobody looks.
        make: runs the step.
        why: the reason, for a warning, if the step was to run block by block.
    """
    store, name, info = wanted.store, wanted.name, wanted.info
    with contextlib.ExitStack() as stack:
        stack.enter_context(store_locks(store).hold(name, may_move=True))  # `background.py` may end it
        if not wanted.fresh and (hit := load_step(store, name, info)) is not None:
            return hit
        if state is not None:
            state.begin()
        began = time.perf_counter()
        file = scratch.new_file(store, wanted.temp_dir)
        dataset = run_step(make, file, fingerprint_of_key(name.rpartition("_")[2]))
        seconds = time.perf_counter() - began
        measured = {"rows_in": wanted.rows_in, "rows_out": len(dataset), "seconds": round(seconds, 6)}
        record = {**wanted.record, **measured}
        if state is not None and state.has_changed(now=True):
            record[REMEMBERS] = True
        if info is not None and (own := other_fields(dataset.info, info)):
            record[_OWN_INFO] = sorted({*own, *record.get(_OWN_INFO, ())})
        snapshot = private_copy(dataset)
        if wanted.files.have_changed():
            _warn_of_files(name)
            snapshot._fingerprint = fingerprint_of_key(_random_digits())
            return StepOutcome(snapshot, False, record, _done_future(None), file=file)
        lock = stack.pop_all()
    if why:
        warn(
            f"the step {name!r} ran as one piece, so a change of its input runs all of it again: {why}",
            CacheWarning,
        )

    part = make_part(snapshot, embed=False)

    def put() -> dataset_entries.DatasetSize:
        # The lock is held until others can find the result. The copy keeps a Store open: the caller may close
        # the original at any time.
        with lock, copy.copy(store) as own:
            return dataset_entries.put_parts(own, name, {"": part}, wanted.options, record)

    # Return the snapshot, not the step's own dataset: rows of that one may lie in an array that its caller
    # goes on to change, and its fingerprint would make the next step's key a key of rows that are gone.
    coming = pending_puts.submit(store.path, name, snapshot, record, put, file)
    return _pending_outcome(coming, info, hit=False)


def _run_in_blocks(wanted: _Wanted, run: BlockRun) -> StepOutcome:
    """Run a step block by block, and keep it.

    Raises:
        NotInBlocksError: the step cannot, or the store has no room for all blocks.
    """
    store, name = wanted.store, wanted.name
    began = time.perf_counter()
    for _ in range(_ATTEMPTS):
        results = run.run()
        rows = sum(result.rows for result in results)
        reused, saved = saved_by(results)
        measured: dict[str, Any] = {"rows_in": sum(result.rows_in for result in results), "rows_out": rows}
        measured["seconds"] = round(time.perf_counter() - began, 6)
        measured["work_seconds"] = round(sum(result.seconds for result in results), 6)
        measured["features"] = features_of(results)  # a later forecast's guess
        measured |= {REMEMBERS: True} if run.remembers else {}
        options = run.options
        if wanted.files.have_changed():
            _warn_of_files(name)
            # The blocks have the states that they were made with. Nobody finds the step, nor what follows it.
            name, options = step_name(_UNKEPT, _random_digits()), options._replace(ttl=_UNKEPT_SECONDS)
        part = run.part(results, fingerprint_of_key(name.rpartition("_")[2]))
        try:
            with store_locks(store).hold(name):
                dataset_entries.put_parts(store, name, {"": part}, options, {**wanted.record, **measured})
        except NotFoundError:
            continue  # gc took a block meanwhile
        except (FullError, TooLargeError) as error:
            raise NotInBlocksError(NO_ROOM) from error
        # It reads the files: a block may be damaged.
        if (outcome := load_step(store, name, wanted.info)) is not None:
            return outcome._replace(hit=False, rows_reused=reused, seconds_saved=saved)
        run.take_kept()
    raise NotInBlocksError(
        f"gc has taken blocks of it {_ATTEMPTS} times; make room, or set a larger max_size"
    )


def _pending_outcome(
    coming: PendingPut, info: datasets.DatasetInfo | None, *, hit: bool = True
) -> StepOutcome:
    dataset = own_copy(coming.dataset)
    _describe(dataset, coming.record, info)
    reused = coming.record["rows_in"] if hit else 0
    saved = work_seconds(coming.record) if hit else 0.0
    return StepOutcome(dataset, hit, coming.record, coming.size, reused, saved, coming.file)


def without_large_file(
    store: Store, name: str, outcome: StepOutcome, info: datasets.DatasetInfo | None
) -> StepOutcome:
    """The same result, but read from the store if its uncompressed files are large: no budget counts them.

    Waits until it is stored. A result that cannot be stored keeps its files.

    Args:
        store, name, info: as for `load_step`.
        outcome: the result.
    """
    file = outcome.file
    if file is None or _bytes_beside(file) <= SMALL_FILE_BYTES or outcome.size.result() is None:
        return outcome
    if (kept := load_step(store, name, info)) is None:
        return outcome
    scratch.remove(file)
    return outcome._replace(dataset=kept.dataset, file=None)


def _bytes_beside(file: Path) -> int:
    with contextlib.suppress(FileNotFoundError):  # another thread has the result as well
        return sum(file.stat().st_size for file in file.parent.iterdir())
    return 0


@contextlib.contextmanager
def _explain_full(folder: Path) -> Iterator[None]:
    """Say what to do where the disk is full on which a step writes its uncompressed files."""
    try:
        yield
    except OSError as error:
        if not is_full(error) or not _has_no_room(folder, error):
            raise
        free = shutil.disk_usage(folder).free
        raise FullError(
            f"{no_space_in(folder, error)} ({free} bytes free): a step writes its result there, uncompressed,"
            " before it is stored; free some space, or name another folder with temp_dir"
        ) from error


def _has_no_room(folder: Path, error: OSError) -> bool:
    """Whether an error of a full disk is one of the folder's disk. An operator writes elsewhere, perhaps."""
    disk = os.statvfs(folder)
    # A disk may have a limit on the number of files; some, such as btrfs, say none.
    return (
        error.errno != errno.ENOSPC
        or disk.f_bavail * disk.f_frsize < _ROOM
        or disk.f_favail == 0 < disk.f_files
    )


def run_step(
    make: Callable[[Path], datasets.Dataset], file: Path, fingerprint: str | None
) -> datasets.Dataset:
    """Run a step; its result gets that fingerprint.

    Args:
        make: runs the step.
        file: a new path of `scratch.new_file` for the result's rows; removed if the step fails.
        fingerprint: the result's; None to leave it.

    Raises:
        FullError: the disk is full.
        Exception: an exception of ``make``.
    """
    try:
        with _explain_full(file.parent.parent):
            dataset = make(file)
    except BaseException:
        scratch.remove(file)
        raise
    # The object may be the input itself, if the step changed nothing.
    dataset = own_copy(dataset)
    if fingerprint is not None:
        dataset._fingerprint = fingerprint
    return dataset
