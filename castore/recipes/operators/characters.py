"""Filters on the characters of a text by their Unicode categories, for every script."""

from __future__ import annotations

import functools
import unicodedata
from collections import Counter

from castore.recipes.operators.base import RatioFilter
from castore.recipes.operators.words import refuse_model


class AlphanumericFilter(RatioFilter):
    """Keeps texts by their ratio of letters (with their marks) and digits: ``min_ratio`` to ``max_ratio``.

    Args:
        min_ratio, max_ratio: the ratios that are kept.
        tokenization: Data-Juicer's letters for each token of a model; castore has no models: false only.
        text_key: the column of the text.

    >>> op = AlphanumericFilter(min_ratio=0.5)
    >>> [op.process(op.compute_stats({"text": text})) for text in ("Grüße!", "हिन्दी", "-=-=-a")]
    [True, True, False]
    """

    stat = "alnum_ratio"

    def __init__(
        self,
        min_ratio: float = 0.25,
        max_ratio: float = 1.0,
        *,
        tokenization: bool = False,
        text_key: str = "text",
    ) -> None:
        refuse_model(tokenization, self._name)
        super().__init__(min_ratio, max_ratio, text_key=text_key)

    def measure(self, text: str) -> float:
        """The ratio of letters, marks and numbers."""
        return _category_ratio(text, "LMN")


class SpecialCharactersFilter(RatioFilter):
    """Keeps texts by their ratio of special characters, which are all but letters: ``min_ratio`` to
    ``max_ratio``.

    Spaces, digits, punctuation, symbols and emoji are special.
    """

    stat = "special_char_ratio"

    def __init__(self, min_ratio: float = 0.0, max_ratio: float = 0.25, *, text_key: str = "text") -> None:
        super().__init__(min_ratio, max_ratio, text_key=text_key)

    def measure(self, text: str) -> float:
        """The ratio of characters that are not letters."""
        return 1.0 - _category_ratio(text, "LM") if text else 0.0


@functools.lru_cache(maxsize=1 << 16)
def _category(character: str) -> str:
    return unicodedata.category(character)[0]


def _category_ratio(text: str, categories: str) -> float:
    """The ratio of characters whose category begins with one of these letters."""
    # A text has few distinct characters, and Counter counts in C.
    found = sum(count for character, count in Counter(text).items() if _category(character) in categories)
    return found / len(text) if text else 0.0
