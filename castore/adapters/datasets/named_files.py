"""The local files that rows of images, sounds, films and documents name where they do not hold the bytes.

A function sees what such a file holds. So a file counts by its size, its time of modification, its inode, and
the time when that was changed, which no program can set. An archive counts where a path leads into one
(``zip://inner.png::archive.zip``). A file on the network counts by its address alone. Must never read a file.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from datasets.features.features import require_storage_embed

_Numbers = npt.NDArray[np.int64]
# A row's value that may name a file has these.
_KEYS = {"bytes", "path"}
_PLAIN = frozenset({str, int, float, bool, bytes, type(None)})


def may_name_files(features: Mapping[str, Any]) -> bool:
    """Whether rows of those features may name files."""
    return any(map(require_storage_embed, features.values()))


def file_states(table: pa.Table, features: Mapping[str, Any]) -> list[list[Any]]:
    """The path, size, times in nanoseconds, and inode of each file that rows name, in the order of paths.

    A file that is not there has its path alone: the step that reads it reports it.
    """
    paths = {path for _, array in _paths(table, features) for path in array.unique().to_pylist()}
    return [[path, *_state(path)] for path in sorted(paths) if _local(path)]


def names_local_files(table: pa.Table, features: Mapping[str, Any]) -> bool:
    """Whether rows name local files, which need not be there."""
    return any(path and _local(path) for _, array in _paths(table, features) for path in array.to_pylist())


def states_named_by(values: Iterable[Any]) -> list[list[Any]]:
    """`file_states` of the files that Python values name as images and sounds do that are not decoded:
    ``{"bytes": None, "path": …}``.
    """
    return [[path, *_state(path)] for path in sorted(set(_named_by(values))) if _local(path)]


def file_sizes(table: pa.Table, features: Mapping[str, Any]) -> _Numbers:
    """For each row the bytes of the files that it names."""
    sizes = np.zeros(len(table), np.int64)
    for rows, array in _paths(table, features):
        unique = array.dictionary_encode()
        each = [_state(path)[:1] or [0] if _local(path) else [0] for path in unique.dictionary.to_pylist()]
        if each:
            np.add.at(sizes, rows, np.array(each, np.int64)[:, 0][np.asarray(unique.indices)])
    return sizes


def _paths(table: pa.Table, features: Mapping[str, Any]) -> Iterator[tuple[_Numbers, pa.Array]]:
    """Numbers of rows, and the path that each of these rows names, as often as it names any."""
    for name, feature in features.items():
        if not require_storage_embed(feature):
            continue
        first = 0
        for chunk in table.column(name).chunks:
            yield from _paths_in(chunk, np.arange(first, first + len(chunk)))
            first += len(chunk)


def _paths_in(array: pa.Array, rows: _Numbers) -> Iterator[tuple[_Numbers, pa.Array]]:
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    kind = array.type
    if pa.types.is_struct(kind) and _KEYS.issubset(field.name for field in kind):
        path = array.field("path")
        names = pc.and_(pc.and_(array.is_valid(), array.field("bytes").is_null()), path.is_valid())
        yield rows[np.asarray(names)], path.filter(names)
        return
    if array.null_count:
        is_valid = array.is_valid()
        rows, array = rows[np.asarray(is_valid)], array.filter(is_valid)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        yield from _paths_in(array.flatten(), rows[np.asarray(pc.list_parent_indices(array))])
    elif pa.types.is_struct(kind):
        for place in range(kind.num_fields):
            yield from _paths_in(array.field(place), rows)


def _named_by(values: Iterable[Any]) -> Iterator[str]:
    if _PLAIN.issuperset(map(type, values)):  # as long lists of numbers are
        return
    for value in values:
        if type(value) is list:
            yield from _named_by(value)
        elif type(value) is dict and value.keys() != _KEYS:
            yield from _named_by(value.values())
        elif type(value) is dict and value["bytes"] is None and isinstance(value["path"], str):
            yield value["path"]


def _local(path: str) -> str:
    """The path of a local file; empty for a file on the network."""
    if "://" in path:
        path = path.rpartition("::")[2].removeprefix("file://")
    return "" if "://" in path else path


def _state(path: str) -> list[int]:
    try:
        status = os.stat(_local(path))
    except (OSError, ValueError):  # a null byte is no part of a path
        return []
    # Archives are unpacked with the old times of files, many within one tick of the clock. The inode tells
    # two of them apart.
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]
