"""Reads CSV and TSV files as `datasets` does, but gives a column one type, chosen from all of its rows.

pandas infers types from 10,000 rows at a time, and `datasets` casts later rows to the types of the first
rows. In a column of text, a later piece that holds only digits would lose its leading zeros. In a column of
integers, a number with a fraction in a later piece would be an error.

Assumes that the files fit `datasets`' CSV builder. Must never change the value of a cell, apart from the form
in which numbers are written.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import pandas as pd
import pyarrow as pa
from datasets.builder import Key
from datasets.data_files import DataFilesDict
from datasets.packaged_modules.csv import csv as upstream

from castore.recipes.common_schema import Neighbours, OtherSchemaError, cast_tables

# By the types that pandas finds in the pieces of a column: one type for pandas, and one for Arrow. All other
# combinations are text.
_COLUMN_TYPES = {
    frozenset[str](): ("Float64", pa.float64()),  # all cells are empty
    frozenset({"Int64"}): ("Int64", pa.int64()),
    frozenset({"UInt64"}): ("UInt64", pa.uint64()),
    frozenset({"Float64"}): ("Float64", pa.float64()),
    frozenset({"Int64", "Float64"}): ("Float64", pa.float64()),
    frozenset({"boolean"}): ("boolean", pa.bool_()),
}
_TEXT = ("str", pa.string())
# Stands beside the type of integers of which a float would not keep all digits.
_LARGE, _EXACT = "large integers", 2**53

#: For each column the names of the types that pandas finds in its pieces, sorted.
ColumnTypes: TypeAlias = dict[str, list[str]]


def join_types(found: Iterable[Mapping[str, Iterable[str]]]) -> ColumnTypes:
    """The types that are found in several files, from those in each.

    >>> join_types([{"n": ["Int64"]}, {"n": ["Float64"], "text": []}])
    {'n': ['Float64', 'Int64'], 'text': []}
    """
    joined: dict[str, set[str]] = {}
    for types in found:
        for column, names in types.items():
            joined.setdefault(column, set()).update(names)
    return {column: sorted(names) for column, names in joined.items()}


class MoreCellsError(ValueError):
    """The first row has more cells than the line of the names of columns."""


class CsvReader(upstream.Csv):  # type: ignore[misc]
    """The CSV builder of `datasets`, with the reading described above.

    Args:
        files: the files of each split.
        folder: the folder for the Arrow files that the builder writes.
        separator: the separator between cells.

    Attributes:
        types: names of the types that pandas finds in each column, where they are known; None to find them in
            the files.
        around: the rows around those of the files, where the files are some of several.
    """

    types: ColumnTypes | None = None
    around: Neighbours | None = None

    def __init__(self, files: DataFilesDict, folder: str, separator: str) -> None:
        # Words such as NA and null stay words.
        super().__init__(
            cache_dir=folder, data_files=files, sep=separator, keep_default_na=False, na_values=[""]
        )

    def _generate_tables(
        self, base_files: list[str], files_iterables: list[Iterable[str]]
    ) -> Iterator[tuple[Key, pa.Table]]:
        return cast_tables(self._read_tables(files_iterables), self.around)

    def _read_tables(self, files_iterables: list[Iterable[str]]) -> Iterator[tuple[Key, pa.Table]]:
        shards = [[*files] for files in files_iterables]
        found = self.types
        if found is None:
            found = self.find_types([file for files in shards for file in files])
        types = {column: _choose_type(column, {*names}) for column, names in found.items()}
        for_pandas = {column: name for column, (name, _) in types.items()}
        for shard, files in enumerate(shards):
            for number, piece in enumerate(self._read_pieces(files, dtype=for_pandas)):
                table = pa.Table.from_pandas(piece)
                fields = [
                    field.with_type(types[field.name][1]) if field.name in types else field
                    for field in table.schema
                ]
                yield Key(shard, number), table.cast(pa.schema(fields, table.schema.metadata))

    def find_types(self, files: Iterable[str]) -> ColumnTypes:
        """The types that pandas finds in the pieces of files."""
        found: dict[str, set[str]] = defaultdict(set)
        for piece in self._read_pieces(files, dtype_backend="numpy_nullable"):
            for column, values in piece.items():
                found[column] |= _types_in(values) if values.notna().any() else set()
        return join_types([found])

    def _read_pieces(self, files: Iterable[str], **options: Any) -> Iterator[pd.DataFrame]:
        # With low_memory, pandas would infer types from parts of a piece.
        options = {**self.config.pd_read_csv_kwargs, "low_memory": False, **options}
        for file in files:
            options["skip_blank_lines"] = _may_skip(file, options)
            with pd.read_csv(file, iterator=True, **options) as reader:
                for piece in reader:
                    if not isinstance(piece.index, pd.RangeIndex):
                        # pandas takes the first cells for names of rows: each column gets another's values.
                        raise MoreCellsError(
                            f"its first row has more cells than its header, which names"
                            f" {len(piece.columns)}; give each column a name, and quote cells with separators"
                        )
                    yield piece


def _may_skip(file: str, options: Mapping[str, Any]) -> bool:
    """Whether blank lines of a file are no rows. In a file of one column, they are its empty cells."""
    header = {**options, "chunksize": None, "dtype": None, "nrows": 0}
    names = [*pd.read_csv(file, **{**header, "skip_blank_lines": True})]
    if len(names) != 1:
        return True
    return names != [*pd.read_csv(file, **{**header, "skip_blank_lines": False})]  # blank lines before it


def _types_in(values: pd.Series) -> set[str]:
    name = str(values.dtype)
    is_integer = name in ("Int64", "UInt64")
    return {name, _LARGE} if is_integer and ((values > _EXACT) | (values < -_EXACT)).any() else {name}


def _choose_type(column: str, names: set[str]) -> tuple[str, pa.DataType]:
    if names >= {_LARGE, "Float64"} and names <= {_LARGE, "Float64", "Int64", "UInt64"}:
        raise OtherSchemaError(
            f"column {column!r} has integers over 2^53 beside fractions, and a float would not keep all of"
            " their digits; write the values of all rows as texts, or of one type"
        )
    return _COLUMN_TYPES.get(frozenset(names - {_LARGE}), _TEXT)
