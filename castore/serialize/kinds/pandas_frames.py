"""Kinds of pandas' tables: frames, series and indexes, of exactly these classes.

A frame is written by columns, those of one NumPy dtype together, with its indexes, `attrs`, and whether
labels may occur twice.
`take` imports nothing: an object can be of these kinds only in a process that has imported pandas.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from castore.serialize.kinds.forms import Kind, MisfitError, expect, listed
from castore.serialize.kinds.pandas_arrays import expect_index, integers, make_column, take_column
from castore.serialize.kinds.pandas_scalars import make_frequency, need_pandas, take_frequency, with_frequency
from castore.serialize.problems import need
from castore.system.frame_columns import column_groups

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
    return with_frequency(_make_index(index), make_frequency(frequency))


def _take_range(value: Any) -> Any:
    return [value.start, value.stop, value.step, value.name]


def _make_range(parts: Any) -> Any:
    *numbers, name = listed(4, parts)
    return need_pandas().RangeIndex(*[expect(int, number) for number in numbers], name=name)


def _take_levels(value: Any) -> Any:
    if (problem := _problem_of_codes(value.levels, value.codes)) is not None:
        raise MisfitError(f"is a MultiIndex that pandas has broken: {problem}; make it anew")
    return [list(value.levels), list(value.codes), list(value.names), value.sortorder]


def _make_levels(parts: Any) -> Any:
    levels, codes, names, order = listed(4, parts)
    levels = [expect_index(level) for level in expect(list, levels)]
    codes = [integers(numbers) for numbers in expect(list, codes)]
    if (problem := _problem_of_codes(levels, codes)) is not None:
        raise ValueError(problem)
    # With pandas' own check it would replace the codes of levels that are missing values.
    make = need_pandas().MultiIndex
    return make(levels, codes, sortorder=order, names=expect(list, names), verify_integrity=False)


def _problem_of_codes(levels: Any, codes: Any) -> str | None:
    """The problem with codes that pandas' compiled functions would trust, or None."""
    if len({len(numbers) for numbers in codes}) > 1 or len(codes) != len(levels):
        return "its levels have codes of different numbers"
    for level, numbers in zip(levels, codes, strict=True):
        if len(numbers) and not -1 <= numbers.min() <= numbers.max() < len(level):
            return "a code is that of no level"
    return None


def _levels_fields(parts: Any) -> Iterator[tuple[str, Any]]:
    for word, part in zip(("levels", "codes", "names"), parts, strict=False):
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
    about = _about(value)
    groups = column_groups(value.set_flags(allows_duplicate_labels=True))
    return [value.columns, value.index, [[places, take_column(array)] for places, array in groups], *about]


def _make_frame(parts: Any) -> Any:
    pandas = need_pandas()
    labels, index, groups, attrs, unique = listed(5, parts)
    rows, names = expect_index(index), expect_index(labels)
    pieces, order = [], []
    for group in expect(list, groups):
        places, column = listed(2, group)
        order += expect(list, places)
        pieces.append(_piece(places, column, rows))
    if sorted(order) != list(range(len(names))):
        raise ValueError("its columns are not those of its labels")
    made = pieces[0] if pieces else pandas.DataFrame(index=rows)
    if len(pieces) > 1:
        made = pandas.concat(pieces, axis=1)
    if order != sorted(order):
        made = made[range(len(names))]
    made.columns = names
    return _noted(made, attrs, unique)


def _piece(places: list[int], column: Any, rows: Any) -> Any:
    """A frame of the columns of a group, with their places as labels."""
    numpy, pandas = need("numpy", "datasets"), need_pandas()
    if type(column) is numpy.ndarray and column.ndim == 2:
        if column.shape[0] != len(places):
            raise ValueError(f"{len(places)} columns are written as {column.shape[0]}")
        return pandas.DataFrame(column.T, index=rows, columns=places, copy=False)
    [place] = places
    return _series(column, rows).to_frame(place)


def _frame_fields(parts: Any) -> Iterator[tuple[str, Any]]:
    labels, index, groups, attrs, _ = parts
    yield ".columns", labels
    yield ".index", index
    for places, column in groups:
        yield _column_field(f"[{labels[places[0]]!r}]", column)
    yield ".attrs", attrs


def _about(value: Any) -> tuple[dict[Any, Any], bool]:
    """The notes of a series or a frame, and whether one of its labels may occur twice."""
    allows_duplicates = bool(value.flags.allows_duplicate_labels)
    if not (allows_duplicates or all(axis.is_unique for axis in value.axes)):
        raise MisfitError(
            "has a label twice, which its flags forbid; give set_flags(allows_duplicate_labels=True)"
        )
    return dict(value.attrs), allows_duplicates


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
