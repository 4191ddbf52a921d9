"""Datasets as entries of a store: puts one in a single commit, and finds one as it was at one moment.

A dataset ``name`` is the entries ``name/state.json``, ``name/dataset_info.json`` and ``name/data-….arrow``. A
dictionary of datasets has ``name/dataset_dict.json`` and below it a dataset for each split. These entries
have the layout of `save_to_disk`, so `datasets.load_from_disk` reads the same through a mount.

Must never show files of two puts as one dataset: all files are committed together, and read again if a name
changed during the lookup.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import datasets
from blake3 import blake3
from datasets.table import Table

from castore.adapters.datasets.mapped_files import forget_copies
from castore.adapters.datasets.stored_table import SMALL_BYTES, damage_error, load_tables, open_lazy_table
from castore.adapters.datasets.tables import (
    INFO_FILE,
    NAMES_FILES_KEY,
    ROWS_KEY,
    SPLITS_FILE,
    STATE_FILE,
    DatasetPart,
    KeptFile,
    assemble,
    data_file_name,
)  # fmt: skip
from castore.adapters.mapped_check import check_object, file_time, note_new
from castore.errors import CorruptError, NotFoundError
from castore.names import check_name
from castore.records import LOOSE, Blob, Found, has_expired
from castore.store import Store
from castore.write.batch import Batch

_ATTEMPTS = 5


class DatasetSize(NamedTuple):
    """The size of a kept dataset: bytes uncompressed, and bytes in the store."""

    logical: int
    stored: int


class StorageOptions(NamedTuple):
    """Storage options of datasets: codec and level, and the seconds until they expire, or None for never."""

    codec: str
    level: int | None = None
    ttl: float | None = None

    @property
    def seconds_to_live(self) -> float:
        """As the store takes it: infinite for never. None would be the store's default, which the callers
        have applied already.
        """
        return math.inf if self.ttl is None else float(self.ttl)


class DatasetFiles(NamedTuple):
    """The files of one dataset at one moment: name to blob, the state first, then the description."""

    blobs: dict[str, Blob]
    state: bytes
    info: bytes

    @property
    def data(self) -> list[tuple[str, Blob]]:
        """The data files, in order."""
        return list(self.blobs.items())[2:]

    @property
    def size(self) -> DatasetSize:
        """Of all files together."""
        blobs = self.blobs.values()
        return DatasetSize(sum(blob.size for blob in blobs), sum(blob.stored for blob in blobs))


# --- putting ------------------------------------------------------------------------------------------------


def put_parts(
    store: Store,
    name: str,
    parts: Mapping[str, DatasetPart],
    options: StorageOptions,
    metadata: dict[str, Any],
) -> DatasetSize:
    """Keep datasets below ``name``, in one commit.

    Args:
        parts: the datasets, by split; a single dataset under "".
        metadata: metadata that is kept with each part's state.

    Raises:
        FullError, TooLargeError: the datasets do not fit into the budget, or onto the disk.
        NotFoundError: a kept file is not there any more.
        SerializationError: a dataset's format cannot be kept.
    """
    check_name(name)
    started = file_time()
    batch = store.batch(codec=options.codec, level=options.level, ttl=options.seconds_to_live)

    def put() -> None:
        files = [
            file
            for split, part in parts.items()
            for file in _put_part(batch, _split_name(name, split), part, metadata)
        ]
        if "" not in parts:
            files.append(
                _put_small(
                    batch, f"{name}/{SPLITS_FILE}", json.dumps({"splits": list(parts)}).encode(), metadata
                )
            )
        for old in set(_entry_names(store, name)).difference(files):
            batch.delete(old)

    entries = batch.run(put)
    for entry in entries:
        found = store.find(entry.name) if entry.size > SMALL_BYTES else None
        if found is not None:
            note_new(store, [found.blob], started)
    return DatasetSize(sum(entry.size for entry in entries), sum(entry.stored for entry in entries))


def _put_part(batch: Batch, name: str, part: DatasetPart, metadata: dict[str, Any]) -> list[str]:
    """Put all files of one dataset; return their names."""
    digests = []
    for number, source in enumerate(part.files()):
        file = f"{name}/{number}"
        if isinstance(source, KeptFile):
            digests.append(batch.link(file, source.digest))
        elif isinstance(source, str):
            digests.append(batch.put_file(file, source))
        else:
            digests.append(batch.put(file, memoryview(source)))
    files = [f"{name}/{data_file_name(number, len(digests))}" for number in range(len(digests))]
    batch.rename({f"{name}/{number}": file for number, file in enumerate(files)})
    state, info = part.describe([bytes.fromhex(digest) for digest in digests])
    return [
        *files,
        _put_small(batch, f"{name}/{INFO_FILE}", info, {}),
        _put_small(batch, f"{name}/{STATE_FILE}", state, metadata),
    ]


def _put_small(batch: Batch, name: str, data: bytes, metadata: dict[str, Any]) -> str:
    batch.put(name, data, codec="zstd", metadata=metadata)
    return name


def _split_name(name: str, split: str) -> str:
    return f"{name}/{split}" if split else name


def _entry_names(store: Store, name: str) -> list[str]:
    """All entries of the dataset, or the dictionary of datasets, of that name."""
    names = {entry.name for entry in store.entries(name)}
    folders = [name] if f"{name}/{STATE_FILE}" in names else []
    if f"{name}/{SPLITS_FILE}" in names:
        splits = store.get(f"{name}/{SPLITS_FILE}")
        folders = [f"{name}/{split}" for split in json.loads(splits)["splits"]] if splits else []
        return [f"{name}/{SPLITS_FILE}", *(item for item in names if _is_file_of(item, folders))]
    return [item for item in names if _is_file_of(item, folders)]


def _is_file_of(name: str, folders: list[str]) -> bool:
    folder, _, file = name.rpartition("/")
    return folder in folders and (
        file in (STATE_FILE, INFO_FILE) or (file.startswith("data-") and file.endswith(".arrow"))
    )


# --- finding ------------------------------------------------------------------------------------------------


def kind_of(store: Store, name: str) -> str | None:
    """``"dataset"``, ``"splits"``, or None if nothing of that name is kept."""
    if store.entry(f"{name}/{STATE_FILE}") is not None:
        return "dataset"
    return "splits" if store.entry(f"{name}/{SPLITS_FILE}") is not None else None


def splits_of(store: Store, name: str) -> list[str]:
    """The names of the datasets in a dictionary of datasets.

    Raises:
        NotFoundError, CorruptError: as for `find_files`.
    """
    return [str(split) for split in json.loads(read_file(store, f"{name}/{SPLITS_FILE}"))["splits"]]


def metadata_of(store: Store, name: str) -> dict[str, Any] | None:
    """The metadata kept with a dataset, or None if there is no dataset of that name."""
    entry = store.entry(f"{name}/{STATE_FILE}")
    return None if entry is None else entry.metadata


def find_files(store: Store, name: str) -> DatasetFiles:
    """The files of a dataset as they are at one moment.

    Raises:
        NotFoundError: there is no such dataset, or gc has removed a part of it.
        CorruptError: the dataset's description is damaged.
    """
    for _ in range(_ATTEMPTS):
        state = read_file(store, f"{name}/{STATE_FILE}")
        names = [f"{name}/{STATE_FILE}", f"{name}/{INFO_FILE}"]
        names += [f"{name}/{item['filename']}" for item in json.loads(state)["_data_files"]]
        found = store.find_many(names)
        blobs = {part: found[part].blob for part in names if _is_unexpired(found.get(part))}
        if len(blobs) < len(names):
            missing = next(part for part in names if part not in blobs)
            raise NotFoundError(
                f"{missing!r}, a part of the dataset {name!r}, is missing in {store.path}; put the "
                "dataset again"
            )
        if found[names[0]].blob.digest == blake3(state).digest():
            info = store.get_blob(blobs[names[1]])
            if info is None:
                raise damage_error(names[1])
            return DatasetFiles(blobs, state, info)
    raise NotFoundError(
        f"the dataset {name!r} in {store.path} was replaced during each of {_ATTEMPTS} reads; try again"
    )


def _is_unexpired(found: Found | None) -> bool:
    return found is not None and not has_expired(found.expires, time.time())


def read_file(store: Store, name: str) -> bytes:
    """The bytes of a small file.

    Raises:
        NotFoundError, CorruptError: the bytes are missing, or damaged.
    """
    data = store.get(name)
    if data is None:
        # In this order: an entry that expires in between is no damage.
        if store.entry(name) is None:
            raise NotFoundError(f"there is no entry {name!r} in {store.path}")
        raise damage_error(name)
    return data


def load(store: Store, name: str) -> datasets.Dataset:
    """The dataset of that name: lazy, mapped, or in memory where it is small.

    Raises:
        NotFoundError, CorruptError: as for `find_files`; data files included.
    """
    return load_files(store, find_files(store, name))


def set_damaged_aside(store: Store, name: str) -> None:
    """Check all data files of a dataset of which one is damaged, so that those who make it anew know of each.

    Raises:
        NotFoundError, CorruptError: as for `find_files`.
    """
    for _, blob in find_files(store, name).data:
        with contextlib.suppress(NotFoundError, CorruptError):
            if blob.pack == LOOSE:
                check_object(store, blob)
            else:
                store.get_blob(blob)


def load_files(store: Store, files: DatasetFiles) -> datasets.Dataset:
    """The dataset of `find_files`. See `load`."""
    tables = _open_lazily(store, files) or load_tables(store, files.data)
    for part in files.blobs:
        store.count_use(part)
    return assemble(files.state, files.info, tables)


def _open_lazily(store: Store, files: DatasetFiles) -> list[Table]:
    state = json.loads(files.state)
    rows, names_files = state.get(ROWS_KEY), state.get(NAMES_FILES_KEY, False)
    features = datasets.DatasetInfo.from_dict(json.loads(files.info)).features
    if not rows or not features:
        return []
    table = open_lazy_table(store, files.data, features.arrow_schema, rows, names_files=names_files)
    return [] if table is None else [table]


def size_of(store: Store, name: str) -> DatasetSize:
    """The size of the dataset of that name."""
    return facts_of(store, name)[1]


def facts_of(store: Store, name: str) -> tuple[dict[str, Any] | None, DatasetSize]:
    """As `metadata_of` and `size_of`, with one query of the index."""
    entries = {entry.name: entry for entry in store.entries(name) if _is_file_of(entry.name, [name])}
    state = entries.get(f"{name}/{STATE_FILE}")
    size = DatasetSize(sum(e.size for e in entries.values()), sum(e.stored for e in entries.values()))
    return (None if state is None else state.metadata), size


def drop(store: Store, name: str) -> bool:
    """Remove a dataset, or a dictionary of datasets, and its materialised copies; False if there was none."""
    names = _entry_names(store, name)
    forget_copies(
        store, [found.blob for found in store.find_many(names).values() if found.blob.size > SMALL_BYTES]
    )
    return store.delete_many(names) > 0
