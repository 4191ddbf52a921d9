"""The things that SharedCache refuses: each with one clear error, and nothing changed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from castore.adapters.torch.shared import SharedCache, get_shm_size
from castore.errors import (
    CastoreError,
    FullError,
    InvalidValueError,
)
from tests.adapters.torch.images import DIMS, image

pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.mark.parametrize("index", [-1, 10, 10**30])
def test_an_index_outside_the_dataset_is_an_index_error(index: int) -> None:
    cache = SharedCache(1, 10, DIMS)
    for attempt in (
        lambda: cache.get_slot(index),
        lambda: cache.set_slot(index, image(0)),
        lambda: cache.get_slots([0, index]),
        lambda: cache.set_slots([0, index], [image(0)] * 2),
    ):
        with pytest.raises(IndexError, match=rf"index {index} .* 10 samples") as caught:
            attempt()
        assert isinstance(caught.value, CastoreError)
    with pytest.raises(IndexError, match="-11"):
        cache[-11]


@pytest.mark.parametrize("index", [np.int64(3), np.uint8(3), torch.tensor(3)], ids=repr)
def test_whole_numbers_of_other_libraries_are_indices(index: Any) -> None:
    cache = SharedCache(1, 10, DIMS)
    cache.set_slot(index, image(0))
    assert all(
        torch.equal(one, image(0)) for one in (cache.get_slot(index), cache[index], *cache.get_slots([index]))
    )


@pytest.mark.parametrize("index", [True, 1.0, "1", None, slice(0, 2), [1]], ids=repr)
def test_what_is_no_whole_number_is_no_index(index: Any) -> None:
    cache = SharedCache(1, 10, DIMS)
    for attempt in (cache.get_slot, cache.__getitem__, lambda index: cache.get_slots([index])):
        with pytest.raises(InvalidValueError, match="whole number"):
            attempt(index)


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (torch.zeros(3, 8, 9, dtype=torch.uint8), r"\(3, 8, 9\)"),
        (torch.zeros(1, dtype=torch.uint8), r"\(1,\)"),  # would be broadcast
        (torch.zeros(DIMS), "torch.float32"),  # would be rounded
        (np.zeros(DIMS, np.uint8), "ndarray"),
        (torch.zeros(DIMS, dtype=torch.uint8).to_sparse(), "sparse"),
        (torch.zeros(DIMS, dtype=torch.uint8, device="meta"), "meta"),
        (None, "NoneType"),
    ],
    ids=["shape", "broadcast", "dtype", "array", "sparse", "meta", "none"],
)
def test_a_sample_of_another_shape_or_dtype_is_refused_with_both_named(value: Any, found: str) -> None:
    cache = SharedCache(1, 10, DIMS)
    with pytest.raises(InvalidValueError, match=found) as caught:
        cache.set_slot(4, value)
    assert "slot 4" in str(caught.value)
    assert cache.get_slot(4) is None


@pytest.mark.parametrize(
    "value", [torch.zeros(2), (torch.zeros(2),), {"x": torch.zeros(2)}, [1, 2, 3]], ids=repr
)
def test_a_sample_of_another_form_is_refused(value: Any) -> None:
    for cache in (SharedCache(1, 4, ((2,), ()), torch.float32), SharedCache(1, 4, {"x": (2,), "y": ()})):
        with pytest.raises(InvalidValueError, match="slot 0: "):
            cache.set_slot(0, value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"size_limit_gib": 0}, "limit is 0 B, but a sample takes 192 B"),
        ({"size_limit_gib": "191"}, "limit is 191 B, but a sample takes 192 B"),
        ({"size_limit_gib": 0, "data_dims": None}, "0 bytes"),
        ({"size_limit_gib": -1}, "size_limit_gib is -1"),
        ({"size_limit_gib": float("nan")}, "size_limit_gib is nan"),
        ({"size_limit_gib": float("inf")}, "size_limit_gib is inf"),
        ({"size_limit_gib": True}, "size_limit_gib is True"),
        ({"size_limit_gib": None}, "size_limit_gib is None"),
        ({"size_limit_gib": "much"}, "'much' is not a size"),
        ({"dataset_len": 0}, "dataset_len is 0"),
        ({"dataset_len": 2.5}, "dataset_len is a whole number"),
        ({"data_dims": (3, -1)}, "no dimensions"),
        ({"data_dims": (3, 1.5)}, "no dimensions"),
        ({"data_dims": 3}, "no dimensions"),
        ({"data_dims": {1: (3,)}}, "no text"),
        ({"dtype": "uint8"}, "'uint8' is no dtype"),
        ({"dtype": torch.qint8}, "int_repr"),
        ({"data_dims": ((3,), ()), "dtype": (torch.uint8,)}, "one for each part"),
        ({"data_dims": {"x": ()}, "dtype": {"y": torch.uint8}}, "one for each part"),
        ({"name": "a/b"}, "'a/b' cannot name"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_arguments_that_make_no_sense_are_refused(arguments: dict[str, Any], message: str) -> None:
    defaults: dict[str, Any] = {"size_limit_gib": 0.001, "dataset_len": 10, "data_dims": DIMS}
    with pytest.raises(InvalidValueError, match=message):
        SharedCache(**defaults | arguments)


@pytest.mark.parametrize("dims", [(1 << 30,), None], ids=["columns", "ragged"])
def test_more_than_shared_memory_has_is_refused_and_nothing_is_left(dims: Any) -> None:
    with pytest.raises(FullError, match="free"):
        SharedCache(2 * get_shm_size() + 2, dataset_len=1 << 20, data_dims=dims)


def test_limits_may_be_fractions_of_gib_and_texts() -> None:
    assert len(SharedCache(0.5 / 1024, 10_000, (1024,))) == 512
    assert len(SharedCache("1MB", 10_000, (1000,))) == 1000
    assert len(SharedCache("1MiB", 10_000, (1024,))) == 1024
