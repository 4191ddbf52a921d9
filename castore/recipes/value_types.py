"""Checks values of YAML against the types of annotations: a sentence for each value that does not fit.

Types that YAML does not have are not checked. Must never change a value, except a number that YAML takes for
text: a parameter counts in the key of its step, and 1 has another key than 1.0.
docs/decisions/own-minhash.md says why this is not msgspec.
"""

from __future__ import annotations

import re
import types
import typing
from typing import Any

from castore.errors import InvalidValueError


def convert_checked(value: Any, hint: Any, what: str) -> Any:
    """A value with the type of ``hint``: a number that YAML read as text, or as another kind, is converted.

    Raises:
        InvalidValueError: the value has another type.

    >>> convert_checked("2e5", int, "max_len"), convert_checked("2e-5", float, "min_ratio")
    (200000, 2e-05)
    """
    kinds = {typing.get_origin(one) or one for one in _alternatives(hint)}
    number = float(value) if isinstance(value, str) and _NUMBER.fullmatch(value) else value
    if isinstance(number, float) and not fits(value, hint):
        # YAML 1.1 reads 2e5 as text, and 2.0e+5 as a float.
        if int in kinds and number.is_integer():
            return int(number)
        if float in kinds:
            return number
    check_type(value, hint, what)
    return value


_NUMBER = re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]{1,3}")


def check_type(value: object, hint: Any, what: str) -> None:
    """Raise InvalidValueError if ``value`` lacks the type of ``hint``; types that YAML lacks pass.

    >>> check_type("ten", int, "min_len of text_length_filter")
    Traceback (most recent call last):
    castore.errors.InvalidValueError: min_len of text_length_filter must be a whole number, not 'ten' (text)
    """
    if not fits(value, hint):
        kind = _WORDS.get(type(value), type(value).__name__)
        raise InvalidValueError(f"{what} must be {_describe_type(hint)}, not {value!r} ({kind})")


_WORDS: dict[Any, str] = {
    bool: "true or false", int: "a whole number", float: "a number", str: "text", list: "a list",
    dict: "a map", type(None): "null",
}  # fmt: skip


def _alternatives(hint: Any) -> tuple[Any, ...]:
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return typing.get_args(hint) if union else (hint,)


def fits(value: object, hint: Any) -> bool:
    """Whether a value has the type of ``hint``."""
    return any(_fits_alternative(value, one) for one in _alternatives(hint))


def _fits_alternative(value: object, hint: Any) -> bool:
    origin = typing.get_origin(hint) or hint
    if origin is typing.Literal:
        return value in typing.get_args(hint)
    if origin not in _WORDS:
        return True
    if origin is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if origin is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if not isinstance(value, origin):
        return False
    inner = typing.get_args(hint)
    return not (origin is list and inner) or all(fits(item, inner[0]) for item in value)


def _describe_type(hint: Any) -> str:
    return " or ".join(dict.fromkeys(_describe_one(one) for one in _alternatives(hint)))


def _describe_one(hint: Any) -> str:
    origin = typing.get_origin(hint) or hint
    inner = typing.get_args(hint)
    if origin is typing.Literal:
        return " or ".join(map(repr, inner))
    if origin is list and inner and inner[0] is not Any:
        return f"a list ({_describe_type(inner[0])} each)"
    return _WORDS.get(origin, str(hint))
