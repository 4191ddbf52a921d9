"""Settings: values of which code reads single parts by name, as `args.max_length` or `CONFIG["max_length"]`.

Only the parts that are read count then: another learning rate in the same `args` changes no key. That is sure
where Python itself finds a part, without code of the user's: an attribute that lies in the object, in a slot
or in the class, an element of a plain dict. All other values count as a whole.

Must never: run a property, a descriptor or a `__getattr__`.
"""

from __future__ import annotations

import argparse
import types
from collections.abc import Set
from typing import Any

from castore.keys.bytecode import Part
from castore.keys.classes import has_member, per_class, registered
from castore.keys.libraries import library_of_class

_MISSING = object()
# Types that find attributes in the usual way.
_AS_PYTHON_DOES = (object, types.SimpleNamespace)
# Code with these names may read any part of any variable, by its text.
_BY_TEXT = {"eval", "exec", "globals", "locals", "vars"}


def reads_by_text(names: Set[str]) -> bool:
    """Whether code with these names may read any part of any variable."""
    return not _BY_TEXT.isdisjoint(names)


def parts_of(value: Any, parts: Set[Part] | None) -> list[tuple[str, Any]] | None:
    """The parts of a value that count for code that reads these, each with its step in paths.

    Args:
        value: the value of a global, or of a variable that a function closes over.
        parts: the parts that the code reads of it, None for all (`castore.keys.bytecode.parts_read`).

    Returns:
        None if the value counts as a whole.
    """
    if not parts:
        return None
    found = []
    for name, is_item in sorted(parts):
        item = _element(value, name) if is_item else _attribute(value, name)
        if item is _MISSING:
            return None
        found.append((f"[{name!r}]" if is_item else f".{name}", item))
    return found


def _element(value: Any, key: str) -> Any:
    return dict.get(value, key, _MISSING) if type(value) is dict else _MISSING


def _attribute(value: Any, name: str) -> Any:
    if name.startswith("__"):
        return _MISSING
    cls = type(value)
    if cls is type:
        return _of_class(value, name)
    if not _is_plain(cls):
        return _MISSING
    member = _member(cls, name)
    if isinstance(member, types.MemberDescriptorType):  # of ``__slots__``
        return getattr(value, name, _MISSING)
    if _is_descriptor(member):
        return _MISSING
    return getattr(value, "__dict__", {}).get(name, member)


def _of_class(cls: type, name: str) -> Any:
    """An attribute that lies in a class of the user's or in its bases."""
    if library_of_class(cls) is not None or hasattr(type, name):
        return _MISSING
    member = _member(cls, name)
    return _MISSING if _is_descriptor(member) else member


def _member(cls: type, name: str) -> Any:
    found = ((base, vars(base)[name]) for base in cls.__mro__ if name in vars(base))
    return next((registered(base, member) for base, member in found), _MISSING)


def _is_descriptor(member: Any) -> bool:
    return has_member(type(member), "__get__") or has_member(type(member), "__set__")


@per_class
def _is_plain(cls: type) -> bool:
    """Whether Python itself finds the attributes of a class's objects, and the class is one for settings or
    the user's.
    """
    if cls not in (types.SimpleNamespace, argparse.Namespace) and library_of_class(cls) is not None:
        return False
    own = {
        name
        for base in cls.__mro__
        if all(base is not usual for usual in _AS_PYTHON_DOES)
        for name in vars(base)
    }
    return not own & {"__getattribute__", "__castore_key__"}
