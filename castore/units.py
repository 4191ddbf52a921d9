"""Parses and formats sizes and durations as people write them: "200GB", "7d".

Assumes nothing and imports nothing but the errors. Must never guess: a text that it does not understand is an
error.

Why not a library: humanfriendly has had no release since 2021, costs 20 ms to import and reads "2kb kb" as
2000; pytimeparse returns None for unreadable text and does not know milliseconds; humanize only formats.
"""

from __future__ import annotations

import math
import numbers
import operator
import re
from typing import Any

from castore.errors import InvalidValueError

NEVER = math.inf
"""A ``ttl`` of entries that never expire, also where the store has another default."""
UNLIMITED = math.inf
"""A ``max_size`` that sets no bound, also where the store has one."""

_PREFIXES = "KMGTP"
_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate(_PREFIXES, start=1):
    _UNITS[_letter] = _UNITS[_letter + "B"] = 1000**_power
    _UNITS[_letter + "IB"] = 1024**_power

_SIZE = re.compile(r"\s*(\d{1,20})(?:\.(\d{1,20}))?\s*([A-Za-z]{0,3})\s*", re.ASCII)
_SIZE_HELP = 'write bytes as an int, or a text like "200GB" or "1.5 GiB"'
# The largest integer of SQLite, and more bytes than any disk has.
_LARGEST = 2**63 - 1

_SECONDS = {"w": 604800.0, "d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}
_NUMBER = r"\d{1,15}(?:\.\d{1,15})?"
_PLAIN = re.compile(rf"\s*({_NUMBER})\s*", re.ASCII)
# Each unit at most once, the longest first: "30m1h" and "1m1m" are typing errors.
_DURATION = re.compile(
    r"\s*" + "".join(rf"(?:(?P<{unit}>{_NUMBER})\s*{unit}\s*)?" for unit in _SECONDS),
    re.ASCII | re.IGNORECASE,
)
_DURATION_HELP = 'write seconds as a number, or a text like "7d" or "1h30m" (units: w, d, h, m, s, ms)'
# A date that far ahead must still fit into datetime, whose last year is 9999.
_LONGEST = 1000 * 365 * 86400.0


def parse_size(size: str | int | float) -> int:
    """The number of bytes that `size` means.

    KB, MB, GB, TB, PB (and K, M, ...) are powers of 1000, KiB, MiB, ... powers of 1024, in any case.

    Args:
        size: bytes as a whole number, or a text such as "200GB", "1.5 GiB", "64k", "4096".

    Raises:
        InvalidValueError: it is negative, not a whole number of bytes, or not understood.

    >>> parse_size("200GB"), parse_size("1.5 GiB"), parse_size("64k"), parse_size(4096)
    (200000000000, 1610612736, 64000, 4096)
    >>> parse_size("ten")
    Traceback (most recent call last):
    castore.errors.InvalidValueError: 'ten' is not a size; write bytes as an int, or a text like "200GB"...
    """
    if isinstance(size, str):
        count = _size_of_text(size)
    elif isinstance(size, float):
        count = int(size) if size.is_integer() else None
    else:
        count = as_whole(size)
    if count is None or not 0 <= count <= _LARGEST:
        raise InvalidValueError(f"{shown(size)} is not a size; {_SIZE_HELP}")
    return count


def _size_of_text(text: str) -> int | None:
    match = _SIZE.fullmatch(text)
    factor = _UNITS.get(match[3].upper()) if match else None
    if match is None or factor is None:
        return None
    fraction = match[2] or ""
    # Computed with whole numbers: floats would make "1.1 PB" wrong by some bytes.
    count, rest = divmod(int(match[1] + fraction) * factor, 10 ** len(fraction))
    return None if rest and factor == 1 else count


def parse_count(count: int, what: str) -> int:
    """A number of things, 1 or more.

    Args:
        count: the number.
        what: the argument's name, for the message.

    Raises:
        InvalidValueError: it is something else.

    >>> parse_count("3", "limit")
    Traceback (most recent call last):
    castore.errors.InvalidValueError: limit must be 1 or more, a whole number, not '3'
    """
    number = as_whole(count)
    if number is None or not 1 <= number <= _LARGEST:
        raise InvalidValueError(f"{what} must be 1 or more, a whole number, not {shown(count)}")
    return number


def parse_flag(flag: Any, what: str) -> bool:
    """True or False, for an argument where a text such as "no" would count as True.

    Args:
        flag: True, False, 0 or 1, or NumPy's.
        what: the argument's name, for the message.

    Raises:
        InvalidValueError: it is something else.

    >>> parse_flag("no", "allow_pickle")
    Traceback (most recent call last):
    castore.errors.InvalidValueError: allow_pickle is True or False, not 'no'
    """
    try:
        known = flag in (False, True)
    except (TypeError, ValueError):  # an array
        known = False
    if not known:
        raise InvalidValueError(f"{what} is True or False, not {shown(flag)}")
    return bool(flag)


def parse_part(part: Any, what: str) -> float:
    """A part of a whole, above 0 and at most 1.

    Args:
        part: the number.
        what: the argument's name, for the message.

    Raises:
        InvalidValueError: it is something else.

    >>> parse_part("5%", "sample")
    Traceback (most recent call last):
    castore.errors.InvalidValueError: sample must be a number above 0 and at most 1 (all), not '5%'
    """
    if not isinstance(part, numbers.Real) or not 0 < float(part) <= 1:  # false for NaN
        raise InvalidValueError(f"{what} must be a number above 0 and at most 1 (all), not {shown(part)}")
    return float(part)


def as_whole(number: object) -> int | None:
    """A whole number of any type as an int; None for anything else. Booleans, also those of NumPy and
    PyTorch, and tensors with a dimension are no whole numbers.
    """
    if type(number) is int:
        return number
    # `operator.index` takes them.
    if isinstance(number, bool) or "bool" in str(getattr(number, "dtype", "")):
        return None
    if getattr(number, "ndim", 0) > 0:
        return None
    try:
        return operator.index(number)  # type: ignore[arg-type]
    except TypeError:
        return None


def shown(value: object) -> str:
    """A value as code, cut short for an error message."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def format_size(size: int) -> str:
    """`size` bytes for people, in powers of 1000 and about two digits.

    >>> format_size(1_500_000_000), format_size(512), format_size(999_999), format_size(200 * 10**9)
    ('1.5 GB', '512 B', '1 MB', '200 GB')
    """
    sign, size = ("-", -size) if size < 0 else ("", size)
    if size < 1000:
        return f"{sign}{size} B"
    amounts = [(size / 1000**power, letter) for power, letter in enumerate(_PREFIXES, start=1)]
    # 999.95 would print as 1000.0: use 1.0 of the next unit.
    amount, letter = next((pair for pair in amounts if pair[0] < 999.95), amounts[-1])
    return f"{sign}{amount:.1f}".removesuffix(".0") + f" {letter}B"


def parse_duration(duration: str | int | float) -> float:
    """The number of seconds that `duration` means.

    Args:
        duration: seconds, or a text of numbers with the units w, d, h, m, s, ms, the longest first; a text
            without a unit is seconds.

    Raises:
        InvalidValueError: it is negative, not finite, over 1000 years, or not understood.

    >>> parse_duration("7d"), parse_duration("1h30m"), parse_duration("500ms"), parse_duration(90)
    (604800.0, 5400.0, 0.5, 90.0)
    >>> parse_duration("soon")
    Traceback (most recent call last):
    castore.errors.InvalidValueError: 'soon' is not a duration; write seconds as a number, or a text like...
    """
    seconds = _seconds_of_text(duration) if isinstance(duration, str) else _seconds_of_number(duration)
    # The comparison is false for NaN.
    if not 0 <= seconds <= _LONGEST:
        raise InvalidValueError(f"{shown(duration)} is not a duration; {_DURATION_HELP}")
    return seconds


def parse_ttl(ttl: str | int | float) -> float | None:
    """The seconds that an entry lives, or None if it never expires.

    Args:
        ttl: what `parse_duration` takes, or `NEVER`, or "never", or "none".

    Raises:
        InvalidValueError: it is not understood.

    >>> parse_ttl("7d"), parse_ttl("never"), parse_ttl(NEVER)
    (604800.0, None, None)
    """
    if _is_unbounded(ttl, "never"):
        return None
    try:
        return parse_duration(ttl)
    except InvalidValueError as error:
        raise InvalidValueError(f'{error}, or "never"') from None


def parse_budget(size: str | int | float) -> int | None:
    """The stored bytes that a store may hold, or None for no bound.

    Args:
        size: what `parse_size` takes, or `UNLIMITED`, or "unlimited", or "none".

    Raises:
        InvalidValueError: it is not understood.

    >>> parse_budget("200GB"), parse_budget("unlimited"), parse_budget(UNLIMITED)
    (200000000000, None, None)
    """
    if _is_unbounded(size, "unlimited"):
        return None
    try:
        return parse_size(size)
    except InvalidValueError as error:
        raise InvalidValueError(f'{error}, or "unlimited"') from None


def _is_unbounded(value: object, word: str) -> bool:
    if isinstance(value, str):
        return value.strip().lower() in (word, "none")
    return isinstance(value, numbers.Real) and value == math.inf


def _seconds_of_number(number: object) -> float:
    if isinstance(number, bool) or not isinstance(number, numbers.Real):
        return math.nan
    if getattr(getattr(number, "dtype", None), "kind", "") == "m":
        return math.nan  # numpy.timedelta64 passes for a whole number of its own unit
    try:
        return float(number)
    except OverflowError:  # an int of hundreds of digits
        return math.inf


def _seconds_of_text(text: str) -> float:
    plain = _PLAIN.fullmatch(text)
    if plain:
        return float(plain[1])
    match = _DURATION.fullmatch(text)
    if match is None or match.lastindex is None:
        return math.nan
    return math.fsum(float(match[unit]) * length for unit, length in _SECONDS.items() if match[unit])


def format_duration(seconds: float) -> str:
    """`seconds` for people: the two largest units, in a form that `parse_duration` reads.

    Raises:
        InvalidValueError: `seconds` is not finite.

    >>> format_duration(604800), format_duration(5400), format_duration(93784), format_duration(0.5)
    ('7d', '1h30m', '1d2h', '500ms')
    """
    if not math.isfinite(seconds):
        raise InvalidValueError(f"{seconds} is not a duration; {_DURATION_HELP}")
    sign, seconds = ("-", -seconds) if seconds < 0 else ("", seconds)
    if seconds < 0.9995:
        amount = f"{seconds * 1000:.3f}".rstrip("0").rstrip(".")
        return "0s" if amount == "0" else f"{sign}{amount}ms"
    if seconds < 9.995:
        return f"{sign}{seconds:.2f}".rstrip("0").rstrip(".") + "s"
    rest = round(seconds)
    units = ((86400, "d"), (3600, "h"), (60, "m"), (1, "s"))
    first = next(place for place, (length, _) in enumerate(units) if rest >= length)
    parts = []
    for length, unit in units[first : first + 2]:
        count, rest = divmod(rest, length)
        if count:
            parts.append(f"{count}{unit}")
    return sign + "".join(parts)
