"""The parts of torch's modules that count: the mode and the hooks of a module, the order of its parts.

The order counts of layers that torch itself calls in order. It also counts where code around a module reads
what torch lists in that order: ``self.children()`` in `forward`, ``net.buffers()`` in a function.

A function or a class that sets a module to eval before it uses the module gets the same result whatever the
module's mode was, so there the mode does not count. The bytecode shows this. Classes are known by name, so
torch is not imported.
"""

from __future__ import annotations

import functools
import itertools
import sys
import types
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Set
from typing import Any

from castore.keys.bytecode import attributes_read, codes, steps
from castore.keys.classes import full_name
from castore.keys.libraries import library_of, library_of_class

#: Mark of an encoder inside a function or a class that sets modules to eval before they are used.
EVAL = "eval"
#: The same for classes that only `settles_behind` recognizes: their modules count as in eval mode.
EVAL_BEHIND = "eval behind"
#: Mark of an encoder inside code that reads the parts of modules in their order.
IN_ORDER = "in order"
#: Attributes of a module that hold tables of its parts.
TABLES = {"_parameters", "_buffers", "_modules"}
# These give the parts of a module in the order in which they were registered.
_LISTINGS = TABLES | {
    "children", "modules", "parameters", "buffers",
    "named_children", "named_modules", "named_parameters", "named_buffers", "state_dict", "apply",
}  # fmt: skip
_RUNNING = ("__call__", "forward", "__getitem__", "__getitems__", "__iter__")
_MODULE = "torch.nn.modules.module.Module"
_LRU = type(functools.lru_cache(len))


def is_module(cls: type) -> bool:
    """Whether a class is a torch module's."""
    return any(full_name(base) == _MODULE for base in cls.__mro__)


def is_compiled(cls: type) -> bool:
    """Whether a class is that of the wrappers that `torch.compile` puts around modules."""
    return cls.__name__ == "OptimizedModule" and cls.__module__ == "torch._dynamo.eval_frame"


def settles(cls: type) -> bool:
    """Whether methods of a class set modules to eval before use, so that the modules' mode does not count.

    For a class that is a torch module itself: whether a method calls ``self.eval``.
    """
    return _sets_to_eval(cls, lambda member: (member,), ("LOAD_FAST",))


def settles_behind(cls: type) -> bool:
    """As `settles`, for methods behind decorators (torch.no_grad), and for inner functions that read self.

    SentenceTransformer has such methods.
    """
    return _sets_to_eval(cls, _with_wrapped, ("LOAD_FAST", "LOAD_DEREF"))


def _sets_to_eval(cls: type, functions_of: Callable[[Any], Iterable[Any]], loads: tuple[str, ...]) -> bool:
    own = is_module(cls)
    return any(
        isinstance(function, types.FunctionType)
        and name not in ("__init__", "__new__")
        and (_calls_own_eval(function.__code__, loads) if own else calls_eval(function.__code__))
        for base in cls.__mro__
        if full_name(base) != _MODULE and (own or not library_of_class(base))
        for name, member in vars(base).items()
        for function in functions_of(member)
    )


def _with_wrapped(member: Any) -> Iterator[Any]:
    """A member of a class, and the functions that it wraps, from the outside to the inside."""
    seen: set[int] = set()
    while member is not None and id(member) not in seen:
        yield member
        seen.add(id(member))
        # Only members of known types are asked: others may run the user's code.
        if isinstance(member, property):
            member = member.fget
        elif isinstance(member, functools.cached_property):
            member = member.func
        elif isinstance(member, types.FunctionType):
            member = member.__dict__.get("__wrapped__")
        elif isinstance(member, staticmethod | classmethod | _LRU):
            member = member.__wrapped__
        else:
            return


def _is_function(value: object) -> bool:
    return isinstance(value, types.FunctionType)


@functools.lru_cache(maxsize=4096)
def calls_eval(code: types.CodeType) -> bool:
    """Whether code, or a function inside it, reads an attribute `eval`."""
    # Reading the instructions takes long, and most code has no such name.
    return any(_is_eval(row) for inner in codes(code) if "eval" in inner.co_names for row in steps(inner))


def _is_eval(row: tuple[str, Any]) -> bool:
    return row[0] in ("LOAD_ATTR", "LOAD_METHOD") and row[1] == "eval"


def _calls_own_eval(code: types.CodeType, loads: tuple[str, ...]) -> bool:
    rows = steps(code)
    return any(
        before[0].startswith(loads) and before[1] == "self" and _is_eval(row)
        for before, row in itertools.pairwise(rows)
    )


def patched_methods(cls: type) -> Iterator[tuple[str, Any]]:
    """The functions of the user's that somebody put in the place of what runs a library's module."""
    for name in ("forward", "__call__"):
        base = next((base for base in cls.__mro__ if name in vars(base)), None)
        function = vars(base)[name] if base is not None else None
        if base is None or library_of_class(base) is None or not isinstance(function, types.FunctionType):
            continue
        if library_of(function.__globals__.get("__name__")) is None:
            yield name, function


def renumbered(state: dict[str, Any]) -> dict[str, Any]:
    """The state of a torch module with its hooks renumbered: torch numbers hooks over the whole process."""
    tables = {
        name: item
        for name, item in state.items()
        if name.endswith("hooks") and isinstance(item, OrderedDict) and item
    }
    places = {number: place for place, number in enumerate(sorted({*itertools.chain(*tables.values())}))}
    hooks = {name: _in_order(places, item) for name, item in tables.items()}
    return {**state, **hooks} if hooks else state


def _in_order(places: dict[int, int], hooks: dict[int, Any]) -> Any:
    numbered = {places[number]: hook for number, hook in hooks.items()}
    # A hook that was put before others is called before them, and has a larger number.
    return numbered if [*numbered] == sorted(numbered) else [*numbered.items()]


def order_of_parts(value: Any, marks: Set[str]) -> Any:
    """Names of a torch module's parts if their order counts and is not numeric or alphabetic; else None.

    Args:
        value: the module, or a StackDataset, whose samples have its parts in order; None for any other value.
        marks: of the encoder.
    """
    if not is_module(type(value)):
        return _order_of_stack(value)
    layers = _unsorted(vars(value)["_modules"]) if _calls_in_order(value) else None
    if IN_ORDER not in marks:
        return layers
    tables = [_unsorted(vars(value).get(table) or ()) for table in sorted(TABLES)]
    return tables if any(tables) else layers


def _order_of_stack(value: Any) -> list[str] | None:
    stack = getattr(sys.modules.get("torch.utils.data"), "StackDataset", None)
    held = value.datasets if stack is not None and issubclass(type(value), stack) else None
    return _unsorted(held) if isinstance(held, dict) else None


def _calls_in_order(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and issubclass(type(value), torch.nn.Sequential | torch.nn.ModuleDict)


def _unsorted(table: Iterable[str]) -> list[str] | None:
    names = [*table]
    numbers = [*map(str, range(len(names)))]
    return None if names == (numbers if {*names} == {*numbers} else sorted(names)) else names


@functools.lru_cache(maxsize=4096)
def lists_parts(code: types.CodeType) -> bool:
    """Whether code, or a function inside it, reads the parts of a module in their order."""
    # Reading the instructions takes long, and most code has no such name.
    has_name = any(not _LISTINGS.isdisjoint(inner.co_names) for inner in codes(code))
    return has_name and not _LISTINGS.isdisjoint(attributes_read(code))


def class_lists_parts(cls: type) -> bool:
    """Whether the methods that run a module or another object, and those that they call, read parts of a
    module in their order. Reads of torch's own methods do not count.
    """
    known: set[str] = set()
    todo = {*_RUNNING}
    while todo:
        name = todo.pop()
        known.add(name)
        for base in cls.__mro__:
            users = library_of_class(base) is None
            functions = _with_wrapped(vars(base).get(name)) if users else ()
            for function in filter(_is_function, functions):
                if lists_parts(function.__code__):
                    return True
                todo |= attributes_read(function.__code__) - known
    return False
