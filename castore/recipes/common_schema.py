"""Joins the schemas of tables that are read one after the other, and casts each table to the result.

`datasets` casts later tables to the schema of the first, but joins tables of one row before it casts them.
`datasets` also casts strings to numbers, and numbers to booleans: "02134" behind numbers becomes 2134, and 5
behind booleans True. A column that is null in the first file and filled later is refused, and so is a
fraction behind integers.
Must never drop a value, nor change more of it than its type.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import datasets
import pyarrow as pa
from datasets.table import table_cast


class OtherSchemaError(ValueError):
    """Rows do not fit the rows before them."""


class WiderSchemaError(ValueError):
    """Rows fit the rows before them, but have columns or types that the schema lacks."""


class Neighbours:
    """The rows around some tables: decide whether a table fits.

    Args:
        schema: the schema of all rows.
        before: the schema of the rows before the tables; by default that of all rows.
        after: the schemas of the rows behind them, in order.
    """

    def __init__(
        self, schema: pa.Schema, before: pa.Schema | None = None, after: Iterable[pa.Schema] = ()
    ) -> None:
        self.schema = schema
        self._before = schema if before is None else before
        self._after = tuple(after)

    def check_fits(self, found: pa.Schema) -> None:
        """Check that the schema of all rows is the same with a table of a schema among them.

        Raises:
            OtherSchemaError: see `join_schemas`.
            WiderSchemaError: the table has columns or types that the schema lacks, or has them in front of
                rows that are known to have them too, which gives columns another order.
        """
        joined = join_schemas([self._before, found, *self._after])
        if joined.equals(self.schema):
            return
        new = [name for name in found.names if name not in self.schema.names]
        if new:
            raise WiderSchemaError(
                f"column {new[0]!r} is not in the rows before, which have "
                f"{', '.join(map(repr, self.schema.names)) or 'none'}; give all files the same columns"
            )
        raise WiderSchemaError(f"the schema of the rows is {joined}, not {self.schema}")


def cast_tables(
    tables: Iterable[tuple[Any, pa.Table]], around: Neighbours | None
) -> Iterator[tuple[Any, pa.Table]]:
    """Tables with their places, each cast to one schema.

    Args:
        tables: places and tables.
        around: the rows around them; by default the first table has the schema of all.

    Raises:
        OtherSchemaError: a value has no equal of the type that the rows before have; or see
            `Neighbours.check_fits`.
        WiderSchemaError: see there.
    """
    last: pa.Schema | None = None
    for place, table in tables:
        if around is None:
            around = Neighbours(normal(table.schema))
        if not table.schema.equals(around.schema) and not len(table):
            continue
        if last is None or not table.schema.equals(last):
            around.check_fits(table.schema)
            last = table.schema
        yield place, _cast(table.combine_chunks(), around.schema)


def _cast(table: pa.Table, schema: pa.Schema) -> pa.Table:
    with column_named_in_errors(table, schema):
        table = decode_json(table, schema)
        for field in schema:
            if field.name not in table.column_names:  # `datasets` makes no nulls of the type of JSON
                table = table.append_column(field, pa.nulls(len(table), field.type))
        return table_cast(table, schema)


def decode_json(table: pa.Table, schema: pa.Schema, paths: Iterable[Sequence[str | int]] = ()) -> pa.Table:
    """A table whose columns of several types, which are JSON, are texts where a schema has texts.

    A cast would leave the strings in such a column in quotes.

    Args:
        table: the table.
        schema: that of all rows.
        paths: fields that have JSON in them, though their type does not say so: names, and 0 for the items of
            a list.

    Raises:
        OtherSchemaError: such a field lies deeper, or the schema has something else there; or a list or an
            object stands beside other values.
    """
    found = [[field.name] for field in table.schema if _is_json(field.type)] + [list(path) for path in paths]
    for path in found:
        kind, name = schema.field(path[0]).type, str(path[0])
        if "arrow.json" in str(kind):  # the schema has JSON there, too
            continue
        if len(path) > 1 or not pa.types.is_string(kind):
            raise _several_types(".".join(map(str, path)), kind)
        at = table.column_names.index(name)
        texts = [_decode(name, text) for text in table.column(at).to_pylist()]
        table = table.set_column(at, name, pa.array(texts, pa.string()))
    return table


def _several_types(name: str, before: pa.DataType) -> OtherSchemaError:
    return OtherSchemaError(
        f"field {name!r} has values of several types, and the rows before have {before} there; write the"
        " values of all rows as one type, for example as texts"
    )


def _decode(name: str, text: str | None) -> str | None:
    value = None if text is None else json.loads(text)
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, list | dict):
        raise OtherSchemaError(
            f"field {name!r} has {text:.80} beside others; write the values of all rows as one type, for"
            " example as texts"
        )
    return text


@contextmanager
def column_named_in_errors(table: pa.Table, schema: pa.Schema) -> Iterator[None]:
    """Have errors of a cast name the column, such as that of an integer that no fraction equals."""
    try:
        yield
    except (pa.ArrowInvalid, TypeError) as error:
        for name in table.column_names:
            try:
                table_cast(table.select([name]), pa.schema([schema.field(name)]))
            except (pa.ArrowInvalid, TypeError):
                raise OtherSchemaError(f"column {name!r}, among those of all rows: {error}") from error
        raise


def normal(schema: pa.Schema) -> pa.Schema:
    """A schema in the form that `datasets` gives it."""
    return datasets.Features.from_arrow_schema(schema).arrow_schema


def join_schemas(schemas: Iterable[pa.Schema]) -> pa.Schema:
    """The schema of rows that stand one behind the other, from the schemas of each of them, in order.

    A column, or a field of an object, that some rows lack is null in them. Integers beside fractions become
    fractions. Numbers and booleans behind strings become strings; the reverse is an error, for the text of a
    number says more than the number.

    Raises:
        OtherSchemaError: strings stand behind numbers, for example, or objects behind numbers.

    >>> one = pa.schema({"a": pa.null(), "b": pa.int64()})
    >>> join_schemas([one, pa.schema({"b": pa.float64(), "a": pa.string(), "c": pa.bool_()})])
    a: string
    b: double
    c: bool
    """
    joined: pa.Schema | None = None
    for schema in schemas:
        one = normal(schema)
        joined = one if joined is None else pa.schema(_join_fields(joined, one))
    assert joined is not None
    return joined


def _join_fields(
    first: pa.Schema | pa.StructType, found: pa.Schema | pa.StructType, above: str = ""
) -> list[pa.Field]:
    by_name = {field.name: field.type for field in first}
    for field in found:
        before = by_name.get(field.name)
        name = f"{above}{field.name}"
        by_name[field.name] = (
            field.type if before is None else _join_types(name, before, field.type, is_nested=bool(above))
        )
    return [pa.field(name, kind) for name, kind in by_name.items()]


def _join_types(name: str, first: pa.DataType, found: pa.DataType, *, is_nested: bool = False) -> pa.DataType:
    kinds = pa.types
    if found.equals(first) or kinds.is_null(found):
        return first
    if _is_json(found) and not kinds.is_null(first) and (is_nested or not kinds.is_string(first)):
        raise _several_types(name, first)
    if kinds.is_null(first):
        return found
    if kinds.is_list(found) and kinds.is_list(first):
        return pa.list_(_join_types(name, first.value_type, found.value_type, is_nested=True))
    if kinds.is_struct(found) and kinds.is_struct(first):
        return pa.struct(_join_fields(first, found, f"{name}."))
    if _is_number(found) and _is_number(first):
        return pa.float64() if kinds.is_floating(found) or kinds.is_floating(first) else first
    is_object = kinds.is_struct(found) or kinds.is_list(found)
    if is_object or kinds.is_primitive(first) or kinds.is_list(first) or kinds.is_struct(first):
        raise OtherSchemaError(
            f"field {name!r} has other values than {first}, which the rows before have there; write the "
            "values of all rows as one type, for example as texts"
        )
    return first


def _is_json(kind: pa.DataType) -> bool:
    """Whether it is the type of columns that `datasets` keeps as JSON."""
    return isinstance(kind, pa.BaseExtensionType) and kind.extension_name == "arrow.json"


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind))
