"""Reads JSON files as `datasets` does, but strings stay strings, and numbers as exact as they are written.

Arrow turns strings into timestamps where all strings of a column in one piece of a file look like dates. The
conversion drops the time zone, changes the form, and depends on the other rows. `datasets` keeps a column of
several types as JSON, and takes strings in it for JSON already: "02134" becomes 2134. `datasets` writes the
rows of an array, and rows with such a column, anew with ten digits: 1e-12 becomes 0.0.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from types import FunctionType
from typing import Any

import pyarrow as pa
import pyarrow.json
from datasets.data_files import DataFilesDict
from datasets.packaged_modules.json import json as upstream

from castore.recipes.common_schema import (
    Neighbours,
    OtherSchemaError,
    cast_tables,
    column_named_in_errors,
    decode_json,
)


def read_json(file: io.BytesIO, read_options: Any) -> pa.Table:
    """The rows of JSON lines; read a second time if the first reading found timestamps.

    Raises:
        pa.ArrowInvalid: the lines are no rows. One that is null ends the process in some releases of Arrow.
    """
    data = file.getbuffer()
    if _NULL.match(data) or _NULL_LINE.search(data):
        raise pa.ArrowInvalid(
            "JSON parse error: a line is null, which is no row; write an object there, or none"
        )
    read_options.use_threads = False  # with threads, columns that come late have an order by chance
    table = pyarrow.json.read_json(file, read_options=read_options)
    schema = pa.schema([pa.field(field.name, _without_timestamps(field.type)) for field in table.schema])
    if schema.equals(table.schema):
        return table
    file.seek(0)
    parse_options = pyarrow.json.ParseOptions(explicit_schema=schema)
    return pyarrow.json.read_json(file, read_options=read_options, parse_options=parse_options)


def _without_timestamps(kind: pa.DataType) -> pa.DataType:
    """A type that Arrow inferred from JSON, with strings in place of timestamps."""
    if pa.types.is_timestamp(kind):
        return pa.string()
    if pa.types.is_list(kind):
        return pa.list_(_without_timestamps(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(field.name, _without_timestamps(field.type)) for field in kind])
    return kind


class _ArrowJson:
    """Stands in for the module `pyarrow.json`."""

    ReadOptions = pyarrow.json.ReadOptions
    read_json = staticmethod(read_json)


_NULL = re.compile(rb"[ \t\r\n]*null[ \t\r]*(?:\n|\Z)")
# As `_BLANK_LINES`, it begins with a plain character.
_NULL_LINE = re.compile(rb"\n[ \t\r]*null[ \t\r]*(?:\n|\Z)")
_WHITE_SPACE = b" \t\r\n"
# It begins with a plain character, for which `re` searches fast: 10 MiB of lines take 9 ms.
_BLANK_LINES = re.compile(rb"\n[ \t\r\n]*\n")

_dump: Callable[[Any], str] = partial(json.dumps, ensure_ascii=False)


def encode_field(value: Any, path: list[str | int], above: str = "") -> Any:
    """A value with the fields at a path as JSON texts; strings too, even those that are JSON themselves.

    Args:
        value: a row, or a part of one.
        path: names of fields; 0 stands for all items of a list.
        above: the name of the part in its row; empty for a row.

    Raises:
        OtherSchemaError: the path leads through a value that is no object, or no list.

    >>> encode_field({"zip": "02134", "n": 1.5}, ["zip"])
    {'zip': '"02134"', 'n': 1.5}
    """
    if value is None:
        return None
    if not path:
        return _dump(value)
    step, *rest = path
    if step == 0 and isinstance(value, list):
        return [encode_field(item, rest, above) for item in value]
    if step != 0 and isinstance(value, dict):
        return {**value, step: encode_field(value.get(step), rest, f"{above}.{step}".removeprefix("."))}
    raise OtherSchemaError(
        f"field {above!r} has the value {str(value)[:40]!r} where other rows have "
        f"{'lists' if step == 0 else 'objects'}; write the values of all rows as one type, for example as "
        "texts"
    )


def _encode_lines(lines: bytes, paths: list[list[str | int]]) -> bytes:
    rows = [json.loads(line) for line in lines.splitlines()]
    for path in paths:
        rows = [encode_field(row, path) for row in rows]
    return "\n".join(map(_dump, rows)).encode()


class LinesFile:
    """A binary file without its blank lines, which Arrow passes over, and `json` takes for errors.

    >>> file = LinesFile(io.BytesIO(b'\\n{"a": 1}\\n \\n{"a": 2}\\n'))
    >>> file.read(4), file.readline(), file.read()
    (b'{"a', b'": 1}\\n', b'{"a": 2}\\n')
    """

    def __init__(self, file: Any) -> None:
        self._file = file
        self._is_at_start = True  # of a line

    def __enter__(self) -> LinesFile:
        self._file.__enter__()
        return self

    def __exit__(self, *error: Any) -> Any:
        return self._file.__exit__(*error)

    def read(self, size: int = -1) -> bytes:
        """Some bytes; none only at the end of the file."""
        data = self._file.read(size)
        kept = self._without_blank_lines(data)
        while data and not kept:
            data = self._file.read(size)
            kept = self._without_blank_lines(data)
        return kept

    def readline(self) -> bytes:
        """The rest of a line."""
        line: bytes = self._file.readline()
        while line and self._is_at_start and not line.strip():
            line = self._file.readline()
        self._is_at_start = True
        return line

    def _without_blank_lines(self, data: bytes) -> bytes:
        if self._is_at_start:
            data = data.lstrip(_WHITE_SPACE)
        kept = _BLANK_LINES.sub(b"\n", data)
        behind = kept.rstrip(_WHITE_SPACE)  # the rest of a blank line may come with the next bytes
        if b"\n" in kept[len(behind) :]:
            kept = kept[: kept.index(b"\n", len(behind)) + 1]
        self._is_at_start = kept.endswith(b"\n") if kept else self._is_at_start
        return kept


def _open(opener: Callable[..., Any], file: Any, mode: str = "r", **options: Any) -> Any:
    """Open a file as `datasets` does, binary ones without blank lines."""
    opened = opener(file, mode, **options)
    return LinesFile(opened) if mode == "rb" else opened


# The function of `datasets` finds these values under its module's names. Other readers keep the module
# unchanged.
_REPLACED_NAMES = {
    "paj": _ArrowJson,
    # pandas' functions read numbers of 17 digits inexactly, and write ten.
    "ujson_loads": json.loads,
    "ujson_dumps": _dump,
    "json_encode_field": encode_field,
    "json_encode_fields_in_json_lines": _encode_lines,
    # For files that are not JSON lines. pandas would take dates by the names of columns, and numbers for
    # strings of digits.
    "pandas_read_json": partial(
        upstream.pandas_read_json, convert_dates=False, convert_axes=False, dtype=False, precise_float=True
    ),
}


class MixedTypesError(Exception):
    """A column has values of several kinds: `datasets` keeps them, and those of all later files, as JSON."""


def _refuse_mixed(*_: Any) -> None:
    raise MixedTypesError


def _refuse_any_mixed(examples: list[Any]) -> list[Any]:
    if upstream.find_mixed_struct_types_field_paths(examples):
        raise MixedTypesError
    return []


# In the place of functions of `datasets` that find a column of mixed values, while some of several files are
# read.
_REFUSING = {
    "find_mixed_struct_types_field_paths": _refuse_any_mixed,
    "insert_json_field_path": _refuse_mixed,
}


class JsonReader(upstream.Json):  # type: ignore[misc]
    """The JSON builder of `datasets`, with the reading described above.

    Args:
        files: the files of each split.
        folder: the folder for the Arrow files that the builder writes.

    Attributes:
        refuses_mixed: raise MixedTypesError where how a file is read would change how later files are.
        around: the rows around those of the files, where the files are some of several.
    """

    refuses_mixed = False
    around: Neighbours | None = None

    def __init__(self, files: DataFilesDict, folder: str) -> None:
        # A `datasets` that knows the traces of agents makes other columns of such rows.
        known = hasattr(upstream.JsonConfig, "parse_agent_traces")
        super().__init__(
            cache_dir=folder, data_files=files, **({"parse_agent_traces": False} if known else {})
        )

    def _generate_tables(self, *args: Any, **keywords: Any) -> Iterator[tuple[Any, pa.Table]]:
        return cast_tables(self.read_uncast(*args, **keywords), self.around)

    def read_uncast(self, *args: Any, **keywords: Any) -> Iterator[tuple[Any, pa.Table]]:
        """The tables with the schemas that they have by themselves, where no features are known."""
        theirs = upstream.Json._generate_tables
        # Only now: `datasets` replaces `open` in its module when a builder is made.
        ours = FunctionType(
            theirs.__code__,
            {
                **vars(upstream),
                **_REPLACED_NAMES,
                **(_REFUSING if self.refuses_mixed else {}),
                "open": partial(_open, vars(upstream).get("open", open)),
            },
            argdefs=theirs.__defaults__,
        )
        tables: Iterator[tuple[Any, pa.Table]] = ours(self, *args, **keywords)
        return tables

    def _cast_table(self, table: pa.Table, json_field_paths: Any = ()) -> pa.Table:
        if self.info.features is None:
            return super()._cast_table(table, json_field_paths=json_field_paths)
        schema = self.info.features.arrow_schema
        # Here, for the table that `cast_tables` gets has all columns, in the order of the features.
        (self.around or Neighbours(schema)).check_fits(table.schema)
        with column_named_in_errors(table, schema):
            return super()._cast_table(
                decode_json(table, schema, json_field_paths), json_field_paths=json_field_paths
            )
