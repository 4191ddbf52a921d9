"""`get_batch` and `collate`: samples copied straight to their places in a batch, which is what
`default_collate` would have made.
"""

from __future__ import annotations

import itertools
import multiprocessing
import time
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset, default_collate

from castore.adapters.torch import SharedCache, collate
from castore.errors import InvalidValueError, OutOfRangeError
from tests.adapters.torch.images import DIMS, image

pytestmark = pytest.mark.usefixtures("nothing_left")
_FORK: Any = multiprocessing.get_context("fork")
STRUCTURES: dict[str, tuple[Any, Any]] = {
    "tensor": (DIMS, torch.uint8),
    "scalar": ((), torch.float64),
    "empty": ((3, 0), torch.int32),
    "bfloat16": ((4,), torch.bfloat16),
    "tuple": ((DIMS, ()), (torch.uint8, torch.int64)),
    "dict": ({"image": DIMS, "label": ()}, {"image": torch.uint8, "label": torch.int64}),
}


def filled(dims: Any, dtype: Any) -> SharedCache:
    def sample(number: int, dims: Any, dtype: Any) -> Any:
        if isinstance(dims, dict):
            return {key: sample(number, dims[key], dtype[key]) for key in dims}
        if dims and isinstance(dims[0], tuple):
            return tuple(sample(number, *both) for both in zip(dims, dtype, strict=True))
        return torch.full(dims, number, dtype=dtype)

    cache = SharedCache("1MB", 8, dims, dtype)
    cache.set_slots(range(8), [sample(number, dims, dtype) for number in range(8)])
    return cache


def tensors(batch: Any) -> list[torch.Tensor]:
    if isinstance(batch, dict):
        return list(batch.values())
    return list(batch) if isinstance(batch, list | tuple) else [batch]


@pytest.mark.parametrize("kind", STRUCTURES)
def test_a_batch_is_what_the_loader_would_have_made_of_its_samples(kind: str) -> None:
    cache = filled(*STRUCTURES[kind])
    batch, usual = collate(cache.get_batch([5, 0, 5, 7])), default_collate(cache.get_slots([5, 0, 5, 7]))
    assert isinstance(batch, dict) == isinstance(usual, dict)
    for ours, theirs in zip(tensors(batch), tensors(usual), strict=True):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        assert torch.equal(ours, theirs)
        assert ours.is_contiguous()


@pytest.mark.parametrize("kind", STRUCTURES)
def test_a_batch_is_copied_into_one_that_is_there(kind: str) -> None:
    cache = filled(*STRUCTURES[kind])
    plain = cache.get_batch([5, 0, 5])
    for parts in (tensors(cache.get_batch([7, 7, 7])), [torch.zeros_like(part) for part in tensors(plain)]):
        out = cache._structure.build(parts)
        assert cache.get_batch([5, 0, 5], out=out) is out
        assert all(map(torch.equal, parts, tensors(plain)))
        assert all(map(torch.equal, tensors(out), tensors(plain)))


@pytest.mark.parametrize(
    ("kind", "out", "found"),
    [
        ("tensor", torch.zeros(3, *DIMS, dtype=torch.uint8), r"out is of shape \(3, .* of shape \(2, "),
        ("tensor", torch.zeros(2, *DIMS), "and torch.float32; give"),
        ("tensor", torch.zeros(2, *DIMS, dtype=torch.uint8, device="meta"), "on meta"),
        ("tensor", torch.zeros(4, *DIMS, dtype=torch.uint8)[::2], "with gaps"),
        ("tensor", torch.zeros(1, *DIMS, dtype=torch.uint8).expand(2, *DIMS), "with gaps"),
        ("tensor", bytearray(2), "out is a bytearray"),
        ("bfloat16", torch.zeros(2, 4, dtype=torch.int16), "torch.int16; give .* torch.bfloat16"),
        ("tuple", torch.zeros(2), "a tuple of 2 tensors is wanted, not a Tensor"),
        ("tuple", (torch.zeros(2, *DIMS, dtype=torch.uint8), torch.zeros(2)), r"out\[1\] is of shape"),
        ("dict", {"image": torch.zeros(2)}, r"a dict with \['image', 'label'\] is wanted, not \['image'\]"),
    ],
)
def test_a_batch_that_cannot_take_them_is_refused_by_name(kind: str, out: Any, found: str) -> None:
    cache = filled(*STRUCTURES[kind])
    with pytest.raises(InvalidValueError, match=found):
        cache.get_batch([1, 2], out=out)


def test_a_batch_to_be_filled_shares_no_memory_with_the_cache() -> None:
    cache = filled(DIMS, torch.uint8)
    out = torch.zeros(2, *DIMS, dtype=torch.uint8)
    cache.get_batch([1, 1], out=out).fill_(99)
    assert torch.equal(cache[1], torch.full(DIMS, 1, dtype=torch.uint8))


def test_a_batch_is_a_copy() -> None:
    cache = filled(DIMS, torch.uint8)
    cache.get_batch([1, 1]).fill_(99)
    assert torch.equal(cache.get_batch([1])[0], torch.full(DIMS, 1, dtype=torch.uint8))


def test_there_is_no_batch_if_one_is_missing_nor_of_ragged_samples() -> None:
    cache = SharedCache(8 * 192 / 2**30, 10, DIMS)
    cache.set_slot(0, image(0))
    assert cache.get_batch([0, 1]) is None, "one that was not set"
    assert cache.get_batch([0, 9]) is None, "one beyond the cache"
    assert cache.get_batch([]).shape == (0, *DIMS)
    for index in (10, -1):
        with pytest.raises(OutOfRangeError, match="10 samples"):
            cache.get_batch([0, index])
    ragged = SharedCache("1MB", 4, (None, 8, 8))
    ragged.set_slot(0, image(0))
    with pytest.raises(InvalidValueError, match="get_slots"):
        ragged.get_batch([0])
    with pytest.raises(InvalidValueError, match="get_slots"):
        ragged.get_batch([0], out=torch.zeros(1, 8, 8, 8))


def _write(cache: SharedCache, over: Any) -> None:
    torch.set_num_threads(1)
    for value in itertools.cycle(range(256)):
        if over.is_set():
            return
        cache.set_slot(2, torch.full((50_000,), value, dtype=torch.uint8), allow_overwrite=True)


def test_a_batch_never_has_half_a_sample() -> None:
    cache = SharedCache("1MB", 4, (50_000,))
    cache.set_slots(range(4), [torch.zeros(50_000, dtype=torch.uint8)] * 4)
    over = _FORK.Event()
    writer = _FORK.Process(target=_write, args=(cache, over), daemon=True)
    writer.start()
    try:
        seen: set[int] = set()
        deadline = time.monotonic() + 240
        while len(seen) < 30 and time.monotonic() < deadline:
            batch = cache.get_batch([0, 2])
            if batch is not None:
                assert batch[0].max() == 0
                assert batch[1].min() == batch[1].max()
                seen.add(int(batch[1][0]))
    finally:
        over.set()
        writer.join(60)
    assert len(seen) == 30, "hardly anything was replaced: this tests nothing"


class _Numbers(Dataset[Any]):
    def __init__(self) -> None:
        self.cache = filled(DIMS, torch.uint8)

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return self.cache[index]

    def __getitems__(self, indices: list[int]) -> Any:
        return self.cache.get_batch(indices)


@pytest.mark.parametrize("workers", [0, 2])
def test_loaders_take_it(workers: int) -> None:
    subset = Subset(_Numbers(), [6, 1, 3, 0, 7])
    loader = DataLoader(subset, batch_size=2, num_workers=workers, collate_fn=collate)
    assert [batch.shape[0] for batch in loader] == [2, 2, 1]
    assert [int(sample.flatten()[0]) for batch in loader for sample in batch] == [6, 1, 3, 0, 7]
