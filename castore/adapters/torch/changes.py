"""Whether somebody has changed a dataset since it was wrapped: its key would then name samples that it gives no more.

Looked at are attributes, elements of lists and dicts, and what functions hold, one object below the other, by identity;
tensors by the count of writes that torch keeps, and so are all weights and buffers of a module together with its mode;
of arrays and long lists and dicts some elements; objects that say what identifies them, with ``__castore_key__``, by
what they say. A change that shows there is one if the value before and the value now count differently.
What the dataset changes itself while it is read is its own business: after each read all is noted anew, what its reading
methods assign or write to is passed over, and so is what shows while another thread reads.

Cannot see a write to single elements of a large array, list or dict, nor to a frame, nor what lies beyond the first
values, in order of depth.
"""

from __future__ import annotations

import dis
import functools
import os
import types
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import nn

from castore.adapters.torch.dataset_identity import DatasetEncoder
from castore.errors import InvalidValueError, UnhashableError
from castore.keys.bytecode import codes, steps
from castore.keys.classes import has_member, per_class
from castore.keys.libraries import library_of
from castore.keys.objects import pickled_attributes
from castore.keys.values import SHARED

_DEEPEST = 12
_MOST = 64  # values
_MOST_TENSORS = 400  # of a module
_ELEMENTS = 16
_READING = ("__getitem__", "__getitems__", "__len__", "__iter__", "__call__", "__getattr__", "forward")
_WRITING = frozenset({
    "add", "append", "appendleft", "clear", "discard", "extend", "insert", "move_to_end", "pop", "popitem", "popleft",
    "remove", "setdefault", "update",
})  # fmt: skip

#: An object, and the name of one of its attributes.
_Held: TypeAlias = "tuple[Any, str]"
#: What hangs on a value: the step of the path to it, itself, and the object whose attribute it is.
_Part: TypeAlias = "tuple[str, Any, tuple[_Held, ...]]"


class _Seen(NamedTuple):
    """A value that was noted: where it hangs, itself, what tells of writes to it, and the attributes on the way to it."""

    path: str
    value: Any
    told: object
    held: tuple[_Held, ...]


class Changes:
    """Watches a dataset.

    Args:
        data: the dataset.
        watched: False: whoever wrapped it has said what identifies it.
    """

    def __init__(self, data: Any, watched: bool) -> None:
        self._data = data
        self._watched = watched
        self._ids: list[int] = []
        self._seen: list[_Seen] | None = None
        # Of each read that goes on the process: a fork copies the reads of threads that it does not have.
        self._reads: list[int] = []
        self.note()

    def note(self) -> None:
        """Take what is there now for good."""
        if self._watched:
            self._ids = _ids(self._data)
            self._seen = _walk(self._data)

    def glance(self) -> None:
        """See whether attributes of the dataset itself have been set since. Takes a microsecond.

        Raises:
            InvalidValueError: one has, and to something else than was there.
        """
        if self._watched and self._ids != _ids(self._data):
            self._check(0)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Around a read of the dataset: nothing may have changed before, and what changes inside is the dataset's own.

        Raises:
            InvalidValueError: something has changed; the message names it.
        """
        if not self._watched:
            yield
            return
        process = os.getpid()
        self._reads.append(process)
        try:
            self._check(1)
            try:
                yield
            finally:
                self.note()
        finally:
            self._reads.remove(process)

    def _check(self, own: int) -> None:
        """See whether anything that was noted has changed; ``own`` of the reads that go on are the caller's."""
        seen = self._seen
        if seen is None:  # it came from another process
            self.note()
            return
        if self._reads.count(os.getpid()) > own:
            return
        ids, now = _ids(self._data), _walk(self._data)
        path = None
        if len(now) != len(seen) or any(
            new.value is not old.value or new.told != old.told for new, old in zip(now, seen, strict=True)
        ):
            path = _changed(seen, now)
        # Another thread's read may have begun meanwhile, or even ended: then it has noted all.
        if self._reads.count(os.getpid()) > own or self._seen is not seen:
            return
        if path is not None:
            _tell(path)
        self._ids, self._seen = ids, now

    def __getstate__(self) -> dict[str, Any]:
        # Identities mean nothing elsewhere: what was changed until now is told here.
        if self._watched:
            self._check(0)
        return {"_data": self._data, "_watched": self._watched, "_ids": [], "_seen": None, "_reads": []}


def _tell(path: str) -> None:
    raise InvalidValueError(
        f"dataset{path} has been changed since the dataset was wrapped, so samples would be kept under a key that is not"
        " theirs; change the dataset first and wrap it anew, or say what identifies the data with key=..."
    )


def _changed(seen: list[_Seen], now: list[_Seen]) -> str | None:
    """Where a change is that counts; None if none does."""
    before = {old.path: old for old in seen}
    # Where there was too much to look at, a value more makes another one drop out at the end.
    is_whole = len(seen) < _MOST and len(now) < _MOST
    for new in now:
        old = before.pop(new.path, None)
        if old is None:
            changed = is_whole
        elif old.value is new.value:
            changed = old.told != new.told
        else:
            changed = not _alike(old.value, new.value)
        if changed and _is_pickled(new):
            return new.path
    return next((old.path for old in before.values() if is_whole and _is_pickled(old)), None)


def _ids(data: Any) -> list[int]:
    attributes = getattr(data, "__dict__", None)
    return [*map(id, attributes.values())] if attributes else []


# --- what tells of writes -------------------------------------------------------------------------------------------


def _version(tensor: torch.Tensor) -> int | None:
    """How often a tensor was written to, as far as torch counts that. Not where it lies: to be sent to a worker moves it."""
    return None if tensor.is_inference() else tensor._version


def _some(array: np.ndarray[Any, Any]) -> bytes | None:
    step = max(1, array.size // _ELEMENTS)
    return array.flat[::step].tobytes() if array.dtype.fields is None else None


def _sample(values: list[Any] | tuple[Any, ...]) -> object:
    length = len(values)
    return length if length <= _ELEMENTS else (length, *map(id, values[:: length // _ELEMENTS]))


def _entries(values: dict[Any, Any]) -> object:
    if len(values) > _ELEMENTS:
        first = [*islice(dict.keys(values), _ELEMENTS), *islice(dict.values(values), _ELEMENTS)]
        return len(values), *map(id, first)
    return [key if type(key) in (str, int) else id(key) for key in [*dict.keys(values)]]


def _weights(module: nn.Module) -> object:
    """Of all modules inside one: which tensors they hold, how often these were written to, and the modules' mode."""
    modes: list[bool] = []
    tensors: list[Any] = []
    todo: list[nn.Module | None] = [module]
    while todo and len(tensors) < _MOST_TENSORS:
        inner = todo.pop()  # the last come first: a model's head is what is trained most
        if inner is not None:
            state = inner.__dict__
            modes.append(state["training"])
            for name in ("_parameters", "_buffers"):
                if state[name]:
                    tensors += state[name].values()
            if state["_modules"]:
                todo += state["_modules"].values()
    return modes, [*map(id, tensors)], _versions(tensors)


def _weights_of_script(module: Any) -> object:
    return module.training, _versions([*module.parameters(), *module.buffers()])


def _versions(tensors: list[Any]) -> list[int | None]:
    try:
        return [tensor._version for tensor in tensors if tensor is not None]
    except RuntimeError:  # those of inference mode count nothing
        return [_version(tensor) for tensor in tensors if tensor is not None]


#: By the kind of a value.
_TELLING: dict[str, Callable[[Any], object]] = {
    "keyed": lambda value: value.__castore_key__(),
    "tensor": _version,
    "array": _some,
    "list": _sample,
    "dict": _entries,
    "module": _weights,
    "script": _weights_of_script,
}


# --- what hangs on a value ------------------------------------------------------------------------------------------


def _walk(data: Any) -> list[_Seen]:
    """What is noted of a dataset and of what hangs on it, the nearest first."""
    found: list[_Seen] = []
    todo: deque[tuple[str, Any, tuple[_Held, ...], int, bool]] = deque([("", data, (), 0, False)])
    while todo and len(found) < _MOST:
        path, value, held, depth, in_module = todo.popleft()
        kind = _kind_of(type(value))
        tell = None if in_module and kind == "module" else _TELLING.get(kind)
        found.append(_Seen(path, value, tell(value) if tell else None, held))
        parts = _PARTS.get(kind)
        if parts is not None and depth < _DEEPEST and len(todo) + len(found) < _MOST:
            in_module = kind == "module"
            todo += [
                (path + step, item, held + more, depth + 1, in_module) for step, item, more in parts(value)
            ]
    return found


def _elements(values: list[Any] | tuple[Any, ...]) -> list[_Part]:
    if len(values) > _ELEMENTS:
        return []
    return [(f"[{place}]", item, ()) for place, item in enumerate(values)]


def _items(values: dict[Any, Any]) -> list[_Part]:
    if len(values) > _ELEMENTS:
        return []
    items = zip([*dict.keys(values)], [*dict.values(values)], strict=False)
    return [
        (f"[{key!r}]" if type(key) in (str, int) else f"[key {place}]", item, ())
        for place, (key, item) in enumerate(items)
    ]


def _attributes(value: Any) -> list[_Part]:
    attributes = getattr(value, "__dict__", None)
    if not attributes:
        return []
    own = _assigned(type(value))
    return [(f".{name}", item, ((value, name),)) for name, item in [*attributes.items()] if name not in own]


def _module_parts(module: nn.Module) -> list[_Part]:
    # A layer of torch's own is its weights, which are looked at for the module as a whole.
    inner = [(f".{name}", item, ()) for name, item in [*module._modules.items()] if not _is_layer(type(item))]
    own = _assigned(type(module))
    return inner + [
        (f".{name}", item, ((module, name),))
        for name, item in [*module.__dict__.items()]
        if name not in _OF_TORCH and name not in own
    ]


@per_class
def _is_layer(cls: type) -> bool:
    """Whether values of a class are layers of torch's own, or none."""
    module = cls.__module__
    return cls is type(None) or (module.startswith("torch.nn.modules.") and not module.endswith(".container"))


def _function_parts(function: types.FunctionType) -> list[_Part]:
    if library_of(function.__globals__.get("__name__")):
        wrapped = getattr(function, "__wrapped__", None)
        return [(".__wrapped__", wrapped, ())] if wrapped is not None else []
    code = function.__code__
    values: dict[str, Any] = dict(function.__kwdefaults__ or ())
    defaults = function.__defaults__ or ()
    names = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
    values |= zip(names, defaults, strict=True)
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            values[name] = cell.cell_contents
        except ValueError:  # the enclosing function has not come to it yet
            continue
    own = _names_written(code)
    return [(f".{name}", item, ()) for name, item in values.items() if name not in own]


def _partial_parts(partial: functools.partial[Any]) -> list[_Part]:
    return [(f".{name}", getattr(partial, name), ()) for name in ("func", "args", "keywords")]


#: By the kind of a value.
_PARTS: dict[str, Callable[[Any], list[_Part]]] = {
    "object": _attributes,
    "list": _elements,
    "dict": _items,
    "module": _module_parts,
    "function": _function_parts,
    "method": lambda method: [(".__self__", method.__self__, ())],
    "partial": _partial_parts,
    "compiled": lambda module: [("", module._modules["_orig_mod"], ())],
}
_OF_TORCH = frozenset(vars(nn.Module()))
_PLAIN = (str, bytes, int, float, bool, complex, type(None), type, types.ModuleType, np.ndarray)


@per_class
def _kind_of(cls: type) -> str:
    """How values of a class are looked at."""
    if has_member(cls, "__castore_key__"):
        return "keyed"
    for kind, base in (
        ("tensor", torch.Tensor), ("script", torch.jit.ScriptModule), ("dict", dict), ("partial", functools.partial),
        ("function", types.FunctionType), ("method", types.MethodType),
    ):  # fmt: skip
        if issubclass(cls, base):
            return kind
    if issubclass(cls, nn.Module):
        return "compiled" if cls.__name__ == "OptimizedModule" else "module"
    if cls is np.ndarray:
        return "array"
    if cls is list or cls is tuple:
        return "list"
    if issubclass(cls, _PLAIN) or SHARED.of(cls) is not None:
        return "plain"
    # What a library reduces in a way of its own has attributes that say nothing: loggers, indices of pandas.
    reducing = next(
        (base for base in cls.__mro__[:-1] if {"__reduce__", "__reduce_ex__"} & {*vars(base)}), None
    )
    return "plain" if reducing is not None and library_of(reducing.__module__) else "object"


# --- what is the dataset's own business -----------------------------------------------------------------------------


@per_class
def _assigned(cls: type) -> frozenset[str]:
    """Attributes that the methods assign or write to by which a dataset or a transform is read: a handle that is
    opened late, a counter, a dict of what was read; and what cached properties keep.
    """
    found = {name for base in cls.__mro__ for name, member in vars(base).items() if _is_cached(member)}
    known: set[str] = set()
    todo = {*_READING}
    while todo:
        name = todo.pop()
        known.add(name)
        member = next((vars(base)[name] for base in cls.__mro__ if name in vars(base)), None)
        function = getattr(member, "__func__", getattr(member, "fget", getattr(member, "func", member)))
        if isinstance(function, types.FunctionType):
            found |= {name[1:] for name in _names_written(function.__code__) if name.startswith(".")}
            rows = [row for inner in codes(function.__code__) for row in steps(inner)]
            loaded = {argument for opname, argument in rows if opname in ("LOAD_ATTR", "LOAD_METHOD")}
            todo |= {name for name in loaded if isinstance(name, str)} - known
    return frozenset(found)


def _is_cached(member: object) -> bool:
    return isinstance(member, functools.cached_property)


@functools.lru_cache(maxsize=4096)
def _names_written(code: types.CodeType) -> frozenset[str]:
    """Names of the variables that code assigns, or whose elements it sets, removes or adds to; of attributes with a dot."""
    found: set[str] = set()
    for inner in codes(code):
        rows = [row for row in dis.get_instructions(inner) if row.opname != "EXTENDED_ARG"]
        for at, row in enumerate(rows):
            if row.opname == "STORE_ATTR":
                found.add(f".{row.argval}")
            elif row.opname == "STORE_DEREF":
                found.add(row.argval)
            elif row.opname in ("STORE_SUBSCR", "DELETE_SUBSCR") or _is_in_place(rows, at):
                found |= _name_at(rows, _before(rows, at))
            elif row.opname in ("LOAD_ATTR", "LOAD_METHOD") and row.argval in _WRITING:
                found |= _name_at(rows, at)
    return frozenset(found)


def _is_in_place(rows: list[dis.Instruction], at: int) -> bool:
    """Whether ``values[key] += …`` begins here, once both are on the stack."""
    copies = [(row.opname, row.arg) for row in rows[at : at + 2]]
    return copies == [("COPY", 2), ("COPY", 2)] or copies[0][0] == "DUP_TOP_TWO"


def _before(rows: list[dis.Instruction], at: int) -> int:
    """Where the instructions begin that make the topmost value that the one at ``at`` takes from the stack."""
    height = 0
    while at > 0 and height < 1:
        at -= 1
        height += dis.stack_effect(rows[at].opcode, rows[at].arg, jump=False)
    return at


def _name_at(rows: list[dis.Instruction], at: int) -> set[str]:
    """The name of the attribute or variable that the instruction in front of ``at`` loads."""
    if at and rows[at - 1].opname == "LOAD_ATTR":
        return {f".{rows[at - 1].argval}"}
    return {rows[at - 1].argval} if at and rows[at - 1].opname in ("LOAD_DEREF", "LOAD_FAST") else set()


def _alike(old: Any, new: Any) -> bool:
    """Whether two values count alike."""
    try:
        return DatasetEncoder().encode(old, "") == DatasetEncoder().encode(new, "")
    except UnhashableError:
        return False


def _is_pickled(seen: _Seen) -> bool:
    """Whether pickle would keep all the attributes on the way to a value."""
    for value, name in seen.held:
        kept = pickled_attributes(value)
        if kept is not None and name not in kept:
            return False
    return True
