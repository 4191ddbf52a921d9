"""SharedCache in one process: stocaching's surface, every kind of sample, and errors that say what is wrong."""

from __future__ import annotations

import copy
import gc
import logging
import os
import pickle
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from castore.adapters.torch.shared import SharedCache, get_shm_size
from castore.errors import (
    CastoreError,
    FullError,
    InvalidValueError,
    OutOfRangeError,
    SegmentError,
    SlotError,
)
from castore.shm.segments import path_of

DIMS = (3, 8, 8)
DTYPES = sorted(
    {
        kind
        for kind in vars(torch).values()
        if isinstance(kind, torch.dtype) and not str(kind).startswith("torch.q")
    },
    key=str,
)


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """No private segment of this process outlives the test."""
    yield
    mine = f"castore-{os.geteuid()}-{os.getpid()}-*"
    if list(Path("/dev/shm").glob(mine)):
        gc.collect()  # a caught exception holds its frames in a circle
    assert not list(Path("/dev/shm").glob(mine))


def image(number: int, dims: tuple[int, ...] = DIMS) -> torch.Tensor:
    return torch.randint(0, 255, dims, dtype=torch.uint8, generator=torch.Generator().manual_seed(number))


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


# --- stocaching's surface -------------------------------------------------------------------------------------------


def test_a_slot_is_empty_then_gives_what_was_set() -> None:
    cache = SharedCache(size_limit_gib=1, dataset_len=10, data_dims=DIMS, dtype=torch.uint8)
    assert len(cache) == 10
    assert cache.get_slot(3) is None
    cache.set_slot(3, image(3))
    assert torch.equal(cache.get_slot(3), image(3))
    assert torch.equal(cache[3], image(3))
    cache[4] = image(4)
    assert torch.equal(cache.get_slot(4), image(4))
    cache[4] = image(5)
    assert torch.equal(cache[-6], image(5))


def test_only_the_first_samples_get_slots_if_not_all_fit() -> None:
    cache = SharedCache(5 * 192 / 2**30, dataset_len=8, data_dims=DIMS)
    assert len(cache) == 5
    cache.set_slot(6, image(6))
    assert cache.get_slot(6) is None
    assert cache.aux_array.tolist() == [0] * 5 + [2] * 3
    with pytest.raises(OutOfRangeError, match=r"index 6 .* 5 slots"):
        cache.set_slot(6, image(6), allow_oob_idx=False)
    with pytest.raises(IndexError, match=r"index 6 .* 5 slots"):
        cache.get_slot(6, allow_oob_idx=False)
    with pytest.raises(IndexError, match=r"index 5 .* 5 slots"):
        cache[5]
    with pytest.raises(IndexError, match=r"index 5 .* 5 slots"):
        cache[5] = image(5)


def test_array_and_aux_array_show_what_is_set_and_what_is_set_later() -> None:
    cache = SharedCache(1, 4, DIMS)
    array, states = cache.array, cache.aux_array
    assert (array.shape, array.dtype, array.any()) == ((4, *DIMS), torch.uint8, torch.tensor(False))
    assert (states.shape, states.dtype, states.tolist()) == ((4,), torch.uint8, [0, 0, 0, 0])
    cache.set_slot(2, image(2))
    assert torch.equal(array[2], image(2))
    assert states.tolist() == [0, 0, 1, 0]
    cache.clear()
    assert not array.any()
    assert states.tolist() == [0, 0, 0, 0]


def test_clear_empties_every_slot_and_they_can_be_set_again() -> None:
    cache = SharedCache(4 * 192 / 2**30, 6, DIMS)
    for index in range(6):
        cache.set_slot(index, image(index))
    cache.clear()
    assert cache.get_slots(range(6)) == [None] * 6
    assert cache.aux_array.tolist() == [0, 0, 0, 0, 2, 2]
    cache.set_slot(0, image(9))
    assert torch.equal(cache[0], image(9))


def test_an_empty_slot_is_an_error_where_a_sample_must_be() -> None:
    cache = SharedCache(1, 4, DIMS)
    with pytest.raises(SlotError, match="slot 1 is empty"):
        cache.get_slot(1, allow_empty_slot=False)
    with pytest.raises(RuntimeError, match="slot 1 is empty"):
        cache[1]


def test_setting_what_one_has_set_is_an_error_unless_overwriting_is_allowed() -> None:
    cache = SharedCache(1, 4, DIMS)
    cache.set_slot(0, image(0))
    with pytest.raises(RuntimeError, match=r"slot 0 .*allow_overwrite"):
        cache.set_slot(0, image(1))
    assert torch.equal(cache[0], image(0))
    cache.set_slot(0, image(1), allow_overwrite=True)
    assert torch.equal(cache[0], image(1))


def test_setting_what_another_thread_was_quicker_to_set_keeps_the_first_and_raises_nothing() -> None:
    cache = SharedCache(1, 4, DIMS)
    thread = threading.Thread(target=cache.set_slot, args=(0, image(0)))
    thread.start()
    thread.join()
    cache.set_slot(0, image(1))
    cache.set_slots([0, 1], [image(1), image(2)])
    assert torch.equal(cache[0], image(0))
    assert torch.equal(cache[1], image(2))


def test_nothing_is_printed_and_the_log_tells_how_many_fit(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "castore"):
        SharedCache(2 * 192 / 2**30, 6, DIMS)
    assert capsys.readouterr() == ("", "")
    assert "2 of 6 samples" in caplog.text


def test_the_size_of_shared_memory_is_known_in_fractions_of_gib() -> None:
    status = os.statvfs("/dev/shm")
    assert get_shm_size() == status.f_frsize * status.f_blocks / 2**30


# --- copies, never a door -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dims", [DIMS, None, ()], ids=["columns", "ragged", "scalar"])
def test_what_comes_out_is_a_copy(dims: Any) -> None:
    cache = SharedCache("1MB", 4, dims, torch.int64)
    value = torch.full(dims or (), 7)
    cache.set_slots([0, 1], [value, value])
    value += 1
    for sample in (cache.get_slot(0), cache[0], *cache.get_slots([0, 1, 1])):
        assert bool((sample == 7).all())
        sample.fill_(99)
    assert bool((cache[0] == 7).all())
    assert bool((cache[1] == 7).all())


def test_writing_to_array_and_aux_array_reaches_no_reader() -> None:
    cache = SharedCache(1, 4, DIMS)
    cache.set_slot(0, image(0))
    cache.array[0] = 99
    cache.aux_array[1] = 1
    assert torch.equal(cache[0], image(0))
    assert cache.get_slot(1) is None


def test_a_sample_outlives_the_cache() -> None:
    cache = SharedCache(1, 4, DIMS)
    cache.set_slot(0, image(0))
    sample, (other, _), array = cache[0], cache.get_slots([0, 1]), cache.array
    del cache
    gc.collect()
    assert torch.equal(sample, image(0))
    assert torch.equal(other, image(0))
    assert torch.equal(array[0], image(0))


# --- every kind of sample -------------------------------------------------------------------------------------------


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
    # What replaces a sample and does not fit must not leave the old one in its place.
    cache.set_slot(0, torch.zeros(5000, dtype=torch.uint8), allow_overwrite=True)
    assert cache.get_slot(0) is None
    cache.clear()
    cache.set_slot(19, torch.zeros(5000, dtype=torch.uint8))
    assert cache[19].shape == (5000,)


def test_ragged_memory_is_taken_as_it_fills() -> None:
    cache = SharedCache("256MB", 10, None)
    file = path_of(cache._segment.name)
    assert file.stat().st_blocks * 512 < 1e6
    cache.set_slot(0, torch.zeros(100, dtype=torch.uint8))
    assert file.stat().st_blocks * 512 < 40e6
    with pytest.raises(InvalidValueError, match="get_slots"):
        _ = cache.array


# --- batches --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dims", [DIMS, (None, 8, 8)], ids=["columns", "ragged"])
def test_batches_keep_order_and_duplicates_and_say_none_for_what_is_missing(dims: Any) -> None:
    cache = SharedCache(8 * 192 / 2**30 if dims == DIMS else "1MB", 10, dims)
    cache.set_slots([0, 3, 5], [image(0), image(3), image(5)])
    found = cache.get_slots(np.array([5, 1, 0, 5, 9]))
    assert [sample is None for sample in found] == [False, True, False, False, True]
    assert [torch.equal(found[place], image(number)) for place, number in ((0, 5), (2, 0), (3, 5))] == [
        True
    ] * 3
    assert cache.get_slots([]) == []
    assert cache.get_slots(index for index in (1, 2)) == [None, None]


def test_a_batch_with_one_bad_sample_sets_nothing() -> None:
    cache = SharedCache(1, 10, DIMS)
    with pytest.raises(InvalidValueError, match="slot 1: "):
        cache.set_slots([0, 1], [image(0), image(1, (3, 8, 9))])
    assert cache.get_slot(0) is None
    with pytest.raises(InvalidValueError, match="2 indices came with 1 values"):
        cache.set_slots([0, 1], [image(0)])


# --- errors ---------------------------------------------------------------------------------------------------------


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
def test_more_than_shared_memory_has_is_refused_before_anything_is_taken(dims: Any) -> None:
    free = os.statvfs("/dev/shm").f_bavail
    with pytest.raises(FullError, match="free"):
        SharedCache(2 * get_shm_size() + 2, dataset_len=1 << 20, data_dims=dims)
    assert os.statvfs("/dev/shm").f_bavail >= free - 1000


def test_limits_may_be_fractions_of_gib_and_texts() -> None:
    assert len(SharedCache(0.5 / 1024, 10_000, (1024,))) == 512
    assert len(SharedCache("1MB", 10_000, (1000,))) == 1000
    assert len(SharedCache("1MiB", 10_000, (1024,))) == 1024


# --- names, pickles, the end ----------------------------------------------------------------------------------------


@pytest.fixture
def name() -> Iterator[str]:
    unique = f"test-shared-{os.getpid()}-{random.getrandbits(64)}"
    yield unique
    if path_of(unique).exists():
        gc.collect()
    assert not path_of(unique).exists()


@pytest.mark.parametrize("dims", [DIMS, None], ids=["columns", "ragged"])
def test_caches_of_one_name_are_one_cache(name: str, dims: Any) -> None:
    one = SharedCache("1MB", 10, dims, name=name)
    other = SharedCache("1MB", 10, dims, name=name)
    one.set_slot(1, image(1))
    assert torch.equal(other[1], image(1))
    other.set_slot(1, image(2))  # another's: kept as it is
    assert torch.equal(one[1], image(1))
    other.clear()
    assert one.get_slot(1) is None


@pytest.mark.parametrize(
    ("arguments", "difference"),
    [
        ({"dataset_len": 11}, "dataset_len=10, here 11"),
        ({"data_dims": (3, 8, 9)}, r"data_dims=\[3, 8, 8\], here \[3, 8, 9\]"),
        ({"dtype": torch.int8}, "dtype='uint8', here 'int8'"),
        ({"size_limit_gib": "1KB"}, "slots=10, here 5"),
    ],
)
def test_other_arguments_under_one_name_are_refused_with_both_values(
    name: str, arguments: dict[str, Any], difference: str
) -> None:
    defaults: dict[str, Any] = {"size_limit_gib": 0.001, "dataset_len": 10, "data_dims": DIMS, "name": name}
    cache = SharedCache(**defaults)
    with pytest.raises(SegmentError, match=difference):
        SharedCache(**defaults | arguments)
    assert len(cache) == 10


@pytest.mark.parametrize("dims", [DIMS, {"x": (None, 8, 8)}], ids=["columns", "ragged"])
def test_a_pickle_is_small_and_leads_to_the_same_memory(dims: Any) -> None:
    cache = SharedCache("10MB", 1000, dims)
    sample = image(7) if dims == DIMS else {"x": image(7)}
    cache.set_slot(7, sample)
    data = pickle.dumps(cache)
    assert len(data) < 1000
    for twin in (pickle.loads(data), copy.deepcopy(cache)):
        found = twin[7] if dims == DIMS else twin[7]["x"]
        assert torch.equal(found, image(7))
        assert len(twin) == len(cache)
    assert torch.equal(cache[7] if dims == DIMS else cache[7]["x"], image(7))


def test_a_pickle_whose_cache_is_gone_says_so() -> None:
    data = pickle.dumps(SharedCache("1MB", 10, DIMS))
    gc.collect()
    with pytest.raises(SegmentError, match="gone"):
        pickle.loads(data)


def test_a_closed_cache_says_so() -> None:
    cache = SharedCache("1MB", 10, DIMS)
    cache.set_slot(0, image(0))
    cache.close()
    cache.close()
    for attempt in (
        lambda: cache.get_slot(0),
        lambda: cache[0],
        lambda: cache.get_slots([0]),
        lambda: cache.set_slot(1, image(1)),
        lambda: cache.array,
        lambda: cache.aux_array,
        cache.clear,
    ):
        with pytest.raises(SegmentError, match="closed"):
            attempt()


def test_a_writer_that_fails_halfway_leaves_the_slot_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = SharedCache("1MB", 4, (DIMS, ()), (torch.uint8, torch.int64))
    sample = (image(1), torch.tensor(1))
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "numpy", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            cache.set_slot(1, sample)
    assert cache.get_slot(1) is None
    assert cache.aux_array.tolist() == [0, 0, 0, 0]
    with pytest.raises(SlotError, match="empty"):
        cache[1]
    cache.set_slot(1, sample)
    assert torch.equal(cache[1][0], image(1))
