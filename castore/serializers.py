"""Python objects to bytes and back, exactly, and without running code from the cache.

A table of serializers: bytes, text, msgpack (what JSON can say, and tuples, big ints, times, arrays and tensors
inside), npy, safetensors, arrow, and pickle, which must be allowed by name on both sides.

Assumes that bytes to load may be hostile. Must never change an object silently: what would not come back as the
same type and value is a SerializationError with the path to it. Three conveniences are meant and stated: bytearray
and memoryview come back as bytes, an Arrow RecordBatch as a Table, a tensor from a GPU on the CPU.
Arrays, tensors and tables are `castore.arrays`' business.
"""

from __future__ import annotations

import datetime as dt
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from castore.arrays import (
    corrupt,
    dump_arrow,
    dump_npy,
    dump_safetensors,
    fits_arrow,
    fits_safetensors,
    is_array,
    is_numpy_scalar,
    is_tensor,
    load_arrow,
    load_npy,
    load_safetensors,
    refuse,
)
from castore.errors import CorruptError, InvalidValueError, SerializationError

_EXT_TUPLE, _EXT_INT, _EXT_TIME, _EXT_ARRAY, _EXT_SCALAR, _EXT_TENSOR = range(1, 7)
# Tuples in tuples are copied once a level, on both sides: this bounds what a hostile value can cost.
_DEEPEST_EXT = 64
_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.timezone.utc)


class Serializer(NamedTuple):
    """One way to store objects: whether it takes an object by itself, and the two directions."""

    fits: Callable[[Any], bool]
    dump: Callable[[Any], bytes]
    load: Callable[[bytes], Any]


def dump(obj: object, serializer: str | None = None, *, allow_pickle: bool = False) -> tuple[str, bytes]:
    """The bytes of `obj`, and the name of the serializer that made them.

    Args:
        obj: bytes, a str, what JSON can say (with tuples, big ints, datetimes, NumPy scalars, arrays and torch
            tensors anywhere in it), a NumPy array, a dict of str to tensors or arrays, a pyarrow Table.
        serializer: a name from `SERIALIZERS`; by default the first that fits.
        allow_pickle: take pickle for an object that nothing else fits.

    Raises:
        SerializationError: nothing that is allowed can store `obj`; the message has the path to the part.
        InvalidValueError: there is no serializer of that name.
        MissingDependencyError: an optional package is needed.

    >>> dump("text")
    ('text', b'text')
    >>> dump({"x": [1, {2}]})
    Traceback (most recent call last):
    castore.errors.SerializationError: value['x'][1]: <class 'set'> has no serializer; convert it, or pass allow_pickle=True
    """
    if serializer is None:
        serializer = next(name for name, entry in SERIALIZERS.items() if entry.fits(obj))
        if serializer == "msgpack" and allow_pickle and _misfit(obj):
            serializer = "pickle"
    elif serializer not in SERIALIZERS:
        raise InvalidValueError(
            f"there is no serializer {serializer!r}; take one of {', '.join(SERIALIZERS)}"
        )
    if serializer == "pickle" and not allow_pickle:
        raise SerializationError(
            "pickle runs code when it is loaded; pass allow_pickle=True to store with it"
        )
    return serializer, SERIALIZERS[serializer].dump(obj)


def load(data: bytes, serializer: str, *, allow_pickle: bool = False) -> Any:
    """The object that `dump` turned into `data` with the serializer of that name.

    Raises:
        CorruptError: `data` is not what that serializer writes.
        SerializationError: it is pickled and pickle is not allowed, or the serializer is unknown.
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


# --- bytes and text ---------------------------------------------------------------------------------------------


def _dump_bytes(obj: Any) -> bytes:
    return bytes(obj) if isinstance(obj, bytes | bytearray | memoryview) else refuse(str(type(obj)), "bytes")


def _dump_text(obj: Any) -> bytes:
    # Lone surrogates stand for undecodable bytes in file names: they must come back.
    return obj.encode("utf-8", "surrogatepass") if type(obj) is str else refuse(str(type(obj)), "text")


def _load_text(data: bytes) -> str:
    try:
        return bytes(data).decode("utf-8", "surrogatepass")
    except UnicodeDecodeError as error:
        raise corrupt("text", error) from error


# --- msgpack ----------------------------------------------------------------------------------------------------


class _MisfitError(Exception):
    """An object inside has no serializer; only where is still to be found."""


def _dump_msgpack(obj: Any) -> bytes:
    try:
        return _pack(obj, 0)
    except _MisfitError:
        raise SerializationError(_misfit(obj) or "value: has no serializer") from None
    except (RecursionError, ValueError, OverflowError) as error:
        # What is left: circles, depths over 511, parts of over 4 GiB.
        raise SerializationError(f"the value cannot be stored as msgpack: {error}") from error


def _pack(obj: Any, depth: int) -> bytes:
    import msgpack

    packer = msgpack.Packer(
        default=functools.partial(_extend, depth=depth), strict_types=True, unicode_errors="surrogatepass"
    )
    return bytes(packer.pack(obj))


def _extend(obj: Any, depth: int) -> Any:
    """What msgpack has no type for, as one of our extension types."""
    import msgpack

    if depth >= _DEEPEST_EXT:
        raise ValueError(f"tuples are nested more than {_DEEPEST_EXT} levels deep")
    kind = type(obj)
    if kind is tuple:
        return msgpack.ExtType(_EXT_TUPLE, _pack(list(obj), depth + 1))
    if kind is int:
        return msgpack.ExtType(_EXT_INT, obj.to_bytes(obj.bit_length() // 8 + 1, "big", signed=True))
    if kind is dt.datetime:
        return _time(obj)
    if is_array(obj):
        return msgpack.ExtType(_EXT_ARRAY, dump_npy(obj))
    if is_numpy_scalar(obj):
        return msgpack.ExtType(_EXT_SCALAR, dump_npy(sys.modules["numpy"].asarray(obj)))
    if is_tensor(obj):
        return msgpack.ExtType(_EXT_TENSOR, dump_safetensors(obj))
    raise _MisfitError


def _time(moment: dt.datetime) -> Any:
    """UTC as msgpack's own timestamp; a naive time stays naive, another zone becomes its offset."""
    import msgpack

    if moment.tzinfo is dt.timezone.utc:
        # In whole numbers: datetime.timestamp() rounds microseconds in far years.
        seconds, rest = divmod(moment - _EPOCH, dt.timedelta(seconds=1))
        return msgpack.Timestamp(seconds, rest.microseconds * 1000)
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
    except CorruptError:
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
    raise ValueError(f"extension type {code} is unknown or malformed")


def _misfit(obj: object) -> str | None:
    """The sentence about the first part of `obj` that msgpack cannot hold, if there is one."""
    try:
        found = next(_misfits(obj, "value"), None)
    except RecursionError:
        return "value: is nested too deep, or contains itself"
    if found is None:
        return None
    path, part = found
    plain = next(
        (base.__name__ for base in (dict, list, tuple, str, int, float) if isinstance(part, base)), None
    )
    remedy = f"pass {plain}(...) of it" if plain else "convert it"
    return f"{path}: {type(part)} has no serializer; {remedy}, or pass allow_pickle=True"


def _misfits(obj: Any, path: str) -> Iterator[tuple[str, Any]]:
    if type(obj) in (list, tuple):
        for place, item in enumerate(obj):
            yield from _misfits(item, f"{path}[{place}]")
    elif type(obj) is dict:
        for name, item in obj.items():
            yield from _misfits(name, f"{path}.keys()")
            yield from _misfits(item, f"{path}[{name!r}]")
    elif not (type(obj) in _PLAIN or is_array(obj) or is_numpy_scalar(obj) or is_tensor(obj)):
        yield path, obj


_PLAIN = frozenset({type(None), bool, int, float, str, bytes, bytearray, memoryview, dt.datetime})


# --- pickle -----------------------------------------------------------------------------------------------------


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


# The order is that of choice; msgpack answers for the rest, for it can tell which part does not fit.
SERIALIZERS: dict[str, Serializer] = {
    "bytes": Serializer(lambda obj: type(obj) in (bytes, bytearray, memoryview), _dump_bytes, bytes),
    "text": Serializer(lambda obj: type(obj) is str, _dump_text, _load_text),
    "npy": Serializer(is_array, dump_npy, load_npy),
    "safetensors": Serializer(fits_safetensors, dump_safetensors, load_safetensors),
    "arrow": Serializer(fits_arrow, dump_arrow, load_arrow),
    "msgpack": Serializer(lambda _: True, _dump_msgpack, _load_msgpack),
    "pickle": Serializer(lambda _: False, _dump_pickle, _load_pickle),
}
