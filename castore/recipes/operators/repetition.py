"""Filters on repetition: of characters, words and lines, and by the ratio of compression."""

from __future__ import annotations

import math
import zlib
from collections import Counter
from typing import Any

from castore.recipes.operators.base import RatioFilter, check_at_least
from castore.recipes.operators.words import refuse_model, words_of


class CharacterRepetitionFilter(RatioFilter):
    """Keeps texts by their ratio of repeated runs of ``rep_len`` characters: ``min_ratio`` to ``max_ratio``.

    Of n different runs, the sqrt(n) most frequent ones count if they occur more than once: the measure of
    BigScience's ROOTS.

    >>> op = CharacterRepetitionFilter(rep_len=3)
    >>> [round(op.measure(text), 2) for text in ("abcabcabcabc", "the quick brown fox")]
    [0.4, 0.0]
    """

    stat = "char_rep_ratio"

    def __init__(
        self, rep_len: int = 10, min_ratio: float = 0.0, max_ratio: float = 0.5, *, text_key: str = "text"
    ) -> None:
        super().__init__(min_ratio, max_ratio, text_key=text_key)
        self.rep_len = check_at_least(1, rep_len, "rep_len")

    def measure(self, text: str) -> float:
        """The ratio of the most frequent runs."""
        length = (
            self.rep_len
        )  # with `self` in a closure, the thresholds would count in the key of the statistics
        runs = Counter(text[at : at + length] for at in range(len(text) - length + 1))
        repeated = sorted((count for count in runs.values() if count > 1), reverse=True)
        frequent = repeated[: math.isqrt(len(runs))]
        return sum(frequent) / runs.total() if frequent else 0.0


class WordRepetitionFilter(RatioFilter):
    """Keeps texts by the ratio of their runs of ``rep_len`` words that occur more than once.

    Args:
        rep_len: words of a run.
        min_ratio, max_ratio: the ratios that are kept.
        lang: ignored: words are found in the same way in all languages.
        tokenization: Data-Juicer's tokens of a model; castore has no models: false only.
        text_key: the column of the text.
    """

    stat = "word_rep_ratio"
    _castore_revision = 2

    def __init__(
        self,
        rep_len: int = 10,
        min_ratio: float = 0.0,
        max_ratio: float = 0.5,
        *,
        lang: str = "en",
        tokenization: bool = False,
        text_key: str = "text",
    ) -> None:
        refuse_model(tokenization, self._name)
        super().__init__(min_ratio, max_ratio, text_key=text_key)
        self.rep_len = check_at_least(1, rep_len, "rep_len")

    def measure(self, text: str) -> float:
        """The ratio of runs that occur more than once."""
        words = words_of(text, lowercase=True)
        return _repeated_ratio(Counter(zip(*(words[at:] for at in range(self.rep_len)), strict=False)))


class LineRepetitionFilter(RatioFilter):
    """Keeps texts by the ratio of their lines, without empty ones, that occur again (Gopher's rule)."""

    stat = "line_rep_ratio"

    def __init__(self, min_ratio: float = 0.0, max_ratio: float = 0.3, *, text_key: str = "text") -> None:
        super().__init__(min_ratio, max_ratio, text_key=text_key)

    def measure(self, text: str) -> float:
        """The ratio of lines that occur more than once."""
        return _repeated_ratio(Counter(line for line in map(str.strip, text.splitlines()) if line))


class CompressionRatioFilter(RatioFilter):
    """Keeps texts that zlib compresses to ``min_ratio`` to ``max_ratio`` of their size.

    Prose of every language comes to 0.3 to 0.6. Boilerplate comes to less, random and encoded data to almost
    1. Texts below some hundred bytes compress badly too, so a length filter should run first.
    """

    stat = "compression_ratio"

    def __init__(self, min_ratio: float = 0.1, max_ratio: float = 0.9, *, text_key: str = "text") -> None:
        super().__init__(min_ratio, max_ratio, text_key=text_key)

    def measure(self, text: str) -> float:
        """Compressed bytes for each byte; at most 1."""
        data = text.encode("utf-8", "surrogatepass")
        return min(1.0, len(zlib.compress(data, 6)) / len(data)) if data else 1.0


def _repeated_ratio(counts: Counter[Any]) -> float:
    total = sum(counts.values())
    return sum(count for count in counts.values() if count > 1) / total if total else 0.0
