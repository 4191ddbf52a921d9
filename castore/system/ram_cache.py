"""The RAM tier: recently used values, bounded in bytes and number, each loaded once for all threads that ask.

A value counts with the bytes that it really occupies, bookkeeping included, so a million tiny values do not
exceed the bound. The least recently used value is evicted first. A read through a `Slot` only marks the
value, and eviction skips a marked value once. The first thread that misses loads the value, outside the lock,
while other threads wait for it.

Must never: know of blobs or entries, or hold its lock during a load.
"""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from castore.system.forks import reset_after_fork

V = TypeVar("V")

#: Bytes of a slot besides its value: key, slot and dictionary entry, measured with tracemalloc. Before Python
#: 3.11 every object with attributes has a dictionary of its own.
SLOT_BYTES = 300 if sys.version_info >= (3, 11) else 460


#: Marked slots that `put` skips at most before it evicts one of them: `put` holds the lock meanwhile.
MAX_SKIPS = 100


class Slot(Generic[V]):
    """The place of a value. A caller that keeps a slot reads the value without a look-up, and sets ``used``.

    Attributes:
        value: the value; None once it was evicted.
        size: bytes that it counts for.
        used: whether it was read since eviction last skipped it; eviction then skips it once.
    """

    __slots__ = ("size", "used", "value")

    def __init__(self, value: V, size: int) -> None:
        self.value: V | None = value
        self.size = size
        self.used = False


class _Flight(Generic[V]):
    """A load under way: an event to wait for, and the result or error."""

    __slots__ = ("done", "error", "value")

    def __init__(self) -> None:
        self.done = threading.Event()
        self.value: V | None = None
        self.error: BaseException | None = None


class MemoryLRU(Generic[V]):
    """A bounded, thread-safe, fork-aware LRU.

    Args:
        max_bytes: upper bound of the bytes held; 0 keeps nothing (a load still runs once for threads that ask
            together).
        measure: returns the bytes that a value occupies. Default: `sys.getsizeof`, which is right for
            `bytes`.
        max_items: upper bound of the number of values; 0 keeps nothing. Default: no bound.
    """

    def __init__(
        self, max_bytes: int, measure: Callable[[V], int] = sys.getsizeof, *, max_items: int = sys.maxsize
    ) -> None:
        self.max_bytes = max_bytes if max_items else 0  # 0 keeps nothing
        self.max_items = max_items
        self.bytes = 0
        self.evictions = 0
        self._measure = measure
        self._slots: OrderedDict[Hashable, Slot[V]] = OrderedDict()
        self._after_fork()
        reset_after_fork(self)

    def _after_fork(self) -> None:
        # A lock that another thread held at the fork would stay held. The threads of loads under way do not
        # exist here.
        self._lock = threading.Lock()
        self._flights: dict[Hashable, _Flight[V]] = {}

    def __len__(self) -> int:
        return len(self._slots)

    def get(self, key: Hashable) -> V | None:
        """Return the value, which is now the most recently used, or None."""
        slot = self.slot(key)
        return None if slot is None else slot.value

    def slot(self, key: Hashable) -> Slot[V] | None:
        """Return the slot of the value, which is now the most recently used, or None."""
        # Without the lock, which would take a third of the time: each step is atomic under the GIL.
        slot = self._slots.get(key)
        if slot is not None:
            try:  # noqa: SIM105 (suppress costs more than the rest of this method)
                self._slots.move_to_end(key)
            except KeyError:
                pass  # another thread has just evicted it
        return slot

    def put(self, key: Hashable, value: V) -> Slot[V] | None:
        """Keep ``value``, and evict the least recently used values to make room.

        Returns:
            The slot; None if the value is larger than the bound, and so not kept.
        """
        if not self.max_bytes:
            return None
        slot = Slot(value, self._measure(value) + SLOT_BYTES)
        with self._lock:
            self._remove(key)
            if slot.size > self.max_bytes:
                return None
            self._make_room(slot.size)
            self._slots[key] = slot
            self.bytes += slot.size
        return slot

    def _make_room(self, size: int) -> None:
        """Make room for one more value of ``size`` bytes. The caller holds the lock."""
        slots, skips = self._slots, MAX_SKIPS
        while self.bytes + size > self.max_bytes or len(slots) >= self.max_items:
            key = self._oldest()
            if slots[key].used and skips:
                slots[key].used = False
                slots.move_to_end(key)
                skips -= 1
            else:
                self._remove(key)
                self.evictions += 1

    def _oldest(self) -> Hashable:
        """The key that is next to be evicted. The caller holds the lock, and there is at least one key."""
        while True:
            try:
                return next(iter(self._slots))
            except RuntimeError:  # a reader, which takes no lock, moved its key between the two calls
                continue

    def _remove(self, key: Hashable) -> None:
        """Remove a value if it is there. The caller holds the lock."""
        slot = self._slots.pop(key, None)
        if slot is not None:
            self.bytes -= slot.size
            slot.value = None

    def discard(self, key: Hashable) -> None:
        """Remove a value if it is there."""
        with self._lock:
            self._remove(key)

    def clear(self) -> None:
        """Remove all values."""
        with self._lock:
            for key in list(self._slots):
                self._remove(key)

    def get_or_load(self, key: Hashable, load: Callable[[], V]) -> V:
        """Return the value, from ``load()`` if it is not held. Threads that ask meanwhile get the same value.

        Raises:
            Exception: the exception of ``load``, in every thread that waited for it. The next call loads
                again.
        """
        with self._lock:
            slot = self._slots.get(key)
            if slot is not None:
                self._slots.move_to_end(key)
                return slot.value  # type: ignore[return-value]  # not None while the slot is in `_slots`
            flight = self._flights.get(key)
            mine = flight is None
            if flight is None:
                flight = self._flights[key] = _Flight()
        if not mine:
            flight.done.wait()
            if flight.error is not None:
                raise flight.error
            return flight.value  # type: ignore[return-value]  # set before `done` if there is no error
        try:
            value = flight.value = load()
            self.put(key, value)
            return value
        except BaseException as error:
            flight.error = error
            raise
        finally:
            with self._lock:
                self._flights.pop(key, None)
            flight.done.set()
