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
from castore.adapters.torch.kept_samples import KeptSamples
from castore.adapters.torch.samples import MISSING, pack, record_name, unpack
from castore.adapters.torch.wrapper import DatasetWrapper


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
        self._kept = KeptSamples(store, "CachedDataset")
        self.store = self._kept.store
        if doubts is not None:
            doubts.compare(self.store, "dataset", RANDOM_ADVICE)

    def name_of(self, index: int) -> str:
        """The name of a sample's entry in the store."""
        return record_name(self.key, index)

    # Samples

    def _one(self, index: int) -> Any:
        self._changes.glance()
        name = self.name_of(index)
        [sample] = self._kept.find([name])
        if sample is not MISSING:
            return sample
        record = pack(self._sample(index))
        if self._changes.keeps:
            self._kept.keep({name: record})
        # Unpack the record even of a sample just read: the first epoch gets exactly what later epochs get.
        return unpack(record)

    def _many(self, indices: list[int]) -> list[Any]:
        if not indices:
            return []
        self._changes.glance()
        found = self._kept.find(list(map(self.name_of, indices)))
        missing = [index for index, sample in zip(indices, found, strict=True) if sample is MISSING]
        read = self._read(missing) if missing else {}
        if read and self._changes.keeps:
            self._kept.keep({self.name_of(index): record for index, record in read.items()})
        return [
            unpack(read[index]) if sample is MISSING else sample
            for index, sample in zip(indices, found, strict=True)
        ]

    def _read(self, indices: list[int]) -> dict[int, bytes]:
        """Records from the dataset."""
        distinct = list(dict.fromkeys(indices))
        return {index: pack(sample) for index, sample in zip(distinct, self._source(distinct), strict=True)}

    # Filling

    def _held(self, index: int) -> bool:
        return self.store.entry(self.name_of(index)) is not None

    def _cache(self, indices: list[int]) -> int:
        missing = indices
        if self.store.is_shared:
            self.store.find_shared(map(self.name_of, indices))
            missing = [index for index in indices if not self._held(index)]
        read = self._read(missing)
        if not self._changes.keeps:
            return len(set(indices)) - len(read)
        if read:
            self._kept.put({self.name_of(index): record for index, record in read.items()})
        return len(set(indices))

    # Counters

    @property
    def hits(self) -> int:
        """Samples that came from the store, in all processes that have a copy of this dataset."""
        return self._kept.counts.hits

    @property
    def misses(self) -> int:
        """Samples that came from the dataset, in all processes that have a copy of this dataset."""
        return self._kept.counts.misses

    def close(self) -> None:
        """Release the counters, and close the store if it was opened here."""
        self._kept.close()
