"""CachedDataset: the simple wrapper, which keeps each sample of a dataset as an entry of a store.

The wrapper searches the store first. The wrapper reads a missing sample from the dataset, packs it, and puts
it. Entry names consist of the dataset's fingerprint and the index. So a second run and another process start
warm, and another version of the data starts anew. A mount shows each sample as a safetensors file. The
store's settings bound its size and expire entries.

Assumes that the dataset returns the same sample for the same index every time: random transforms belong
behind this wrapper. An unreadable entry is read from the dataset again, and replaced.
"""

from __future__ import annotations

import os
from typing import Any

from castore import Store
from castore.adapters.torch.dataset_identity import RANDOM_ADVICE, key_and_doubts
from castore.adapters.torch.hit_counts import HitCounts
from castore.adapters.torch.samples import MISSING, pack, record_name, tell_no_sample, unpack
from castore.adapters.torch.wrapper import DatasetWrapper
from castore.errors import CorruptError, SerializationError


class CachedDataset(DatasetWrapper):
    """A dataset whose samples are kept in a store.

    Args:
        dataset: a map-style dataset. Its samples are what `torch.utils.data.default_collate` takes: tensors,
            arrays, numbers, strings, bytes, and tuples, lists and dicts of them; PIL images, dataclasses, and
            the other types that docs/torch.md lists, or that `castore.register_type` explains.
        store: a `castore.Store`, or the folder of one. A store that is opened here has no RAM tier, since
            every worker would fill its own.
        key: what identifies the data: a name, or a config for `castore.key`. By default the fingerprint of
            ``dataset``: its class's code, its parameters, its files.

    Raises:
        UnhashableError: the dataset has no fingerprint; the message names the part. Pass ``key``.
        StoreError: the folder cannot be used.

    >>> import tempfile, torch
    >>> squares = torch.utils.data.TensorDataset(torch.arange(10.) ** 2)
    >>> cached = CachedDataset(squares, tempfile.mkdtemp(), key="squares")
    >>> cached[3], cached[3], cached.hits, cached.misses
    ((tensor(9.),), (tensor(9.),), 1, 1)
    >>> [entry.name for entry in cached.store.entries()]
    ['squares/000000/000000003.safetensors']
    """

    def __init__(self, dataset: Any, store: Store | str | os.PathLike[str], key: object = None) -> None:
        super().__init__(dataset, key)
        #: The folder of this dataset's samples in the store.
        self.key, doubts = key_and_doubts(dataset, key)
        self._owns_store = not isinstance(store, Store)
        self.store = store if isinstance(store, Store) else Store(store, memory=0)
        if doubts is not None:
            doubts.compare(self.store, "dataset", RANDOM_ADVICE)
        self._counts = HitCounts("CachedDataset")

    def name_of(self, index: int) -> str:
        """The name of a sample's entry in the store."""
        return record_name(self.key, index)

    # Samples

    def _one(self, index: int) -> Any:
        self._changes.glance()
        name = self.name_of(index)
        [record] = self._records([name])
        sample = self._found(index, record)
        if sample is not MISSING:
            self._counts.hit()
            return sample
        self._counts.miss()
        record = pack(self._sample(index))
        if self._changes.keeps:
            self.store.put(name, record)
            self.store.offer_shared([name])
        # Unpack the record even of a sample just read: the first epoch gets exactly what later epochs get.
        return unpack(record)

    def _many(self, indices: list[int]) -> list[Any]:
        if not indices:
            return []
        self._changes.glance()
        records = self._records(list(map(self.name_of, indices)))
        found = list(map(self._found, indices, records))
        missing = [index for index, sample in zip(indices, found, strict=True) if sample is MISSING]
        self._counts.hit(len(indices) - len(missing))
        self._counts.miss(len(missing))
        read = self._read(missing) if missing else {}
        return [
            unpack(read[index]) if sample is MISSING else sample
            for index, sample in zip(indices, found, strict=True)
        ]

    def _records(self, names: list[str]) -> list[bytes | None]:
        """The bytes of some names in the store, or in the remote that it shares with other nodes."""
        # `get` is quicker than `get_many` for one name.
        records = [self.store.get(names[0])] if len(names) == 1 else self.store.get_many(names)
        missing = [name for name, record in zip(names, records, strict=True) if record is None]
        if not missing or not self.store.is_shared:
            return records
        self.store.find_shared(dict.fromkeys(missing))
        come = iter(self.store.get_many(missing))
        return [next(come) if record is None else record for record in records]

    def _found(self, index: int, record: bytes | None) -> Any:
        """The sample in an entry's bytes, or MISSING."""
        if record is not None:
            try:
                return unpack(record)
            except (CorruptError, SerializationError) as error:
                tell_no_sample(self.name_of(index), error)
        return MISSING

    def _read(self, indices: list[int]) -> dict[int, bytes]:
        """Records from the dataset, put in one transaction where they are kept."""
        distinct = list(dict.fromkeys(indices))
        records = {
            index: pack(sample) for index, sample in zip(distinct, self._source(distinct), strict=True)
        }
        if records and self._changes.keeps:
            self.store.put_many((self.name_of(index), record) for index, record in records.items())
            self.store.offer_shared(map(self.name_of, records))
        return records

    # Filling

    def _held(self, index: int) -> bool:
        return self.store.entry(self.name_of(index)) is not None

    def _cache(self, indices: list[int]) -> int:
        missing = indices
        if self.store.is_shared:
            self.store.find_shared(map(self.name_of, indices))
            missing = [index for index in indices if not self._held(index)]
        read = self._read(missing)
        return len(set(indices)) - (0 if self._changes.keeps else len(read))

    # Counters

    @property
    def hits(self) -> int:
        """Samples that came from the store, in all processes that have a copy of this dataset."""
        return self._counts.hits

    @property
    def misses(self) -> int:
        """Samples that came from the dataset, in all processes that have a copy of this dataset."""
        return self._counts.misses

    def close(self) -> None:
        """Release the counters, and close the store if it was opened here."""
        self._counts.close()
        if self._owns_store:
            self.store.close()
