"""A chain of operators over a dataset; each step comes from the cache unless something before it changed.

The keys of all steps follow from the input and the operators. So a run finds the last step that is kept and
continues after it; the steps before it are not even read. `step_runner` runs one step once among all
processes; `checkpoint` keeps only the latest step; this module is the chain.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import datasets

from castore.adapters.datasets import dataset_entries, disk_space, step_runner
from castore.adapters.datasets.background import pending_puts
from castore.adapters.datasets.blame import Blame, RanStep, trace
from castore.adapters.datasets.block_runner import BlockRun, bytes_at_once
from castore.adapters.datasets.block_step import can_cut
from castore.adapters.datasets.checkpoint import Checkpoint
from castore.adapters.datasets.dataset_entries import StorageOptions
from castore.adapters.datasets.dataset_fingerprint import dataset_fingerprint, format_digest
from castore.adapters.datasets.explain import Explanation, explain, find_records, make_explanation
from castore.adapters.datasets.forecast import Piece, forecast, stand_in
from castore.adapters.datasets.lazy_dataset import LazyDataset
from castore.adapters.datasets.pipeline_run import PipelineRun, is_unread, source_of
from castore.adapters.datasets.private_copies import own_copy
from castore.adapters.datasets.progress_meter import ProgressMeter
from castore.adapters.datasets.reports import PipelineResult, Progress
from castore.adapters.datasets.retention import drop_intermediate
from castore.adapters.datasets.step_plan import PlannedStep, plan_steps
from castore.adapters.datasets.steps import BLOCK_KINDS, Step, steps_of
from castore.adapters.datasets.tables import STATE_FILE
from castore.errors import CacheWarning, InvalidValueError, NotFoundError, warn
from castore.objects.codecs import check_codec
from castore.store import Store
from castore.system.job_rank import as_rank, check_shard

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
        run = self._over(dataset, progress)
        with run, as_rank(shard):
            if self.use_cache:
                result = run.run_cached(self._plan(dataset))
            elif self.use_checkpoint:
                result = run.run_from_checkpoint(self._plan(dataset))
            else:
                result = run.run_plain()
        if result.dataset is dataset:  # no step had anything to do
            result = PipelineResult(own_copy(dataset), result.steps)
        return result

    def _over(self, dataset: datasets.Dataset, progress: ProgressCallback | None = None) -> PipelineRun:
        """A run over that dataset."""
        return PipelineRun(
            dataset,
            ProgressMeter(self.steps, progress),
            steps=self.steps,
            store=self.store,
            name=self.name,
            codec=self.codec,
            num_proc=self.num_proc,
            temp_dir=self.temp_dir,
            warn_of_space=self._warn_of_space,
        )

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
            done, reason = checkpoint.count_done(source_of(planned), [step.identity() for step in planned])
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
            over = self._over(dataset)
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
            cut = self._over(before).in_blocks(step)
        blocks = None if cut is None else (BlockRun(self.store, cut, StorageOptions(self.codec)), cut)
        return RanStep(step, record, when, before, after, blocks)

    def estimate_space(self, dataset: datasets.Dataset) -> disk_space.Estimate:
        """The disk space of a run over that dataset: by Data-Juicer's formula, and by measured sizes."""
        return self._estimate(dataset, self._plan(dataset) if self.use_cache else [])

    def _estimate(
        self, dataset: datasets.Dataset, planned: Sequence[PlannedStep], ratio: float | None = None
    ) -> disk_space.Estimate:
        at_once = bytes_at_once(self.num_proc or 1) if not is_unread(dataset) and can_cut(dataset) else None
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


def _known_size(store: Store, step: PlannedStep, at_once: int | None) -> disk_space.KnownSize:
    """The sizes of a step's kept result. Runs with other parameters or other rows do not show them."""
    metadata, size = dataset_entries.facts_of(store, step.name)
    if metadata is None:
        return disk_space.KnownSize(step.step.kind, at_once=at_once)
    return disk_space.KnownSize(step.step.kind, size.logical, size.stored, True, at_once)
