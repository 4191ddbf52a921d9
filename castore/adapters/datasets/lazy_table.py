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
from typing import Any, NamedTuple, Protocol

import pyarrow as pa
from datasets.table import InMemoryTable, MemoryMappedTable, Table, table_cast

from castore.records import Blob
from castore.system.forks import ForkSafeLock

#: Bytes from the start of a table that are decoded without mapping the rest.
NEAR = 8 * 1024 * 1024


class Rows(Protocol):
    """The source of a `LateTable`'s rows."""

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
    def passed(self) -> bool:
        """Whether the rows have been read in order before, so that mapping them will pay."""

    def mapped(self) -> Table | None:
        """The rows, mapped, if nothing has to be decoded for that."""

    def map(self) -> Table:
        """The rows, mapped."""

    def first(self, rows: int) -> list[pa.RecordBatch]:
        """At least so many rows, the first ones."""

    def batches(self) -> Iterator[pa.RecordBatch]:
        """The rows from the first one on, decoded as they are taken."""


class LateTable(MemoryMappedTable):  # type: ignore[misc]
    """A table whose rows are decoded at first use.

    The first 8 MiB, and one pass over all rows, are decoded without mapping; any other access maps the whole
    table first. So an unread step of a chain costs nothing, and a sequential reader needs no space for a
    second copy.

    Args:
        schema: the table's schema.
        rows: the number of rows.
        source: the source of the rows.
    """

    def __init__(self, schema: pa.Schema, rows: int, source: Rows) -> None:
        # Not the base class's `__init__`, which reads the table.
        self._fields = schema
        self._count = rows
        self._source = source
        self._whole: Table | None = None
        self._first: list[pa.RecordBatch] = []
        self._passed = False
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
        same = LateTable(self._fields.with_metadata(metadata), self._count, self._source)
        if self._whole is not None:
            same._take(self._whole)
        return same

    # The whole table

    @property
    def is_mapped(self) -> bool:
        """Whether an access has needed the whole table mapped."""
        return self._whole is not None

    @property
    def passed(self) -> bool:
        """Whether the table has been read in order."""
        return self._passed or self._source.passed

    def mapped(self) -> Table | None:
        """The same table, mapped, if nothing has to be decoded for that."""
        with self._guard.lock:
            if self._whole is None and not self._first and (found := self._source.mapped()) is not None:
                self._take(found)
            return self._whole

    def whole(self) -> Table:
        """The same table, mapped."""
        with self._guard.lock:
            if self._whole is None:
                self._take(self._source.map())
            return self._whole

    def _take(self, table: Table) -> None:
        if not table.schema.equals(self._fields):
            table = table.cast(self._fields)  # as `datasets.Dataset` does
        self._whole = table.replace_schema_metadata(self._fields.metadata)
        self._first = []

    @property
    def table(self) -> pa.Table:
        """The same rows as a `pyarrow.Table`."""
        return self.whole().table

    def __deepcopy__(self, memo: dict[int, Any]) -> LateTable:
        return self  # like Arrow's tables it never changes

    def __reduce__(self) -> tuple[Any, ...]:
        self.whole()  # so that the other process maps the same file
        return LateTable, (self._fields, self._count, self._source)

    # Parts of the table

    def slice(self, offset: int = 0, length: int | None = None) -> Table:
        """Rows of the table; the first ones in memory."""
        part = self._near(offset, length)
        if part is None:
            return _changed(self, "slice", (offset, length), {})
        return LateTable(self._fields, len(part), Mapped(part.nbytes, self.path, InMemoryTable(part)))

    def fast_slice(self, offset: int = 0, length: int | None = None) -> pa.Table:
        """Rows of the table as a `pyarrow.Table`."""
        part = self._near(offset, length)
        return self.whole().fast_slice(offset, length) if part is None else part

    def fast_gather(self, indices: Any) -> pa.Table:
        """Rows of the table, by number, as a `pyarrow.Table`."""
        first = self.until(max(indices) + 1) if len(indices) else None
        if first is None:
            return self.whole().fast_gather(indices)
        return pa.concat_tables([first.slice(index, 1) for index in indices])

    def to_reader(self, max_chunksize: int | None = None) -> pa.RecordBatchReader:
        """A pass over the rows: the first long pass decodes them as it goes, later passes map them."""
        if self.passed or self.until(0) is None:
            return self.whole().to_reader(max_chunksize)
        return pa.RecordBatchReader.from_batches(self._fields, self.one_pass(max_chunksize))

    def _near(self, offset: int, length: int | None) -> pa.Table | None:
        """Rows of the table, if they are among the first ones and the whole is not mapped."""
        stop = self._count if length is None else min(offset + length, self._count)
        first = self.until(stop) if 0 <= offset <= stop else None
        return None if first is None else first[offset:stop]

    def until(self, stop: int) -> pa.Table | None:
        """The first rows up to ``stop``, and maybe more; None if the whole table serves them."""
        with self._guard.lock:
            if self.mapped() is not None or stop * self._source.size > NEAR * self._count:
                return None
            if sum(map(len, self._first)) < stop:
                self._first = self._source.first(stop)
            return pa.concat_tables(
                [self._fitting(batch) for batch in self._first] or [pa.Table.from_batches([], self._fields)]
            )

    def one_pass(self, most: int | None = None) -> Iterator[pa.RecordBatch]:
        """The rows from the first one on, in batches of at most ``most`` rows, decoded as they are taken."""
        done = 0
        for batch in self._source.batches():
            yield from self._fitting(batch).to_batches(most)
            done += len(batch)
            self._passed = self._passed or done * self._source.size > NEAR * self._count

    def _fitting(self, batch: pa.RecordBatch) -> pa.Table:
        table = pa.Table.from_batches([batch])
        if not table.schema.equals(self._fields):
            table = table_cast(table, self._fields)
        return table.replace_schema_metadata(self._fields.metadata)


class Mapped(NamedTuple):
    """Rows that are mapped already, or in memory; see `Rows`."""

    size: int
    path: str
    table: Table
    blobs: Sequence[Blob] = ()
    passed: bool = False

    def mapped(self) -> Table | None:
        """See `Rows`."""
        return self.table

    def map(self) -> Table:
        """See `Rows`."""
        return self.table

    def first(self, rows: int) -> list[pa.RecordBatch]:
        """See `Rows`."""
        return list(self.batches())

    def batches(self) -> Iterator[pa.RecordBatch]:
        """See `Rows`."""
        yield from self.table.to_batches()


class _Changed(NamedTuple):
    """The rows of a late table after an operation, which a copy in another process repeats; see `Rows`.

    Attributes:
        table: the late table.
        what: the table method, and its arguments.
        alone: whether the method works on each batch by itself.
    """

    size: int
    path: str
    table: LateTable
    what: str
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    alone: bool

    @property
    def blobs(self) -> Sequence[Blob]:
        return ()

    @property
    def passed(self) -> bool:
        return self.table.passed

    def mapped(self) -> Table | None:
        whole = self.table.mapped()
        return None if whole is None else self.of(whole)

    def map(self) -> Table:
        return self.of(self.table.whole())

    def first(self, rows: int) -> list[pa.RecordBatch]:
        first = self.table.until(rows) if self.alone else None
        return list((self.map() if first is None else self.of(InMemoryTable(first))).to_batches())

    def batches(self) -> Iterator[pa.RecordBatch]:
        if not self.alone:
            yield from self.map().to_batches()
            return
        for batch in self.table.one_pass():
            yield from self.of(InMemoryTable(pa.Table.from_batches([batch]))).to_batches()

    def of(self, table: Table) -> Table:
        """The result of the same operation on another table."""
        return getattr(table, self.what)(*self.arguments, **self.keywords)


def first_of(rows: int, batches: Generator[pa.RecordBatch, None, None]) -> list[pa.RecordBatch]:
    """The first batches that together have at least so many rows."""
    found, have = [], 0
    with contextlib.closing(batches):
        for batch in batches:
            found.append(batch)
            have += len(batch)
            if have >= rows:
                break
    return found


# Operations on the columns' presence and names work on each batch alone.
_ALONE = frozenset({"drop", "select", "remove_column", "rename_columns"})


def _changed(table: LateTable, what: str, arguments: Any, keywords: Any) -> LateTable:
    alone = what in _ALONE and table.mapped() is None
    arguments, keywords = copy.deepcopy((arguments, keywords))
    rows = _Changed(table.nbytes, table.path, table, what, arguments, keywords, alone)
    if alone:
        none = InMemoryTable(pa.Table.from_batches([], table.schema))
        return LateTable(rows.of(none).schema, len(table), rows)
    made = rows.map()
    changed = LateTable(made.schema, len(made), rows._replace(size=made.nbytes))
    changed._take(made)
    return changed


def _delegated(name: str) -> Callable[..., Any]:
    def method(self: LateTable, *args: Any, **kwargs: Any) -> LateTable:
        return _changed(self, name, args, kwargs)

    return method


# The base class records operations and replays them on the one file whose path it has. A late table may have
# several files, or none any more. `datasets` never takes a combined table for a part of another, so the
# results of these operations stay in this class.
for _name in (
    "filter", "flatten", "combine_chunks", "cast", "add_column", "append_column", "remove_column",
    "set_column", "rename_columns", "drop", "select",
):  # fmt: skip
    setattr(LateTable, _name, _delegated(_name))
