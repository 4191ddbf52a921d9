"""Decides how many samples each shard of a job gets: by number, by the room of the nodes, and within that
room.

Every rank must come to the same answer, or samples would be visited twice or never. So values that differ
between nodes are exchanged through the process group, or given by hand. A value that is neither is an error,
never a guess.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from castore.adapters.torch.ranks import Ranks
from castore.adapters.torch.samples import pack
from castore.adapters.torch.shard_plan import Step, permutation, shard_sizes
from castore.errors import InvalidValueError
from castore.units import format_size, parse_size

# The number of samples read from the source to learn how large a sample is.
_SAMPLES = 8


class Nodes(NamedTuple):
    """The nodes of a job: the node of each rank, and the bytes that each node can cache."""

    of_rank: tuple[int, ...]
    rooms: tuple[int, ...]

    def rooms_of_ranks(self) -> tuple[int, ...]:
        """The bytes for each rank: the ranks of a node share its bytes equally."""
        return tuple(self.rooms[node] // self.of_rank.count(node) for node in self.of_rank)


def find_rooms(own: int, ranks: Ranks, given: Sequence[int | str] | None, *, same_everywhere: bool) -> Nodes:
    """The bytes that every node can cache; the answer is the same on all ranks.

    Args:
        own: bytes that this node can cache.
        given: the bytes of each node, where the caller knows them.
        same_everywhere: all nodes can be assumed to have as much as this one.

    Raises:
        InvalidValueError: the nodes may differ, and without a process group they cannot exchange their room.
    """
    if given is not None:
        return _by_number(ranks, [parse_size(room) for room in given])
    if ranks.nodes == 1:
        return _by_number(ranks, [own])
    gathered = _gather((ranks.node, own))
    if gathered is not None:
        return _checked(gathered, ranks)
    if same_everywhere:
        return _by_number(ranks, [own] * ranks.nodes)
    raise InvalidValueError(
        f"the room of the {ranks.nodes} nodes decides about the shards, and they cannot tell each other "
        "theirs: call torch.distributed.init_process_group before, or give rooms=[...], the bytes that each "
        "node can cache"
    )


def ranks_on_each(ranks: Ranks) -> int:
    """How many ranks every node runs, if all nodes run as many.

    Raises:
        InvalidValueError: the nodes run different numbers, so that this process cannot place the ranks.
    """
    # A world of one replica, given by the caller, has one rank on this node, whatever runs beside it.
    here = min(ranks.local_world_size, ranks.world_size)
    if here * ranks.nodes != ranks.world_size:
        raise InvalidValueError(
            f"{ranks.nodes} nodes run {ranks.world_size} ranks, and {ranks.local_world_size} of them here, "
            "so not all alike: call torch.distributed.init_process_group before; for consumed, give a list"
        )
    return here


def _by_number(ranks: Ranks, rooms: Sequence[int]) -> Nodes:
    here = ranks_on_each(ranks)
    if len(rooms) != ranks.nodes:
        raise InvalidValueError(
            f"rooms has {len(rooms)} sizes for {ranks.nodes} nodes; give one for each node"
        )
    return Nodes(tuple(rank // here for rank in range(ranks.world_size)), tuple(rooms))


def _gather(own: tuple[int, int]) -> list[tuple[int, int]] | None:
    """The values of all ranks; None without a process group."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        return None
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, own)
    return gathered


def _checked(gathered: list[tuple[int, int]], ranks: Ranks) -> Nodes:
    found = {node for node, _ in gathered}
    if len(gathered) != ranks.world_size or found != set(range(ranks.nodes)):
        raise InvalidValueError(
            f"the process group has {len(gathered)} ranks on nodes {sorted(found)}, but this rank was told "
            f"of {ranks.world_size} ranks on {ranks.nodes} nodes; leave rank and num_replicas out, or give "
            "rooms=[...]"
        )
    # The ranks of a node measure at slightly different moments: all of them can count on the least room.
    rooms = tuple(min(room for node, room in gathered if node == number) for number in range(ranks.nodes))
    return Nodes(tuple(node for node, _ in gathered), rooms)


def sample_bytes(data: Any, n: int, seed: int) -> float:
    """The mean size of a cached sample, from a few samples that every rank picks alike."""
    picked = permutation(n, seed)[:_SAMPLES].tolist()
    return math.fsum(len(pack(data[index])) for index in picked) / len(picked) if picked else 1.0


def whole_shards(n: int, weights: Sequence[int]) -> Step:
    """All `n` samples in shards of these weights."""
    sizes = shard_sizes(n, weights)
    return Step(sizes, sizes, (0,) * len(sizes))


def cut_shards(sizes: Sequence[int], rooms: Sequence[int], each: float, overflow: float) -> Step:
    """Shards of these sizes, each cut to the capacity of its room plus the fraction `overflow` of it.

    Args:
        each: bytes of a sample.
    """
    held = [math.floor(room / each * (1 + overflow)) for room in rooms]
    kept = tuple(min(size, count) for size, count in zip(sizes, held, strict=True))
    return Step(tuple(sizes), kept, (0,) * len(kept))


def check_least(step: Step, least: int, rooms: Sequence[int] | None) -> None:
    """Refuse shards with fewer samples than the caller needs.

    Args:
        rooms: the bytes to which each shard was cut.

    Raises:
        InvalidValueError: a shard is smaller; the message has the reason.
    """
    shard = min(range(len(step.kept)), key=step.kept.__getitem__)
    size, kept = step.sizes[shard], step.kept[shard]
    if kept >= least:
        return
    if size >= least and rooms is not None:
        raise InvalidValueError(
            f"min_elements is {least}, but shard {shard} can keep {kept} of its {size} samples in "
            f"{format_size(rooms[shard])} of cache; raise memory_size, disk_size or overflow, or lower "
            "min_elements"
        )
    raise InvalidValueError(
        f"min_elements is {least}, but {sum(step.sizes)} samples in {len(step.sizes)} shards leave {kept} "
        f"for shard {shard}; lower min_elements, or use fewer shards"
    )
