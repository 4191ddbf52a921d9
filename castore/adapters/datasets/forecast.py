"""Foretells, before a run, which blocks of its steps are kept. Runs nothing.

The blocks of a step's result are the blocks of the next step. So kept results lead from step to step, past
those that are not there: their rows are known only after a run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import datasets
import pyarrow as pa

from castore.adapters.datasets.block_entries import BlockResult
from castore.adapters.datasets.block_runner import BlockRun
from castore.adapters.datasets.block_step import BlockStep
from castore.adapters.datasets.lazy_table import LazyTable, MappedRows
from castore.adapters.datasets.source_blocks import (
    SourceBlock,
    are_blocks,
    ends_block,
    joined_digest,
    source_blocks,
)


class Piece(NamedTuple):
    """A file of a step's input.

    Attributes:
        digest: 64 hexadecimal digits; None where the file is not there yet.
        rows: rows in it; None where they are not known yet.
        size: bytes of the file, or about so many.
        names_files: whether its rows name local files, which count as well.
    """

    digest: str | None
    rows: int | None
    size: int
    names_files: bool = False


class Forecast(NamedTuple):
    """The blocks and rows of a step, and those that are kept.

    Attributes:
        blocks, kept: blocks of its input, and those whose results are kept.
        rows_in: rows of its input; None where they are not known yet.
        rows_kept: rows of the blocks whose results are kept.
        features: the features of its result.
        pieces: the files of its result.
    """

    blocks: int
    kept: int
    rows_in: int | None
    rows_kept: int
    features: datasets.Features
    pieces: Sequence[Piece]


def stand_in(features: datasets.Features, pieces: Sequence[Piece]) -> datasets.Dataset:
    """A dataset without a format that has the features and about the size of files, and no rows to read."""
    rows = sum(piece.rows or 0 for piece in pieces)
    size = sum(piece.size for piece in pieces)
    table = LazyTable(features.arrow_schema, rows, MappedRows(size, "", None), names_files=False)
    return datasets.Dataset(table, info=datasets.DatasetInfo(features=features), fingerprint="unread")


def forecast(run: BlockRun, step: BlockStep, pieces: Sequence[Piece] | None) -> Forecast | None:
    """Foretell the blocks and rows of a step.

    Args:
        run: a run of the step.
        step: the step.
        pieces: the files of its input; None to read the input.

    Returns:
        None where that is known only after a run: the first block's result, which decides about the others,
        is not kept, or the files are no blocks of an input that is not there yet.
    """
    if pieces is None:
        found = [
            (None if result is not None else len(block.read()), result)
            for block, result in run.find(source_blocks(step.dataset, step.rule))
            if block is not None
        ]
    elif (
        step.rule.multiple
        or step.is_numbered
        or not are_blocks([piece.size for piece in pieces])
        or any(piece.names_files for piece in pieces)
    ):
        return None
    else:
        groups = list(_put_together(pieces, step.rule.first_rows))
        kept = run.find(map(_block, groups))
        found = [(_rows(group), result) for group, (_, result) in zip(groups, kept, strict=False)]
        if len(found) < len(groups):
            return None
    results = [result for _, result in found if result is not None]
    if not step.has_features and not any(result.rows for result in results):
        return None
    features = run.features_of(results) if results else step.dataset.features
    counts = [rows if result is None else result.rows_in for rows, result in found]
    return Forecast(
        blocks=len(found),
        kept=len(results),
        rows_in=None if None in counts else sum(count or 0 for count in counts),
        rows_kept=sum(result.rows_in for result in results),
        features=features,
        pieces=[_result_piece(rows, result, step) for rows, result in found if result is None or result.rows],
    )


def _result_piece(rows: int | None, result: BlockResult | None, step: BlockStep) -> Piece:
    if result is not None:
        return Piece(result.digest, result.rows, result.size, result.names_files)
    return Piece(None, rows if step.keeps_count else None, 0)


def _rows(group: Sequence[Piece]) -> int | None:
    counts = [piece.rows for piece in group]
    return None if None in counts else sum(count or 0 for count in counts)


def _put_together(pieces: Iterable[Piece], first_rows: int) -> Iterator[list[Piece]]:
    """Files as blocks, as `source_blocks` puts them together. A file that is not there yet ends a block."""
    group: list[Piece] = []
    is_first = True
    for piece in pieces:
        group.append(piece)
        size = sum(item.size for item in group)
        is_whole = piece.digest is None or ends_block(bytes.fromhex(piece.digest), piece.size, size)
        if is_whole and is_first and first_rows:
            is_whole = sum(item.rows or 0 for item in group) >= first_rows
        if is_whole:
            yield group
            group, is_first = [], False
    if group:
        yield group


def _block(group: Sequence[Piece]) -> SourceBlock | None:
    """Files as a block; None if one of them is not there yet."""
    digests = [bytes.fromhex(piece.digest) for piece in group if piece.digest is not None]
    return SourceBlock(joined_digest(digests).hex(), _no_rows) if len(digests) == len(group) else None


def _no_rows() -> pa.Table:
    raise AssertionError("a forecast reads no blocks of files")
