"""Frames, series, indexes and arrays of pandas in keys: by what can be read, however they came to be."""

from __future__ import annotations

import contextlib
import copy
import datetime as dt
import functools
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from castore.keys.objects import function_fingerprint
from castore.serialize.serializers import dump, load
from tests.serialize.kinds.frames import COLUMNS, FRAMES, same_frames


def key(value: Any) -> str:
    return function_fingerprint(functools.partial(len, value))


PANDAS = [value for value in FRAMES if type(value).__module__.partition(".")[0] == "pandas"]


def _asked(value: Any) -> Any:
    """The value, once pandas has computed and noted what it can of it."""
    for part in (value, *getattr(value, "axes", ())):
        repr(part)
        for name in ("dtypes", "dtype", "is_unique", "year", "is_monotonic_increasing"):
            with contextlib.suppress(TypeError, NotImplementedError):  # of a column of lists
                getattr(part, name, None)
    return value


@pytest.mark.parametrize(
    "place", range(len(PANDAS)), ids=lambda place: f"{place}-{type(PANDAS[place]).__name__}"
)
def test_copies_and_results_that_come_back_are_the_same(place: int) -> None:
    value = PANDAS[place]
    fresh = pickle.loads(pickle.dumps(value))
    name, data = dump(value)
    found = {
        key(value),
        key(load(data, name)),
        key(fresh),
        key(_asked(fresh)),
        key(copy.copy(value)),
    }
    assert len(found) == 1


def test_all_that_differ_in_a_part_are_others() -> None:
    seen: dict[str, Any] = {}
    for value in PANDAS:
        other = seen.setdefault(key(value), value)
        assert same_frames(other, value)


TIMES = pd.date_range("2020", periods=3)
FRAME = pd.DataFrame({"a": [1, 2]}, index=["p", "q"])
SAME: list[Callable[[], list[Any]]] = [
    lambda: [FRAME.assign(b=[3, 4]), pd.DataFrame({"a": [1, 2], "b": [3, 4]}, index=["p", "q"])],
    lambda: [FRAME, FRAME[:], FRAME.head(), pd.concat([FRAME, FRAME]).iloc[:2]],
    lambda: [
        pd.Series(pd.array([1, 7], dtype="Int64")).where([True, False]), pd.Series([1, None], dtype="Int64"),
    ],
    lambda: [pd.Series(["a", "b"]), pd.Series(["x", "a", "b"])[1:].reset_index(drop=True)],
    lambda: [pd.Series(TIMES), pd.Series([*TIMES], dtype=TIMES.dtype)],
    lambda: [
        pd.Series(pa.chunked_array([["a"], ["b"]]), dtype="string[pyarrow]"),
        pd.Series(["a", "b"], dtype="string[pyarrow]"),
    ],
]  # fmt: skip


@pytest.mark.parametrize("make", SAME)
def test_equal_tables_are_the_same_however_they_were_made(make: Callable[[], list[Any]]) -> None:
    assert len({*map(key, make())}) == 1


class Own(pd.DataFrame):  # type: ignore[misc]
    _metadata = ("unit",)
    unit: Any = None

    @property
    def _constructor(self) -> Any:
        return Own


def _with(value: Any, **attributes: Any) -> Any:
    made = value.copy()
    for name, item in attributes.items():
        object.__setattr__(made, name, item)
    return made


_HOUR = dt.timedelta(hours=1)
_SPARSE = pd.arrays.SparseArray
_CATEGORY = functools.partial(pd.Categorical, ["a", "b"])
OTHERS: list[list[Any]] = [
    [FRAME, _with(FRAME, attrs={"a": 1}), FRAME.rename_axis("x"), FRAME.rename_axis("x", axis=1), FRAME[::-1],
     FRAME.set_flags(allows_duplicate_labels=False), FRAME.astype("i4"), FRAME.astype(object), Own(FRAME),
     _with(Own(FRAME), unit="m"), _with(FRAME, note="mine"), _with(FRAME, _note="mine"),
     FRAME.reset_index(drop=True),
     FRAME.set_axis(pd.Index([0, 1]), axis=0), FRAME.assign(b=1), FRAME.assign(b=1)[["b", "a"]]],
    [TIMES, TIMES[:2], TIMES.tz_localize("UTC"), TIMES.tz_localize("Europe/Rome"), pd.DatetimeIndex([*TIMES]),
     TIMES.as_unit("s"), TIMES.rename("x"), _with(TIMES, note=1), TIMES.to_period("D"), TIMES.to_period("M")],
    [_CATEGORY(), _CATEGORY(["b", "a"]), _CATEGORY(["a", "b"], True), _CATEGORY(["a", "b", "c"])],
    [pd.Series(["a", value], dtype=object) for value in (None, np.nan, 1, 1.0, True)],
    [pd.Series([1, None], dtype=dtype) for dtype in ("Int64", "Int32", "Float64", "float64", object)],
    [pd.array(["a", None], dtype=name) for name in ("string[python]", "string[pyarrow]", "str", "category")],
    [pd.MultiIndex([[1, np.nan]], [[0, 1]], verify_integrity=False), pd.MultiIndex([[1]], [[0, -1]]),
     pd.MultiIndex([[1]], [[0, -1]], names=["x"])],
    [_SPARSE([0, 1, 0]), _SPARSE([0, 0, 1]), _SPARSE([0, 1, 0], fill_value=1), _SPARSE([0.0, 1, 0]),
     _SPARSE([0, 1, 0], kind="block")],
    [pd.DatetimeIndex([], freq=each) for each in (
        pd.offsets.CBMonthEnd(), pd.offsets.CBMonthEnd(offset=_HOUR), pd.offsets.BusinessHour(),
        pd.offsets.BusinessHour(offset=_HOUR), pd.offsets.BusinessHour(start="10:00"), pd.offsets.BDay(),
        pd.offsets.CDay(holidays=["2024-01-01"]), pd.offsets.CDay(weekmask="Mon Tue"))],
    [pa.table({"a": [1]}), pa.record_batch({"a": [1]}), pa.array([1]), pa.chunked_array([[1]]),
     pa.table({"": [1]}), pa.table([pa.nulls(2)], ["a"]).select([]),
     pa.table([pa.nulls(3)], ["a"]).select([])],
    [pd.Timestamp("2020"), pd.Timestamp("2020", tz="UTC"), pd.Timestamp("2020").as_unit("s"),
     pd.Timedelta("1D"), pd.Period("2020", "D"), pd.Period("2020", "M"), pd.Interval(0, 1),
     pd.Interval(0, 1, "left"), pd.Interval(0, 1.0)],
    [pd.interval_range(0, 2), pd.interval_range(0, 2, closed="left"), pd.interval_range(1, 3)],
]  # fmt: skip


@pytest.mark.parametrize("place", range(len(OTHERS)))
def test_each_part_that_can_be_read_counts(place: int) -> None:
    values = OTHERS[place]
    assert len({*map(key, values)}) == len(values)


def test_tables_of_arrow_count_by_their_rows() -> None:
    table = pa.table({"a": ["x", "y"], "b": [1, None]})
    whole = [table, pa.concat_tables([table[:1], table[1:]]), pa.concat_tables([table, table])[2:]]
    assert len({*map(key, whole)}) == 1
    others = [table, table.slice(1), table.replace_schema_metadata({"a": "b"}), table.select(["b", "a"])]
    assert len({*map(key, others)}) == len(others)


def test_one_frame_or_time_in_two_places_is_as_two() -> None:
    for value in (
        pd.DataFrame(COLUMNS), pd.Series([1]), pd.Timestamp("2020"), pd.Timedelta("1D"),
        pd.Period("2020", "D"), pd.Interval(0, 1), dt.timezone(dt.timedelta(hours=2), "x"),
    ):  # fmt: skip
        assert key([value, value]) == key([value, copy.deepcopy(value)])


class Temperature(pd.arrays.IntegerArray):  # type: ignore[misc]
    unit = "C"


def _array(unit: str | None = None) -> Any:
    made = Temperature(np.array([1]), np.array([False]))
    if unit is not None:
        made.unit = unit
    return made


def test_arrays_of_classes_of_ones_own_count_with_their_class() -> None:
    plain = pd.array([1], dtype="Int64")
    values = [_array(), _array("F"), plain, pd.Series(_array()), pd.Series(plain)]
    assert len({*map(key, values)}) == len(values)
