"""Filling a cache ahead of training: the missing samples, read in batches, by worker processes if wanted, with a bar.

Ranks that fill one cache at once each begin in another place and skip what is there by then: together they read each
sample about once, and one of them alone still fills it all. Assumes a dataset that knows what it holds; must not count
what it reads as uses.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, Protocol, TypeVar

import torch.utils.data
from tqdm.auto import tqdm

from castore.adapters.torch.changes import Changes
from castore.adapters.torch.ranks import read_ranks
from castore.adapters.torch.wrapper import DatasetWrapper
from castore.errors import OutOfRangeError


class Fillable(Protocol):
    """What a cached dataset shows to be filled."""

    def __len__(self) -> int: ...

    def _held(self, index: int) -> bool:
        """Whether the sample is cached."""

    def _cache(self, indices: list[int]) -> int:
        """Read these samples and keep what there is room for; how many were kept."""


Self = TypeVar("Self", bound="CachingWrapper")


class CachingWrapper(DatasetWrapper):
    """A wrapper that keeps samples, can be filled ahead of training, and is closed at the end.

    Args:
        data: the dataset.
        key: what the user has said that identifies it; None where its fingerprint does, which then has to hold.
    """

    def __init__(self, data: Any, key: object) -> None:
        super().__init__(data)
        self._changes = Changes(data, key is None)

    def _source(self, indices: Sequence[int]) -> list[Any]:
        """As in DatasetWrapper.

        Raises:
            InvalidValueError: the dataset has been changed since it was wrapped.
        """
        with self._changes.reading():
            return super()._source(indices)

    def _sample(self, index: int) -> Any:
        """One sample of the wrapped dataset; see `_source`."""
        with self._changes.reading():
            return self._data[index]

    def __len__(self) -> int:
        self._changes.glance()
        return super().__len__()

    def __getitem__(self, index: Any) -> Any:
        try:
            return super().__getitem__(index)
        except OutOfRangeError:
            self._changes.glance()  # which says so if the dataset has grown
            raise

    def __getitems__(self, indices: Sequence[Any]) -> list[Any]:
        try:
            return super().__getitems__(indices)
        except OutOfRangeError:
            self._changes.glance()
            raise

    def _held(self, index: int) -> bool:
        """Whether the sample is cached."""
        raise NotImplementedError

    def _cache(self, indices: list[int]) -> int:
        """Read these samples and keep what there is room for; how many were kept."""
        raise NotImplementedError

    def close(self) -> None:
        """Let go of what is shared with other processes, and of the store."""
        raise NotImplementedError

    def prefetch(self, indices: Iterable[int]) -> int:
        """Read those of ``indices`` that are not cached, and keep what there is room for; how many were added."""
        checked = dict.fromkeys(self._index(index) for index in indices)
        missing = [index for index in checked if not self._held(index)]
        return self._cache(missing) if missing else 0

    def fill(self, *, num_workers: int = 0, batch_size: int = 64, progress: bool | None = None) -> int:
        """Read all that is not cached, until there is no more room; how many samples were added.

        Args:
            num_workers: processes that read, as in `torch.utils.data.DataLoader`.
            batch_size: samples that one of them reads at a time.
            progress: show a bar; None: on a terminal.
        """
        return fill(self, num_workers=num_workers, batch_size=batch_size, progress=progress)

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def fill(dataset: Fillable, *, num_workers: int, batch_size: int, progress: bool | None) -> int:
    """Cache what is missing, until all is there or there is no more room; how many samples were added."""
    ranks = read_ranks()
    start = len(dataset) * ranks.local_rank // ranks.local_world_size
    missing = [index for index in (*range(start, len(dataset)), *range(start)) if not dataset._held(index)]
    added = 0
    # tqdm's None: a bar where somebody looks at a terminal.
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
    """For each batch: how many samples had to be read, and how many of them were kept."""
    loader = torch.utils.data.DataLoader(
        _Batches(dataset, missing, batch_size), batch_size=None, num_workers=num_workers
    )
    yield from loader


class _Batches(torch.utils.data.Dataset[tuple[int, int]]):
    """Batches of samples to be read and kept wherever the loader's worker is: nothing but counts travels back."""

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
