"""Reports of a pipeline's run: how far it is, how each step ended, and the dataset at its end.

Plain values, for programs and for tables; nothing here reads or runs anything.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from datasets import Dataset


class CacheWarning(UserWarning):
    """Something was computed again, or was not kept, that could have been expected to be in the cache."""


@dataclasses.dataclass(frozen=True)
class Progress:
    """How far a run is; given to ``progress`` when a step begins, some times a second, and when it ends.

    Attributes:
        step: number of the step, from 0.
        steps: how many there are.
        name: of the step.
        kind: ``"map"``, ``"stats"``, ``"filter"``, ``"deduplicate"`` or ``"select"``.
        done: rows done.
        total: rows there are to do.
        report: what became of the step, once it has ended.
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
    """How one step ended.

    Attributes:
        name: of the operator; its statistics pass has " (stats)" behind it.
        kind: ``"map"``, ``"stats"``, ``"filter"``, ``"deduplicate"`` or ``"select"``.
        hit: whether the result came from the cache, or from the checkpoint.
        rows_in, rows_out: before and after; None if that is not known any more: of a step whose result was
            dropped.
        seconds: spent in this run; of a hit, almost none.
        logical: bytes of the result, uncompressed; 0 if it was not kept.
        stored: bytes it takes in the store.
        key: under which it is kept, "" if it is not.
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

    def to_dict(self) -> dict[str, Any]:
        """The same as a dictionary, for JSON."""
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True)
class PipelineResult:
    """A dataset, and how it came about.

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
