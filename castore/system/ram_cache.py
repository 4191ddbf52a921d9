"""The RAM tier: recently used values, bounded in bytes and in number, loaded once however many threads ask.

It counts what a value really occupies, its bookkeeping included, so a million tiny values do not slip past the
bound. The least recently used goes first; reading a value in passing, through its `Slot`, only marks it, and marked ones
are passed over once. It knows nothing of blobs or entries, and never blocks on anything but its own short lock: a value is loaded
outside the lock, by the first thread that misses, while the others wait for that one.
"""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from castore.system.forks import reset_after_fork

V = TypeVar("V")

#: What a slot costs besides its value: the key, the tuple and the dictionary's share, as measured with tracemalloc.
#: Before Python 3.11 every object with attributes has a dictionary of its own.
SLOT_BYTES = 300 if sys.version_info >= (3, 11) else 460


#: How many slots that were read in passing `put` passes over, before it lets one of them go all the same: it holds a lock.
CHANCES = 100


class Slot(Generic[V]):
    """Where a value is held. Who keeps it reads the value again without asking, and marks it as used.

    Attributes:
        value: None once it has been let go of.
        size: what it counts as, in bytes.
        used: read in passing since it was last in line: it is passed over once when room is made.
    """

    __slots__ = ("size", "used", "value")

    def __init__(self, value: V, size: int) -> None:
        self.value: V | None = value
        self.size = size
        self.used = False


class _Flight(Generic[V]):
    """A load under way: those who wait for it, and how it ended."""

    __slots__ = ("done", "error", "value")

    def __init__(self) -> None:
        self.done = threading.Event()
        self.value: V | None = None
        self.error: BaseException | None = None


class MemoryLRU(Generic[V]):
    """A bounded, thread-safe, fork-aware LRU.

    Args:
        max_bytes: bound on the bytes held; 0 keeps nothing (loads still run once for all that ask together).
        measure: bytes a value occupies; default `sys.getsizeof`, right for `bytes`.
        max_items: bound on the number of values; default none, 0 keeps nothing.
    """

    def __init__(
        self, max_bytes: int, measure: Callable[[V], int] = sys.getsizeof, *, max_items: int = sys.maxsize
    ) -> None:
        self.max_bytes = max_bytes if max_items else 0  # which keeps nothing
        self.max_items = max_items
        self.bytes = 0
        self.evictions = 0
        self._measure = measure
        self._slots: OrderedDict[Hashable, Slot[V]] = OrderedDict()
        self._after_fork()
        reset_after_fork(self)

    def _after_fork(self) -> None:
        # A lock held by another thread at the fork would stay held; loads under way belong to threads that are gone.
        self._lock = threading.Lock()
        self._flights: dict[Hashable, _Flight[V]] = {}

    def __len__(self) -> int:
        return len(self._slots)

    def get(self, key: Hashable) -> V | None:
        """The value, now the most recently used, or None."""
        slot = self.slot(key)
        return None if slot is None else slot.value

    def slot(self, key: Hashable) -> Slot[V] | None:
        """Where the value is held, now the most recently used, or None."""
        # Without the lock, which would be a third of the time: each step is atomic under the GIL.
        slot = self._slots.get(key)
        if slot is not None:
            try:  # noqa: SIM105 (suppress costs more than the rest of this method)
                self._slots.move_to_end(key)
            except KeyError:
                pass  # another thread has just let go of it
        return slot

    def put(self, key: Hashable, value: V) -> Slot[V] | None:
        """Keep ``value``, letting go of the least recently used; one larger than the bound is not kept.

        Returns:
            Where it is held.
        """
        if not self.max_bytes:
            return None
        slot = Slot(value, self._measure(value) + SLOT_BYTES)
        with self._lock:
            self._let_go(key)
            if slot.size > self.max_bytes:
                return None
            self._make_room(slot.size)
            self._slots[key] = slot
            self.bytes += slot.size
        return slot

    def _make_room(self, size: int) -> None:
        """For one more value. The caller holds the lock."""
        slots, chances = self._slots, CHANCES
        while self.bytes + size > self.max_bytes or len(slots) >= self.max_items:
            key = self._oldest()
            if slots[key].used and chances:
                slots[key].used = False
                slots.move_to_end(key)
                chances -= 1
            else:
                self._let_go(key)
                self.evictions += 1

    def _oldest(self) -> Hashable:
        """The key first in line. The caller holds the lock, and there is one."""
        while True:
            try:
                return next(iter(self._slots))
            except RuntimeError:  # a reader, who takes no lock, moved its key between the two calls
                continue

    def _let_go(self, key: Hashable) -> None:
        """The caller holds the lock."""
        slot = self._slots.pop(key, None)
        if slot is not None:
            self.bytes -= slot.size
            slot.value = None

    def discard(self, key: Hashable) -> None:
        """Let go of one value, if it is there."""
        with self._lock:
            self._let_go(key)

    def clear(self) -> None:
        """Let go of everything."""
        with self._lock:
            for key in list(self._slots):
                self._let_go(key)

    def get_or_load(self, key: Hashable, load: Callable[[], V]) -> V:
        """The value, from ``load()`` if it is not held; threads that ask meanwhile get the same one.

        Raises:
            Exception: whatever ``load`` raised, in every thread that waited for it; the next call tries again.
        """
        with self._lock:
            slot = self._slots.get(key)
            if slot is not None:
                self._slots.move_to_end(key)
                return slot.value  # type: ignore[return-value]  # it is there as long as the slot is
            flight = self._flights.get(key)
            mine = flight is None
            if flight is None:
                flight = self._flights[key] = _Flight()
        if not mine:
            flight.done.wait()
            if flight.error is not None:
                raise flight.error
            return flight.value  # type: ignore[return-value]  # set before done, error being None
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
