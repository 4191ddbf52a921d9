"""Detects that a dataset was changed after it was wrapped: its key would then name samples it no longer
returns.

The scan covers attributes, elements of lists and dicts, and what functions hold, one object below the other.
The scan compares objects by identity, and tensors by torch's version counter. A module counts by its mode and
the version counters of all its weights and buffers. Arrays and long lists and dicts count by a sample of
their elements, and objects with ``__castore_key__`` by the value it returns. A difference is a change if the
value before and the value now encode differently.

The dataset may change itself while it is read: after each read the scan is repeated. Attributes that the
dataset's reading methods assign or write to are skipped. A difference that appears while another thread reads
is ignored.

Globals that the code refers to are compared by digests when a pass over the dataset begins, in each new
worker, and before a read if a name is bound to another object: that takes about a millisecond, which is too
long for each sample.

Cannot see a write to single elements of a large array, list or dict, a write to a frame, or anything beyond
the first values, in order of depth.
"""

from __future__ import annotations

import functools
import os
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import nn

from castore.adapters.torch.dataset_identity import DATASETS
from castore.adapters.torch.outside import Binding, Outside, outside_of
from castore.errors import InvalidValueError, UnhashableError
from castore.keys.bytecode import attributes_read, names_written
from castore.keys.classes import has_member, per_class
from castore.keys.libraries import library_of
from castore.keys.pickled import kept_by_properties, pickled_attributes
from castore.keys.tracing import encode
from castore.keys.values import SHARED

_DEEPEST = 12
_MOST = 64  # values
_MOST_TENSORS = 400  # of a module
_ELEMENTS = 16
_READING = ("__getitem__", "__getitems__", "__len__", "__iter__", "__call__", "__getattr__", "forward")

#: An object, and the name of one of its attributes.
_Held: TypeAlias = "tuple[Any, str]"
#: A part of a value: the step of the path to the part, the part, and the (object, attribute) pairs that hold
#: it.
_Part: TypeAlias = "tuple[str, Any, tuple[_Held, ...]]"


class _Seen(NamedTuple):
    """A noted value: its path, the value, the mark that a write changes, the attributes on its path."""

    path: str
    value: Any
    mark: object
    held: tuple[_Held, ...]


class Changes:
    """Watches a dataset.

    Args:
        data: the dataset.
        watched: False where the caller named the data with a key: nothing is checked then.
    """

    def __init__(self, data: Any, watched: bool) -> None:
        self._data = data
        self._watched = watched
        self._ids: list[int] = []
        self._seen: list[_Seen] | None = None
        # The process of each read in progress: after a fork the list still has reads of threads that the
        # child lacks.
        self._reads: list[int] = []
        self._process = os.getpid()
        self._digests: dict[str, set[bytes]] = {}  # of what lies outside
        self._bindings: list[Binding] = []
        self._has_read = False  # since the values outside were noted
        self.note()
        if self._watched:
            self._digests, self._bindings = _outside(data)

    def note(self) -> None:
        """Accept the present state as the unchanged one."""
        if self._watched:
            self._ids = _ids(self._data)
            self._seen = _walk(self._data)

    def glance(self) -> None:
        """Check whether attributes of the dataset itself have been set since the last note. Takes a
        microsecond, but in a new process as long as `check`.

        Raises:
            InvalidValueError: an attribute was set to a different value.
        """
        if not self._watched:
            return
        if self._process != os.getpid():
            self.check()
        elif self._ids != _ids(self._data):
            self._check(0)

    def check(self) -> None:
        """Check for all changes, those of globals too.

        Raises:
            InvalidValueError: something has changed; the message names it.
        """
        if not self._watched:
            return
        self._process = os.getpid()
        self._check(0)
        self._check_outside()

    def _check_outside(self) -> None:
        outside = _outside(self._data)
        for label, digests in outside.digests.items():
            before = self._digests.get(label, digests)
            if not before <= digests and not digests <= before:  # one has more where more code was reached
                _raise_changed(f"{label}, which the dataset refers to,")
        self._bindings = outside.bindings

    def passing(self, samples: Iterator[Any]) -> Iterator[Any]:
        """The samples of a pass over the dataset: check for all changes before it, accept those that reads
        have made at its end.

        Raises:
            InvalidValueError: something has changed; the message names it.
        """
        self.check()
        return self._settled(samples)

    def _settled(self, samples: Iterator[Any]) -> Iterator[Any]:
        try:
            yield from samples
        finally:
            if self._has_read and not sys.is_finalizing():
                self._digests, self._bindings = _outside(self._data)
                self._has_read = False

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Surround a read of the dataset: check for changes before it, accept the dataset's own changes
        during it.

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
            if len(self._reads) == 1 and any(binding.is_old() for binding in self._bindings):
                self._check_outside()
            try:
                yield
            finally:
                self._has_read = True
                self.note()
                self._bindings = [binding.now() for binding in self._bindings]
        finally:
            self._reads.remove(process)

    def _check(self, own: int) -> None:
        """Check whether any noted value has changed; ``own`` of the reads in progress are the caller's."""
        seen = self._seen
        if seen is None:  # it came from another process
            self.note()
            return
        if self._reads.count(os.getpid()) > own:
            return
        ids, now = _ids(self._data), _walk(self._data)
        path = None
        if len(now) != len(seen) or any(
            new.value is not old.value or new.mark != old.mark for new, old in zip(now, seen, strict=True)
        ):
            path = _changed(seen, now)
        # Another thread's read may have begun meanwhile, or even ended: that read has noted everything.
        if self._reads.count(os.getpid()) > own or self._seen is not seen:
            return
        if path is not None:
            _raise_changed(f"dataset{path}")
        self._ids, self._seen = ids, now

    def __getstate__(self) -> dict[str, Any]:
        # Identities mean nothing in another process: check for changes before the pickle leaves this one.
        self.check()
        return {**vars(self), "_ids": [], "_seen": None, "_bindings": [], "_reads": [], "_process": None}


def _outside(data: Any) -> Outside:
    """The values that the code of a dataset and of its parts refers to outside of them."""
    code: dict[int, Any] = {}
    for seen in _walk(data):
        kind = _kind_of(type(seen.value))
        held = type(seen.value) if kind in ("object", "module") else seen.value
        if isinstance(held, types.FunctionType | type) and library_of(held.__module__) is None:
            code[id(held)] = held
    return outside_of(code.values())


def _raise_changed(what: str) -> None:
    raise InvalidValueError(
        f"{what} has been changed since the dataset was wrapped, so samples would be kept under a key "
        "that is not theirs; change the dataset first and wrap it anew, or say what identifies the data with "
        "key=..."
    )


def _changed(seen: list[_Seen], now: list[_Seen]) -> str | None:
    """The path of a change that counts; None if there is none."""
    before = {old.path: old for old in seen}
    # A walk that reached the limit proves nothing about its last values: a new value pushes another one out.
    is_whole = len(seen) < _MOST and len(now) < _MOST
    for new in now:
        old = before.pop(new.path, None)
        if old is None:
            changed = is_whole
        elif old.value is new.value:
            changed = old.mark != new.mark
        else:
            changed = not _alike(old.value, new.value)
        if changed and _is_pickled(new):
            return new.path
    return next((old.path for old in before.values() if is_whole and _is_pickled(old)), None)


def _ids(data: Any) -> list[int]:
    attributes = getattr(data, "__dict__", None)
    return [*map(id, attributes.values())] if attributes else []


# --- marks that a write changes
# -------------------------------------------------------------------------------


def _version(tensor: torch.Tensor) -> int | None:
    """The version counter of a tensor. Its address does not count: sending a tensor to a worker moves it."""
    return None if tensor.is_inference() else tensor._version


def _some(array: np.ndarray[Any, Any]) -> object:
    step = max(1, array.size // _ELEMENTS)
    if array.dtype.kind == "T":  # the bytes are places in memory, and NumPy breaks what `flat` copies
        return [array.item(place) for place in range(0, array.size, step)]
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
    """The tensors of all modules inside one, their version counters, and the modules' modes."""
    modes: list[bool] = []
    tensors: list[Any] = []
    todo: list[nn.Module | None] = [module]
    while todo and len(tensors) < _MOST_TENSORS:
        inner = todo.pop()  # the last come first: a model's head is trained most
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
    except RuntimeError:  # tensors of inference mode have no version counter
        return [_version(tensor) for tensor in tensors if tensor is not None]


#: The function that makes a value's mark, by the kind of the value.
_MARKERS: dict[str, Callable[[Any], object]] = {
    "keyed": lambda value: value.__castore_key__(),
    "tensor": _version,
    "array": _some,
    # A map that is only read changes with its file alone, which would have to be read here.
    "mapped": lambda value: None if value.mode == "r" else _some(np.asarray(value)),
    "list": _sample,
    "dict": _entries,
    "module": _weights,
    "script": _weights_of_script,
}


# --- parts of a value
# -----------------------------------------------------------------------------------------


def _walk(data: Any) -> list[_Seen]:
    """The noted values of a dataset and of all its parts, the nearest first."""
    found: list[_Seen] = []
    todo: deque[tuple[str, Any, tuple[_Held, ...], int, bool]] = deque([("", data, (), 0, False)])
    while todo and len(found) < _MOST:
        path, value, held, depth, in_module = todo.popleft()
        kind = _kind_of(type(value))
        marker = None if in_module and kind == "module" else _MARKERS.get(kind)
        found.append(_Seen(path, value, marker(value) if marker else None, held))
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
    # A layer of torch's own is its weights, and the scan covers those for the module as a whole.
    inner = [(f".{name}", item, ()) for name, item in [*module._modules.items()] if not _is_layer(type(item))]
    own = _assigned(type(module))
    return inner + [
        (f".{name}", item, ((module, name),))
        for name, item in [*module.__dict__.items()]
        if name not in _OF_TORCH and name not in own
    ]


@per_class
def _is_layer(cls: type) -> bool:
    """Whether a class is a layer of torch's own."""
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
        except ValueError:  # the enclosing function has not assigned the variable yet
            continue
    own = names_written(code)
    return [(f".{name}", item, ()) for name, item in values.items() if name not in own]


def _partial_parts(partial: functools.partial[Any]) -> list[_Part]:
    return [(f".{name}", getattr(partial, name), ()) for name in ("func", "args", "keywords")]


#: The function that lists a value's parts, by the kind of the value.
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
    """The kind of a class's values, which decides how they are scanned."""
    if has_member(cls, "__castore_key__"):
        return "keyed"
    for kind, base in (
        ("tensor", torch.Tensor), ("script", torch.jit.ScriptModule), ("dict", dict),
        ("partial", functools.partial),
        ("function", types.FunctionType), ("method", types.MethodType),
    ):  # fmt: skip
        if issubclass(cls, base):
            return kind
    if issubclass(cls, nn.Module):
        return "compiled" if cls.__name__ == "OptimizedModule" else "module"
    if cls is np.ndarray:
        return "array"
    if cls is np.memmap:
        return "mapped"
    if cls is list or cls is tuple:
        return "list"
    if issubclass(cls, _PLAIN) or SHARED.of(cls) is not None:
        return "plain"
    # Objects that a library reduces in its own way have attributes that show nothing: loggers, pandas
    # indices.
    reducing = next(
        (base for base in cls.__mro__[:-1] if {"__reduce__", "__reduce_ex__"} & {*vars(base)}), None
    )
    return "plain" if reducing is not None and library_of(reducing.__module__) else "object"


# --- attributes that the dataset may change itself
# ------------------------------------------------------------


@per_class
def _assigned(cls: type) -> frozenset[str]:
    """Attributes that the methods which read a dataset or a transform assign or write to: a handle that is
    opened late, a counter, a dict of samples read. Cached properties count among them.
    """
    found = set(kept_by_properties(cls))
    known: set[str] = set()
    todo = {*_READING}
    while todo:
        name = todo.pop()
        known.add(name)
        member = next((vars(base)[name] for base in cls.__mro__ if name in vars(base)), None)
        function = getattr(member, "__func__", getattr(member, "fget", getattr(member, "func", member)))
        if isinstance(function, types.FunctionType):
            found |= {name[1:] for name in names_written(function.__code__) if name.startswith(".")}
            todo |= attributes_read(function.__code__) - known
    return frozenset(found)


def _alike(old: Any, new: Any) -> bool:
    """Whether two values encode alike."""
    try:
        return encode(DATASETS, old, "").code == encode(DATASETS, new, "").code
    except UnhashableError:
        return False


def _is_pickled(seen: _Seen) -> bool:
    """Whether pickle would keep all the attributes on the way to a value."""
    for value, name in seen.held:
        kept = pickled_attributes(value)
        if kept is not None and name not in kept:
            return False
    return True
