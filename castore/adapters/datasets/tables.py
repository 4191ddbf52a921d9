"""Converts a dataset to the files of a `save_to_disk` folder and back, without a disk in between.

A dataset whose table is whole Arrow files already, with batches of a good size, is given by their paths, so
that the files are read once, in constant memory. Any other dataset is written in memory, one file of about
`SHARD_BYTES` at a time, with rows in the order in which the dataset shows them: this flattens a selection, a
shuffle or a filter, and joins small batches.

Assumes the layout of datasets 3 to 5: ``state.json``, ``dataset_info.json``, ``data-00000-of-00001.arrow``.
Must never write what `datasets.load_from_disk` cannot read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Set
from typing import Any, NamedTuple

import datasets
import numpy as np
import pyarrow as pa
from datasets.arrow_writer import ArrowWriter
from datasets.iterable_dataset import ArrowExamplesIterable
from datasets.table import ConcatenationTable, InMemoryTable, MemoryMappedTable, Table, concat_tables
from datasets.utils.py_utils import asdict

from castore.adapters.datasets.descriptions import FORMAT
from castore.adapters.datasets.lazy_table import LazyTable
from castore.adapters.datasets.named_files import file_sizes, may_name_files, names_local_files
from castore.adapters.datasets.replaced_files import is_in_place
from castore.errors import SerializationError
from castore.system.mappings import Mappings

STATE_FILE, INFO_FILE, SPLITS_FILE = "state.json", "dataset_info.json", "dataset_dict.json"
#: The key of castore's own in the state, beside those of `save_to_disk`: the number of rows in the data
#: files.
ROWS_KEY = "_rows"
#: Another key of castore's own: true where rows name local files.
NAMES_FILES_KEY = "_names_files"
#: Bytes of Arrow data after which a new file begins, for datasets that are written here.
SHARD_BYTES = 128 * 1024 * 1024
# Opening a stream reads the head of each batch: through a mount, a page and a frame for each.
_BATCH_BYTES = 8 * 1024 * 1024
# The first rows of a file lie with its schema in the first frame of 256 KiB, if one row is no larger.
_FIRST_BYTES = 240 * 1024
_SMALLEST_BATCHES = 1024 * 1024
# A table whose only operation replaced the features' description still equals its file.
_HARMLESS_REPLAYS = frozenset({"replace_schema_metadata"})


def find_whole_files(dataset: datasets.Dataset) -> list[str] | None:
    """Paths of the Arrow files that hold, in order, exactly the dataset's rows; None if there are none."""
    if dataset._indices is not None:
        return None
    table = dataset._data.table
    batches = max((column.num_chunks for column in table.columns), default=0)
    if batches > 1 and table.nbytes < batches * _SMALLEST_BATCHES:
        return None  # `map` writes batches of 1,000 rows: worth joining
    return table_files(dataset._data)


def table_files(table: Table, mappings: Mappings | None = None) -> list[str] | None:
    """Paths of the Arrow files that hold, in order, exactly a table's rows; None if there are none.

    Args:
        table: a mapped table, or a concatenation of mapped ones.
        mappings: those of this process, for calls about many tables.
    """
    blocks = mapped_blocks(table, _HARMLESS_REPLAYS, mappings)
    return None if blocks is None else [block.path for block in blocks]


def mapped_blocks(
    table: Table, allowed: Set[str], mappings: Mappings | None = None
) -> list[MemoryMappedTable] | None:
    """The mapped tables that hold, in order, a table's rows; None if there are none, or a file was replaced.

    Args:
        table: a mapped table, or a concatenation of mapped ones.
        allowed: operations, by their names in `datasets`, that tables may have had since mapping.
        mappings: those of this process, for calls about many tables.
    """
    found: list[MemoryMappedTable] = []
    mappings = mappings or Mappings()
    for block in row_blocks(table) or ():
        if isinstance(block, LazyTable):
            inner = mapped_blocks(block.map_whole(), allowed, mappings)
            if inner is None:
                return None
            found += inner
        elif not isinstance(block, MemoryMappedTable) or not is_in_place(block.table, block.path, mappings):
            return None
        elif all(what in allowed for what, *_ in block.replays):
            found.append(block)
        else:
            return None
    return found or None


def row_blocks(table: Table) -> list[Table] | None:
    """The tables that hold, in order, a table's rows; None if some are joined side by side."""
    if not isinstance(table, ConcatenationTable):
        return [table]
    return None if any(len(row) != 1 for row in table.blocks) else [row[0] for row in table.blocks]


def arrow_streams(dataset: datasets.Dataset, *, embed: bool) -> Iterator[pa.Buffer]:
    """The dataset as Arrow streams of about `SHARD_BYTES`, in order.

    Args:
        dataset: the dataset.
        embed: write the bytes of the files that rows name in the place of the names.
    """
    embed = embed and may_name_files(dataset.features)
    tables = row_batches(dataset)
    yield from write_streams(
        _split_by_files(tables, dataset.features) if embed else tables, dataset.features, embed=embed
    )


def row_batches(dataset: datasets.Dataset) -> Iterator[pa.Table]:
    """The rows of a dataset as tables of about 8 MiB."""
    if len(dataset):
        yield from dataset.with_format("arrow").iter(batch_rows(dataset))


def batches_of(table: pa.Table, source: pa.Table | None = None) -> Iterator[pa.Table]:
    """A table as tables of about 8 MiB, as `row_batches` has them.

    Args:
        table: the rows.
        source: the rows from which they were picked, if any; their average size counts then.
    """
    sized = table if source is None else source
    at_once = rows_a_batch(sized.nbytes, len(sized))
    return (table.slice(begin, at_once) for begin in range(0, len(table), at_once))


def _split_by_files(tables: Iterable[pa.Table], features: datasets.Features) -> Iterator[pa.Table]:
    """Tables so that the files that rows name have about 8 MiB a table."""
    for table in tables:
        upto, start = np.cumsum(file_sizes(table, features)), 0
        while start < len(table):
            most = _BATCH_BYTES + (int(upto[start - 1]) if start else 0)
            end = max(start + 1, int(np.searchsorted(upto, most, side="right")))
            yield table[start:end]
            start = end


def write_streams(
    batches: Iterable[pa.Table], features: datasets.Features, *, embed: bool
) -> Iterator[pa.Buffer]:
    """Tables as Arrow streams of about `SHARD_BYTES`, at least one; ``embed`` as for `arrow_streams`."""
    if not features:
        yield empty_stream()
        return
    remaining, first = iter(batches), True
    while True:
        sink, size = pa.BufferOutputStream(), 0
        writer = ArrowWriter(features=features, stream=sink, embed_local_files=embed)
        for table in remaining:
            for piece in (table,) if size else split_off_first_rows(table):
                writer.write_table(piece)
            size = writer._num_bytes if embed else size + table.nbytes
            if size >= SHARD_BYTES:
                break
        if size or first:
            writer.finalize(close_stream=False)
            yield sink.getvalue()
        if size < SHARD_BYTES:
            return
        first = False


def empty_stream() -> pa.Buffer:
    """An Arrow stream without columns, which an `ArrowWriter` cannot write."""
    sink = pa.BufferOutputStream()
    pa.ipc.new_stream(sink, pa.schema([])).close()
    return sink.getvalue()


def split_off_first_rows(table: pa.Table) -> Iterator[pa.Table]:
    """A table in two parts, so that a reader of a file's first rows need not decode a whole batch."""
    first, size = len(table), table.nbytes
    while first > 1 and size > _FIRST_BYTES:
        first = max(1, first * _FIRST_BYTES // size)
        size = sum(map(pa.ipc.get_record_batch_size, table[:first].to_batches()))
    yield table[:first]
    if len(table) > first:
        yield table[first:]


def batch_rows(dataset: datasets.Dataset) -> int:
    """Rows of a dataset that take about 8 MiB."""
    return rows_a_batch(int(dataset._data.nbytes), len(dataset._data)) if len(dataset) else 1


def rows_a_batch(size: int, rows: int) -> int:
    """How many rows take about 8 MiB where so many take ``size`` bytes."""
    return max(1, _BATCH_BYTES // max(1, size // max(1, rows)))


def rows_size(dataset: datasets.Dataset) -> int:
    """About how many bytes the rows of a dataset take as Arrow files; of a selection its own rows alone."""
    whole = len(dataset._data)
    return round(dataset._data.nbytes * len(dataset) / whole) if whole else 0


class KeptFile(NamedTuple):
    """An Arrow stream that is in the store already, by its digest of 64 hexadecimal digits."""

    digest: str


class DatasetPart(NamedTuple):
    """A dataset in the form in which a store takes it.

    Attributes:
        files: its Arrow streams, each a file's path, its bytes, or kept; every call makes them again.
        describe: ``state.json`` and ``dataset_info.json``, given the digests of those files.
    """

    files: Callable[[], Iterable[str | pa.Buffer | KeptFile]]
    describe: Callable[[list[bytes]], tuple[bytes, bytes]]


def make_part(dataset: datasets.Dataset, *, embed: bool) -> DatasetPart:
    """The part to keep for a dataset; ``embed`` as for `arrow_streams`.

    Raises:
        SerializationError: (when described) the dataset's format holds a value that JSON cannot hold.
    """
    names_files = rows_name_files(dataset)

    def files() -> Iterable[str | pa.Buffer | KeptFile]:
        # Not before they are asked for: it maps a lazy table, and a file may be replaced meanwhile.
        whole = None if embed and names_files else find_whole_files(dataset)
        return whole or arrow_streams(dataset, embed=embed)

    return DatasetPart(
        files,
        lambda digests: describe_dataset(dataset, len(digests), names_files=names_files and not embed),
    )


def rows_name_files(dataset: datasets.Dataset) -> bool:
    """Whether rows name local files; of a selection, whether rows that it was made from do."""
    return any(names_local_files(table, dataset.features) for table in tables_that_name_files(dataset))


def tables_that_name_files(dataset: datasets.Dataset) -> Iterator[pa.Table]:
    """The rows that a dataset was made from, as far as they may name files."""
    if not may_name_files(dataset.features):
        return
    for block in row_blocks(dataset._data) or [dataset._data]:
        if not isinstance(block, LazyTable):
            yield block.table
        elif block.names_files:
            yield from (pa.Table.from_batches([batch]) for batch in block.decode_batches())


def fingerprint_of_key(key: str) -> str:
    """The fingerprint of a dataset whose rows are identified by a key of 40 digits."""
    return f"castore{key}"


def describe_dataset(
    dataset: datasets.Dataset, files: int, rows: int | None = None, *, names_files: bool = False
) -> tuple[bytes, bytes]:
    """``state.json`` and ``dataset_info.json`` of a dataset in so many data files.

    Args:
        dataset: has the features, the format, the split and the fingerprint.
        files: the number of data files.
        rows: the number of rows in them; by default the dataset's.
        names_files: whether rows name local files.

    Raises:
        SerializationError: the dataset's format holds a value that JSON cannot hold.
    """
    state: dict[str, Any] = {name: getattr(dataset, name) for name in ("_fingerprint", *FORMAT)}
    state["_split"] = None if dataset.split is None else str(dataset.split)
    state[ROWS_KEY] = len(dataset) if rows is None else rows
    if names_files:
        state[NAMES_FILES_KEY] = True
    state["_data_files"] = [{"filename": data_file_name(number, files)} for number in range(files)]
    try:
        text = json.dumps(state, indent=2, sort_keys=True)
    except TypeError as error:
        raise SerializationError(
            f"the dataset's format {dataset._format_type!r} cannot be stored: {error}; put "
            "dataset.with_format(None), and set the format or the transform on the dataset that `get` returns"
        ) from None
    info = asdict(dataset.info)
    return text.encode(), json.dumps({name: info[name] for name in sorted(info)}, indent=2).encode()


def data_file_name(number: int, files: int) -> str:
    """Name of a data file."""
    return f"data-{number:05d}-of-{files:05d}.arrow"


def assemble(state: bytes, info: bytes, tables: list[Table]) -> datasets.Dataset:
    """The dataset that `make_part` described, from its data files."""
    described = json.loads(state)
    split = described["_split"]
    dataset = datasets.Dataset(
        concat_tables(tables),
        info=datasets.DatasetInfo.from_dict(json.loads(info)),
        split=None if split is None else datasets.Split(split),
        fingerprint=described["_fingerprint"],
    )
    for name in FORMAT:
        setattr(dataset, name, described[name])
    return dataset


def assemble_stream(
    state: bytes,
    info: bytes,
    batches: Callable[..., Iterator[tuple[int, pa.Table]]],
    arguments: dict[str, Any],
) -> datasets.IterableDataset:
    """The iterable dataset of ``batches(**arguments)``. Lists among the arguments are its shards."""
    described = json.loads(state)
    split = described["_split"]
    dataset = datasets.IterableDataset(
        ArrowExamplesIterable(batches, arguments),
        info=datasets.DatasetInfo.from_dict(json.loads(info)),
        split=None if split is None else datasets.Split(split),
    )
    return dataset.with_format(described["_format_type"]) if described["_format_type"] else dataset


def table_in_memory(data: bytes) -> Table:
    """The table of an Arrow stream held in memory."""
    return InMemoryTable.from_buffer(pa.py_buffer(data))


def table_mapped(path: str) -> Table:
    """The table of an Arrow stream in a file, mapped."""
    return MemoryMappedTable.from_file(path)
