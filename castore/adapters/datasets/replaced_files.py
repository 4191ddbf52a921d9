"""Finds mapped files that have gone from their paths: the bytes at such a path are not the mapped bytes.

A dataset that was loaded from a file continues to show that file's rows after the file was replaced. A reader
of the path must not take the new file for those rows. The kernel marks in ``/proc`` each mapping whose file
was unlinked or renamed over.

Cannot see that a file was changed in place.
"""

from __future__ import annotations

import pyarrow as pa

_MARK = b" (deleted)"


def gone_ranges() -> list[range]:
    """The address ranges of this process's mapped files that have gone from their paths."""
    with open("/proc/self/maps", "rb") as file:
        maps = file.read()
    if _MARK not in maps:
        return []
    ranges = [line.split(b" ", 1)[0].split(b"-") for line in maps.splitlines() if line.endswith(_MARK)]
    return [range(int(start, 16), int(end, 16)) for start, end in ranges]


def lies_in_ranges(table: pa.Table, ranges: list[range]) -> bool:
    """Whether a table's rows lie in one of these ranges. Its first bytes stand for all of them."""
    if not ranges:
        return False
    buffers = (
        buffer
        for column in table.columns
        for chunk in column.chunks
        for buffer in chunk.buffers()
        if buffer is not None and buffer.size
    )
    first = next(buffers, None)
    return first is not None and any(first.address in place for place in ranges)
