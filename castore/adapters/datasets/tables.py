"""A dataset as the files of a `save_to_disk` folder, and those files as a dataset again; and no disk in
between.

A dataset whose table is whole Arrow files already, with batches of a good size, is told by their paths, so
that they are read once, in constant memory. Any other one is written a file of about `SHARD_BYTES` at a time,
in memory, rows in the order the dataset shows them: a selection, a shuffle or a filter is flattened by it,
and small batches are put together.

Assumes the layout of datasets 3 to 5: ``state.json``, ``dataset_info.json``, ``data-00000-of-00001.arrow``.
Must never write what `datasets.load_from_disk` cannot read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Set
from typing import Any, NamedTuple

import datasets
import pyarrow as pa
from datasets.arrow_writer import ArrowWriter
from datasets.features.features import require_storage_embed
from datasets.iterable_dataset import ArrowExamplesIterable
from datasets.table import ConcatenationTable, InMemoryTable, MemoryMappedTable, Table, concat_tables
from datasets.utils.py_utils import asdict

from castore.adapters.datasets.lazy_table import LateTable
from castore.adapters.datasets.replaced_files import gone, lies_in
from castore.errors import SerializationError

STATE, INFO, SPLITS = "state.json", "dataset_info.json", "dataset_dict.json"
#: In the state, beside what `save_to_disk` writes there: how many rows the data files have.
ROWS = "_rows"
#: Bytes of Arrow data after which a new file is begun, for datasets that are written here.
SHARD_BYTES = 128 * 1024 * 1024
# Opening a stream reads the head of each of its batches: through a mount, a page and a frame for each.
_BATCH_BYTES = 8 * 1024 * 1024
_FIRST_BYTES = 256 * 1024
_SMALLEST_BATCHES = 1024 * 1024
# A table that was only given its features' description again still is its file.
_HARMLESS_REPLAYS = frozenset({"replace_schema_metadata"})


def whole_files(dataset: datasets.Dataset) -> list[str] | None:
    """Paths of the Arrow files which are, in order, exactly the dataset's rows; None if there are none."""
    if dataset._indices is not None or any(map(require_storage_embed, dataset.features.values())):
        return None
    table = dataset._data.table
    batches = max((column.num_chunks for column in table.columns), default=0)
    if batches > 1 and table.nbytes < batches * _SMALLEST_BATCHES:
        return None  # `map` writes batches of 1,000 rows: worth putting together
    return table_files(dataset._data)


def table_files(table: Table, places: list[range] | None = None) -> list[str] | None:
    """Paths of the Arrow files which are, one after the other, exactly a table's rows; None if there are
    none.

    Args:
        table: mapped, or put together of mapped ones.
        places: what `gone` gave, where many tables are asked about.
    """
    blocks = mapped_blocks(table, _HARMLESS_REPLAYS, places)
    return None if blocks is None else [block.path for block in blocks]


def mapped_blocks(
    table: Table, allowed: Set[str], places: list[range] | None = None
) -> list[MemoryMappedTable] | None:
    """The mapped tables which are, one after the other, a table's rows; None if there are none, or if a file
    was replaced.

    Args:
        table: mapped, or put together of mapped ones.
        allowed: what may have been done to them since they were mapped, as `datasets` calls it.
        places: what `gone` gave, where many tables are asked about.
    """
    found: list[MemoryMappedTable] = []
    places = gone() if places is None else places
    for block in row_blocks(table) or ():
        if isinstance(block, LateTable):
            inner = mapped_blocks(block.whole(), allowed, places)
            if inner is None:
                return None
            found += inner
        elif not isinstance(block, MemoryMappedTable) or lies_in(block.table, places):
            return None
        elif all(what in allowed for what, *_ in block.replays):
            found.append(block)
        else:
            return None
    return found or None


def row_blocks(table: Table) -> list[Table] | None:
    """The tables which are, one after the other, a table's rows; None if some stand side by side."""
    if not isinstance(table, ConcatenationTable):
        return [table]
    return None if any(len(row) != 1 for row in table.blocks) else [row[0] for row in table.blocks]


def arrow_files(dataset: datasets.Dataset) -> Iterator[pa.Buffer]:
    """The dataset as Arrow streams of about `SHARD_BYTES`, one after the other."""
    rows = _batch_rows(dataset)
    batches = iter(dataset.with_format("arrow").iter(rows)) if len(dataset) else iter(())
    yield from written(batches, dataset.features)


def written(batches: Iterable[pa.Table], features: datasets.Features) -> Iterator[pa.Buffer]:
    """Tables as Arrow streams of about `SHARD_BYTES`, at least one. Files that images name are embedded."""
    if not features:
        yield nothing()
        return
    remaining, first = iter(batches), True
    while True:
        sink, size = pa.BufferOutputStream(), 0
        writer = ArrowWriter(features=features, stream=sink, embed_local_files=True)
        for table in remaining:
            for piece in (table,) if size else _after_a_small_one(table):
                writer.write_table(piece)
            size += table.nbytes
            if size >= SHARD_BYTES:
                break
        if size or first:
            writer.finalize(close_stream=False)
            yield sink.getvalue()
        if size < SHARD_BYTES:
            return
        first = False


def nothing() -> pa.Buffer:
    """An Arrow stream without columns, which an `ArrowWriter` does not write."""
    sink = pa.BufferOutputStream()
    pa.ipc.new_stream(sink, pa.schema([])).close()
    return sink.getvalue()


def _after_a_small_one(table: pa.Table) -> Iterator[pa.Table]:
    """A table in two, so that a reader of the first rows of a file need not decode a whole batch."""
    first = max(1, len(table) * _FIRST_BYTES // max(1, table.nbytes))
    yield table[:first]
    if len(table) > first:
        yield table[first:]


def _batch_rows(dataset: datasets.Dataset) -> int:
    if not len(dataset):
        return 1
    average = max(1, int(dataset._data.nbytes) // max(1, len(dataset._data)))
    return max(1, _BATCH_BYTES // average)


class Part(NamedTuple):
    """A dataset on its way into a store.

    Attributes:
        files: its Arrow streams, by the path of a file or as bytes; makes them anew each time it is called.
        describe: ``state.json`` and ``dataset_info.json``, given the digests of those files.
    """

    files: Callable[[], Iterable[str | pa.Buffer]]
    describe: Callable[[list[bytes]], tuple[bytes, bytes]]


def part_of(dataset: datasets.Dataset) -> Part:
    """A dataset, to be kept.

    Raises:
        SerializationError: (when described) its format holds what JSON cannot.
    """
    return Part(
        lambda: whole_files(dataset) or arrow_files(dataset), lambda digests: describe(dataset, len(digests))
    )


def our_fingerprint(digits: str) -> str:
    """The fingerprint of a dataset whose rows are told by a key of 40 digits."""
    return f"castore{digits}"


def describe(dataset: datasets.Dataset, files: int) -> tuple[bytes, bytes]:
    """``state.json`` and ``dataset_info.json`` of a dataset in so many data files.

    Raises:
        SerializationError: its format holds what JSON cannot.
    """
    names = ("_fingerprint", "_format_columns", "_format_kwargs", "_format_type", "_output_all_columns")
    state: dict[str, Any] = {name: getattr(dataset, name) for name in names}
    state["_split"] = None if dataset.split is None else str(dataset.split)
    state[ROWS] = len(dataset)
    state["_data_files"] = [{"filename": data_file(number, files)} for number in range(files)]
    try:
        text = json.dumps(state, indent=2, sort_keys=True)
    except TypeError as error:
        raise SerializationError(
            f"the dataset's format {dataset._format_type!r} cannot be kept: {error}; put "
            "dataset.with_format(None)"
            " and set the format, or the transform, on what comes back"
        ) from None
    info = asdict(dataset.info)
    return text.encode(), json.dumps({name: info[name] for name in sorted(info)}, indent=2).encode()


def data_file(number: int, files: int) -> str:
    """Name of a data file."""
    return f"data-{number:05d}-of-{files:05d}.arrow"


def assemble(state: bytes, info: bytes, tables: list[Table]) -> datasets.Dataset:
    """The dataset that `part_of` and its data files tell of."""
    told = json.loads(state)
    split = told["_split"]
    dataset = datasets.Dataset(
        concat_tables(tables),
        info=datasets.DatasetInfo.from_dict(json.loads(info)),
        split=None if split is None else datasets.Split(split),
        fingerprint=told["_fingerprint"],
    )
    # Set without `set_format`, which would give the dataset another fingerprint.
    for name in ("_format_columns", "_format_kwargs", "_format_type", "_output_all_columns"):
        setattr(dataset, name, told[name])
    return dataset


def assemble_stream(
    state: bytes,
    info: bytes,
    batches: Callable[..., Iterator[tuple[int, pa.Table]]],
    arguments: dict[str, Any],
) -> datasets.IterableDataset:
    """The iterable dataset of ``batches(**arguments)``. Lists among the arguments are its shards."""
    told = json.loads(state)
    split = told["_split"]
    dataset = datasets.IterableDataset(
        ArrowExamplesIterable(batches, arguments),
        info=datasets.DatasetInfo.from_dict(json.loads(info)),
        split=None if split is None else datasets.Split(split),
    )
    return dataset.with_format(told["_format_type"]) if told["_format_type"] else dataset


def table_in_memory(data: bytes) -> Table:
    """The table of an Arrow stream held in memory."""
    return InMemoryTable.from_buffer(pa.py_buffer(data))


def table_mapped(path: str) -> Table:
    """The table of an Arrow stream in a file, mapped."""
    return MemoryMappedTable.from_file(path)
