"""A pipeline that keeps the results of operators in this process, in front of the store or in place of it.

Results are mapped files, or tables that are in memory anyway: keeping a result costs its pages. A kept result
shares its rows with the datasets that callers get, and nothing that a caller can change (`private_copies`).
"""

from __future__ import annotations

import dataclasses
import threading
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

import datasets

from castore.adapters.datasets.dataset_fingerprint import dataset_fingerprint
from castore.adapters.datasets.descriptions import description_text
from castore.adapters.datasets.operator_keys import operator_fingerprint
from castore.adapters.datasets.pipeline import Pipeline, ProgressCallback
from castore.adapters.datasets.private_copies import own_copy, private_copy
from castore.adapters.datasets.progress_meter import ProgressMeter
from castore.adapters.datasets.reports import PipelineResult, Progress, StepReport
from castore.adapters.datasets.step_runner import step_key
from castore.system.forks import reset_after_fork


class RamResults:
    """Results of operators by key, evicted least recently used first; threads and pipelines may share them.

    Args:
        max_results: the number of results to keep.
    """

    def __init__(self, max_results: int) -> None:
        self._max_results = max_results
        self._kept: OrderedDict[str, PipelineResult] = OrderedDict()
        self._after_fork()
        reset_after_fork(self)

    def _after_fork(self) -> None:
        self._guard = threading.Lock()

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, key: str) -> PipelineResult | None:
        """The dataset kept under a key, as an object that the caller may change."""
        with self._guard:
            found = self._kept.get(key)
            if found is None:
                return None
            self._kept.move_to_end(key)
        return PipelineResult(own_copy(found.dataset), list(found.steps))

    def keep(self, key: str, result: PipelineResult) -> None:
        """Keep a snapshot of a result."""
        snapshot = PipelineResult(private_copy(result.dataset), list(result.steps))
        with self._guard:
            self._kept[key] = snapshot
            self._kept.move_to_end(key)
            while len(self._kept) > self._max_results:
                self._kept.popitem(last=False)


class RamPipeline(Pipeline):
    """A `Pipeline` that searches results in RAM first.

    Args:
        operators, **options: as for `Pipeline`.
        results: the results to search, and to add to.
    """

    def __init__(self, operators: Iterable[Any], *, results: RamResults, **options: Any) -> None:
        super().__init__(operators, **options)
        self._results = results

    def run(
        self,
        dataset: datasets.Dataset,
        *,
        shard: tuple[int, int] | None = None,
        progress: ProgressCallback | None = None,
    ) -> PipelineResult:
        """As `Pipeline.run`, one operator at a time."""
        fingerprint = dataset_fingerprint(dataset, self.store)
        reports: list[StepReport] = []
        meter = ProgressMeter(self.steps, progress)
        for operator in self.operators:
            one = self._single(operator)
            codes = [operator_fingerprint(step.hashed, step.name) for step in one.steps]
            counted = [*codes, description_text(dataset.info)]
            fingerprint = step_key(fingerprint, one.steps[0].name, "operator", codes[0], counted)
            found = self._results.find(fingerprint)
            if found is None:
                offset_progress = self._offset_progress(progress, len(reports))
                found = one.run(dataset, shard=shard, progress=offset_progress)
                self._results.keep(fingerprint, found)
            else:
                found = _mark_as_hits(found)
                for number, report in enumerate(found.steps, start=len(reports)):
                    meter.end(number, report)
            reports += found.steps
            dataset = found.dataset
        return PipelineResult(dataset, reports)

    def _single(self, operator: Any) -> Pipeline:
        return Pipeline(
            [operator],
            store=self.store,
            name=self.name,
            codec=self.codec,
            use_cache=self.use_cache,
            num_proc=self.num_proc,
            temp_dir=self.temp_dir,
        )

    def _offset_progress(self, progress: ProgressCallback | None, before: int) -> ProgressCallback | None:
        """``progress`` for the steps of one operator, which receive their numbers among all steps."""
        if progress is None:
            return None

        def report(state: Progress) -> None:
            progress(dataclasses.replace(state, step=state.step + before, steps=len(self.steps)))

        return report


def _mark_as_hits(result: PipelineResult) -> PipelineResult:
    return PipelineResult(
        result.dataset, [dataclasses.replace(step, hit=True, seconds=0.0) for step in result.steps]
    )
