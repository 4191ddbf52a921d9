"""SharedCache in one process: stocaching's surface, copies and batches, names and pickles."""

from __future__ import annotations

import copy
import gc
import logging
import os
import pickle
import random
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from castore.adapters.torch.shared import SharedCache, get_shm_size
from castore.errors import (
    FullError,
    InvalidValueError,
    OutOfRangeError,
    SegmentError,
    SlotError,
)
from castore.shm.segments import path_of
from tests.adapters.torch.images import DIMS, image

pytestmark = pytest.mark.usefixtures("nothing_left")


# --- stocaching's surface -----------------------------------------------------------------------------------


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


# --- copies, never a door -----------------------------------------------------------------------------------


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


# --- batches ------------------------------------------------------------------------------------------------


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


# --- names, pickles, the end --------------------------------------------------------------------------------


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


def test_samples_that_are_replaced_by_longer_ones_are_kept_until_the_limit_is_reached() -> None:
    cache = SharedCache("100KB", 20, data_dims=(None,), dtype=torch.uint8)
    for length in range(10, 4000, 35):
        for index in range(20):
            cache[index] = torch.full((length + index,), index, dtype=torch.uint8)
    last = length
    for index, sample in enumerate(cache.get_slots(range(20))):
        assert torch.equal(sample, torch.full((last + index,), index, dtype=torch.uint8))
    with pytest.raises(FullError, match="sample 3 does not fit"):
        cache[3] = torch.zeros(60_000, dtype=torch.uint8)
    assert cache.get_slot(3) is None
