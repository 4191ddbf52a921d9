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
from concurrent.futures import Future

import torch
from torch.utils.data import Sampler

from castore import Store
from castore.adapters.torch.ranks import read_ranks
from castore.errors import InvalidValueError
from castore.names import check_name, require_several
from castore.records import AWAY
from castore.remote.outcomes import Pulled
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
        names: the name in the store that the dataset reads for each index.
        window: number of samples in a window. The default of 1000 shuffles as well as streaming datasets
            usually do, whose chunks of 64 MB have fewer samples of 64 KB or more.
        ahead: number of windows whose bytes come before they are read; 0 for none.
        pull: of `castore.Remote.begin_pull`, if names are still coming. In epoch 0 the windows then follow
            the order of the names, which is that of the pull, and each waits until its names have come.
        shuffle: False gives the order of the names, in all epochs.
        seed: of the order, with the epoch; the same in all ranks.
        rank, num_replicas: the rank and the world size. By default those of torchrun's environment variables,
            else 0 and 1. Each rank reads windows of its own, and all ranks the same number of samples: some
            samples come twice where the numbers do not come out even, as with `DistributedSampler`.

    Raises:
        InvalidValueError: a number makes no sense, there are fewer names than ranks, or ``names`` is one.
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
        pull: Future[Pulled] | None = None,
        shuffle: bool = True,
        seed: int = 0,
        rank: int | None = None,
        num_replicas: int | None = None,
    ) -> None:
        self._window, self._ahead = _at_least(1, window, "window"), _at_least(0, ahead, "ahead")
        self._seed = _at_least(0, seed, "seed")
        self._ranks = read_ranks(rank=rank, num_replicas=num_replicas)
        self._names = [check_name(name) for name in require_several(names, "WindowSampler")]
        if len(self._names) < self._ranks.world_size:
            raise InvalidValueError(
                f"{len(self._names)} names are too few for {self._ranks.world_size} ranks: give each one at"
                " least"
            )
        self._store = store if isinstance(store, Store) else Store(store, memory=0)
        self._pull, self._shuffle, self._epoch = pull, shuffle, 0
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

    def _groups(self) -> range:
        """Where the groups begin that have a window for each rank, in the order of the names."""
        return range(0, len(self._sorted), self._ranks.world_size * self._window)

    def _length(self, group: int) -> int:
        """Samples of each window of a group. The windows of the last one overlap if that does not come out
        even.
        """
        size = self._ranks.world_size
        return -(-min(len(self._sorted) - group, size * self._window) // size)

    def _windows(self) -> Iterator[list[int]]:
        """The indices of each window of this rank, in the order of this epoch."""
        groups, size = self._groups(), self._ranks.world_size
        generator = torch.Generator().manual_seed((self._seed + self._epoch) % 2**63)
        order = torch.randperm(len(groups), generator=generator).tolist()
        # Every rank draws the same numbers, so each window of a group is another rank's.
        shifts = torch.randint(size, (len(groups),), generator=generator).tolist()
        if not self._shuffle or (self._pull is not None and self._epoch == 0):
            order = list(range(len(groups)))
        for number in order:
            length = self._length(groups[number])
            part = (self._ranks.rank + self._shuffle * shifts[number]) % size
            begin = min(groups[number] + part * length, len(self._sorted) - length)
            window = self._sorted[begin : begin + length]
            if self._shuffle:
                window = [window[at] for at in torch.randperm(length, generator=generator).tolist()]
            yield window

    def _prepare(self, window: list[int]) -> bool:
        """Have the bytes of a window come; False if a pull has not brought all of its names yet."""
        is_coming = self._pull is not None and not self._pull.done()
        if self._pull is not None and not is_coming:
            self._pull.result()  # raises the error of a pull that has failed
        names = [self._names[index] for index in window]
        # One name first: a look at all of them takes as long as some reads.
        if is_coming and max(names) not in self._store:
            return False
        if is_coming or self._ahead:
            found = self._store.find_many(names)
            if is_coming and len(found) < len(set(names)):
                return False
            if self._ahead and (
                away := [name for name in names if name in found and found[name].blob.pack == AWAY]
            ):
                self._store.prefetch(away)
        return True


def _at_least(least: int, value: object, what: str) -> int:
    whole = as_whole(value)
    if whole is None or whole < least:
        raise InvalidValueError(f"{what} is a whole number of at least {least}, not {value!r:.80}")
    return whole
