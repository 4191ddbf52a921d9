"""A fingerprint of a dataset's rows, for the keys of results that are computed from those rows.

The fingerprint of the datasets library has 64 bits, and is random wherever the library could not hash
something. So it counts only where a cached step of castore made it from a key. Every other dataset counts by
its content. Arrow files count by the digest of their bytes, which the store remembers by path, size and
times; a file counts the same through a mount, from a copy or before it is read. Tables in memory count by the
digest of their columns, a selection by the rows it selects. The format counts by its name, since it decides
what a function sees.

Files that rows of images name count by their state (`named_files`), also in the result of a step, and of an
input that is not read yet: its rows are read then. Must never give a random answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import datasets
import pyarrow as pa
from datasets.table import Table

from castore.adapters.datasets.file_digests import file_digest
from castore.adapters.datasets.lazy_dataset import LazyDataset
from castore.adapters.datasets.lazy_table import LazyTable
from castore.adapters.datasets.mapped_files import TAIL
from castore.adapters.datasets.named_files import file_states, may_name_files
from castore.adapters.datasets.operator_keys import HELD, operator_fingerprint
from castore.adapters.datasets.tables import row_blocks, table_files, tables_that_name_files
from castore.errors import InvalidValueError
from castore.keys.encoder import AnyOrder, Encoder, fingerprint
from castore.keys.table_digest import table_digest
from castore.store import Store
from castore.system.mappings import Mappings

# Rows of a selection that are looked at together.
_ROWS = 1000
_OURS = re.compile(r"castore[0-9a-f]{40}").fullmatch


def dataset_fingerprint(dataset: Any, store: Store | None = None) -> str:
    """Digits that distinguish a dataset, as a function sees it, from every other dataset.

    Args:
        dataset: a `datasets.Dataset`, or a `datasets.DatasetDict`.
        store: remembers the digests of large files; None hashes the files each time.

    Raises:
        UnhashableError: the dataset's format holds something without a stable hash.
        InvalidValueError: the value is neither.
    """
    if isinstance(dataset, datasets.DatasetDict):
        return fingerprint({name: dataset_fingerprint(part, store) for name, part in dataset.items()})
    if not isinstance(dataset, datasets.Dataset):
        raise InvalidValueError(
            f"a {type(dataset).__name__} has no rows to tell it by; keep a stream with "
            "DatasetCache.put(name, stream), and pass"
            " what DatasetCache.dataset(name) gives, which is a Dataset"
        )
    shown = format_digest(dataset)
    ours = bool(_OURS(dataset._fingerprint))
    files = files_named(dataset)
    if ours and not (shown or files) and _is_described_by_its_rows(dataset):
        return str(dataset._fingerprint)
    identity = {
        "rows": dataset._fingerprint if ours else _rows(dataset, store),
        "features": features_text(dataset.features),
        "split": None if dataset.split is None else str(dataset.split),
        "format": shown,
    }
    if files:
        identity["files"] = files
    return fingerprint(identity, "dataset")


def files_named(dataset: datasets.Dataset) -> list[list[Any]]:
    """The states of the files that rows of a dataset name, as `file_states` gives them."""
    if isinstance(dataset, LazyDataset) and not dataset.may_name_files:
        return []
    found: dict[str, list[Any]] = {}
    for table in _selected(dataset) if dataset._indices is not None else tables_that_name_files(dataset):
        found.update((state[0], state) for state in file_states(table, dataset.features))
    return [found[path] for path in sorted(found)]


def _selected(dataset: datasets.Dataset) -> Iterator[pa.Table]:
    """The rows of a selection, as far as they may name files: other rows of its table do not count."""
    columns = [name for name, feature in dataset.features.items() if may_name_files({name: feature})]
    if columns:
        yield from dataset.select_columns(columns).with_format("arrow").iter(_ROWS)


def _is_described_by_its_rows(dataset: datasets.Dataset) -> bool:
    """Whether the features are still those that came with the rows, not changed in place."""
    if isinstance(dataset, LazyDataset) and not dataset.is_read:
        return True
    # `dataset.features` would be a deep copy.
    return bool(datasets.Features.from_arrow_schema(dataset._data.schema) == dataset._info.features)


def _rows(dataset: datasets.Dataset, store: Store | None) -> list[Any]:
    indices = None if dataset._indices is None else table_digest(dataset._indices.table)
    return [_digests(dataset._data, store) or table_digest(dataset._data.table), indices]


def _digests(table: Table, store: Store | None) -> list[str] | None:
    """The digests of the Arrow files whose rows, in order, are a table's rows; None if there are none."""
    found: list[str] = []
    mappings = Mappings()
    for block in row_blocks(table) or ():
        if isinstance(block, LazyTable) and block.blobs:
            found += [blob.digest.hex() for blob in block.blobs]  # without reading the blobs
        elif (paths := table_files(block, mappings)) is not None:
            found += [file_digest(path, store, without=TAIL) for path in paths]
        else:
            return None
    return found or None


def features_text(features: datasets.Features | None) -> str:
    """Features as they count in keys: by their text, in which ids do not show, so also by those if any has
    one.
    """
    full = "" if features is None else json.dumps(features.to_dict())
    return full if '"id": "' in full else str(features)


def format_digest(dataset: datasets.Dataset) -> list[Any]:
    """The part of a dataset's format that a function sees, for `castore.key`; empty without a format."""
    shown = dataset._format_columns
    # Naming all columns is the same as naming none.
    columns = None if shown is None or set(shown) == set(dataset.column_names) else sorted(shown)
    if dataset._format_type is None and columns is None:
        return []
    arguments = operator_fingerprint(AnyOrder(dataset._format_kwargs), "dataset.format['format_kwargs']")
    return [dataset._format_type, columns, bool(dataset._output_all_columns), arguments]


def _dataset(encoder: Encoder, value: Any) -> Iterator[Any]:
    yield from ("dataset", dataset_fingerprint(value))


# An operator may hold a dataset.
HELD.add("datasets", ("Dataset", "DatasetDict"), _dataset)
