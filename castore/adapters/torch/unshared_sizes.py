"""Sizes of levels that the ranks of a node do not share, because their data cannot be compared.

A dataset without a fingerprint may differ from rank to rank: one level for all would hand out wrong samples.
So each rank keeps its own samples, in an equal part of the node's sizes. All ranks of the node must work with
the same sizes, since shards may be cut by them. The first rank to come decides the sizes, in a segment of
shared memory. Knows sizes, not data.
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple

from castore.adapters.torch.level_sizes import Size, disk_bytes, is_off, memory_bytes
from castore.adapters.torch.ranks import common_name, read_ranks
from castore.shm.segments import Segment

_READY, _MEMORY, _DISK, _WORDS = range(4)


class RankSizes(NamedTuple):
    """The sizes of one rank's levels.

    Attributes:
        memory: bytes of this rank's memory level.
        disk: bytes of all disk levels of the node.
        sharers: how many ranks share the node's room.
        agreed: the segment that keeps the sizes; hold it as long as the levels.
    """

    memory: int
    disk: int
    sharers: int
    agreed: Segment


def divide_sizes(items: int, memory: Size, disk: Size, folder: str | os.PathLike[str] | None) -> RankSizes:
    """The sizes of this rank's levels: equal parts of the sizes agreed among the node's ranks."""
    on_disk = folder is not None and not is_off(disk, "disk_cache_size")
    layout: dict[str, Any] = {"kind": "sizes", "items": items, "memory": str(memory), "disk": str(disk)}
    segment = Segment(common_name("sizes", layout), 8 * _WORDS, layout)
    words = segment.buffer[: 8 * _WORDS].cast("Q")
    with segment.lock():
        if not words[_READY]:
            words[_MEMORY] = (
                0 if is_off(memory, "memory_cache_size") else memory_bytes(memory, "memory_cache_size")
            )
            if on_disk and folder is not None:
                words[_DISK] = disk_bytes(disk, "disk_cache_size", folder)
            words[_READY] = 1
        sharers = read_ranks().local_world_size
        return RankSizes(words[_MEMORY] // sharers, words[_DISK], sharers, segment)
