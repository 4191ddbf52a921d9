"""Reports of a pipeline's run: its progress, the outcome of each step, and the final dataset.

Plain values, for programs and for tables; nothing here reads or runs anything.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from datasets import Dataset


@dataclasses.dataclass(frozen=True)
class Progress:
    """The progress of a run; ``progress`` gets it when a step begins, some times a second, and when it ends.

    Attributes:
        step: number of the step, from 0.
        steps: the number of steps.
        name: the step's name.
        kind: ``"map"``, ``"stats"``, ``"filter"``, ``"deduplicate"`` or ``"select"``.
        done: rows done.
        total: rows there are to do.
        report: the outcome of the step, once it has ended.
    """

    step: int
    steps: int
    name: str
    kind: str
    done: int
    total: int
    report: StepReport | None = None


@dataclasses.dataclass(frozen=True)
class StepReport:
    """The outcome of one step.

    Attributes:
        name: the operator's name; its statistics pass has the suffix " (stats)".
        kind: ``"map"``, ``"stats"``, ``"filter"``, ``"deduplicate"`` or ``"select"``.
        hit: whether the result came from the cache, or from the checkpoint.
        rows_in, rows_out: rows before and after; None if they are not known any more, for a step whose result
            was dropped.
        seconds: time spent in this run; almost none for a hit.
        logical: bytes of the result, uncompressed; 0 if it was not kept.
        stored: bytes of the result in the store.
        key: the key of the kept result, "" if none is kept.
        rows_reused: rows before the step that did not run again: all of them for a hit, and else those of
            blocks whose results were kept.
        seconds_saved: seconds that those rows took when they ran, those of all processes added up.
    """

    name: str
    kind: str
    hit: bool
    rows_in: int | None
    rows_out: int | None
    seconds: float
    logical: int
    stored: int
    key: str
    rows_reused: int = 0
    seconds_saved: float = 0.0

    @property
    def rows_run(self) -> int | None:
        """Rows before the step that ran in this run; None if they are not known any more."""
        return None if self.rows_in is None else self.rows_in - self.rows_reused

    def to_dict(self) -> dict[str, Any]:
        """The same as a dictionary, with `rows_run`, for JSON."""
        return {**dataclasses.asdict(self), "rows_run": self.rows_run}


@dataclasses.dataclass(frozen=True)
class PipelineResult:
    """A dataset, and the reports of its steps.

    Attributes:
        dataset: the result of the last step.
        steps: one report each, in order.
    """

    dataset: Dataset
    steps: list[StepReport]

    @property
    def hits(self) -> int:
        """How many steps came from the cache."""
        return sum(step.hit for step in self.steps)
