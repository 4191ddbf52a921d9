"""Sizes and durations are read as people mean them, and what is not understood is refused."""

from __future__ import annotations

import datetime as dt
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from castore.errors import InvalidValueError
from castore.units import (
    NEVER,
    UNLIMITED,
    as_whole,
    format_duration,
    format_size,
    parse_budget,
    parse_duration,
    parse_size,
    parse_ttl,
)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("0", 0), ("4096", 4096), (" 12 b ", 12), ("1kb", 1000), ("1KiB", 1024), ("64k", 64000),
        ("200GB", 200 * 10**9),
        ("1.5 GiB", 3 * 2**29), ("2tib", 2 * 2**40), ("3PB", 3 * 10**15), ("1.1PB", 11 * 10**14),
        ("0.3KiB", 307),
        (7, 7), (2e9, 2 * 10**9), (np.int64(5), 5),
    ],
)  # fmt: skip
def test_sizes_are_read(text: Any, count: int) -> None:
    assert parse_size(text) == count
    assert type(parse_size(text)) is int


@pytest.mark.parametrize(
    "wrong",
    ["", " ", "GB", "-1", "-5GB", "nan", "inf", "1e3", "1 000", "1,5GB", "5 apples", "1GB2", "2kb kb", "0.5",
     "1.5B",
     "1.", ".5k", "1__0", "٣", "9" * 21, "9999999PB", -1, 1.5, math.nan, math.inf, True, False, None, b"1",
     [1], 2**63],
)  # fmt: skip
def test_what_is_no_size_is_refused(wrong: Any) -> None:
    with pytest.raises(InvalidValueError, match="is not a size"):
        parse_size(wrong)


@given(st.integers(0, 2**62))
def test_formatted_sizes_read_back_within_their_digits(count: int) -> None:
    assert parse_size(format_size(count)) == pytest.approx(count, rel=0.05, abs=0)


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 KB"), (999_949, "999.9 KB"), (999_950, "1 MB"), (-1500, "-1.5 KB"),
     (10**18, "1000 PB")],
)  # fmt: skip
def test_sizes_are_shown(count: int, text: str) -> None:
    assert format_size(count) == text


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("7d", 604800), ("1h30m", 5400), ("1h 30m", 5400), ("90s", 90), ("500ms", 0.5), ("1.5H", 5400),
     ("2w", 1209600),
     ("5m", 300), ("5ms", 0.005), ("90", 90), (90, 90), (0.25, 0.25), ("1d2h3m4s5ms", 93784.005), (0, 0)],
)  # fmt: skip
def test_durations_are_read(text: Any, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds)
    assert type(parse_duration(text)) is float


@pytest.mark.parametrize(
    "wrong",
    ["", " ", "d", "-5s", "5 apples", "1d2", "30m1h", "1m1m", "nan", "inf", "1e3", "9" * 15, -1, math.nan,
     math.inf, True,
     None, b"1", [1], 10**400, np.timedelta64(5, "ns"), np.timedelta64(5, "s"),
     np.timedelta64(5, "Y"), dt.timedelta(seconds=5)],
)  # fmt: skip
def test_what_is_no_duration_is_refused(wrong: Any) -> None:
    with pytest.raises(InvalidValueError, match="is not a duration"):
        parse_duration(wrong)


@given(st.floats(0, 1e9))
def test_formatted_durations_read_back_within_their_units(seconds: float) -> None:
    assert parse_duration(format_duration(seconds)) == pytest.approx(seconds, rel=0.05, abs=1e-6)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (1, "1s"),
        (59.6, "1m"),
        (9.999, "10s"),
        (0.9996, "1s"),
        (3599.7, "1h"),
        (-90, "-1m30s"),
        (1e-9, "0s"),
    ],
)
def test_durations_are_shown(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_a_duration_that_is_not_finite_is_not_shown() -> None:
    with pytest.raises(InvalidValueError):
        format_duration(math.inf)


@pytest.mark.parametrize("never", [NEVER, math.inf, np.float64("inf"), "never", " Never ", "none"])
def test_a_lifetime_without_end_is_said_in_words_or_by_infinity(never: Any) -> None:
    assert parse_ttl(never) is None


@pytest.mark.parametrize("unlimited", [UNLIMITED, math.inf, "unlimited", "Unlimited", "none"])
def test_a_budget_without_bound_is_said_in_words_or_by_infinity(unlimited: Any) -> None:
    assert parse_budget(unlimited) is None


@pytest.mark.parametrize("wrong", ["unlimited", "inf", "", -math.inf, math.nan, -1, None, True, b"never"])
def test_what_is_no_lifetime_is_refused(wrong: Any) -> None:
    with pytest.raises(InvalidValueError, match=r'is not a duration; .*, or "never"'):
        parse_ttl(wrong)


@pytest.mark.parametrize("wrong", ["never", "inf", "", -math.inf, math.nan, -1, None, False, b"unlimited"])
def test_what_is_no_budget_is_refused(wrong: Any) -> None:
    with pytest.raises(InvalidValueError, match=r'is not a size; .*, or "unlimited"'):
        parse_budget(wrong)


@pytest.mark.parametrize(
    ("number", "whole"),
    [
        (3, 3), (np.int8(3), 3), (np.array(3), 3), (True, None), (np.True_, None), (np.array(True), None),
        (np.array([3]), None), (3.0, None), ("3", None), (None, None),
    ],
)  # fmt: skip
def test_a_boolean_or_an_array_with_a_dimension_is_no_whole_number(number: object, whole: int | None) -> None:
    assert as_whole(number) == whole
