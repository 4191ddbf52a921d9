"""A dataset as the files of a `save_to_disk` folder, and those files as a dataset again; and no disk in between.

A dataset whose table is whole Arrow files already, with batches of a good size, is told by their paths, so that they
are read once, in constant memory. Any other one is written a file of about `SHARD_BYTES` at a time, in memory, rows in
the order the dataset shows them: a selection, a shuffle or a filter is flattened by it, and small batches are put
together.

Assumes the layout of datasets 3 to 5: ``state.json``, ``dataset_info.json``, ``data-00000-of-00001.arrow``. Must never
write what `datasets.load_from_disk` cannot read.
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

from castore.adapters.datasets.late import LateTable
from castore.errors import SerializationError
from castore.keys import key

STATE, INFO, SPLITS = "state.json", "dataset_info.json", "dataset_dict.json"
#: In the state, beside what `save_to_disk` writes there: how many rows the data files have.
ROWS = "_rows"
#: Bytes of Arrow data after which a new file is begun, for datasets that are written here.
SHARD_BYTES = 128 * 1024 * 1024
# Opening a stream reads the head of each of its batches: through a mount, a page and a frame for each.
_BATCH_BYTES = 8 * 1024 * 1024
_FIRST_BYTES = 256 * 1024
_SMALLEST_BATCHES = 1024 * 1024
_ITERATED_ROWS = 1000
# A table that was only given its features' description again still is its file.
_HARMLESS_REPLAYS = frozenset({"replace_schema_metadata"})


def whole_files(dataset: datasets.Dataset) -> list[str] | None:
    """Paths of the Arrow files which are, one after the other, exactly the dataset's rows; None if there are none."""
    if dataset._indices is not None or any(map(require_storage_embed, dataset.features.values())):
        return None
    table = dataset._data.table
    batches = max((column.num_chunks for column in table.columns), default=0)
    if batches > 1 and table.nbytes < batches * _SMALLEST_BATCHES:
        return None  # `map` writes batches of 1,000 rows: worth putting together
    return table_files(dataset._data)


def table_files(table: Table) -> list[str] | None:
    """Paths of the Arrow files which are, one after the other, exactly a table's rows; None if there are none."""
    blocks = mapped_blocks(table, _HARMLESS_REPLAYS)
    return None if blocks is None else [block.path for block in blocks]


def mapped_blocks(table: Table, allowed: Set[str]) -> list[MemoryMappedTable] | None:
    """The mapped tables which are, one after the other, a table's rows; None if there are none.

    Args:
        table: mapped, or put together of mapped ones.
        allowed: what may have been done to them since they were mapped, as `datasets` calls it.
    """
    found: list[MemoryMappedTable] = []
    for block in row_blocks(table) or ():
        if isinstance(block, LateTable):
            inner = mapped_blocks(block.whole(), allowed)
            if inner is None:
                return None
            found += inner
        elif isinstance(block, MemoryMappedTable) and all(what in allowed for what, *_ in block.replays):
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
    """Tables as Arrow streams of about `SHARD_BYTES`, of at least one; files that images name are taken in."""
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


def _after_a_small_one(table: pa.Table) -> Iterator[pa.Table]:
    """A table in two, so that who looks at the first rows of a file need not decode a whole batch."""
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


def part_of(dataset: datasets.Dataset | datasets.IterableDataset) -> Part:
    """A dataset, or what an iterable one yields, to be kept.

    Raises:
        SerializationError: (when described) its format holds what JSON cannot.
    """
    if isinstance(dataset, datasets.IterableDataset):
        return _part_of_iterable(dataset)
    return Part(
        lambda: whole_files(dataset) or arrow_files(dataset), lambda digests: _describe(dataset, len(digests))
    )


def _part_of_iterable(dataset: datasets.IterableDataset) -> Part:
    features = dataset.features or dataset._resolve_features().features or datasets.Features()
    info = dataset.info.copy()
    info.features = features
    formatting = dataset._formatting

    def files() -> Iterator[pa.Buffer]:
        return written(dataset.with_format("arrow").iter(_ITERATED_ROWS), features)

    def describe(digests: list[bytes]) -> tuple[bytes, bytes]:
        empty = datasets.Dataset(
            InMemoryTable(features.arrow_schema.empty_table()),
            info=info,
            split=dataset.split,
            fingerprint=our_fingerprint(key([*digests, str(features)])),
        )
        empty._format_type = formatting.format_type if formatting else None
        return _describe(empty, len(digests))

    return Part(files, describe)


def our_fingerprint(digits: str) -> str:
    """The fingerprint of a dataset whose rows are told by a key of 40 digits."""
    return f"castore{digits}"


def _describe(dataset: datasets.Dataset, files: int) -> tuple[bytes, bytes]:
    names = ("_fingerprint", "_format_columns", "_format_kwargs", "_format_type", "_output_all_columns")
    state: dict[str, Any] = {name: getattr(dataset, name) for name in names}
    state["_split"] = None if dataset.split is None else str(dataset.split)
    state[ROWS] = len(dataset)
    state["_data_files"] = [{"filename": data_file(number, files)} for number in range(files)]
    try:
        text = json.dumps(state, indent=2, sort_keys=True)
    except TypeError as error:
        raise SerializationError(
            f"the dataset's format {dataset._format_type!r} cannot be kept: {error}; put dataset.with_format(None)"
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
    """The iterable dataset of what ``batches(**arguments)`` yields; lists among the arguments are its shards."""
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
