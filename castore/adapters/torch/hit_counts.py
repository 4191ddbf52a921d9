"""Hits and misses of a wrapper, counted in all processes that have a copy of it."""

from __future__ import annotations

from castore.shm.segments import Segment
from castore.shm.tallies import Tallies

_HITS, _MISSES, _COUNTS = range(3)


class HitCounts:
    """The counters of one wrapper. A pickled copy counts with the original while that one is there.

    Args:
        of: the wrapper's class, for messages.
    """

    def __init__(self, of: str) -> None:
        self._attach(None, of)

    def _attach(self, name: str | None, of: str) -> None:
        self._of = of
        self._segment = Segment(name, Tallies.needed(_COUNTS), {"kind": f"counts of a {of}"})
        self._tallies = Tallies(self._segment, 0, _COUNTS)

    def __getstate__(self) -> tuple[str | None, str]:
        return self._segment.name, self._of

    def __setstate__(self, state: tuple[str | None, str]) -> None:
        # By name: a copy that outlives the process it was made in starts its counters at 0.
        self._attach(*state)

    def hit(self, count: int = 1) -> None:
        """Count samples that came from the store."""
        self._tallies.add(_HITS, count)

    def miss(self, count: int = 1) -> None:
        """Count samples that had to be made."""
        self._tallies.add(_MISSES, count)

    @property
    def hits(self) -> int:
        """The hits of all processes."""
        return self._tallies.total(_HITS)

    @property
    def misses(self) -> int:
        """The misses of all processes."""
        return self._tallies.total(_MISSES)

    def close(self) -> None:
        """Release them."""
        self._segment.close()
