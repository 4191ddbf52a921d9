"""The samples that one wrapper keeps as entries of a store: looked up there and in a remote, kept, counted.

An entry without a sample counts as missing, with a warning: it is made again, and replaced. A store without
room ends nothing while samples are read. Must not know where samples come from, nor how they are named.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from castore import Store
from castore.adapters.torch.hit_counts import HitCounts
from castore.adapters.torch.samples import MISSING, tell_no_sample, unpack
from castore.errors import CorruptError, FullError, SerializationError, TooLargeError, warn


class KeptSamples:
    """Samples by the names of their entries.

    Args:
        store: a store, or the folder of one. A store that is opened here has no RAM tier, since every worker
            would fill its own.
        owner: the wrapper's class, for the counters' names.

    Raises:
        StoreError: the folder cannot be used.
    """

    def __init__(self, store: Store | str | os.PathLike[str], owner: str) -> None:
        self._owns_store = not isinstance(store, Store)
        self.store = store if isinstance(store, Store) else Store(store, memory=0)
        #: Samples that were found, and those that were not, in all processes with a copy of the wrapper.
        self.counts = HitCounts(owner)
        self._warned = False

    def find(self, names: list[str]) -> list[Any]:
        """The samples of some names, MISSING in the place of those that the store and its remote lack."""
        samples = list(map(self._sample, names, self._records(names)))
        missing = sum(one is MISSING for one in samples)
        if missing < len(samples):
            self.counts.hit(len(samples) - missing)
        if missing:
            self.counts.miss(missing)
        return samples

    def _records(self, names: list[str]) -> list[bytes | None]:
        # `get` is quicker than `get_many` for one name.
        records = [self.store.get(names[0])] if len(names) == 1 else self.store.get_many(names)
        missing = [name for name, record in zip(names, records, strict=True) if record is None]
        if not missing or not self.store.is_shared:
            return records
        self.store.find_shared(dict.fromkeys(missing))
        come = iter(self.store.get_many(missing))
        return [next(come) if record is None else record for record in records]

    @staticmethod
    def _sample(name: str, record: bytes | None) -> Any:
        if record is not None:
            try:
                return unpack(record)
            except (CorruptError, SerializationError) as error:
                tell_no_sample(name, error)
        return MISSING

    def keep(self, records: Mapping[str, bytes]) -> None:
        """Keep packed samples by their names, in one transaction, and offer them to other nodes. A store
        without room is one RuntimeWarning.
        """
        try:
            self.put(records)
        except TooLargeError as error:
            if len(records) == 1:
                self._warn(error)
                return
            for name, record in records.items():  # the others may fit
                self.keep({name: record})
        except FullError as error:
            self._warn(error)

    def _warn(self, error: Exception) -> None:
        if not self._warned:
            self._warned = True
            warn(f"no more samples are kept for now: {error}", RuntimeWarning)

    def put(self, records: Mapping[str, bytes]) -> None:
        """As `keep`, for callers that fill the store.

        Raises:
            TooLargeError, FullError: the store has no room.
        """
        if len(records) == 1:
            [(name, record)] = records.items()
            self.store.put(name, record)
        else:
            self.store.put_many(records.items())
        self.store.offer_shared(records)

    def close(self) -> None:
        """Release the counters, and close the store if it was opened here."""
        self.counts.close()
        if self._owns_store:
            self.store.close()
