"""Removes results of a pipeline's steps: those unused for long, or the least recently used over a budget.

Must never: remove the result of a run's last step.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

from castore.adapters.datasets import dataset_entries
from castore.adapters.datasets.block_entries import BLOCKS_FOLDER
from castore.adapters.datasets.step_runner import STEPS_FOLDER
from castore.adapters.datasets.tables import STATE_FILE
from castore.store import Store
from castore.units import parse_duration, parse_size


class StepResult(NamedTuple):
    """A step's result: its name, the time of its last use, and its size."""

    name: str
    used: float
    stored: int


def select_results(
    results: Sequence[StepResult], *, before: float | None, budget: int | None, needed: int
) -> list[StepResult]:
    """Choose the results to remove. Knows no store and no clock.

    Args:
        results: the results that may be removed.
        before: results last used before this time are chosen; None for any time.
        budget: bytes that may stay, or None to keep none of the results that ``before`` chooses.
        needed: bytes of the results that stay in any case.
    """
    old = sorted((r for r in results if before is None or r.used < before), key=lambda result: result.used)
    if budget is None:
        return old
    over = needed + sum(result.stored for result in results) - budget
    chosen = []
    for result in old:
        if over <= 0:
            break
        chosen.append(result)
        over -= result.stored
    return chosen


def drop_intermediate(
    store: Store, pipeline: str, *, older_than: float | str | None, budget: int | str | None
) -> list[str]:
    """See `Pipeline.drop_intermediate`."""
    store.flush()
    last, others = _list_results(store, pipeline)
    chosen = select_results(
        others,
        before=None if older_than is None else time.time() - parse_duration(older_than),
        budget=None if budget is None else parse_size(budget),
        needed=sum(result.stored for result in last),
    )
    digests = {entry.digest for result in chosen for entry in store.entries(result.name)}
    for result in chosen:
        dataset_entries.drop(store, result.name)
    _drop_blocks(store, digests)
    return [result.name for result in chosen]


def _drop_blocks(store: Store, digests: set[str]) -> None:
    """Remove those of some blocks that are in no other step's result: they would keep their bytes."""
    for digest in digests:
        names = store.names_of(digest)
        if all(name.startswith(f"{BLOCKS_FOLDER}/") for name in names):
            store.delete_many(names)


def _list_results(store: Store, pipeline: str) -> tuple[list[StepResult], list[StepResult]]:
    """The results of the last steps of runs, and all other results."""
    entries = [entry for entry in store.entries(STEPS_FOLDER) if entry.name.endswith(f"/{STATE_FILE}")]
    last: list[StepResult] = []
    others: list[StepResult] = []
    for entry in entries:
        record = entry.metadata
        if record.get("pipeline") == pipeline:
            name = entry.name.removesuffix(f"/{STATE_FILE}")
            result = StepResult(name, entry.accessed, dataset_entries.size_of(store, name).stored)
            (last if record["number"] + 1 == record["steps"] else others).append(result)
    return last, others
