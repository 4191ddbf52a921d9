"""The common part of deduplicators of nearly equal texts: shingles, disjoint sets, groups of equal rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import groupby
from typing import TYPE_CHECKING, Any, ClassVar

from castore.errors import InvalidValueError
from castore.recipes.operators.base import Deduplicator, check_at_least, compile_pattern

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


class NearDeduplicator(Deduplicator):
    """Compares texts by their shingles, which are runs of ``window_size`` tokens.

    Attributes:
        tokenizers: for each tokenization, a function that splits a text into tokens, and the separator of the
            tokens in a shingle.
    """

    tokenizers: ClassVar[dict[str, tuple[Callable[[str], list[str]], str]]]

    def __init__(
        self,
        tokenization: str,
        window_size: int,
        lowercase: bool,
        ignore_pattern: str | None,
        *,
        text_key: str,
    ) -> None:
        super().__init__(text_key=text_key)
        if tokenization not in self.tokenizers:
            raise InvalidValueError(
                f"tokenization={tokenization!r} is not one of {', '.join(self.tokenizers)}"
            )
        if ignore_pattern is not None:
            compile_pattern(ignore_pattern, "ignore_pattern")
        self.tokenization = tokenization
        self.window_size = check_at_least(1, window_size, "window_size")
        self.lowercase = lowercase
        self.ignore_pattern = ignore_pattern

    def shingles(self, text: str) -> Iterator[bytes]:
        """The shingles of a text. A text that is shorter than a window is one shingle."""
        if self.lowercase:
            text = text.lower()
        if self.ignore_pattern is not None:
            text = compile_pattern(self.ignore_pattern, "ignore_pattern").sub("", text)
        split, separator = self.tokenizers[self.tokenization]
        tokens = split(text)
        for at in range(max(1, len(tokens) - self.window_size + 1) if tokens else 0):
            yield separator.join(tokens[at : at + self.window_size]).encode("utf-8", "surrogatepass")


class DisjointSets:
    """Union-find in which the smallest number of each set is its root."""

    def __init__(self, size: int) -> None:
        self._parents = list(range(size))

    def find(self, item: int) -> int:
        """The smallest number of an item's set."""
        while self._parents[item] != item:
            # Halving the path on the way keeps later walks short.
            self._parents[item] = item = self._parents[self._parents[item]]
        return item

    def join(self, one: int, other: int) -> None:
        """Merge two sets."""
        low, high = sorted((self.find(one), self.find(other)))
        self._parents[high] = low

    def leaders(self) -> npt.NDArray[np.int64]:
        """For each item, the smallest number of its set."""
        import numpy as np

        size = len(self._parents)
        return np.fromiter(map(self.find, range(size)), np.int64, size)


def group_equal_rows(rows: npt.NDArray[Any]) -> Iterator[npt.NDArray[np.int64]]:
    """The places of equal rows, for each row that occurs more than once."""
    import numpy as np

    whole = rows.view(np.dtype((np.void, rows.shape[1] * rows.itemsize))).reshape(-1)
    _, kinds, counts = np.unique(whole, return_inverse=True, return_counts=True)
    kinds = kinds.reshape(-1)
    places = np.flatnonzero(counts[kinds] > 1)
    # A stable sort keeps the places of one kind in their order.
    places = places[np.argsort(kinds[places], kind="stable")]
    for _, group in groupby(places, key=lambda place: kinds[place]):
        yield np.fromiter(group, np.int64)
