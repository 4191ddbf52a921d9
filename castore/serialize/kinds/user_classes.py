"""Values of users' classes: named tuples, dataclasses, enums, and tensor subclasses with their attributes.

A value is written as its class's name, ``module:qualified name``, and its fields by name. Loading does not
call the class: neither ``__init__`` nor ``__post_init__`` nor ``__setattr__`` runs, as with a pickle of a
class without pickle methods.

A name to load may be false. A class is looked up among the registered ones, then in the modules that this
process has imported. Must never: import a module, or get an attribute of a module or class in a way that can
run code. The class found must be of the kind that the bytes state, and must have no ``__del__``.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import operator
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

from castore.errors import SerializationError
from castore.serialize.kinds.forms import MisfitError, expect, listed

#: Classes by the names under which users registered them, and names by class.
registered: dict[str, type] = {}
names: dict[type, str] = {}


# --- names --------------------------------------------------------------------------------------------------


def _main() -> tuple[types.ModuleType | None, str]:
    """The program's main module, and the name under which other programs import it."""
    main = sys.modules.get("__main__")
    spec = getattr(main, "__spec__", None)
    # `python -m package.train` runs a module that other processes import by its name.
    return main, "__main__" if spec is None else spec.name


def natural_name(cls: type) -> str:
    """The name of a class that is not registered under another."""
    module = cls.__module__
    # A spawned worker calls the program's main module `__mp_main__`.
    if module in ("__main__", "__mp_main__"):
        module = _main()[1]
    return f"{module}:{cls.__qualname__}"


def _imported(name: str) -> type | None:
    """The class of this name in an imported module, found in `__dict__`s without running code."""
    module_name, _, path = name.partition(":")
    main, main_name = _main()
    module = main if module_name in ("__main__", main_name) else sys.modules.get(module_name)
    if not isinstance(module, types.ModuleType):
        return None
    space: Any = object.__getattribute__(module, "__dict__")
    cls: type | None = None
    for step in path.split("."):
        found = space.get(step)
        if not isinstance(found, type):
            return None
        cls, space = found, type.__getattribute__(found, "__dict__")
    return cls


def name_of(cls: type) -> str | None:
    """The name by which other processes find a class, or None if they cannot."""
    name = names.get(cls)
    if name is None:
        name = natural_name(cls)
        if registered.get(name, _imported(name)) is not cls:
            return None
    return name


def find(name: object, kind: str) -> type:
    """Return the class of a name from stored bytes.

    Raises:
        SerializationError: this process has no such class, or one of another kind.
    """
    text = expect(str, name)
    cls = registered.get(text) or _imported(text)
    if cls is None:
        raise SerializationError(
            f"the value is a {text!r}, which this process does not have; import its module first, "
            f"or name the class with castore.register_type(..., name={text!r})"
        )
    if kind_of(cls) != kind:
        raise SerializationError(
            f"the value is a {text!r} of the kind {kind}, which the class is not now; "
            "delete the entry, or save the value anew"
        )
    return cls


# --- which classes are taken --------------------------------------------------------------------------------


def _kind_of(cls: type) -> str | None:
    if issubclass(cls, enum.Enum):
        return "enum"
    if _attribute(cls, "__del__") is not None:
        return None
    if issubclass(cls, tuple):
        fields = _attribute(cls, "_fields")
        named = type(fields) is tuple and all(type(field) is str for field in fields)
        return "namedtuple" if named and _is_plain(cls, tuple) else None
    if _attribute(cls, "__dataclass_fields__") is not None:
        return "dataclass" if _is_plain(cls, object) else None
    torch = sys.modules.get("torch")
    if torch is not None and issubclass(cls, torch.Tensor):
        return "tensor" if _is_plain_tensor(cls, torch) else None
    return None


#: The kind of a class whose instances can be written by their fields, or None.
kind_of: Callable[[type], str | None] = functools.lru_cache(maxsize=512)(_kind_of)


def _spaces(cls: type) -> Iterator[tuple[type, Any]]:
    """Yield the class and its bases, each with its `__dict__`, without running code of a metaclass."""
    for base in type.__getattribute__(cls, "__mro__"):
        yield base, type.__getattribute__(base, "__dict__")


def _attribute(cls: type, name: str) -> Any:
    return next((space[name] for _, space in _spaces(cls) if name in space), None)


def _is_plain(cls: type, base: type) -> bool:
    """Whether instances consist of their fields only: `base`'s memory layout, and no pickle methods."""
    makers = (
        owner for owner, space in _spaces(cls) if type(space.get("__new__")) is types.BuiltinFunctionType
    )
    hooks = all(_attribute(cls, name) is vars(object)[name] for name in ("__reduce_ex__", "__reduce__"))
    return next(makers) is base and hooks and _attribute(cls, "__getstate__") in _plain_states()


def _plain_states() -> Iterator[Any]:
    """Yield the `__getstate__` values that return nothing but the fields."""
    yield from (None, vars(object).get("__getstate__"))
    # Frozen dataclasses with slots have this one. A process with a dataclass has imported `dataclasses`.
    yield (
        vars(sys.modules["dataclasses"]).get("_dataclass_getstate") if "dataclasses" in sys.modules else None
    )


def _declared(cls: type) -> tuple[str, ...]:
    """The fields of a dataclass."""
    import dataclasses  # imported here because it would add a tenth to the time of `import castore`

    return tuple(field.name for field in dataclasses.fields(cls))


def _is_plain_tensor(cls: type, torch: Any) -> bool:
    """Whether instances are a tensor's memory and a `__dict__`, not a wrapper around other tensors."""
    if (
        cls is torch.Tensor
        or issubclass(cls, torch.nn.Parameter)
        or _attribute(cls, "__tensor_flatten__") is not None
    ):
        return False
    dispatch = _attribute(cls, "__torch_dispatch__")
    return dispatch is _attribute(torch.Tensor, "__torch_dispatch__") and not list(_slots(cls, torch.Tensor))


def _slots(cls: type, base: type = object) -> Iterator[tuple[str, Any]]:
    """Yield name and descriptor of each field in `__slots__`."""
    for owner, space in _spaces(cls):
        if issubclass(base, owner):
            return
        for name, value in space.items():
            if isinstance(value, types.MemberDescriptorType):
                yield name, value


# --- taking apart and putting together ----------------------------------------------------------------------


def take(value: Any, kind: str) -> Any:
    """Return the parts of an instance."""
    return _TAKE[kind](value)


def make(cls: type, kind: str, parts: Any) -> Any:
    """Return an instance made of these parts."""
    return _MAKE[kind](cls, parts)


def _take_enum(value: enum.Enum) -> Any:
    cls = type(value)
    if cls._member_map_.get(value.name or "") is value:
        return value.name
    if isinstance(value, enum.Flag) and type(value.value) is int and not _has_own_missing(cls):
        names = _names_of_flag(value)
        return value.value if names is None else names
    raise MisfitError(f"is {value!r}, which {cls} does not list; keep its .value")


def _names_of_flag(value: Any) -> list[str] | None:
    """The names of the members that make up a flag: their numbers may change. None if it has more bits."""
    bits = {
        name: member.value
        for name, member in type(value)._member_map_.items()
        if member.name == name and member.value.bit_count() == 1 and member.value & value.value
    }
    return [*bits] if sum(bits.values()) == value.value else None


def _member(cls: Any, name: str) -> Any:
    if name not in cls._member_map_:
        raise SerializationError(
            f"the value is the member {name!r} of {natural_name(cls)}, "
            "which the class does not have now; delete the entry, or save the value anew"
        )
    return cls._member_map_[name]


def _make_enum(cls: Any, parts: Any) -> Any:
    if type(parts) is str:
        return _member(cls, parts)
    if type(parts) is list:  # of a flag
        numbers = [expect(int, _member(cls, expect(str, name)).value) for name in parts]
        parts = functools.reduce(operator.or_, numbers, 0)
    number = expect(int, parts)
    if not issubclass(cls, enum.Flag) or _has_own_missing(cls):
        raise ValueError(f"{number} is no member of {cls}")
    return cls(number)


def _has_own_missing(cls: Any) -> bool:
    """Whether a look-up of an unknown value would run code of the class."""
    own = {name for base in cls.__mro__ if base.__module__ != "enum" for name in vars(base)}
    return "_missing_" in own


def _take_namedtuple(value: Any) -> Any:
    fields = dict(zip(type(value)._fields, tuple(value), strict=True))
    return [fields, _rest(value, set())]


def _make_namedtuple(cls: Any, parts: Any) -> Any:
    fields, rest = listed(2, parts)
    _check_fields(cls, cls._fields, fields)
    made = tuple.__new__(cls, fields.values())
    return _with_rest(made, rest)


def _take_dataclass(value: Any) -> Any:
    declared = _declared(type(value))
    held = {**_class_values(type(value), declared), **_held(value)}
    missing = next((name for name in declared if name not in held), None)
    if missing is not None:
        raise MisfitError(
            f"is a {type(value)} without its field {missing!r}; set it, or explain the class with "
            f"castore.register_type({type(value).__name__}, encode=..., decode=...)"
        )
    return [{name: held[name] for name in declared}, _rest(value, set(declared))]


def _class_values(cls: type, declared: tuple[str, ...]) -> dict[str, Any]:
    """The values of fields that the class has: `field(default=..., init=False)` sets none on an instance."""
    found: dict[str, Any] = {}
    for _, space in _spaces(cls):
        for name in declared:
            if name in space and name not in found:
                found[name] = space[name]
    return {name: part for name, part in found.items() if not hasattr(type(part), "__get__")}


def _held(value: Any) -> dict[str, Any]:
    """All instance attributes."""
    held = {}
    for name, slot in _slots(type(value)):
        with contextlib.suppress(AttributeError):  # the slot is not set
            held[name] = slot.__get__(value)
    held.update(getattr(value, "__dict__", {}))
    # `Scan[int](...)` leaves this for type checkers; it is no part of the value.
    held.pop("__orig_class__", None)
    return held


def _rest(value: Any, known: set[str]) -> dict[str, Any] | None:
    """Instance attributes beside the known ones, or None if there are none."""
    return {name: part for name, part in _held(value).items() if name not in known} or None


def _make_dataclass(cls: Any, parts: Any) -> Any:
    fields, rest = listed(2, parts)
    _check_fields(cls, _declared(cls), fields)
    return _with_rest(_with_rest(object.__new__(cls), fields), rest)


def _check_fields(cls: type, declared: tuple[str, ...], fields: Any) -> None:
    written = tuple(expect(dict, fields))
    if written != declared:
        raise SerializationError(
            f"the value is a {natural_name(cls)} with the fields {list(written)}, and the class has "
            f"{list(declared)} now; delete the entry, or save the value anew"
        )


def _with_rest(made: Any, state: Any) -> Any:
    """Set an instance's attributes without calling its methods, and return the instance."""
    if state is None:
        return made
    slots = dict(_slots(type(made)))
    for name, value in expect(dict, state).items():
        if name in slots:
            slots[name].__set__(made, value)
        else:
            object.__getattribute__(made, "__dict__")[expect(str, name)] = value
    return made


def _take_tensor(value: Any) -> Any:
    torch = sys.modules["torch"]
    with torch._C.DisableTorchFunctionSubclass():
        if value.requires_grad:
            raise MisfitError("is a tensor that requires grad; convert it with detach()")
        plain = value.as_subclass(torch.Tensor)
    return [plain, dict(vars(value)) or None]


def _make_tensor(cls: Any, parts: Any) -> Any:
    plain, state = listed(2, parts)
    torch = sys.modules["torch"]
    return _with_rest(expect(torch.Tensor, plain).as_subclass(cls), state)


_TAKE = {
    "enum": _take_enum,
    "namedtuple": _take_namedtuple,
    "dataclass": _take_dataclass,
    "tensor": _take_tensor,
}
_MAKE = {
    "enum": _make_enum,
    "namedtuple": _make_namedtuple,
    "dataclass": _make_dataclass,
    "tensor": _make_tensor,
}
#: The kinds of this module.
KINDS = frozenset(_TAKE)


def fields_of(parts: Any, kind: str) -> Iterator[tuple[str, Any]]:
    """Yield each part as the user knows it: the path from the value, written as code, and the part."""
    if kind == "enum":
        yield "", parts
        return
    fields, rest = parts
    if kind == "tensor":
        yield "", fields
        fields = {}
    for name, part in {**fields, **(rest or {})}.items():
        yield f".{name}", part
