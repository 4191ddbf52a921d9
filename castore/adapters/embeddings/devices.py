"""Where look-ups find embeddings: in the mapped table, in a copy on a device, or split over all ranks.

Each class has `take(rows, device)`: the outputs for rows of one table, in order, on a device. Copies are made
at the first look-up, because the encoder's device is known only then. Knows no keys and no datasets.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist

from castore.adapters.embeddings.batch_places import map_leaves, rebuild_sequence
from castore.adapters.embeddings.cache import EmbeddingCache
from castore.adapters.embeddings.encoder_outputs import DIFFERENT_LENGTHS
from castore.errors import InvalidValueError, SerializationError

#: Rows that are copied to a device at a time.
_CHUNK = 1 << 16


class Lookup(Protocol):
    """The interface that look-ups use.

    ``in_memory`` says where `take` wants the rows: on the CPU, or else on the device of the encoder.
    """

    cache: EmbeddingCache
    in_memory: bool

    def take(self, rows: torch.Tensor, device: torch.device) -> Any:
        """The outputs for rows, int64 of shape (B,), on ``device``."""


def map_tensors(outputs: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """The outputs of an encoder with ``change`` applied to each tensor."""
    return map_leaves(outputs, lambda leaf, _: change(leaf) if isinstance(leaf, torch.Tensor) else leaf)


def list_tensors(outputs: Any) -> list[torch.Tensor]:
    """All tensors in the outputs of an encoder."""
    found: list[torch.Tensor] = []
    map_tensors(outputs, found.append)
    return found


class MappedLookup:
    """The mapped table itself: CacheType.CPU and CacheType.DISK."""

    in_memory = True

    def __init__(self, cache: EmbeddingCache) -> None:
        self.cache = cache

    def take(self, rows: torch.Tensor, device: torch.device) -> Any:
        """As in Lookup."""
        found = self.cache.take(rows.cpu())
        return found if device.type == "cpu" else map_tensors(found, lambda tensor: tensor.to(device))


class _CopiedLookup:
    """Some rows of a table, copied to a device."""

    in_memory = False

    def __init__(self, cache: EmbeddingCache, rows: torch.Tensor) -> None:
        self.cache = cache
        self._rows = rows
        self._outputs: Any = None
        self._where: torch.device | None = None

    def __getstate__(self) -> dict[str, Any]:
        # Memory on a device stays in its process.
        return {**self.__dict__, "_outputs": None, "_where": None}

    def _load(self, device: torch.device) -> None:
        if self._where == device:
            return
        sample = self.cache.take(self._rows[:1])
        if not _is_fixed(sample):
            raise InvalidValueError(
                "embeddings that differ in length cannot be kept on a device; use CacheType.CPU"
            )
        # Chunks that are joined on the device would take twice the memory there.
        count = len(self._rows)
        self._outputs = map_tensors(
            sample, lambda tensor: tensor.new_empty((count, *tensor.shape[1:]), device=device)
        )
        for start in range(0, count, _CHUNK):
            chunk = self.cache.take(self._rows[start : start + _CHUNK])
            for whole, part in zip(list_tensors(self._outputs), list_tensors(chunk), strict=True):
                whole[start : start + len(part)] = part
        # Rows are mostly 0 to n - 1; each row is then its own place in the copy.
        is_run = bool((self._rows == torch.arange(len(self._rows), device="cpu")).all())
        self._index = None if is_run else self._rows.to(device)
        self._where = device

    def _select_rows(self, rows: torch.Tensor) -> Any:
        places = rows if self._index is None else torch.searchsorted(self._index, rows)
        return map_tensors(self._outputs, lambda tensor: tensor.index_select(0, places))


class DeviceLookup(_CopiedLookup):
    """A whole copy on this process's device.

    Args:
        cache: the table.
        rows: all rows that will be looked up, int64, sorted, each once.
    """

    def take(self, rows: torch.Tensor, device: torch.device) -> Any:
        """As in Lookup."""
        self._load(device)
        return self._select_rows(rows.to(device))


class SplitLookup(_CopiedLookup):
    """A part of the rows on each rank's device. The ranks of the default process group exchange them.

    Look-ups are collective: every rank makes the same number of them, of any sizes.

    Args:
        cache: the table.
        rows: all rows that any rank will look up, int64, sorted, each once; the same on all ranks.

    Raises:
        InvalidValueError: there is no process group.
    """

    def __init__(self, cache: EmbeddingCache, rows: torch.Tensor) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise InvalidValueError(
                "split=True needs a process group; call torch.distributed.init_process_group first"
            )
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        super().__init__(cache, rows[rows % self._world == self._rank])

    def take(self, rows: torch.Tensor, device: torch.device) -> Any:
        """As in Lookup."""
        if not len(self._rows):
            raise InvalidValueError(
                "there are fewer embeddings than ranks to split them over; use split=False"
            )
        self._load(device)
        rows = rows.to(device)
        owners = rows % self._world
        order = owners.argsort(stable=True)
        asked = torch.bincount(owners, minlength=self._world)
        answered = torch.empty_like(asked)
        dist.all_to_all_single(answered, asked)
        here, there = answered.tolist(), asked.tolist()
        wanted = rows.new_empty(sum(here))
        dist.all_to_all_single(wanted, rows[order], here, there)
        back = order.argsort()

        def exchange(tensor: torch.Tensor) -> torch.Tensor:
            received = tensor.new_empty((len(rows), *tensor.shape[1:]))
            # Collectives of some back ends do not take bool; all take bytes.
            dist.all_to_all_single(
                received.view(torch.uint8), tensor.contiguous().view(torch.uint8), there, here
            )
            return received[back]

        return map_tensors(self._select_rows(wanted), exchange)


def fits_on_device(cache: EmbeddingCache, rows: torch.Tensor, device: torch.device) -> bool:
    """Whether a copy of these rows takes at most half of the free memory of a CUDA device."""
    sample = cache.take(rows[:1])
    if device.type != "cuda" or not _is_fixed(sample):
        return False
    size = sum(tensor.nbytes for tensor in list_tensors(sample)) * len(rows)
    return size <= torch.cuda.mem_get_info(device)[0] // 2


def _is_fixed(outputs: Any) -> bool:
    if isinstance(outputs, tuple | dict):
        return all(map(_is_fixed, outputs.values() if isinstance(outputs, dict) else outputs))
    return outputs is None or isinstance(outputs, torch.Tensor)


def concatenate(chunks: list[Any]) -> Any:
    """The outputs for several batches, joined into those for one.

    Raises:
        SerializationError: rows of one batch have another shape than those of another.
    """
    first = chunks[0]
    if isinstance(first, torch.Tensor):
        for chunk in chunks:
            if chunk.shape[1:] != first.shape[1:]:
                shapes = f"{tuple(first.shape[1:])} in one batch and {tuple(chunk.shape[1:])} in another"
                raise SerializationError(f"an item's output is {shapes}; {DIFFERENT_LENGTHS}")
        return torch.cat(chunks)
    if isinstance(first, dict):
        whole = copy.copy(first)
        for name in first:
            whole[name] = concatenate([chunk[name] for chunk in chunks])
        return whole
    if isinstance(first, tuple):
        return rebuild_sequence(first, [concatenate([*parts]) for parts in zip(*chunks, strict=True)])
    return None if first is None else [item for chunk in chunks for item in chunk]
