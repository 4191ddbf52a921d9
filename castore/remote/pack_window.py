"""How much of a pack comes with a small blob that somebody reads: twice as much with each miss in the pack.

A reader that goes through all of a pack so has it in few requests, and one that wants few blobs of many packs
fetches little more than these.
"""

from __future__ import annotations

import threading
from collections import Counter

# Bytes of a pack that come with the first miss in it, and with a later one at most; packs counted at most.
_FIRST, _LARGEST, _PACKS = 256 << 10, 8 << 20, 10_000


class PackWindow:
    """Counts misses by pack. Threads may share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._misses: Counter[bytes] = Counter()

    def around(self, pack: bytes, offset: int) -> tuple[int, int]:
        """The beginning and the end, in bytes, of what comes with the blob at an offset. Counts a miss."""
        with self._lock:
            if len(self._misses) > _PACKS:
                self._misses.clear()
            self._misses[pack] += 1
            misses = self._misses[pack]
        window = min(_FIRST << min(misses - 1, 16), _LARGEST)
        start = offset // window * window
        return start, start + window
