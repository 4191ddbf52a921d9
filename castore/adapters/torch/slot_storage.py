"""Storage of a shared cache's tensors: columns if all samples have one shape, otherwise records in an arena.

Both storages read without a lock and hand out copies; the slot's word, read before and after, tells whether a
copy is whole. Both are written under the segment's lock. Must never hand out memory that others see.

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
from castore.shm.arena import Arena
from castore.shm.segments import Segment
from castore.units import format_size, parse_size

GIB = 1 << 30
_ALIGNMENT = 64
# Alignment of a tensor in its own record: enough for complex128, and the alignment of Python's bytearray.
_PAYLOAD_ALIGNMENT = 16


class Room(Protocol):
    """The interface of the storage that a cache uses."""

    @property
    def read(self) -> Callable[[int], Any]:
        """A copy of the sample in a slot. An attribute, not a method: it saves the cost of a call."""

    def gather(self, indices: list[int]) -> Sequence[Any]:
        """Copies of several samples, in order."""

    def batch(self, indices: list[int]) -> Any:
        """Copies of several samples as one tensor, or one for each part."""

    def write(self, index: int, values: list[torch.Tensor]) -> bool:
        """Put a sample there; False if there is no room for it."""

    def clear(self) -> None:
        """Empty all slots."""

    def view(self, buffer: memoryview) -> Any:
        """All samples as stored in ``buffer``, another mapping of the segment."""


def limit_of(size_limit_gib: Any) -> int:
    """The bytes that a number of GiB, or a text with a unit, stands for."""
    size = size_limit_gib
    if isinstance(size, str):
        return parse_size(size)
    if isinstance(size, bool) or not isinstance(size, int | float) or not 0 <= size < math.inf:
        raise InvalidValueError(f'size_limit_gib is {size!r}; give GiB as a number, or a text like "32GB"')
    return int(size * GIB)


def plan(structure: Structure, count: int, limit: int) -> tuple[int, int]:
    """How many of ``count`` samples get a slot within ``limit`` bytes, and the bytes that they need."""
    if structure.varies:
        if limit < 1:
            raise InvalidValueError("the limit is 0 bytes, which no sample fits in; give more")
        return count, Records.needed(count, limit)
    size = structure.nbytes
    if limit < size:
        raise InvalidValueError(
            f"the limit is {format_size(limit)}, but a sample takes {format_size(size)}; give at least as "
            "much"
        )
    slots = min(count, limit // size) if size else count
    return slots, Columns.needed(slots, structure)


class Columns:
    """One array for each part, one row for each slot.

    Args:
        buffer: the segment's bytes.
        start: the offset of the first of `needed` bytes.
        slots: how many samples fit.
        structure: the parts of a sample, which do not vary.
    """

    def __init__(self, buffer: memoryview, start: int, slots: int, structure: Structure) -> None:
        self._structure = structure
        self._start = start
        self._slots = slots
        self._arrays = self._rows(buffer)
        readers = [_reader(array, part) for array, part in zip(self._arrays, structure.parts, strict=True)]
        #: A copy of the sample in a slot.
        self.read = readers[0] if structure.is_single else _joined(readers, structure)

    @staticmethod
    def needed(slots: int, structure: Structure) -> int:
        """Bytes of a segment that ``slots`` samples take."""
        return sum(_round_up(slots * part.nbytes, _ALIGNMENT) for part in structure.parts)

    def gather(self, indices: list[int]) -> Sequence[Any]:
        """Copies of several samples, in order. The copies of one call share a storage of their own."""
        columns = [block.unbind(0) for block in self._blocks(indices)]
        if self._structure.is_single:
            return columns[0]
        return [self._structure.build(values) for values in zip(*columns, strict=True)]

    def batch(self, indices: list[int]) -> Any:
        """Copies of several samples, in order, as one tensor, or one for each part."""
        return self._structure.build(self._blocks(indices))

    def _blocks(self, indices: list[int]) -> list[torch.Tensor]:
        places = np.array(indices, np.intp)
        return [
            # Mode "clip" copies straight to the output's place; the indices are known to be in range.
            _as(from_numpy(np.take(rows, places, 0, mode="clip")), part)
            for rows, part in zip(self._arrays, self._structure.parts, strict=True)
        ]

    def write(self, index: int, values: list[torch.Tensor]) -> bool:
        """Put a sample there."""
        for rows, part, value in zip(self._arrays, self._structure.parts, values, strict=True):
            rows[index] = _carried(value, part)
        return True

    def clear(self) -> None:
        """Set all rows to zero, for readers of whole columns."""
        for rows in self._arrays:
            rows.fill(0)

    def view(self, buffer: memoryview) -> Any:
        """The columns, in another mapping of the segment."""
        parts = self._structure.parts
        return self._structure.build(
            [_as(from_numpy(array), part) for array, part in zip(self._rows(buffer), parts, strict=True)]
        )

    def _rows(self, buffer: memoryview) -> list[np.ndarray[Any, Any]]:
        place, rows = self._start, []
        for part in self._structure.parts:
            size = self._slots * part.nbytes
            shape = (self._slots, *part.shape)
            rows.append(np.ndarray(shape, part.numpy, buffer[place : place + size]))
            place += _round_up(size, _ALIGNMENT)
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
        segment: the segment that holds the records; not reserved.
        start: the offset of the first of `needed` bytes, a multiple of 64.
        slots: how many samples there are at most.
        size: bytes for records.
        structure: the parts of a sample.
    """

    def __init__(self, segment: Segment, start: int, slots: int, size: int, structure: Structure) -> None:
        self._structure = structure
        self._arena = Arena(segment, start, slots, size)

    @staticmethod
    def needed(slots: int, size: int) -> int:
        """Bytes of a segment for records of ``size`` bytes in all."""
        return Arena.needed(slots, size)

    def read(self, index: int) -> Any:
        """A copy of the sample in a slot; None if the sample is being removed."""
        record = self._arena.read(index)
        return None if record is None else self._unpack(record)

    def gather(self, indices: list[int]) -> Sequence[Any]:
        """Copies of several samples, in order."""
        return [self.read(index) for index in indices]

    def batch(self, indices: list[int]) -> Any:
        """Not available for ragged samples: raises."""
        raise InvalidValueError("samples that differ in shape make no batch; read them with get_slots")

    def write(self, index: int, values: list[torch.Tensor]) -> bool:
        """Put a sample there; False if there is no room for it."""
        pieces = _pack(values)
        return self._arena.put(index, pieces, sum(map(len, pieces)))

    def clear(self) -> None:
        """Free all records."""
        self._arena.clear()

    def view(self, buffer: memoryview) -> Any:
        """Not available for ragged samples: raises."""
        raise InvalidValueError(
            "samples that differ in shape lie in no common array; read them with get_slots(range(len(cache)))"
        )

    def _unpack(self, record: bytearray) -> Any:
        values, place = [], 0
        for part in self._structure.parts:
            (rank,) = struct.unpack_from("<q", record, place)
            shape = struct.unpack_from(f"<{rank}q", record, place + 8)
            place = _round_up(place + 8 + 8 * rank, _PAYLOAD_ALIGNMENT)
            if 0 in shape:
                values.append(
                    torch.empty(shape, dtype=part.dtype)
                )  # NumPy makes no array at the end of a buffer
                continue
            array = np.ndarray(shape, part.numpy, record, place)
            values.append(_as(from_numpy(array), part))
            place = _round_up(place + array.nbytes, _PAYLOAD_ALIGNMENT)
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


def _round_up(size: int, step: int) -> int:
    return -(-size // step) * step
