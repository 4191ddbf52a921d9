"""How much of a pack comes with a small blob that somebody reads: twice as much with each miss in the pack.

A reader that goes through all of a pack so has it in few requests, and one that wants few blobs of many packs
fetches little more than these.

Once the budget is full, all that comes along pushes out as much. So a miss then brings little, unless it lies
right behind the one before: a reader that goes through a pack in order needs what is next.
"""

from __future__ import annotations

import threading
from collections import Counter

from castore.parts import Parts
from castore.system.forks import reset_after_fork

# Bytes of a pack that come with the first miss in it, and with a later one at most; packs counted at most.
_FIRST, _LARGEST, _PACKS = 256 << 10, 8 << 20, 10_000


class PackWindow:
    """Counts misses by pack. Threads may share it.

    Args:
        parts: of the store that the blobs come into.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._after_fork()
        reset_after_fork(self)

    def _after_fork(self) -> None:
        self._lock = threading.Lock()
        self._misses: Counter[bytes] = Counter()
        self._latest: dict[bytes, tuple[int, int]] = {}  # what came with the latest miss

    def around(self, pack: bytes, offset: int) -> tuple[int, int]:
        """The beginning and the end, in bytes, of what comes with the blob at an offset. Counts a miss."""
        is_full = self._is_full()
        with self._lock:
            if len(self._misses) > _PACKS:
                self._misses.clear()
                self._latest.clear()
            self._misses[pack] += 1
            if is_full:
                start, end = self._latest.get(pack, (0, 0))
                is_next = end <= offset < end + _FIRST
                window = min(2 * (end - start), _LARGEST) if is_next else _FIRST
                start = offset
            else:
                window = min(_FIRST << min(self._misses[pack] - 1, 16), _LARGEST)
                start = offset // window * window
            self._latest[pack] = start, start + window
        return start, start + window

    def _is_full(self) -> bool:
        budget = self._parts.settings.max_size
        return budget is not None and self._parts.index.totals().stored + _LARGEST > budget
