"""A chain of operators over a dataset; each step comes from the cache unless something before it changed.

The keys of all steps follow from the input and the operators. So a run finds the last step that is kept and
continues after it; the steps before it are not even read. `step_runner` runs one step once among all
processes; `checkpoint` keeps only the latest step; this module is the chain.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import datasets

from castore.adapters.datasets import dataset_entries, disk_space, scratch, step_runner
from castore.adapters.datasets.background import pending_puts
from castore.adapters.datasets.blame import Blame, RanStep, trace
from castore.adapters.datasets.block_entries import NotInBlocksError, RemembersError
from castore.adapters.datasets.block_runner import BlockRun, bytes_at_once, has_memory, require_no_memory
from castore.adapters.datasets.block_step import BlockCall, BlockStep, can_cut
from castore.adapters.datasets.call_watch import CallWatch, EarlyCalls
from castore.adapters.datasets.checkpoint import Checkpoint
from castore.adapters.datasets.cutting import Cut
from castore.adapters.datasets.dataset_entries import StorageOptions
from castore.adapters.datasets.dataset_fingerprint import dataset_fingerprint, files_named, format_digest
from castore.adapters.datasets.explain import Explanation, explain, find_records, make_explanation
from castore.adapters.datasets.forecast import Piece, forecast, stand_in
from castore.adapters.datasets.hash_pass import Hashed, compute_hashes, hash_step
from castore.adapters.datasets.lazy_dataset import LazyDataset
from castore.adapters.datasets.named_files import may_name_files
from castore.adapters.datasets.operator_description import describe, identify
from castore.adapters.datasets.operator_keys import RANDOM_ADVICE
from castore.adapters.datasets.operator_state import OperatorState
from castore.adapters.datasets.private_copies import own_copy
from castore.adapters.datasets.progress_meter import ProgressMeter
from castore.adapters.datasets.reports import PipelineResult, Progress, StepReport
from castore.adapters.datasets.retention import drop_intermediate
from castore.adapters.datasets.row_block import MadeRows, RowForm
from castore.adapters.datasets.step_plan import PlannedStep, counted_operator, plan_steps
from castore.adapters.datasets.steps import (
    BATCH_ROWS,
    BLOCK_KINDS,
    RunOptions,
    Step,
    drop_duplicates,
    steps_of,
)
from castore.adapters.datasets.tables import STATE_FILE, fingerprint_of_key
from castore.adapters.datasets.unread_parameters import METHOD_OF_HASHES, without_unread
from castore.errors import CacheWarning, InvalidValueError, NotFoundError, UnhashableError, warn
from castore.keys.encoder import fingerprint as fingerprint_of
from castore.objects.codecs import check_codec
from castore.store import Store
from castore.system.job_rank import as_rank, check_shard
from castore.system.worker_processes import allowed

# The field of a step's record that tells of files which rows of its input name.
_FILES = "files"
# Bytes of an input that `explain` reads where its files say too little.
_SMALL_INPUT = 32 << 20

ProgressCallback = Callable[[Progress], object]
"""The ``progress`` of `Pipeline.run`: it gets the run's `Progress`."""


class Pipeline:
    """Operators, in order (`steps` defines an operator).

    Args:
        operators: functions and objects.
        store: the store that keeps the steps; by default the default store.
        name: the pipeline's name, in records and messages.
        codec: the codec of kept steps.
        use_cache: keep every step, and use the kept ones.
        use_checkpoint: keep only the latest step, and continue there after a crash; excludes the cache.
        num_proc: processes that share the rows of a step; does not change the result.
        temp_dir: the folder of uncompressed files while steps run; by default the store's.

    Raises:
        InvalidValueError: an operator is not one, or an option makes no sense.

    >>> import tempfile
    >>> store = Store(tempfile.mkdtemp() + "/cache")
    >>> def shout(sample):
    ...     return {"text": sample["text"].upper()}
    >>> texts = datasets.Dataset.from_dict({"text": ["hello", "world"]})
    >>> [Pipeline([shout], store=store).run(texts).hits for _ in range(2)]
    [0, 1]
    """

    def __init__(
        self,
        operators: Iterable[Any],
        *,
        store: Store | None = None,
        name: str = "pipeline",
        codec: str = "zstd",
        use_cache: bool = True,
        use_checkpoint: bool = False,
        num_proc: int | None = None,
        temp_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        check_codec(codec, None)
        if isinstance(operators, str) or not hasattr(operators, "__iter__"):
            raise InvalidValueError(
                f"a pipeline takes a list of operators, not {operators!r}: Pipeline([...])"
            )
        is_number = isinstance(num_proc, int) and not isinstance(num_proc, bool)
        if num_proc is not None and not (is_number and num_proc >= 1):
            raise InvalidValueError(
                f"num_proc of a pipeline must be a whole number of at least 1, or None, not {num_proc!r}"
            )
        self.operators = list(operators)
        self.steps: list[Step] = [step for operator in self.operators for step in steps_of(operator)]
        self.store = step_runner.store_or_default(store)
        self.name = name
        self.codec = codec
        self.use_cache = use_cache and not use_checkpoint
        self.use_checkpoint = use_checkpoint
        self.num_proc = num_proc
        self.temp_dir = temp_dir

    @property
    def mode(self) -> str:
        """``"cache"``, ``"checkpoint"`` or ``"none"``."""
        return "cache" if self.use_cache else "checkpoint" if self.use_checkpoint else "none"

    def run(
        self,
        dataset: datasets.Dataset,
        *,
        shard: tuple[int, int] | None = None,
        progress: ProgressCallback | None = None,
    ) -> PipelineResult:
        """Run a dataset through all steps; every result to be kept is in the store on return.

        Args:
            dataset: the input, which is not changed.
            shard: ``(i, n)`` begins with the i-th of n parts of each step's blocks, counted from 0, where n
                nodes run at once over one remote. The result is whole on each of them: a part that no other
                node has run is run here in the end. Default: the rank that torchrun or Slurm gives, if any.
            progress: a callback that receives the run's `Progress`.

        Raises:
            InvalidValueError: the input is no `datasets.Dataset`; there is no such shard, or no remote over
                which nodes could share.
            UnhashableError: a part of an operator has no stable hash.
            Exception: an exception of an operator; the steps before that operator are kept.

        Warns:
            CacheWarning: a step was damaged, or could not be kept, or will not fit.
        """
        _check_dataset(dataset)
        if shard is not None:
            shard = check_shard(shard)
            if not (self.use_cache and self.store.is_shared):
                raise InvalidValueError(
                    "a shard is a part of the work of nodes that share a remote: give the store one with"
                    " remote= (`castore process --remote`), and use the cache"
                )
        pending_puts.warn()
        run = _Run(self, dataset, ProgressMeter(self.steps, progress))
        with run, as_rank(shard):
            if self.use_cache:
                result = run.run_cached()
            else:
                result = run.run_from_checkpoint() if self.use_checkpoint else run.run_plain()
        if result.dataset is dataset:  # no step had anything to do
            result = PipelineResult(own_copy(dataset), result.steps)
        return result

    def _plan(self, dataset: datasets.Dataset) -> list[PlannedStep]:
        """The steps with their keys over that dataset.

        Raises:
            UnhashableError: a part of an operator has no stable hash.
        """
        _check_dataset(dataset)
        return plan_steps(self.steps, dataset_fingerprint(dataset, self.store))

    def explain(self, dataset: datasets.Dataset) -> list[Explanation]:
        """For each step, whether a run would find it done; if not, the changes since the nearest run."""
        pending_puts.wait()
        planned = self._plan(dataset)
        if self.use_cache:
            return self._count_rows(dataset, planned, explain(self.store, self.name, planned))
        done, reason = 0, "nothing is kept, so every step runs"
        if self.use_checkpoint:
            checkpoint = Checkpoint(self.store, self.name, self.codec)
            done, reason = checkpoint.count_done(
                _source_fingerprint(planned), [step.identity() for step in planned]
            )
        return [make_explanation(step, [] if step.number < done else [reason]) for step in planned]

    def _count_rows(
        self, dataset: datasets.Dataset, planned: Sequence[PlannedStep], explanations: list[Explanation]
    ) -> list[Explanation]:
        """The explanations, the misses with what a run would find kept, as far as that is known."""
        number = next(
            (number for number, explanation in enumerate(explanations) if not explanation.hit), None
        )
        if number is None:
            return explanations
        pieces: Sequence[Piece] | None = None
        if number:
            before = step_runner.load_step(self.store, planned[number - 1].name)
            if before is None:
                return explanations
            dataset = before.dataset
        elif dataset.info.features is None:
            return explanations  # an input that was never read
        elif isinstance(dataset, LazyDataset) and dataset.pieces and not _is_small(dataset.pieces):
            pieces = dataset.pieces
            dataset = stand_in(dataset.info.features, pieces)
        records = find_records(self.store, self.name)
        is_sure = pieces is None or all(piece.digest is not None for piece in pieces)
        for step in planned[number:]:
            over = _Run(self, dataset, ProgressMeter(self.steps, None))
            blocks = over.in_blocks(step) or over.hashes_in_blocks(step)
            is_small = blocks is None
            blocks = blocks or over.in_blocks(step, small=True)
            if blocks is None:
                break
            run = BlockRun(self.store, blocks, StorageOptions(self.codec))
            found = forecast(run, blocks, pieces, _last_features(records, step))
            if found is None or (is_small and not found.rows_kept):  # it may run as one piece
                break
            is_sure = is_sure and not found.is_guess
            explanations[step.number] = dataclasses.replace(
                explanations[step.number],
                rows_in=found.rows_in,
                rows_reused=found.rows_kept,
                blocks_in=found.blocks,
                blocks_reused=found.kept,
                is_sure=is_sure,
            )
            if found.features is None or format_digest(dataset) or step.step.kind == "deduplicate":
                break  # the formats of results are not known beforehand
            pieces = found.pieces
            dataset = stand_in(found.features, pieces)
        return explanations

    def blame(self, dataset: datasets.Dataset, row: int) -> Blame:
        """Where a row of the result comes from: the row of the input, and what each step did to it.

        Reads results that are kept, and runs nothing.

        Args:
            dataset: the input of a run.
            row: the number of the row in the result of that run, from 0.

        Raises:
            InvalidValueError: the pipeline keeps no steps, or the result has no such row.
            NotFoundError: the result of the run is not kept.
            UnhashableError: a part of an operator has no stable hash.

        >>> import tempfile
        >>> texts = datasets.Dataset.from_dict({"text": ["one", "two", "three"]})
        >>> class Long:
        ...     def compute_stats(self, sample):
        ...         return sample
        ...     def process(self, sample):
        ...         return len(sample["text"]) > 3
        >>> pipeline = Pipeline([Long()], store=Store(tempfile.mkdtemp() + "/cache"))
        >>> pipeline.run(texts).dataset["text"][:]
        ['three']
        >>> pipeline.blame(texts, 0).rows_in
        (2, 2)
        """
        if not self.use_cache:
            raise InvalidValueError(
                "blame reads the results of steps, and this pipeline keeps none; make it with use_cache=True"
            )
        if isinstance(row, bool) or not hasattr(row, "__index__"):
            raise InvalidValueError(f"blame takes the number of a row, from 0, not {row!r}")
        pending_puts.wait()
        planned = self._plan(dataset)
        kept = [step_runner.load_step(self.store, step.name) for step in planned]
        if planned and kept[-1] is None:
            raise NotFoundError(
                f"the result of {planned[-1].step.name!r}, the last step, is not kept: the pipeline has not "
                "run over this input, or the result has expired, or gone for room; run the pipeline"
            )
        if isinstance(dataset, LazyDataset) and dataset.info.features is None:
            dataset = dataset.read()
        results = [dataset, *(None if outcome is None else outcome.dataset for outcome in kept)]
        rows = 0 if results[-1] is None else len(results[-1])
        if not 0 <= row < rows:
            there = f"rows 0 to {rows - 1:,}" if rows else "no rows"
            raise InvalidValueError(f"the result has {there}, so no row {row!r}; give one of its rows")
        passed = [
            self._passed(step, before, after)
            for step, before, after in zip(planned, results[:-1], results[1:], strict=True)
        ]
        return trace(passed, row)

    def _passed(
        self, step: PlannedStep, before: datasets.Dataset | None, after: datasets.Dataset | None
    ) -> RanStep:
        """A step that has run, from what is kept of it."""
        entry = self.store.entry(f"{step.name}/{STATE_FILE}")
        record, when = ({}, None) if entry is None else (entry.metadata, entry.created)
        cut = None
        if before is not None and after is not None:
            cut = _Run(self, before, ProgressMeter(self.steps, None)).in_blocks(step)
        blocks = None if cut is None else (BlockRun(self.store, cut, StorageOptions(self.codec)), cut)
        return RanStep(step, record, when, before, after, blocks)

    def estimate_space(self, dataset: datasets.Dataset) -> disk_space.Estimate:
        """The disk space of a run over that dataset: by Data-Juicer's formula, and by measured sizes."""
        return self._estimate(dataset, self._plan(dataset) if self.use_cache else [])

    def _estimate(
        self, dataset: datasets.Dataset, planned: Sequence[PlannedStep], ratio: float | None = None
    ) -> disk_space.Estimate:
        at_once = bytes_at_once(self.num_proc or 1) if not _is_unread(dataset) and can_cut(dataset) else None
        known = [
            _known_size(self.store, step, at_once if step.step.kind in BLOCK_KINDS else None)
            for step in planned
        ] or [disk_space.KnownSize(step.kind) for step in self.steps]
        return disk_space.estimate_space(
            disk_space.logical_size(dataset),
            known,
            ratio=disk_space.measure_ratio(dataset, self.codec) if ratio is None else ratio,
            mode=self.mode,
            store=self.store.path,
            settings=self.store.settings,
            temp_dir=self.temp_dir,
        )

    def _warn_of_space(self, dataset: datasets.Dataset, planned: Sequence[PlannedStep]) -> None:
        """Warn of data that will not fit, before anything runs."""
        if not self._estimate(dataset, planned, ratio=1.0).problems:
            return  # it fits even if nothing can be compressed: how far it can need not be measured
        for problem in self._estimate(dataset, planned).problems:
            warn(problem, CacheWarning)

    def drop_intermediate(
        self, *, older_than: float | str | None = None, budget: int | str | None = None
    ) -> list[str]:
        """Remove step results of pipelines of this name, but never the result of a run's last step.

        Args:
            older_than: seconds (or ``"7d"``) since a result was made or read; by default any age.
            budget: bytes that results of all steps may take in the store, the last ones included; the least
                recently used go first. By default none: every result that is old enough goes.

        Returns:
            The names of the removed results.
        """
        pending_puts.wait()
        return drop_intermediate(self.store, self.name, older_than=older_than, budget=budget)


def _check_dataset(dataset: Any) -> None:
    if not isinstance(dataset, datasets.Dataset):
        raise InvalidValueError(
            f"a pipeline takes a datasets.Dataset, not {type(dataset).__name__}; run it on each split; store "
            "a stream with DatasetCache.put(name, stream), and pass DatasetCache.dataset(name)"
        )


def _is_small(pieces: Sequence[Piece]) -> bool:
    """Whether all files are kept, and so small that one can read them: they may be no blocks alone."""
    is_there = all(piece.digest is not None for piece in pieces)
    return is_there and sum(piece.size for piece in pieces) <= _SMALL_INPUT


def _warn_of_doubts(store: Store, planned: Sequence[PlannedStep]) -> None:
    """Warn of the values that keep a step from ever being found again."""
    for step in planned:
        if step.description.doubts is not None:
            step.description.doubts.compare(store, step.step.name, RANDOM_ADVICE)


def _last_features(records: Sequence[dict[str, Any]], step: PlannedStep) -> str | None:
    """The features of the latest result that a step's operator has made block by block."""
    wanted = step.step.name, step.step.kind, step.description.fingerprint
    return next(
        (
            record["features"]
            for record in records
            if "features" in record and (record["step"], record["kind"], record["operator"]) == wanted
        ),
        None,
    )


def _source_fingerprint(planned: Sequence[PlannedStep]) -> str:
    return planned[0].source if planned else ""


def _is_unread(dataset: datasets.Dataset) -> bool:
    return isinstance(dataset, LazyDataset) and not dataset.is_read


def _description(dataset: datasets.Dataset) -> datasets.DatasetInfo | None:
    """The description of a dataset; None for an input that was never read."""
    return None if dataset._info.features is None else dataset._info


def _known_size(store: Store, step: PlannedStep, at_once: int | None) -> disk_space.KnownSize:
    """The sizes of a step's kept result. Runs with other parameters or other rows do not show them."""
    metadata, size = dataset_entries.facts_of(store, step.name)
    if metadata is None:
        return disk_space.KnownSize(step.step.kind, at_once=at_once)
    return disk_space.KnownSize(step.step.kind, size.logical, size.stored, True, at_once)


class _Run:
    """One run of a pipeline; removes the uncompressed files that its result does not need."""

    def __init__(self, pipeline: Pipeline, dataset: datasets.Dataset, meter: ProgressMeter) -> None:
        self._pipeline = pipeline
        self._store = pipeline.store
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
        self._options = dataset_entries.StorageOptions(
            *check_codec(pipeline.codec, None), pipeline.store.settings.ttl
        )

    def __enter__(self) -> _Run:
        return self

    def __exit__(self, *exc: object) -> None:
        # Also after a failure: pending datasets are read from files that would be removed.
        pending_puts.wait()
        if exc[0] is not None:
            self._dataset = self._input
        self._drop_unused()

    def _drop_unused(self, being_stored: Sequence[datasets.Dataset] = ()) -> None:
        used = [dataset for dataset in (self._dataset, *being_stored) if not _is_unread(dataset)]
        scratch.remove_unused(
            self._files, {file["filename"] for dataset in used for file in dataset.cache_files}
        )

    def _step_maker(self, number: int, fingerprint: str | None) -> step_runner.StepFunction:
        """A function that runs a step on the present dataset."""
        step, dataset = self._pipeline.steps[number], self._dataset

        def make(file: Path, watch: CallWatch | None, *, in_order: bool = False) -> datasets.Dataset:
            self._files.add(file)
            count = self._meter.make_counter(number, len(dataset))
            # Behind a watch it is 1, if it is given: another process could not be watched.
            num_proc = self._pipeline.num_proc if watch is None and not in_order else None
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
                    self._store, blocks, self._options, self._pipeline.temp_dir, file, fingerprint
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
        num_proc = allowed(self._pipeline.num_proc)
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
        form = None if step.sees_batches() or step.is_async() else RowForm.of(dataset)

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
            num_proc=allowed(self._pipeline.num_proc),
            on_rows=on_rows,
            title=step.name,
        )

    # With the cache

    def run_cached(self) -> PipelineResult:
        """Take every step from the cache, or run and keep it."""
        pipeline = self._pipeline
        planned = pipeline._plan(self._dataset)
        _warn_of_doubts(pipeline.store, planned)
        self._drop_outdated(planned)
        begin, outcome = self._find_latest(planned)
        again = self._must_remember(planned, begin, outcome)
        if again is not None:
            begin, outcome = self._find_latest(planned[: again.number])
        reports = self._report_hits(planned[:begin])
        if outcome is not None:
            self._dataset = outcome.dataset
        if begin < len(planned):
            pipeline._warn_of_space(self._dataset, planned)
        outcomes: list[tuple[PlannedStep, step_runner.StepOutcome]] = []
        for step in planned[begin:]:
            rows, began = len(self._dataset), time.perf_counter()
            self._meter.begin(step.number, rows)
            record = {**step.record(pipeline.name, len(planned)), "history": _history(planned, reports)}
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
        pipeline, info = self._pipeline, _description(self._dataset)
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
            temp_dir=pipeline.temp_dir,
            blocks=self.in_blocks(step, small=True),
            only_if_slow=self.in_blocks(step) is None and allowed(pipeline.num_proc) == 1,
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

    def run_from_checkpoint(self) -> PipelineResult:
        """Continue from the latest step that a run like this one has finished; keep only the latest step."""
        pipeline = self._pipeline
        planned = pipeline._plan(self._dataset)
        _warn_of_doubts(pipeline.store, planned)
        marks, source = [step.identity() for step in planned], _source_fingerprint(planned)
        checkpoint = Checkpoint(self._store, pipeline.name, pipeline.codec)
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
                pipeline._warn_of_space(self._dataset, [])
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
        if self._pipeline.steps:
            self._pipeline._warn_of_space(self._dataset, [])
        reports = []
        for number in range(len(self._pipeline.steps)):
            reports.append(self._run_step(number, None))
            self._meter.end(number, reports[-1])
        return PipelineResult(self._dataset, reports)

    def _run_step(self, number: int, fingerprint: str | None) -> StepReport:
        rows, began = len(self._dataset), time.perf_counter()
        self._meter.begin(number, rows)
        make = partial(self._step_maker(number, fingerprint), watch=None)
        file = scratch.new_file(self._store, self._pipeline.temp_dir)
        self._dataset = step_runner.run_step(make, file, fingerprint)
        self._drop_unused()
        step, seconds = self._pipeline.steps[number], time.perf_counter() - began
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
