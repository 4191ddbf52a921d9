"""Kinds of pandas' own arrays, which columns and indexes consist of beside NumPy's.

Each array is written by what its public interface shows: numbers and a mask, codes and categories, texts.
`take` imports nothing: an object can be of these kinds only in a process that has imported pandas.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from castore.serialize.kinds.forms import Kind, MisfitError, expect, listed
from castore.serialize.kinds.pandas_scalars import make_zone, need_pandas, take_zone
from castore.serialize.problems import need

#: Units of time in which pandas keeps times.
_UNITS = ("s", "ms", "us", "ns")


# --- arrays of NumPy, and of Python objects -----------------------------------------------------------------


def take_column(array: Any) -> Any:
    """Parts of the array of a column or an index: an array, or a list for a column of Python objects."""
    pandas = sys.modules["pandas"]
    if type(array) is pandas.arrays.NumpyExtensionArray:
        array = array.to_numpy()
    return list(array) if type(array) is sys.modules["numpy"].ndarray and array.dtype == object else array


def make_column(parts: Any) -> Any:
    """The array of `take_column`'s parts, of one dimension."""
    numpy = need("numpy", "datasets")
    if type(parts) is list:
        made = numpy.empty(len(parts), object)
        for place, value in enumerate(parts):  # an assignment of all would make lists of one length a matrix
            made[place] = value
        return made
    if type(parts) is not numpy.ndarray and not isinstance(parts, _extension_array()):
        raise ValueError(f"a {type(parts).__name__} stands where a column belongs")
    if parts.ndim != 1:
        raise ValueError(f"a column has the shape {parts.shape}")
    return parts


def _extension_array() -> type:
    cls: type = need_pandas().api.extensions.ExtensionArray
    return cls


def _numbers(value: Any, kinds: str) -> Any:
    """Return the value if it is a one-dimensional NumPy array of these kinds of numbers."""
    numpy = need("numpy", "datasets")
    if type(value) is not numpy.ndarray or value.ndim != 1 or value.dtype.kind not in kinds:
        raise ValueError(f"a {type(value).__name__} stands where numbers of one dimension belong")
    return value


def integers(value: Any) -> Any:
    """Return the value if it is an array of integers, of one dimension; else raise ValueError."""
    return _numbers(value, "i")


def _take_numpy(value: Any) -> Any:
    return take_column(value)


def _make_numpy(parts: Any) -> Any:
    return need_pandas().arrays.NumpyExtensionArray(make_column(parts))


# --- times --------------------------------------------------------------------------------------------------


def _take_datetimes(value: Any) -> Any:
    moments = value if value.tz is None else value.tz_convert("UTC").tz_localize(None)
    return [moments.to_numpy(), take_zone(value.tz)]


def _make_datetimes(parts: Any) -> Any:
    moments, zone = listed(2, parts)
    made = need_pandas().DatetimeIndex(_times(moments, "M"))
    zone = make_zone(zone)
    return (made if zone is None else made.tz_localize("UTC").tz_convert(zone)).array


def _take_timedeltas(value: Any) -> Any:
    return value.to_numpy()


def _make_timedeltas(parts: Any) -> Any:
    return need_pandas().TimedeltaIndex(_times(parts, "m")).array


def _times(value: Any, kind: str) -> Any:
    numpy = need("numpy", "datasets")
    times = _numbers(value, kind)
    if numpy.datetime_data(times.dtype) not in [(unit, 1) for unit in _UNITS]:
        raise ValueError(f"pandas has no times of {times.dtype}")
    return times


def _take_periods(value: Any) -> Any:
    return [value.asi8, value.freqstr]


def _make_periods(parts: Any) -> Any:
    pandas = need_pandas()
    ordinals, frequency = listed(2, parts)
    numbers = _numbers(ordinals, "i")
    return pandas.arrays.PeriodArray(numbers, dtype=pandas.PeriodDtype(expect(str, frequency)))


# --- categories, intervals ----------------------------------------------------------------------------------


def _take_categorical(value: Any) -> Any:
    return [value.codes, value.categories, bool(value.ordered)]


def _make_categorical(parts: Any) -> Any:
    pandas = need_pandas()
    codes, categories, ordered = listed(3, parts)
    kind = pandas.CategoricalDtype(expect_index(categories), expect(bool, ordered))
    return pandas.Categorical.from_codes(_numbers(codes, "i"), dtype=kind)


def _take_intervals(value: Any) -> Any:
    return [value.left, value.right, value.closed]


def _make_intervals(parts: Any) -> Any:
    left, right, closed = listed(3, parts)
    make = need_pandas().arrays.IntervalArray.from_arrays
    return make(expect_index(left), expect_index(right), closed=expect(str, closed))


def expect_index(value: Any) -> Any:
    """Return the value if it is an index of pandas, else raise ValueError."""
    if isinstance(value, need_pandas().Index):
        return value
    raise ValueError(f"a {type(value).__name__} stands where an index belongs")


# --- values that may be missing -----------------------------------------------------------------------------


def _take_masked(value: Any) -> Any:
    # Numbers below the mask cannot be seen, so they are kept as zeros.
    return [value.to_numpy(dtype=value.dtype.numpy_dtype, na_value=0), value.isna()]


def _masked(attribute: str, kinds: str) -> tuple[str, Callable[[Any], Any]]:
    """The name of a class of masked arrays, and what makes one of its parts."""

    def make(parts: Any) -> Any:
        numbers, mask = listed(2, parts)
        return getattr(need_pandas().arrays, attribute)(_numbers(numbers, kinds), _numbers(mask, "b"))

    return attribute, make


def _take_strings(value: Any) -> Any:
    pandas = sys.modules["pandas"]
    texts = value.to_numpy(object, na_value=None).tolist()
    return [texts, value.dtype.storage, value.dtype.na_value is pandas.NA]


def _make_strings(parts: Any) -> Any:
    pandas = need_pandas()
    texts, storage, is_na = listed(3, parts)
    if not {str, type(None)}.issuperset(map(type, expect(list, texts))):
        raise ValueError("a column of text holds something else")
    if expect(str, storage) == "pyarrow":
        need("pyarrow", "datasets")
    # Releases before 2.3 take no missing value, and have NA.
    kind = pandas.StringDtype(storage, **({} if expect(bool, is_na) else {"na_value": float("nan")}))
    return pandas.array(texts, dtype=kind)


def _take_arrow(value: Any) -> Any:
    return sys.modules["pyarrow"].table({"values": value.__arrow_array__()})


def _make_arrow(parts: Any) -> Any:
    table = expect(need("pyarrow", "datasets").Table, parts)
    return need_pandas().arrays.ArrowExtensionArray(table.column("values"))


# --- what is refused ----------------------------------------------------------------------------------------


def _take_sparse(value: Any) -> Any:
    raise MisfitError(
        "is a sparse array of pandas; convert it with to_dense(), a frame with sparse.to_dense()"
    )


def _make_sparse(parts: Any) -> Any:
    raise ValueError("castore writes no sparse arrays of pandas")


PANDAS_ARRAYS = [
    Kind("pandas.numpy_array", "pandas.arrays", "NumpyExtensionArray", _take_numpy, _make_numpy),
    Kind("pandas.datetimes", "pandas.arrays", "DatetimeArray", _take_datetimes, _make_datetimes),
    Kind("pandas.timedeltas", "pandas.arrays", "TimedeltaArray", _take_timedeltas, _make_timedeltas),
    Kind("pandas.periods", "pandas.arrays", "PeriodArray", _take_periods, _make_periods),
    Kind("pandas.categorical", "pandas", "Categorical", _take_categorical, _make_categorical),
    Kind("pandas.intervals", "pandas.arrays", "IntervalArray", _take_intervals, _make_intervals),
    *(
        Kind(f"pandas.{name}", "pandas.arrays", cls, _take_masked, make)
        for name, (cls, make) in {
            "integers": _masked("IntegerArray", "iu"),
            "floats": _masked("FloatingArray", "f"),
            "booleans": _masked("BooleanArray", "b"),
        }.items()
    ),
    Kind("pandas.strings", "pandas.arrays", "StringArray", _take_strings, _make_strings),
    Kind(
        "pandas.strings", "pandas.core.arrays.string_arrow", "ArrowStringArray", _take_strings, _make_strings
    ),
    Kind("pandas.arrow", "pandas.arrays", "ArrowExtensionArray", _take_arrow, _make_arrow),
    Kind("pandas.sparse", "pandas.arrays", "SparseArray", _take_sparse, _make_sparse),
]
