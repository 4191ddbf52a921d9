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

from castore.adapters.noted_values import State, function_parts
from castore.keys.bytecode import Parts, codes, globals_written, outer_reads, parts_assigned, parts_read
from castore.keys.libraries import library_of, library_of_class
from castore.keys.looked_up import names_in_texts, texts_of
from castore.keys.settings import finds_by_text, names_in, parts_of, reads_parts_unseen

_UNBOUND = object()
_MOST = 256  # values within one global


class Binding(NamedTuple):
    """A name of a module with the value that it was bound to, and the module's names.

    Attributes:
        state: of the value and what lies within it; of settings, of the parts that code reads by name.
        parts: those parts; None if all of the value counts.
    """

    scope: dict[str, Any]
    name: str
    value: Any
    state: State
    parts: frozenset[Parts] | None

    @classmethod
    def of(cls, scope: dict[str, Any], name: str, parts: frozenset[Parts] | None) -> Binding:
        """The binding of now."""
        value = scope.get(name, _UNBOUND)
        return cls(scope, name, value, _state_of(value, parts), parts)

    @property
    def label(self) -> str:
        """The name with its module, in words."""
        return f"the {label_of(self.name)} of {module_of(self.scope.get('__name__'))}"

    def is_old(self) -> bool:
        """Whether the name is bound to another object now, or its value was written to, however deep."""
        value = self.scope.get(self.name, _UNBOUND)
        return value is not self.value or not self.state.is_same(_state_of(value, self.parts))

    def now(self) -> Binding:
        """The binding with the value of now."""
        return Binding.of(self.scope, self.name, self.parts)


def _state_of(value: Any, parts: frozenset[Parts] | None) -> State:
    settings = parts_of(value, parts, frozenset())
    if settings is None:
        return State.of(value, _MOST)
    states = [State.of(item, _MOST) for _, item in settings.parts]
    return State(
        [item for one in states for item in one.values], [mark for one in states for mark in one.marks]
    )


def bindings_of(functions: Iterable[types.FunctionType], written: Set[tuple[str, str]]) -> list[Binding]:
    """The names that functions read: globals, and attributes of the user's modules.

    Args:
        functions: of the user's.
        written: modules and labels of names that do not count.
    """
    functions = [*functions]
    found: dict[tuple[int, str], _Read] = {}
    finds_any = any(finds_by_text(function.__code__) for function in functions)
    assigned = frozenset[str]().union(*(parts_assigned(function.__code__) for function in functions))
    for function in functions:
        for read in _read_by(function, written):
            is_whole = finds_any or not assigned.isdisjoint(names_in(read.parts or frozenset()))  # as in keys
            one = read._replace(parts=None) if is_whole else read
            known = found.get((id(one.scope), one.name), one)
            parts = None if one.parts is None or known.parts is None else one.parts | known.parts
            found[id(one.scope), one.name] = one._replace(parts=parts)
    return [Binding.of(*one) for one in found.values()]


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
            todo += functions_in(one.scope.get(one.name))
        for _, held, _ in function_parts(function):
            todo += functions_in(held)
    written = {
        (module_of(function.__globals__.get("__name__")), label_of(name))
        for function in known.values()
        for name in globals_written(function.__code__)
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


class _Read(NamedTuple):
    """A name of a module that code reads, and the parts of its value that the code reads; None for all."""

    scope: dict[str, Any]
    name: str
    parts: frozenset[Parts] | None


def _read_by(function: types.FunctionType, written: Set[tuple[str, str]]) -> Iterator[_Read]:
    code, scope = function.__code__, function.__globals__
    module = module_of(scope.get("__name__"))
    inside = [*codes(code)]
    attributes = {name for inner in inside for name in inner.co_names}
    read = {name for inner in inside for kind, name in outer_reads(inner) if kind == "global"}
    looked_up = frozenset[str]().union(*names_in_texts(code, texts_of(attributes, scope)))
    parts = {} if reads_parts_unseen(code) else parts_read(code)
    for name in read | looked_up:
        if name in scope and (module, label_of(name)) not in written:
            yield _Read(scope, name, None if name in looked_up else parts.get(("global", name)))
            yield from _attributes_of(scope[name], attributes)


def _attributes_of(module: Any, names: Set[str]) -> Iterator[_Read]:
    """Some names of a module, if it is one of the user's, and of the modules that those are bound to."""
    if isinstance(module, types.ModuleType) and library_of(module.__name__) is None:
        scope = vars(module)
        for name in names & scope.keys():
            yield _Read(scope, name, None)
            yield from _attributes_of(scope[name], names - {name})
