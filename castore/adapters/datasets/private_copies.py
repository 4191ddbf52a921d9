"""Copies of datasets that share rows with the original and nothing that can be changed in place.

`set_format`, `info`, the search indices and the end of a ``with`` block change a `datasets.Dataset` in place.
A dataset that is kept, or pending for the store, is therefore an object that no caller has, and every caller
gets its own object.

Arrow's tables never change, but a table in memory may share its memory with a caller's NumPy array.
`private_copy` copies such rows. Mapped files are not copied.
"""

from __future__ import annotations

import copy
from typing import Any

import datasets
import pyarrow as pa
from datasets.table import ConcatenationTable, InMemoryTable, MemoryMappedTable, Table, concat_tables

from castore.adapters.datasets.descriptions import shown_columns
from castore.adapters.datasets.tables import arrow_streams

# Columns that were added to those of a mapped file come from memory.
_FROM_MEMORY = frozenset({"add_column", "append_column", "set_column"})


def own_copy(dataset: datasets.Dataset) -> datasets.Dataset:
    """Another dataset of the same rows, fingerprint and format, without search indices. Reads no rows."""
    # Not `copy.copy`, which reads the rows of a `LazyDataset`.
    same: datasets.Dataset = object.__new__(type(dataset))
    state: dict[str, Any] = dict(vars(dataset))
    state["_info"] = dataset._info.copy()
    state["_format_columns"] = copy.copy(dataset._format_columns)
    state["_format_kwargs"] = _copy_containers(dataset._format_kwargs)
    state["_indexes"] = {}
    same.__setstate__(state)
    return same


def private_copy(dataset: datasets.Dataset) -> datasets.Dataset:
    """As `own_copy`, with no row in memory that a caller can write to."""
    same = own_copy(dataset)
    if not _is_mapped(dataset._data):
        same._data = _take_selection(same) or concat_tables(
            [InMemoryTable.from_buffer(file) for file in arrow_streams(same, embed=False)]
        )
        same._indices = None
    return same


def _take_selection(dataset: datasets.Dataset) -> Table | None:
    """The rows of a selection, copied at once; None if Arrow cannot do that."""
    if dataset._indices is None or not len(dataset):
        return None
    try:
        return InMemoryTable(dataset._data.table.take(dataset._indices.column(0)))
    except pa.ArrowException:  # some extension types, and texts of over 2 GB
        return None


def _is_mapped(table: Table) -> bool:
    if isinstance(table, ConcatenationTable):
        return all(_is_mapped(block) for row in table.blocks for block in row)
    return isinstance(table, MemoryMappedTable) and not any(
        what in _FROM_MEMORY for what, *_ in getattr(table, "replays", ())
    )


def _copy_containers(value: Any) -> Any:
    """Copies of dictionaries, lists and sets, whatever they hold: a transform stays the same object."""
    if isinstance(value, dict):
        return {name: _copy_containers(item) for name, item in value.items()}
    if isinstance(value, list | set):
        return type(value)(_copy_containers(item) for item in value)
    return value


def result_like(dataset: datasets.Dataset, features: datasets.Features, fingerprint: str) -> datasets.Dataset:
    """A copy of a step's input with the features and the fingerprint of the result, but not its rows."""
    result = own_copy(dataset)
    result._info.features = features
    result._fingerprint = fingerprint
    # Also where the columns stay: `flatten` leaves names in the format that are no columns any more.
    result._format_columns = shown_columns(dataset, features)
    return result
