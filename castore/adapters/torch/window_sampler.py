"""WindowSampler: an order of reading in which bytes can come before somebody wants them.

Samples in random order lie all over a remote, so the first batch would wait for nearly all of its bytes. The
sampler shuffles windows of neighbouring names, and the names in each window, as streaming datasets shuffle
chunks and the samples in each chunk. So bytes come in long requests, a window or two ahead of the reader.

Must never: read a sample. The order depends on the arguments alone, never on what has come.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence

import torch
from torch import distributed
from torch.utils.data import Sampler

from castore import Store
from castore.adapters.torch.ranks import read_ranks
from castore.errors import CacheWarning, InvalidValueError, warn
from castore.names import check_name, require_several
from castore.remote.outcomes import BackgroundPull
from castore.units import as_whole

# Seconds between two looks whether names have come.
_POLL_SECONDS = 0.01


class WindowSampler(Sampler[int]):
    """Indices in random order within windows of neighbouring names; the windows in random order, too.

    While a window is read, `Store.prefetch` has the bytes of the next ones come from a remote. A dataset that
    reads the store's names, or files of its mount, finds them there. Nothing is fetched for names whose bytes
    are in the store.

    Args:
        store: a `castore.Store`, or the folder of one.
        names: the name in the store that the dataset reads for each index. Neighbours are those in sorted
            order, whatever the order of the indices.
        window: number of samples in a window. The default of 1000 shuffles as well as streaming datasets
            usually do, whose chunks of 64 MB have fewer samples of 64 KB or more.
        ahead: number of windows whose bytes come before they are read; 0 for none.
        pull: of `castore.Remote.begin_pull`, if names are still coming. In epoch 0 the windows then follow
            the order of the names, which is that of the pull, and each waits until its names have come; on a
            node that had some names before, until all have. Nothing else may write these names meanwhile.
            Epoch 0 ends with the pull's error, if it has one. To resume in the middle of epoch 0, give a pull
            again: it tells the order.
        shuffle: False gives the sorted order of the names, in all epochs.
        seed: of the order, with the epoch; the same in all ranks.
        rank, num_replicas: the rank and the world size, both or neither. By default those of torch's process
            group if it is initialised, else those of torchrun's environment variables, else 0 and 1. Each
            rank reads windows of its own, and all ranks the same number of samples: some samples come twice
            where the numbers do not come out even, as with `DistributedSampler`.

    Raises:
        InvalidValueError: a number makes no sense, there are fewer names than ranks, ``names`` is one name or
            has no order, or ``pull`` is none.
        InvalidNameError: nothing can have one of the names.

    The idea of two levels of shuffling is that of CorgiPile (https://arxiv.org/abs/2206.05830), and of
    the datasets of MosaicML Streaming and LitData.

    >>> import tempfile
    >>> names = [f"samples/{number}" for number in range(10)]
    >>> sampler = WindowSampler(tempfile.mkdtemp(), names, window=5, seed=1)
    >>> list(sampler)
    [8, 9, 5, 6, 7, 1, 4, 2, 3, 0]
    >>> sampler.set_epoch(1)
    >>> sorted(list(sampler)[:5]) in ([0, 1, 2, 3, 4], [5, 6, 7, 8, 9])
    True
    """

    def __init__(
        self,
        store: Store | str | os.PathLike[str],
        names: Sequence[str],
        *,
        window: int = 1000,
        ahead: int = 2,
        pull: BackgroundPull | None = None,
        shuffle: bool = True,
        seed: int = 0,
        rank: int | None = None,
        num_replicas: int | None = None,
    ) -> None:
        self._window, self._ahead = _at_least(1, window, "window"), _at_least(0, ahead, "ahead")
        self._seed = _at_least(0, seed, "seed")
        self._rank, self._size = _rank_and_size(rank, num_replicas)
        if isinstance(names, set | frozenset) or hasattr(names, "columns"):
            raise InvalidValueError(
                f"names are in the order of the indices, and a {type(names).__name__} has none"
            )
        if pull is not None and not isinstance(pull, BackgroundPull):
            raise InvalidValueError(f"pull is what Remote.begin_pull returns, not a {type(pull).__name__}")
        self._names = [check_name(name) for name in require_several(names, "WindowSampler")]
        if len(self._names) < self._size:
            raise InvalidValueError(
                f"{len(self._names)} names are too few for {self._size} ranks: give each one at least"
            )
        self._store = store if isinstance(store, Store) else Store(store, memory=0)
        self._pull, self._shuffle, self._epoch, self._has_told = pull, shuffle, 0, False
        # Neighbours in this order are neighbours in the packs of a remote.
        self._sorted = sorted(range(len(self._names)), key=self._names.__getitem__)

    def set_epoch(self, epoch: int) -> None:
        """Have the next iteration give the order of that epoch, counted from 0."""
        self._epoch = _at_least(0, epoch, "epoch")

    def __len__(self) -> int:
        """The number of samples that this rank reads in an epoch."""
        return sum(map(self._length, self._groups()))

    def __iter__(self) -> Iterator[int]:
        windows, ready = list(self._windows()), 0
        for number, window in enumerate(windows):
            while True:
                last = min(len(windows), number + 1 + self._ahead)
                while ready < last and self._prepare(windows[ready]):
                    ready += 1
                if ready > number:
                    break
                time.sleep(_POLL_SECONDS)
            yield from window
        if self._pull is not None:
            self._pull.result()  # an epoch of names that were changed here meanwhile is none of the ref

    def _groups(self) -> range:
        """Where the groups begin that have a window for each rank, in the order of the names."""
        return range(0, len(self._sorted), self._size * self._window)

    def _length(self, group: int) -> int:
        """Samples of each window of a group. The windows of the last one overlap if that does not come out
        even.
        """
        return -(-min(len(self._sorted) - group, self._size * self._window) // self._size)

    def _windows(self) -> Iterator[list[int]]:
        """The indices of each window of this rank, in the order of this epoch."""
        groups, size = self._groups(), self._size
        generator = torch.Generator().manual_seed((self._seed + self._epoch) % 2**63)
        order = torch.randperm(len(groups), generator=generator).tolist()
        # Every rank draws the same numbers, so each window of a group is another rank's.
        shifts = torch.randint(size, (len(groups),), generator=generator).tolist()
        if not self._shuffle or (self._pull is not None and self._epoch == 0):
            order = list(range(len(groups)))
        for number in order:
            length = self._length(groups[number])
            part = (self._rank + self._shuffle * shifts[number]) % size
            begin = min(groups[number] + part * length, len(self._sorted) - length)
            window = self._sorted[begin : begin + length]
            if self._shuffle:
                window = [window[at] for at in torch.randperm(length, generator=generator).tolist()]
            yield window

    def _prepare(self, window: list[int]) -> bool:
        """Have the bytes of a window come; False if a pull has not brought all of its names yet."""
        pull = self._pull
        is_coming = pull is not None and not pull.done()
        if pull is not None and is_coming and not pull.is_first:
            return False  # nothing tells names that the pull will change from those that it has changed
        if pull is not None and not is_coming:
            pull.result()  # raises the error of a pull that has failed
        names = [self._names[index] for index in window]
        # One name first: a look at all of them takes as long as some reads.
        if is_coming and (max(names) not in self._store or self._lacks(names)):
            return False
        if pull is not None and not is_coming and not self._has_told and self._lacks(names):
            self._tell_of(set(names) - self._store.find_many(names).keys())
        if self._ahead:
            self._store.prefetch(names)
        return True

    def _lacks(self, names: list[str]) -> bool:
        return self._store.index.count_of(names) < len(set(names))

    def _tell_of(self, missing: set[str]) -> None:
        if missing:
            self._has_told = True
            warn(
                f"{min(missing)!r} and perhaps other names are not in {self._store.path}, though the pull has"
                " ended: does the ref have them, below that prefix?",
                CacheWarning,
            )


def _rank_and_size(rank: int | None, num_replicas: int | None) -> tuple[int, int]:
    if (rank is None) != (num_replicas is None):
        raise InvalidValueError("give both rank and num_replicas, or neither")
    if rank is None and distributed.is_available() and distributed.is_initialized():
        rank, num_replicas = distributed.get_rank(), distributed.get_world_size()
    ranks = read_ranks(rank=rank, num_replicas=num_replicas)
    return ranks.rank, ranks.world_size


def _at_least(least: int, value: object, what: str) -> int:
    whole = as_whole(value)
    if whole is None or whole < least:
        raise InvalidValueError(f"{what} is a whole number of at least {least}, not {value!r:.80}")
    return whole
