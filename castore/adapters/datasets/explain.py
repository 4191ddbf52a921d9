"""Explains why a step of a pipeline is a hit or a miss: the changes since the most similar run.

Compares the descriptions that are kept with each step's result; reads no data and runs nothing. A pipeline
adds the number of rows that would run, for which it reads the input.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import Any

from castore.adapters.datasets import dataset_entries
from castore.adapters.datasets.step_plan import PlannedStep
from castore.adapters.datasets.step_runner import STEPS_FOLDER
from castore.adapters.datasets.tables import STATE_FILE, fingerprint_of_key
from castore.store import Store

#: The sentence for a first step over another input.
INPUT_CHANGED = "the input dataset has changed"
# Names of files in a sentence.
_NAMES = 3


@dataclasses.dataclass(frozen=True)
class FileChanges:
    """How input files differ from those of an earlier run.

    Attributes:
        new, changed, gone: paths of files that were not there, that had other content, and that are not
            there any more.
        moved: paths of files whose content was there under another path.
    """

    new: list[str]
    changed: list[str]
    gone: list[str]
    moved: list[str]

    def __str__(self) -> str:
        kinds = (
            (self.new, "is new", "are new"),
            (self.changed, "has changed", "have changed"),
            (self.gone, "is gone", "are gone"),
            (self.moved, "was moved", "were moved"),
        )
        parts = [
            f"{len(paths):,} {'file' if len(paths) == 1 else 'files'} {one if len(paths) == 1 else many} "
            f"({_shorten(paths)})"
            for paths, one, many in kinds
            if paths
        ]
        return ", ".join(parts) or "the files are in another order, or are read in another way"


def _shorten(paths: list[str]) -> str:
    shown = ", ".join(map(os.path.basename, paths[:_NAMES]))
    return shown if len(paths) <= _NAMES else f"{shown} and {len(paths) - _NAMES:,} more"


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The explanation of one step.

    Attributes:
        name, kind: as in `StepReport`.
        hit: whether a run would find the step done, in the cache or before a checkpoint.
        key: the key under which the result is, or would be, kept in the cache.
        changes: on a miss, a sentence for each difference from the nearest run that is kept, or the reason
            why none is kept.
        rows_in, rows_reused: on a miss, rows before the step, and those that would not run, since the results
            of their blocks are kept, or of parts of slow blocks whose input is there. ``rows_in`` is None
            where it is known only after the step before. Both are None where nothing is known before a run:
            the step, or one before it, runs as one piece, or nothing is kept of its operator; so they are
            for hits.
        blocks_in, blocks_reused: the same in blocks. A file that is not read yet counts as one block. Small
            blocks behind what is not there yet may run with it: that is not foretold.
        is_sure: False where these four hold only if new rows have columns of the types that the others have:
            files that are not read yet, and a first block that has changed, decide about the types of all
            rows.
        files: for the first step of a recipe, on a miss: how the files differ from those of the last run.
    """

    name: str
    kind: str
    hit: bool
    key: str
    changes: list[str]
    rows_in: int | None = None
    rows_reused: int | None = None
    blocks_in: int | None = None
    blocks_reused: int | None = None
    is_sure: bool = True
    files: FileChanges | None = None

    def __str__(self) -> str:
        if self.hit:
            return f"{self.name}: hit"
        sentences = list(self.changes)
        if self.blocks_in is not None and self.blocks_reused is not None:
            blocks = f"{self.blocks_in - self.blocks_reused:,} of {self.blocks_in:,} blocks"
            if self.rows_in is not None:
                rows = self.rows_in - (self.rows_reused or 0)
                sentences.append(f"{rows:,} of {self.rows_in:,} rows run ({blocks})")
            else:
                sentences.append(f"{blocks} run, and {self.rows_reused:,} rows do not")
            sentences[-1] += "" if self.is_sure else ", if new rows have the types of the others"
        return f"{self.name}: miss: {'; '.join(sentences)}"

    def to_dict(self) -> dict[str, Any]:
        """The same as a dictionary, for JSON."""
        return dataclasses.asdict(self)


def make_explanation(step: PlannedStep, changes: list[str]) -> Explanation:
    """The explanation of a step, which is a hit unless there are changes."""
    return Explanation(step.step.name, step.step.kind, not changes, step.key, changes)


def explain(store: Store, pipeline: str, planned: Sequence[PlannedStep]) -> list[Explanation]:
    """Explain each step: a hit, or a miss with its changes."""
    records = find_records(store, pipeline)
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


def find_records(store: Store, pipeline: str) -> list[dict[str, Any]]:
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
    what = INPUT_CHANGED if step.number == 0 else _other_chain(step, nearest, records)
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
