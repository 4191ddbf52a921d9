"""The rows of an iterable dataset, in the form in which a store takes them.

A stream of Python objects that declares no features is written as `Dataset.from_generator` writes it: the
first batch of rows decides the types, and later rows are cast to them. A stream that declares its features,
or that yields Arrow tables, is written with those types.

Must never drop a column silently, as `from_generator` does with columns that the first row lacks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import datasets
import pyarrow as pa
from datasets.arrow_writer import ArrowWriter
from datasets.table import InMemoryTable

from castore.adapters.datasets.named_files import may_name_files
from castore.adapters.datasets.tables import (
    SHARD_BYTES,
    DatasetPart,
    describe_dataset,
    empty_stream,
    fingerprint_of_key,
    write_streams,
)
from castore.errors import SerializationError
from castore.keys.encoder import key

_ITERATED_ROWS = 1000
# Raised for rows that do not fit: by Arrow, by its conversions, and for columns that hold only None.
_MISFITS = (pa.ArrowException, TypeError, ValueError, OverflowError)


def part_of_stream(dataset: datasets.IterableDataset) -> DatasetPart:
    """The rows of an iterable dataset, as a part to keep.

    Raises:
        SerializationError: (while its files are made) a row does not fit the rows before it.
    """
    stream = _StreamPart(dataset)
    return DatasetPart(stream.files, stream.describe)


class _StreamPart:
    """An iterable dataset, and the features found in its rows."""

    def __init__(self, dataset: datasets.IterableDataset) -> None:
        self._dataset = dataset
        self._declared = dataset.features
        self._features = datasets.Features()

    def files(self) -> Iterator[pa.Buffer]:
        """The rows as Arrow streams; each call iterates over the dataset again."""
        if self._declared is None and not self._dataset._ex_iterable.iter_arrow:
            return self._write_rows(iter(self._dataset.with_format(None)))
        return self._write_tables(_tables(self._dataset))

    def describe(self, digests: list[bytes]) -> tuple[bytes, bytes]:
        """State and description, once the files are made."""
        dataset, formatting = self._dataset, self._dataset._formatting
        info = dataset.info.copy()
        info.features = self._features
        empty = datasets.Dataset(
            InMemoryTable(pa.Table.from_batches([], self._features.arrow_schema)),
            info=info,
            split=dataset.split,
            fingerprint=fingerprint_of_key(key([*digests, str(self._features)])),
        )
        empty._format_type = formatting.format_type if formatting else None
        return describe_dataset(empty, len(digests))

    def _write_tables(self, tables: Iterator[pa.Table]) -> Iterator[pa.Buffer]:
        first = next(tables, None)
        if self._declared is not None:
            self._features = self._declared
        elif first is not None:
            self._features = datasets.Features.from_arrow_schema(first.schema)
        every = itertools.chain([] if first is None else [first], tables)
        yield from write_streams(every, self._features, embed=may_name_files(self._features))

    def _write_rows(self, rows: Iterator[dict[str, Any]]) -> Iterator[pa.Buffer]:
        first = next(rows, None)
        if first is None:
            self._features = datasets.Features()
            yield empty_stream()
            return
        if not first:
            raise SerializationError(
                "row 0 of the stream has no columns; yield rows with at least one column"
            )
        columns, features, count = first.keys(), None, 0
        remaining, is_more = itertools.chain([first], rows), True
        while is_more:
            sink = pa.BufferOutputStream()
            writer = ArrowWriter(features=features, stream=sink, embed_local_files=True)
            is_more = False
            for row in remaining:
                if row.keys() != columns:
                    raise _columns_error(count, columns, row)
                try:
                    writer.write(
                        dict(row)
                    )  # the writer holds rows until a batch is full; generators reuse dicts
                except _MISFITS as error:
                    raise _misfit_error(count, error) from error
                count += 1
                if writer._num_bytes >= SHARD_BYTES:
                    is_more = True
                    break
            try:
                writer.finalize(close_stream=False)
            except _MISFITS as error:
                raise _misfit_error(count, error) from error
            features = self._features = writer._features
            yield sink.getvalue()


def _tables(dataset: datasets.IterableDataset) -> Iterator[pa.Table]:
    try:
        yield from dataset.with_format("arrow").iter(_ITERATED_ROWS)
    except pa.ArrowInvalid as error:
        raise SerializationError(
            "the stream joins datasets of different columns, and `datasets` cannot make one table of them "
            f"({str(error).splitlines()[0]}); give each of them all columns before you join them, or keep "
            "stream.map(lambda row: row)"
        ) from error


def _misfit_error(row: int, error: Exception) -> SerializationError:
    return SerializationError(
        f"the rows of the stream up to number {row} do not fit the types of its first rows: {error}; declare "
        "the features with IterableDataset.from_generator(..., features=...) or cast(features)"
    )


def _columns_error(row: int, columns: Any, given: dict[str, Any]) -> SerializationError:
    missing, added = (
        [name for name in one if name not in other] for one, other in ((columns, given), (given, columns))
    )
    what = f"has no column {missing[0]!r}" if missing else f"has a column {added[0]!r}"
    return SerializationError(
        f"row {row} of the stream {what}, unlike the first row; yield every column in each row, with None "
        "for missing values"
    )
