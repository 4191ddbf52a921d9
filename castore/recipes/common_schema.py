"""Gives the tables that are read one after the other the schema of the first.

`datasets` casts later tables too, but joins those of one row before it casts them, and casts strings to
numbers: "02134" behind numbers becomes 2134. Must never drop a value, nor change more of it than its type.
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
            numbers or booleans.
    """
    new = [name for name in found.names if name not in first.names]
    if new:
        raise OtherSchemaError(
            f"column {new[0]!r} is not in the rows before, which have {', '.join(map(repr, first.names))}; "
            "give all files the same columns"
        )
    _check_texts(found, first)


def _check_texts(found: pa.Schema | pa.StructType, first: pa.Schema | pa.StructType) -> None:
    for field in found:
        if field.name in first.names:
            _check_text(field.name, field.type, first.field(field.name).type)


def _check_text(name: str, found: pa.DataType, first: pa.DataType) -> None:
    if pa.types.is_list(found) and pa.types.is_list(first):
        _check_text(name, found.value_type, first.value_type)
    elif pa.types.is_struct(found) and pa.types.is_struct(first):
        _check_texts(found, first)
    elif pa.types.is_string(found) and pa.types.is_primitive(first):
        raise OtherSchemaError(
            f"field {name!r} has texts behind rows in which it is {first}; write all its values as texts"
        )
