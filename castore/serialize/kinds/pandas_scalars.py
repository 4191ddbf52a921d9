"""Kinds of pandas' scalars: times to the nanosecond, periods, intervals, and the two missing values.

`take` imports nothing: an object can be of these kinds only in a process that has imported pandas.
"""

from __future__ import annotations

import datetime as dt
from typing import Any

from castore.serialize.kinds.forms import Kind, MisfitError, expect, listed
from castore.serialize.kinds.standard_library import known_zone
from castore.serialize.problems import need


def need_pandas() -> Any:
    """Import pandas, or raise the MissingDependencyError that says how to install it."""
    return need("pandas", "datasets")


# --- zones and frequencies ----------------------------------------------------------------------------------


def take_zone(zone: dt.tzinfo | None) -> Any:
    """Parts of the time zone of pandas' times; raises MisfitError."""
    # Before pandas 3, Arrow gives zones of pytz. Each is of a class of its own, and has its name.
    name = getattr(zone, "zone", None) if type(zone).__module__.partition(".")[0] == "pytz" else None
    return known_zone(zone, "tz_convert('UTC')") if name is None else ["pytz", name]


def make_zone(parts: Any) -> Any:
    """The time zone of `take_zone`'s parts, or None."""
    return need("pytz", "datasets").timezone(listed(2, parts)[1]) if type(parts) is list else parts


def take_frequency(frequency: Any) -> str | None:
    """The name of a frequency of pandas, or None for None; raises MisfitError."""
    if frequency is None:
        return None
    name = str(frequency.freqstr)
    try:
        found = make_frequency(name)
    except ValueError:
        found = None
    if found != frequency:
        raise MisfitError(f"has the frequency {frequency!r}, which has no name; set freq = None")
    return name


def make_frequency(parts: Any) -> Any:
    """The frequency of a name, or None for None; raises ValueError."""
    return None if parts is None else need_pandas().tseries.frequencies.to_offset(expect(str, parts))


def with_frequency(index: Any, frequency: Any) -> Any:
    """Give an index of times that frequency. Pandas itself makes indexes that its own check refuses: days of
    which one begins at 1:00, where no midnight is.
    """
    try:
        index.freq = frequency
    except ValueError:
        # Of the index since pandas 3.1, of its array before.
        (index._data if hasattr(index._data, "freq") else index)._freq = frequency
    return index


# --- scalars ------------------------------------------------------------------------------------------------


def _take_timestamp(value: Any) -> Any:
    # NumPy's form has the instant, and the unit, which is a part of the value too.
    return [value.asm8, take_zone(value.tzinfo)]


def _make_timestamp(parts: Any) -> Any:
    moment, zone = listed(2, parts)
    made = need_pandas().Timestamp(_numbers("M", moment))
    zone = make_zone(zone)
    return made if zone is None else made.tz_localize("UTC").tz_convert(zone)


def _make_timedelta(parts: Any) -> Any:
    return need_pandas().Timedelta(_numbers("m", parts))


def _make_nat(parts: Any) -> Any:
    return need_pandas().NaT


def _make_na(parts: Any) -> Any:
    return need_pandas().NA


def _numbers(kind: str, value: Any) -> Any:
    if getattr(getattr(value, "dtype", None), "kind", None) != kind:
        raise ValueError(f"a {type(value).__name__} stands where a time of NumPy belongs")
    return value


def _take_period(value: Any) -> Any:
    return [value.ordinal, value.freqstr]


def _make_period(parts: Any) -> Any:
    ordinal, frequency = listed(2, parts)
    return need_pandas().Period(ordinal=expect(int, ordinal), freq=expect(str, frequency))


def _make_interval(parts: Any) -> Any:
    left, right, closed = listed(3, parts)
    return need_pandas().Interval(left, right, expect(str, closed))


PANDAS_SCALARS = [
    Kind("pandas.timestamp", "pandas", "Timestamp", _take_timestamp, _make_timestamp),
    Kind("pandas.timedelta", "pandas", "Timedelta", lambda value: value.asm8, _make_timedelta),
    Kind("pandas.nat", "pandas._libs.tslibs.nattype", "NaTType", lambda value: None, _make_nat),
    Kind("pandas.na", "pandas._libs.missing", "NAType", lambda value: None, _make_na),
    Kind("pandas.period", "pandas", "Period", _take_period, _make_period),
    Kind(
        "pandas.interval", "pandas", "Interval",
        lambda value: [value.left, value.right, value.closed], _make_interval,
    ),
]  # fmt: skip
