"""Digests of what a dataset's code refers to outside of the dataset: globals, and the code of functions.

Names that the code itself assigns or writes to do not count: a model that is loaded late, a dict of what has
been read. A digest is the same in another process.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterable, Set
from typing import Any, NamedTuple

from blake3 import blake3

from castore.adapters.noted_globals import Binding, bindings_of, label_of, module_of
from castore.adapters.noted_values import class_values
from castore.adapters.torch.dataset_identity import BY_PATH, DATASETS
from castore.errors import UnhashableError
from castore.keys.bytecode import (
    Outer,
    attributes_read,
    attributes_written_of,
    globals_written,
    handed_on,
    names_written,
)
from castore.keys.classes import full_name, per_class
from castore.keys.encoder import Encoder, UnencodableError, Watch
from castore.keys.libraries import library_of, library_of_class
from castore.keys.pickled import kept_by_properties, pickled_attributes
from castore.keys.tracing import encode

_CODE = (types.FunctionType, types.BuiltinFunctionType, type)
_DIGEST = 16
_DEEPEST = 4  # attributes of attributes
_MAKING = {"__init__", "__new__", "__post_init__", "__setstate__"}
# The bases of classes whose attributes are nothing but what code reads by their names.
_PLAIN_BASES = {
    "builtins.object", "argparse.Namespace", "argparse._AttributeHolder", "types.SimpleNamespace", "abc.ABC",
    "typing.Generic", "typing.Protocol",
}  # fmt: skip


class Outside(NamedTuple):
    """The values that code refers to outside of itself.

    Attributes:
        digests: of each global, and of each function's own code, by what they are of. Lambdas, and attributes
            of several modules, share a name.
        bindings: of the globals. Comparing objects is quick, and says only that there may be a change.
    """

    digests: dict[str, set[bytes]]
    bindings: list[Binding]


def outside_of(code: Iterable[types.FunctionType | type]) -> Outside:
    """The values that functions and classes refer to outside of themselves, by names that none writes to.

    Args:
        code: the functions and classes. All that they call is followed through the user's own modules.
    """
    watch = _Outside()
    for one in code:
        with contextlib.suppress(UnhashableError):  # of a part that pickle leaves out: the dataset has a key
            encode(DATASETS, one, "", watch)
    digests = {
        f"the {label} of {module}": digests
        for (module, label), digests in watch.found.items()
        if (module, watch.parts.get(label, label)) not in watch.written and watch.reads(label)
    }
    return Outside(digests, bindings_of(watch.functions, watch.written))


class _Attribute(NamedTuple):
    """An attribute of a global.

    Attributes:
        path: the global's name, and the names of attributes on the way.
        cls: the class of the object that has the attribute.
    """

    path: tuple[str, ...]
    cls: type


class _Outside(Watch):
    """Notes the values that functions refer to by names outside of them, while code is encoded.

    Attributes:
        found: digests by the module and the name.
        attributes: the attributes that were noted by themselves, by their labels.
        parts: the labels of the dicts of which parts were noted, by the labels of these.
        written: modules and names that functions assign or write to.
        functions: the user's functions that were met.
    """

    def __init__(self) -> None:
        self.found: dict[tuple[str, str], set[bytes]] = {}
        self.attributes: dict[str, _Attribute] = {}
        self.parts: dict[str, str] = {}
        self._read: set[str] = set()  # names of attributes
        self._handed_on: set[tuple[str, ...]] = set()  # paths of values that others get as a whole
        self.written: set[tuple[str, str]] = set()
        self.functions: list[types.FunctionType] = []
        self._modules: list[str] = []

    def part(self, encoder: Encoder, value: Any, step: str) -> bytes:
        if type(value) is not types.FunctionType:
            return encoder.part(value, step, direct=True)
        module = module_of(value.__globals__.get("__name__"))
        self.written |= {(module, label_of(name)) for name in globals_written(value.__code__)}
        if library_of(module) is None:
            self.functions.append(value)
            if not _is_of_dataclass(value):  # those read all fields, for whoever is handed the whole
                self._read |= attributes_read(value.__code__)
            self._handed_on |= {*map(_path_of, handed_on(value.__code__))}
        self._modules.append(module)
        try:
            return encoder.part(value, step, direct=True)
        finally:
            self._modules.pop()

    def function(self, encoder: Encoder, function: types.FunctionType, parts: list[Any]) -> None:
        # The name and the instructions come first; behind them stand values.
        own = [part for part in parts[:2] if type(part) is not tuple]
        self._note(f"code of {function.__qualname__}", encoder.tagged("own", *own))

    def reference(self, value: Any, step: str, code: bytes) -> None:
        label = f"attribute {step[1:]!r}" if step.startswith(".") else step.removeprefix(" -> ")
        if not self._modules or label.startswith("closure ") or isinstance(value, types.ModuleType):
            return
        if isinstance(value, _CODE):  # its code is noted on its own
            self._note(label, f"{module_of(value.__module__)}.{value.__qualname__}".encode())
            if isinstance(value, type):
                self._note_attributes(label, (label.split("'")[1],), value, class_values(value))
        else:
            self._note_value(label, (label.split("'")[1],), value)

    def settings(self, value: Any, step: str, parts: list[tuple[str, Any, bytes]]) -> None:
        is_by_attributes = isinstance(value, _CODE) or _plain_attributes(value) is not None
        if not self._modules or step.startswith(" -> closure ") or is_by_attributes:
            # Other functions may write to a part: `reads` needs all of them.
            self.reference(value, step, b"")
            return
        whole = step.removeprefix(" -> ")
        for inner, item, _ in parts:
            label = f"part {inner} of {whole}"
            self.parts[label] = whole
            self._note_whole(label, item)

    def _note_value(self, label: str, path: tuple[str, ...], value: Any) -> None:
        attributes = _plain_attributes(value) if len(path) < _DEEPEST else None
        if attributes is not None:
            self._note(label, full_name(type(value)).encode())
            self._note_attributes(label, path, type(value), attributes.items())
            return
        self._note_whole(label, value)

    def _note_whole(self, label: str, value: Any) -> None:
        # Inside other code, the bytes depend on what has been met before.
        with contextlib.suppress(UnhashableError):
            self._note(label, encode(BY_PATH, value, "").code)

    def _note_attributes(
        self, label: str, path: tuple[str, ...], cls: type, values: Iterable[tuple[str, Any]]
    ) -> None:
        """Note attributes by themselves: a count of steps in a config says nothing of its other settings."""
        for name, item in values:
            inner = f"attribute {name!r} of {label}"
            self.attributes[inner] = _Attribute((*path, name), cls)
            self._note_value(inner, (*path, name), item)

    def reads(self, label: str) -> bool:
        """Whether code reads what a label is of, and does not write to that itself."""
        if label not in self.attributes:
            return True
        path, cls = self.attributes[label]
        if path[-1] in _written_by_methods(cls, self._read) or any(
            path[1] in attributes_written_of(function.__code__, path[0]) for function in self.functions
        ):
            return False
        beginnings = [path[: size + 1] for size in range(len(path))]
        return self._read.issuperset(path[1:]) or any(
            handed[-len(beginning) :] == beginning for handed in self._handed_on for beginning in beginnings
        )

    def _note(self, label: str, code: bytes) -> None:
        self.found.setdefault((self._modules[-1], label), set()).add(blake3(code).digest(_DIGEST))


def _plain_attributes(value: Any) -> dict[str, Any] | None:
    """The attributes of an object, as far as pickle keeps them, if code reads them by their names alone; None
    for any other value.
    """
    if not _has_plain_attributes(type(value)):
        return None
    with contextlib.suppress(UnencodableError):
        kept = pickled_attributes(value)
        derived = kept_by_properties(type(value))
        return None if kept is None else {name: item for name, item in kept.items() if name not in derived}
    return None


def _written_by_methods(cls: type, called: Set[str]) -> set[str]:
    """Attributes that methods of the user's write to, of those with these names or special ones."""
    members = (
        (name, getattr(item, "__func__", item))
        for base in cls.__mro__
        if library_of_class(base) is None
        for name, item in vars(base).items()
        if (name in called or name.startswith("__")) and name not in _MAKING
    )
    methods = [method for _, method in members if isinstance(method, types.FunctionType)]
    return {name[1:] for method in methods for name in names_written(method.__code__) if name[0] == "."}


def _is_of_dataclass(function: types.FunctionType) -> bool:
    """Whether dataclasses generated a method that reads all fields."""
    names = ("__repr__", "__eq__", "__lt__", "__le__", "__gt__", "__ge__", "__hash__")
    return function.__name__ in names and function.__code__.co_filename == "<string>"


@per_class
def _has_plain_attributes(cls: type) -> bool:
    """Whether a class is the user's own, or one for settings, without a way of its own to read attributes."""
    users = [base for base in cls.__mro__ if library_of_class(base) is None]
    others = {full_name(base) for base in cls.__mro__} - {full_name(base) for base in users}
    return others <= _PLAIN_BASES and not any(
        {"__getattr__", "__getattribute__", "__castore_key__"} & vars(base).keys() for base in users
    )


def _path_of(value: Outer) -> tuple[str, ...]:
    """A variable's name, and the attributes that code reads on the way to a value."""
    if value.kind == "import":
        _, module, taken = value.name
        return taken or module.rpartition(".")[2], *value.attributes
    return value.name, *value.attributes
