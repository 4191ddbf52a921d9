"""Frames, series and indexes of pandas, sparse matrices of SciPy, and a comparison of two."""

from __future__ import annotations

import datetime as dt
import decimal
from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import scipy.sparse

ROWS = 4

COLUMNS: dict[str, Any] = {
    "whole": np.arange(ROWS), "small": np.arange(ROWS, dtype="i1"), "unsigned": np.arange(ROWS, dtype="u8"),
    "float": [1.5, np.nan, -0.0, np.inf], "bool": [True, False] * 2,
    "complex": np.arange(ROWS) * 1j, "text": ["a", None, "ü", "\N{SNOWMAN}"],
    "objects": pd.Series(["a", None, np.nan, 1], dtype=object),
    "containers": pd.Series([[1, 2], [3, 4], {"x": {1}}, (1,)], dtype=object),
    "exact": pd.Series([decimal.Decimal("1.10"), dt.date(2024, 1, 1), b"x", np.int8(3)], dtype=object),
    "missing": pd.Series([pd.NA, pd.NaT, None, float("nan")], dtype=object),
    "scalars": pd.Series(
        [pd.Timestamp("2024"), pd.Timedelta("1D"), pd.Period("2024-01", "M"), pd.Interval(0, 1, "both")],
        dtype=object,
    ),
    "moment": pd.date_range("2024", periods=ROWS), "second": np.array(["2024-01-01"] * ROWS, "M8[s]"),
    "zoned": pd.date_range("2024", periods=ROWS, tz="Europe/Rome", unit="ms"),
    "offset": pd.date_range("2024", periods=ROWS, tz=dt.timezone(dt.timedelta(hours=2))),
    "span": pd.timedelta_range("1h", periods=ROWS),
    "category": pd.Categorical(["x", "y", None, "x"], categories=["y", "x", "z"], ordered=True),
    "numbered": pd.Categorical([3, 1, None, 3]),
    "Int16": pd.array([1, None, 3, 4], dtype="Int16"), "UInt8": pd.array([1, None, 3, 4], dtype="UInt8"),
    "Float32": pd.array([1.5, None, 3, 4], dtype="Float32"),
    "boolean": pd.array([True, None, False, True], dtype="boolean"),
    "period": pd.period_range("2024-01", periods=ROWS, freq="M"),
    "interval": pd.interval_range(0, ROWS), "moments": pd.interval_range(pd.Timestamp("2024"), periods=ROWS),
    "string": pd.array(["a", None, "b", "c"], dtype="string[python]"),
    "arrow string": pd.array(["a", None, "b", "c"], dtype="string[pyarrow]"),
    "arrow": pd.array([1, None, 3, 4], dtype="int32[pyarrow]"),
    "arrow lists": pd.Series([[1], None, [2, 3], []], dtype=pd.ArrowDtype(pa.list_(pa.int64()))),
}  # fmt: skip

INDEXES: list[Any] = [
    pd.RangeIndex(3, 11, 2, name="range"), pd.Index(list("abcd")), pd.Index(list("abcd"), dtype=object),
    pd.date_range("2024", periods=ROWS, freq="B", tz="UTC", name="days"),
    pd.DatetimeIndex(["2024-03-01", "2024-01-01", pd.NaT, "2024-01-01"]),
    pd.timedelta_range("1D", periods=ROWS, freq="6h"), pd.period_range("2024", periods=ROWS, freq="D"),
    pd.MultiIndex.from_product([["a", "b"], [1, 2]], names=["x", None]),
    pd.MultiIndex.from_arrays([[1, None, 1, 1], ["p", "q", "q", "p"]]).remove_unused_levels(),
    pd.CategoricalIndex(list("abca")), pd.interval_range(0, ROWS), pd.Index([1.5, 2, 3, 4], name=("t", 1)),
    pd.Index([1, "a", None, (1, 2)], dtype=object),
    pd.Index([(1, 2), (3, 4), (5, 6), (7, 8)], tupleize_cols=False),
    pd.Index([1, 2, 3, 4], dtype="Int64"), pd.Index([True, False, True, True]),
    pd.Index([1, 2, 3, 4], dtype="u1"),
]  # fmt: skip


def _with_attrs(frame: Any) -> Any:
    frame.attrs = {"source": "a.csv", "shape": (3, 4)}
    return frame


_WIDE = pd.DataFrame(COLUMNS)
_COO = scipy.sparse.coo_array(np.diag([1.5, 0, 3])[:2])

_MISSING = pd.DataFrame({"a": ["x", None, "x"], "b": [1, 2, 3], "v": [1, 2, 3]})
_DAYS = pd.date_range("2024-09-05", periods=144, freq="h", tz="UTC").tz_convert("America/Santiago")
_TWICE = scipy.sparse.coo_array(([1.0, 2.0, 3.0], ([0, 0, 1], [1, 1, 0])), shape=(2, 2))


def _summed(matrix: Any) -> Any:
    matrix.sum_duplicates()
    return matrix


#: Values that pandas' own checks would refuse, or change, if they were made anew.
UNUSUAL: list[Any] = [
    pd.Series(1, index=_DAYS).resample("D").sum(),  # a day that begins at 1:00
    pd.date_range("2020-01-01", periods=4, freq=pd.offsets.BusinessDay(offset=pd.Timedelta("1h"))),
    pd.date_range("2020", periods=3, freq="ms").as_unit("s"),
    _MISSING.groupby(["a", "b"], dropna=False)["v"].sum(), _MISSING["a"].value_counts(dropna=False),
    pd.DataFrame({"a": [1, 2, 3], "b": [4, 5, 6]}, index=[1.0, np.nan, 3.0]).stack(),
    pd.concat({np.nan: _MISSING, "z": _MISSING}),
    pd.MultiIndex.from_product([["b", "a"], [1, 2]]).sort_values(),
    pd.DataFrame(np.arange(30.0).reshape(3, 10)).assign(t="x", w=np.arange(3), z=1.5), _summed(_TWICE.copy()),
    pd.DataFrame({"a": [1, 2]}).assign(b=2.5, c=3, d=pd.Timestamp("2024"), e=1.5)[["e", "c", "a", "d", "b"]],
]  # fmt: skip

FRAMES: list[Any] = [
    *UNUSUAL, _TWICE,
    _with_attrs(_WIDE.copy()), *(_WIDE[["whole", "text"]].set_axis(index, axis=0) for index in INDEXES),
    *INDEXES, *(_WIDE[name] for name in COLUMNS), *(_WIDE[name].array for name in COLUMNS),
    pd.Series([1, 2], index=["a", "b"], name=("t", 1)), pd.Series([], dtype="category"),
    pd.DataFrame(), pd.DataFrame(index=[1, 2]), pd.DataFrame(columns=["a", "b"]), pd.DataFrame({"a": []}),
    pd.DataFrame(np.arange(6).reshape(2, 3)), pd.DataFrame([[1, 2]], columns=["a", "a"]),
    pd.DataFrame([[1, 2]], columns=pd.MultiIndex.from_tuples([("a", 1), ("b", 2)], names=["u", "v"])),
    pd.DataFrame([[1]]).set_flags(allows_duplicate_labels=False), _WIDE[::2], _WIDE.iloc[:0],
    pd.Timestamp("2024", tz="Europe/Rome"), pd.Period("2024Q1", "Q-JAN"), pd.Interval(0, 1.5, "left"),
    pd.NA,
    *(
        getattr(scipy.sparse, f"{form}_{what}")(_COO.astype(dtype))
        for form in ("csr", "csc", "bsr", "coo", "dia")
        for what in ("array", "matrix")
        for dtype in ("f4", "i8")
    ),
    scipy.sparse.coo_array(np.array([0, 2, 0])), scipy.sparse.csr_matrix((3, 4)),
]  # fmt: skip


def is_frame(value: Any) -> bool:
    """Whether a value is one that `same_frames` compares."""
    return type(value).__module__.partition(".")[0] in ("pandas", "scipy")


def same_frames(one: Any, two: Any) -> bool:
    """Whether two of `FRAMES` are equal in type and value, all the way down."""
    return bool(_told(one) == _told(two))


def _told(value: Any) -> Any:
    """A value as its parts that can be compared, each beside its type."""
    return [type(value), *_parts(value)]


def _parts(value: Any) -> Iterator[Any]:
    if isinstance(value, pd.DataFrame):
        yield from (_told(value.columns), _told(value.index), *_about(value))
        yield from (_told(column.array) for _, column in value.items())
    elif isinstance(value, pd.Series):
        yield from (_told(value.index), _told(value.array), _told(value.name), *_about(value))
    elif isinstance(value, pd.MultiIndex):
        yield from map(_told, (*value.levels, *value.codes, *value.names, value.sortorder))
    elif isinstance(value, pd.RangeIndex):
        yield value.start, value.stop, value.step, value.name
    elif isinstance(value, pd.Index):
        yield from (_told(value.array), _told(value.name), getattr(value, "freq", None))
    elif isinstance(value, pd.Categorical):
        yield from (_told(value.codes), _told(value.categories), value.ordered)
    elif isinstance(value, pd.api.extensions.ExtensionArray):
        yield value.dtype
        yield from map(_told, value)
    elif scipy.sparse.issparse(value):
        yield value.shape, vars(value).get("has_canonical_format")
        arrays = [value.row, value.col] if value.format == "coo" and value.ndim == 2 else []
        names = ("data", "indices", "indptr", "offsets", "coords")
        arrays += [getattr(value, name) for name in names if hasattr(value, name)]
        yield from map(_told, arrays)
    elif isinstance(value, np.ndarray):
        yield value.dtype, value.shape, value.tobytes()
    elif isinstance(value, list | tuple):
        yield from map(_told, value)
    else:
        yield repr(value)


def _about(value: Any) -> tuple[Any, ...]:
    return value.attrs, value.flags.allows_duplicate_labels
