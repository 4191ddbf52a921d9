"""A list that a function of a stream returns in two places is one list, in each pass."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import datasets
import numpy as np
import pytest

from castore import Store
from castore.adapters.datasets import CacheWarning, cached_map
from castore.adapters.datasets.shared_objects import find_shared, share
from castore.errors import SerializationError

Row = dict[str, Any]
ROWS = 6


def stream() -> datasets.IterableDataset:
    rows = {"text": [f"a{n} bb ccc" for n in range(ROWS)], "ids": [[n, n + 1] for n in range(ROWS)]}
    return datasets.Dataset.from_dict(rows).to_iterable_dataset(num_shards=2)


def two_names(row: Row) -> Row:
    ids = [len(word) for word in row["text"].split()]
    return {"input_ids": ids, "labels": ids}


def two_names_in_batches(batch: Row) -> Row:
    ids = [[len(word) for word in text.split()] for text in batch["text"]]
    return {"input_ids": ids, "labels": ids}


def deeper(row: Row) -> Row:
    ids = [len(word) for word in row["text"].split()]
    return {"labels": {"all": [ids, [5]]}, "more": [[ids], ids], "one": ids}


def arrays(row: Row) -> Row:
    ids = np.array(row["ids"])
    return {"input_ids": ids, "labels": ids}


def renames(row: Row) -> Row:
    return {"labels": row["ids"]}


def renames_the_column(ids: list[int]) -> Row:
    return {"labels": ids}


def renames_in_the_row(row: Row) -> Row:
    row["labels"] = row["ids"]
    return row


def renames_what_it_changes(row: Row) -> Row:
    row["ids"].append(7)
    return {"ids": row["ids"], "labels": row["ids"]}


def renames_in_batches(batch: Row) -> Row:
    batch["labels"] = batch["ids"]
    return batch


def one_for_all(batch: Row) -> Row:
    return {"labels": [[0, 1]] * len(batch["text"])}


def replaces_a_column(row: Row) -> Row:
    row["ids"] = [number + 10 for number in row["ids"]]
    return {"labels": row["ids"], "same": row["ids"]}


def replaces_it_in_batches(batch: Row) -> Row:
    batch["ids"] = [[number + 10 for number in ids] for ids in batch["ids"]]
    return {"labels": batch["ids"]}


def adds_a_column(row: Row) -> Row:
    row["made"] = [len(row["text"])]
    return {"labels": row["made"]}


def keeps_what_it_replaces(row: Row) -> Row:
    before, row["ids"] = row["ids"], [1]
    return {"labels": before}


CASES: dict[str, tuple[Callable[..., Row], dict[str, Any]]] = {
    "two names": (two_names, {}),
    "two names in batches": (two_names_in_batches, {"batched": True, "batch_size": 2}),
    "two names, by rows": (two_names_in_batches, {"batched": True, "batch_size": 2, "rowwise": True}),
    "deeper": (deeper, {}),
    "arrays": (arrays, {}),
    "renames": (renames, {}),
    "renames in batches": (lambda batch: {"labels": batch["ids"]}, {"batched": True, "batch_size": 4}),
    "renames, by rows": (lambda batch: {"labels": batch["ids"]}, {"batched": True, "rowwise": True}),
    "renames the column": (renames_the_column, {"input_columns": ["ids"]}),
    "renames in the row": (renames_in_the_row, {}),
    "renames in the batch": (renames_in_batches, {"batched": True, "batch_size": 4}),
    "renames what it changes": (renames_what_it_changes, {}),
    "replaces a column": (replaces_a_column, {}),
    "replaces it in batches": (replaces_it_in_batches, {"batched": True, "batch_size": 2}),
    "replaces it, by rows": (replaces_it_in_batches, {"batched": True, "rowwise": True, "batch_size": 2}),
    "adds a column": (adds_a_column, {}),
    "keeps what it replaces": (keeps_what_it_replaces, {}),
    "one for all": (one_for_all, {"batched": True, "batch_size": 3}),
}


def change(value: Any) -> Any:
    """Change all lists and arrays of numbers in place."""
    if isinstance(value, np.ndarray) or (isinstance(value, list) and value and isinstance(value[0], int)):
        value[0] = value[0] * 2 + 100
    elif isinstance(value, list | dict):
        for item in value.values() if isinstance(value, dict) else value:
            change(item)
    return value


def change_labels(row: Row) -> str:
    change(row["labels"])
    return repr(row)


@pytest.mark.parametrize("name", CASES)
def test_whoever_changes_one_changes_the_other_in_each_pass_as_in_datasets(name: str, store: Store) -> None:
    function, given = CASES[name]
    plain = stream().map(function, **{key: value for key, value in given.items() if key != "rowwise"})
    expected = [change_labels(row) for row in plain]
    calls = 0

    def counted(*arguments: Any) -> Row:
        nonlocal calls
        calls += 1
        return function(*arguments)

    made = cached_map(stream(), counted, store=store, fingerprint=name, **given)
    with warnings.catch_warnings():
        warnings.simplefilter("error", CacheWarning)
        assert [change_labels(row) for row in made] == expected
        ran, calls = calls, 0
        assert [change_labels(row) for row in made] == expected
    assert ran
    assert not calls


def test_what_a_tuple_shares_is_not_kept(store: Store) -> None:
    def in_tuple(row: Row) -> Row:
        return {"labels": row["ids"], "both": (row["ids"], 1)}

    expected = [change_labels(row) for row in stream().map(in_tuple)]
    made = cached_map(stream(), in_tuple, store=store)
    for _ in range(2):
        with pytest.warns(CacheWarning, match="in two places, of which one is in a tuple"):
            assert [change_labels(row) for row in made] == expected
        made = cached_map(stream(), in_tuple, store=store)


def test_values_that_nobody_can_change_may_be_anywhere() -> None:
    text, point = "text", (1, 2)
    assert find_shared({"a": text, "b": (text, point), "c": [point, point]}, [{"d": point}]) == []


def test_columns_that_come_back_are_those_of_the_result() -> None:
    ids = [1]
    assert find_shared({"ids": ids}, [{"ids": ids}]) == []
    assert find_shared({"ids": ids, "labels": ids}, [{"ids": ids}]) == [[[None, "labels"], [None, "ids"]]]


def test_an_odd_key_of_a_shared_object_is_an_error() -> None:
    ids = [1]
    with pytest.raises(SerializationError, match="no text and no number"):
        find_shared({"ids": ids, "inner": {(1, 2): ids}}, [])


def test_places_that_are_not_there_are_errors() -> None:
    odd: list[list[list[Any]]] = [
        [[None, "a", 5], [None, "b"]],
        [[None, "a"], [3, "b"]],
        [[None, "c", "d"], [None, "b"]],
    ]
    for shared in odd:
        with pytest.raises((LookupError, TypeError)):
            share([shared], {"a": [1], "b": [2]}, [])
