"""The rules that every wrapper keeps: indices as lists have them, batches, and no attributes that are not
its own.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset

from castore import CastoreError, InvalidValueError
from castore.adapters.torch.wrapper import DatasetWrapper, check_index
from castore.errors import OutOfRangeError


class Plain(DatasetWrapper):
    """A wrapper that keeps nothing."""

    def __init__(self, data: Any) -> None:
        super().__init__(data, "plain")

    def _one(self, index: int) -> Any:
        return self._source([index])[0]

    def _many(self, indices: list[int]) -> list[Any]:
        return self._source(indices)


class Counted(list[str]):
    """Counts how often it is asked for its length."""

    asked = 0

    def __len__(self) -> int:
        self.asked += 1
        return super().__len__()


class Wrong:
    """Answers a batch with too few samples."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> int:
        return index

    def __getitems__(self, indices: list[int]) -> list[int]:
        return indices[1:]


@pytest.mark.parametrize(
    "index",
    [3, np.int8(3), np.uint64(3), np.array(3), torch.tensor(3), torch.tensor(3, dtype=torch.uint8), -2,
     np.int64(-2)],
    ids=repr,
)  # fmt: skip
def test_whole_numbers_of_all_kinds_are_indices(index: Any) -> None:
    assert check_index(index, 5) == 3
    assert type(check_index(index, 5)) is int
    assert Plain(list("abcde"))[index] == "d"


@pytest.mark.parametrize(
    "index",
    [True, np.bool_(True), torch.tensor(True), 1.0, np.float64(1), torch.tensor(1.0), torch.tensor([1]),
     np.array([1]),
     "1", None, slice(2), [1], (1,)],
    ids=repr,
)  # fmt: skip
def test_what_is_no_whole_number_is_refused(index: Any) -> None:
    with pytest.raises(InvalidValueError, match="whole number"):
        check_index(index, 5)


@pytest.mark.parametrize("index", [5, -6, 10**30, np.int64(5)])
def test_an_index_out_of_range_is_an_index_error_that_says_the_length(index: Any) -> None:
    for ask in (Plain(range(5)).__getitem__, lambda index: Plain(range(5)).__getitems__([index])):
        with pytest.raises(OutOfRangeError, match=f"index {index} .* 5 samples") as caught:
            ask(index)
        assert isinstance(caught.value, IndexError)
        assert isinstance(caught.value, CastoreError)


def test_it_iterates_over_all_samples() -> None:
    assert list(Plain(["a", "b"])) == ["a", "b"]
    assert list(Plain([])) == []


def test_the_length_is_asked_for_once() -> None:
    data = Counted("abc")
    wrapped = Plain(data)
    assert [len(wrapped), len(wrapped), *wrapped] == [3, 3, "a", "b", "c"]
    assert data.asked == 1


def test_any_indexed_source_will_do() -> None:
    assert Plain(np.arange(6).reshape(3, 2)).__getitems__([2, 0, 2])[0].tolist() == [4, 5]
    assert Plain("text")[-1] == "t"


@pytest.mark.parametrize("batch", [([1, 1], [2, 2]), {"x": [1, 1], "y": [2, 2]}, "ab"])
def test_the_columns_of_a_batch_are_no_samples(batch: Any) -> None:
    class Columns:
        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> tuple[int, int]:
            return 1, 2

        def __getitems__(self, indices: list[int]) -> Any:
            return batch

    with pytest.raises(InvalidValueError, match=r"not a list with a sample for each index; let it return"):
        Plain(Columns()).__getitems__([0, 1])


def test_a_batch_of_another_length_is_noticed() -> None:
    with pytest.raises(InvalidValueError, match="2 samples for 3 indices"):
        Plain(Wrong()).__getitems__([0, 1, 2])


def test_iterable_datasets_are_refused() -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter([1])

    for data in (Stream(), iter([1]), 5, {1, 2}, np.array(5), torch.tensor(5)):
        with pytest.raises(InvalidValueError, match="map-style"):
            Plain(data)


def test_private_and_magic_attributes_stay_with_the_dataset() -> None:
    data = Counted("abc")
    data.targets, data._secret = [1, 2, 3], 4  # type: ignore[attr-defined]
    wrapped = Plain(data)
    assert wrapped.targets == [1, 2, 3]
    assert wrapped.count("a") == 1
    for name in ("_secret", "__contains__", "__array__"):
        with pytest.raises(AttributeError, match=name):
            getattr(wrapped, name)


def test_it_survives_copies_and_pickles() -> None:
    wrapped = Plain(["a", "b"])
    for again in (copy.copy(wrapped), copy.deepcopy(wrapped), pickle.loads(pickle.dumps(wrapped))):
        assert list(again) == ["a", "b"]
    assert not hasattr(Plain.__new__(Plain), "targets")
