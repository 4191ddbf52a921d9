"""Fingerprints of objects and of the functions that use them: the rules for any value of a user's.

`castore.keys.encoder` refuses unknown objects, because a config should be explicit. In functions, operators
and datasets a function counts by its code, and an object by its class's code and its state as
`castore.keys.pickled` has it. Types that pickle's protocol describes badly are in `castore.keys.values`. An
object must not change while it is hashed.

Must never: pickle anything, or remember an object by identity beyond one use of an encoder.
"""

from __future__ import annotations

import enum
import pathlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

from blake3 import blake3

from castore.errors import InvalidValueError
from castore.keys.classes import full_name, has_member
from castore.keys.compiled import compiled_code
from castore.keys.doubts import is_generator
from castore.keys.encoder import (
    Encoder,
    UnencodableError,
    late_leaf_or_named_tuple,
    named_value,
    own_key,
    plain_array,
    refuse,
)
from castore.keys.functions import code_rule, orders
from castore.keys.libraries import library_of_class
from castore.keys.pickled import lasting, object_parts
from castore.keys.registry import Rules
from castore.keys.tokenizers import tokenizer
from castore.keys.tracing import Encoded, encode
from castore.keys.values import SHARED

_VERSION = b"castore.function.1"
#: Attributes of numpy.ma's arrays. `_masked` encodes what counts of them.
_MASKED_NOISE = {
    "_mask",
    "_fill_value",
    "_hardmask",
    "_sharedmask",
    "_isfield",
    "_baseclass",
    "_optinfo",
    "_basedict",
}


def function_fingerprint(function: Callable[..., Any]) -> str:
    """Return 64 hexadecimal digits that change when the result of `function` may have changed.

    Args:
        function: a function, a lambda, a partial, a method, or a callable object. Functions written in C
            count by name and version.

    Raises:
        UnhashableError: the function refers to a value without a stable hash; the message has the path to the
            value.
        InvalidValueError: `function` is not callable.

    >>> function_fingerprint(lambda x: x + 1) == function_fingerprint(lambda x: x + 1)
    True
    >>> function_fingerprint(lambda x: x + 1) == function_fingerprint(lambda x: x + 2)
    False
    """
    return digest_of(encode_function(function))


def encode_function(function: Callable[..., Any]) -> Encoded:
    """The canonical bytes of a function; see `function_fingerprint`."""
    if not callable(function):
        raise InvalidValueError(f"a fingerprint of a function needs a function, not {type(function)}")
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return encode(OBJECTS, function, name)


def digest_of(function: Encoded) -> str:
    """The fingerprint of an encoded function."""
    return str(blake3(_VERSION + function.code).hexdigest())


def _shared(encoder: Encoder, value: Any) -> bytes | None:
    """The table of types that all adapters share; before it, what a class declares of itself."""
    cls = type(value)
    if is_generator(cls):
        encoder.found.doubtful = True
    if has_member(cls, "__castore_key__"):
        encoder.ordered = False  # `__castore_key__` returns a config, in which order does not count
        return None
    return SHARED(encoder, value)


def _with_class(encoder: Encoder, value: Any) -> bytes | None:
    """A value of a user's class by its state; the class's code counts too."""
    code = _BY_STATE(encoder, value)
    cls = type(value)
    held = getattr(value, "__dict__", None) if issubclass(cls, tuple) and has_member(cls, "_fields") else None
    if code is not None and held:
        code = encoder.tagged("with attributes", code, lasting(encoder, value, dict(held)))
    users_path = issubclass(cls, pathlib.PurePath) and not library_of_class(cls)
    # `_object` has the class's code already.
    if code is None or not (
        users_path or issubclass(cls, enum.Enum | tuple) or has_member(cls, "__dataclass_fields__")
    ):
        return code
    return encoder.tagged("instance", code, encoder.part(cls))


def _dataclass(encoder: Encoder, value: Any) -> bytes | None:
    # As any object: attributes beside the fields count, and attributes that pickle leaves out do not.
    return _BY_CONTENT(encoder, value) if has_member(type(value), "__dataclass_fields__") else None


def _object(encoder: Encoder, value: Any) -> bytes:
    try:
        return encoder.tagged("object", *object_parts(encoder, value))
    except UnencodableError as error:
        library = library_of_class(type(value))
        if library is None:
            error.is_users = True
        elif not error.is_users and " of Python " not in library:
            error.holder = full_name(type(value)), len(error.path)
        raise


# --- NumPy --------------------------------------------------------------------------------------------------


def _array(encoder: Encoder, value: Any) -> bytes | None:
    """An array of any class, a scalar or a dtype."""
    np = sys.modules.get("numpy")
    if np is None or not issubclass(type(value), np.ndarray | np.generic | np.dtype):
        return None
    cls = type(value)
    if value is np.ma.masked:
        return encoder.tagged("masked constant")
    if issubclass(cls, np.ma.MaskedArray):
        mask = None if value.mask is np.ma.nomask else np.ma.getmaskarray(value)
        parts = np.ma.getdata(value), mask, value.fill_value, bool(value.hardmask)
        return encoder.tagged("masked", *parts, *_beside_elements(encoder, value, np.ma.MaskedArray))
    if issubclass(cls, np.dtype) and value.hasobject:
        return encoder.tagged("dtype", *_dtype_with_objects(value))
    if not issubclass(cls, np.ndarray):
        return _plain(encoder, value)
    plain = np.asarray(value)
    if value.dtype.hasobject:
        code = encoder.tagged("objects", value.dtype, value.shape, plain.ravel().tolist())
    else:
        elements = encoder.rules.elements
        own = elements(encoder, plain) if elements is not None else None
        code = own if own is not None else _plain(encoder, plain)
    beside = _beside_elements(encoder, value, np.ndarray)
    return encoder.tagged("array of", code, *beside) if beside else code


def _plain(encoder: Encoder, value: Any) -> bytes:
    code = plain_array(encoder, value)
    return code if code is not None else refuse(value)


def _beside_elements(encoder: Encoder, value: Any, plain: type) -> list[Any]:
    """Parts of an array besides its elements: its class if it is a subclass, and its attributes."""
    np = sys.modules["numpy"]
    cls = type(value)
    if cls in (plain, np.memmap):
        return []
    held = getattr(value, "__dict__", {})
    if plain is not np.ndarray:
        held = {name: item for name, item in held.items() if name not in _MASKED_NOISE}
    return [cls, lasting(encoder, value, dict(held))]


def _dtype_with_objects(dtype: Any) -> Iterator[Any]:
    np = sys.modules["numpy"]
    if dtype.names is not None:
        fields = [(name, *dtype.fields[name]) for name in dtype.names]
        yield from (fields, dtype.itemsize, dtype.isalignedstruct, dtype.type is np.record)
    elif dtype.subdtype is not None:
        yield dtype.subdtype
    else:
        # StringDType: the value for a missing string, and whether other values are converted to strings.
        yield type(dtype).__name__, getattr(dtype, "coerce", None), getattr(dtype, "na_object", ())


_BY_CONTENT = Rules(_array, tokenizer, _object)
_BY_STATE = Rules(own_key, named_value, _dataclass, late_leaf_or_named_tuple, _BY_CONTENT)
#: The rules for any value of a user's. An adapter's rules end with these.
OBJECTS = Rules(_shared, compiled_code, code_rule, _with_class, orders=orders)
