"""Tables known by their columns and length. Rows are read at first use.

A run whose first step comes from the cache never reads its input, nor the result of a step before another
cached step: to read or decode those would take most of the time of such a run. Must behave as the tables they
stand for in everything but the time of reading. Knows no store: the caller gives the source of the rows.

Mapping alone was measured as the alternative, without a mount. A rerun of five cached steps over 137 MB of
text left five raw copies, and the store took 839 MB in place of 154 MB; a recipe's rerun left one copy, 323
MB in place of 187 MB. Later reruns take the same time either way, and so does random access once a copy
exists.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import pyarrow as pa
from datasets.table import InMemoryTable, MemoryMappedTable, Table, table_cast

from castore.records import Blob
from castore.system.forks import ForkSafeLock

#: Bytes from the start of a table that are decoded without mapping the rest.
HEAD_BYTES = 8 * 1024 * 1024


class RowSource(Protocol):
    """The source of a `LazyTable`'s rows."""

    @property
    def size(self) -> int:
        """Bytes that the rows take as Arrow files."""

    @property
    def path(self) -> str:
        """A file in the folder where `datasets` may keep files derived from the rows."""

    @property
    def blobs(self) -> Sequence[Blob]:
        """The blobs of the Arrow files that hold, in order, these rows; empty if they are not known."""

    @property
    def was_scanned(self) -> bool:
        """Whether the rows have been read in order before, so that mapping them will pay."""

    def map_if_ready(self) -> Table | None:
        """The rows, mapped, if nothing has to be decoded for that."""

    def map(self) -> Table:
        """The rows, mapped."""

    def batches(self, file: int | None = None) -> Generator[pa.RecordBatch, None, None]:
        """The rows from the first one on, or those of one of `blobs`, decoded as they are taken."""


class LazyTable(MemoryMappedTable):  # type: ignore[misc]
    """A table whose rows are decoded at first use.

    The first 8 MiB, and one pass over all rows, are decoded without mapping; any other access maps the whole
    table first. So an unread step of a chain costs nothing, and a sequential reader needs no space for a
    second copy.

    Args:
        schema: the table's schema.
        rows: the number of rows.
        source: the source of the rows.
        names_files: whether rows name local files; True where that is not known.
    """

    def __init__(self, schema: pa.Schema, rows: int, source: RowSource, *, names_files: bool = True) -> None:
        # Not the base class's `__init__`, which reads the table.
        self._fields = schema
        self._count = rows
        self._source = source
        self.names_files = names_files
        self._whole: Table | None = None
        self._first: list[pa.RecordBatch] = []
        self._was_scanned = False
        self._guard = ForkSafeLock()  # the table itself has no hash

    # Known without reading

    @property
    def schema(self) -> pa.Schema:
        """The table's schema."""
        return self._fields

    @property
    def column_names(self) -> list[str]:
        """Names of the columns, in order."""
        return list(self._fields.names)

    @property
    def num_columns(self) -> int:
        """The number of columns."""
        return len(self._fields)

    @property
    def num_rows(self) -> int:
        """The number of rows."""
        return self._count

    @property
    def shape(self) -> tuple[int, int]:
        """The numbers of rows and columns."""
        return self._count, len(self._fields)

    def __len__(self) -> int:
        return self._count

    @property
    def nbytes(self) -> int:
        """Bytes that the table takes in memory, or as files."""
        return self._source.size

    @property
    def path(self) -> str:
        """A file in the folder where `datasets` may keep files derived from the table."""
        return self._source.path

    @property
    def blobs(self) -> Sequence[Blob]:
        """The blobs of the Arrow files that hold, in order, the table's rows; empty if they are not known."""
        return self._source.blobs

    def replace_schema_metadata(self, metadata: Any = None) -> Table:
        """The same table with another schema metadata."""
        same = LazyTable(
            self._fields.with_metadata(metadata), self._count, self._source, names_files=self.names_files
        )
        if self._whole is not None:
            same._set_mapped(self._whole)
        return same

    # The whole table

    @property
    def was_scanned(self) -> bool:
        """Whether the table has been read in order."""
        return self._was_scanned or self._source.was_scanned

    def map_if_ready(self) -> Table | None:
        """The same table, mapped, if nothing has to be decoded for that."""
        with self._guard.lock:
            if self._whole is None and not self._first and (found := self._source.map_if_ready()) is not None:
                self._set_mapped(found)
            return self._whole

    def map_whole(self) -> Table:
        """The same table, mapped."""
        with self._guard.lock:
            if self._whole is None:
                self._set_mapped(self._source.map())
            return self._whole

    def _set_mapped(self, table: Table) -> None:
        if not table.schema.equals(self._fields):
            table = table.cast(self._fields)  # as `datasets.Dataset` does
        self._whole = table.replace_schema_metadata(self._fields.metadata)
        self._first = []

    @property
    def table(self) -> pa.Table:
        """The same rows as a `pyarrow.Table`."""
        return self.map_whole().table

    def __deepcopy__(self, memo: dict[int, Any]) -> LazyTable:
        return self  # like Arrow's tables it never changes

    def __reduce__(self) -> tuple[Any, ...]:
        self.map_whole()  # so that the other process maps the same file
        return partial(LazyTable, names_files=self.names_files), (self._fields, self._count, self._source)

    # Parts of the table

    def slice(self, offset: int = 0, length: int | None = None) -> Table:
        """Rows of the table; the first ones in memory."""
        part = self._head_slice(offset, length)
        if part is None:
            return _change(self, "slice", (offset, length), {})
        source = MappedRows(part.nbytes, self.path, InMemoryTable(part))
        return LazyTable(self._fields, len(part), source, names_files=self.names_files)

    def fast_slice(self, offset: int = 0, length: int | None = None) -> pa.Table:
        """Rows of the table as a `pyarrow.Table`."""
        part = self._head_slice(offset, length)
        return self.map_whole().fast_slice(offset, length) if part is None else part

    def fast_gather(self, indices: Any) -> pa.Table:
        """Rows of the table, by number, as a `pyarrow.Table`."""
        first = self.read_head(max(indices) + 1) if len(indices) else None
        if first is None:
            return self.map_whole().fast_gather(indices)
        return pa.concat_tables([first.slice(index, 1) for index in indices])

    def to_reader(self, max_chunksize: int | None = None) -> pa.RecordBatchReader:
        """A pass over the rows: the first long pass decodes them as it goes, later passes map them."""
        if self.was_scanned or self.read_head(0) is None:
            return self.map_whole().to_reader(max_chunksize)
        return pa.RecordBatchReader.from_batches(self._fields, self.decode_batches(max_chunksize))

    def _head_slice(self, offset: int, length: int | None) -> pa.Table | None:
        """Rows of the table, if they are among the first ones and the whole is not mapped."""
        stop = self._count if length is None else min(offset + length, self._count)
        first = self.read_head(stop) if 0 <= offset <= stop else None
        return None if first is None else first[offset:stop]

    def read_head(self, stop: int) -> pa.Table | None:
        """The first rows up to ``stop``, and maybe more; None if the whole table serves them."""
        with self._guard.lock:
            if self.map_if_ready() is not None or stop * self._source.size > HEAD_BYTES * self._count:
                return None
            if sum(map(len, self._first)) < stop:
                self._first = _take_first(stop, self._source.batches())
            return pa.concat_tables(
                [self._cast_batch(batch) for batch in self._first]
                or [pa.Table.from_batches([], self._fields)]
            )

    def decode_batches(self, max_rows: int | None = None) -> Iterator[pa.RecordBatch]:
        """The rows from the first one on, in batches of ``max_rows`` at most, decoded as they are taken."""
        done = 0
        for batch in self._source.batches():
            yield from self._cast_batch(batch).to_batches(max_rows)
            done += len(batch)
            self._was_scanned = self._was_scanned or done * self._source.size > HEAD_BYTES * self._count

    def read_file(self, file: int) -> pa.Table:
        """The rows of one of `blobs`, decoded; nothing is mapped for that."""
        parts = [self._cast_batch(batch) for batch in self._source.batches(file)]
        return pa.concat_tables(parts) if parts else pa.Table.from_batches([], self._fields)

    def _cast_batch(self, batch: pa.RecordBatch) -> pa.Table:
        table = pa.Table.from_batches([batch])
        if not table.schema.equals(self._fields):
            table = table_cast(table, self._fields)
        return table.replace_schema_metadata(self._fields.metadata)


class MappedRows(NamedTuple):
    """Rows that are mapped already, or in memory; see `RowSource`."""

    size: int
    path: str
    table: Table
    blobs: Sequence[Blob] = ()
    was_scanned: bool = False

    def map_if_ready(self) -> Table | None:
        """See `RowSource`."""
        return self.table

    def map(self) -> Table:
        """See `RowSource`."""
        return self.table

    def batches(self, file: int | None = None) -> Generator[pa.RecordBatch, None, None]:
        """See `RowSource`."""
        yield from self.table.to_batches()


class _ChangedRows(NamedTuple):
    """The rows of a lazy table after an operation, which a copy in another process repeats; see `RowSource`.

    Attributes:
        table: the lazy table.
        method: the table method, with its arguments in the next two fields.
        is_per_batch: whether the method works on each batch by itself.
    """

    size: int
    path: str
    table: LazyTable
    method: str
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    is_per_batch: bool

    @property
    def blobs(self) -> Sequence[Blob]:
        return ()

    @property
    def was_scanned(self) -> bool:
        return self.table.was_scanned

    def map_if_ready(self) -> Table | None:
        whole = self.table.map_if_ready()
        return None if whole is None else self.apply(whole)

    def map(self) -> Table:
        return self.apply(self.table.map_whole())

    def batches(self, file: int | None = None) -> Generator[pa.RecordBatch, None, None]:
        if not self.is_per_batch:
            yield from self.map().to_batches()
            return
        for batch in self.table.decode_batches():
            yield from self.apply(InMemoryTable(pa.Table.from_batches([batch]))).to_batches()

    def apply(self, table: Table) -> Table:
        """The result of the same operation on another table."""
        return getattr(table, self.method)(*self.arguments, **self.keywords)


def _take_first(rows: int, batches: Generator[pa.RecordBatch, None, None]) -> list[pa.RecordBatch]:
    """The first batches that together have at least so many rows."""
    found: list[pa.RecordBatch] = []
    have = 0
    with contextlib.closing(batches):
        for batch in batches:
            found.append(batch)
            have += len(batch)
            if have >= rows:
                break
    return found


# Operations on the columns' presence and names work on each batch alone.
_PER_BATCH = frozenset({"drop", "select", "remove_column", "rename_columns"})


def _change(table: LazyTable, method: str, arguments: Any, keywords: Any) -> LazyTable:
    is_per_batch = method in _PER_BATCH and table.map_if_ready() is None
    arguments, keywords = copy.deepcopy((arguments, keywords))
    rows = _ChangedRows(table.nbytes, table.path, table, method, arguments, keywords, is_per_batch)
    if is_per_batch:
        none = InMemoryTable(pa.Table.from_batches([], table.schema))
        return LazyTable(rows.apply(none).schema, len(table), rows, names_files=table.names_files)
    result = rows.map()
    changed = LazyTable(result.schema, len(result), rows._replace(size=result.nbytes))
    changed._set_mapped(result)
    return changed


def _make_delegate(name: str) -> Callable[..., Any]:
    def method(self: LazyTable, *args: Any, **kwargs: Any) -> LazyTable:
        return _change(self, name, args, kwargs)

    return method


# The base class records operations and replays them on the one file whose path it has. A lazy table may have
# several files, or none any more. `datasets` never takes a combined table for a part of another, so the
# results of these operations stay in this class.
for _name in (
    "filter", "flatten", "combine_chunks", "cast", "add_column", "append_column", "remove_column",
    "set_column", "rename_columns", "drop", "select",
):  # fmt: skip
    setattr(LazyTable, _name, _make_delegate(_name))
