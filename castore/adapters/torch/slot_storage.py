"""Storage of a shared cache's tensors: columns if all samples have one shape, otherwise records in extents.

Both storages read without a lock and hand out copies; the slot's word, read before and after, shows whether a
copy is whole. Both storages are written under the arena's lock. Must never hand out memory that others see.

NumPy copies the bytes, not torch: torch's threads do not survive a fork, so that a child process would wait
for them for ever, maybe with the lock held. On busy cores a copy by torch also waits for the slowest of its
threads.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import from_numpy

from castore.adapters.torch.tensor_specs import Part, Structure
from castore.errors import InvalidValueError
from castore.shm.arena import Arena, Layout, round_up
from castore.shm.extents import Extents
from castore.units import format_size, parse_size

GIB = 1 << 30
# Alignment of a tensor in its own record: enough for complex128, and the alignment of Python's bytearray.
_PAYLOAD_ALIGNMENT = 16


class SlotStorage(Protocol):
    """The interface of the storage that a cache uses."""

    @property
    def read(self) -> Callable[[int], Any]:
        """A copy of the sample in a slot. An attribute, not a method: it saves the cost of a call."""

    def gather(self, indices: list[int]) -> Sequence[Any]:
        """Copies of several samples, in order."""

    def batch(self, indices: list[int], out: list[torch.Tensor] | None = None) -> Any:
        """Copies of several samples as one tensor, or one for each part; in ``out`` if given."""

    def write(self, index: int, values: list[torch.Tensor]) -> int:
        """Set a slot. Returns its word, as from `Slots.publish`; 0 if the sample does not fit."""

    def clear(self) -> None:
        """Empty all slots."""

    def view(self, data: memoryview) -> Any:
        """All samples as stored in ``data``, another mapping of the arena's data."""


def limit_of(size_limit_gib: Any) -> int:
    """The bytes that a number of GiB, or a text with a unit, stands for."""
    size = size_limit_gib
    if isinstance(size, str):
        return parse_size(size)
    if isinstance(size, bool) or not isinstance(size, int | float) or not 0 <= size < math.inf:
        raise InvalidValueError(f'size_limit_gib is {size!r}; give GiB as a number, or a text like "32GB"')
    return int(size * GIB)


def plan(structure: Structure, count: int, limit: int) -> tuple[Layout, int]:
    """The layout of an arena for those of ``count`` samples that fit, and the bytes that the samples take."""
    if structure.varies:
        if limit < 1:
            raise InvalidValueError("the limit is 0 bytes, which no sample fits in; give more")
        # Twice as many extents as samples: those that longer samples have left are taken back all at once,
        # after as many puts at least as there are samples.
        return Layout(count, extents=2 * count), limit
    size = structure.nbytes
    if limit < size:
        raise InvalidValueError(
            f"the limit is {format_size(limit)}, but a sample takes {format_size(size)}; give at least as "
            "much"
        )
    slots = min(count, limit // size) if size else count
    return Layout(count, usable=slots), Columns.needed(slots, structure)


class Columns:
    """One array for each part, one row for each slot.

    Args:
        arena: an arena whose data has `needed` bytes.
        structure: the parts of a sample, which do not vary.
    """

    def __init__(self, arena: Arena, structure: Structure) -> None:
        self._structure = structure
        self._slots = arena.slots
        self._arrays = self._rows(arena.data)
        readers = [_reader(array, part) for array, part in zip(self._arrays, structure.parts, strict=True)]
        #: A copy of the sample in a slot.
        self.read = readers[0] if structure.is_single else _joined(readers, structure)

    @staticmethod
    def needed(slots: int, structure: Structure) -> int:
        """Bytes that ``slots`` samples take."""
        return sum(round_up(slots * part.nbytes) for part in structure.parts)

    def gather(self, indices: list[int]) -> Sequence[Any]:
        """Copies of several samples, in order. The copies of one call share a storage of their own."""
        columns = [block.unbind(0) for block in self._blocks(indices)]
        if self._structure.is_single:
            return columns[0]
        return [self._structure.build(values) for values in zip(*columns, strict=True)]

    def batch(self, indices: list[int], out: list[torch.Tensor] | None = None) -> Any:
        """Copies of several samples, in order, as one tensor, or one for each part; in ``out`` if given."""
        return self._structure.build(self._blocks(indices, out))

    def _blocks(self, indices: list[int], out: list[torch.Tensor] | None = None) -> list[torch.Tensor]:
        places, parts = np.array(indices, np.intp), self._structure.parts
        # Mode "clip" copies straight to the output's place; the indices are known to be in range.
        if out is None:
            return [
                _as(from_numpy(np.take(rows, places, 0, mode="clip")), part)
                for rows, part in zip(self._arrays, parts, strict=True)
            ]
        for rows, part, block in zip(self._arrays, parts, out, strict=True):
            np.take(rows, places, 0, out=_carried(block, part), mode="clip")
        return out

    def write(self, index: int, values: list[torch.Tensor]) -> int:
        """Set a slot. Returns its word."""
        # After a failure from here on, the slot stays claimed: nobody reads it, and the next writer takes it
        # over.
        self._slots.claim(index)
        for rows, part, value in zip(self._arrays, self._structure.parts, values, strict=True):
            rows[index] = _carried(value, part)
        return self._slots.publish(index)

    def clear(self) -> None:
        """Empty all slots, and set their rows to zero for readers of whole columns."""
        self._slots.clear()
        for rows in self._arrays:
            rows.fill(0)

    def view(self, data: memoryview) -> Any:
        """The columns, in another mapping of the arena's data."""
        parts = self._structure.parts
        return self._structure.build(
            [_as(from_numpy(array), part) for array, part in zip(self._rows(data), parts, strict=True)]
        )

    def _rows(self, data: memoryview) -> list[np.ndarray[Any, Any]]:
        place, rows, slots = 0, [], self._slots.usable
        for part in self._structure.parts:
            size = slots * part.nbytes
            rows.append(np.ndarray((slots, *part.shape), part.numpy, data[place : place + size]))
            place += round_up(size)
        return rows


def _reader(rows: np.ndarray[Any, Any], part: Part) -> Callable[[int], torch.Tensor]:
    # NumPy copies a row in 0.7 of torch's time; each kind of tensor takes only the steps that it needs.
    dtype = part.dtype
    if part.dtype is not part.carrier:
        return lambda index: from_numpy(rows[index, ...].copy()).view(dtype)
    if not part.shape:
        return lambda index: from_numpy(rows[index, ...].copy())  # rows[index] would be a scalar
    return lambda index: from_numpy(rows[index].copy())


def _joined(readers: list[Callable[[int], torch.Tensor]], structure: Structure) -> Callable[[int], Any]:
    build = structure.build
    return lambda index: build([read(index) for read in readers])


class Records:
    """One record for each sample, of any length: the dimensions of its parts, then their bytes.

    Args:
        arena: an arena whose layout has extents.
        structure: the parts of a sample.
    """

    def __init__(self, arena: Arena, structure: Structure) -> None:
        self._structure = structure
        self._extents = Extents(arena)

    def read(self, index: int) -> Any:
        """A copy of the sample in a slot; None if the sample is being removed."""
        record = self._extents.read(index)
        return None if record is None else self._unpack(record)

    def gather(self, indices: list[int]) -> Sequence[Any]:
        """Copies of several samples, in order."""
        return [self.read(index) for index in indices]

    def batch(self, indices: list[int], out: list[torch.Tensor] | None = None) -> Any:
        """Not available for ragged samples: raises."""
        raise InvalidValueError("samples that differ in shape make no batch; read them with get_slots")

    def write(self, index: int, values: list[torch.Tensor]) -> int:
        """Set a slot. Returns its word; 0 if there is no space. Then the slot is empty."""
        pieces = _pack(values)
        return self._extents.put(index, pieces, sum(map(len, pieces)))

    def clear(self) -> None:
        """Empty all slots, and free their space."""
        self._extents.clear()

    def view(self, data: memoryview) -> Any:
        """Not available for ragged samples: raises."""
        raise InvalidValueError(
            "samples that differ in shape lie in no common array; read them with get_slots(range(len(cache)))"
        )

    def _unpack(self, record: bytearray) -> Any:
        values, place = [], 0
        for part in self._structure.parts:
            (rank,) = struct.unpack_from("<q", record, place)
            shape = struct.unpack_from(f"<{rank}q", record, place + 8)
            place = _aligned(place + 8 + 8 * rank)
            if 0 in shape:
                values.append(
                    torch.empty(shape, dtype=part.dtype, device="cpu")
                )  # NumPy makes no array at the end of a buffer
                continue
            array = np.ndarray(shape, part.numpy, record, place)
            values.append(_as(from_numpy(array), part))
            place = _aligned(place + array.nbytes)
        return self._structure.build(values)


def _pack(values: list[torch.Tensor]) -> list[bytes | memoryview]:
    pieces: list[bytes | memoryview] = []
    for value in values:
        header = struct.pack(f"<{1 + value.dim()}q", value.dim(), *value.shape)
        plain = value.cpu().resolve_conj().resolve_neg().reshape(-1).view(torch.uint8)
        pieces += [header, _padding(header), plain.numpy().data, _padding(plain)]
    return pieces


def _padding(piece: bytes | torch.Tensor) -> bytes:
    return bytes(-len(piece) % _PAYLOAD_ALIGNMENT)


def _as(tensor: torch.Tensor, part: Part) -> torch.Tensor:
    """The carrier's bytes with the part's own dtype."""
    return tensor if part.dtype is part.carrier else tensor.view(part.dtype)


def _carried(value: torch.Tensor, part: Part) -> np.ndarray[Any, Any]:
    """A user's tensor as a NumPy array of its carrier's dtype."""
    if value.device.type != "cpu" or value.is_conj() or value.is_neg():
        value = value.cpu().resolve_conj().resolve_neg()
    return (value if part.dtype is part.carrier else value.view(part.carrier)).numpy()


def _aligned(place: int) -> int:
    return -(-place // _PAYLOAD_ALIGNMENT) * _PAYLOAD_ALIGNMENT
