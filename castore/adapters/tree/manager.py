"""`TreeCacheManager`: RAM over disk. The disk decides; RAM only answers faster.

A value in RAM is bound to the digest of its entry. RAM answers alone while the store's beacon shows that no
name changed, for at most a second and no longer than the entry lives. After that the index is read (some
10 µs). A name that points elsewhere, is gone or has expired is not answered from RAM. So every process sees
what another one invalidated or replaced, and RAM never holds a value that the disk does not hold.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

from castore.adapters.tree.entry_names import compute_key, name_of
from castore.adapters.tree.level import DiskBacked, DiskLevel
from castore.adapters.tree.memory import parse_bounds
from castore.adapters.tree.metadata import CacheMetadata, to_text
from castore.adapters.tree.packed_value import Packed, pack, ram_size, unpack
from castore.adapters.tree.tally import Tally
from castore.errors import CorruptError, FullError, TooLargeError, warn_unkept
from castore.index.beacon import CHANGED
from castore.keys import encoder
from castore.records import Entry
from castore.store import DEFAULT_MEMORY
from castore.system.ram_cache import MemoryLRU
from castore.system.single_flight import ComputeLocks
from castore.units import parse_flag

# Longest time for which a slot answers without a read of the index: entries also change without a change of
# names.
TRUST_SECONDS = 1.0


class _Slot:
    """A value in RAM, its digest, and how long to trust it: the beacon's word and a monotonic time.

    ``trust`` is one tuple, so that no thread sees half of a new one.
    """

    __slots__ = ("digest", "packed", "trust")

    def __init__(self, packed: Packed, digest: str, trust: tuple[int, float]) -> None:
        self.packed = packed
        self.digest = digest
        self.trust = trust


# The slot, its tuples and the digest, measured with tracemalloc.
_SLOT_BYTES = 270


class TreeCacheManager(DiskBacked):
    """A cache of Python objects in RAM and on disk.

    Args:
        cache_dir: folder of the store, on a local disk; created if it is missing.
        memory_size: the number of values RAM may hold, or a text such as ``"1GB"``: the number of bytes. 0
            for none.
        disk_expiry: seconds (or ``"1d"``) after its put at which a value is a miss, in RAM too; default
            never.
        compression: ``"none"``, ``"gzip"``, ``"lz4"`` or ``"zstd"``, for values put from now on.
        memory_bytes: with a number of values, an additional bound in bytes; default 128 MB, in each process.
        max_size: budget on disk in bytes (or ``"10GB"``): the least recently used values are removed first;
            default none.
        allow_pickle: take values that only pickle can hold. Loading a pickle runs code.
        remote: name of a remote of the folder's store (see `castore.Store.add_remote`): `get_or_compute` asks
            it before it computes, and offers it the result. A key must then mean one value in all folders
            that share the remote, as those of `compute_key` do. Default none, whatever ``$CASTORE_REMOTE``
            says.

    Raises:
        InvalidValueError: an argument is invalid; no folder is created then.
        StoreError: the folder holds other things, or lies on a network file system.
        NotFoundError: the folder's store does not know ``remote``.

    >>> import tempfile
    >>> cache = TreeCacheManager(tempfile.mkdtemp() + "/cache")
    >>> cache.get_or_compute("squares", lambda: [n * n for n in range(4)])
    [0, 1, 4, 9]
    >>> data, metadata = cache.get("squares")
    >>> cache.stats["memory"]["hits"]
    1
    """

    def __init__(
        self,
        cache_dir: str | os.PathLike[str],
        memory_size: int | str = 100,
        disk_expiry: float | str | None = None,
        compression: str = "zstd",
        *,
        memory_bytes: int | str | None = None,
        max_size: int | str | None = None,
        allow_pickle: bool = False,
        remote: str = "",
    ) -> None:
        bounds = parse_bounds(memory_size, "memory_size", memory_bytes, "memory_bytes")
        self._bounds = bounds if bounds.bytes is not None else bounds._replace(bytes=DEFAULT_MEMORY)
        self._disk = DiskLevel(cache_dir, compression, disk_expiry, max_size, remote)
        self._slots: MemoryLRU[_Slot] = self._bounds.make_lru(
            lambda slot: ram_size(slot.packed) + _SLOT_BYTES
        )
        self._beacon = self.store.index.beacon
        # The lock files of the store itself: callers of `Store` and of this cache that compute one name share
        # one lock.
        self._locks = ComputeLocks(self.store.path / "locks" / "compute", self.store.settings.file_mode)
        self._allow_pickle = parse_flag(allow_pickle, "allow_pickle")
        self._memory_tally, self._disk_tally = Tally(), Tally()
        self._rebuild = partial(
            TreeCacheManager,
            self.store.path,
            memory_size,
            disk_expiry,
            compression,
            memory_bytes=memory_bytes,
            max_size=max_size,
            allow_pickle=allow_pickle,
            remote=remote,
        )

    def close(self) -> None:
        """Empty the RAM level, and close files and connections."""
        self._slots.clear()
        super().close()

    @staticmethod
    def compute_key(
        config: object,
        prefix: str | None = None,
        include_content_hash: bool = False,
        content: encoder.Content | None = None,
    ) -> str:
        """``<prefix>_<hex>`` or ``<prefix>_<hex>_<hex>``: identifies a config, and the content it applies to.

        Args:
            config: what `castore.key` takes. The order of dicts does not matter; every type does.
            prefix: any text in front; default none.
            include_content_hash: add the hash of ``content``, which does not count otherwise.
            content: a text, bytes, a path object (the file's bytes) or an iterable of bytes.

        Returns:
            a key; each ``<hex>`` is 40 digits (160 bits).

        Raises:
            UnhashableError: a part of ``config`` has no stable hash; the message has the path to it.
            InvalidValueError: the content is missing, or of another kind.

        >>> TreeCacheManager.compute_key({"tokenizer": "llama"}, prefix="tokenized")[:13]
        'tokenized_...'
        """
        return compute_key(config, prefix, include_content_hash, content)

    def put(self, key: str, data: object, metadata: CacheMetadata | None = None) -> None:
        """Keep ``data`` under ``key`` on disk, atomically, and in RAM.

        Raises:
            SerializationError: no serializer takes ``data``; the message has the path to the part.
            TooLargeError, FullError: it does not fit into the budget or onto the disk.
        """
        name = name_of(key)
        packed = pack(data, metadata, allow_pickle=self._allow_pickle)
        # Read before the put: a change of a name in between then makes the slot stale, never fresh.
        changed = self._beacon.settled()
        self._keep(name, self._disk.put(name, packed), packed, changed)

    def get(self, key: str) -> tuple[Any, CacheMetadata] | None:
        """The value and its metadata; None if it is missing, expired or damaged.

        The caller gets an object of its own.

        Raises:
            SerializationError: the value is a pickle, and ``allow_pickle`` is not set.
        """
        tally, found = self._find(name_of(key), None)
        self._count_read(tally)
        return found

    def get_or_compute(
        self,
        key: str,
        compute_fn: Callable[[], Any],
        metadata: CacheMetadata | None = None,
        validate_fn: Callable[[CacheMetadata], bool] | None = None,
    ) -> Any:
        """The value of ``key``; on a miss that of ``compute_fn()``.

        All threads and processes of the machine compute a missing value once, and with ``remote`` those of
        all nodes.

        Args:
            key: any text.
            compute_fn: takes nothing, returns what `put` takes.
            metadata: kept with a computed value.
            validate_fn: takes the metadata of a kept value, returns whether the value may be used; if not, it
                is computed anew.

        Raises:
            Exception: the one that ``compute_fn`` raised; nothing is kept then, and the next caller tries
                again.

        Warns:
            CacheWarning: the computed value is returned and not kept: it does not fit into the budget or onto
                the disk.
        """
        name = name_of(key)
        tally, found = self._find(name, validate_fn)
        if found is None:
            self.store.require_writable()
            with self._locks.hold(name):
                tally, found = self._find(name, validate_fn)
                self._count_read(tally)
                if found is not None:
                    return found[0]
                with self._disk.share(name) or nullcontext() as turn:
                    if turn is not None:
                        is_here, data = turn.load(partial(self._load, name, validate_fn))
                        if is_here:
                            return data
                    data = compute_fn()
                    try:
                        self.put(key, data, metadata)
                    except (TooLargeError, FullError) as error:
                        warn_unkept(key, error)
                    else:
                        if turn is not None:
                            turn.offer()
                    return data
        else:
            self._count_read(tally)
        return found[0]

    def contains(self, key: str) -> bool:
        """Whether there is a value that has not expired. Does not count as a read."""
        name = name_of(key)
        return self._disk.has_value(name) or self._get_trusted(name) is not None

    def invalidate(self, key: str | None = None) -> None:
        """Remove one value, or without a key all of them, with their bytes.

        Other processes notice at their next read.
        """
        if key is None:
            self._disk.clear()
            self._slots.clear()
        else:
            name = name_of(key)
            self.store.delete(name)
            self._slots.discard(name)

    @property
    def stats(self) -> dict[str, dict[str, Any]]:
        """Figures of ``memory`` and of ``disk``.

        Each has ``hits misses hit_rate size max_size bytes max_bytes evictions``.

        Hits and misses are those of this object; the disk is read only for values that RAM does not have.
        Sizes are in values. On disk, bytes and evictions are those of the whole folder.
        """
        return {
            "memory": {**self._memory_tally.figures(), **self._bounds.figures(self._slots)},
            "disk": {**self._disk_tally.figures(), **self._disk.figures()},
        }

    def _find(
        self, name: str, accept: Callable[[CacheMetadata], bool] | None
    ) -> tuple[Tally | None, tuple[Any, CacheMetadata] | None]:
        """The value of ``name``, if ``accept`` takes its metadata, and the tally of the level that had it."""
        packed = self._get_trusted(name)
        if packed is not None:
            # The disk has the same metadata, so a value refused here is refused there.
            found = self._decode(packed, accept)
            if found is None:
                return None, None
            self._disk.count_memory_hit(name)
            return self._memory_tally, found
        changed = self._beacon.settled()
        read = self._disk.read(name)
        found = None if read is None else self._decode(read[1], accept)
        if read is None or found is None:
            return None, None
        self._keep(name, *read, changed)
        return self._disk_tally, found

    def _load(self, name: str, accept: Callable[[CacheMetadata], bool] | None) -> tuple[bool, Any]:
        _, found = self._find(name, accept)
        return (False, None) if found is None else (True, found[0])

    def _count_read(self, hit: Tally | None) -> None:
        """Count one read for the level that answered it, if one did."""
        if hit is self._memory_tally:
            hit.hits += 1
            return
        self._memory_tally.misses += 1
        if hit is None:
            self._disk_tally.misses += 1
        else:
            hit.hits += 1

    def _decode(
        self, packed: Packed, accept: Callable[[CacheMetadata], bool] | None
    ) -> tuple[Any, CacheMetadata] | None:
        try:
            found = unpack(packed, allow_pickle=self._allow_pickle)
        except CorruptError:
            return None  # bytes that were put past this cache and are no object: a miss, like all damage
        return found if accept is None or accept(found[1]) else None

    def _get_trusted(self, name: str) -> Packed | None:
        """The value of ``name`` in RAM, as long as it is the one on disk."""
        slot = self._slots.get(name)
        if slot is None:
            return None
        changed, until = slot.trust
        if changed == self._beacon.words[CHANGED] and time.monotonic() < until:
            return slot.packed
        changed = self._beacon.settled()
        entry = self._disk.entry(name)
        on_disk = None if entry is None else (entry.digest, entry.serializer, to_text(entry.metadata))
        if entry is None or on_disk != (slot.digest, slot.packed.serializer, slot.packed.about):
            self._slots.discard(name)
            return None
        slot.trust = self._trust(entry, changed)
        return slot.packed

    def _keep(self, name: str, entry: Entry, packed: Packed, changed: int) -> None:
        self._slots.put(name, _Slot(packed, entry.digest, self._trust(entry, changed)))

    def _trust(self, entry: Entry, changed: int) -> tuple[int, float]:
        return changed, time.monotonic() + min(TRUST_SECONDS, self._disk.remaining(entry))
