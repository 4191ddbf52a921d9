"""Kinds of pyarrow: a Table or a RecordBatch anywhere in a value, stored as an Arrow IPC stream."""

from __future__ import annotations

import sys
from typing import Any

from castore.serialize.arrow import dump_stream, load_stream
from castore.serialize.kinds.forms import Kind, MisfitError, expect


def _take(value: Any) -> bytes:
    try:
        return dump_stream(value)
    except sys.modules["pyarrow"].ArrowException as error:
        raise MisfitError(
            f"is a {type(value)} that Arrow cannot write: {error}; convert its columns"
        ) from None


def _table(parts: Any) -> Any:
    return load_stream(expect(bytes, parts))


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
