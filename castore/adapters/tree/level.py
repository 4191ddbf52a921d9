"""The level on disk: packed values as entries of a store, below one folder of names.

Knows the store and nothing of objects: it reads and writes bytes with their metadata, from one row of the
index, so that value and metadata always belong together. Codec and expiry are given with each put; a later
process reads any value, whatever codec and expiry it was put with.
"""

from __future__ import annotations

import json
import os
import time
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from castore import gc
from castore.adapters.tree.entry_names import FOLDER
from castore.adapters.tree.metadata import to_text
from castore.adapters.tree.packed_value import Packed
from castore.errors import InvalidValueError
from castore.index.eviction import has_work
from castore.index.name_ranges import count_inside
from castore.read.usage import Usage
from castore.records import LOST, Entry
from castore.store import Store
from castore.units import NEVER, parse_ttl

if TYPE_CHECKING:
    from castore.remote.shared_results import SharedTurn  # for caches without a remote it is not loaded

#: The codecs that users may choose; `Store` has ``auto`` besides.
COMPRESSIONS = ("none", "gzip", "lz4", "zstd")
#: Seconds between two sweeps for expired and orphaned bytes by a process that puts.
SWEEP_SECONDS = 300.0
_ATTEMPTS = 5

Self = TypeVar("Self", bound="DiskBacked")


class DiskLevel:
    """Packed values in a store.

    Args:
        folder: of the store; created if it is missing.
        compression: one of `COMPRESSIONS`.
        expiry: seconds or a text, or `castore.NEVER`. None for the lifetime of the existing store, which is
            never by default.
        max_size: budget in stored bytes; None for that of the existing store.
        remote: name of a remote over which values are shared; "" for none. No variable names one: keys of
            these caches are often plain words that mean one thing in their folder alone.

    Raises:
        InvalidValueError: an argument is invalid; no folder is created then.
        StoreError: the folder cannot be a store.
        NotFoundError: the store does not know the remote.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        compression: str,
        expiry: float | str | None,
        max_size: int | str | None,
        remote: str = "",
    ) -> None:
        if compression not in COMPRESSIONS:
            raise InvalidValueError(
                f"unknown compression {compression!r}: choose one of {', '.join(COMPRESSIONS)}"
            )
        self._compression = compression
        self._expiry: float | None = None
        if expiry is not None:
            seconds = parse_ttl(expiry)
            self._expiry = NEVER if seconds is None else seconds
        # The store has no RAM tier: the caches have one of their own, which can be bounded in items.
        self.store = Store(folder, max_size=max_size, memory=0, remote=remote)
        # Hits of the level above are counted here: the store does not see them.
        self._usage = Usage(self.store.index)
        self._sweep_due = time.monotonic()

    def put(self, name: str, packed: Packed) -> Entry:
        """Keep a value.

        Raises:
            TooLargeError, FullError: it does not fit into the budget or onto the disk.
        """
        self._sweep_if_due()
        if self.store.settings.max_size is not None:
            self._usage.flush_if_possible()  # so that the budget evicts values that were not used just now
        return self.store.put(
            name,
            packed.data,
            codec=self._compression,
            ttl=self._expiry,
            metadata=json.loads(packed.about),
            serializer=packed.serializer,
        )

    def entry(self, name: str) -> Entry | None:
        """The entry of a name, unless it has expired by its own expiry or by this level's."""
        entry = self.store.entry(name)
        return None if entry is None or self.remaining(entry) <= 0 else entry

    def remaining(self, entry: Entry) -> float:
        """Seconds until an entry expires, by the date: entries outlive the clock of a running machine."""
        now = time.time()
        left = float("inf") if entry.expires is None else entry.expires - now
        if self._expiry is not None:
            left = min(left, _put_time(entry) + self._expiry - now)
        return left

    def read(self, name: str) -> tuple[Entry, Packed] | None:
        """The value of a name, checked, with the row that it belongs to; None on a miss."""
        store = self.store
        for _ in range(_ATTEMPTS):
            entry = self.entry(name)
            if entry is not None:
                blob = store.blob(entry.digest)
                data = None if blob is None else store.get_blob(blob)
                if data is not None:
                    store.count_use(name)
                    store.parts.usage.flush_if_due()
                    return entry, Packed(entry.serializer, data, to_text(entry.metadata))
            # The store's own read counts the miss, and finds a value that another process has just put.
            if (entry is None and store.entry(name) is not None) or store.source.read(name) is None:
                return None
        return None

    def share(self, name: str) -> SharedTurn | None:
        """This process's turn to find a value that other nodes have computed; see `Store.share`."""
        return self.store.share(name, ttl=self._expiry)

    def count_memory_hit(self, name: str) -> None:
        """Count a hit in RAM as a use, so that the budget evicts other entries first."""
        usage = self._usage
        usage.touched[name] = time.time()
        usage.counts["memory_hits"] += 1
        usage.flush_if_due()

    def has_value(self, name: str) -> bool:
        """Whether `read` would find a value, if its bytes have no undiscovered damage."""
        entry = self.entry(name)
        blob = None if entry is None else self.store.blob(entry.digest)
        return blob is not None and blob.pack != LOST

    def close(self) -> None:
        """Write the counted uses, then close files and connections."""
        self._usage.flush_if_possible()
        self.store.close()

    def clear(self) -> None:
        """Remove every entry of these caches, and the bytes that no entry needs then."""
        self.store.delete_many(entry.name for entry in self.store.entries(FOLDER))
        self.store.gc(grace=0)

    def figures(self) -> dict[str, int | None]:
        """Entries, and the bytes and evictions of the whole store."""
        return {
            "size": count_inside(self.store.index, FOLDER, time.time()),
            "max_size": None,
            "bytes": self.store.totals().stored,
            "max_bytes": self.store.settings.max_size,
            "evictions": self.store.counters().get("evictions", 0),
        }

    def _sweep_if_due(self) -> None:
        """Run gc for expired and replaced values, if it is due.

        Without a budget nothing else would free the disk.
        """
        if time.monotonic() < self._sweep_due:
            return
        self._sweep_due = time.monotonic() + SWEEP_SECONDS
        now = time.time()
        if has_work(self.store.index, now, now - gc.GRACE_SECONDS):
            self.store.gc(grace=gc.GRACE_SECONDS)


class DiskBacked:
    """The common part of caches over a `DiskLevel`: a context manager that pickles as its arguments.

    Open files are never pickled.

    Attributes:
        _disk: the level, made by the subclass.
        _rebuild: makes an equal cache, in the process that loads the pickle.
    """

    _disk: DiskLevel
    _rebuild: partial[Any]

    def __reduce__(self) -> tuple[Any, ...]:
        return self._rebuild, ()

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def store(self) -> Store:
        """The store underneath, for maintenance; the entries are below ``tree/``."""
        return self._disk.store

    def close(self) -> None:
        """Close files and connections."""
        self._disk.close()


def _put_time(entry: Entry) -> float:
    at = entry.metadata.get("created_at")
    return at if isinstance(at, int | float) else entry.created
