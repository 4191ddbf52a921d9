"""Fingerprints of functions: what a function computes, followed through the functions of the user's own modules.

A fingerprint covers the code (instructions, constants, names), defaults, closure values, and every global that the
code refers to: functions and classes of user modules by their own code, all else of the standard library and of
installed packages by name and version, values as `castore.keys` hashes them. Files, line numbers, docstrings and
annotations do not count. What has no stable hash is an UnhashableError that names it, never a guess.

Assumes that user code is what lies outside the standard library and site-packages. Cannot see what is reached
through strings, `getattr(module, "name")` or `eval`. Bytecode differs between minor versions of Python, and so do
fingerprints. The idea of following imported functions is Hugging Face datasets' issue 3297.
"""

from __future__ import annotations

import builtins
import contextlib
import dataclasses
import enum
import functools
import importlib
import importlib.util
import logging
import re
import threading
import types
import typing
from collections.abc import Callable, Iterator, Set
from typing import Any

from blake3 import blake3

from castore.bytecode import BODY_NOISE, codes, instructions, outer_reads, steps
from castore.errors import InvalidValueError
from castore.keys import Encoder, UnencodableError, refuse
from castore.libraries import library_object, library_of

_VERSION = b"castore.function.1"
_CLASS_NOISE = {
    *BODY_NOISE, "__annotations__", "__annotate__", "__annotate_func__", "__annotations_cache__", "__dict__",
    "__module__", "__weakref__", "_abc_impl", "__abstractmethods__", "__dataclass_fields__", "__dataclass_params__", "__match_args__",
}  # fmt: skip
# What namedtuple writes; the fields say all about it.
_TUPLE_NOISE = {
    "_make", "_replace", "_asdict", "__new__", "__getnewargs__", "__repr__", "__replace__", "__slots__",
}  # fmt: skip
# Their state cannot change what a function returns.
_HARMLESS = (logging.Logger, logging.LoggerAdapter, type(threading.Lock()), type(threading.RLock()))
_ALIASES = (type(typing.List[int]), type(typing.Union[int, str]))  # noqa: UP006, UP007 - the types of old spellings
_TYPING = (types.GenericAlias, types.UnionType, typing.TypeVar, *_ALIASES)
_WRAPPERS = (staticmethod, classmethod, type(functools.lru_cache(len)))
_DESCRIPTORS = (
    types.MethodDescriptorType, types.WrapperDescriptorType, types.MemberDescriptorType, types.GetSetDescriptorType,
)  # fmt: skip
_MISSING = object()


def function_fingerprint(function: Callable[..., Any]) -> str:
    """64 hexadecimal digits that change when what `function` computes may have changed.

    Args:
        function: a function, a lambda, a partial, a method; functions written in C count by name and version.

    Raises:
        UnhashableError: it refers to something without a stable hash; the message has the path to it.
        InvalidValueError: it is not callable.

    >>> function_fingerprint(lambda x: x + 1) == function_fingerprint(lambda x: x + 1)
    True
    >>> function_fingerprint(lambda x: x + 1) == function_fingerprint(lambda x: x + 2)
    False
    """
    if not callable(function):
        raise InvalidValueError(f"a fingerprint of a function needs a function, not {type(function)}")
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return str(blake3(_VERSION + FunctionEncoder().encode(function, name)).hexdigest())


class FunctionEncoder(Encoder):
    """An Encoder that also takes functions, classes and modules."""

    def __init__(self) -> None:
        super().__init__()
        # Functions call one another in circles: the second time, a number stands for what was met before.
        self._met: dict[int, tuple[int, object]] = {}

    def other(self, value: Any) -> bytes:
        """The canonical bytes of a function and its kin, numbered by first visit."""
        library = library_object(value)
        if library:
            return self.tagged("library", library)
        encode = next((encode for kind, encode in _KINDS.items() if isinstance(value, kind)), None)
        if encode is not None:
            if isinstance(value, types.FunctionType | type):
                self._met[id(value)] = (len(self._met), value)
            return self.tagged(type(value).__name__, *encode(self, value))
        code = super().other(value)
        if isinstance(value, enum.Enum | tuple) or dataclasses.is_dataclass(value):
            # Values with a class of the user's: its methods count too.
            return self.tagged("instance", code, self.part(type(value)))
        return code

    def part(self, value: Any, step: str = "") -> bytes:
        """As in Encoder, but a function or a class that is met again is no cycle."""
        met = self._met.get(id(value))
        return super().part(value, step) if met is None else self.tagged("met", met[0])

    def member(self, item: Any) -> bytes:
        """As in Encoder, but each with numbers of its own, since the order of a set is by chance."""
        alone = type(self)()
        alone._open = self._open
        return alone.part(item, "{...}")

    def tagged(self, tag: str, *parts: Any) -> bytes:
        """A tag and parts, as bytes."""
        return self.part((tag, *parts))

    def function(self, function: types.FunctionType) -> Iterator[Any]:
        """What a function is made of."""
        yield function.__qualname__
        library = library_of(function.__globals__.get("__name__"))
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        if library:
            # Lambdas of one module share their name, so the instructions count here too; globals do not.
            yield library, [[*instructions(inner)] for inner in codes(function.__code__)]
            yield from (self._value(_cell(cell), f" -> closure {name!r}") for name, cell in cells.items())
        else:
            yield from self._body(function.__code__, function.__globals__, cells)
        yield self._value(function.__defaults__, " -> defaults")
        yield self._value(function.__kwdefaults__, " -> defaults")
        # What functools.wraps and users hang on a function, a wrapped function among it.
        yield self._value(dict(function.__dict__), " -> attribute ")

    def _body(self, code: types.CodeType, scope: dict[str, Any], cells: dict[str, Any]) -> Iterator[Any]:
        instructions, names, reads = _content(code)
        yield instructions
        for kind, name in reads:
            if kind == "closure" and name in cells:
                yield name, self._reference(_cell(cells[name]), names, f" -> closure {name!r}")
            elif kind == "global" and name in scope:
                yield name, self._reference(scope[name], names, f" -> global {name!r}")
            elif kind == "global":
                yield name, "builtin" if hasattr(builtins, name) else "unbound"
        for name in sorted({name for inner in codes(code) for name in _imports(inner, scope)}):
            yield name, self._reference(_imported(name), names, f" -> import {name!r}")

    def _reference(self, value: Any, names: Set[str], step: str) -> bytes:
        """A value that code refers to; of a user module, all attributes that the code has a name for."""
        if not isinstance(value, types.ModuleType) or library_of(value.__name__):
            return self._value(value, step)
        if id(value) in self._open:  # modules that import one another
            return self.tagged("module", value.__name__)
        self._open.add(id(value))
        try:
            found = sorted(name for name in names if hasattr(value, name) and not _is_magic(name))
            parts = [(name, self._reference(getattr(value, name), names, f".{name}")) for name in found]
            return self.tagged("module", *parts)
        except UnencodableError as error:
            error.path.append(step)
            raise
        finally:
            self._open.discard(id(value))

    def _value(self, value: Any, step: str) -> bytes:
        return self.tagged("unset") if value is _MISSING else self.part(value, step)

    def class_(self, cls: type) -> Iterator[Any]:
        """What a class is made of: its bases and all that its body defines."""
        yield cls.__qualname__
        library = library_of(cls.__module__)
        if library:
            yield library
            return
        yield from (self._value(base, f" -> base {base.__name__!r}") for base in cls.__bases__)
        noise = set(_CLASS_NOISE)
        if dataclasses.is_dataclass(cls):
            noise |= {name for name, value in vars(cls).items() if _is_generated(value)}
            for field in dataclasses.fields(cls):
                chosen = [v for v in (field.default, field.default_factory) if v is not dataclasses.MISSING]
                yield field.name, field.init, self._value(chosen, f".{field.name}")
        if issubclass(cls, enum.Enum):
            yield [(name, self._value(member.value, f".{name}")) for name, member in cls.__members__.items()]
            noise |= {name for name, value in vars(cls).items() if not _is_users_method(value)}
        if issubclass(cls, tuple) and "_fields" in vars(cls):
            noise |= {*cls._fields, *_TUPLE_NOISE}  # type: ignore[attr-defined]
        for name, value in sorted(vars(cls).items()):
            if name not in noise:
                yield name, self._value(value, f".{name}")


@functools.lru_cache(maxsize=4096)
def _content(code: types.CodeType) -> tuple[bytes, frozenset[str], list[tuple[str, str]]]:
    """The encoded instructions of code and what is inside it, every name in it, and what it reads from around it.

    Attributes of a user module that are among the names will be followed.
    """
    inside = list(codes(code))
    rows = [[part for row in instructions(inner) for part in row] for inner in inside]
    names = frozenset(name for inner in inside for name in inner.co_names)
    reads = {read for inner in inside for read in outer_reads(inner)}
    return Encoder().part(rows), names, sorted(reads)


def _imports(code: types.CodeType, scope: dict[str, Any]) -> Iterator[str]:
    """Full names of the modules that code imports while it runs."""
    level: Any = None
    wanted: Any = None
    for opname, argument in steps(code):
        if opname == "IMPORT_NAME":
            name = "." * (level or 0) + argument
            if level:
                package = scope.get("__package__") or str(scope.get("__name__", "")).rpartition(".")[0]
                with contextlib.suppress(ImportError):
                    name = importlib.util.resolve_name(name, package)
            yield name
            # `import a.b` binds a; `from a import b` may mean the module a.b, which nobody has imported yet.
            yield from (name.partition(".")[0],) if not wanted and not level else ()
            yield from (f"{name}.{item}" for item in wanted or () if _is_module(name, item))
        level, wanted = wanted, argument


def _is_module(package: str, name: str) -> bool:
    if package.startswith(".") or library_of(package):
        return False
    try:
        return importlib.util.find_spec(f"{package}.{name}") is not None
    except ImportError:
        return False


def _imported(name: str) -> Any:
    """The module that code would import, but of a library only its name and version."""
    library = library_of(name)
    if library or name.startswith("."):
        return library or f"no module {name}"
    try:
        return importlib.import_module(name)
    except ImportError:
        return f"no module {name}"
    except Exception as error:  # whatever the user's module does when it runs
        raise UnencodableError(f"cannot import {name!r}, which the function imports: {error}") from error


def _cell(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _MISSING


def _is_magic(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def _is_users_method(value: object) -> bool:
    value = getattr(value, "__wrapped__", getattr(value, "fget", value))
    return isinstance(value, types.FunctionType) and not library_of(value.__globals__.get("__name__"))


def _is_generated(value: object) -> bool:
    """Whether dataclasses wrote this method of one of its classes: the fields say all about it."""
    return getattr(getattr(value, "__code__", None), "co_filename", None) == "<string>"


def _builtin(encoder: FunctionEncoder, value: Any) -> Iterator[Any]:
    owner = value.__self__
    module = owner.__name__ if isinstance(owner, types.ModuleType) else None
    library = library_of(module)
    if module and not library:
        refuse(value)
    yield value.__qualname__
    yield library or encoder.part(owner, ".__self__")


def _module(encoder: FunctionEncoder, value: types.ModuleType) -> Iterator[Any]:
    library = library_of(value.__name__)
    if not library:
        raise UnencodableError(
            f"cannot hash the user module {value.__name__!r} as a value; pass what is used of it"
        )
    yield library


def _partial(encoder: FunctionEncoder, value: functools.partial[Any]) -> Iterator[Any]:
    yield encoder.part(value.func, ".func")
    yield encoder.part(value.args, ".args")
    yield encoder.part(value.keywords, ".keywords")


def _method(encoder: FunctionEncoder, value: types.MethodType) -> Iterator[Any]:
    yield encoder.part(value.__func__)
    yield encoder.part(value.__self__, ".__self__")


def _property(encoder: FunctionEncoder, value: property) -> Iterator[Any]:
    yield from (encoder.part(function) for function in (value.fget, value.fset, value.fdel))


# The first kind that fits counts; aliases like list[int] pass for types in Python 3.10.
_KINDS: dict[Any, Callable[[FunctionEncoder, Any], Iterator[Any]]] = {
    _TYPING: lambda _, value: iter((repr(value),)),
    types.FunctionType: lambda encoder, value: encoder.function(value),
    type: lambda encoder, value: encoder.class_(value),
    types.ModuleType: _module,
    types.BuiltinFunctionType: _builtin,
    types.MethodType: _method,
    functools.partial: _partial,
    _WRAPPERS: lambda encoder, value: iter((encoder.part(value.__wrapped__),)),
    functools.cached_property: lambda encoder, value: iter((encoder.part(value.func),)),
    property: _property,
    _DESCRIPTORS: lambda encoder, value: iter((value.__name__, encoder.part(value.__objclass__))),
    re.Pattern: lambda _, value: iter((value.pattern, value.flags)),
    _HARMLESS: lambda _, value: iter(()),
}
