"""An arena as a cache uses it that never evicts: set a record again, forget all.

Assumes that the caller holds the segment's lock, as `castore.shm.arena.Arena` does. Whether an index may be set is the
caller's business.
"""

from __future__ import annotations

from collections.abc import Sequence

from castore.shm.arena import Arena, Buffer


class RaggedArena(Arena):
    """Records that are set once, seldom again, and go only all together."""

    def put(self, index: int, parts: Sequence[Buffer], length: int) -> bool:
        """Give ``index`` these bytes, in the place it has if they fit there; False if there is no room for them.

        A record that outgrows its place leaves that place unused until `clear`. If there is no room, ``index``
        has no record.

        Raises:
            FullError: there is room in the arena, but not in ``/dev/shm``.
        """
        number = self._places[index] - 1
        extent = self.extent(number) if 0 <= number < self.count else None
        if extent is not None and extent.owner == index:
            if extent.capacity >= length:
                self.replace(number, index, parts, length)
                return True
            self.remove(index)
        # What a writer that died has left may point at an extent that is not there, or another's.
        self._places[index] = 0
        return self.append(index, parts, length)

    def clear(self) -> None:
        """Forget all records; their space is free again. The memory stays with the segment."""
        self._places[:] = memoryview(bytes(self._places.nbytes)).cast("I")
        # Extents will lie elsewhere from now on, over one another's old places: whoever is copying one must notice.
        for number in range(self.count):
            self._spoil(number)
        # Only now: a record that can still be found must not be written over.
        self._words[:] = memoryview(bytes(self._words.nbytes)).cast("Q")
