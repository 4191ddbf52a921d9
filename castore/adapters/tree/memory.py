"""The level in RAM: its bounds in items and in bytes, and `MemoryCache`, which is that level alone.

Values are held encoded (see `packed_value`) and expire by the monotonic clock, which no correction of the
date moves. Each process has its own; nothing here is shared or written to disk.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from castore.adapters.tree.entry_names import check_key
from castore.adapters.tree.metadata import CacheMetadata
from castore.adapters.tree.packed_value import Packed, pack, ram_size, unpack
from castore.adapters.tree.tally import Tally
from castore.errors import InvalidValueError
from castore.system.ram_cache import MemoryLRU
from castore.units import NEVER, as_whole, parse_flag, parse_size, parse_ttl

V = TypeVar("V")


class Bounds(NamedTuple):
    """Bounds of a level in RAM; None is no bound."""

    items: int | None
    bytes: int | None

    def make_lru(self, measure: Callable[[V], int]) -> MemoryLRU[V]:
        """An empty level within these bounds; ``measure`` returns a value's size in bytes."""
        most = sys.maxsize if self.bytes is None else self.bytes
        return MemoryLRU(most, measure, max_items=sys.maxsize if self.items is None else self.items)

    def figures(self, held: MemoryLRU[Any]) -> dict[str, int | None]:
        """The contents of a level within these bounds, the bounds, and the evictions they caused."""
        return {
            "size": len(held),
            "max_size": self.items,
            "bytes": held.bytes,
            "max_bytes": self.bytes,
            "evictions": held.evictions,
        }


def parse_bounds(size: int | str, size_name: str, most: int | str | None, most_name: str) -> Bounds:
    """Parse a user's bounds: an int is a number of items, a text such as "1GB" a number of bytes.

    ``most`` is an additional bound in bytes.

    Raises:
        InvalidValueError: one of them is invalid, or both bound bytes.
    """
    if isinstance(size, str):
        if most is not None:
            raise InvalidValueError(
                f"{size_name}={size!r} and {most_name}={most!r} both bound bytes; give one of them"
            )
        return Bounds(None, parse_size(size))
    items = as_whole(size)
    if items is None or items < 0:
        raise InvalidValueError(
            f"{size_name} must be a number of items, or a text of bytes like '1GB', not {size!r}"
        )
    return Bounds(items, None if most is None else parse_size(most))


class _TimedValue(NamedTuple):
    """A value and the monotonic time at which it expires."""

    packed: Packed
    deadline: float


# The tuple, its float, and `Packed` without its two texts, measured with tracemalloc.
_VALUE_BYTES = 100


class MemoryCache:
    """Values in the RAM of this process; the least recently used are evicted first.

    Args:
        max_size: the number of values, or a text such as ``"1GB"``: the number of bytes.
        max_bytes: with a number of values, an additional bound in bytes; default none.
        expiry_seconds: seconds (or ``"1h"``) until a value is a miss; default never.
        allow_pickle: take values that only pickle can hold.

    Raises:
        InvalidValueError: an argument is invalid.

    >>> cache = MemoryCache(max_size=1000)
    >>> cache.put("key1", {"data": "value"})
    >>> data, metadata = cache.get("key1")
    >>> data
    {'data': 'value'}
    """

    def __init__(
        self,
        max_size: int | str = 1000,
        *,
        max_bytes: int | str | None = None,
        expiry_seconds: float | str | None = None,
        allow_pickle: bool = False,
    ) -> None:
        self._options = (max_size, max_bytes, expiry_seconds, allow_pickle)
        seconds = None if expiry_seconds is None else parse_ttl(expiry_seconds)
        self._expiry = NEVER if seconds is None else seconds
        self._allow_pickle = parse_flag(allow_pickle, "allow_pickle")
        self._bounds = parse_bounds(max_size, "max_size", max_bytes, "max_bytes")
        self._values: MemoryLRU[_TimedValue] = self._bounds.make_lru(
            lambda timed: ram_size(timed.packed) + _VALUE_BYTES
        )
        self._tally = Tally()

    def __reduce__(self) -> tuple[Any, ...]:
        return _memory_cache, self._options

    def put(self, key: str, data: object, metadata: CacheMetadata | None = None) -> None:
        """Keep ``data`` under ``key``. A value that is larger than the bound on bytes is not kept.

        Raises:
            SerializationError: no serializer takes ``data``; the message has the path to the part.
        """
        key = check_key(key)
        packed = pack(data, metadata, allow_pickle=self._allow_pickle)
        self._values.put(key, _TimedValue(packed, time.monotonic() + self._expiry))

    def get(self, key: str) -> tuple[Any, CacheMetadata] | None:
        """The value and its metadata, or None. The caller gets an object of its own."""
        timed = self._get_unexpired(check_key(key))
        if timed is None:
            self._tally.misses += 1
            return None
        self._tally.hits += 1
        return unpack(timed.packed, allow_pickle=self._allow_pickle)

    def contains(self, key: str) -> bool:
        """Whether there is a value that has not expired. Does not count as a read."""
        return self._get_unexpired(check_key(key)) is not None

    def invalidate(self, key: str | None = None) -> None:
        """Remove one value, or without a key all of them."""
        if key is None:
            self._values.clear()
        else:
            self._values.discard(check_key(key))

    def _get_unexpired(self, key: str) -> _TimedValue | None:
        timed = self._values.get(key)
        if timed is not None and timed.deadline <= time.monotonic():
            self._values.discard(key)
            return None
        return timed

    @property
    def stats(self) -> dict[str, Any]:
        """``hits misses hit_rate size max_size bytes max_bytes evictions`` of this object."""
        return {**self._tally.figures(), **self._bounds.figures(self._values)}


def _memory_cache(
    max_size: int | str,
    max_bytes: int | str | None,
    expiry_seconds: float | str | None,
    allow_pickle: bool,
) -> MemoryCache:
    """Make a `MemoryCache` from a pickle: an empty one with the same options."""
    return MemoryCache(
        max_size, max_bytes=max_bytes, expiry_seconds=expiry_seconds, allow_pickle=allow_pickle
    )
