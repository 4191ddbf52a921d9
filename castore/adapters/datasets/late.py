"""Datasets and tables known by their features and length, and read only when somebody looks at a row.

A run whose first step comes from the cache never looks at its input, nor at a step's result that the next one
is cached behind: reading those, or decoding them, would be most of the time of such a run. Must behave as what
they stand for in everything but when it is read. Knows no store: where rows come from is said by who makes one.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Generator, Iterator
from typing import Any, NamedTuple, Protocol

import datasets
import pyarrow as pa
from datasets.arrow_dataset import DatasetInfoMixin
from datasets.search import IndexableMixin
from datasets.table import MemoryMappedTable, Table, TableBlock, table_cast

from castore.forks import reset_after_fork

#: Bytes from the start of a table that are decoded for who looks at them.
_NEAR = 8 * 1024 * 1024


class LateDataset(datasets.Dataset):  # type: ignore[misc]
    """A dataset without a format, yet to be read.

    Args:
        info: its description, features included.
        split: of the dataset.
        fingerprint: of the dataset.
        rows: how many it has.
        size: about how many bytes it takes as Arrow files.
        load: gives the dataset.
    """

    def __init__(
        self,
        info: datasets.DatasetInfo,
        split: datasets.NamedSplit | None,
        fingerprint: str,
        rows: int,
        size: int,
        load: Callable[[], datasets.Dataset],
    ) -> None:
        # Not `Dataset.__init__`, which looks at the table.
        DatasetInfoMixin.__init__(self, info=info, split=split)
        IndexableMixin.__init__(self)
        self._indices = None
        self._format_type: str | None = None
        self._format_kwargs: dict[str, Any] = {}
        self._format_columns: list[str] | None = None
        self._output_all_columns = False
        self._fingerprint = fingerprint
        self._rows = rows
        self.size = size
        self._load = load
        self._loaded: Any = None

    @property
    def _data(self) -> Any:
        if self._loaded is None:
            self._loaded = self._load()._data
        return self._loaded

    @property
    def is_read(self) -> bool:
        """Whether somebody has looked."""
        return self._loaded is not None

    @property
    def num_rows(self) -> int:
        """Rows of the dataset."""
        return self._rows

    @property
    def column_names(self) -> list[str]:
        """Names of the columns, in order."""
        return [*self.features]

    def __len__(self) -> int:
        return self._rows

    def __del__(self) -> None:
        """Nothing to do; the base class would look at the table to let go of it."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Copies, here and in other processes, are plain datasets.
        plain = datasets.Dataset(
            self._data, info=self._info, split=self._split, fingerprint=self._fingerprint
        )
        for name in ("_format_type", "_format_kwargs", "_format_columns", "_output_all_columns"):
            setattr(plain, name, getattr(self, name))
        return _itself, (plain,)


def _itself(dataset: datasets.Dataset) -> datasets.Dataset:
    return dataset


class Rows(Protocol):
    """Where a `LateTable` has its rows from."""

    @property
    def size(self) -> int:
        """Bytes that they take as Arrow files."""

    @property
    def path(self) -> str:
        """A file in the folder where `datasets` may keep what it makes of them."""

    def mapped(self) -> Table | None:
        """The rows, mapped, if nothing has to be decoded for that."""

    def map(self) -> Table:
        """The rows, mapped."""

    def batches(self) -> Generator[pa.RecordBatch, None, None]:
        """The rows from the first one on, decoded as they are taken."""


class _Guard:
    """A lock that a forked child finds free. Not the table itself: that has no hash."""

    def __init__(self) -> None:
        self._after_fork()
        reset_after_fork(self)

    def _after_fork(self) -> None:
        self.lock = threading.RLock()


class LateTable(MemoryMappedTable):  # type: ignore[misc]
    """A table whose rows are decoded when somebody looks at them.

    What lies in the first 8 MiB, and one pass over all rows, is decoded where it is; whatever else is asked has the
    whole table mapped first. So a step of a chain that nobody looks at costs nothing, and who reads in order needs no
    room for a second copy.

    Args:
        schema: of the table.
        rows: how many it has.
        source: where they are.
    """

    def __init__(self, schema: pa.Schema, rows: int, source: Rows) -> None:
        # Not the base class's, which looks at the table.
        self._fields = schema
        self._count = rows
        self._source = source
        self._whole: Table | None = None
        self._first: list[pa.RecordBatch] = []
        self._passed = False
        self._guard = _Guard()

    # What is known without looking

    @property
    def schema(self) -> pa.Schema:
        """Of the table."""
        return self._fields

    @property
    def column_names(self) -> list[str]:
        """Names of the columns, in order."""
        return list(self._fields.names)

    @property
    def num_columns(self) -> int:
        """Columns of the table."""
        return len(self._fields)

    @property
    def num_rows(self) -> int:
        """Rows of the table."""
        return self._count

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return self._count, len(self._fields)

    def __len__(self) -> int:
        return self._count

    @property
    def nbytes(self) -> int:
        """Bytes that the table takes in memory, or as files."""
        return self._source.size

    @property
    def path(self) -> str:
        """A file in the folder where `datasets` may keep what it makes of the table."""
        return self._source.path

    def replace_schema_metadata(self, metadata: Any = None) -> Table:
        """The same table under another description."""
        if self._whole is not None:
            return self._whole.replace_schema_metadata(metadata)
        return LateTable(self._fields.with_metadata(metadata), self._count, self._source)

    # The whole

    @property
    def is_mapped(self) -> bool:
        """Whether it was asked for more than what is decoded where it is."""
        return self._whole is not None

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
        """The same as Arrow's own table."""
        return self.whole().table

    def __deepcopy__(self, memo: dict[int, Any]) -> LateTable:
        return self  # like Arrow's tables it never changes

    def __reduce__(self) -> tuple[Any, ...]:
        self.whole()  # so that the other process maps what this one does
        return LateTable, (self._fields, self._count, self._source)

    # A part

    def fast_slice(self, offset: int = 0, length: int | None = None) -> pa.Table:
        """Rows of the table as one of Arrow's own."""
        stop = self._count if length is None else min(offset + length, self._count)
        first = self._until(stop) if 0 <= offset <= stop else None
        return self.whole().fast_slice(offset, length) if first is None else first[offset:stop]

    def fast_gather(self, indices: Any) -> pa.Table:
        """Rows of the table, by number, as one of Arrow's own."""
        first = self._until(max(indices) + 1) if len(indices) else None
        if first is None:
            return self.whole().fast_gather(indices)
        return pa.concat_tables([first.slice(index, 1) for index in indices])

    def to_reader(self, max_chunksize: int | None = None) -> pa.RecordBatchReader:
        """A pass over the rows: the first one that gets far decodes them as it goes, later ones map them."""
        if self._passed or self._until(0) is None:
            return self.whole().to_reader(max_chunksize)
        return pa.RecordBatchReader.from_batches(self._fields, self._pass(max_chunksize))

    def _until(self, stop: int) -> pa.Table | None:
        """The first rows up to ``stop``, and maybe more; None if they are to be had from the whole."""
        with self._guard.lock:
            if self._whole is None and not self._first and (mapped := self._source.mapped()) is not None:
                self._take(mapped)
            if self._whole is not None or stop * self._source.size > _NEAR * self._count:
                return None
            if sum(map(len, self._first)) < stop:
                self._first = list(_at_least(stop, self._source.batches()))
            return pa.concat_tables(
                [self._fitting(batch) for batch in self._first] or [self._fields.empty_table()]
            )

    def _pass(self, most: int | None) -> Iterator[pa.RecordBatch]:
        done = 0
        for batch in self._source.batches():
            yield from self._fitting(batch).to_batches(most)
            done += len(batch)
            self._passed = self._passed or done * self._source.size > _NEAR * self._count

    def _fitting(self, batch: pa.RecordBatch) -> pa.Table:
        table = pa.Table.from_batches([batch])
        if not table.schema.equals(self._fields):
            table = table_cast(table, self._fields)
        return table.replace_schema_metadata(self._fields.metadata)


class Mapped(NamedTuple):
    """Rows that are mapped already; see `Rows`."""

    size: int
    path: str
    table: Table

    def mapped(self) -> Table:
        """See `Rows`."""
        return self.table

    def map(self) -> Table:
        """See `Rows`."""
        return self.table

    def batches(self) -> Generator[pa.RecordBatch, None, None]:
        """See `Rows`."""
        yield from self.table.to_batches()


def _at_least(rows: int, batches: Generator[pa.RecordBatch, None, None]) -> Iterator[pa.RecordBatch]:
    with contextlib.closing(batches):
        for batch in batches:
            yield batch
            rows -= len(batch)
            if rows <= 0:
                return


def _delegated(name: str) -> Callable[..., Any]:
    def method(self: LateTable, *args: Any, **kwargs: Any) -> Any:
        made = getattr(self.whole(), name)(*args, **kwargs)
        if isinstance(made, TableBlock):
            return made
        return LateTable(made.schema, len(made), Mapped(made.nbytes, self.path, made))

    return method


# The base class repeats what was done to one file, and here may be several. `datasets` takes nothing put together for
# a part of what it puts together, so what is made of several stays in a class of our own.
for _name in (
    "slice", "filter", "flatten", "combine_chunks", "cast", "add_column", "append_column", "remove_column", "set_column",
    "rename_columns", "drop", "select",
):  # fmt: skip
    setattr(LateTable, _name, _delegated(_name))
