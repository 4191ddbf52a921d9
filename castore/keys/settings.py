"""Settings: values of which code reads single parts by name, as `args.max_length` or `CONFIG["max_length"]`.

Only the parts that are read count then, so another learning rate in the same `args` changes no key. A part
counts alone where Python itself finds it, without code of the user's: an attribute that lies in the object,
in a slot or in the class, an element of a plain dict. So does a value in OmegaConf's configs that depends on
nothing else. All other values count as a whole.

Must never: run a property, a descriptor or a `__getattr__`.
"""

from __future__ import annotations

import argparse
import copyreg
import functools
import types
from collections.abc import Iterator, Set
from typing import Any, NamedTuple

from castore.keys import configs
from castore.keys.bytecode import Part, Parts, codes, outer_reads, own_assigned
from castore.keys.classes import registered
from castore.keys.libraries import library_of_class
from castore.keys.looked_up import takes_queries

_MISSING = configs.MISSING
# Types that find attributes in the usual way, and are pickled by these.
_AS_PYTHON_DOES = (object, tuple, types.SimpleNamespace)
# Modules of classes whose objects are pickled by their fields, and of functions that libraries put into the
# user's classes for that: attrs and dataclasses with slots, and named tuples.
_OF_FIELDS = {"pydantic.main", "pydantic_settings.main", "msgspec", "msgspec._core"}
_GENERATED_IN = {"attr._make", "collections", "dataclasses"}
# Members of a class that find its objects' attributes in another way, or say what of its objects counts.
_OWN_WAYS = {
    "__getattribute__", "__getattr__", "__castore_key__", "__getstate__", "__reduce__", "__reduce_ex__",
    "__getnewargs__", "__getnewargs_ex__",
}  # fmt: skip
# Methods that make an object or a class.
_MAKING = {"__init__", "__new__", "__post_init__", "__init_subclass__"}
_NamedField: Any = type(Part.name)
#: Builtins by which code reads or writes any part of any variable, by its text.
BY_TEXT = {"eval", "exec", "globals", "locals", "vars", "setattr", "delattr", "__import__"}
# Attributes by which it does.
_BY_ATTRIBUTE = {
    "__globals__", "f_globals", "f_locals", "_getframe", "currentframe", "modules", "__setattr__",
    "__delattr__", "__dict__", "__subclasses__", "__closure__", "cell_contents", "getclosurevars",
    "import_module", "resolve_name",
}  # fmt: skip


@functools.lru_cache(maxsize=4096)
def finds_by_text(code: types.CodeType) -> bool:
    """Whether code may read or write any part of any variable, also of those of other functions."""
    names = {name for inner in codes(code) for name in inner.co_names}
    loaded = {name for inner in codes(code) for kind, name in outer_reads(inner) if kind == "global"}
    named = names if "builtins" in names else loaded
    return not (_BY_ATTRIBUTE.isdisjoint(names) and BY_TEXT.isdisjoint(named))


def reads_parts_unseen(code: types.CodeType) -> bool:
    """Whether code may read parts of its own variables that no instruction names."""
    return finds_by_text(code) or takes_queries(code)


class Alone(NamedTuple):
    """The parts that count of a value.

    Attributes:
        parts: each with its steps in paths.
        around: the value, and those on the way to the parts.
    """

    parts: list[tuple[str, Any]]
    around: list[Any]


def parts_of(value: Any, parts: Set[Parts] | None, whole: Set[str]) -> Alone | None:
    """The parts of a value that count for code that reads these.

    Args:
        value: the value of a global, or of a variable that a function closes over.
        parts: the parts that the code reads of it, None for all (`castore.keys.bytecode.parts_read`).
        whole: names of parts that other code assigns: an object that has one counts as a whole.

    Returns:
        None if the value counts as a whole.
    """
    if not parts or () in parts:
        return None
    behind: dict[Part, set[Parts]] = {}
    for first, *rest in parts:
        behind.setdefault(first, set()).add(tuple(rest))
    found = Alone([], [value])
    for part, inner in sorted(behind.items()):
        name, is_item = part
        item = _MISSING if name in whole else _element(value, name) if is_item else _attribute(value, name)
        if item is _MISSING:
            return None
        step = f"[{name!r}]" if is_item else f".{name}"
        within = parts_of(item, inner, whole)
        if within is None:
            if configs.is_config(item) or configs.is_list(item):
                return None
            found.parts.append((step, item))
        else:
            found.parts.extend((step + more, one) for more, one in within.parts)
            found.around.extend(within.around)
    return found


def names_in(parts: Set[Parts]) -> Iterator[str]:
    """The names of all steps."""
    return (part.name for taken in parts for part in taken)


def _element(value: Any, key: str) -> Any:
    if configs.is_config(value):
        return configs.element(value, key)
    return dict.get(value, key, _MISSING) if type(value) is dict else _MISSING


def _attribute(value: Any, name: str) -> Any:
    if name.startswith("__"):
        return _MISSING
    cls = type(value)
    if cls is type:
        return _of_class(value, name)
    if configs.is_config(value):
        return configs.attribute(value, name)
    if not _is_plain(cls):
        return _MISSING
    member = _member(cls, name)
    if name in _assigned_by_methods(cls):
        return _MISSING
    if isinstance(member, (types.MemberDescriptorType, _NamedField)):  # of ``__slots__``, of a named tuple
        try:
            return member.__get__(value)
        except AttributeError:
            return _MISSING
    if _is_descriptor(member):
        return _MISSING
    return getattr(value, "__dict__", {}).get(name, member)


def _of_class(cls: type, name: str) -> Any:
    """An attribute that lies in a class of the user's or in its bases."""
    if library_of_class(cls) is not None or hasattr(type, name):
        return _MISSING
    member = _member(cls, name)
    return _MISSING if _is_descriptor(member) or name in _assigned_by_methods(cls) else member


def _assigned_by_methods(cls: type) -> set[str]:
    """Names that methods of a class assign in their own object or class, other than to make it."""
    members = (
        getattr(member, "__func__", member)
        for base in cls.__mro__
        if base.__module__ not in _OF_FIELDS
        for name, member in vars(base).items()
        if name not in _MAKING
    )
    codes_of = (member.__code__ for member in members if isinstance(member, types.FunctionType))
    return {name for code in codes_of for name in own_assigned(code)}


def _member(cls: type, name: str) -> Any:
    found = ((base, vars(base)[name]) for base in cls.__mro__ if name in vars(base))
    return next((registered(base, member) for base, member in found), _MISSING)


def _is_descriptor(member: Any) -> bool:
    return any(name in vars(base) for base in type(member).__mro__ for name in ("__get__", "__set__"))


def _is_plain(cls: type) -> bool:
    """Whether Python itself finds the attributes of a class's objects, and the class is one for settings or
    the user's. Somebody may add members to a class at any time.
    """
    if cls not in (types.SimpleNamespace, argparse.Namespace) and library_of_class(cls) is not None:
        return False
    bases = [
        base
        for base in cls.__mro__
        if base.__module__ not in _OF_FIELDS and all(base is not usual for usual in _AS_PYTHON_DOES)
    ]
    return cls not in copyreg.dispatch_table and not any(
        _has_own_ways(base)
        or type(vars(base).get("__dict__")) not in (types.GetSetDescriptorType, type(None))
        for base in bases
    )


def _has_own_ways(base: type) -> bool:
    ways = ((name, vars(base)[name]) for name in _OWN_WAYS & vars(base).keys())
    return any(
        name == "__getattr__" or getattr(way, "__module__", None) not in _GENERATED_IN for name, way in ways
    )
