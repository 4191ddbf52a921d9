"""One run of a pipeline over a dataset: with the cache, from a checkpoint, or with nothing kept.

The run finds the last step that is kept, and goes on behind it. `step_runner` runs or loads a single step,
and `block_runner` its blocks. Questions to a pipeline that run nothing are for `pipeline`.

Must never read a step's result that no later step needs.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import datasets

from castore.adapters.datasets import dataset_entries, scratch, step_runner
from castore.adapters.datasets.background import pending_puts
from castore.adapters.datasets.block_entries import NotInBlocksError, RemembersError
from castore.adapters.datasets.block_runner import has_memory, require_no_memory
from castore.adapters.datasets.block_step import BlockCall, BlockStep, can_cut
from castore.adapters.datasets.call_watch import CallWatch, EarlyCalls
from castore.adapters.datasets.checkpoint import Checkpoint
from castore.adapters.datasets.cutting import Cut
from castore.adapters.datasets.dataset_fingerprint import files_named
from castore.adapters.datasets.hash_pass import Hashed, compute_hashes, hash_step
from castore.adapters.datasets.lazy_dataset import LazyDataset
from castore.adapters.datasets.named_files import may_name_files
from castore.adapters.datasets.operator_description import describe, identify
from castore.adapters.datasets.operator_keys import RANDOM_ADVICE
from castore.adapters.datasets.operator_state import OperatorState
from castore.adapters.datasets.progress_meter import ProgressMeter
from castore.adapters.datasets.reports import PipelineResult, StepReport
from castore.adapters.datasets.row_block import MadeRows, RowForm
from castore.adapters.datasets.step_plan import PlannedStep, counted_operator
from castore.adapters.datasets.steps import BATCH_ROWS, BLOCK_KINDS, RunOptions, Step, drop_duplicates
from castore.adapters.datasets.tables import fingerprint_of_key
from castore.adapters.datasets.unread_parameters import METHOD_OF_HASHES, without_unread
from castore.errors import CacheWarning, UnhashableError, warn
from castore.keys.encoder import fingerprint as fingerprint_of
from castore.objects.codecs import check_codec
from castore.store import Store
from castore.system.worker_processes import allowed

# The field of a step's record that tells of files which rows of its input name.
_FILES = "files"


class PipelineRun:
    """A run, as a context: at its end it removes the uncompressed files that its result does not need.

    Args:
        dataset: the input.
        meter: reports progress.
        steps, store, name, codec, num_proc, temp_dir: of the pipeline.
        warn_of_space: warns of data that will not fit, given the dataset and the steps whose results are
            kept, before anything runs.
    """

    def __init__(
        self,
        dataset: datasets.Dataset,
        meter: ProgressMeter,
        *,
        steps: Sequence[Step],
        store: Store,
        name: str,
        codec: str,
        num_proc: int | None,
        temp_dir: str | os.PathLike[str] | None,
        warn_of_space: Callable[[datasets.Dataset, Sequence[PlannedStep]], object],
    ) -> None:
        self._steps = steps
        self._store = store
        self._name = name
        self._codec = codec
        self._num_proc = num_proc
        self._temp_dir = temp_dir
        self._warn_of_space = warn_of_space
        self._input = dataset
        self._dataset = dataset
        self._meter = meter
        self._files: set[Path] = set()
        self._input_files = step_runner.InputFiles(dataset)
        #: The state of the files that the input's rows name; None while nobody needs it.
        self._named: set[tuple[Any, ...]] | None = None
        #: The hashes of the deduplicator that ran last, if they came block by block.
        self._hashed: Hashed | None = None
        #: Whether an operator has remembered rows in this run: it may be one of a later step, too.
        self._has_memory = False
        self._options = dataset_entries.StorageOptions(*check_codec(codec, None), store.settings.ttl)

    def __enter__(self) -> PipelineRun:
        return self

    def __exit__(self, *exc: object) -> None:
        # Also after a failure: pending datasets are read from files that would be removed.
        pending_puts.wait()
        if exc[0] is not None:
            self._dataset = self._input
        self._drop_unused()

    def _drop_unused(self, being_stored: Sequence[datasets.Dataset] = ()) -> None:
        used = [dataset for dataset in (self._dataset, *being_stored) if not is_unread(dataset)]
        scratch.remove_unused(
            self._files, {file["filename"] for dataset in used for file in dataset.cache_files}
        )

    def _step_maker(self, number: int, fingerprint: str | None) -> step_runner.StepFunction:
        """A function that runs a step on the present dataset."""
        step, dataset = self._steps[number], self._dataset

        def make(file: Path, watch: CallWatch | None, *, in_order: bool = False) -> datasets.Dataset:
            self._files.add(file)
            count = self._meter.make_counter(number, len(dataset))
            # Behind a watch it is 1, if it is given: another process could not be watched.
            num_proc = self._num_proc if watch is None and not in_order else None
            if num_proc == 1:  # `datasets` would start one process, and the operator's state would stay there
                num_proc = None
            return step.run(dataset, RunOptions(num_proc, str(file), count, fingerprint, watch=watch))

        return make

    def _deduplicator(self, planned: PlannedStep, fingerprint: str) -> step_runner.StepFunction:
        """As `_step_maker`, for a deduplicator: hashes of blocks that are kept are not computed again."""
        in_one_pass, dataset = self._step_maker(planned.number, fingerprint), self._dataset
        self._hashed = None

        def make(file: Path, watch: CallWatch | None, *, in_order: bool = False) -> datasets.Dataset:
            blocks = self.hashes_in_blocks(planned)
            if blocks is None:
                return in_one_pass(file, watch, in_order=in_order)
            if has_memory(self._store, blocks):
                return in_one_pass(file, watch, in_order=True)
            self._files.add(file)
            try:
                self._hashed = compute_hashes(
                    self._store, blocks, self._options, self._temp_dir, file, fingerprint
                )
            except NotInBlocksError as error:
                require_no_memory(blocks, str(error))
                warn(
                    f"the deduplicator {planned.step.name!r} hashed all rows in one pass, and does so again "
                    f"after a change of its input: {error}",
                    CacheWarning,
                )
                return in_one_pass(file, watch, in_order=in_order or isinstance(error, RemembersError))
            return drop_duplicates(planned.step.operator, self._hashed.dataset, dataset.column_names)

        return make

    def hashes_in_blocks(self, planned: PlannedStep) -> BlockStep | None:
        """The hashes of a deduplicator over the present dataset, block by block; None if that cannot be."""
        step, dataset = planned.step, self._dataset
        num_proc = allowed(self._num_proc)
        if step.kind != "deduplicate" or not can_cut(dataset, small=self._store.is_shared or num_proc > 1):
            return None
        counted = without_unread(step.operator, METHOD_OF_HASHES)
        description = planned.description if counted is step.operator else describe(counted, step.name)
        return hash_step(
            step,
            dataset,
            description.fingerprint,
            num_proc=num_proc,
            on_rows=self._meter.make_counter(planned.number, len(dataset)),
            title=step.name,
        )

    def in_blocks(self, planned: PlannedStep, *, small: bool = False) -> BlockStep | None:
        """A step on the present dataset, as one that runs block by block; None if it cannot.

        With ``small`` also one whose input is too small for that, unless it turns out to be slow.
        """
        step, dataset = planned.step, self._dataset
        if step.kind not in BLOCK_KINDS or not can_cut(dataset, small=small or self._store.is_shared):
            return None
        on_rows = self._meter.make_counter(planned.number, len(dataset))
        operator = planned.description.fingerprint
        if self._has_memory:  # results depend on what is remembered now
            try:
                operator = identify(counted_operator(step), step.name).fingerprint
            except UnhashableError:
                return None

        is_filter = step.kind == "filter"  # whose result has the features of its input
        form = None if step.is_async() else RowForm.of(dataset)

        def run(call: BlockCall) -> datasets.Dataset | MadeRows:
            # The rows are counted block by block: an operator may run in another process. A filter gives the
            # numbers of rows, which are few enough for memory.
            file = None if is_filter else str(call.file)
            options = RunOptions(
                file=file, watch=call.watch, fingerprint=call.fingerprint, features=call.features
            )
            alone = None if form is None else form.block(call.table, call.file)
            return step.run(call.rows, options) if alone is None else step.run_rows(alone, options)

        return BlockStep(
            dataset,
            run,
            {"kind": step.kind, "operator": operator},
            Cut(BATCH_ROWS if step.sees_batches() else None, 0 if is_filter else BATCH_ROWS),
            OperatorState(step.hashed, step.name),
            EarlyCalls(),
            has_features=is_filter,
            keeps_count=not is_filter and not step.sees_batches(),
            at_once=step.rows_at_once(),
            is_async=step.is_async(),
            num_proc=allowed(self._num_proc),
            on_rows=on_rows,
            title=step.name,
        )

    # With the cache

    def run_cached(self, planned: list[PlannedStep]) -> PipelineResult:
        """Take every step from the cache, or run and keep it."""
        _warn_of_doubts(self._store, planned)
        self._drop_outdated(planned)
        begin, outcome = self._find_latest(planned)
        again = self._must_remember(planned, begin, outcome)
        if again is not None:
            begin, outcome = self._find_latest(planned[: again.number])
        reports = self._report_hits(planned[:begin])
        if outcome is not None:
            self._dataset = outcome.dataset
        if begin < len(planned):
            self._warn_of_space(self._dataset, planned)
        outcomes: list[tuple[PlannedStep, step_runner.StepOutcome]] = []
        for step in planned[begin:]:
            rows, began = len(self._dataset), time.perf_counter()
            self._meter.begin(step.number, rows)
            record = {**step.record(self._name, len(planned)), "history": _history(planned, reports)}
            record |= {} if outcome is None else step_runner.own_description(outcome.record)
            if step.number and (files := self._digest_new_files(self._dataset)):
                record[_FILES] = files
            outcome = self._run_or_load(planned, step, record, fresh=step is again)
            self._dataset = outcome.dataset
            seconds = time.perf_counter() - began
            outcomes.append((step, outcome))
            self._drop_unused([earlier.dataset for _, earlier in outcomes if not earlier.size.done()])
            saved = outcome.rows_reused, outcome.seconds_saved
            reports.append(_report(step, outcome.hit, rows, len(self._dataset), seconds, None, *saved))
            self._meter.end(step.number, reports[-1])
        # The size is known once the result is stored.
        for step, outcome in outcomes:
            size = outcome.size.result()
            if size is not None:
                reports[step.number] = dataclasses.replace(
                    reports[step.number], logical=size.logical, stored=size.stored, key=step.key
                )
        return PipelineResult(self._dataset, reports)

    def _run_or_load(
        self, planned: list[PlannedStep], step: PlannedStep, record: dict[str, Any], *, fresh: bool
    ) -> step_runner.StepOutcome:
        """The result of a step on the present dataset, which another process may have made meanwhile.

        Args:
            planned: all steps.
            step: the one of these that comes next.
            record: is kept with its result.
            fresh: run it also if it is kept.
        """
        info = _description(self._dataset)
        fingerprint, is_deduplicator = fingerprint_of_key(step.key), step.step.kind == "deduplicate"
        run = partial(
            step_runner.run_or_load,
            self._store,
            step.name,
            self._deduplicator(step, fingerprint)
            if is_deduplicator
            else self._step_maker(step.number, fingerprint),
            record,
            self._options,
            rows_in=len(self._dataset),
            temp_dir=self._temp_dir,
            blocks=self.in_blocks(step, small=True),
            only_if_slow=self.in_blocks(step) is None and allowed(self._num_proc) == 1,
            info=info,
            files=self._input_files,
        )
        outcome = run(fresh=fresh)
        if outcome.hit and self._must_remember(planned, step.number + 1, outcome) is not None:
            outcome = run(fresh=True)  # another process has run it
        self._has_memory |= bool(outcome.record.get(step_runner.REMEMBERS)) and not outcome.hit
        if step is planned[-1]:
            outcome = step_runner.without_large_file(self._store, step.name, outcome, info)
        if is_deduplicator and not outcome.hit and self._hashed is not None:
            outcome = outcome._replace(
                rows_reused=self._hashed.rows_reused, seconds_saved=self._hashed.seconds_saved
            )
        return outcome

    @staticmethod
    def _must_remember(
        planned: Sequence[PlannedStep], begin: int, outcome: step_runner.StepOutcome | None
    ) -> PlannedStep | None:
        """The latest step that is kept, if the next one needs what its operator remembers of the rows: the
        statistics of a filter.
        """
        if outcome is None or begin == len(planned) or not outcome.record.get(step_runner.REMEMBERS):
            return None
        is_one = planned[begin].step.operator is planned[begin - 1].step.operator
        return planned[begin - 1] if is_one else None

    def _digest_new_files(self, dataset: datasets.Dataset) -> str:
        """Digits for the state of the files that rows name, but for those that the input names, which are in
        all keys; empty if there are none.
        """
        if not may_name_files(dataset.features):
            return ""
        if self._named is None:
            self._named = {tuple(state) for state in files_named(self._input)}
        new = [state for state in files_named(dataset) if tuple(state) not in self._named]
        return fingerprint_of(new) if new else ""

    def _drop_outdated(self, planned: Sequence[PlannedStep]) -> None:
        """Drop results of steps whose input names files that have changed since, and of those behind them.

        The keys do not tell: such a file is known only once the step that names it has run.
        """
        for before, step in pairwise(planned):
            if (told := self._record(step).get(_FILES)) is None:
                continue
            kept = step_runner.load_step(self._store, before.name, _description(self._dataset))
            if kept is None or self._digest_new_files(kept.dataset) != told:
                for outdated in planned[step.number :]:
                    dataset_entries.drop(self._store, outdated.name)
                return

    def _find_latest(self, planned: list[PlannedStep]) -> tuple[int, step_runner.StepOutcome | None]:
        """How many steps need not run, and the result of the last of them."""
        for step in reversed(planned):
            outcome = step_runner.load_step(self._store, step.name, _description(self._dataset))
            if outcome is not None:
                return step.number + 1, outcome
        return 0, None

    def _report_hits(self, planned: list[PlannedStep]) -> list[StepReport]:
        """Reports of steps that need not run; the last step's history has those of dropped results."""
        if not planned:
            return []
        facts = [self._facts(step) for step in planned]
        history = {item["key"]: item for item in facts[-1][0].get("history", [])}
        reports = []
        for step, (own, size) in zip(planned, facts, strict=True):
            record = own or history.get(step.key, {})
            rows = record.get("rows_in"), record.get("rows_out")
            saved = rows[0] or 0, step_runner.work_seconds(record)
            reports.append(_report(step, True, *rows, 0.0, size, *saved))
            self._meter.end(step.number, reports[-1])
        return reports

    def _record(self, step: PlannedStep) -> dict[str, Any]:
        coming = pending_puts.find(self._store.path, step.name)
        return coming.record if coming else dataset_entries.metadata_of(self._store, step.name) or {}

    def _facts(self, step: PlannedStep) -> tuple[dict[str, Any], dataset_entries.DatasetSize]:
        """The record of a step, empty if there is none, and the size of what is kept of it."""
        coming = pending_puts.find(self._store.path, step.name)
        metadata, size = dataset_entries.facts_of(self._store, step.name)
        return (coming.record if coming else metadata or {}), size

    # With a checkpoint, and with nothing

    def run_from_checkpoint(self, planned: list[PlannedStep]) -> PipelineResult:
        """Continue from the latest step that a run like this one has finished; keep only the latest step."""
        _warn_of_doubts(self._store, planned)
        marks, source = [step.identity() for step in planned], source_of(planned)
        checkpoint = Checkpoint(self._store, self._name, self._codec)
        with checkpoint.hold():
            found = checkpoint.find(source, marks)
            if found.reason:
                warn(found.reason, CacheWarning)
            reports = [
                _report(step, True, *rows, 0.0, None, rows_reused=rows[0])
                for step, rows in zip(planned, pairwise(found.rows), strict=False)
            ]
            for number, report in enumerate(reports):
                self._meter.end(number, report)
            if found.dataset is not None:
                self._dataset = found.dataset
            elif isinstance(self._dataset, LazyDataset):
                self._dataset = self._dataset.read()
            rows = list(found.rows) or [len(self._dataset)]
            if found.steps_done < len(planned):
                self._warn_of_space(self._dataset, [])
                if found.packed:  # the next step would read a copy then: that copy becomes the checkpoint
                    checkpoint.save(self._dataset, source, marks[: found.steps_done], rows)
            for step in planned[found.steps_done :]:
                state = OperatorState(step.step.hashed, step.step.name)
                if step.step.kind == "stats":
                    state.begin()
                report = self._run_step(step.number, fingerprint_of_key(step.key))
                rows.append(len(self._dataset))
                last = step.number + 1 == len(planned)
                size = None
                # A checkpoint has nothing of what statistics leave in the operator for its filter.
                if not state.has_changed(now=True):
                    size = checkpoint.save(self._dataset, source, marks[: step.number + 1], rows, pack=last)
                reports.append(_report(step, False, report.rows_in, report.rows_out, report.seconds, size))
                self._meter.end(step.number, reports[-1])
            return PipelineResult(self._dataset, reports)

    def run_plain(self) -> PipelineResult:
        """Run all steps and keep nothing."""
        if self._steps:
            self._warn_of_space(self._dataset, [])
        reports = []
        for number in range(len(self._steps)):
            reports.append(self._run_step(number, None))
            self._meter.end(number, reports[-1])
        return PipelineResult(self._dataset, reports)

    def _run_step(self, number: int, fingerprint: str | None) -> StepReport:
        rows, began = len(self._dataset), time.perf_counter()
        self._meter.begin(number, rows)
        make = partial(self._step_maker(number, fingerprint), watch=None)
        file = scratch.new_file(self._store, self._temp_dir)
        self._dataset = step_runner.run_step(make, file, fingerprint)
        self._drop_unused()
        step, seconds = self._steps[number], time.perf_counter() - began
        return StepReport(step.name, step.kind, False, rows, len(self._dataset), seconds, 0, 0, "")


def _history(planned: Sequence[PlannedStep], reports: Sequence[StepReport]) -> list[dict[str, Any]]:
    """The record that a step keeps of earlier steps, whose results may be dropped."""
    return [
        {
            "key": step.key,
            "rows_in": report.rows_in,
            "rows_out": report.rows_out,
            "seconds": round(report.seconds_saved + (0.0 if report.hit else report.seconds), 6),
        }
        for step, report in zip(planned, reports, strict=False)
    ]


def _report(
    step: PlannedStep,
    hit: bool,
    rows_in: int | None,
    rows_out: int | None,
    seconds: float,
    size: dataset_entries.DatasetSize | None,
    rows_reused: int = 0,
    seconds_saved: float = 0.0,
) -> StepReport:
    logical, stored = size or (0, 0)
    key = step.key if size is not None else ""
    name, kind = step.step.name, step.step.kind
    saved = rows_reused, seconds_saved
    return StepReport(name, kind, hit, rows_in, rows_out, seconds, logical, stored, key, *saved)


def _warn_of_doubts(store: Store, planned: Sequence[PlannedStep]) -> None:
    """Warn of the values that keep a step from ever being found again."""
    for step in planned:
        if step.description.doubts is not None:
            step.description.doubts.compare(store, step.step.name, RANDOM_ADVICE)


def is_unread(dataset: datasets.Dataset) -> bool:
    """Whether an input lies in files of which nothing was read yet."""
    return isinstance(dataset, LazyDataset) and not dataset.is_read


def source_of(planned: Sequence[PlannedStep]) -> str:
    """The fingerprint of the input of steps; empty if there are none."""
    return planned[0].source if planned else ""


def _description(dataset: datasets.Dataset) -> datasets.DatasetInfo | None:
    """The description of a dataset; None for an input that was never read."""
    return None if dataset._info.features is None else dataset._info
