"""Python objects to bytes and back, exactly, and without running code from the cache.

`SERIALIZERS` lists bytes, bytearray, text, msgpack, npy, safetensors, arrow and pickle. msgpack takes all
that JSON can express, and anywhere inside it tuples, big ints, times, arrays, tensors and values that
`castore.serialize.kinds` takes apart. Pickle must be allowed by name on both sides.
`npy`, `safetensors_files` and `arrow` of this package handle arrays, tensors and tables.

Bytes to load may be hostile. Must never: change an object silently. A part that would not come back with the
same type and value raises a SerializationError with the path to the part. A few changes are intended: a
tensor on a GPU comes back on the CPU, a memory-mapped array as an array, an image as
`castore.serialize.kinds.images` describes. If the caller names the serializer, "bytes" returns bytes for all
bytes-like objects, and "arrow" returns a Table for a RecordBatch.
"""

from __future__ import annotations

import datetime as dt
import functools
import re
import sys
from collections.abc import Callable
from itertools import chain
from typing import Any, NamedTuple

from castore.errors import CorruptError, InvalidValueError, SerializationError
from castore.serialize.arrow import dump_arrow, is_table, load_arrow
from castore.serialize.kinds import (
    MisfitError,
    is_found_by_name,
    put_together,
    take_apart,
    way_out,
)
from castore.serialize.misfits import find_misfit
from castore.serialize.npy import dump_npy, is_array, is_numpy_scalar, load_npy
from castore.serialize.problems import corrupt, refuse
from castore.serialize.safetensors_files import (
    dump_safetensors,
    fits_safetensors,
    is_tensor,
    load_safetensors,
)

_EXT_TUPLE, _EXT_INT, _EXT_TIME, _EXT_ARRAY, _EXT_SCALAR, _EXT_TENSOR, _EXT_FORM = range(1, 8)
# Nested tuples are copied once per level in both directions: this bounds the cost of a hostile value.
_DEEPEST_EXT = 64
#: First bytes of msgpack's bin, ext and fixext formats.
_BINARY = re.compile(rb"[\xc4-\xc9\xd4-\xd8]")
_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.timezone.utc)


class Serializer(NamedTuple):
    """One way to store objects: a test whether to choose it for an object by default, and both directions."""

    fits: Callable[[Any], bool]
    dump: Callable[[Any], bytes]
    load: Callable[[bytes], Any]


def dump(obj: object, serializer: str | None = None, *, allow_pickle: bool = False) -> tuple[str, bytes]:
    """Return the name of the serializer used, and the bytes of `obj`.

    Args:
        obj: bytes, a bytearray, a str, a NumPy array, a dict of str to tensors or arrays, a pyarrow Table, or
            any value that JSON can express. Such a value may contain tuples, big ints, datetimes, NumPy
            scalars, arrays, torch tensors, and values that `castore.serialize.kinds` takes apart.
        serializer: a name in `SERIALIZERS`; by default the first that fits.
        allow_pickle: whether to use pickle for an object that no other serializer fits. Default False.

    Raises:
        SerializationError: no allowed serializer can store `obj`; the message has the path to the part at
            fault.
        InvalidValueError: there is no serializer of that name.
        MissingDependencyError: an optional package is needed.

    >>> dump("text")
    ('text', b'text')
    >>> dump({"x": [1, iter([2])]})
    Traceback (most recent call last):
    castore.errors.SerializationError: value['x'][1]: <class 'list_iterator'> has no serializer; convert ...
    """
    if serializer is None:
        serializer = next(name for name, entry in SERIALIZERS.items() if entry.fits(obj))
        if serializer == "msgpack" and allow_pickle and _misfit(obj, pickled=True):
            serializer = "pickle"
    check_serializer(serializer)
    if serializer == "pickle" and not allow_pickle:
        raise SerializationError(
            "pickle runs code when it is loaded; pass allow_pickle=True to store with it"
        )
    return serializer, SERIALIZERS[serializer].dump(obj)


def check_serializer(name: str) -> str:
    """Return the name if there is a serializer of that name.

    Raises:
        InvalidValueError: there is no such serializer.
    """
    if name not in tuple(SERIALIZERS):  # no look-up in the dict, for a list cannot be hashed
        raise InvalidValueError(f"there is no serializer {name!r}; take one of {', '.join(SERIALIZERS)}")
    return name


def load(data: bytes, serializer: str, *, allow_pickle: bool = False) -> Any:
    """Return the object that `dump` turned into `data` with the serializer of that name.

    Raises:
        CorruptError: `data` is not a valid output of that serializer.
        SerializationError: `data` is a pickle and pickle is not allowed, or the serializer is unknown, or the
            object contains a type that this process does not have.
        MissingDependencyError: an optional package is needed.

    >>> load(*reversed(dump((1, 2.0, 10**30))))
    (1, 2.0, 1000000000000000000000000000000)
    """
    if serializer not in SERIALIZERS:
        raise SerializationError(
            f"the value was stored with {serializer!r}, which this version does not know"
        )
    if serializer == "pickle" and not allow_pickle:
        raise SerializationError(
            "the value is a pickle, which runs code when loaded; pass allow_pickle=True if you trust it"
        )
    return SERIALIZERS[serializer].load(data)


# --- bytes and text -----------------------------------------------------------------------------------------


def _dump_bytes(obj: Any) -> bytes:
    return bytes(obj) if isinstance(obj, bytes | bytearray | memoryview) else refuse(str(type(obj)), "bytes")


def _dump_text(obj: Any) -> bytes:
    # Lone surrogates represent undecodable bytes in file names: they must come back.
    return obj.encode("utf-8", "surrogatepass") if type(obj) is str else refuse(str(type(obj)), "text")


def _load_text(data: bytes) -> str:
    try:
        return bytes(data).decode("utf-8", "surrogatepass")
    except UnicodeDecodeError as error:
        raise corrupt("text", error) from error


# --- msgpack ------------------------------------------------------------------------------------------------


def _dump_msgpack(obj: Any) -> bytes:
    try:
        return _pack(obj, 0)
    except MisfitError as error:
        # The problem is known. `_misfit` finds the path to it.
        raise SerializationError(_misfit(obj) or f"value: {error.problem}") from None
    except (RecursionError, ValueError, OverflowError, BufferError) as error:
        # Left are cycles, nesting over 511 levels, parts over 4 GiB, and views that are not contiguous.
        raise SerializationError(_misfit(obj) or f"the value cannot be stored as msgpack: {error}") from error


def _pack(obj: Any, depth: int) -> bytes:
    import msgpack

    packer = msgpack.Packer(
        default=functools.partial(_extend, depth=depth), strict_types=True, unicode_errors="surrogatepass"
    )
    data = bytes(packer.pack(obj))
    # Most values contain no such byte, and the search is faster than `_holds_odd`.
    if _BINARY.search(data) and _holds_odd(obj):
        return bytes(packer.pack(_wrapped(obj)))
    return data


class _Odd:
    """Wraps a value that msgpack would write as another type, so that `_extend` gets it."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


def _holds_odd(obj: Any) -> bool:
    """Whether `obj` contains a value of `_odd_types`. Goes level by level; msgpack has excluded cycles."""
    level = [obj]
    while level:
        kinds = set(map(type, level))
        if not kinds.isdisjoint(_odd_types()):
            return True
        lists = [item for item in level if type(item) is list] if list in kinds else []
        dicts = [item for item in level if type(item) is dict] if dict in kinds else []
        level = list(chain(*lists, *dicts, *map(dict.values, dicts)))
    return False


def _wrapped(obj: Any) -> Any:
    kind = type(obj)
    if kind is list:
        return [_wrapped(item) for item in obj]
    if kind is dict:
        return {_wrapped(name): _wrapped(item) for name, item in obj.items()}
    return _Odd(obj) if kind in _odd_types() else obj


@functools.cache
def _odd_types() -> frozenset[type]:
    import msgpack

    return frozenset({bytearray, memoryview, msgpack.ExtType, msgpack.Timestamp})


def _extend(obj: Any, depth: int) -> Any:
    """Convert a value that msgpack has no type for into one of castore's extension types."""
    import msgpack

    if depth >= _DEEPEST_EXT:
        raise ValueError(f"tuples and classes are nested more than {_DEEPEST_EXT} levels deep")
    if type(obj) is _Odd:
        obj = obj.value
    kind = type(obj)
    if kind is tuple:
        return msgpack.ExtType(_EXT_TUPLE, _pack(list(obj), depth + 1))
    if kind is int:
        return msgpack.ExtType(_EXT_INT, obj.to_bytes(obj.bit_length() // 8 + 1, "big", signed=True))
    if kind is dt.datetime and (moment := _time(obj)) is not None:
        return moment
    if is_array(obj):
        return msgpack.ExtType(_EXT_ARRAY, dump_npy(obj))
    if is_numpy_scalar(obj):
        return msgpack.ExtType(_EXT_SCALAR, dump_npy(sys.modules["numpy"].asarray(obj)))
    if is_tensor(obj):
        return msgpack.ExtType(_EXT_TENSOR, dump_safetensors(obj))
    form = take_apart(obj)
    if form is not None:
        return msgpack.ExtType(_EXT_FORM, _pack(list(form), depth + 1))
    raise MisfitError(way_out(obj))


def _time(moment: dt.datetime) -> Any | None:
    """Return a UTC time as msgpack's timestamp, a naive or fixed-offset time as text, None for others."""
    import msgpack

    if moment.tzinfo is dt.timezone.utc and not moment.fold:
        # Integer arithmetic: datetime.timestamp() rounds microseconds in distant years.
        seconds, rest = divmod(moment - _EPOCH, dt.timedelta(seconds=1))
        return msgpack.Timestamp(seconds, rest.microseconds * 1000)
    zone = moment.tzinfo
    is_offset = type(zone) is dt.timezone and len(zone.__getinitargs__()) == 1  # type: ignore[attr-defined]
    if moment.fold or not (zone is None or is_offset):
        return None
    return msgpack.ExtType(_EXT_TIME, moment.isoformat().encode())


def _load_msgpack(data: bytes, depth: int = 0) -> Any:
    import msgpack

    if depth > _DEEPEST_EXT:
        raise corrupt("msgpack", "it is nested too deep")
    try:
        return msgpack.unpackb(
            data,
            ext_hook=lambda code, part: _restore(code, part, depth),
            timestamp=3,
            strict_map_key=False,
            unicode_errors="surrogatepass",
        )
    except (CorruptError, SerializationError):
        raise
    except (
        ValueError,
        TypeError,
        OverflowError,
        RecursionError,
        MemoryError,
        msgpack.UnpackException,
    ) as error:
        raise corrupt("msgpack", error or type(error).__name__) from error


def _restore(code: int, part: bytes, depth: int) -> Any:
    if code == _EXT_TUPLE:
        items = _load_msgpack(part, depth + 1)
        if type(items) is list:
            return tuple(items)
    elif code == _EXT_INT:
        return int.from_bytes(part, "big", signed=True)
    elif code == _EXT_TIME:
        return dt.datetime.fromisoformat(part.decode())
    elif code == _EXT_ARRAY:
        return load_npy(part)
    elif code == _EXT_SCALAR:
        return load_npy(part)[()]
    elif code == _EXT_TENSOR:
        return load_safetensors(part)
    elif code == _EXT_FORM:
        kind, detail, parts = _load_msgpack(part, depth + 1)
        return put_together(kind, detail, parts)
    raise ValueError(f"extension type {code} is unknown or malformed")


def _misfit(obj: object, *, pickled: bool = False) -> str | None:
    """Describe the first part of `obj` that msgpack cannot store, with its path; None if there is none.

    Args:
        pickled: whether unregistered user classes count as such parts too. A pickle can name them, because it
            imports their modules.
    """
    found = find_misfit(obj, "value", _is_leaf, is_found_by_name if pickled else None)
    if found is None:
        return None
    path, problem = found
    return f"{path}: {problem}, or pass allow_pickle=True"


def _is_leaf(obj: Any) -> bool:
    return type(obj) in _PLAIN or is_array(obj) or is_numpy_scalar(obj) or is_tensor(obj)


_PLAIN = frozenset({type(None), bool, int, float, str, bytes, bytearray, dt.datetime})


# --- pickle -------------------------------------------------------------------------------------------------


def _dump_pickle(obj: Any) -> bytes:
    import pickle

    try:
        return pickle.dumps(obj, protocol=5)
    except Exception as error:
        raise SerializationError(f"pickle cannot store {type(obj)}: {error}") from error


def _load_pickle(data: bytes) -> Any:
    import pickle

    try:
        return pickle.loads(data)  # noqa: S301 - the caller has allowed it
    except Exception as error:
        raise corrupt("pickle", error) from error


# In the order of choice. msgpack fits everything that is left, because it reports which part it cannot store.
SERIALIZERS: dict[str, Serializer] = {
    "bytes": Serializer(lambda obj: type(obj) is bytes, _dump_bytes, bytes),
    "bytearray": Serializer(lambda obj: type(obj) is bytearray, _dump_bytes, bytearray),
    "text": Serializer(lambda obj: type(obj) is str, _dump_text, _load_text),
    "npy": Serializer(is_array, dump_npy, load_npy),
    "safetensors": Serializer(fits_safetensors, dump_safetensors, load_safetensors),
    "arrow": Serializer(is_table, dump_arrow, load_arrow),
    "msgpack": Serializer(lambda _: True, _dump_msgpack, _load_msgpack),
    "pickle": Serializer(lambda _: False, _dump_pickle, _load_pickle),
}
