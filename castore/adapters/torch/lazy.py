"""LazyShardDataset: each rank, or each node, reads its own shard of a dataset and caches it from the first
epoch on.

The samples of the shard travel to the node's two-level cache one by one, as training asks for them. From the
second epoch on the source is left alone. `shard_plan` assigns the samples, `shard_sizes` decides how many
each shard has, `BiLevelCachedDataset` caches, `epoch_progress` keeps the epoch; this module joins them. The
class and its arguments are BiLevelCache's (Jay Rothenberger). Assumes that all ranks create the dataset with
the same arguments. Must never need a process group, let an epoch change the assignment of samples, nor leave
samples out silently.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from torch.utils.data import Dataset

from castore.adapters.torch.bilevel import BiLevelCachedDataset, BiLevelStats
from castore.adapters.torch.epoch_progress import EpochProgress, dump_state, parse_state
from castore.adapters.torch.level_sizes import Size
from castore.adapters.torch.levels import DiskLevel, MemoryLevel
from castore.adapters.torch.prefill import fill
from castore.adapters.torch.ranks import read_ranks
from castore.adapters.torch.shard_plan import Indices, Step, epoch_order, remaining, slice_of
from castore.adapters.torch.shard_sizes import (
    check_least,
    cut_shards,
    find_rooms,
    ranks_on_each,
    sample_bytes,
    whole_shards,
)
from castore.adapters.torch.wrapper import check_index
from castore.errors import InvalidValueError, UnhashableError, warn
from castore.units import as_whole, format_size

Mode = Literal["rank", "node", "disk"]
"""The ``mode`` of a `LazyShardDataset`."""
Balance = Literal["equal", "room"]
"""The ``balance`` of a `LazyShardDataset`."""


class _View(NamedTuple):
    """The indices that the epoch visits, and the number of changes at which they were computed."""

    changes: int
    order: memoryview


class LazyShardDataset(Dataset[Any]):
    """This rank's shard of a dataset, read on demand and kept in the RAM and on the disk of its node.

    Args:
        data: anything with a length and integer indices: a map-style dataset, a list, a NumPy or zarr array.
        shuffle: visit the shard in another order each epoch (`set_epoch`); else by rising index.
        disk_size, memory_size: limits of the node's cache, for all its ranks together: bytes, a text
            ("100GB"), or as a float the fraction of the free space.
        overflow: None for no limit. Otherwise a shard may exceed its cache's capacity by this fraction at
            most (0.1: by a tenth); the rest of the shard is left out, with one warning. The capacity in
            samples is estimated from a few samples, uncompressed.
        min_elements: samples that every shard must have at least.
        rank, num_replicas: this rank and the number of ranks; by default from torchrun's variables.
        seed: decides the assignment of samples to shards, and the orders.
        mode: "rank" gives each rank a shard; "node" gives each node a shard that its ranks share (through a
            `DistributedSampler` over `LOCAL_WORLD_SIZE` replicas); "disk" is "node" without the level in RAM.
            In every mode a node has one cache.
        disk_cache_path: a folder on a local disk; see `BiLevelCachedDataset`.
        balance: "equal" shards differ by one sample at most; "room" sizes shards in proportion to the room of
            their nodes, which the nodes exchange if there is a process group.
        rooms: the bytes that each node can cache, where there is no process group to ask.
        write_through, name, key, remote: as in `BiLevelCachedDataset`.

    Raises:
        InvalidValueError: an argument makes no sense, `min_elements` cannot be met, or nodes that may differ
            have no process group to exchange their room.
        CastoreError: what `BiLevelCachedDataset` raises.
    """

    def __init__(
        self,
        data: Any,
        shuffle: bool = False,
        disk_size: Size = 0.8,
        memory_size: Size = 0.5,
        overflow: float | None = None,
        min_elements: int = 0,
        rank: int | None = None,
        num_replicas: int | None = None,
        seed: int = 13,
        mode: Mode = "rank",
        disk_cache_path: str | os.PathLike[str] = "./castore-shards",
        *,
        balance: Balance = "equal",
        rooms: Sequence[int | str] | None = None,
        write_through: bool = False,
        name: str | None = None,
        key: object = None,
        remote: str | None = None,
    ) -> None:
        _check_arguments(mode, balance, overflow, seed)
        self.data = data
        self.shuffle = bool(shuffle)
        self.seed = int(seed)
        self.mode = mode
        #: The place of this process in the job.
        self.ranks = read_ranks(rank=rank, num_replicas=num_replicas)
        #: The cache of the node, over the indices of the whole dataset.
        self.cache = BiLevelCachedDataset(
            data,
            0 if mode == "disk" else memory_size,
            disk_size,
            disk_cache_path,
            write_through=write_through,
            name=name,
            key=key,
            remote=remote,
        )
        self._n = len(self.cache)
        try:
            alike = not any(isinstance(size, float) for size in (memory_size, disk_size))
            self._share_out(balance, rooms, overflow, min_elements, alike)
            self._progress = EpochProgress()
        except BaseException:
            self.cache.close()
            raise
        self._members: Indices | None = None
        self._view: _View | None = self._compute_view()

    def _share_out(
        self,
        balance: Balance,
        rooms: Sequence[int | str] | None,
        overflow: float | None,
        least: int,
        alike: bool,
    ) -> None:
        """Decide the size of every shard; the result is the same on every rank."""
        each_rank = self.mode == "rank"
        self._shard = self.ranks.rank if each_rank else self.ranks.node
        shard_rooms = None
        if balance == "room" or overflow is not None:
            same = alike and balance == "equal"
            nodes = find_rooms(self.cache._capacity, self.ranks, rooms, same_everywhere=same)
            shard_rooms = nodes.rooms_of_ranks() if each_rank else nodes.rooms
        elif rooms is not None:
            raise InvalidValueError('rooms decide nothing here; give balance="room" or overflow with them')
        shards = self.ranks.world_size if each_rank else self.ranks.nodes
        #: The weights of the shards' sizes, and the shards of a whole epoch.
        self._weights = shard_rooms if balance == "room" and shard_rooms else (1,) * shards
        self._whole = whole_shards(self._n, self._weights)
        if overflow is not None and shard_rooms is not None:
            if balance == "equal":
                # Equal shards stay equal where the caches differ: ranks that step together would wait for
                # ever.
                shard_rooms = (min(shard_rooms),) * shards
            each = sample_bytes(self.data, self._n, self.seed)
            self._whole = cut_shards(self._whole.sizes, shard_rooms, each, overflow)
            self._warn_cut(each)
        check_least(self._whole, least, shard_rooms)

    def _warn_cut(self, each: float) -> None:
        step, shard = self._whole, self._shard
        cut = sum(step.sizes) - sum(step.kept)
        if cut:
            warn(
                f"{cut} of {self._n} samples are left out, because the caches do not hold them: shard "
                f"{shard} keeps {step.kept[shard]} of {step.sizes[shard]}, at {format_size(round(each))} a "
                "sample; raise memory_size or disk_size, or take overflow=None for whole shards",
                UserWarning,
            )

    # The order of an epoch ----------------------------------------------------------------------------------

    def _compute_view(self) -> _View:
        """The order of the epoch that the progress names."""
        changes, epoch, steps = self._progress.read()
        last = steps[-1] if steps else self._whole
        members = self._members_of(epoch, steps[:-1], last)
        order = epoch_order(
            members,
            shuffle=self.shuffle,
            seed=self.seed,
            epoch=epoch,
            step=max(0, len(steps) - 1),
            shard=self._shard,
        )
        return _View(changes, members[order[last.consumed[self._shard] :]].data)

    def _members_of(self, epoch: int, before: Sequence[Step], last: Step) -> Indices:
        whole = not before and (last.sizes, last.kept) == (self._whole.sizes, self._whole.kept)
        if whole and self._members is not None:
            return self._members
        pool = remaining(self._n, self.seed, epoch, before, shuffle=self.shuffle)
        # A copy: a slice would keep the indices of all shards in memory.
        members: Indices = pool[slice_of(last.sizes, self._shard)][: last.kept[self._shard]].copy()
        if whole:
            self._members = members
        return members

    def _order(self) -> memoryview:
        view = self._view
        if view is None or view.changes != self._progress.changes:
            view = self._view = self._compute_view()
        return view.order

    @property
    def indices(self) -> Indices:
        """The indices of `data` that this shard visits in this epoch, in their order."""
        return np.array(self._order())

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch: another order if shuffled, always the same samples. Call it between epochs.

        Reaches the copies in DataLoader workers, persistent ones too. Does nothing for the epoch that
        `load_state_dict` resumed; any other epoch is visited whole.

        Raises:
            InvalidValueError: the epoch is no whole number from 0 up.
        """
        if isinstance(epoch, bool) or not hasattr(epoch, "__index__") or epoch < 0:
            raise InvalidValueError(f"the epoch is {epoch!r}; give a whole number from 0 up")
        epoch = int(epoch)
        if epoch != self.epoch:
            self._progress.write(epoch, [])

    @property
    def epoch(self) -> int:
        """The epoch that is being visited."""
        return self._progress.read()[1]

    # Resuming -----------------------------------------------------------------------------------------------

    def state_dict(self, consumed: int | Sequence[int] | None = None) -> dict[str, Any]:
        """The position in the epoch, in plain numbers. Any rank's state serves all ranks, and any number of
        them.

        Args:
            consumed: samples that this rank, and every other, has taken since the epoch began or was resumed;
                or a list of the samples taken from each shard, where ranks do not step together. The count
                follows this dataset's own order, so the loader must not shuffle. None where the loader keeps
                its own place, as torchdata's `StatefulDataLoader` does.

        Raises:
            InvalidValueError: more samples were consumed than there are, or that is no number of samples.
        """
        _, epoch, steps = self._progress.read()
        last = steps[-1] if steps else self._whole
        if consumed is not None:
            last = last.advanced(self._taken(consumed, last))
        return dump_state(self._n, self.seed, self.shuffle, epoch, [*steps[:-1], last])

    def _taken(self, consumed: int | Sequence[int], step: Step) -> list[int]:
        """Samples taken from each shard."""
        given = [as_whole(count) for count in (consumed if isinstance(consumed, Sequence) else [consumed])]
        counts = [count for count in given if count is not None and count >= 0]
        if len(counts) < len(given):
            raise InvalidValueError(f"consumed is a number of samples, or a list of such, not {consumed!r}")
        if isinstance(consumed, Sequence):
            return counts
        sharing = 1 if self.mode == "rank" else ranks_on_each(self.ranks)
        taken, most = counts[0] * sharing, max(step.left())
        # Ranks that run out before others are normal, and so are samplers that repeat samples to come out
        # even.
        if taken >= most + sharing:
            raise InvalidValueError(
                f"consumed={consumed} is more than this epoch had left: {most} samples in the largest shard, "
                f"for {sharing} ranks; count from the last load_state_dict or set_epoch on"
            )
        return [min(taken, left) for left in step.left()]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where a state was saved. Until another epoch is set, only the rest of this epoch is
        visited.

        In a world of as many shards, each shard continues with its own samples; otherwise the samples that
        all shards had left are distributed anew. Create samplers that take the length when they are made,
        such as `DistributedSampler`, after this call.

        Raises:
            InvalidValueError: the state is none, or belongs to other data, another seed or another order.
        """
        epoch, steps = parse_state(state, self._n, self.seed, self.shuffle)
        if steps:
            last = steps[-1]
            # The kept sizes of a whole epoch may have changed with the room; those of this epoch are in the
            # state.
            again = self._whole if len(steps) == 1 else whole_shards(sum(last.sizes), self._weights)
            if last.sizes != again.sizes:
                steps.append(whole_shards(sum(last.left()), self._weights))
        if (epoch, steps) != self._progress.read()[1:]:
            self._progress.write(epoch, steps)

    # Samples ------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._order())

    def __getitem__(self, index: int) -> Any:
        order = self._order()
        return self.cache[order[check_index(index, len(order))]]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        order = self._order()
        return self.cache.__getitems__([order[check_index(index, len(order))] for index in indices])

    def __iter__(self) -> Iterator[Any]:
        return (self.cache[index] for index in self._order())

    def prefetch(self, indices: Iterable[int]) -> int:
        """Read those of these samples of the shard that are not cached; return how many were added."""
        order = self._order()
        return self.cache.prefetch([order[check_index(index, len(order))] for index in indices])

    def fill(self, *, num_workers: int = 0, batch_size: int = 64, progress: bool | None = None) -> int:
        """Read the samples of the shard that are not cached, until the cache is full; return how many were
        added.

        Args:
            num_workers, batch_size, progress: as in `BiLevelCachedDataset.fill`.
        """
        return fill(self, num_workers=num_workers, batch_size=batch_size, progress=progress)

    def _held(self, place: int) -> bool:
        return self.cache._held(self._order()[place])

    def _cache(self, places: list[int]) -> int:
        order = self._order()
        return self.cache._cache([order[place] for place in places])

    # The cache ----------------------------------------------------------------------------------------------

    @property
    def memory_cache(self) -> MemoryLevel | None:
        """The node's level in RAM, with `hits.value` and `misses.value`; None in mode "disk"."""
        return self.cache.memory_cache

    @property
    def disk_cache(self) -> DiskLevel | None:
        """The node's level on disk."""
        return self.cache.disk_cache

    def stats(self) -> BiLevelStats:
        """The counters and contents of the node's levels, over all its ranks and their workers."""
        return self.cache.stats()

    def close(self) -> None:
        """Leave the node's cache. The samples on disk stay."""
        self.cache.close()
        self._progress.close()

    def __enter__(self) -> LazyShardDataset:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __castore_key__(self) -> object:
        # A cache around this dataset would find another epoch's samples at the same places.
        raise UnhashableError(
            "the samples of a LazyShardDataset change places every epoch, and it caches them itself; to "
            "cache them elsewhere too, wrap what it reads: LazyShardDataset(CachedDataset(data, ...))"
        )

    def __getstate__(self) -> dict[str, Any]:
        # Each process computes the indices again: workers receive only numbers and names.
        return {**self.__dict__, "_view": None, "_members": None}


def _check_arguments(mode: str, balance: str, overflow: float | None, seed: int) -> None:
    for name, value, known in (("mode", mode, get_args(Mode)), ("balance", balance, get_args(Balance))):
        if value not in known:
            raise InvalidValueError(f"{name} is {value!r}; take one of {', '.join(map(repr, known))}")
    if isinstance(seed, bool) or not hasattr(seed, "__index__"):
        raise InvalidValueError(f"the seed is {seed!r}; give a whole number")
    if overflow is not None and not 0 <= overflow < math.inf:
        raise InvalidValueError(
            f"overflow is {overflow!r}; give the fraction by which a shard may exceed its cache, 0.0 for "
            "none, or None"
        )
