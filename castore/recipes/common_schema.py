"""Gives the tables that are read one after the other the schema of the first.

`datasets` casts later tables too, but joins those of one row before it casts them, and casts strings to
numbers, and numbers to booleans: "02134" behind numbers becomes 2134, and 5 behind booleans True. Must never
drop a value, nor change more of it than its type.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pyarrow as pa
from datasets.table import table_cast


class OtherSchemaError(ValueError):
    """Rows do not fit the rows before them."""


def cast_to_first(
    tables: Iterable[tuple[Any, pa.Table]], first: pa.Schema | None
) -> Iterator[tuple[Any, pa.Table]]:
    """Tables with their places, each cast to the schema of the first.

    Args:
        tables: places and tables.
        first: the schema to cast all tables to, for tables that stand behind others.

    Raises:
        OtherSchemaError: see `check_fits`.
    """
    for place, table in tables:
        if first is None:
            first = table.schema
        if table.schema.equals(first):
            yield place, table
        elif len(table):
            check_fits(table.schema, first)
            yield place, table_cast(table.combine_chunks(), first)


def check_fits(found: pa.Schema, first: pa.Schema) -> None:
    """Check that rows can be cast to the schema of the rows before them, with nothing lost.

    Raises:
        OtherSchemaError: there are columns that the rows before do not have, or strings where those have
            numbers or booleans, or numbers where those have booleans, or the reverse.
    """
    new = [name for name in found.names if name not in first.names]
    if new:
        raise OtherSchemaError(
            f"column {new[0]!r} is not in the rows before, which have "
            f"{', '.join(map(repr, first.names)) or 'none'}; give all files the same columns"
        )
    _check_fields(found, first)


def _check_fields(
    found: pa.Schema | pa.StructType, first: pa.Schema | pa.StructType, above: str = ""
) -> None:
    for field in found:
        if field.name in first.names:
            _check_field(f"{above}{field.name}", field.type, first.field(field.name).type)


def _check_field(name: str, found: pa.DataType, first: pa.DataType) -> None:
    if pa.types.is_list(found) and pa.types.is_list(first):
        _check_field(name, found.value_type, first.value_type)
    elif pa.types.is_struct(found) and pa.types.is_struct(first):
        _check_fields(found, first, f"{name}.")
    elif pa.types.is_null(found) or not pa.types.is_primitive(first):
        return
    elif pa.types.is_string(found) or pa.types.is_boolean(found) != pa.types.is_boolean(first):
        raise OtherSchemaError(
            f"field {name!r} has other values than {first}, which all rows before have there; write the "
            "values of all rows as one type, for example as texts"
        )
