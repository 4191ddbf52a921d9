"""Which mapped files have gone from their paths: another file may be there, and its bytes are not what is
mapped.

A dataset that was loaded from a file goes on showing that file's rows after it was replaced. Whoever reads
the path then must not take what is there for those rows. The kernel tells: a mapping whose file was unlinked
or renamed over is marked in ``/proc``.

Says nothing of a file that was changed in place.
"""

from __future__ import annotations

import pyarrow as pa

_MARK = b" (deleted)"


def gone() -> list[range]:
    """Where in memory this process has files mapped that have gone from their paths."""
    with open("/proc/self/maps", "rb") as file:
        maps = file.read()
    if _MARK not in maps:
        return []
    places = [line.split(b" ", 1)[0].split(b"-") for line in maps.splitlines() if line.endswith(_MARK)]
    return [range(int(start, 16), int(end, 16)) for start, end in places]


def lies_in(table: pa.Table, places: list[range]) -> bool:
    """Whether a table's rows lie at one of these places. Its first bytes stand for all of them."""
    if not places:
        return False
    buffers = (
        buffer
        for column in table.columns
        for chunk in column.chunks
        for buffer in chunk.buffers()
        if buffer is not None and buffer.size
    )
    first = next(buffers, None)
    return first is not None and any(first.address in place for place in places)
