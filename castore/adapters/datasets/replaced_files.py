"""Finds mapped tables whose path leads to another file by now: the bytes there are not the table's rows.

A dataset that was loaded from a file shows that file's rows until the program ends, whatever happens to its
folder. Cannot see that a file was changed in place.
"""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from castore.system.mappings import Mappings


def is_in_place(table: pa.Table, path: str, mappings: Mappings) -> bool:
    """Whether a table's rows are those of the file that lies at a path now."""
    mapping = next(filter(None, map(mappings.find, _addresses(table))), None)
    return mapping is not None and mapping.is_at(path)


def _addresses(table: pa.Table) -> Iterator[int]:
    """The addresses of a table's bytes, of each buffer the first."""
    for column in table.columns:
        for chunk in column.chunks:
            yield from (buffer.address for buffer in chunk.buffers() if buffer is not None and buffer.size)
