"""Hits and misses of one level of one cache object. Each process counts its own."""

from __future__ import annotations


class Tally:
    """Counts of reads.

    Under the GIL no other thread interrupts ``+= 1`` on an attribute, so there is no lock.
    """

    __slots__ = ("hits", "misses")

    def __init__(self) -> None:
        self.hits = 0
        self.misses = 0

    def figures(self) -> dict[str, int | float]:
        """``hits``, ``misses`` and ``hit_rate``, which is 0.0 before the first read."""
        reads = self.hits + self.misses
        return {
            "hits": self.hits,
            "misses": self.misses,
            "hit_rate": self.hits / reads if reads else 0.0,
        }
