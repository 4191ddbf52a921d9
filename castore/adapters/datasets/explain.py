"""Explains why a step of a pipeline is a hit or a miss: the changes since the most similar run.

Compares the descriptions that are kept with each step's result; reads no data and runs nothing. A pipeline
adds the number of rows that would run, for which it reads the input.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from castore.adapters.datasets import dataset_entries
from castore.adapters.datasets.step_plan import PlannedStep
from castore.adapters.datasets.step_runner import STEPS_FOLDER
from castore.adapters.datasets.tables import STATE_FILE, fingerprint_of_key
from castore.store import Store


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The explanation of one step.

    Attributes:
        name, kind: as in `StepReport`.
        hit: whether a run would find the step done, in the cache or before a checkpoint.
        key: the key under which the result is, or would be, kept in the cache.
        changes: on a miss, a sentence for each difference from the nearest run that is kept, or the reason
            why none is kept.
        rows_in, rows_reused: for the first step that would run: its rows, and those whose blocks are kept;
            None for other steps, where a step runs as one piece, and where its first block has changed, which
            decides about all others.
    """

    name: str
    kind: str
    hit: bool
    key: str
    changes: list[str]
    rows_in: int | None = None
    rows_reused: int | None = None

    def __str__(self) -> str:
        if self.hit:
            return f"{self.name}: hit"
        sentences = list(self.changes)
        if self.rows_in is not None and self.rows_reused is not None:
            sentences.append(f"{self.rows_in - self.rows_reused:,} of {self.rows_in:,} rows run")
        return f"{self.name}: miss: {'; '.join(sentences)}"

    def to_dict(self) -> dict[str, Any]:
        """The same as a dictionary, for JSON."""
        return dataclasses.asdict(self)


def make_explanation(step: PlannedStep, changes: list[str]) -> Explanation:
    """The explanation of a step, which is a hit unless there are changes."""
    return Explanation(step.step.name, step.step.kind, not changes, step.key, changes)


def explain(store: Store, pipeline: str, planned: Sequence[PlannedStep]) -> list[Explanation]:
    """Explain each step: a hit, or a miss with its changes."""
    records = _records(store, pipeline)
    there = [dataset_entries.metadata_of(store, step.name) is not None for step in planned]
    # A step whose result was dropped is not run again as long as a later step's result is kept.
    needed = max((number for number, is_there in enumerate(there) if is_there), default=-1)
    explanations: list[Explanation] = []
    for step, is_there in zip(planned, there, strict=True):
        hit = is_there or step.number < needed
        before = [earlier.name for earlier in explanations if not earlier.hit]
        changes = [] if hit else _changes(step, records, before)
        explanations.append(make_explanation(step, changes))
    return explanations


def _records(store: Store, pipeline: str) -> list[dict[str, Any]]:
    """The records of that pipeline's steps, and of steps outside any pipeline, the latest first."""
    entries = [entry for entry in store.entries(STEPS_FOLDER) if entry.name.endswith(f"/{STATE_FILE}")]
    entries.sort(key=lambda entry: entry.created, reverse=True)
    found = [entry.metadata for entry in entries if "parts" in entry.metadata]
    return sorted(found, key=lambda record: record.get("pipeline") != pipeline)


def _changes(step: PlannedStep, records: list[dict[str, Any]], missed: list[str]) -> list[str]:
    same = [r for r in records if r["step"] == step.step.name and r["kind"] == step.step.kind]
    if not same:
        return ["the store has no result of this operator"]
    same_input = [record for record in same if record["input"] == step.source]
    if same_input:
        return _differences(same_input[0]["parts"], step.description.parts)
    same_operator = [record for record in same if record["operator"] == step.description.fingerprint]
    changes = [] if same_operator else _differences(same[0]["parts"], step.description.parts)
    if missed:
        return [*changes, f"its input changes, since {missed[-1]!r} runs again"]
    nearest = (same_operator or same)[0]
    what = "the input dataset has changed" if step.number == 0 else _other_chain(step, nearest, records)
    return [*changes, what]


def _other_chain(step: PlannedStep, nearest: dict[str, Any], records: list[dict[str, Any]]) -> str:
    makers = [record for record in records if fingerprint_of_key(record["key"]) == nearest["input"]]
    behind = f"after {makers[0]['step']!r}" if makers else "on another input"
    return f"it ran {behind} before, and follows another step now"


def _differences(old: dict[str, list[str]], new: dict[str, list[str]]) -> list[str]:
    """A sentence for each difference between two descriptions."""
    changes = []
    for what in sorted({*old, *new}):
        before, now = old.get(what), new.get(what)
        if before == now:
            continue
        if before is None or now is None:
            changes.append(f"{what} {'is new' if before is None else 'is gone'}")
        elif before[1] != now[1]:
            changes.append(f"{what} was {before[1]} and is now {now[1]}")
        else:
            changes.append(f"{what} has changed")
    return changes or ["something outside its description has changed, such as the version of castore"]
