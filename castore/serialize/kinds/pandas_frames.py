"""Kinds of pandas' tables: frames, series and indexes, of exactly these classes.

A frame is written column by column, with its indexes, `attrs`, and whether labels may occur twice.
`take` imports nothing: an object can be of these kinds only in a process that has imported pandas.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from castore.serialize.kinds.forms import Kind, expect, listed
from castore.serialize.kinds.pandas_arrays import expect_index, make_column, take_column
from castore.serialize.kinds.pandas_scalars import make_frequency, need_pandas, take_frequency

# --- indexes ------------------------------------------------------------------------------------------------


def _take_index(value: Any) -> Any:
    return [take_column(value.array), value.name]


def _make_index(parts: Any) -> Any:
    column, name = listed(2, parts)
    array = make_column(column)
    return need_pandas().Index(array, dtype=array.dtype, name=name, tupleize_cols=False)


def _index_fields(parts: Any) -> Iterator[tuple[str, Any]]:
    column, name, *_ = parts
    yield ("" if type(column) is list else ".array"), column
    yield ".name", name


def _take_times(value: Any) -> Any:
    return [*_take_index(value), take_frequency(value.freq)]


def _make_times(parts: Any) -> Any:
    *index, frequency = listed(3, parts)
    made = _make_index(index)
    made.freq = make_frequency(frequency)  # refuses a frequency that the times do not have
    return made


def _take_range(value: Any) -> Any:
    return [value.start, value.stop, value.step, value.name]


def _make_range(parts: Any) -> Any:
    *numbers, name = listed(4, parts)
    return need_pandas().RangeIndex(*[expect(int, number) for number in numbers], name=name)


def _take_levels(value: Any) -> Any:
    return [list(value.levels), list(value.codes), list(value.names)]


def _make_levels(parts: Any) -> Any:
    levels, codes, names = listed(3, parts)
    return need_pandas().MultiIndex(
        levels=[expect_index(level) for level in expect(list, levels)],
        codes=[make_column(numbers) for numbers in expect(list, codes)],
        names=expect(list, names),
    )


def _levels_fields(parts: Any) -> Iterator[tuple[str, Any]]:
    for word, part in zip(("levels", "codes", "names"), parts, strict=True):
        yield f".{word}", part


# --- series and frames --------------------------------------------------------------------------------------


def _take_series(value: Any) -> Any:
    return [value.index, take_column(value.array), value.name, *_about(value)]


def _make_series(parts: Any) -> Any:
    index, column, name, attrs, unique = listed(5, parts)
    return _noted(_series(column, expect_index(index), name), attrs, unique)


def _series(column: Any, index: Any, name: Any = None) -> Any:
    array = make_column(column)
    return need_pandas().Series(array, index=index, dtype=array.dtype, name=name, copy=False)


def _series_fields(parts: Any) -> Iterator[tuple[str, Any]]:
    index, column, name, attrs, _ = parts
    yield ".index", index
    yield _column_field("", column)
    yield ".name", name
    yield ".attrs", attrs


def _column_field(path: str, column: Any) -> tuple[str, Any]:
    return f"{path}.iloc" if type(column) is list else f"{path}.array", column


def _take_frame(value: Any) -> Any:
    columns = [take_column(column.array) for _, column in value.items()]
    return [value.columns, value.index, columns, *_about(value)]


def _make_frame(parts: Any) -> Any:
    labels, index, columns, attrs, unique = listed(5, parts)
    rows = expect_index(index)
    series = {place: _series(column, rows) for place, column in enumerate(expect(list, columns))}
    made = need_pandas().DataFrame(series, index=rows)
    made.columns = expect_index(labels)
    return _noted(made, attrs, unique)


def _frame_fields(parts: Any) -> Iterator[tuple[str, Any]]:
    labels, index, columns, attrs, _ = parts
    yield ".columns", labels
    yield ".index", index
    for label, column in zip(labels, columns, strict=True):
        yield _column_field(f"[{label!r}]", column)
    yield ".attrs", attrs


def _about(value: Any) -> tuple[dict[Any, Any], bool]:
    """The notes of a series or a frame, and whether one of its labels may occur twice."""
    return dict(value.attrs), bool(value.flags.allows_duplicate_labels)


def _noted(made: Any, attrs: Any, allows_duplicates: Any) -> Any:
    made.attrs = expect(dict, attrs)
    made.flags.allows_duplicate_labels = expect(bool, allows_duplicates)
    return made


PANDAS_FRAMES = [
    *(
        Kind("pandas.index", "pandas", cls, _take_index, _make_index, _index_fields)
        for cls in ("Index", "PeriodIndex", "IntervalIndex", "CategoricalIndex")
    ),
    Kind("pandas.time_index", "pandas", "DatetimeIndex", _take_times, _make_times, _index_fields),
    Kind("pandas.time_index", "pandas", "TimedeltaIndex", _take_times, _make_times, _index_fields),
    Kind("pandas.range_index", "pandas", "RangeIndex", _take_range, _make_range),
    Kind("pandas.multi_index", "pandas", "MultiIndex", _take_levels, _make_levels, _levels_fields),
    Kind("pandas.series", "pandas", "Series", _take_series, _make_series, _series_fields),
    Kind("pandas.frame", "pandas", "DataFrame", _take_frame, _make_frame, _frame_fields),
]
