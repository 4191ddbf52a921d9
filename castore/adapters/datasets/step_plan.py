"""A pipeline's steps with their keys, which follow from the input and the operators alone. Runs nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from castore.adapters.datasets.checkpoint import Mark
from castore.adapters.datasets.operator_description import Description, describe
from castore.adapters.datasets.stats_parameters import without_unread
from castore.adapters.datasets.step_runner import step_key, step_name
from castore.adapters.datasets.steps import Step
from castore.adapters.datasets.tables import our_fingerprint


class Planned(NamedTuple):
    """A step, and its properties that are known before it runs.

    Attributes:
        number: the step's number, from 0.
        step: the pass over the dataset.
        key: 40 hexadecimal digits.
        name: the name of the result in the store.
        source: the fingerprint of the input.
        what: the operator's fingerprint and description.
    """

    number: int
    step: Step
    key: str
    name: str
    source: str
    what: Description

    def record(self, pipeline: str, steps: int) -> dict[str, Any]:
        """The metadata of the step's result, in a pipeline of so many steps."""
        return {
            "pipeline": pipeline,
            "number": self.number,
            "steps": steps,
            "step": self.step.name,
            "kind": self.step.kind,
            "key": self.key,
            "input": self.source,
            "operator": self.what.fingerprint,
            "parts": self.what.parts,
        }

    def mark(self) -> Mark:
        """The step's identity in a checkpoint."""
        parameters = {name: text or digest for name, (digest, text) in self.what.parts.items()}
        return Mark(self.step.name, self.step.kind, self.what.fingerprint, parameters)


def plan(steps: Sequence[Step], source: str) -> list[Planned]:
    """The steps of a pipeline over the input of fingerprint ``source``.

    Raises:
        UnhashableError: a part of an operator has no stable hash.
    """
    planned, known = [], dict[int, tuple[Any, Description]]()
    for number, step in enumerate(steps):
        counts = without_unread(step.operator) if step.kind == "stats" else step.operator
        # An operator that takes two steps is hashed once, if all of it counts in both.
        if id(counts) not in known:
            known[id(counts)] = counts, describe(counts, step.name.removesuffix(" (stats)"))
        what = known[id(counts)][1]
        digits = step_key(source, step.name, step.kind, what.fingerprint)
        planned.append(Planned(number, step, digits, step_name(step.name, digits), source, what))
        source = our_fingerprint(digits)
    return planned
