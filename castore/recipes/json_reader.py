"""Reads JSON files as `datasets` does, but keeps strings as strings.

Arrow turns strings into timestamps where all strings of a column in one piece of a file look like dates. The
conversion drops the time zone, changes the form, and depends on the other rows.
"""

from __future__ import annotations

import io
from functools import partial
from types import FunctionType
from typing import Any

import pyarrow as pa
import pyarrow.json
from datasets.data_files import DataFilesDict
from datasets.packaged_modules.json import json as upstream


def read_json(file: io.BytesIO, read_options: Any) -> pa.Table:
    """The rows of JSON lines; read a second time if the first reading found timestamps."""
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


# The function of `datasets` finds these values under its module's names. Other readers keep the module
# unchanged.
_REPLACED_NAMES = {
    "paj": _ArrowJson,
    # For files that are not JSON lines. pandas would take dates by the names of columns, and numbers for
    # strings of digits.
    "pandas_read_json": partial(
        upstream.pandas_read_json, convert_dates=False, convert_axes=False, dtype=False
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
    """

    refuses_mixed = False

    def __init__(self, files: DataFilesDict, folder: str) -> None:
        # A `datasets` that knows the traces of agents makes other columns of such rows.
        known = hasattr(upstream.JsonConfig, "parse_agent_traces")
        super().__init__(
            cache_dir=folder, data_files=files, **({"parse_agent_traces": False} if known else {})
        )

    def _generate_tables(self, *args: Any, **keywords: Any) -> Any:
        theirs = upstream.Json._generate_tables
        # Only now: `datasets` replaces `open` in its module when a builder is made.
        ours = FunctionType(
            theirs.__code__,
            {**vars(upstream), **_REPLACED_NAMES, **(_REFUSING if self.refuses_mixed else {})},
            argdefs=theirs.__defaults__,
        )
        return ours(self, *args, **keywords)
