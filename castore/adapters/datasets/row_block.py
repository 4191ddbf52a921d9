"""A block whose rows go through a function, one by one or in batches, as in `Dataset.map` and `filter`.

`datasets` makes a dataset, its description and a file for each call of `map`, which is most of what a small
block costs besides its function. Here a function gets the same rows in the same types, and its results are
cast by `datasets`' own writer; only what is made around them is left out.

Must never give a function other rows than `datasets` does, or cast its results by rules of its own. Other
formats and all else that cannot be alike are left to `datasets`.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import numpy as np
import pyarrow as pa
from datasets.arrow_writer import ArrowWriter
from datasets.features.features import require_decoding
from datasets.formatting import PythonFormatter
from datasets.formatting.formatting import LazyBatch, LazyDict, LazyRow
from datasets.table import InMemoryTable

from castore.adapters.datasets.block_entries import NotInBlocksError
from castore.adapters.datasets.named_files import may_name_files, names_local_files
from castore.adapters.datasets.tables import batches_of

#: The function decides by the row whether it returns anything.
MIXED_ANSWERS = (
    "the function returns None for some rows and results for others, and what `datasets` makes of that "
    "depends on the first row and the last one of all; return None for all rows or for none"
)
#: The arguments of `Dataset.map` and `filter` that `RowBlock` follows, and those that do not count for a
#: block. Any other one, of a later release, is left to `datasets`.
KNOWN_ARGUMENTS = frozenset(
    ("batch_size", "batched", "cache_file_name", "desc", "disable_nullable", "drop_last_batch", "features",
     "fn_kwargs", "input_columns", "keep_in_memory", "load_from_cache_file", "new_fingerprint", "num_proc",
     "on_mixed_types", "remove_columns", "suffix_template", "try_original_type", "with_indices",
     "writer_batch_size")
)  # fmt: skip
# Values of a column become Python's objects for so many bytes of rows at a time.
_DECODED_BYTES = 256 * 1024
# Results that take more bytes go to a file.
_MOST_IN_MEMORY = 64 * 1024 * 1024
# Rows that are written at a time, and rows of a batch: `datasets`' defaults. The first ones decide the types.
_WRITTEN_ROWS = _BATCH_ROWS = 1000
# Columns of a batch that `datasets` takes, beside lists and arrays, by their library.
_COLUMN_TYPES = {"pandas": ["Series"], "polars": ["Series", "DataFrame"], "torch": ["Tensor"]}
# In the place of a value that was given to a function, which may have changed it.
_TAKEN = object()


class MadeRows(NamedTuple):
    """The result of a step on a block.

    Attributes:
        batches: gives the rows, as tables of about 8 MiB.
        rows: their number.
        features: their features.
        is_unchanged: whether they are the block itself.
        name_files: whether they name local files; of a selection, whether the rows do that it was made from.
        is_in_memory: whether they are in memory, and not too many to be written there.
    """

    batches: Callable[[], Iterator[pa.Table]]
    rows: int
    features: datasets.Features
    is_unchanged: bool
    name_files: Callable[[], bool]
    is_in_memory: bool = False


def made_rows(
    table: pa.Table, features: datasets.Features, source: pa.Table, *, is_unchanged: bool = False
) -> MadeRows:
    """Rows of those features in memory, or mapped, that were made from those of ``source``."""
    return MadeRows(
        lambda: batches_of(table, source),
        len(table),
        features,
        is_unchanged,
        lambda: may_name_files(features) and names_local_files(source, features),
        table.nbytes <= _MOST_IN_MEMORY,
    )


class RowForm:
    """The schema and features that all blocks of a step's input have.

    Args:
        dataset: the input, in `datasets`' default format.
    """

    def __init__(self, dataset: datasets.Dataset) -> None:
        self.features = dataset.features
        self.schema = self.features.arrow_schema
        self.formatter = PythonFormatter(features=self.features, lazy=True)
        #: Columns whose values are more than what Arrow makes of them: images, say.
        self.decoded = {name for name, feature in self.features.items() if require_decoding(feature)}

    @classmethod
    def of(cls, dataset: datasets.Dataset) -> RowForm | None:
        """The form of an input; None if `datasets` has to run its rows."""
        is_default = dataset._format_type is None and not dataset._format_kwargs
        return cls(dataset) if is_default and len(dataset.features) else None

    def block(self, table: pa.Table, file: Path) -> RowBlock | None:
        """Rows of the input; None if `datasets` would cast them first, or they are too large for one piece.

        Args:
            table: the rows, at least one.
            file: a path for results that are too large for memory.
        """
        if not table.schema.equals(self.schema):
            return None
        whole = table.combine_chunks()
        is_one = all(column.num_chunks == 1 for column in whole.columns)  # 2 GiB of texts are not
        return RowBlock(self, whole, file) if is_one else None


class RowBlock:
    """Rows, with methods that take the place of those of `datasets.Dataset`.

    Args:
        form: of the step's input.
        table: the rows, at least one, in one piece.
        file: a path for results that are too large for memory.
    """

    def __init__(self, form: RowForm, table: pa.Table, file: Path) -> None:
        self._form = form
        self._file = file
        self._table = table
        self._columns = {name: table.column(name).chunk(0) for name in table.column_names}
        self._at_once = max(1, _DECODED_BYTES * len(table) // max(1, table.nbytes))
        self._at = 0  # the row that the function gets
        #: For each column the rows whose values were made, from and to, and the values; None if one of them
        #: cannot be made.
        self._decoded: dict[str, tuple[int, int, list[Any] | None]] = {}

    def map(
        self,
        function: Callable[..., Any],
        *,
        with_indices: bool = False,
        input_columns: str | Sequence[str] | None = None,
        batched: bool = False,
        batch_size: int = _BATCH_ROWS,
        drop_last_batch: bool = False,
        remove_columns: str | Sequence[str] | None = None,
        writer_batch_size: int | None = _WRITTEN_ROWS,
        features: datasets.Features | None = None,
        disable_nullable: bool = False,
        fn_kwargs: dict[str, Any] | None = None,
        try_original_type: bool | None = True,
        **writing: Any,
    ) -> MadeRows:
        """`Dataset.map` for a function of one row, or of a batch; the arguments are the same.

        Args:
            writing: ``on_mixed_types``, as for `map`. Others say where `datasets` would keep the result.

        Raises:
            NotInBlocksError: the function returns None for the first rows, and not for all.
            Exception: an exception of the function.
        """
        removed, named = _names(remove_columns) or [], _names(input_columns)
        keywords = fn_kwargs or {}
        mixed = {"on_mixed_types": writing["on_mixed_types"]} if "on_mixed_types" in writing else {}
        tables = _Tables(self._file)
        writer: _TableWriter | None = None
        has_result = False
        for begin, end in self._batches(batch_size, drop_last_batch) if batched else self._rows():
            given = self._given(begin, end, named, batched)
            numbers = _numbers(begin, end, batched) if with_indices else ()
            result = _call(function, given, numbers, keywords)
            has_result = result is not None
            if not has_result:
                continue
            made = self._merged(begin, end, given[0] if named is None else None, result, removed, batched)
            if not begin:
                writer = _TableWriter(
                    tables,
                    features=self._form.features if features is None else features,
                    update_features=features is None,
                    writer_batch_size=writer_batch_size,
                    disable_nullable=disable_nullable,
                    **mixed,
                )
            if writer is None:
                raise NotInBlocksError(MIXED_ANSWERS)
            if batched:
                writer.add_batch(made, try_original_type)
            else:
                writer.add(made)
        if writer is None or not has_result:
            return made_rows(self._table, self._form.features, self._table, is_unchanged=True)
        writer.finalize(close_stream=False)
        table = tables.read(writer.schema)
        return made_rows(table, writer._features, table)

    def filter(
        self,
        function: Callable[..., Any],
        *,
        with_indices: bool = False,
        input_columns: str | Sequence[str] | None = None,
        batched: bool = False,
        batch_size: int = _BATCH_ROWS,
        fn_kwargs: dict[str, Any] | None = None,
        **_: Any,
    ) -> MadeRows:
        """`Dataset.filter` for a function of one row, or of a batch; the arguments are the same.

        Raises:
            Exception: an exception of the function.
        """
        named, keywords = _names(input_columns), fn_kwargs or {}
        kept = []
        for begin, end in self._batches(batch_size) if batched else self._rows():
            if named is None and not batched:
                given: list[Any] = [{name: self.value(name, begin) for name in self._columns}]
            else:
                given = self._given(begin, end, named, batched)
            numbers = _numbers(begin, end, batched) if with_indices else ()
            wanted = _call(function, given, numbers, keywords)
            if not batched:
                kept += [begin] if wanted else []
                continue
            if isinstance(wanted, pa.Array | pa.ChunkedArray):
                wanted = wanted.to_pylist()
            kept += [place for place, is_kept in zip(range(begin, end), wanted, strict=False) if is_kept]
        is_whole = len(kept) == len(self._table)
        table = self._table if is_whole else _picked(self._table, kept)
        return made_rows(table, self._form.features, self._table)

    def value(self, name: str, place: int) -> Any:
        """A value, as a new object of Python's."""
        if name not in self._form.decoded and place == self._at:  # a row that was kept comes alone
            begin, end, values = self._decoded.get(name, (0, 0, None))
            if not begin <= place < end:
                begin, end, values = place, place + self._at_once, None
                with contextlib.suppress(Exception):  # of a row's value: it comes again, for that row
                    values = self._columns[name].slice(place, self._at_once).to_pylist()
                self._decoded[name] = begin, end, values
            if values is not None and (value := values[place - begin]) is not _TAKEN:
                values[place - begin] = _TAKEN
                return value
        return self._form.formatter.format_column(self._table.select([name]).slice(place, 1))[0]

    def one_row(self, place: int) -> pa.Table:
        """A row as a table."""
        return self._table.slice(place, 1)

    def _rows(self) -> Iterator[tuple[int, int]]:
        for place in range(len(self._table)):
            self._at = place
            yield place, place + 1

    def _batches(self, size: int, drops_last: bool = False) -> Iterator[tuple[int, int]]:
        rows = len(self._table) // size * size if drops_last else len(self._table)
        for begin in range(0, rows, size):
            yield begin, min(begin + size, rows)

    def _given(self, begin: int, end: int, named: Sequence[str] | None, batched: bool) -> list[Any]:
        """The arguments of the function for some rows."""
        if not batched:
            if named is not None:
                return self._values(named, begin)
            return [_Row(self, begin, self._columns, self._form.formatter)]
        table = self._table.slice(begin, end - begin)
        if named is None:
            return [LazyBatch(table, self._form.formatter)]
        # A column that is named twice is one object.
        columns = {name: self._form.formatter.format_column(table.select([name])) for name in named}
        return [columns[name] for name in named]

    def _values(self, names: Sequence[str], place: int) -> list[Any]:
        """The values of some columns. A column that is named twice gives one value."""
        values = {name: self.value(name, place) for name in names}
        return [values[name] for name in names]

    def _merged(
        self,
        begin: int,
        end: int,
        given: LazyDict | None,
        result: Any,
        removed: Sequence[str],
        batched: bool,
    ) -> Any:
        """The rows with what the function has returned; ``given`` is None where it got columns."""
        returned_row = isinstance(result, LazyDict)
        if returned_row:
            result = {name: v for name, v in result.data.items() if name not in result.keys_to_format}
        elif not isinstance(result, Mapping | pa.Table) and not _is_frame(result):
            self._let_datasets_refuse(begin, end, result, batched)
            raise TypeError(f"a function of rows has to return a dict or None, not {type(result).__name__}")
        if batched and isinstance(result, Mapping) and not all(map(_is_column, result.values())):
            self._let_datasets_refuse(begin, end, result, batched)
        before = self._columns if given is None else given.data
        unread = before if given is None else given.keys_to_format
        merged = {
            name: self._columns[name].slice(begin, end - begin) if name in unread else v
            for name, v in before.items()
        }
        for name in removed:
            merged.pop(name, None)
            if returned_row:
                result.pop(name, None)
        return {**merged, **result} if isinstance(result, Mapping) else result

    def _let_datasets_refuse(self, begin: int, end: int, result: Any, batched: bool) -> None:
        """Raise the error that `datasets` has for such a result, if it has one."""
        table = self._table.slice(begin, end - begin)
        datasets.Dataset(InMemoryTable(table), fingerprint="refused").map(
            lambda _: result,
            batched=batched,
            batch_size=end - begin,
            keep_in_memory=True,
            load_from_cache_file=False,
            new_fingerprint="refused",
        )


class _Row(LazyRow):  # type: ignore[misc]
    """A row whose values are made when they are asked for."""

    def __init__(self, block: RowBlock, place: int, names: Mapping[str, Any], formatter: Any) -> None:
        self._block = block
        self._place = place
        self.formatter = formatter
        self.data = dict.fromkeys(names)
        self.keys_to_format = set(names)

    @property
    def pa_table(self) -> pa.Table:
        """The row."""
        return self._block.one_row(self._place)

    def format(self, key: str) -> Any:
        """The value of a column."""
        return self._block.value(key, self._place)

    def __reduce__(self) -> Any:
        """A plain row of `datasets`: a copy must not take the whole block along."""
        row = _picked(self.pa_table, [0])  # a slice would take along what it was cut from
        return _plain_row, (row, self.formatter, self.data, self.keys_to_format)


_Row.__name__ = _Row.__qualname__ = LazyRow.__name__  # in messages


def _plain_row(table: pa.Table, formatter: Any, data: dict[str, Any], unread: set[str]) -> LazyRow:
    row = LazyRow(table, formatter)
    row.data, row.keys_to_format = data, unread
    return row


class _TableWriter(ArrowWriter):  # type: ignore[misc]
    """Casts rows as its base does, and keeps them as tables.

    Args:
        tables: takes them.
        options: as for `ArrowWriter`.
    """

    def __init__(self, tables: _Tables, **options: Any) -> None:
        super().__init__(stream=tables, **options)

    def add(self, row: Any) -> None:
        """Add a row: a dict, a table, or a frame of pandas or polars."""
        if isinstance(row, dict):
            self.write(row)
        elif isinstance(row, pa.Table):
            self.write_row(row)
        else:
            self.write_row(_table_of(row))

    def add_batch(self, batch: Any, try_original_type: bool | None) -> None:
        """Add a batch: a dict of columns, a table, or a frame of pandas or polars.

        Args:
            batch: the batch.
            try_original_type: as for `Dataset.map`.
        """
        if isinstance(batch, dict):
            self.write_batch(batch, try_original_type=try_original_type)
        else:
            self.write_table(batch if isinstance(batch, pa.Table) else _table_of(batch))

    def _build_writer(self, inferred_schema: pa.Schema) -> None:
        self._schema, self._features = self._build_schema(inferred_schema)
        self.pa_writer = self.stream


class _Tables:
    """Tables in memory, or in a file if they are large.

    Args:
        file: the path of the file.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._tables: list[pa.Table] = []
        self._bytes = 0
        self._sink: Any = None

    def write_table(self, table: pa.Table, _rows: int) -> None:
        """Add a table."""
        if self._sink is None:
            self._tables.append(table)
            self._bytes += table.nbytes
            if self._bytes <= _MOST_IN_MEMORY:
                return
            self._sink = pa.ipc.new_stream(str(self._file), table.schema)
        else:
            self._tables = [table]
        for waiting in self._tables:
            self._sink.write_table(waiting)
        self._tables = []

    def close(self) -> None:
        """End the file."""
        if self._sink is not None:
            self._sink.close()

    def read(self, schema: pa.Schema) -> pa.Table:
        """All rows, of that schema; those of a file are mapped, and stay after it is removed."""
        if self._sink is None:
            return pa.concat_tables(self._tables or [schema.empty_table()])
        return pa.ipc.open_stream(pa.memory_map(str(self._file))).read_all()


def _picked(table: pa.Table, places: list[int]) -> pa.Table:
    """Rows of a table, copied where Arrow can do that."""
    try:
        return table.take(pa.array(places, pa.uint64()))
    except pa.ArrowNotImplementedError:  # of views of texts, say
        return pa.concat_tables([table.slice(place, 1) for place in places] or [table.slice(0, 0)])


def _call(
    function: Callable[..., Any], given: list[Any], more: tuple[Any, ...], named: dict[str, Any]
) -> Any:
    try:
        return function(*given, *more, **named)
    except StopIteration as error:
        # It would end a loop of the caller's. `datasets` raises the same, since its own loop is a generator.
        told = RuntimeError("the function has raised StopIteration")
        for note in getattr(error, "__notes__", ()):
            told.add_note(note)  # type: ignore[attr-defined]
        raise told from error


def _numbers(begin: int, end: int, batched: bool) -> tuple[Any, ...]:
    """The argument of the function for the numbers of some rows."""
    return ([*range(begin, end)],) if batched else (begin,)


def _names(names: str | Sequence[str] | None) -> list[str] | None:
    return [names] if isinstance(names, str) else None if names is None else list(names)


def _is_column(value: Any) -> bool:
    """Whether a value is known to be a column of a batch for `datasets`."""
    if isinstance(value, list | np.ndarray):
        return True
    found = ((sys.modules.get(library), names) for library, names in _COLUMN_TYPES.items())
    return any(
        isinstance(value, getattr(library, name)) for library, names in found if library for name in names
    )


def _table_of(frame: Any) -> pa.Table:
    """A frame of pandas or polars as a table."""
    return pa.Table.from_pandas(frame) if _is_frame(frame, "pandas") else frame.to_arrow()


def _is_frame(value: Any, *libraries: str) -> bool:
    """Whether a value is a frame of one of the libraries; by default of pandas or polars."""
    found = (sys.modules.get(name) for name in libraries or ("pandas", "polars"))
    return any(isinstance(value, library.DataFrame) for library in found if library is not None)
