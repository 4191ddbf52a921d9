"""How frames, series, indexes and arrays of pandas count in keys: by what a function can read of them.

Pandas notes what it has computed on its objects, keeps columns in blocks as they were added, and hides values
behind masks. None of these count. Imports nothing: a process with such an object has imported pandas.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any

from castore.keys.encoder import Encoder
from castore.keys.pickled import object_parts
from castore.system.frame_columns import column_groups

#: Attributes of pandas' own on frames and series.
_OF_PANDAS = {
    "_mgr", "_attrs", "_flags", "_name", "_index", "_item_cache", "_cacher", "_is_copy", "_references",
    "_typ", "_metadata",
}  # fmt: skip


def frame(encoder: Encoder, value: Any) -> Iterator[Any]:
    """The rule for frames."""
    yield from ("frame", *_labelled(encoder, value), encoder.part(value.columns, ".columns"))
    for places, array in column_groups(value.set_flags(allows_duplicate_labels=True)):
        yield places, encoder.part(array, f".iloc[:, {places[0]}]")


def series(encoder: Encoder, value: Any) -> Iterator[Any]:
    """The rule for series."""
    yield from ("series", *_labelled(encoder, value), encoder.part(value.name, ".name"))
    yield encoder.part(value.array, ".array")


def _labelled(encoder: Encoder, value: Any) -> Iterator[Any]:
    """The parts that frames and series share."""
    cls = type(value)
    yield from (encoder.part(cls), encoder.part(value.index, ".index"))
    yield from (encoder.part(dict(value.attrs), ".attrs"), value.flags.allows_duplicate_labels)
    # Pandas keeps accessors (`.str`) beside the attributes that users set.
    own = {name for name in vars(value) if name not in _OF_PANDAS and name not in cls._accessors}
    yield _attributes(encoder, value, own | set(cls._metadata) - {"_name"})


def _attributes(encoder: Encoder, value: Any, names: Iterable[str]) -> list[tuple[str, bytes]]:
    return [(name, encoder.part(getattr(value, name, None), f".{name}")) for name in sorted(names)]


def _public(value: Any) -> set[str]:
    """The names of attributes that users have set on an index or an array. Those of pandas are private."""
    return {name for name in vars(value) if not name.startswith("_") and name != "sortorder"}


def index(encoder: Encoder, value: Any) -> Iterator[Any]:
    """The rule for indexes."""
    pandas = sys.modules["pandas"]
    yield from ("index", encoder.part(type(value)), encoder.part(list(value.names), ".names"))
    yield _attributes(encoder, value, _public(value))
    if isinstance(value, pandas.RangeIndex):
        yield value.start, value.stop, value.step
    elif isinstance(value, pandas.MultiIndex):
        yield [encoder.part(level, ".levels") for level in value.levels]
        yield [encoder.part(codes, ".codes") for codes in value.codes]
        yield value.sortorder
    else:
        yield encoder.part(value.array, ".array")
        yield _frequency(encoder, getattr(value, "freq", None))


def _frequency(encoder: Encoder, value: Any) -> list[Any] | None:
    """The parts of a frequency: a copy may have others of the attributes that say the same."""
    if value is None:
        return None
    told = [type(value).__name__, value.freqstr, value.n, value.normalize]
    told += [str(getattr(value, name, None)) for name in ("weekmask", "start", "end")]
    told.append(str(sys.modules["pandas"].Timedelta(getattr(value, "offset", 0))))
    return [*told, encoder.part(getattr(value, "holidays", None), ".freq.holidays")]


def array(encoder: Encoder, value: Any) -> Iterator[Any]:
    """The rule for arrays that are not NumPy's."""
    arrays = sys.modules["pandas"].arrays
    if type(value).__module__.partition(".")[0] != "pandas":  # a class of somebody's, with methods of its own
        yield from ("object", *object_parts(encoder, value))
        yield _attributes(encoder, value, _public(value))
        return
    yield from ("array", type(value).__name__, str(value.dtype), _attributes(encoder, value, _public(value)))
    if isinstance(value, arrays.IntegerArray | arrays.FloatingArray | arrays.BooleanArray):
        yield encoder.part(value.to_numpy(dtype=value.dtype.numpy_dtype, na_value=0))
        yield encoder.part(value.isna())
    elif isinstance(value, arrays.DatetimeArray):
        yield encoder.part(value.asi8), encoder.part(value.tz, ".tz")
    elif isinstance(value, arrays.TimedeltaArray | arrays.PeriodArray):
        yield encoder.part(value.asi8)
    elif isinstance(value, sys.modules["pandas"].Categorical):
        yield encoder.part(value.codes), encoder.part(value.categories, ".categories"), bool(value.ordered)
    elif isinstance(value, arrays.IntervalArray):
        yield encoder.part(value.left, ".left"), encoder.part(value.right, ".right")
    elif isinstance(value, arrays.ArrowExtensionArray):
        yield str(getattr(value.dtype, "na_value", "")), _storage(value)
        yield encoder.part(value.__arrow_array__())
    elif isinstance(value, arrays.StringArray):
        yield str(value.dtype.na_value), _storage(value)
        yield encoder.part(value.to_numpy(object, na_value=None).tolist())
    elif isinstance(value, arrays.NumpyExtensionArray):
        yield encoder.part(value.to_numpy())
    elif isinstance(value, arrays.SparseArray):
        places = value.sp_index.to_int_index().indices
        yield len(value), value.kind, encoder.part(value.sp_values), encoder.part(places)
        yield encoder.part(value.fill_value, ".fill_value")
    else:
        yield from object_parts(encoder, value)


def _storage(value: Any) -> str:
    return str(getattr(value.dtype, "storage", ""))


def timestamp(encoder: Encoder, value: Any) -> Iterator[Any]:
    """The rule for single times and spans of time. They never change, so that one in two places is as two."""
    yield from ("timestamp", encoder.part(type(value)), encoder.part(value.asm8))
    zone = getattr(value, "tz", None)
    yield from (None if zone is None else encoder.part(zone, ".tz"), getattr(value, "fold", 0))


def period(encoder: Encoder, value: Any) -> Iterator[Any]:
    """The rule for single periods."""
    yield from ("period", encoder.part(type(value)), value.ordinal, value.freqstr)


def interval(encoder: Encoder, value: Any) -> Iterator[Any]:
    """The rule for single intervals."""
    yield from ("interval", encoder.part(type(value)), value.closed)
    yield encoder.part(value.left, ".left"), encoder.part(value.right, ".right")
