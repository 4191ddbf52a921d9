"""Parts that deduplicators of nearly equal texts share: sets that grow together, and rows that are equal."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


class DisjointSets:
    """Union-find, with the smallest number of each set for its root."""

    def __init__(self, size: int) -> None:
        self._parents = list(range(size))

    def find(self, item: int) -> int:
        """The smallest number of the set that an item is in."""
        while self._parents[item] != item:
            # Halving the path as we walk it keeps the next walks short.
            self._parents[item] = item = self._parents[self._parents[item]]
        return item

    def join(self, one: int, other: int) -> None:
        """Make two sets one."""
        low, high = sorted((self.find(one), self.find(other)))
        self._parents[high] = low

    def leaders(self) -> npt.NDArray[np.int64]:
        """For each item the smallest number of its set."""
        import numpy as np

        size = len(self._parents)
        return np.fromiter(map(self.find, range(size)), np.int64, size)


def group_equal_rows(rows: npt.NDArray[Any]) -> Iterator[npt.NDArray[np.int64]]:
    """Places of equal rows, for each row that occurs more than once."""
    import numpy as np

    whole = rows.view(np.dtype((np.void, rows.shape[1] * rows.itemsize))).reshape(-1)
    _, kinds, counts = np.unique(whole, return_inverse=True, return_counts=True)
    kinds = kinds.reshape(-1)
    places = np.flatnonzero(counts[kinds] > 1)
    # A stable sort keeps the places of one kind in their order.
    places = places[np.argsort(kinds[places], kind="stable")]
    for _, group in groupby(places, key=lambda place: kinds[place]):
        yield np.fromiter(group, np.int64)
