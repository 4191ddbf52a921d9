"""Removes from an operator the parameters that one of its methods never reads, for the key of its results.

Only `process` reads a threshold. So what `compute_stats` of a filter or `compute_hash` of a deduplicator has
found once serves every threshold. A method's instructions show which attributes it reads, and the methods
that it calls on ``self`` are followed. This reading is sound as long as ``self`` is used for nothing but
reading its attributes by name. All of the operator counts wherever ``self`` is used otherwise (passed on,
kept in a closure, written to, inspected), and wherever a class decides for itself how it is read or pickled.
Must never leave out a parameter that could be read.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Iterator
from typing import Any

from castore.keys.bytecode import single

_OWN_WAYS = (
    "__getattr__", "__getattribute__", "__getstate__", "__reduce__", "__reduce_ex__", "__getnewargs__",
    "__getnewargs_ex__", "__new__", "__slots__", "__castore_key__", "__deepcopy__", "__copy__",
)  # fmt: skip
# With these a function sees its own variables, or its caller's, without naming them.
_READS_VARIABLES = {
    "locals",
    "vars",
    "eval",
    "exec",
    "dir",
    "_getframe",
    "currentframe",
    "stack",
    "get_objects",
    "super",
}
_IN_PYTHON = 1 << 9  # Py_TPFLAGS_HEAPTYPE
#: The methods that find what others decide by.
METHOD_OF_STATS, METHOD_OF_HASHES = "compute_stats", "compute_hash"


class _Unclear(Exception):
    """The attributes read cannot be determined."""


def without_unread(operator: Any, method: str) -> Any:
    """The operator as a method sees it: a copy without the parameters that it ignores, or the operator
    itself.

    Args:
        operator: the operator.
        method: `METHOD_OF_STATS` or `METHOD_OF_HASHES`; its forms for batches and for single samples count,
            too.

    >>> class LengthFilter:
    ...     def __init__(self, column, least):
    ...         self.column, self.least = column, least
    ...     def compute_stats(self, sample):
    ...         sample["__dj__stats__"]["length"] = len(sample[self.column])
    ...         return sample
    ...     def process(self, sample):
    ...         return sample["__dj__stats__"]["length"] >= self.least
    >>> vars(without_unread(LengthFilter("text", least=100), METHOD_OF_STATS))
    {'column': 'text'}
    """
    own = type(operator).__mro__[:-1]
    if dataclasses.is_dataclass(operator):
        return operator  # it is encoded by all of its fields
    in_python = all(cls.__flags__ & _IN_PYTHON for cls in own)
    if not in_python or any(name in vars(cls) for cls in own for name in _OWN_WAYS):
        return operator
    try:
        read = _read(operator, method)
    except _Unclear:
        return operator
    if read >= vars(operator).keys():
        return operator
    seen = object.__new__(type(operator))
    vars(seen).update({name: value for name, value in vars(operator).items() if name in read})
    return seen


def _read(operator: Any, method: str) -> set[str]:
    """Names of the instance's attributes that a method may read."""
    read: set[str] = set()
    followed: set[str] = set()
    forms = (method, f"{method}_batched", f"{method}_single", "is_batched_op")
    waiting = [name for name in forms if hasattr(operator, name)]
    while waiting:
        name = waiting.pop()
        if name in followed:
            continue
        followed.add(name)
        if name in vars(operator):
            read.add(name)  # if the operator is in the attribute, all of it counts
        for function in _functions(operator, name):
            waiting += _names_read(function)
    return read


def _functions(operator: Any, name: str) -> Iterator[types.FunctionType]:
    """The functions that get the operator as their first argument when its attribute is read, or called."""
    holder = next((cls for cls in type(operator).__mro__ if name in vars(cls)), None)
    if name.startswith("__") or (holder is None and name not in vars(operator)):
        raise _Unclear
    found = None if holder is None else vars(holder)[name]
    if isinstance(found, property) and isinstance(found.fget, types.FunctionType):
        yield found.fget
    elif isinstance(found, types.FunctionType):
        if name not in vars(operator):
            yield found
    elif not isinstance(found, staticmethod) and hasattr(type(found), "__get__"):
        raise _Unclear


def _names_read(function: types.FunctionType) -> set[str]:
    """The attributes of its first argument that a function reads."""
    code = function.__code__
    if not code.co_argcount or set(code.co_names) & _READS_VARIABLES or hasattr(function, "__wrapped__"):
        raise _Unclear
    itself, names = code.co_varnames[0], set()
    if itself in code.co_cellvars:
        raise _Unclear
    steps = list(single(code))
    for step, following in zip(steps, [*steps[1:], None], strict=True):
        if step.argval != itself:
            continue
        reads = step.opname in ("LOAD_FAST", "LOAD_FAST_CHECK")
        if not reads or following is None or following.opname not in ("LOAD_ATTR", "LOAD_METHOD"):
            raise _Unclear
        names.add(str(following.argval))
    return names
