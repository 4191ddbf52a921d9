"""The input of a step as blocks: their rows, and the digits that distinguish the rows from all others.

Files of a kept dataset that are about as large as a block, and whose rows name no other files, are blocks as
they are. The digests of such files are known, so nothing is read to find out whether a result is there: the
blocks of one step's result are the blocks of the next step. All other rows are cut (`cutting`), and a block
counts by the digest of its rows, and by the state of the local files that they name.

Must never hold more rows than those of two blocks, and those that are being read.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import datasets
import pyarrow as pa
from blake3 import blake3

from castore.adapters.datasets.cutting import Cut, cut, ends_at
from castore.adapters.datasets.lazy_table import LazyTable
from castore.adapters.datasets.named_files import file_sizes, file_states, may_name_files
from castore.adapters.datasets.tables import batch_rows, row_blocks
from castore.keys.encoder import fingerprint
from castore.keys.table_digest import table_digest
from castore.records import Blob

# Kept datasets that no step made have files of 128 MiB. A step's files may be large where its rows grew.
_LARGEST_FILE = 64 * 1024 * 1024
# Smaller files are put together: a strict filter leaves few rows of each block. Many rows of a few bytes each
# are more than that.
_SMALLEST_FILE = 64 * 1024
# A file is asked for its size before its row is in a block. Those of so many rows are asked at a time.
_ROWS_WITH_FILES = 1000


class SourceBlock(NamedTuple):
    """A block of a step's input.

    Attributes:
        digest: hexadecimal digits that distinguish its rows, and what they name, from all others.
        read: returns the rows.
        files: the state of the files that its rows name, as `named_files.file_states` has it.
    """

    digest: str
    read: Callable[[], pa.Table]
    files: Sequence[Any] = ()


def source_blocks(dataset: datasets.Dataset, rule: Cut) -> Iterator[SourceBlock]:
    """The rows of a dataset as blocks, in order; read once, from the first to the last."""
    files = [] if rule.multiple else _files_that_are_blocks(dataset)
    if len(files) > 1:
        yield from _put_together(files, rule.first_rows)
        return
    features = dataset.features
    batch = min(batch_rows(dataset), _ROWS_WITH_FILES) if may_name_files(features) else batch_rows(dataset)
    for rows in cut_rows(dataset.with_format("arrow").iter(batch), features, rule):
        if files and len(rows) == len(dataset):  # the block of which it will be one, once there are others
            yield _block_of(files)._replace(read=partial(_given, rows))
        else:
            yield block_of_rows(rows, features)


def cut_rows(
    tables: Iterable[pa.Table], features: datasets.Features, rule: Cut, finer: int = 1
) -> Iterator[pa.Table]:
    """Rows with those features, cut with the bytes of files that they name; other arguments as for `cut`."""
    sizes = partial(file_sizes, features=features) if may_name_files(features) else None
    return cut(tables, rule, sizes, finer)


def block_of_rows(rows: pa.Table, features: datasets.Features) -> SourceBlock:
    """Rows with those features as a block."""
    rows = rows.combine_chunks()  # rows picked one by one are a chunk each
    digest, named = table_digest(rows), file_states(rows, features) if may_name_files(features) else []
    if named:
        digest = fingerprint([digest, named])
    return SourceBlock(digest, partial(_given, rows), named)


def _given(rows: pa.Table) -> pa.Table:
    return rows


class ReadAhead:
    """Blocks from a thread that cuts, hashes and reads the next one while the present one is used.

    Args:
        blocks: the blocks.
    """

    def __init__(self, blocks: Iterator[SourceBlock]) -> None:
        self._blocks = blocks
        #: Whether the next block's rows will be wanted, and not its digest alone.
        self.wants_rows = False

    def __iter__(self) -> Generator[SourceBlock, None, None]:
        with ThreadPoolExecutor(1, thread_name_prefix="castore-reader") as reader:
            coming = reader.submit(self._next)
            while (block := coming.result()) is not None:
                coming = reader.submit(self._next)
                yield block

    def _next(self) -> SourceBlock | None:
        block = next(self._blocks, None)
        if block is None or not self.wants_rows:
            return block
        return block._replace(read=partial(_given, block.read()))


class _File(NamedTuple):
    """A file of a kept dataset: its blob, and its place among the table's files."""

    blob: Blob
    table: LazyTable
    place: int


def _files_that_are_blocks(dataset: datasets.Dataset) -> list[_File]:
    """The files that hold, in order, the dataset's rows, if they can be blocks; otherwise none.

    Rows that name files are cut: how large their own file is says nothing of the work that they are.
    """
    tables = row_blocks(dataset._data) or []
    if dataset._indices is not None or not all(isinstance(table, LazyTable) for table in tables):
        return []
    if may_name_files(dataset.features) and any(table.names_files for table in tables):
        return []
    files = [_File(blob, table, place) for table in tables for place, blob in enumerate(table.blobs)]
    fit = all(table.blobs for table in tables) and are_blocks([file.blob.size for file in files])
    return files if fit else []


def are_blocks(sizes: Sequence[int]) -> bool:
    """Whether files of those sizes can be blocks as they are. A single one is cut, and may have several."""
    return all(size <= _LARGEST_FILE for size in sizes)


def _put_together(files: list[_File], first_rows: int) -> Iterator[SourceBlock]:
    """Files as blocks. A digest decides whether a small file ends a block, so blocks after a change stay."""
    group: list[_File] = []
    size, is_first = 0, True
    for number, file in enumerate(files, start=1):
        group.append(file)
        size += file.blob.size
        is_whole = ends_block(file.blob.digest, file.blob.size, size)
        block = _block_of(group)
        if is_whole and is_first and first_rows:
            rows = block.read()
            is_whole = len(rows) >= first_rows
            block = block._replace(read=partial(_given, rows))
        if is_whole or number == len(files):
            yield block
            group, size, is_first = [], 0, False


def ends_block(digest: bytes, size: int, group_size: int) -> bool:
    """Whether a file of that digest and size ends a block, with which the block's files have that size."""
    return ends_at(digest, size, _SMALLEST_FILE) or group_size >= 4 * _SMALLEST_FILE


def joined_digest(digests: Sequence[bytes]) -> bytes:
    """The digest of a block of files."""
    return digests[0] if len(digests) == 1 else blake3(b"".join(digests)).digest()


def _block_of(files: list[_File]) -> SourceBlock:
    digest = joined_digest([file.blob.digest for file in files])

    def read() -> pa.Table:
        return pa.concat_tables([file.table.read_file(file.place) for file in files])

    return SourceBlock(digest.hex(), read)
