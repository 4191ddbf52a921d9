"""SharedCache and every kind of sample: all dtypes, tuples and dicts, shapes that vary."""

from __future__ import annotations

import collections
import logging
import pickle
import random
from typing import Any

import numpy as np
import pytest
import torch

from castore.adapters.torch.shared import SharedCache
from castore.errors import (
    FullError,
    InvalidValueError,
)
from castore.shm.segments import path_of
from tests.adapters.torch.images import DIMS, image

pytestmark = pytest.mark.usefixtures("nothing_left")
DTYPES = sorted(
    {
        kind
        for kind in vars(torch).values()
        if isinstance(kind, torch.dtype) and not str(kind).startswith("torch.q")
    },
    key=str,
)


def bits(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor of any dtype with every bit in use."""
    count = torch.Size(shape).numel() * dtype.itemsize
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    raw = torch.from_numpy(
        np.random.default_rng(count).integers(0, 2 if dtype is torch.bool else 256, count, np.uint8)
    )
    return raw.view(dtype).view(shape)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit for bit: NaN equals itself, and dtypes that cannot be compared can."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    plain = [tensor.resolve_conj().resolve_neg().reshape(-1).view(torch.uint8) for tensor in (one, other)]
    return torch.equal(*plain)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dims", [(2, 3), (), None], ids=["columns", "scalar", "ragged"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_comes_back_bit_for_bit(dtype: torch.dtype, dims: Any) -> None:
    cache = SharedCache("1MB", 3, dims, dtype)
    value = bits(dtype, dims if dims is not None else (4, 2))
    cache.set_slot(1, value)
    found = [cache.get_slot(1), cache[1], cache.get_slots([1])[0]]
    if dims is not None:
        assert (cache.array.dtype, cache.array.shape) == (dtype, (3, *dims))
        found.append(cache.array[1])
    assert all(same(value, one) for one in found)


@pytest.mark.parametrize("dims", [(4, 6), None], ids=["columns", "ragged"])
def test_tensors_need_not_be_contiguous_nor_free_of_a_graph(dims: Any) -> None:
    cache = SharedCache("1MB", 9, dims, torch.float32)
    wide = torch.arange(48.0).view(6, 8)
    values = [
        wide.t()[:4],
        wide[:4, ::1][:, :6],
        wide[:4, :6].clone().requires_grad_(),
        wide[:1, :6].expand(4, 6),
    ]
    for index, value in enumerate(values):
        cache.set_slot(index, value)
        assert torch.equal(cache[index], value.detach())
        assert not cache[index].requires_grad
    lazy = SharedCache("1MB", 1, dims, torch.complex64)
    value = torch.complex(wide[:4, :6], wide[:4, :6]).conj()
    lazy.set_slot(0, value)
    assert torch.equal(lazy[0], value)


def test_tuples_of_tensors_come_back_as_tuples() -> None:
    cache = SharedCache("1MB", 5, (DIMS, ()), (torch.uint8, torch.int64))
    for index in range(5):
        cache.set_slot(index, (image(index), torch.tensor(index)))
    for index, sample in enumerate([cache[0], cache.get_slot(1), *cache.get_slots([2, 3, 4])]):
        assert type(sample) is tuple
        assert torch.equal(sample[0], image(index))
        assert torch.equal(sample[1], torch.tensor(index))
    images, labels = cache.array
    assert torch.equal(images[4], image(4))
    assert labels.tolist() == [0, 1, 2, 3, 4]


def test_dicts_of_tensors_come_back_as_dicts_in_their_order() -> None:
    cache = SharedCache("1MB", 3, {"x": (2,), "y": ()}, {"y": torch.bool, "x": torch.bfloat16})
    sample = {"y": torch.tensor(True), "x": torch.tensor([1.5, 2.5], dtype=torch.bfloat16)}
    cache[1] = sample
    for found in (cache[1], cache.get_slots([1])[0]):
        assert list(found) == ["x", "y"]
        assert all(same(found[key], sample[key]) for key in sample)
    assert cache.array["x"].shape == (3, 2)


def test_one_dtype_serves_for_all_parts() -> None:
    cache = SharedCache("1MB", 3, {"x": (2,), "y": ()}, torch.float16)
    assert {key: column.dtype for key, column in cache.array.items()} == dict.fromkeys("xy", torch.float16)


def test_ragged_samples_come_back_in_their_own_shapes() -> None:
    cache = SharedCache("1MB", 50, None, torch.int32)
    shapes = [tuple(random.Random(index).choices(range(4), k=index % 4)) for index in range(50)]
    values = [bits(torch.int32, shape) for shape in shapes]
    for index in random.Random(1).sample(range(50), 50):
        cache.set_slot(index, values[index])
    assert all(same(cache[index], value) for index, value in enumerate(values))
    assert all(same(*pair) for pair in zip(cache.get_slots(range(50)), values, strict=True))
    assert cache.aux_array.tolist() == [1] * 50


def test_ragged_parts_stand_beside_fixed_ones_and_known_dimensions_are_held_to() -> None:
    cache = SharedCache("1MB", 9, {"atoms": (None, 3), "energy": ()}, torch.float64)
    for index in range(5):
        cache.set_slot(
            index,
            {
                "atoms": torch.ones(index, 3, dtype=torch.float64) * index,
                "energy": torch.tensor(0.5).double(),
            },
        )
    assert [cache[index]["atoms"].shape for index in range(5)] == [(index, 3) for index in range(5)]
    assert float(cache[4]["atoms"].sum()) == 48
    with pytest.raises(InvalidValueError, match=r"slot 6: sample\['atoms'\] .*\(2, 4\).*\(None, 3\)"):
        cache.set_slot(6, {"atoms": torch.ones(2, 4).double(), "energy": torch.tensor(0.5).double()})


def test_ragged_samples_beyond_the_limit_are_left_out_and_the_rest_stays(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cache = SharedCache("10KB", 20, (None,))
    with caplog.at_level(logging.INFO, "castore"):
        for index in range(20):
            cache.set_slot(index, torch.full((1000,), index, dtype=torch.uint8))
    kept = [index for index, sample in enumerate(cache.get_slots(range(20))) if sample is not None]
    assert kept == list(range(9))
    assert caplog.text.count("is full") == 1
    assert cache.aux_array.tolist() == [1] * 9 + [0] * 11
    with pytest.raises(FullError, match="sample 19 does not fit"):
        cache.set_slot(19, torch.zeros(1000, dtype=torch.uint8), allow_oob_idx=False)
    with pytest.raises(FullError, match="sample 19 does not fit"):
        cache[19] = torch.zeros(1000, dtype=torch.uint8)
    # A new sample that does not fit must not leave the old one in its place.
    cache.set_slot(0, torch.zeros(5000, dtype=torch.uint8), allow_overwrite=True)
    assert cache.get_slot(0) is None
    cache.clear()
    cache.set_slot(19, torch.zeros(5000, dtype=torch.uint8))
    assert cache[19].shape == (5000,)


def test_ragged_memory_is_taken_as_it_fills() -> None:
    cache = SharedCache("256MB", 10, None)
    file = path_of(cache._arena.name)
    assert file.stat().st_blocks * 512 < 1e6
    cache.set_slot(0, torch.zeros(100, dtype=torch.uint8))
    assert file.stat().st_blocks * 512 < 40e6
    with pytest.raises(InvalidValueError, match="get_slots"):
        _ = cache.array


Sample = collections.namedtuple("Sample", "image label")


class Wrapped(torch.Tensor):
    pass


@pytest.mark.parametrize("side", [8, None], ids=["columns", "ragged"])
def test_named_tuples_come_back_as_such_in_every_process(side: int | None) -> None:
    cache = SharedCache("1MB", 4, data_dims=Sample((3, side), ()), dtype=Sample(torch.uint8, torch.int64))
    sample = Sample(torch.ones(3, 8, dtype=torch.uint8), torch.tensor(5))
    cache.set_slot(1, sample)
    for copy in (cache, pickle.loads(pickle.dumps(cache))):
        for found in (copy.get_slot(1), copy[1], copy.get_slots([1])[0]):
            assert type(found) is Sample
            assert all(map(same, found, sample))
        if side:
            assert type(copy.get_batch([1])) is Sample
        if copy is not cache:
            copy.close()
    cache.close()


def test_a_tensor_that_is_more_than_its_numbers_is_refused_with_a_way_out() -> None:
    cache = SharedCache("1MB", 4, (3,), torch.float32)
    image = torch.ones(3).as_subclass(Wrapped)
    with pytest.raises(
        InvalidValueError, match=r"sample is a Wrapped, .* convert it with as_subclass\(torch.Tensor\)"
    ):
        cache.set_slot(1, image)
    assert cache.get_slot(1) is None
    cache.set_slot(1, image.as_subclass(torch.Tensor))
    assert same(cache[1], torch.ones(3))
    cache.close()
