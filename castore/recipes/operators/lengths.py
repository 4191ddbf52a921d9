"""Filters on the lengths of texts, lines and words, and on the number of words."""

from __future__ import annotations

from castore.recipes.operators.base import UNBOUNDED, CountFilter, Filter
from castore.recipes.operators.words import refuse_model, words_of


class TextLengthFilter(CountFilter):
    """Keeps texts of ``min_len`` to ``max_len`` characters.

    >>> op = TextLengthFilter(min_len=3)
    >>> [op.process(op.compute_stats({"text": text})) for text in ("ab", "abc")]
    [False, True]
    """

    stat = "text_len"

    def measure(self, text: str) -> int:
        """The number of characters."""
        return len(text)


class AverageLineLengthFilter(CountFilter):
    """Keeps texts whose lines have ``min_len`` to ``max_len`` characters on average; lines of tables are
    short.
    """

    stat = "avg_line_length"
    _castore_revision = 2

    def measure(self, text: str) -> float:
        """Characters for each line, line breaks included."""
        lines = text.splitlines()
        return len(text) / len(lines) if lines else 0.0


class MaximumLineLengthFilter(CountFilter):
    """Keeps texts whose longest line has ``min_len`` to ``max_len`` characters; lines of dumps are longer."""

    stat = "max_line_length"

    def measure(self, text: str) -> int:
        """Characters of the longest line."""
        return max(map(len, text.splitlines()), default=0)


class AverageWordLengthFilter(CountFilter):
    """Keeps texts whose words have ``min_len`` to ``max_len`` characters on average.

    For languages that put spaces between words. Words of prose have 3 to 10 characters, symbols have fewer,
    and encoded data has more (Gopher's rule).
    """

    stat = "avg_word_length"

    def __init__(self, min_len: int = 3, max_len: int = 10, *, text_key: str = "text") -> None:
        super().__init__(min_len, max_len, text_key=text_key)

    def measure(self, text: str) -> float:
        """Characters for each word."""
        words = text.split()
        return sum(map(len, words)) / len(words) if words else 0.0


class WordsNumFilter(Filter):
    """Keeps texts of ``min_num`` to ``max_num`` words; a word is text between spaces with a letter in it.

    Args:
        min_num, max_num: the numbers of words that are kept.
        lang: ignored: words are found in the same way in all languages.
        tokenization: Data-Juicer's tokens of a model; castore has no models: false only.
        text_key: the column of the text.
    """

    stat = "num_words"
    _castore_revision = 2
    min_num: float
    max_num: float

    def __init__(
        self,
        min_num: int = 10,
        max_num: int = UNBOUNDED,
        *,
        lang: str = "en",
        tokenization: bool = False,
        text_key: str = "text",
    ) -> None:
        refuse_model(tokenization, self._name)
        super().__init__(min_num, max_num, names=("min_num", "max_num"), text_key=text_key)

    def measure(self, text: str) -> int:
        """The number of words."""
        return len(words_of(text))

    def bounds(self) -> tuple[float, float]:
        """The smallest and the largest number that is kept."""
        return self.min_num, self.max_num
