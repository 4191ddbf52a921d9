"""Kinds of pandas: times to the nanosecond, as `datasets` gives values of such columns.

`take` imports nothing: an object can be of these kinds only in a process that has imported pandas.
"""

from __future__ import annotations

from typing import Any

from castore.serialize.kinds.forms import Kind, listed
from castore.serialize.kinds.standard_library import zone_of
from castore.serialize.problems import need


def _take_timestamp(value: Any) -> Any:
    # NumPy's form has the instant, and the unit, which is a part of the value too.
    zone = value.tzinfo
    # Before pandas 3, Arrow gives zones of pytz. Each is of a class of its own, and has its name.
    name = getattr(zone, "zone", None) if type(zone).__module__.partition(".")[0] == "pytz" else None
    return [value.asm8, zone_of(value) if name is None else ["pytz", name]]


def _make_timestamp(parts: Any) -> Any:
    moment, zone = listed(2, parts)
    made = need("pandas", "datasets").Timestamp(_numbers("M", moment))
    if type(zone) is list:
        zone = need("pytz", "datasets").timezone(listed(2, zone)[1])
    return made if zone is None else made.tz_localize("UTC").tz_convert(zone)


def _make_timedelta(parts: Any) -> Any:
    return need("pandas", "datasets").Timedelta(_numbers("m", parts))


def _make_nat(parts: Any) -> Any:
    return need("pandas", "datasets").NaT


def _numbers(kind: str, value: Any) -> Any:
    if getattr(getattr(value, "dtype", None), "kind", None) != kind:
        raise ValueError(f"a {type(value).__name__} stands where a time of NumPy belongs")
    return value


PANDAS_TIMES = [
    Kind("pandas.timestamp", "pandas", "Timestamp", _take_timestamp, _make_timestamp),
    Kind("pandas.timedelta", "pandas", "Timedelta", lambda value: value.asm8, _make_timedelta),
    Kind("pandas.nat", "pandas._libs.tslibs.nattype", "NaTType", lambda value: None, _make_nat),
]
