"""Mappers that remove or replace parts of a text: links, e-mail addresses, odd spaces, any pattern.

The patterns of this module take time in proportion to the text: no run of characters is scanned from each of
its places.
"""

from __future__ import annotations

from castore.errors import InvalidValueError
from castore.recipes.operators.base import Mapper, compile_pattern

# Ends before a character that no link contains, and before the punctuation of the sentence.
LINK = r"(?i:\b(?:https?|ftp)://|\bwww\.)[^\s<>\"'`]*[^\s<>\"'`.,;:!?)\]}]"
# No letter of a word may precede the match: otherwise every letter of a long word would be tried.
EMAIL = r"(?<![\w.+%-])[\w.+%-]{1,64}@(?:[\w-]{1,63}\.){1,8}[^\W\d_]{2,63}"


class ReplaceContentMapper(Mapper):
    """Replaces all matches of a regular expression, or of several, one after the other.

    Args:
        pattern: the expression, or a list of them; ``.`` matches line breaks too. None replaces nothing.
        repl: the replacement, with ``\\1`` for the first group; or a list, one for each pattern.
        text_key: the column of the text.

    >>> ReplaceContentMapper([r"\\d+", "kitten"], ["#", "cat"]).process({"text": "3 kittens"})
    {'text': '# cats'}
    """

    def __init__(
        self, pattern: str | list[str] | None, repl: str | list[str] = "", *, text_key: str = "text"
    ) -> None:
        super().__init__(text_key=text_key)
        patterns = [] if pattern is None else [pattern] if isinstance(pattern, str) else list(pattern)
        replacements = [repl] * len(patterns) if isinstance(repl, str) else list(repl)
        if pattern is not None and len(replacements) != len(patterns):
            raise InvalidValueError(
                f"{len(patterns)} patterns and {len(replacements)} replacements (repl): give one replacement "
                "for all patterns, or one for each"
            )
        self.pattern = patterns
        self.repl = replacements[: len(patterns)]
        for expression, replacement in zip(self.pattern, self.repl, strict=True):
            compile_pattern(expression, "pattern")
            _check_replacement(expression, replacement)

    def clean(self, text: str) -> str:
        """The text with all matches replaced."""
        for pattern, repl in zip(self.pattern, self.repl, strict=True):
            text = compile_pattern(pattern, "pattern").sub(repl, text)
        return text


def _check_replacement(pattern: str, repl: str) -> None:
    """Raise InvalidValueError if a replacement refers to a group that its pattern lacks."""
    # With an empty alternative, any pattern matches the empty text; the line break ends a comment in it.
    empty = compile_pattern(f"{compile_pattern(pattern, 'pattern').pattern}\n|", "pattern")
    try:
        empty.sub(repl, "")
    except Exception as error:  # errors of re and of regex have no common base class
        raise InvalidValueError(f"repl={repl!r} does not fit the pattern {pattern!r}: {error}") from error


class CleanLinksMapper(ReplaceContentMapper):
    """Removes links, which begin with ``http://``, ``https://``, ``ftp://`` or ``www.``.

    >>> CleanLinksMapper().process({"text": "see https://example.org/a?b=c."})
    {'text': 'see .'}
    """

    def __init__(
        self, pattern: str | list[str] | None = None, repl: str | list[str] = "", *, text_key: str = "text"
    ) -> None:
        super().__init__(pattern or LINK, repl, text_key=text_key)


class CleanEmailMapper(ReplaceContentMapper):
    """Removes e-mail addresses.

    >>> CleanEmailMapper(repl="<mail>").process({"text": "ask ada@example.org, please"})
    {'text': 'ask <mail>, please'}
    """

    def __init__(
        self, pattern: str | list[str] | None = None, repl: str | list[str] = "", *, text_key: str = "text"
    ) -> None:
        super().__init__(pattern or EMAIL, repl, text_key=text_key)


class CleanCopyrightMapper(Mapper):
    """Removes the copyright notice of source code.

    The first comment between ``/*`` and ``*/`` is removed if it contains "copyright". In a text without such
    a comment, the lines at the beginning that are empty or begin with ``//``, ``#`` or ``--`` are removed.

    >>> CleanCopyrightMapper().process({"text": "# Copyright 2026 by us\\n\\nimport os"})
    {'text': 'import os'}
    """

    def clean(self, text: str) -> str:
        """The text without its copyright notice."""
        start = text.find("/*")
        end = text.find("*/", start + 2) if start >= 0 else -1
        if end >= 0:
            notice = "copyright" in text[start:end].lower()
            return text[:start] + text[end + 2 :] if notice else text
        lines = text.split("\n")
        code = (at for at, line in enumerate(lines) if line and not line.startswith(("//", "#", "--")))
        return "\n".join(lines[next(code, len(lines)) :])


class WhitespaceNormalizationMapper(Mapper):
    """Turns every kind of space into a plain space and every line break into ``\\n``, and strips the ends.

    Word joiners and byte order marks are removed. The zero-width space, which separates words in Thai and
    Khmer, becomes a plain space. Other joiners stay.

    >>> WhitespaceNormalizationMapper().process({"text": "\\ufeffa\\u00a0b\\tc\\r\\nd\\u2028e "})
    {'text': 'a b c\\nd\\ne'}
    """

    def clean(self, text: str) -> str:
        """The text with plain spaces only."""
        return text.replace("\r\n", "\n").translate(_SPACES).strip()


# Unicode's category Zs, and other characters that serve as spaces.
_SPACES = dict.fromkeys(map(ord, "\xa0\u1680\u202f\u205f\u3000\t\v\f\u200b"), " ")
_SPACES |= dict.fromkeys(range(0x2000, 0x200B), " ")
_SPACES |= dict.fromkeys(map(ord, "\r\x85\u2028\u2029"), "\n")
_SPACES |= dict.fromkeys(map(ord, "\u2060\ufeff"), "")
