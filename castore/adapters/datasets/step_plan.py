"""A pipeline's steps with their keys, which follow from the input and the operators alone. Runs nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from castore.adapters.datasets.checkpoint import StepIdentity
from castore.adapters.datasets.operator_description import Description, describe
from castore.adapters.datasets.step_runner import step_key, step_name
from castore.adapters.datasets.steps import Step
from castore.adapters.datasets.tables import fingerprint_of_key
from castore.adapters.datasets.unread_parameters import METHOD_OF_STATS, without_unread


class PlannedStep(NamedTuple):
    """A step, and its properties that are known before it runs.

    Attributes:
        number: the step's number, from 0.
        step: the pass over the dataset.
        key: 40 hexadecimal digits.
        name: the name of the result in the store.
        source: the fingerprint of the input.
        description: the operator's fingerprint and description.
    """

    number: int
    step: Step
    key: str
    name: str
    source: str
    description: Description

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
            "operator": self.description.fingerprint,
            "parts": self.description.parts,
        }

    def identity(self) -> StepIdentity:
        """The step's identity in a checkpoint."""
        parameters = {name: text or digest for name, (digest, text) in self.description.parts.items()}
        return StepIdentity(self.step.name, self.step.kind, self.description.fingerprint, parameters)


def counted_operator(step: Step) -> Any:
    """The operator of a step, less the parameters that a pass over statistics does not read."""
    return without_unread(step.operator, METHOD_OF_STATS) if step.kind == "stats" else step.operator


def plan_steps(steps: Sequence[Step], source: str) -> list[PlannedStep]:
    """The steps of a pipeline over the input of fingerprint ``source``.

    Raises:
        UnhashableError: a part of an operator has no stable hash.
    """
    planned, known = [], dict[int, tuple[Any, Description]]()
    for number, step in enumerate(steps):
        counted = counted_operator(step)
        # An operator that takes two steps is hashed once, if all of it counts in both.
        if id(counted) not in known:
            known[id(counted)] = counted, describe(counted, step.name.removesuffix(" (stats)"))
        description = known[id(counted)][1]
        key = step_key(source, step.name, step.kind, description.fingerprint)
        planned.append(PlannedStep(number, step, key, step_name(step.name, key), source, description))
        source = fingerprint_of_key(key)
    return planned
