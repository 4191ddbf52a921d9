"""`DiskCache`: Python objects on disk, compressed, checked and shared between processes.

Keeps nothing in RAM.
"""

from __future__ import annotations

import os
from functools import partial
from typing import Any

from castore.adapters.tree.entry_names import name_of
from castore.adapters.tree.level import DiskBacked, DiskLevel
from castore.adapters.tree.metadata import CacheMetadata
from castore.adapters.tree.packed_value import pack, unpack
from castore.adapters.tree.tally import Tally
from castore.errors import CorruptError
from castore.units import parse_flag


class DiskCache(DiskBacked):
    """Values in the store of a folder.

    Args:
        cache_dir: the folder, on a local disk; created if it is missing.
        compression: ``"none"``, ``"gzip"``, ``"lz4"`` or ``"zstd"``, for values put from now on.
        expiry_seconds: seconds (or ``"1h"``) after its put at which a value is a miss; default never. If a
            value was put with another expiry, the shorter one counts.
        max_size: budget on disk in bytes (or ``"10GB"``): the least recently used values are removed first;
            default none.
        allow_pickle: take values that only pickle can hold. Loading a pickle runs code.

    Raises:
        InvalidValueError: an argument is invalid; no folder is created then.
        StoreError: the folder holds other things, or lies on a network file system.

    >>> import tempfile
    >>> cache = DiskCache(tempfile.mkdtemp() + "/cache", compression="lz4", expiry_seconds=3600)
    >>> cache.put("key", [1, 2, 3])
    >>> cache.get("key")[0]
    [1, 2, 3]
    """

    def __init__(
        self,
        cache_dir: str | os.PathLike[str],
        compression: str = "zstd",
        expiry_seconds: float | str | None = None,
        *,
        max_size: int | str | None = None,
        allow_pickle: bool = False,
    ) -> None:
        self._disk = DiskLevel(cache_dir, compression, expiry_seconds, max_size)
        self._allow_pickle = parse_flag(allow_pickle, "allow_pickle")
        self._tally = Tally()
        self._rebuild = partial(
            DiskCache,
            self.store.path,
            compression,
            expiry_seconds,
            max_size=max_size,
            allow_pickle=allow_pickle,
        )

    def put(self, key: str, data: object, metadata: CacheMetadata | None = None) -> None:
        """Keep ``data`` under ``key``, atomically.

        Raises:
            SerializationError: no serializer takes ``data``; the message has the path to the part.
            TooLargeError, FullError: it does not fit into the budget or onto the disk.
        """
        self._disk.put(name_of(key), pack(data, metadata, allow_pickle=self._allow_pickle))

    def get(self, key: str) -> tuple[Any, CacheMetadata] | None:
        """The value, verified, and its metadata; None if it is missing, expired or damaged.

        The caller gets an object of its own.

        Raises:
            SerializationError: the value is a pickle, and ``allow_pickle`` is not set.
        """
        read = self._disk.read(name_of(key))
        if read is not None:
            try:
                found = unpack(read[1], allow_pickle=self._allow_pickle)
            except CorruptError:
                pass  # bytes that were put past this cache and are no object: a miss, like all damage
            else:
                self._tally.hits += 1
                return found
        self._tally.misses += 1
        return None

    def contains(self, key: str) -> bool:
        """Whether there is a value that has not expired. Does not count as a read."""
        return self._disk.has_value(name_of(key))

    def invalidate(self, key: str | None = None) -> None:
        """Remove one value, or without a key all of them, with their bytes."""
        if key is None:
            self._disk.clear()
        else:
            self._disk.store.delete(name_of(key))

    @property
    def stats(self) -> dict[str, Any]:
        """Figures of this object and of the folder.

        ``hits misses hit_rate`` are those of this object, ``size`` is in values, and ``bytes``,
        ``max_bytes``, ``evictions`` are those of the folder.
        """
        return {**self._tally.figures(), **self._disk.figures()}
