"""Cuts rows into blocks, by content or by position: where blocks end, and nothing of what is done with them.

By content, a row's own bytes decide whether a block ends after it. A change of rows therefore moves the ends
of the blocks that they lie in, and no others: content-defined chunking, as in LBFS (Muthitacharoen et al.,
2001), over rows in place of bytes. Behind the target an end is eight times as likely as before it, which
keeps sizes near the target, as in FastCDC (Xia et al., 2016). The test of a row is cheap: the lengths of its
values, and the first bytes of each, read from Arrow's buffers for all rows at once. By position, a block ends
after a whole number of batches from the first row.

Sizes are integers, so the ends do not depend on how Arrow has chunked the rows. Two rows that are equal for
this test and differ otherwise are no harm: a block's digest identifies it, not its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

#: Bytes of a block; about so many on average, a quarter at least, four times as many at most.
TARGET_BYTES = 1 << 21
#: Bytes of a block that is cut by content, at most, unless a single row has more.
LARGEST_BYTES = 4 * TARGET_BYTES
#: Rows of a block, where they are small.
TARGET_ROWS = 10_000

_NOT_ZERO = np.uint64(0x9E3779B97F4A7C15)

_Sizes: TypeAlias = npt.NDArray[np.int64]
_Numbers: TypeAlias = npt.NDArray[np.uint64]


class Cut(NamedTuple):
    """Where blocks may end.

    Attributes:
        multiple: blocks end after a multiple of so many rows from the first; None to cut by content.
        first_rows: the first block has at least so many rows, if there are so many.
        least_rows: the same for every block.
    """

    multiple: int | None = None
    first_rows: int = 0
    least_rows: int = 1


def cut(
    tables: Iterable[pa.Table],
    rule: Cut,
    elsewhere: Callable[[pa.Table], _Sizes] | None = None,
    finer: int = 1,
) -> Iterator[pa.Table]:
    """Rows, however they are chunked, as blocks in order.

    Args:
        tables: tables of one schema; no more than a block of them is held.
        rule: where blocks may end.
        elsewhere: for each row of a table its bytes that lie elsewhere, which count as if they were in it.
        finer: how many blocks there are, on average, in the place of one.

    Yields:
        Tables of at least one row.
    """
    target = max(1, TARGET_BYTES // finer)
    least, most = (target, None) if rule.multiple else (target // 4, target * 4)
    waiting: list[pa.Table] = []
    start, start_bytes = 0, 0  # the block's first row, and the bytes of all rows before it
    first, first_bytes = 0, 0  # the same of the table
    for table in tables:
        if not len(table):
            continue
        sizes, numbers = _measure(table)
        if elsewhere is not None:
            sizes += elsewhere(table)
        upto = first_bytes + np.cumsum(sizes)
        if rule.multiple:
            ends = np.arange((-first - 1) % rule.multiple, len(table), rule.multiple)
        else:
            ends, late_ends = (np.flatnonzero(_may_end(sizes, numbers, times, target)) for times in (1, 8))
        begin = 0
        while True:
            enough = int(np.searchsorted(upto, start_bytes + least))
            enough = max(enough, start - first + rule.least_rows - 1)
            if start == 0:
                enough = max(enough, rule.first_rows - 1 - first)
            end = _first_from(ends, enough, len(table))
            if most is not None:
                late = int(np.searchsorted(upto, start_bytes + target))
                if end > late:
                    end = _first_from(late_ends, max(enough, late), len(table))
                end = min(end, max(enough, int(np.searchsorted(upto, start_bytes + most))))
            if end >= len(table):
                break
            yield pa.concat_tables([*waiting, table.slice(begin, end + 1 - begin)])
            waiting, begin = [], end + 1
            start, start_bytes = first + begin, int(upto[end])
        waiting += [table.slice(begin)] if begin < len(table) else []
        first, first_bytes = first + len(table), int(upto[-1])
    if waiting:
        yield pa.concat_tables(waiting)


def _first_from(places: _Sizes, least: int, default: int) -> int:
    """The first of some rising places that is no less than ``least``."""
    found = int(np.searchsorted(places, least))
    return int(places[found]) if found < len(places) else default


def ends_at(digest: bytes, size: int, target: int) -> bool:
    """Whether a group of things ends behind one, so that groups have ``target`` bytes on average.

    Args:
        digest: of the thing: its content decides, so groups behind a change stay.
        size: bytes of the thing, of which a larger one ends a group more often.
        target: bytes of a group.
    """
    return int.from_bytes(digest[:4], "little") * target < size << 32


def is_small(rows: int, size: int) -> bool:
    """Whether so many rows of so many bytes are too few to be worth more than one block."""
    return rows * (TARGET_BYTES // TARGET_ROWS) <= TARGET_BYTES // 4 and size <= TARGET_BYTES


def _may_end(sizes: _Sizes, numbers: _Numbers, times: int, target: int) -> Any:
    """Whether a block may end after each row: so many times in two times the target's bytes."""
    chances = (sizes.astype(np.uint64) * np.uint64(times)) << np.uint64(31)
    # Rows of zeros, nulls and empty texts have the number 0, which `_mix` keeps: they would all end blocks.
    return (_mix(numbers + _NOT_ZERO) >> np.uint64(32)) * np.uint64(target) < chances


# --- what a row looks like ----------------------------------------------------------------------------------


def _measure(table: pa.Table) -> tuple[_Sizes, _Numbers]:
    """For each row its size in bytes (at least that of one of `TARGET_ROWS`), and a number of its content."""
    rows = np.arange(len(table) + 1, dtype=np.int64)
    sizes, numbers = np.zeros(len(table), np.int64), np.zeros(len(table), np.uint64)
    for column in table.columns:
        size, number = _span(_one(column), rows[:-1], rows[1:])
        sizes += size
        numbers = _mix(numbers + number)
    return np.maximum(sizes, TARGET_BYTES // TARGET_ROWS), numbers


def _one(column: pa.ChunkedArray) -> pa.Array:
    """A column as one array."""
    array = column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks)
    return array.storage if isinstance(array, pa.ExtensionArray) else array


def _span(array: pa.Array, begin: _Sizes, end: _Sizes) -> tuple[_Sizes, _Numbers]:
    """For each run of values its bytes, and a number of its length and of how it begins.

    Args:
        array: holds the values.
        begin, end: the places of the first value of each run, and behind its last.

    Null values may have any bytes below them: that costs a good place to cut at, and nothing else.
    """
    kind = array.type
    if isinstance(array, pa.ExtensionArray):
        return _span(array.storage, begin, end)
    if pa.types.is_dictionary(kind):
        return _span(array.dictionary_decode(), begin, end)
    if pa.types.is_struct(kind):
        sizes, numbers = np.zeros(len(begin), np.int64), np.zeros(len(begin), np.uint64)
        for place in range(kind.num_fields):
            size, number = _span(array.field(place), begin, end)
            sizes, numbers = sizes + size, _mix(numbers + number)
        return sizes, numbers
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_map(kind):
        offsets = np.asarray(array.offsets).astype(np.int64)
        values = array.values if not pa.types.is_map(kind) else array.keys
        return _within(values, offsets[begin], offsets[end])
    if pa.types.is_fixed_size_list(kind):
        offset = array.offset * kind.list_size
        return _within(array.values, offset + begin * kind.list_size, offset + end * kind.list_size)
    if pa.types.is_string(kind) or pa.types.is_binary(kind):
        return _bytes_span(array, np.int32, begin, end)
    if pa.types.is_large_string(kind) or pa.types.is_large_binary(kind):
        return _bytes_span(array, np.int64, begin, end)
    if pa.types.is_boolean(kind):
        return _fixed_span(array.cast(pa.uint8()), 1, begin, end)
    try:
        width = kind.bit_width // 8
    except ValueError:  # no type of fixed width: null, say
        return np.zeros(len(begin), np.int64), np.zeros(len(begin), np.uint64)
    return _fixed_span(array, width, begin, end)


def _within(values: pa.Array, begin: _Sizes, end: _Sizes) -> tuple[_Sizes, _Numbers]:
    sizes, numbers = _span(values, begin, end)
    return sizes, _mix(numbers + (end - begin).astype(np.uint64))


def _bytes_span(array: pa.Array, offset_type: Any, begin: _Sizes, end: _Sizes) -> tuple[_Sizes, _Numbers]:
    _, offsets, data = array.buffers()
    if not len(array):
        return np.zeros(len(begin), np.int64), np.zeros(len(begin), np.uint64)
    places = np.frombuffer(offsets, offset_type)[array.offset :]
    starts, stops = places[begin].astype(np.int64), places[end].astype(np.int64)
    return stops - starts, _mix(_first_bytes(data, starts, stops) + (stops - starts).astype(np.uint64))


def _fixed_span(array: pa.Array, width: int, begin: _Sizes, end: _Sizes) -> tuple[_Sizes, _Numbers]:
    data = array.buffers()[1]
    starts, stops = (array.offset + begin) * width, (array.offset + end) * width
    first = np.minimum(starts + width, stops)
    return stops - starts, _first_bytes(data, starts, first)


def _first_bytes(data: pa.Buffer | None, starts: _Sizes, stops: _Sizes) -> _Numbers:
    """The first eight bytes of each run of bytes as a number; fewer where a run is shorter."""
    if data is None or not len(starts):
        return np.zeros(len(starts), np.uint64)
    if data.size < 8:
        data = pa.py_buffer(data.to_pybytes().ljust(8, b"\0"))
    words = np.ndarray((data.size - 7,), np.dtype("<u8"), buffer=data, strides=(1,))  # one from each byte on
    places = np.clip(starts, 0, data.size - 8)
    # A word that would end behind the buffer is read a little before its place, and shifted.
    found: _Numbers = words[places] >> ((starts - places).clip(0, 7) * 8).astype(np.uint64)
    missing = (8 - (stops - starts)).clip(0, 8).astype(np.uint64) * np.uint64(8)
    mask = np.where(missing < 64, ~np.uint64(0) >> np.minimum(missing, np.uint64(63)), np.uint64(0))
    found &= mask
    return found


def _mix(numbers: _Numbers) -> _Numbers:
    """Numbers whose bits all depend on all bits: the end of MurmurHash3, by Austin Appleby."""
    mixed: _Numbers = (numbers ^ (numbers >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
    mixed = (mixed ^ (mixed >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)
    mixed ^= mixed >> np.uint64(33)
    return mixed
