"""Decides which samples stay. While all samples are used alike, a fixed subset stays. Where some samples are
used more, the most used ones stay.

A training epoch reads each sample once, in an order that changes. So the least recently used sample is no
more likely to be read late than any other, and LRU evicts samples that the epoch has not read yet. Where half
the data fits, LRU hits 15 % of a shuffled epoch, and any fixed half hits 50 % (Mohan et al., "Analyzing and
Mitigating Data Stalls in DNN Training", VLDB 2021, the MinIO cache). Where popularity is skewed, LRU does
better than a fixed half, and LFU better than LRU. One rule serves both:

        a sample replaces another only if it was used at least MARGIN times more often of late.

In epochs, the uses of any two samples differ by at most one, or two where ageing fell between them, so
nothing moves. Under skew popular samples are soon ahead. One byte a sample counts its uses exactly. All
counts are halved after every AGEING uses a sample, so that popularity may change (as in TinyLFU: Einziger et
al., ACM ToS 2017). Knows nothing of bytes or levels.
"""

from __future__ import annotations

import random
from collections.abc import Callable

#: Measured: 2 lets ageing in mid-epoch move samples needlessly, 4 follows skew more slowly.
MARGIN = 3
#: Uses a sample between halvings. Measured: 8 lags behind LRU where popularity drifts; 2 loses more where a
#: rank lags.
AGEING = 3
#: Candidates examined: with 16, the least used of them is in the least used sixth with 95 % probability.
CANDIDATES = 16

_HALVES = bytes(count >> 1 for count in range(256))


class Policy:
    """Counts uses and chooses victims. Races between processes lose a use now and then, which is harmless.

    Args:
        counts: one byte for each sample.
        clock: one 8-byte word: uses since the last halving.
    """

    def __init__(self, counts: memoryview, clock: memoryview) -> None:
        self._counts = counts
        self._clock = clock
        self._period = AGEING * max(1, len(counts))
        self._random = random.Random()  # noqa: S311 - no secret

    def use(self, index: int) -> None:
        """Count one use of a sample."""
        count = self._counts[index]
        if count < 255:
            self._counts[index] = count + 1
        uses = self._clock[0] + 1
        if uses < self._period:
            self._clock[0] = uses
        else:
            self._clock[0] = 0
            self._counts[:] = self._counts.tobytes().translate(_HALVES)

    def victim(self, index: int, residents: int, resident: Callable[[int], int | None]) -> int | None:
        """The place of a resident that gives way to sample ``index``, or None if none should.

        Args:
            index: the sample that needs a place.
            residents: the number of places.
            resident: the sample at a place, None if the place cannot serve (because it is empty or too small,
            say).
        """
        counts = self._counts
        # The use of the sample itself has been counted.
        limit = counts[index] - MARGIN
        if limit < 0 or not residents:
            return None
        chosen = None
        for _ in range(CANDIDATES):
            place = int(self._random.random() * residents)
            sample = resident(place)
            if sample is not None and counts[sample] <= limit:
                chosen, limit = place, counts[sample] - 1
        return chosen
