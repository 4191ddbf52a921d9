"""Fingerprints of functions: their computation, followed through the functions of the user's own modules.

A fingerprint covers the code (instructions, constants, names), the defaults, the closure values, and every
global that the code refers to. Functions and classes of user modules count by their own code; those of the
standard library and of installed packages by name and version; values as `castore.keys.encoder` hashes them.
Of a user module the attributes count that the code names. All of them count where the code hands the module
on, for others may read any of them. Files and line numbers do not count. Docstrings and the annotations of
functions count where any of the code reads docstrings or annotations. A value without a stable hash is an
UnhashableError that names it, never a guess.

Assumes that code outside the standard library and site-packages is the user's. Cannot see references through
strings, `importlib.import_module("name")` or `eval`. Bytecode differs between minor versions of Python, and
so do fingerprints. The idea of following imported functions is Hugging Face datasets' issue 3297.
"""

from __future__ import annotations

import builtins
import contextlib
import dataclasses
import enum
import functools
import importlib
import importlib.util
import inspect
import logging
import re
import sys
import threading
import types
import typing
from collections.abc import Iterator, Mapping, Set
from typing import Any

from castore.keys import beside_code
from castore.keys.bytecode import (
    BODY_NOISE,
    Import,
    Outer,
    Parts,
    codes,
    handed_on,
    imports,
    instructions,
    outer_reads,
    parts_assigned,
    parts_read,
    steps,
)
from castore.keys.classes import full_name, has_member, per_class, registered
from castore.keys.compiled import compiled_digest
from castore.keys.declared import declared
from castore.keys.encoder import CONFIGS, AnyOrder, Encoder, UnencodableError, refuse
from castore.keys.libraries import library_object, library_of, library_of_class
from castore.keys.looked_up import looked_up
from castore.keys.registry import Table
from castore.keys.settings import BY_TEXT, finds_by_text, names_in, parts_of, reads_parts_unseen
from castore.keys.torch_modules import EVAL, IN_ORDER, calls_eval, is_compiled, lists_parts

_CLASS_NOISE = {
    *BODY_NOISE, "__annotations__", "__annotate__", "__annotate_func__", "__annotations_cache__", "__dict__",
    "__module__", "__weakref__", "_abc_impl", "__abstractmethods__", "__dataclass_fields__",
    "__dataclass_params__", "__msgspec_cache__",
}  # fmt: skip
# Names that namedtuple writes; the fields describe the class fully.
_TUPLE_NOISE = {
    "_make", "_replace", "_asdict", "__new__", "__getnewargs__", "__repr__", "__replace__", "__slots__",
    "__match_args__",
}  # fmt: skip
# The state of these objects cannot change the result of a function.
_HARMLESS = (logging.Logger, logging.LoggerAdapter, type(threading.Lock()), type(threading.RLock()))
# Builtins by which code reads or writes any part of any variable, under whatever name.
_BY_TEXT = {getattr(builtins, name) for name in BY_TEXT}
_LRU = type(functools.lru_cache(len))
_WRAPPERS = (staticmethod, classmethod, _LRU)
_DESCRIPTORS = (
    types.MethodDescriptorType, types.WrapperDescriptorType, types.MemberDescriptorType,
    types.GetSetDescriptorType,
)  # fmt: skip
_MISSING = object()
# Attributes that Python sets in modules. A module's file may lie anywhere.
_OF_IMPORTS = {
    "__name__", "__package__", "__loader__", "__spec__", "__file__", "__path__", "__cached__", "__builtins__",
    "__annotations__", "__annotate__", "__conditional_annotations__", "__warningregistry__",
}  # fmt: skip
# Attributes of compiled classes that count by themselves: somebody has set them since.
_BESIDE_COMPILED = {types.FunctionType, bool, int, float, str, bytes}
# The options of dataclasses and their fields, as they usually are. Generated methods are left out, so nothing
# else shows whether they are there.
_CLASS_OPTIONS = {
    "init": True, "repr": True, "eq": True, "order": False, "unsafe_hash": False, "frozen": False,
}  # fmt: skip
_FIELD_OPTIONS: dict[str, Any] = {
    "repr": True, "hash": None, "compare": True, "kw_only": False, "metadata": types.MappingProxyType({}),
}  # fmt: skip
# Not LOAD_NAME: the body of a class with annotations has that, for `__annotations__`.
_READS = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_GLOBAL", "LOAD_DEREF", "IMPORT_FROM")
# Packages whose objects hold the user's values, so that the order of dicts in them may be the user's.
_FOR_DATA = {__name__.partition(".")[0], "networkx", "numpy", "omegaconf", "pandas", "xarray"}
# The prefix of attributes that torch.compile sets on a function and functools.wraps copies; one is an
# address.
_COMPILER = "_torchdynamo_"


def orders(value: Any, around: bool) -> bool:
    """Whether the order of dicts counts in a value: it counts in the user's values, not in a library's.

    Objects of Python and castore, of packages for data, and mappings of any package hold the user's values:
    in them the order counts as it does around them.
    """
    cls = type(value)
    if issubclass(cls, types.FunctionType):
        library = library_of(value.__globals__.get("__name__"))
    else:
        library = library_of_class(value if issubclass(cls, type) else cls)
    if library is None:
        return True
    return around and (
        " of Python " in library or re.split(r"[ .]", library, maxsplit=1)[0] in _FOR_DATA or _is_mapping(cls)
    )


@per_class
def _is_mapping(cls: type) -> bool:
    return any(base is dict or base is Mapping for base in cls.__mro__)


def code_rule(encoder: Encoder, value: Any) -> bytes | None:
    """The rule for functions, classes and modules; each is numbered at its first visit."""
    inner = uncompiled(value)
    if inner is not value:
        return encoder.part(inner)
    library = library_object(value)
    if library:
        if isinstance(value, types.BuiltinFunctionType) and value in _BY_TEXT:
            encoder.found.finds_by_text = True
        return encoder.tagged("library", library)
    cls = type(value)
    count = _CODE.of(cls)
    if count is None:
        return None
    if issubclass(cls, types.FunctionType | type):
        encoder.number(value)
    code = encoder.tagged(cls.__name__, *count(encoder, value))
    if issubclass(cls, type) or library_of_class(cls):
        return code
    # An instance of a user's class: its methods count too.
    return encoder.tagged("instance", code, encoder.part(cls))


def _function_parts(encoder: Encoder, function: types.FunctionType) -> Iterator[Any]:
    """The parts of a function that count.

    The mode of modules that the function sets to eval does not count. The order of a module's parts counts if
    the function lists them.
    """
    around = encoder.marks
    if "__wrapped__" in function.__dict__ and _top_package(function) == "cachetools":
        # The wrapper holds the results so far. Newer versions have objects, which `pickled` knows.
        yield "cachetools", encoder.part(function.__dict__["__wrapped__"])
        return
    checked = (function.__kwdefaults__ or {}).get("__beartype_func")
    if checked is not None:  # beartype's wrapper checks the types that annotations say
        encoder.marks = around | {beside_code.ANNOTATIONS}
        try:
            code = encoder.part(checked)
        finally:
            encoder.marks = around
        yield "beartype", code
        return
    dispatch = _dispatch_registry(function)
    if dispatch is None:
        encoder.marks = around | _marks(function.__code__)
    try:
        parts = list(_function(encoder, function) if dispatch is None else _dispatching(encoder, dispatch))
    finally:
        encoder.marks = around
    if encoder.watch is not None:
        encoder.watch.function(encoder, function, parts)
    yield from parts


@functools.lru_cache(maxsize=4096)
def _marks(code: types.CodeType) -> frozenset[str]:
    """The marks of an encoder inside a function."""
    kinds = ((EVAL, calls_eval), (IN_ORDER, lists_parts))
    return frozenset(mark for mark, applies in kinds if applies(code))


def _dispatching(encoder: Encoder, registry: dict[type, Any]) -> Iterator[Any]:
    yield "singledispatch", sorted((encoder.part(kind), encoder.part(f)) for kind, f in registry.items())


def _dispatch_registry(function: types.FunctionType) -> dict[type, Any] | None:
    """The implementations of a `functools.singledispatch` function, without its cache; else None."""
    registry = function.__dict__.get("registry")
    if isinstance(registry, types.MappingProxyType) and callable(function.__dict__.get("dispatch")):
        return dict(registry)
    return None


def _function(encoder: Encoder, function: types.FunctionType) -> Iterator[Any]:
    yield function.__qualname__
    if function.__name__ != function.__qualname__.rpartition(".")[2]:  # somebody has set it
        yield "name", function.__name__
    library = library_of(function.__globals__.get("__name__"))
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    if library:
        # Lambdas of one module share their name, so their instructions count here too; their globals do not.
        yield library, [[*instructions(inner)] for inner in codes(function.__code__)]
        yield from (_value(encoder, _cell(cell), f" -> closure {name!r}") for name, cell in cells.items())
    else:
        yield from _body(encoder, function.__code__, function.__globals__, cells)
        yield from beside_code.of_function(encoder, function)
    yield _value(encoder, function.__defaults__, " -> defaults")
    named = function.__kwdefaults__
    yield _value(encoder, named and AnyOrder(named), " -> defaults")
    # Attributes that functools.wraps and users set on a function, such as the wrapped function.
    yield _value(encoder, AnyOrder(_own_attributes(function)), " -> attribute ")


def code_parts(code: types.CodeType) -> Iterator[Any]:
    """The parts that count of code without a function: compiled text, say."""
    yield _content(code)[0]


def _body(
    encoder: Encoder, code: types.CodeType, scope: dict[str, Any], cells: dict[str, Any]
) -> Iterator[Any]:
    instructions, names, reads, texts = _content(code)
    encoder.found.texts |= texts
    encoder.found.assigned |= parts_assigned(code)
    encoder.found.finds_by_text |= finds_by_text(code)
    yield instructions
    parts = {} if reads_parts_unseen(code) else parts_read(code)
    for kind, name in reads:
        if kind == "closure" and name in cells:
            value = _cell(cells[name])
            yield name, _outer(encoder, value, parts.get((kind, name)), names, f" -> closure {name!r}")
        elif kind == "global" and name in scope:
            yield name, _outer(encoder, scope[name], parts.get((kind, name)), names, f" -> global {name!r}")
        elif kind == "global":
            yield name, "builtin" if hasattr(builtins, name) else "unbound"
    statements = [statement for inner in codes(code) for statement in imports(inner)]
    for name in sorted({name for statement in statements for name in _modules_of(statement, scope)}):
        was_there = name in sys.modules
        module = _imported(name)
        encoder.found.imported |= not was_there and name in sys.modules
        yield name, _reference(encoder, module, names, f" -> import {name!r}")
    for name, value in looked_up(code, names, scope):
        yield name, _reference(encoder, value, names, f" -> global {name!r}")
    own = sys.modules.get(str(scope.get("__name__")))
    if _finds_itself(code) and own is not None and vars(own) is scope:
        yield "whole", encoder.part(own, " -> sys.modules[__name__]")
    for value in handed_on(code):
        module = _module_at(value, scope, cells)
        if module is not None:
            name = value.name[1] if value.kind == "import" else value.name
            step = "".join([f" -> {value.kind} {name!r}", *(f".{read}" for read in value.attributes)])
            yield "whole", encoder.part(module, step)


def _outer(encoder: Encoder, value: Any, parts: Set[Parts] | None, names: Set[str], step: str) -> bytes:
    """The value of an outer variable; of settings, those that the code reads.

    Settings that are one object have one number, since code may write through one name and read through
    another. A part counts by its content where it is met first.
    """
    settings = parts_of(value, parts, encoder.found.whole)
    if settings is None or any(id(one) in encoder.met for one in settings.around):
        return _reference(encoder, value, names, step)
    encoder.found.alone |= {*names_in(parts or frozenset())}
    root, *inside = [encoder.root(one) for one in settings.around]
    counted = []
    for inner, item in settings.parts:
        if (root, inner) in encoder.known_parts:
            code = encoder.tagged("known", root, inner)
        else:
            code = encoder.part(item, step + inner)
            encoder.known_parts.add((root, inner))
        counted.append((inner, item, code))
    if encoder.watch is not None:
        encoder.watch.settings(value, step, counted)
    return encoder.tagged("settings", root, *inside, *((inner, code) for inner, _, code in counted))


def _reference(encoder: Encoder, value: Any, names: Set[str], step: str) -> bytes:
    """A value that code refers to; for a user module, all of its attributes that the code names."""
    if _is_users_module(value):
        code = _users_module(encoder, value, names, step)
    else:
        code = _value(encoder, value, step)
    if encoder.watch is not None:
        encoder.watch.reference(value, step, code)
    return code


def _users_module(encoder: Encoder, module: types.ModuleType, names: Set[str], step: str) -> bytes:
    if compiled_digest(module.__name__) is not None:
        return encoder.part(module, step)
    if id(module) in encoder.open:  # modules that import one another
        return encoder.tagged("module", module.__name__)
    encoder.open[id(module)] = False
    try:
        found = sorted(name for name in names if hasattr(module, name) and _is_the_authors(name, module))
        parts = [(name, _reference(encoder, getattr(module, name), names, f".{name}")) for name in found]
        if "__name__" in names:
            parts.append(("__name__", encoder.part(module.__name__.replace("__mp_main__", "__main__"))))
        return encoder.tagged("module", *parts)
    except UnencodableError as error:
        error.path.append(step)
        raise
    finally:
        del encoder.open[id(module)]


def _value(encoder: Encoder, value: Any, step: str) -> bytes:
    return encoder.tagged("unset") if value is _MISSING else encoder.part(value, step)


def _class(encoder: Encoder, cls: type) -> Iterator[Any]:
    """The parts of a class that count: its bases and everything that its body defines."""
    yield cls.__qualname__
    library = library_of_class(cls)
    if library:
        yield library
        # A library may derive classes from the user's: torch's parametrizations do.
        yield from (
            _value(encoder, base, f" -> base {base.__name__!r}")
            for base in cls.__bases__
            if not library_of_class(base)
        )
        return
    digest = compiled_digest(cls.__module__)
    if digest is not None:
        yield "compiled", encoder.part(sys.modules[cls.__module__])
    if not library_of_class(type(cls)):
        yield "metaclass", encoder.part(type(cls), f" -> metaclass {type(cls).__name__!r}")
    yield from (_value(encoder, base, f" -> base {base.__name__!r}") for base in cls.__bases__)
    yield from beside_code.of_class(encoder, cls)
    noise = set(_CLASS_NOISE)
    # `ctypes` makes these of ``_fields_``.
    noise |= {name for name, value in vars(cls).items() if full_name(type(value)) == "_ctypes.CField"}
    yield from declared(encoder, cls, noise)
    if _is_dataclass(cls):
        yield from _dataclass_parts(encoder, cls, noise)
    if issubclass(cls, enum.Enum):
        yield from _enum_parts(encoder, cls, noise)
    if _has_init_of_protocol(cls):
        noise.add("__init__")
    if issubclass(cls, tuple) and "_fields" in vars(cls):
        noise |= {*cls._fields, *_TUPLE_NOISE}  # type: ignore[attr-defined]
    if digest is not None:  # the digest covers what the compiler has put there, which may have no hash
        noise |= {name for name, value in vars(cls).items() if type(value) not in _BESIDE_COMPILED}
    for name, value in sorted(vars(cls).items()):
        if name not in noise:
            yield name, beside_code.attribute(encoder, name, registered(cls, value))


def _dataclass_parts(encoder: Encoder, cls: Any, noise: set[str]) -> Iterator[Any]:
    """The fields and options of a dataclass; what these determine is added to ``noise``."""
    noise |= {name for name, value in vars(cls).items() if _is_generated(value)}
    for field in dataclasses.fields(cls):
        chosen = [v for v in (field.default, field.default_factory) if v is not dataclasses.MISSING]
        yield field.name, field.init, _value(encoder, chosen, f".{field.name}")
        yield from _other_than(field, _FIELD_OPTIONS, encoder)
    yield from _other_than(cls.__dataclass_params__, _CLASS_OPTIONS, encoder)
    positional = tuple(field.name for field in dataclasses.fields(cls) if field.init and not field.kw_only)
    if vars(cls).get("__match_args__") == positional:
        noise.add("__match_args__")
    elif "__match_args__" not in vars(cls):
        yield "match_args", False


def _enum_parts(encoder: Encoder, cls: Any, noise: set[str]) -> Iterator[Any]:
    """The members of an enumeration and what they hold; what `enum` itself adds is added to ``noise``."""
    members = cls.__members__
    yield [(name, _value(encoder, member.value, f".{name}")) for name, member in members.items()]
    held = {name: _held_by_member(member) for name, member in members.items()}
    if any(held.values()):
        yield "members", [(name, encoder.part(attributes, f".{name}")) for name, attributes in held.items()]
    if issubclass(cls, enum.Flag) and getattr(cls, "_boundary_", None) is not _boundary_above(cls):
        yield "boundary", cls._boundary_.name
    noise |= {
        name
        for name, value in vars(cls).items()
        if not _is_users_method(value) and (name in members or _is_of_enum(name, value))
    }


def _other_than(options: Any, usual: dict[str, Any], encoder: Encoder) -> Iterator[Any]:
    """The options of a dataclass or of a field that differ from the usual ones."""
    for name, plain in usual.items():
        chosen = getattr(options, name, plain)
        if chosen != plain:
            chosen = dict(chosen) if isinstance(chosen, types.MappingProxyType) else chosen
            yield name, encoder.part(chosen, f".{name}")


def _has_init_of_protocol(cls: type) -> bool:
    """Whether `typing.Protocol` has put an ``__init__`` into a class. The first instance replaces it by the
    one that the class inherits.
    """
    method = vars(cls).get("__init__")
    if method is None or not has_member(cls, "_is_protocol"):
        return False
    is_inherited = any(vars(base).get("__init__") is method for base in cls.__mro__[1:])
    return is_inherited or getattr(method, "__name__", "") == "_no_init_or_replace_init"


def _is_of_enum(name: str, value: object) -> bool:
    """Whether a class attribute is one that `enum` itself puts into each enumeration."""
    return (name.startswith("_") and name.endswith("_")) or isinstance(value, types.DynamicClassAttribute)


def _boundary_above(cls: type) -> Any:
    """The treatment of bits that no member has, as a class of flags inherits it."""
    return next((base._boundary_ for base in cls.__mro__[1:] if hasattr(base, "_boundary_")), None)


def _is_dataclass(cls: type) -> bool:
    return has_member(cls, "__dataclass_fields__")


def _held_by_member(member: enum.Enum) -> dict[str, Any]:
    """Attributes that a class's `__new__` or `__init__` set on an enumeration's member, beside its value."""
    return AnyOrder(
        (name, value)
        for name, value in vars(member).items()
        if not (name.startswith("_") and name.endswith("_"))  # enum's own
        and not isinstance(inspect.getattr_static(type(member), name, None), functools.cached_property)
    )


def uncompiled(value: Any) -> Any:
    """The function or module that torch.compile wrapped; any other value unchanged.

    The wrapper consists of addresses. It computes the same result as the wrapped value, up to the last bits
    of rounding, and so counts as that value: datasets' `Hasher` does the same, and switching compilation on
    runs nothing again.
    """
    cls = type(value)
    if cls is types.FunctionType:
        attributes = value.__dict__
        # functools.wraps copies the attributes of a compiled function to its wrappers.
        if attributes and attributes.get("_torchdynamo_wrapper_id") == id(value):
            return attributes.get("_torchdynamo_orig_callable", value)
    elif is_compiled(cls):
        return vars(value)["_modules"]["_orig_mod"]
    return value


def _own_attributes(function: types.FunctionType) -> dict[str, Any]:
    """The attributes that were set on a function, without those of compilers."""
    attributes = {name: item for name, item in function.__dict__.items() if not name.startswith(_COMPILER)}
    if _top_package(function) == "tenacity":
        attributes.pop("statistics", None)  # of the last call
    inner = attributes.get("__wrapped__")
    plain = inner is None or type(inner) in (types.FunctionType, _LRU)
    if plain and len(attributes) == len(function.__dict__):
        return attributes
    # functools.wraps copied these from a compiled function, and the function's own encoding covers them.
    copied = getattr(inner, "__dict__", {})
    missing = object()
    return {
        name: item
        for name, item in attributes.items()
        if name == "__wrapped__" or copied.get(name, missing) is not item
    }


@functools.lru_cache(maxsize=4096)
def _content(
    code: types.CodeType,
) -> tuple[bytes, frozenset[str], list[tuple[str, str]], frozenset[str]]:
    """The encoded instructions of code and its inner code, all names in it, and the outer variables it reads.

    If a user module has attributes with these names, they are followed. Last, the kinds of texts that the
    code reads: docstrings, annotations.
    """
    inside = list(codes(code))
    rows = [[part for row in instructions(inner) for part in row] for inner in inside]
    names = frozenset(name for inner in inside for name in inner.co_names)
    reads = {read for inner in inside for read in outer_reads(inner)}
    read = {argument for inner in inside for opname, argument in steps(inner) if opname in _READS}
    read |= {text for inner in inside for text in _dunder_texts(inner)}
    texts = frozenset[str]().union(*(kinds for name, kinds in beside_code.READERS.items() if name in read))
    return Encoder(CONFIGS).part(rows), names, sorted(reads), texts


def _dunder_texts(code: types.CodeType) -> Iterator[str]:
    """Texts such as ``"__doc__"`` in code, which `getattr` and others read attributes by."""
    for constant in code.co_consts:
        for text in constant if isinstance(constant, tuple) else (constant,):
            if isinstance(text, str) and _is_magic(text):
                yield text


def _modules_of(statement: Import, scope: dict[str, Any]) -> Iterator[str]:
    """Full names of the modules that an import statement of a function imports."""
    name = _full_name(statement.level, statement.module, scope)
    yield name
    # `import a.b` binds a; `from a import b` may name the module a.b, which may not be imported yet.
    if not statement.names and not statement.level:
        yield name.partition(".")[0]
    yield from (f"{name}.{item}" for item in statement.names if _is_module(name, item))


def _full_name(level: int, module: str, scope: dict[str, Any]) -> str:
    name = "." * level + module
    if level:
        package = scope.get("__package__") or str(scope.get("__name__", "")).rpartition(".")[0]
        with contextlib.suppress(ImportError):
            return importlib.util.resolve_name(name, package)
    return name


@functools.lru_cache(maxsize=4096)
def _finds_itself(code: types.CodeType) -> bool:
    """Whether code may take its own module from ``sys.modules``, to hand it on."""
    read = {step for inner in codes(code) for step in steps(inner) if step[0] == "LOAD_GLOBAL"}
    names = {name for inner in codes(code) for name in inner.co_names}
    return "modules" in names and {("LOAD_GLOBAL", "sys"), ("LOAD_GLOBAL", "__name__")} <= read


def _module_at(value: Outer, scope: dict[str, Any], cells: dict[str, Any]) -> types.ModuleType | None:
    """The user module that code hands on; None where the value is another one."""
    found: Any
    if value.kind == "import":
        level, module, taken = value.name
        name = _full_name(level, module, scope)
        if taken:
            # `import a.b.c as c` takes c from a.b too.
            whole = name if name.rpartition(".")[2] == taken else f"{name}.{taken}"
            found = sys.modules.get(whole, getattr(sys.modules.get(name), taken, None))
        else:
            found = sys.modules.get(name.partition(".")[0])
    elif value.kind == "closure":
        found = _cell(cells[value.name]) if value.name in cells else None
    else:
        found = scope.get(value.name)
    for attribute in value.attributes:
        if not _is_users_module(found):
            return None
        found = getattr(found, attribute, None)
    return found if _is_users_module(found) else None


def _is_users_module(value: Any) -> bool:
    return issubclass(type(value), types.ModuleType) and not library_of(value.__name__)


def _is_module(package: str, name: str) -> bool:
    if package.startswith(".") or library_of(package):
        return False
    try:
        return importlib.util.find_spec(f"{package}.{name}") is not None
    except (ImportError, ValueError):  # of a module that was made by hand, as cffi's are
        return False


def _imported(name: str) -> Any:
    """The module that code would import; for a library only its name and version."""
    library = library_of(name)
    if library or name.startswith("."):
        return library or f"no module {name}"
    try:
        return importlib.import_module(name)
    except ImportError:
        return f"no module {name}"
    except (Exception, SystemExit) as error:  # the user's module may raise anything when it runs
        raise UnencodableError(f"cannot import {name!r}, which the function imports: {error}") from error


def _cell(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _MISSING


def _is_magic(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def _is_the_authors(name: str, module: types.ModuleType) -> bool:
    """Whether an attribute of a module is its author's, such as ``__version__``, and not set by Python."""
    if not _is_magic(name):
        return True
    # A module's own `__getattr__` may give it.
    is_own = name in vars(module) or not hasattr(types.ModuleType, name)
    return is_own and name not in _OF_IMPORTS


def _is_users_method(value: object) -> bool:
    value = getattr(value, "__wrapped__", getattr(value, "fget", value))
    return isinstance(value, types.FunctionType) and not library_of(value.__globals__.get("__name__"))


def _top_package(function: types.FunctionType) -> str:
    return str(function.__globals__.get("__name__")).partition(".")[0]


def _is_generated(value: object) -> bool:
    """Whether dataclasses generated this method of a class: the fields determine it."""
    return getattr(getattr(value, "__code__", None), "co_filename", None) == "<string>"


def _builtin(encoder: Encoder, value: Any) -> Iterator[Any]:
    owner = value.__self__
    if getattr(sys.modules.get(type(owner).__module__), value.__name__, None) is value:
        # random.random is a method of the generator that its module shares with all callers.
        yield value.__qualname__  # type: ignore[union-attr]
        yield library_of(type(owner).__module__) or encoder.part(owner, ".__self__")
        return
    module = owner.__name__ if isinstance(owner, types.ModuleType) else None
    library = library_of(module)
    if module and not library:
        refuse(value)
    yield value.__qualname__
    yield library or encoder.part(owner, ".__self__")


def _module(encoder: Encoder, value: types.ModuleType) -> Iterator[Any]:
    library = library_of(value.__name__)
    if library:
        yield library
        return
    # Any attribute may be read through the module.
    encoder.number(value)
    yield from beside_code.source_of(encoder, value)
    for name in sorted(vars(value)):
        if _is_the_authors(name, value) and (name != "__doc__" or beside_code.DOCSTRINGS in encoder.marks):
            try:
                yield name, encoder.part(getattr(value, name), f".{name}")
            except UnencodableError as error:
                if not error.whole_module:
                    error.whole_module = True
                    error.problem += f" (the module {value.__name__!r} is handed on, so all of it counts)"
                raise


def _partial(encoder: Encoder, value: functools.partial[Any]) -> Iterator[Any]:
    yield encoder.part(value.func, ".func")
    yield encoder.part(value.args, ".args")
    yield encoder.part(value.keywords, ".keywords")
    if vars(value):
        yield encoder.part(AnyOrder(vars(value)), ".__dict__")


def _method(encoder: Encoder, value: types.MethodType) -> Iterator[Any]:
    yield encoder.part(value.__func__)
    yield encoder.part(value.__self__, ".__self__")


def _property(encoder: Encoder, value: property) -> Iterator[Any]:
    yield from (encoder.part(function) for function in (value.fget, value.fset, value.fdel))


# The first matching type counts; Python 3.10 accepts aliases like list[int] as types. Here the name of the
# value's class is the tag.
_CODE = Table(
    rows=[("typing", ("TypeAliasType",), beside_code.named_alias)],  # since Python 3.12
    types={
        beside_code.TYPING: beside_code.alias,
        typing.NewType: beside_code.new_type,
        types.FunctionType: _function_parts,
        type: _class,
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
    },
)
