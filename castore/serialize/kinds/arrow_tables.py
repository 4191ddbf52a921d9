"""Kinds of pyarrow: a Table or a RecordBatch anywhere in a value, stored as an Arrow IPC stream.

`make` imports pyarrow, and validates the whole stream before any value is accessed.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

from castore.errors import MissingDependencyError
from castore.serialize.kinds.forms import Kind, MisfitError, expect


def _take(value: Any) -> bytes:
    pa = sys.modules["pyarrow"]
    sink = pa.BufferOutputStream()
    try:
        with pa.ipc.new_stream(sink, value.schema) as writer:
            writer.write(value)
    except pa.ArrowException as error:
        raise MisfitError(
            f"is a {type(value)} that Arrow cannot write: {error}; convert its columns"
        ) from None
    return bytes(sink.getvalue())


def _table(parts: Any) -> Any:
    try:
        pa = importlib.import_module("pyarrow")
    except ImportError as error:
        raise MissingDependencyError.of("pyarrow", "datasets") from error
    try:
        table = pa.ipc.open_stream(pa.py_buffer(expect(bytes, parts))).read_all()
        # Offsets outside the buffers would cause reads there when a value is accessed.
        table.validate(full=True)
    except (pa.ArrowException, OSError, MemoryError) as error:
        raise ValueError(str(error)) from error
    return table


def _batch(parts: Any) -> Any:
    table = _table(parts)
    batches = table.to_batches()
    if len(batches) > 1:
        raise ValueError(f"a RecordBatch is written as {len(batches)}")
    return batches[0] if batches else sys.modules["pyarrow"].RecordBatch.from_pylist([], schema=table.schema)


TABLES = [
    Kind("pyarrow.table", "pyarrow", "Table", _take, _table),
    Kind("pyarrow.record_batch", "pyarrow", "RecordBatch", _take, _batch),
]
