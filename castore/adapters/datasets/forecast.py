"""Foretells, before a run, which blocks of its steps are kept. Runs nothing.

The blocks of a step's result are the blocks of the next step. So kept results lead from step to step, past
those that are not there: their rows are known only after a run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
        rows_kept: rows of the blocks whose results are kept, and of kept parts of other blocks. Such parts
            are known only where the input is there.
        features: the features of its result; None where only parts of its first block are kept.
        pieces: the files of its result.
        is_guess: whether the features of its result are a guess, and with them what is kept.
    """

    blocks: int
    kept: int
    rows_in: int | None
    rows_kept: int
    features: datasets.Features | None
    pieces: Sequence[Piece]
    is_guess: bool


def stand_in(features: datasets.Features, pieces: Sequence[Piece]) -> datasets.Dataset:
    """A dataset without a format that has the features and about the size of files, and no rows to read."""
    rows = sum(piece.rows or 0 for piece in pieces)
    size = sum(piece.size for piece in pieces)
    table = LazyTable(features.arrow_schema, rows, MappedRows(size, "", None), names_files=False)
    return datasets.Dataset(table, info=datasets.DatasetInfo(features=features), fingerprint="unread")


def forecast(
    run: BlockRun, step: BlockStep, pieces: Sequence[Piece] | None, features: str | None
) -> Forecast | None:
    """Foretell the blocks and rows of a step.

    Args:
        run: a run of the step.
        step: the step.
        pieces: the files of its input; None to read the input.
        features: the features of an earlier result, a guess where the first block's result is not kept: that
            one decides about the others.

    Returns:
        None where that is known only after a run: there is no guess, nothing is kept that it leads to, or
        the files are no blocks of an input that is not there yet.
    """
    in_parts = 0
    if pieces is None:
        found: list[tuple[int | None, BlockResult | None, int]] = []
        for each in run.find(source_blocks(step.dataset, step.rule), features):
            rows = None if each.result is not None or each.block is None else each.block.read()
            found.append((None if rows is None else len(rows), each.result, 0))
            in_parts += 0 if rows is None else run.rows_in_parts(each, rows)
    elif (
        step.rule.multiple
        or step.is_numbered
        or len(pieces) == 1  # which may be cut
        or not are_blocks([piece.size for piece in pieces])
        or any(piece.names_files for piece in pieces)
    ):
        return None
    else:
        groups = list(_put_together(pieces, step.rule.first_rows))
        kept = run.find(map(_block, groups), features)
        found = [
            (_rows(group), result, sum(piece.size for piece in group))
            for group, (_, result, _, _) in zip(groups, kept, strict=False)
        ]
        if len(found) < len(groups):
            return None
    results = [result for _, result, _ in found if result is not None]
    kept_rows = in_parts + sum(result.rows_in for result in results)
    if not step.has_features and not any(result.rows for result in results):
        if not in_parts:
            return None
        # Without features those behind the first were not looked for.
        blocks = len(found) if features else sum(1 for _ in source_blocks(step.dataset, step.rule))
        return Forecast(blocks, len(results), len(step.dataset), kept_rows, None, (), is_guess=False)
    counts = [rows if result is None else result.rows_in for rows, result, _ in found]
    decides = next((result for _, result, _ in found if result is None or result.rows), None)
    return Forecast(
        blocks=len(found),
        kept=len(results),
        rows_in=None if None in counts else sum(count or 0 for count in counts),
        rows_kept=kept_rows,
        features=run.features_of(results) if results else step.dataset.features,
        pieces=[
            _result_piece(rows, result, size, step)
            for rows, result, size in found
            if result is None or result.rows
        ],
        is_guess=decides is None and not step.has_features,
    )


def _result_piece(rows: int | None, result: BlockResult | None, size: int, step: BlockStep) -> Piece:
    if result is not None:
        return Piece(result.digest, result.rows, result.size, result.names_files)
    return Piece(None, rows if step.keeps_count else None, size)


def _rows(group: Sequence[Piece]) -> int | None:
    counts = [piece.rows for piece in group]
    return None if None in counts else sum(count or 0 for count in counts)


def _put_together(pieces: Sequence[Piece], first_rows: int) -> Iterator[list[Piece]]:
    """Files as blocks, as `source_blocks` puts them together. A file that is not there yet ends a block, and
    has about as many rows for its size as the others.
    """
    known = [piece for piece in pieces if piece.rows is not None]
    rows_a_byte = sum(piece.rows or 0 for piece in known) / max(1, sum(piece.size for piece in known))
    group: list[Piece] = []
    is_first = True
    for piece in pieces:
        group.append(piece)
        size = sum(item.size for item in group)
        is_whole = piece.digest is None or ends_block(bytes.fromhex(piece.digest), piece.size, size)
        if is_whole and is_first and first_rows:
            counts = (item.size * rows_a_byte if item.rows is None else item.rows for item in group)
            is_whole = sum(counts) >= first_rows
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
