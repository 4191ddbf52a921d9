"""Digest of an Arrow table: its columns and rows, independent of its chunks."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
from blake3 import blake3

from castore.system.cpus import hash_threads

_CHUNK_ROWS = 10_000


def table_digest(table: pa.Table) -> str:
    """64 hexadecimal digits of a table's columns and rows, independent of its chunks."""
    sink = _HashingFile()
    plain = table.replace_schema_metadata(None)
    # Two chunks are always copied into one, whose layout is the same for every original. The second chunk is
    # a slice, since `schema.empty_table()` fails where an extension type (`datasets.Json`) lies in a list or
    # a struct.
    none = plain.slice(0, 0)
    with pa.ipc.new_stream(pa.PythonFile(sink, mode="w"), plain.schema) as writer:
        for start in range(0, len(plain), _CHUNK_ROWS):
            rows = pa.concat_tables([plain.slice(start, _CHUNK_ROWS), none])
            writer.write_table(rows.combine_chunks(), max_chunksize=_CHUNK_ROWS)
    return str(sink.hasher.hexdigest())


class _HashingFile:
    """A file that keeps only the digest of the bytes written to it."""

    closed = False

    def __init__(self) -> None:
        self.hasher = blake3(max_threads=hash_threads())

    def write(self, data: Any) -> int:
        self.hasher.update(data)
        return len(data)

    def flush(self) -> None: ...

    def close(self) -> None: ...
