"""Finds the kind of a value, and holds the types that users register.

The order of search is registered types, fixed kinds, users' classes. The kind of a class is remembered, so
further values of the class cost one look-up.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

from castore.errors import InvalidValueError, SerializationError
from castore.serialize.kinds import images, user_classes
from castore.serialize.kinds.arrow_tables import TABLES
from castore.serialize.kinds.forms import Form, Kind, whole
from castore.serialize.kinds.numeric import NUMERIC
from castore.serialize.kinds.pandas_arrays import PANDAS_ARRAYS
from castore.serialize.kinds.pandas_frames import PANDAS_FRAMES
from castore.serialize.kinds.pandas_scalars import PANDAS_SCALARS
from castore.serialize.kinds.scipy_sparse import SCIPY
from castore.serialize.kinds.standard_library import STANDARD

T = TypeVar("T")

_OWN = "registered"
#: Kinds whose class was not imported at the last search.
_waiting: list[Kind] = [
    *STANDARD, *NUMERIC, *TABLES, *PANDAS_SCALARS, *PANDAS_ARRAYS, *PANDAS_FRAMES, *SCIPY,
]  # fmt: skip
_FIXED: dict[str, Kind] = {kind.name: kind for kind in _waiting}
_KNOWN = {*_FIXED, *user_classes.KINDS, images.KIND}
_by_class: dict[type, Kind] = {}
#: Serializers store these as they are, without `take_apart`.
_PLAIN = (type(None), bool, int, float, str, bytes, bytearray, list, tuple, dict)


class _Explained(NamedTuple):
    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]


_explained: dict[type, _Explained] = {}


def register_type(
    cls: type[T],
    *,
    name: str | None = None,
    encode: Callable[[T], Any] | None = None,
    decode: Callable[[Any], T] | None = None,
) -> type[T]:
    """Let castore store values of a class: in samples of datasets, with `Store.save`, and in the tree cache.

    The registration holds for exactly this class, not for subclasses. Stored bytes name the class, and only a
    process that has registered it can load them. So call this in the module that defines the class or the
    dataset: then workers and later runs register it too.

    Args:
        cls: the class.
        name: name of the class in stored bytes. Default: its module and qualified name. Give a name if the
            class is defined in a function, or may move to another module.
        encode: returns the parts of a value: plain values, arrays, tensors, containers of these, values of
            other known types. Default: the fields, for named tuples, dataclasses, enums and tensor
            subclasses.
        decode: returns a value made of such parts. Give both ``encode`` and ``decode``, or neither.

    Returns:
        The class.

    Raises:
        InvalidValueError: ``cls`` is no class; castore stores it already; another class has the name; only
            one of ``encode`` and ``decode`` is given; or the class needs both.

    >>> class Box:
    ...     def __init__(self, corners):
    ...         self.corners = corners
    >>> _ = register_type(Box, name="Box", encode=lambda box: box.corners, decode=Box)
    >>> put_together(*take_apart(Box([1, 2]))).corners
    [1, 2]
    """
    if not isinstance(cls, type):
        raise InvalidValueError(f"{cls!r} is no class; register a value's type(...)")
    if cls in _PLAIN or _fixed(cls) is not None:
        raise InvalidValueError(f"{cls} is kept as it is; register classes of your own")
    if (encode is None) is not (decode is None):
        raise InvalidValueError(f"{cls} needs encode and decode, or neither")
    if encode is None and user_classes.kind_of(cls) is None:
        raise InvalidValueError(
            f"{cls} is no named tuple, dataclass, enum or tensor subclass whose fields are all there is; "
            "give encode= and decode="
        )
    chosen = user_classes.natural_name(cls) if name is None else name
    there = user_classes.registered.get(chosen)
    # A reloaded module, or a notebook cell that runs again, defines the class again.
    if (
        there is not None
        and there is not cls
        and user_classes.natural_name(there) != user_classes.natural_name(cls)
    ):
        raise InvalidValueError(f"the name {chosen!r} is {there}'s; give {cls} another")
    user_classes.registered[chosen] = cls
    user_classes.names[cls] = chosen
    _explained.pop(cls, None)
    if encode is not None and decode is not None:
        _explained[cls] = _Explained(encode, decode)
    return cls


def take_apart(value: Any) -> Form | None:
    """Return the form of a value, or None if its type is unknown.

    Raises:
        MisfitError: the type is known, but this value cannot be stored.
    """
    cls = type(value)
    own = _explained.get(cls)
    if own is not None:
        return Form(_OWN, user_classes.names[cls], own.encode(value))
    fixed = _fixed(cls)
    if fixed is not None:
        parts = fixed.take(value)
        return parts if type(parts) is Form else Form(fixed.name, None, parts)
    if images.is_image(value):
        return Form(images.KIND, None, images.take(value))
    kind = user_classes.kind_of(cls)
    name = None if kind is None else user_classes.name_of(cls)
    return None if kind is None or name is None else Form(kind, name, user_classes.take(value, kind))


def fields_of(form: Form) -> Iterator[tuple[str, Any]]:
    """Yield each part of a form: the path from the value, as a user would write it, and the part."""
    if form.kind in user_classes.KINDS:
        return user_classes.fields_of(form.parts, form.kind)
    fixed = _FIXED.get(form.kind)
    return whole(form.parts) if fixed is None else fixed.fields(form.parts)


def is_registered(cls: type) -> bool:
    """Whether this class is registered with ``encode`` and ``decode``."""
    return cls in _explained


def is_found_by_name(form: Form) -> bool:
    """Whether the form's class is a user class that is not registered, and found in an imported module."""
    return form.kind in user_classes.KINDS and form.detail not in user_classes.registered


def _fixed(cls: type) -> Kind | None:
    global _waiting
    found = _by_class.get(cls)
    if found is not None:
        return found
    waiting = []
    for kind in _waiting:
        loaded = kind.loaded()
        if loaded is None:
            waiting.append(kind)
        else:
            _by_class[loaded] = kind
    # Another thread may have found more meanwhile. They are searched again, which costs one look-up each.
    _waiting = waiting
    return _by_class.get(cls)


def put_together(kind: Any, detail: Any, parts: Any) -> Any:
    """Return the value of a form that came from bytes.

    Raises:
        SerializationError: this process does not have the value's type, or its ``decode`` failed.
        ValueError: the form is invalid.
    """
    if type(kind) is not str:
        raise ValueError("a kind is no text")
    if kind == _OWN:
        return _decoded(detail, parts)
    try:
        if kind in user_classes.KINDS:
            return user_classes.make(user_classes.find(detail, kind), kind, parts)
        return images.make(parts) if kind == images.KIND else _FIXED[kind].make(parts)
    except SerializationError:
        raise
    except (TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError) as error:
        why = "it is of a newer castore" if kind not in _KNOWN else error
        raise ValueError(f"this castore cannot make a {kind[:50]!r}: {why}") from error


def _decoded(name: Any, parts: Any) -> Any:
    cls = user_classes.registered.get(name) if type(name) is str else None
    own = None if cls is None else _explained.get(cls)
    if own is None:
        raise SerializationError(
            f"the value is a {name!r}, which is not registered in this process; "
            f"import the module that calls castore.register_type for it first"
        )
    try:
        return own.decode(parts)
    except Exception as error:
        raise SerializationError(f"decode of {cls} failed: {type(error).__name__}: {error}") from error


# --- advice -------------------------------------------------------------------------------------------------


def way_out(value: object) -> str:
    """Remedy for a value that has no form, as the end of an error message."""
    cls = type(value)
    if user_classes.kind_of(cls) is not None:
        return (
            "define its class at the top of a module, "
            f"or name it with castore.register_type({cls.__name__}, name=...)"
        )
    explain = f"explain it with castore.register_type({cls.__name__}, encode=..., decode=...)"
    plain = next((text for base, text in _plainer() if isinstance(value, base)), None)
    return f"convert it with {plain}, or {explain}" if plain else explain


def _plainer() -> Iterator[tuple[type, str]]:
    """Yield classes, each with an expression that makes a storable value of a subclass's instance."""
    yield from _REMEDIES
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None:
        yield numpy.ndarray, "numpy.asarray(...)"
        yield numpy.longdouble, "astype('float64')"
        yield numpy.clongdouble, "astype('complex128')"
        yield numpy.generic, "item()"
    if torch is not None:
        yield torch.nn.Parameter, "detach()"
        yield torch.nn.Module, "state_dict()"
    for module, name, text in _LIBRARIES:
        cls = getattr(sys.modules.get(module), name, None)
        if cls is not None:
            yield cls, text
    yield Collection, "list(...)"


_LIBRARIES = [
    ("torch.nested._internal.nested_tensor", "NestedTensor", "unbind()"),
    ("pandas", "DataFrame", "pandas.DataFrame(...)"),
    ("pandas", "Series", "pandas.Series(...)"),
    ("pandas", "Index", "pandas.Index(...)"),
    ("pandas.api.extensions", "ExtensionArray", "to_numpy()"),
    ("polars", "LazyFrame", "collect().to_arrow()"),
    ("polars", "DataFrame", "to_arrow()"),
    ("polars", "Series", "to_frame().to_arrow()"),
]

_REMEDIES: list[tuple[type, str]] = [
    (dict, "dict(...)"),
    (Mapping, "dict(...)"),
    (list, "list(...)"),
    (tuple, "tuple(...)"),
    (set, "set(...)"),
    (frozenset, "frozenset(...)"),
    (str, "str(...)"),
    (bytes, "bytes(...)"),
    (memoryview, "bytes(...)"),
    (int, "int(...)"),
    (float, "float(...)"),
    (os.PathLike, "os.fspath(...)"),
    (io.BytesIO, "getvalue()"),
    (io.StringIO, "getvalue()"),
    (Iterator, "list(...)"),
]
