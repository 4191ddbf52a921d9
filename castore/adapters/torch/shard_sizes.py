"""How many samples each shard of a job gets: by number, by the room that the nodes have, and within what they hold.

Every rank must come to the same answer, or samples would be visited twice or never. So whatever differs between nodes
is exchanged through the process group, or given by hand, and what is neither is an error, never a guess.
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

# Read from the source to learn how large a sample is.
_SAMPLES = 8


class Nodes(NamedTuple):
    """The nodes of a job: which of them each rank runs on, and the bytes that each can cache."""

    of_rank: tuple[int, ...]
    rooms: tuple[int, ...]

    def rooms_of_ranks(self) -> tuple[int, ...]:
        """The bytes for each rank: those of a node are shared out among its ranks."""
        return tuple(self.rooms[node] // self.of_rank.count(node) for node in self.of_rank)


def find_rooms(own: int, ranks: Ranks, given: Sequence[int | str] | None, *, same_everywhere: bool) -> Nodes:
    """What every node can cache, the same answer on all ranks.

    Args:
        own: bytes that this node can cache.
        given: the bytes of each node, where the caller knows them.
        same_everywhere: all nodes can be taken to have what this one has.

    Raises:
        InvalidValueError: the nodes may differ, and there is no way to ask them.
    """
    if given is not None:
        return _by_number(ranks, [parse_size(room) for room in given])
    if ranks.nodes == 1:
        return _by_number(ranks, [own])
    gathered = _gather((ranks.node, own))
    if gathered is not None:
        return _as_told(gathered, ranks)
    if same_everywhere:
        return _by_number(ranks, [own] * ranks.nodes)
    raise InvalidValueError(
        f"the room of the {ranks.nodes} nodes decides about the shards, and they cannot tell each other theirs: call "
        "torch.distributed.init_process_group before, or give rooms=[...], the bytes that each node can cache"
    )


def ranks_on_each(ranks: Ranks) -> int:
    """How many ranks every node runs, if all run as many.

    Raises:
        InvalidValueError: they do not, so nobody here knows which rank is where.
    """
    # One who says "I am the only replica" is the only one, whatever runs beside it.
    here = min(ranks.local_world_size, ranks.world_size)
    if here * ranks.nodes != ranks.world_size:
        raise InvalidValueError(
            f"{ranks.nodes} nodes run {ranks.world_size} ranks, and {ranks.local_world_size} of them here, so not all "
            "alike: call torch.distributed.init_process_group before; for consumed, give a list"
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
    """What all ranks say; None without a process group."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        return None
    said: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(said, own)
    return said


def _as_told(gathered: list[tuple[int, int]], ranks: Ranks) -> Nodes:
    found = {node for node, _ in gathered}
    if len(gathered) != ranks.world_size or found != set(range(ranks.nodes)):
        raise InvalidValueError(
            f"the process group has {len(gathered)} ranks on nodes {sorted(found)}, but this rank was told of "
            f"{ranks.world_size} ranks on {ranks.nodes} nodes; leave rank and num_replicas out, or give rooms=[...]"
        )
    # Ranks of a node look at slightly different moments: the least is what all of them can count on.
    rooms = tuple(min(room for node, room in gathered if node == number) for number in range(ranks.nodes))
    return Nodes(tuple(node for node, _ in gathered), rooms)


def sample_bytes(data: Any, n: int, seed: int) -> float:
    """The mean size of a cached sample, from a few that every rank picks alike."""
    picked = permutation(n, seed)[:_SAMPLES].tolist()
    return math.fsum(len(pack(data[index])) for index in picked) / len(picked) if picked else 1.0


def whole_shards(n: int, weights: Sequence[int]) -> Step:
    """All `n` samples in shards of these weights."""
    sizes = shard_sizes(n, weights)
    return Step(sizes, sizes, (0,) * len(sizes))


def cut_shards(sizes: Sequence[int], rooms: Sequence[int], each: float, overflow: float) -> Step:
    """Shards of these sizes, each cut to what its room holds and the fraction `overflow` of that.

    Args:
        each: bytes of a sample.
    """
    held = [math.floor(room / each * (1 + overflow)) for room in rooms]
    kept = tuple(min(size, count) for size, count in zip(sizes, held, strict=True))
    return Step(tuple(sizes), kept, (0,) * len(kept))


def check_least(step: Step, least: int, rooms: Sequence[int] | None) -> None:
    """Refuse shards with fewer samples than the caller needs.

    Args:
        rooms: the bytes that each shard was cut to.

    Raises:
        InvalidValueError: a shard is smaller; the message says why.
    """
    shard = min(range(len(step.kept)), key=step.kept.__getitem__)
    size, kept = step.sizes[shard], step.kept[shard]
    if kept >= least:
        return
    if size >= least and rooms is not None:
        raise InvalidValueError(
            f"min_elements is {least}, but shard {shard} can keep {kept} of its {size} samples in "
            f"{format_size(rooms[shard])} of cache; raise memory_size, disk_size or overflow, or lower min_elements"
        )
    raise InvalidValueError(
        f"min_elements is {least}, but {sum(step.sizes)} samples in {len(step.sizes)} shards leave {kept} for shard "
        f"{shard}; lower min_elements, or use fewer shards"
    )
