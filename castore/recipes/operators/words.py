"""Words of a text: the pieces between spaces, line breaks and tabs, stripped of non-letters at both ends.

As in Data-Juicer, except that Unicode categories decide about letters, not a list. Must never need a model.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from collections.abc import Iterable

from castore.recipes.operators.base import NeedsMoreError

_GAP = re.compile(r"[ \n\t]+")


def words_of(text: str, *, lowercase: bool = False) -> list[str]:
    """The words of a text; numbers and punctuation alone are not words.

    >>> words_of("It's 5 o'clock, (nearly)!")
    ["It's", "o'clock", 'nearly']
    """
    if lowercase:
        text = text.lower()
    return [word for word in map(strip_word, _GAP.split(text)) if word]


@functools.lru_cache(maxsize=1 << 16)
def strip_word(word: str) -> str:
    """A word without the characters at its ends that are neither letters nor marks."""
    if word.isalpha():
        return word
    letters = [at for at, character in enumerate(word) if unicodedata.category(character)[0] in "LM"]
    return word[letters[0] : letters[-1] + 1] if letters else ""


def join_runs(words: list[str], lengths: Iterable[int], between: str) -> list[str]:
    """All runs of words of the given lengths, joined: words of languages that write no spaces, or too many.

    >>> join_runs(["a", "b", "c"], [2], "")
    ['ab', 'bc']
    """
    return [
        between.join(words[at : at + length])
        for length in lengths
        for at in range(len(words) - length + 1)
    ]  # fmt: skip


def refuse_model(tokenization: bool, what: str) -> None:
    """Check that words are separated at spaces only.

    Raises:
        NeedsMoreError: the caller asked for a tokenizer's tokens.
    """
    if tokenization:
        raise NeedsMoreError(
            f"tokenization: true in {what} needs a tokenizer, and castore's operators have no models; "
            "tokenization: false splits words at spaces"
        )
