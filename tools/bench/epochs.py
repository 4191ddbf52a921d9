"""A process that reads a dataset through a `DataLoader`, as many epochs as it is told to.

    python -m tools.bench.epochs CONTESTANT SAMPLES WORKERS

It gets its dataset warm, checks every sample, and says so with a line on standard output. Then, for each number on
standard input, it reads so many epochs and answers with the seconds of one. Contestants need different environments, so what one
needs is imported there alone, and all run in processes like this one.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

#: One sample: 12 KB.
SHAPE = (3, 64, 64)
_NUMEL = 3 * 64 * 64
BATCH = 64
_SEED = 20_26


class Source:
    """What samples are made from; once `sealed`, nobody may ask any more: all must come from the cache."""

    def __init__(self, samples: int) -> None:
        # Workers that were forked before see it too.
        self.sealed = multiprocessing.get_context("fork").Event()
        generator = torch.Generator().manual_seed(_SEED)
        self._bytes = torch.randint(0, 256, (samples + _NUMEL,), dtype=torch.uint8, generator=generator)

    def __call__(self, index: int) -> torch.Tensor:
        if self.sealed.is_set():
            raise RuntimeError(f"sample {index} is not in the cache")
        # They overlap, but no two are the same, and they cost next to nothing to make.
        return self._bytes[index : index + _NUMEL].reshape(SHAPE).clone()


class OneByOne(Dataset[torch.Tensor]):
    """As stocaching's README has it: look into the cache, else load and set. Any cache with its surface."""

    def __init__(self, cache: Any, source: Source, samples: int) -> None:
        self.cache, self.source, self.samples = cache, source, samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> torch.Tensor:
        sample: torch.Tensor | None = self.cache.get_slot(index)
        if sample is None:
            sample = self.source(index)
            self.cache.set_slot(index, sample)
        return sample


class Batched(OneByOne):
    """The same with castore's `get_slots`: the loader hands over the indices of a batch at once."""

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        samples: list[torch.Tensor | None] = self.cache.get_slots(indices)
        return [
            self[index] if sample is None else sample for index, sample in zip(indices, samples, strict=True)
        ]


def _castore(source: Source, samples: int) -> OneByOne:
    return OneByOne(_castore_cache(samples), source, samples)


def _castore_batched(source: Source, samples: int) -> OneByOne:
    return Batched(_castore_cache(samples), source, samples)


def _castore_cache(samples: int) -> Any:
    from castore.adapters.torch import SharedCache

    return SharedCache(_gib(samples), samples, SHAPE, torch.uint8)


def _stocaching(source: Source, samples: int) -> OneByOne:
    import stocaching  # type: ignore[import-not-found]

    return OneByOne(stocaching.SharedCache(_gib(samples), samples, SHAPE, torch.uint8), source, samples)


def _tensors(source: Source, samples: int) -> TensorDataset:
    return TensorDataset(torch.stack([source(index) for index in range(samples)]))


def _gib(samples: int) -> int:
    # stocaching takes whole GiB only; memory is taken for the samples there are.
    return 1 + samples * _NUMEL // 2**30


CONTESTANTS: dict[str, Callable[[Source, int], Dataset[Any]]] = {
    "castore": _castore,
    "castore-batched": _castore_batched,
    "stocaching": _stocaching,
    "tensors": _tensors,
}


def main() -> None:
    contestant, samples, workers = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    # stocaching prints: what it says goes where errors go, and the answers where nobody else writes.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    source = Source(samples)
    loader = _loader(CONTESTANTS[contestant](source, samples), workers)
    expected = sum(_checksum(source(index)) for index in range(samples))
    _read(loader, 1)
    source.sealed.set()
    if sum(_checksum(sample) for batch in loader for sample in _images(batch)) != expected:
        raise RuntimeError(f"{contestant} gave other samples than it was given")
    answers.write("ready\n")
    for line in sys.stdin:
        answers.write(f"{_read(loader, int(line))}\n")


def _loader(dataset: Dataset[Any], workers: int) -> DataLoader[Any]:
    return DataLoader(
        dataset,
        BATCH,
        shuffle=True,
        num_workers=workers,
        persistent_workers=workers > 0,
        # What Linux has done until now, and stocaching needs.
        multiprocessing_context="fork" if workers else None,
        generator=torch.Generator().manual_seed(_SEED),
    )


def _images(batch: Any) -> torch.Tensor:
    # A TensorDataset's samples are tuples of one.
    images: torch.Tensor = batch[0] if isinstance(batch, list) else batch
    return images


def _checksum(sample: torch.Tensor) -> int:
    # In any order they add up to the same. (torch's sum makes eight bytes of each first, which the heap remembers.)
    return zlib.crc32(sample.numpy().data)


def _read(loader: DataLoader[Any], epochs: int) -> float:
    """Some epochs; returns the seconds of one."""
    start = time.perf_counter()
    for _ in range(epochs):
        for _ in loader:
            pass
    return (time.perf_counter() - start) / epochs


if __name__ == "__main__":
    main()
