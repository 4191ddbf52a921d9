"""Arguments and results of a stream's function as bytes. Arguments distinguish calls; results come back
exactly.

Rows of a stream are Python values, and `datasets` hands on what a function returns as it is: no type of Arrow
is forced on a value here. A call without exact bytes is an error, and the caller runs it without keeping it.
Tables of Arrow, pandas and polars differ by their columns, however they are chunked.

Must never take a result for a call's whole effect where the function has also changed what it was given.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgpack
import pyarrow as pa

from castore.adapters.datasets.object_arrays import put_together, take_apart
from castore.adapters.datasets.shared_objects import FIXED, find_shared, share
from castore.adapters.left_out import facts_left_out
from castore.errors import CorruptError, SerializationError
from castore.keys.table_digest import table_digest
from castore.serialize.serializers import dump, load

_PLAIN = frozenset({dict, list, *FIXED})
_NAMES = frozenset({str})
_DEEPEST = 16


class Packed(NamedTuple):
    """The arguments of a call.

    Attributes:
        data: bytes that distinguish them from all others.
        size: bytes of the values.
        is_fixed: whether a call can change nothing inside them that `datasets` would see.
    """

    data: bytes
    size: int
    is_fixed: bool


def pack_arguments(arguments: Sequence[Any]) -> Packed:
    """The positional arguments of a call, as bytes.

    Raises:
        SerializationError: a value has no exact bytes; the message has the path to it.
    """
    if all(map(_is_fixed, arguments)) and (simple := _pack_simple([arguments, ()])) is not None:
        return Packed(simple, len(simple), is_fixed=True)
    values: list[Any] = []
    tables: list[Any] = []
    size = 0
    for place, value in enumerate(arguments):
        table = None if type(value) in _PLAIN else _as_table(value)
        if table is None:
            values.append(value)
            continue
        metadata = {key.decode(errors="replace"): text for key, text in (table.schema.metadata or {}).items()}
        tables.append([place, type(value).__name__, table_digest(table), metadata])
        values.append(None)
        size += table.nbytes
    if not _is_simple(values):
        tables += facts_left_out(values)
    data = _dump(values, tables)
    return Packed(data, size + len(data), all(map(_is_fixed, values)))


def unpack_arguments(packed: Packed) -> list[Any]:
    """Arguments that are equal to the packed ones, and nobody else's; None in the place of tables."""
    values: list[Any] = _load(packed.data)[0]
    return values


def dump_result(output: Any, arguments: Sequence[Any], *, is_argument: bool) -> bytes:
    """The bytes of a function's result.

    Args:
        output: the value; a mapping counts by its items.
        arguments: of the call, as they were before it.
        is_argument: whether the value is the function's first argument, which it changed.

    Raises:
        SerializationError: the value would not come back exactly; the message has the path to it.
    """
    if isinstance(output, Mapping) and type(output) is not dict:
        output = dict(output)
    elif (table := None if type(output) in _PLAIN else _as_table(output)) is not None:
        # `datasets` takes a table in the place of a frame, and a list in the place of a mask.
        output = table if _is_frame(output) else table.column(0).to_pylist()
    if not _is_simple(output):
        facts_left_out(output, is_result=True)  # an error where a part would not come back
    shared = find_shared(output, arguments)
    return _dump([is_argument, shared] if shared else is_argument, output)


def load_result(record: bytes, arguments: Sequence[Any]) -> tuple[bool, Any]:
    """Whether a function returned its first argument, and what it returned.

    Args:
        record: the bytes of the result.
        arguments: of the present call, which are equal to those of the call then.

    Raises:
        CorruptError, SerializationError: the bytes are no result that can be loaded here.
    """
    try:
        about, output = _load(record)
        is_argument, shared = about if isinstance(about, list) else (about, ())
        share(shared, output, arguments)
    except (TypeError, ValueError, LookupError) as error:
        if isinstance(error, SerializationError):
            raise
        raise CorruptError(f"a kept result of a stream is damaged: {error}") from error
    if not isinstance(is_argument, bool) or (is_argument and type(output) is not dict):
        raise CorruptError("a kept result of a stream is damaged")
    return is_argument, output


class Before(NamedTuple):
    """Arguments as they were before a call: whether the call changes values inside them can be found later.

    Attributes:
        packed: their bytes.
        held: the same values, in containers of their own; empty where nothing can be changed in place.
    """

    packed: Packed
    held: list[Any]

    @classmethod
    def of(cls, arguments: Sequence[Any], packed: Packed) -> Before:
        """Arguments whose bytes are known."""
        if packed.is_fixed:
            return cls(packed, [])
        return cls(packed, [dict(value) if type(value) is dict else value for value in arguments])

    def is_overwritten_in(self, output: Any) -> bool:
        """Whether a result has all values that the call has changed in place.

        `datasets` goes on with the columns that a function was given and did not return, and sees such
        changes.
        """
        if self.packed.is_fixed or pack_arguments(self.held).data == self.packed.data:
            return True
        first = self.held[0]
        if not isinstance(first, dict) or not isinstance(output, Mapping):
            return False
        was = unpack_arguments(self.packed)[0]
        changed = [
            name for name in first if pack_arguments([first[name]])[0] != pack_arguments([was[name]])[0]
        ]
        return all(name in output for name in changed)


def _is_fixed(value: Any) -> bool:
    """Whether nothing inside an argument can be changed in place. Tables stand as None in their places."""
    if type(value) is dict:
        return FIXED.issuperset(map(type, value.values())) and _NAMES.issuperset(map(type, value))
    return type(value) in FIXED


def _is_simple(value: Any, depth: int = 0) -> bool:
    """Whether msgpack has a type of its own for all that a value holds."""
    kind = type(value)
    if kind is not dict and kind is not list:
        return kind in FIXED
    if kind is dict and not _NAMES.issuperset(map(type, value)):
        return False
    items = value.values() if kind is dict else value
    if FIXED.issuperset(map(type, items)):
        return True
    return depth < _DEEPEST and all(_is_simple(item, depth + 1) for item in items)


def _pack_simple(value: Any) -> bytes | None:
    """The bytes of a simple value; None if a number or a part is too large."""
    try:
        return bytes(msgpack.packb(value, unicode_errors="surrogatepass"))
    except (OverflowError, ValueError):
        return None


def _dump(*pair: Any) -> bytes:
    # Most rows: to look for other types among the bytes, as `dump` does, takes ten times as long.
    if _is_simple(pair[0]) and _is_simple(pair[1]) and (simple := _pack_simple(pair)) is not None:
        return simple
    try:
        return dump(list(pair), "msgpack")[1]
    except SerializationError:
        plain, arrays = take_apart(list(pair))
        if not arrays:
            raise
        return dump([*plain, arrays], "msgpack")[1]


def _load(data: bytes) -> Any:
    pair = load(data, "msgpack")
    return pair if len(pair) == 2 else put_together(pair[:2], pair[2])


def _is_frame(value: Any) -> bool:
    return isinstance(value, pa.Table) or hasattr(value, "columns")


def _as_table(value: Any) -> pa.Table | None:
    """A table, a frame or a column as a table; None for all other values."""
    if isinstance(value, pa.Table):
        return value
    if isinstance(value, pa.ChunkedArray | pa.Array):
        return pa.table({"": value})
    module = type(value).__module__.partition(".")[0]
    if module == "pandas":
        pandas = sys.modules["pandas"]
        if isinstance(value, pandas.Series):
            return pa.Table.from_pandas(value.to_frame())
        return pa.Table.from_pandas(value) if isinstance(value, pandas.DataFrame) else None
    if module == "polars":
        polars = sys.modules["polars"]
        if isinstance(value, polars.Series):
            return value.to_frame().to_arrow()
        return value.to_arrow() if isinstance(value, polars.DataFrame) else None
    return None
