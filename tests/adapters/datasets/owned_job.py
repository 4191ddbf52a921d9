"""Cached steps over a few texts, and a program that prints the result in a new process and the number of rows
that ran.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import datasets
import pyarrow as pa

from castore import Store
from castore.adapters.datasets import cached_filter, cached_map


class Ran:
    """Counts the rows that ran; the counter does not count in keys."""

    count = 0

    def __castore_key__(self) -> str:
        return "Ran"

    def __call__(self) -> None:
        Ran.count += 1


ran = Ran()


def tokens(sample: dict[str, Any]) -> dict[str, Any]:
    """A mapper."""
    ran()
    return {"ids": [len(word) for word in sample["text"].split()]}


def first(sample: dict[str, Any]) -> dict[str, Any]:
    """A mapper over the columns of `tokens`; fails if one of them is missing."""
    ran()
    return {"first": [sample["ids"][0], len(sample["text"])]}


def is_even(sample: dict[str, Any]) -> bool:
    """A filter."""
    ran()
    return bool(sample["number"] % 2 == 0)


def nothing(sample: dict[str, Any]) -> None:
    """A mapper that changes nothing: its result is its input."""
    ran()


def texts() -> datasets.Dataset:
    """The input."""
    rows = [f"{'word ' * number} end" for number in range(40)]
    table = pa.table({"text": rows, "number": list(range(40))})
    return datasets.Dataset(datasets.table.InMemoryTable(table))


def both(dataset: datasets.Dataset) -> datasets.DatasetDict:
    """The input as two splits."""
    return datasets.DatasetDict({"train": dataset, "test": dataset.select(range(5))})


WAYS: dict[str, Any] = {
    "one step": lambda data, store: cached_map(data, tokens, store=store),
    "a chain": lambda data, store: cached_map(cached_map(data, tokens, store=store), first, store=store),
    "a filter": lambda data, store: cached_filter(data, is_even, store=store),
    "a step that changes nothing": lambda data, store: cached_map(data, nothing, store=store),
    "splits": lambda data, store: cached_map(both(data), tokens, store=store),
}
PLAIN: dict[str, Any] = {
    "one step": lambda data: data.map(tokens),
    "a chain": lambda data: data.map(tokens).map(first),
    "a filter": lambda data: data.filter(is_even),
    "a step that changes nothing": lambda data: data.map(nothing),
    "splits": lambda data: both(data).map(tokens),
}


def told(result: Any) -> Any:
    """All visible properties of a result."""
    if isinstance(result, dict):
        return {name: told(part) for name, part in result.items()}
    seen = [
        result.with_format(None)[:],
        result.format["type"],
        result.format["columns"],
        str(result.features),
    ]
    return json.loads(json.dumps([*seen, result.info.description, str(result[0])]))


def main() -> None:
    """Print the result of one of the ways in this process, and how many rows ran for it."""
    folder, way = sys.argv[1:]
    with Store(folder) as store:
        result = told(WAYS[way](texts(), store))
    print(json.dumps({"told": result, "ran": Ran.count}))
