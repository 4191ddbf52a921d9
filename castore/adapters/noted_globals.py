"""The globals that code reads, noted so that a later look says whether one of them has changed.

A global has changed if its name is bound to another object, or if its value was written to. Names that code
itself assigns or writes to do not count: a model that is loaded late, a dict of what has been read. A look
takes microseconds, and says only that there may be a change: an equal value in the place of another looks
like one.
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator, Set
from typing import Any, NamedTuple

from castore.adapters.noted_values import mark_of
from castore.keys.bytecode import codes, names_written, outer_reads
from castore.keys.libraries import library_of, library_of_class

_UNBOUND = object()


class Binding(NamedTuple):
    """A name of a module with the value that it was bound to, and the module's names.

    Attributes:
        mark: of the value; a write to the value changes it.
    """

    scope: dict[str, Any]
    name: str
    value: Any
    mark: object

    @classmethod
    def of(cls, scope: dict[str, Any], name: str) -> Binding:
        """The binding of now."""
        value = scope.get(name, _UNBOUND)
        return cls(scope, name, value, mark_of(value))

    def is_old(self) -> bool:
        """Whether the name is bound to another object now, or its value was written to."""
        value = self.scope.get(self.name, _UNBOUND)
        return value is not self.value or mark_of(value) != self.mark

    def now(self) -> Binding:
        """The binding with the value of now."""
        return Binding.of(self.scope, self.name)


def bindings_of(functions: Iterable[types.FunctionType], written: Set[tuple[str, str]]) -> list[Binding]:
    """The names that functions read: globals, and attributes of the user's modules.

    Args:
        functions: of the user's.
        written: modules and labels of names that do not count.
    """
    found: dict[tuple[int, str], Binding] = {}
    for function in functions:
        for one in _read_by(function, written):
            found[id(one.scope), one.name] = one
    return [*found.values()]


def reached_bindings(functions: Iterable[types.FunctionType]) -> list[Binding]:
    """As `bindings_of`, also for the user's functions and classes that these functions name, and so on."""
    known: dict[int, types.FunctionType] = {}
    todo = [*functions]
    while todo:
        function = todo.pop()
        if id(function) in known or library_of(function.__globals__.get("__name__")):
            continue
        known[id(function)] = function
        for one in _read_by(function, frozenset()):
            todo += functions_in(one.value)
    written = {
        (module_of(function.__globals__.get("__name__")), label_of(name))
        for function in known.values()
        for name in names_written(function.__code__)
    }
    return bindings_of(known.values(), written)


def functions_in(value: Any) -> list[types.FunctionType]:
    """The function that a value is, or the methods of the user's class that it is or is an object of."""
    value = getattr(value, "__func__", value)
    if isinstance(value, types.FunctionType):
        return [value]
    cls = value if isinstance(value, type) else type(value)
    bases = [base for base in cls.__mro__ if library_of_class(base) is None]
    return [item for base in bases for item in vars(base).values() if isinstance(item, types.FunctionType)]


def label_of(name: str) -> str:
    """The label of a global."""
    return f"global {name!r}"


def module_of(name: Any) -> str:
    """A module's name. In spawned workers the main module has another one."""
    return str(name).replace("__mp_main__", "__main__")


def _read_by(function: types.FunctionType, written: Set[tuple[str, str]]) -> Iterator[Binding]:
    scope, module = function.__globals__, module_of(function.__globals__.get("__name__"))
    inside = [*codes(function.__code__)]
    attributes = {name for code in inside for name in code.co_names}
    for name in {name for code in inside for kind, name in outer_reads(code) if kind == "global"}:
        if name in scope and (module, label_of(name)) not in written:
            yield Binding.of(scope, name)
            yield from _attributes_of(scope[name], attributes)


def _attributes_of(module: Any, names: Set[str]) -> Iterator[Binding]:
    """Some names of a module, if it is one of the user's, and of the modules that those are bound to."""
    if isinstance(module, types.ModuleType) and library_of(module.__name__) is None:
        scope = vars(module)
        for name in names & scope.keys():
            yield Binding.of(scope, name)
            yield from _attributes_of(scope[name], names - {name})
