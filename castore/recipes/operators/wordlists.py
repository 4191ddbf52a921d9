"""Filters on the ratio of a text's words that are on a user's list: stop words, or flagged words.

A list is a JSON file of words by language, in Data-Juicer's form. Must never download a list.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from castore.errors import InvalidValueError
from castore.recipes.operators.base import NeedsMoreError, RatioFilter, check_at_least
from castore.recipes.operators.words import join_runs, refuse_model, words_of


class _WordListFilter(RatioFilter):
    """A filter on the ratio of words that are on a list."""

    def __init__(
        self,
        lists: str,
        folder: str | None,
        lang: str,
        ratios: tuple[float, float],
        *,
        tokenization: bool,
        augmented: tuple[list[int], str] | None,
        text_key: str,
    ) -> None:
        super().__init__(*ratios, text_key=text_key)
        refuse_model(tokenization, self._name)
        self.words = read_words(folder, lists, lang)
        for size in augmented[0] if augmented else []:
            check_at_least(1, size, "words_aug_group_sizes")
        self.augmented = augmented

    def measure(self, text: str) -> float:
        """The ratio of words that are on the list."""
        words = words_of(text, lowercase=True)
        if self.augmented:
            words += join_runs(words, *self.augmented)
        return sum(word in self.words for word in words) / len(words) if words else 0.0


class StopwordsFilter(_WordListFilter):
    """Keeps texts by their ratio of stop words: prose has many, lists have few.

    Args:
        lang: the language of the list; ``"all"`` for all languages.
        tokenization: Data-Juicer's tokens of a model; castore has no models: false only.
        min_ratio, max_ratio: the ratios that are kept.
        stopwords_dir: a folder with files ``*stopwords*.json``, each a map of languages to lists of words.
        use_words_aug, words_aug_group_sizes, words_aug_join_char: whether runs of words are looked up, too;
            the lengths of the runs; and the text that joins their words.
        text_key: the column of the text.

    Raises:
        InvalidValueError: there is no such list.
    """

    stat = "stopwords_ratio"

    def __init__(
        self,
        lang: str = "en",
        tokenization: bool = False,
        min_ratio: float = 0.3,
        max_ratio: float = 1.0,
        stopwords_dir: str | None = None,
        use_words_aug: bool = False,
        words_aug_group_sizes: list[int] | None = None,
        words_aug_join_char: str = "",
        *,
        text_key: str = "text",
    ) -> None:
        augmented = (words_aug_group_sizes or [2], words_aug_join_char) if use_words_aug else None
        super().__init__(
            "stopwords", stopwords_dir, lang, (min_ratio, max_ratio),
            tokenization=tokenization, augmented=augmented, text_key=text_key,
        )  # fmt: skip


class FlaggedWordsFilter(_WordListFilter):
    """Keeps texts by their ratio of flagged words, such as swear words.

    Args:
        lang: the language of the list; ``"all"`` for all languages.
        tokenization: Data-Juicer's tokens of a model; castore has no models: false only.
        min_ratio, max_ratio: the ratios that are kept.
        flagged_words_dir: a folder with files ``*flagged_words*.json``, each a map of languages to lists of
            words.
        use_words_aug, words_aug_group_sizes, words_aug_join_char: whether runs of words are looked up, too;
            the lengths of the runs; and the text that joins their words.
        text_key: the column of the text.

    Raises:
        InvalidValueError: there is no such list.
    """

    stat = "flagged_words_ratio"

    def __init__(
        self,
        lang: str = "en",
        tokenization: bool = False,
        min_ratio: float = 0.0,
        max_ratio: float = 0.045,
        flagged_words_dir: str | None = None,
        use_words_aug: bool = False,
        words_aug_group_sizes: list[int] | None = None,
        words_aug_join_char: str = "",
        *,
        text_key: str = "text",
    ) -> None:
        augmented = (words_aug_group_sizes or [2], words_aug_join_char) if use_words_aug else None
        super().__init__(
            "flagged_words", flagged_words_dir, lang, (min_ratio, max_ratio),
            tokenization=tokenization, augmented=augmented, text_key=text_key,
        )  # fmt: skip


def read_words(folder: str | None, lists: str, lang: str) -> frozenset[str]:
    """The words of one language, or of all, in all lists of a folder.

    Args:
        folder: the folder of the lists; None for the folder where Data-Juicer keeps its downloads.
        lists: the text that the file names contain.
        lang: the language, or ``"all"``.

    Raises:
        NeedsMoreError: there is no list.
        InvalidValueError: a file is no list, or none has that language.
    """
    parameter = f"{lists}_dir"
    place = Path(folder) if folder is not None else _data_juicer_folder()
    files = sorted(place.glob(f"*{lists}*.json")) if place.is_dir() else []
    if not files:
        raise NeedsMoreError(
            f"there is no *{lists}*.json in {os.fspath(place)!r}; set {parameter} to a folder "
            f"with a file such as {lists}.json "
            f'that holds words by language: {{"{lang}": ["word", ...]}}'
        )
    by_language: dict[str, list[str]] = {}
    for file in files:
        for language, words in _read_list(file).items():
            by_language[language] = by_language.get(language, []) + words
    if lang == "all":
        return frozenset(word for words in by_language.values() for word in words)
    if lang not in by_language:
        raise InvalidValueError(
            f"the word lists in {os.fspath(place)!r} have no language {lang!r}; they have "
            f"{', '.join(sorted(by_language))}"
        )
    return frozenset(by_language[lang])


def _read_list(file: Path) -> dict[str, list[str]]:
    try:
        found: Any = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidValueError(f"cannot read the word list {os.fspath(file)!r}: {error}") from error
    good = isinstance(found, dict) and all(
        isinstance(words, list) and all(isinstance(word, str) for word in words) for words in found.values()
    )
    if not good:
        raise InvalidValueError(
            f"{os.fspath(file)!r} is not a word list: it must be a map of languages to lists of words"
        )
    return dict(found)


def _data_juicer_folder() -> Path:
    assets = os.environ.get("DATA_JUICER_ASSETS_CACHE")
    home = os.environ.get("DATA_JUICER_CACHE_HOME") or os.path.join(
        os.environ.get("CACHE_HOME") or os.path.expanduser("~/.cache"), "data_juicer"
    )
    return Path(assets or os.path.join(home, "assets"))
