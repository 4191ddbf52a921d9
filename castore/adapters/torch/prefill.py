"""Fills a cache ahead of training: reads the missing samples in batches, optionally in worker processes, with
a bar.

Ranks that fill one cache together begin at different places and skip samples that are cached by then:
together they read each sample about once, and one rank alone still fills the whole cache. Assumes a dataset
that knows which samples it holds. Must never count these reads as uses.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Protocol

import torch.utils.data
from tqdm.auto import tqdm

from castore.adapters.torch.ranks import read_ranks


class Fillable(Protocol):
    """The interface of a cached dataset that can be filled."""

    def __len__(self) -> int: ...

    def _held(self, index: int) -> bool:
        """Whether the sample is cached."""

    def _cache(self, indices: list[int]) -> int:
        """Read these samples and keep those that fit; return how many were kept."""


def fill(dataset: Fillable, *, num_workers: int, batch_size: int, progress: bool | None) -> int:
    """Cache the missing samples until all are cached or the room ends; return how many were added."""
    ranks = read_ranks()
    start = len(dataset) * ranks.local_rank // ranks.local_world_size
    missing = [index for index in (*range(start, len(dataset)), *range(start)) if not dataset._held(index)]
    added = 0
    # tqdm's None shows a bar only on a terminal.
    with tqdm(
        total=len(dataset),
        initial=len(dataset) - len(missing),
        desc="caching",
        unit=" samples",
        disable=None if progress is None else not progress,
    ) as bar:
        for asked, kept in _batches(dataset, missing, num_workers, batch_size):
            added += kept
            bar.update(asked)
            if asked and not kept:
                bar.set_postfix_str("full")
                break
    return added


def _batches(
    dataset: Fillable, missing: list[int], num_workers: int, batch_size: int
) -> Iterator[tuple[int, int]]:
    """For each batch: how many samples were read, and how many of those were kept."""
    loader = torch.utils.data.DataLoader(
        _Batches(dataset, missing, batch_size), batch_size=None, num_workers=num_workers,
        # Of the program's own generator it would draw a number: training would go on with others.
        generator=torch.Generator().manual_seed(torch.initial_seed()),
    )  # fmt: skip
    yield from loader


class _Batches(torch.utils.data.Dataset[tuple[int, int]]):
    """Batches of samples that the loader's worker reads and keeps: only counts travel back."""

    def __init__(self, dataset: Fillable, missing: list[int], batch_size: int) -> None:
        self._dataset = dataset
        self._missing = missing
        self._batch_size = batch_size

    def __len__(self) -> int:
        return math.ceil(len(self._missing) / self._batch_size)

    def __getitem__(self, number: int) -> tuple[int, int]:
        batch = self._missing[number * self._batch_size : (number + 1) * self._batch_size]
        batch = [index for index in batch if not self._dataset._held(index)]
        return len(batch), self._dataset._cache(batch) if batch else 0
