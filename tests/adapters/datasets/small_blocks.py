"""Blocks of a few rows, so that a test of a few hundred rows has dozens of them, and the comparison with what
plain `datasets` gives.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any
from unittest import mock

import datasets
import pyarrow as pa

from castore.adapters.datasets import (
    block_parts,
    block_step,
    call_watch,
    cutting,
    dataset_entries,
    source_blocks,
    stored_table,
)

#: Bytes and rows of a small block.
BYTES, ROWS = 2048, 32


@contextlib.contextmanager
def small_blocks(size: int = BYTES, rows: int = ROWS) -> Iterator[None]:
    """Cut into blocks of about so many bytes, or rows; kept blocks are read lazily however small they are.

    No block is slow: on a busy machine one call may take as long as a slow function does.
    """
    with (
        mock.patch.object(block_step, "SLOW_SECONDS", math.inf),
        mock.patch.object(cutting, "TARGET_BYTES", size),
        mock.patch.object(cutting, "TARGET_ROWS", rows),
        # The schema alone takes a few kilobytes of a file.
        mock.patch.object(source_blocks, "_SMALLEST_FILE", 2 * size),
        mock.patch.object(stored_table, "SMALL_BYTES", 0),
        mock.patch.object(dataset_entries, "SMALL_BYTES", 0),
    ):
        yield


@contextlib.contextmanager
def slow_blocks(finer: int | None = None) -> Iterator[None]:
    """Take every block for a slow one, from its third call on, and make it from parts.

    Args:
        finer: how many parts a block has on average; None for one for each row.
    """
    with (
        mock.patch.object(block_step, "SLOW_SECONDS", 0.0),
        mock.patch.object(call_watch, "_TELLING_SECONDS", 0.0),
        mock.patch.object(block_parts, "_FINER", block_parts._FINER if finer is None else (finer,)),
    ):
        yield


def told(dataset: Any) -> dict[str, Any]:
    """All that a user sees of a dataset: its rows, types, format and split."""
    if isinstance(dataset, dict):
        return {split: told(part) for split, part in dataset.items()}
    assert isinstance(dataset, datasets.Dataset)
    columns = dataset.format["columns"]
    table = dataset.with_format("arrow")[:] if len(dataset) else None
    return {
        "length": len(dataset),
        "columns": dataset.column_names,
        "features": repr(dataset.features),
        "format": (dataset.format["type"], dataset.format["format_kwargs"], sorted(columns)),
        "output all": dataset.format["output_all_columns"],
        "split": str(dataset.split),
        "description": dataset.info.description,
        "types": None if table is None else str(pa.schema(dataset.features.type)),
        "of the table": None if table is None else str(table.schema.remove_metadata()),
        "rows": [] if table is None else [repr(row) for row in table.to_pylist()],
    }
