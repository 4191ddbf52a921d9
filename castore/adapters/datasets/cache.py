"""DatasetCache: whole Hugging Face datasets by name, compressed in a store, memory-mapped on return.

`dataset_entries` lays a dataset out in the store, `mapped_files` maps it. Users call this module.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, TypeAlias

import datasets
import pyarrow as pa

from castore.adapters.datasets import dataset_entries
from castore.adapters.datasets.row_stream import part_of_stream
from castore.adapters.datasets.stored_table import decode_batches
from castore.adapters.datasets.tables import (
    SPLITS_FILE,
    STATE_FILE,
    DatasetPart,
    assemble_stream,
    make_part,
)
from castore.errors import CacheWarning, CorruptError, InvalidValueError, NotFoundError, warn
from castore.names import check_name
from castore.objects.codecs import check_codec
from castore.store import Store
from castore.units import parse_ttl

StorableDataset: TypeAlias = (
    "datasets.Dataset | datasets.DatasetDict | datasets.IterableDataset | datasets.IterableDatasetDict"
)
"""The datasets that `DatasetCache.put` takes."""
_DATASET_TYPES = (
    datasets.Dataset,
    datasets.IterableDataset,
    datasets.DatasetDict,
    datasets.IterableDatasetDict,
)


class DatasetCache:
    """Datasets by name.

    Args:
        store: a `Store`, or the folder of one, made if it does not exist.
        codec: ``"zstd"``, ``"lz4"``, ``"gzip"``, ``"none"``, or ``"auto"``.
        ttl: seconds (or ``"7d"``) until a dataset expires, or `castore.NEVER`; default: the store's.
        max_size: budget in stored bytes, or ``"50GB"``; for a folder only, since a `Store` has its own.

    Raises:
        InvalidValueError: the codec is not known, or ``max_size`` is given with a `Store`.

    >>> import tempfile
    >>> cache = DatasetCache(tempfile.mkdtemp() + "/cache")
    >>> cache.put("greetings", datasets.Dataset.from_dict({"text": ["hello", "world"]}))
    >>> cache.get("greetings")["text"][1], cache.get("farewells")
    ('world', None)
    """

    def __init__(
        self,
        store: Store | str | os.PathLike[str],
        *,
        codec: str = "zstd",
        ttl: float | str | None = None,
        max_size: float | str | None = None,
    ) -> None:
        codec, level = check_codec(codec, None)
        if isinstance(store, Store) and max_size is not None:
            raise InvalidValueError(
                "max_size is for a folder: a Store has its own budget; open it with Store(..., max_size=...)"
            )
        self.store = store if isinstance(store, Store) else Store(store, max_size=max_size)
        seconds = self.store.settings.ttl if ttl is None else parse_ttl(ttl)
        self._options = dataset_entries.StorageOptions(codec, level, seconds)

    def __repr__(self) -> str:
        return f"DatasetCache({str(self.store.path)!r})"

    def put(self, name: str, dataset: StorableDataset) -> None:
        """Keep a dataset under a name; an iterable dataset keeps all rows that it yields now.

        Args:
            name: a name as `Store.put` takes it; the dataset's files lie below it.
            dataset: the dataset, kept with its format, features, split and fingerprint.

        Raises:
            InvalidValueError: the value is no dataset, or a split's name is empty or no text.
            SerializationError: the dataset's format holds a value that JSON cannot hold: a transform, say.
                Or, in an iterable dataset without declared features, rows differ in their columns, or later
                rows do not fit the types of the first.
            FullError, TooLargeError: the dataset does not fit.
        """
        if not isinstance(dataset, _DATASET_TYPES):
            raise InvalidValueError(
                f"{name!r}: a DatasetCache keeps datasets, not {type(dataset).__name__}; "
                "make it one, for example with Dataset.from_list(...)"
            )
        metadata = {"kind": type(dataset).__name__}
        members = {"": dataset}
        if isinstance(dataset, dict):
            members = {_split_name(name, split): member for split, member in dataset.items()}
        parts = {split: _to_part(member) for split, member in members.items()}
        dataset_entries.put_parts(self.store, name, parts, self._options, metadata)

    def get(self, name: str) -> Any:
        """The dataset of that name as it was put, or None.

        A live mount of the store serves the rows memory-mapped. Without a mount, the dataset is decompressed
        once, into an entry of the store that all processes map and that gc may remove. An iterable dataset is
        decompressed while it is read.

        Warns:
            CacheWarning: the dataset was there and is damaged; it is dropped.
        """
        return self._read(name, streaming=False)

    def dataset(self, name: str) -> Any:
        """As `get`, but always a map-style dataset, with a length, indices, `map` and `cached_map`."""
        return self._read(name, streaming=False, whole=True)

    def stream(self, name: str) -> Any:
        """As `get`, but always an iterable dataset, which decompresses only the rows that are read."""
        return self._read(name, streaming=True)

    def _read(self, name: str, *, streaming: bool, whole: bool = False) -> Any:
        check_name(name)
        try:
            kind = dataset_entries.kind_of(self.store, name)
            if kind is None:
                return None
            if kind == "dataset":
                return self._read_one(name, streaming, whole)
            members = {
                split: self._read_one(f"{name}/{split}", streaming, whole)
                for split in dataset_entries.splits_of(self.store, name)
            }
        except NotFoundError:
            dataset_entries.drop(self.store, name)  # gc removed a part of it
            return None
        except CorruptError as error:
            dataset_entries.drop(self.store, name)
            message = f"the dataset {name!r} in {self.store.path} is damaged and was removed: {error}"
            warn(message, CacheWarning)
            return None
        iterable = any(isinstance(member, datasets.IterableDataset) for member in members.values())
        return datasets.IterableDatasetDict(members) if iterable else datasets.DatasetDict(members)

    def _read_one(self, name: str, streaming: bool, whole: bool) -> Any:
        metadata = dataset_entries.metadata_of(self.store, name) or {}
        if streaming or (not whole and str(metadata.get("kind")).startswith("Iterable")):
            return open_stream(self.store, name)
        return dataset_entries.load(self.store, name)

    def contains(self, name: str) -> bool:
        """Whether there is a dataset of that name."""
        return dataset_entries.kind_of(self.store, check_name(name)) is not None

    def invalidate(self, name: str | None = None) -> bool:
        """Drop a dataset, or all of them; False if there was none."""
        if name is not None:
            return dataset_entries.drop(self.store, check_name(name))
        names = [entry.name for entry in self.store.entries()]
        return sum(dataset_entries.drop(self.store, found) for found in _dataset_names(names)) > 0


def _split_name(name: str, split: Any) -> str:
    """The name of a split, as text."""
    if not isinstance(split, str | datasets.NamedSplit) or not str(split):
        raise InvalidValueError(f"{name!r}: {split!r} cannot name a split; give the splits names, as texts")
    return str(split)


def _to_part(dataset: datasets.Dataset | datasets.IterableDataset) -> DatasetPart:
    if isinstance(dataset, datasets.IterableDataset):
        return part_of_stream(dataset)
    return make_part(dataset, embed=True)


def _dataset_names(names: list[str]) -> list[str]:
    """The folders that hold a dataset, or a dictionary of datasets."""
    files = (STATE_FILE, SPLITS_FILE)
    return [
        folder for folder, _, file in (name.rpartition("/") for name in names) if folder and file in files
    ]


def open_stream(store: Store, name: str) -> datasets.IterableDataset:
    """A kept dataset as an iterable one, with one shard for each data file, decompressed while it is read.

    Raises:
        NotFoundError, CorruptError: as for `dataset_entries.find_files`.
    """
    files = dataset_entries.find_files(store, name)
    for part in files.blobs:
        store.count_use(part)
    digests = [blob.digest.hex() for _, blob in files.data]
    arguments = {"store": store, "name": name, "digests": digests}
    return assemble_stream(files.state, files.info, _read_batches, arguments)


def _read_batches(store: Store, name: str, digests: list[str]) -> Iterator[tuple[int, pa.Table]]:
    for digest in digests:
        try:
            blob = store.open_blob(digest)
        except NotFoundError as error:
            raise NotFoundError(
                f"the rows of a stream of {name!r} are no longer in {store.path}: its name was put anew or"
                " removed, and gc has taken its bytes; call stream again"
            ) from error
        with blob as opened:
            for number, batch in enumerate(decode_batches(opened)):
                yield number, pa.Table.from_batches([batch])
