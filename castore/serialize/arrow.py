"""pyarrow Tables as Arrow IPC files, and Tables and RecordBatches as streams inside other values.

Bytes to load may be hostile: all of a table is validated before any value is accessed.
"""

from __future__ import annotations

import sys
from typing import Any

from castore.errors import SerializationError
from castore.serialize.problems import corrupt, need, refuse


def is_table(obj: Any) -> bool:
    """Whether `obj` is a pyarrow Table."""
    pa = sys.modules.get("pyarrow")
    return pa is not None and type(obj) is pa.Table


def dump_arrow(obj: Any) -> bytes:
    """Return an Arrow IPC file of a Table. A RecordBatch is stored as a Table."""
    pa = sys.modules.get("pyarrow")
    if pa is None or type(obj) not in (pa.Table, pa.RecordBatch):
        refuse(str(type(obj)), "arrow")
    table = obj if is_table(obj) else pa.Table.from_batches([obj])
    try:
        # The IPC file format has one dictionary per column.
        return _written(table.unify_dictionaries(), pa.ipc.new_file)
    except pa.ArrowException as error:
        raise SerializationError(f"Arrow cannot store the table: {error}") from error


def load_arrow(data: bytes) -> Any:
    """Return the table of an Arrow IPC file."""
    try:
        return _read(data, need("pyarrow", "datasets").ipc.open_file)
    except ValueError as error:
        raise corrupt("arrow", error) from error


def dump_stream(obj: Any) -> bytes:
    """Return an Arrow IPC stream of a Table or a RecordBatch; raises pyarrow's ArrowException."""
    return _written(obj, sys.modules["pyarrow"].ipc.new_stream)


def load_stream(data: bytes) -> Any:
    """Return the table of a stream; raises ValueError."""
    return _read(data, need("pyarrow", "datasets").ipc.open_stream)


def _written(obj: Any, begin: Any) -> bytes:
    pa = sys.modules["pyarrow"]
    for field in obj.schema:
        if _has_dictionary_of_dictionaries(field.type):
            raise pa.ArrowInvalid(f"the column {field.name!r} has a dictionary of dictionary values")
    sink = sys.modules["pyarrow"].BufferOutputStream()
    with begin(sink, obj.schema) as writer:
        writer.write(obj)
    return bytes(sink.getvalue())


def _has_dictionary_of_dictionaries(kind: Any, *, inside: bool = False) -> bool:
    """Whether Arrow could write, but not read, values of a type."""
    if sys.modules["pyarrow"].types.is_dictionary(kind):
        return inside or _has_dictionary_of_dictionaries(kind.value_type, inside=True)
    parts = [kind.field(place).type for place in range(kind.num_fields)]
    return any(_has_dictionary_of_dictionaries(part, inside=inside) for part in parts)


def _read(data: bytes, begin: Any) -> Any:
    pa = sys.modules["pyarrow"]
    try:
        table = begin(pa.py_buffer(data)).read_all()
        # Offsets outside the buffers would cause reads there when a value is accessed.
        table.validate(full=True)
    except (pa.ArrowException, OSError, MemoryError) as error:
        raise ValueError(str(error)) from error
    return table
