"""The values that lie nearest in a dataset or an encoder, with marks that a write to a value changes.

`walk` lists them, objects inside objects: attributes, also those in ``__slots__``, what functions hold, and
elements of short containers. A value that is the same object may still have been written to: its mark tells.
The mark of a tensor is torch's count of writes, and one element, since fused optimizers and NumPy write
without counting. The mark of a module has the same of its weights, and its children, hooks and modes. Arrays,
long lists and dicts have a sample of their elements, and objects of the user's classes the members of the
class. Marks are compared within one process alone. Must never run code of the user's but ``__castore_key__``.
"""

from __future__ import annotations

import functools
import inspect
import operator
import types
import weakref
from array import array
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from castore.keys.bytecode import attributes_read, names_written
from castore.keys.classes import has_member, per_class
from castore.keys.libraries import library_of, library_of_class
from castore.keys.pickled import kept_by_properties, marks_of
from castore.keys.torch_modules import EVAL, EVAL_BEHIND, is_compiled
from castore.keys.values import SHARED

_DEEPEST = 12
_MOST_TENSORS = 2000  # of a module
_ELEMENTS = 16
_FEW = 8
_SEQUENCES = (list, tuple, deque)
_READING = ("__getitem__", "__getitems__", "__len__", "__iter__", "__call__", "__getattr__", "forward")

#: An object, and the name of one of its attributes.
_Held: TypeAlias = "tuple[Any, str]"
#: A part of a value: the step of the path to the part, the part, and the (object, attribute) pairs that hold
#: it.
_Part: TypeAlias = "tuple[str, Any, tuple[_Held, ...]]"


class Seen(NamedTuple):
    """A noted value: its path, the value, the mark that a write changes, the attributes on its path."""

    path: str
    value: Any
    mark: object
    held: tuple[_Held, ...]


def walk(data: Any, most: int, *, marked: bool = True) -> list[Seen]:
    """The noted values of a dataset or an encoder and of all its parts, the nearest first. Fewer are the
    beginning of more.

    Args:
        data: the dataset.
        most: how many values, at most.
        marked: with marks, which cost most of the time. Default True.
    """
    found: list[Seen] = []
    classes: set[int] = set()  # by identity: a metaclass may forbid hashing its classes
    todo: deque[tuple[str, Any, tuple[_Held, ...], int, bool]] = deque([("", data, (), 0, False)])
    while todo and len(found) < most:
        path, value, held, depth, in_module = todo.popleft()
        kind = kind_of(value)
        marker = _class if in_module and kind == "module" else _MARKERS.get(kind)
        found.append(Seen(path, value, marker(value) if marker and marked else None, held))
        parts = _PARTS.get(kind)
        if parts is not None and depth < _DEEPEST and len(todo) + len(found) < most:
            in_module = kind == "module"
            inner = parts(value)
            if kind in _WITH_CLASS and id(_class_of(value)) not in classes:
                classes.add(id(_class_of(value)))
                inner = inner + _class_parts(_class_of(value))
            todo += [(path + step, item, held + more, depth + 1, in_module) for step, item, more in inner]
    return found


def differ(seen: Sequence[Seen], now: Sequence[Seen]) -> bool:
    """Whether two walks met different objects, or objects that were written to between them."""
    return len(seen) != len(now) or any(
        new.value is not old.value or new.mark != old.mark for old, new in zip(seen, now, strict=True)
    )


class State(NamedTuple):
    """A value and what lies within it, without paths: in a third of the time of `walk`.

    Attributes:
        values: the values, which are compared by identity.
        marks: of those that can be written to.
    """

    values: list[Any]
    marks: list[object]

    @classmethod
    def of(cls, value: Any, most: int) -> State:
        """The state of now.

        Args:
            value: the value.
            most: how many values that are no leaves, at most.
        """
        if type(value) in _LEAVES or kind_of(value) == "plain":
            return cls([value], [])
        values, marks, met = [value], [], set[int]()  # by identity, as `values` keeps them
        todo = deque([(value, False)])
        for _ in range(most):
            if not todo:
                break
            value, in_module = todo.popleft()
            if id(value) in met:  # a child may know its parent
                continue
            met.add(id(value))
            kind = kind_of(value)
            marker = _class if in_module and kind == "module" else _MARKERS.get(kind)
            if marker is not None:
                marks.append(marker(value))
            inner = _held_by(kind, value)
            if kind in _WITH_CLASS and (kind == "class" or id(_class_of(value)) not in met):
                met.add(id(_class_of(value)))
                inner += [item for _, item, _ in _class_parts(_class_of(value))]
            values += inner
            in_module = kind == "module"
            todo += [(item, in_module) for item in inner if type(item) not in _LEAVES]
        return cls(values, marks)

    def is_same(self, other: State) -> bool:
        """Whether nothing has come, gone or been written to between two looks."""
        return (
            len(self.values) == len(other.values)
            and all(map(operator.is_, self.values, other.values))
            and self.marks == other.marks
        )


def _held_by(kind: str, value: Any) -> list[Any]:
    """The parts of a value."""
    if kind == "dict":
        return [] if len(value) > _ELEMENTS else [*dict.values(value)]
    parts = _PARTS.get(kind)
    return [item for _, item, _ in parts(value)] if parts is not None else []


_LEAVES = frozenset({bool, int, float, complex, str, bytes, type(None)})


# --- marks that a write changes -----------------------------------------------------------------------------


def _tensor(tensor: torch.Tensor) -> object:
    """The count of writes to a tensor, and one element. The tensor's address does not count: sending a tensor
    to a worker moves it.
    """
    return _versions([tensor]), _element(tensor)


def _element(tensor: torch.Tensor) -> object:
    """An element from the middle of a tensor; None for one on a device, which would have to wait for it."""
    if not tensor.is_cpu:
        return None
    try:
        array = tensor.detach().numpy()  # in half of the time that torch's own indexing takes
        value = array.item(array.size // 2) if array.size else None
    except (TypeError, RuntimeError):  # bfloat16, and layouts and subclasses that NumPy does not know
        value = _element_by_index(tensor)
    return value if value == value else "nan"


def _element_by_index(tensor: torch.Tensor) -> object:
    if tensor.layout is not torch.strided or tensor.is_nested or not tensor.numel():
        return None
    try:
        return tensor.detach()[tuple(length // 2 for length in tensor.shape)].item()
    except (RuntimeError, NotImplementedError):  # a subclass's, or of a dtype without elements of Python's
        return None


def _some(array: np.ndarray[Any, Any]) -> object:
    return array.shape, array.dtype, _sampled(array)


def _sampled(array: np.ndarray[Any, Any]) -> object:
    step = max(1, array.size // _ELEMENTS)
    if array.dtype.kind == "T":  # the bytes are places in memory, and NumPy breaks what `flat` copies
        return [array.item(place) for place in range(0, array.size, step)]
    if array.dtype.kind == "O":
        return [*map(id, array.flat[::step])]
    return None if array.dtype.hasobject else array.flat[::step].tobytes()


def _bytes(values: bytearray | array[Any]) -> object:
    return len(values), bytes(values[:: max(1, len(values) // _ELEMENTS)])


def _sequence(values: Any) -> Any:
    """The methods of a list, tuple or deque: those of a subclass may be the user's code."""
    return list if isinstance(values, list) else tuple if isinstance(values, tuple) else deque


def _sample(values: Any) -> object:
    base = _sequence(values)
    length = base.__len__(values)
    if length <= _ELEMENTS:
        return length
    if base is deque:  # which has no slices, and takes long to reach its middle
        ends = (*range(_ELEMENTS // 2), *range(-_ELEMENTS // 2, 0))
        return length, *(id(deque.__getitem__(values, place)) for place in ends)
    return length, *map(id, base.__getitem__(values, slice(None, None, length // _ELEMENTS)))


def _members(values: set[Any] | frozenset[Any]) -> object:
    return len(values), None if len(values) > _ELEMENTS else {*map(id, values)}


def _entries(values: dict[Any, Any]) -> object:
    base = OrderedDict if isinstance(values, OrderedDict) else dict  # has an order of its own
    makes = id(values.default_factory) if isinstance(values, defaultdict) else 0
    if len(values) > _ELEMENTS:
        first = [*islice(base.keys(values), _ELEMENTS), *islice(base.values(values), _ELEMENTS)]
        return makes, len(values), *map(id, first)
    return [makes, *(key if type(key) in (str, int) else id(key) for key in [*base.keys(values)])]


def _function(function: types.FunctionType) -> object:
    return id(function.__code__), [*map(id, function.__dict__.values())]


def _weights(module: nn.Module) -> object:
    """The modules inside one, their modes and hooks; their tensors, with the counts of writes to all and
    elements of some.
    """
    # A module that sets itself to eval before it is used gives the same in either mode.
    has_mode = not marks_of(type(module)) & {EVAL, EVAL_BEHIND}
    inside: list[object] = []
    tensors: list[Any] = []
    todo: list[nn.Module | None] = [module]
    while todo and len(tensors) < _MOST_TENSORS:
        inner = todo.pop()  # the last come first: a model's head is trained most
        if isinstance(inner, torch.jit.ScriptModule):
            inside.append(_weights_of_script(inner))
        elif inner is not None:
            state = inner.__dict__
            inside += [id(inner), has_mode and state["training"]]
            inside += [id(state.get("forward")), id(type(inner).forward)]
            if state["_parameters"]:
                tensors += state["_parameters"].values()
            if state["_buffers"]:
                own = assigned(type(inner))  # a count of calls, say
                tensors += [item for name, item in state["_buffers"].items() if name not in own]
            for name in ("_forward_hooks", "_forward_pre_hooks"):
                if state[name]:
                    inside += [id(hook) for hook in state[name].values() if not only_observes(hook)]
            if state["_modules"]:
                todo += state["_modules"].values()
    held = [tensor for tensor in tensors if tensor is not None]
    some = held[:_FEW] + held[_FEW :: max(1, len(held) // _FEW)]
    return inside, [*map(id, tensors)], _versions(held), [*map(_element, some)]


def only_observes(hook: Any) -> bool:
    """Whether a hook is of a library's tool that changes no result: torch's counter of operations, what
    transformers collects hidden states with.
    """
    return str(getattr(hook, "__module__", "")).startswith(("torch.utils.", "transformers.utils."))


#: How often fused optimizers, which torch does not count, have written to a tensor, by the tensor's id.
_fused: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}


def _count_fused(optimizer: Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        for tensor in group["params"] if group.get("fused") else ():
            number = id(tensor)
            if number not in _fused:
                _fused[number] = weakref.ref(tensor, functools.partial(_forget_fused, number)), 0
            known, count = _fused[number]
            _fused[number] = known, count + 1


def _forget_fused(number: int, _: object) -> None:
    _fused.pop(number, None)


register_optimizer_step_post_hook(_count_fused)


def fused_writes(tensors: list[Any]) -> list[int]:
    """How often fused optimizers have written to tensors, in all."""
    return [_fused[id(tensor)][1] for tensor in tensors if id(tensor) in _fused] if _fused else []


def _rules_of_tokenizer(tokenizer: Any) -> object:
    """The parts of a tokenizer of `tokenizers` that somebody may set, but for truncation and padding, which
    calls of transformers set.
    """
    names = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
    return tokenizer.get_vocab_size(), [repr(getattr(tokenizer, name)) for name in names]


def _weights_of_script(module: Any) -> object:
    tensors = [*module.parameters(), *module.buffers()]
    return _settings_of_script(module), _versions(tensors), [*map(_element, tensors[:_ELEMENTS])]


def _settings_of_script(module: Any) -> list[object]:
    """The attributes of a compiled module and of those inside it. A traced or frozen one has none to set."""
    found: list[object] = []
    for inner in module.modules():
        kind = vars(inner).get("_concrete_type")
        names = kind.get_attributes() if kind is not None else ()
        own = [name for name in names if name not in inner._parameters and name not in inner._buffers]
        found += [_value_of_script(getattr(inner, name), _DEEPEST) for name in own]
    return found


def _value_of_script(value: Any, deepest: int) -> object:
    """A value that torch converts anew each time somebody reads it."""
    if isinstance(value, torch.Tensor):
        return _tensor(value)
    if type(value) in (list, tuple, dict) and len(value) <= _ELEMENTS and deepest:
        items = value.items() if type(value) is dict else enumerate(value)
        return [(name, _value_of_script(item, deepest - 1)) for name, item in items]
    return value if type(value) in (bool, int, float, str, type(None)) else repr(value)


def _versions(tensors: list[Any]) -> list[object]:
    try:
        found: list[object] = [tensor._version for tensor in tensors]
    except RuntimeError:  # tensors of inference mode have no version counter
        found = [None if tensor.is_inference() else tensor._version for tensor in tensors]
    return [found, fused_writes(tensors)]


def _class(value: Any) -> object:
    """The class of an object, or a class, and what stands in the user's classes among its bases."""
    cls = _class_of(value)
    own = assigned(cls) | _written_by_methods(cls)
    return id(cls), [
        id(item)
        for base in _users_bases(cls)
        for name, item in [*vars(base).items()]
        if name not in own and (name in _READING or not name.startswith("__"))
    ]


def _class_of(value: Any) -> type:
    return value if is_class(value) else type(value)


@per_class
def _written_by_methods(cls: type) -> frozenset[str]:
    """Attributes that methods of a class assign, such as a count of its objects."""
    members = (item for base in _users_bases(cls) for item in vars(base).values())
    functions = (getattr(item, "__func__", item) for item in members)
    written = (names_written(item.__code__) for item in functions if isinstance(item, types.FunctionType))
    return frozenset(name[1:] for names in written for name in names if name.startswith("."))


@per_class
def _users_bases(cls: type) -> tuple[type, ...]:
    return tuple(base for base in cls.__mro__ if library_of_class(base) is None)


#: The function that makes a value's mark, by the kind of the value.
_MARKERS: dict[str, Callable[[Any], object]] = {
    "keyed": lambda value: value.__castore_key__(),
    "tensor": _tensor,
    "object": _class,
    "class": _class,
    "function": _function,
    "array": _some,
    # A map that is only read changes with its file alone, which would have to be read here.
    "mapped": lambda value: None if value.mode == "r" else _some(np.asarray(value)),
    "list": _sample,
    "set": _members,
    "bytes": _bytes,
    "dict": _entries,
    "module": lambda module: (_class(module), _weights(module)),
    "script": _weights_of_script,
    "tokenizer": _rules_of_tokenizer,
}


# --- parts of a value ---------------------------------------------------------------------------------------


def _elements(values: Any) -> list[_Part]:
    base = _sequence(values)
    if base.__len__(values) > _ELEMENTS:
        return []
    # A copy first: another thread may append to a deque, which ends its iteration with an error.
    return [(f"[{place}]", item, ()) for place, item in enumerate([*base.__iter__(values)])]


def _items(values: dict[Any, Any]) -> list[_Part]:
    if len(values) > _ELEMENTS:
        return []
    items = zip([*dict.keys(values)], [*dict.values(values)], strict=False)
    return [
        (f"[{key!r}]" if type(key) in (str, int) else f"[key {place}]", item, ())
        for place, (key, item) in enumerate(items)
    ]


def attributes_of(value: Any) -> dict[str, Any]:
    """An object's attributes, those in ``__slots__`` too, without running code of its class."""
    found = dict(getattr(value, "__dict__", None) or ())
    for name, slot in _slots(type(value)):
        try:
            found[name] = slot.__get__(value)
        except AttributeError:  # not set
            continue
    return found


def ids_of_attributes(value: Any) -> list[int]:
    """The identities of an object's attributes. Takes a microsecond."""
    # A copy is made in one go: another thread may set attributes meanwhile.
    attributes = list((getattr(value, "__dict__", None) or {}).values())
    found = [*map(id, attributes)]
    return [*found, *map(id, attributes_of(value).values())] if _slots(type(value)) else found


@per_class
def _slots(cls: type) -> tuple[tuple[str, Any], ...]:
    members = ((name, item) for base in reversed(cls.__mro__) for name, item in vars(base).items())
    return tuple((name, item) for name, item in members if isinstance(item, types.MemberDescriptorType))


def _attributes(value: Any) -> list[_Part]:
    own = assigned(type(value))
    return [
        (f".{name}", item, ((value, name),)) for name, item in attributes_of(value).items() if name not in own
    ]


def _module_parts(module: nn.Module) -> list[_Part]:
    # A layer of torch's own is its weights, and the scan covers those for the module as a whole.
    inner: list[_Part] = [
        (f".{name}", item, ()) for name, item in [*module._modules.items()] if not _is_layer(type(item))
    ]
    holders = [
        module,
        *(item for item in module._modules.values() if item is not None and _is_layer(type(item))),
    ]
    inner += [
        (".hook", hook, ())
        for holder in holders
        for hook in (
            *holder._forward_hooks.values(), *holder._forward_pre_hooks.values(), vars(holder).get("forward"),
        )
        if hook is not None and not only_observes(hook)
    ]  # fmt: skip
    own = assigned(type(module))
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


def function_parts(function: types.FunctionType) -> list[_Part]:
    """The defaults and the closure of a user's function, without what it writes to."""
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


def _class_parts(cls: type) -> list[_Part]:
    """The values in the user's classes that can be written to: a registry, a table of weights, a config, also
    those in the closures of methods.
    """
    found: list[_Part] = [
        (f".{name}", item, ()) for name, item in class_values(cls) if kind_of(item) != "plain"
    ]
    for base in _users_bases(cls):
        for name, item in [*vars(base).items()]:
            method = getattr(item, "__func__", item)
            if isinstance(method, types.FunctionType):
                found += [(f".{name}{step}", value, ()) for step, value, _ in function_parts(method)]
    return found


def class_values(cls: type) -> list[tuple[str, Any]]:
    """Names and values in the bodies of a class and of its bases, if these are the user's and none of their
    methods writes to them. Without functions and other descriptors.
    """
    own = assigned(cls) | _written_by_methods(cls) | _BY_USE
    return [
        (name, item)
        for base in _users_bases(cls)
        for name, item in [*vars(base).items()]
        if name not in own and not name.startswith("__") and not has_member(type(item), "__get__")
    ]


# A flag of several members is noted there once it was made; those that a class was made with are in another.
_BY_USE = {"_value2member_map_"}


#: The kinds of values that have the values in their class's body as parts.
_WITH_CLASS = frozenset({"object", "module", "class"})
#: The function that lists a value's parts, by the kind of the value.
_PARTS: dict[str, Callable[[Any], list[_Part]]] = {
    "object": _attributes,
    "class": lambda cls: [],
    "list": lambda values: _elements(values) + _attributes(values),
    "dict": _items,
    "module": _module_parts,
    "function": function_parts,
    "method": lambda method: [(".__self__", method.__self__, ())],
    "partial": _partial_parts,
    "compiled": lambda module: [("", module._modules["_orig_mod"], ())],
}
# transformers notes in the last that it has put its own hooks there.
_OF_TORCH = frozenset(vars(nn.Module())) | {"_output_capturing_hooks_installed"}
_PLAIN = (str, bytes, int, float, bool, complex, type(None), type, types.ModuleType, np.ndarray)


def kind_of(value: Any) -> str:
    """The kind of a value, which decides how it is scanned."""
    if is_class(value):
        return "plain" if library_of_class(value) else "class"
    return _kind_of_values(type(value))


def is_class(value: Any) -> bool:
    """Whether a value is a class. `isinstance` would read the value's ``__class__``."""
    return issubclass(type(value), type)


@per_class
def _kind_of_values(cls: type) -> str:
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
        return "compiled" if is_compiled(cls) else "module"
    if (cls.__module__, cls.__name__) == ("tokenizers", "Tokenizer"):
        return "tokenizer"
    if cls is np.ndarray:
        return "array"
    if cls is np.memmap:
        return "mapped"
    for kind, bases in (("list", _SEQUENCES), ("set", (set, frozenset)), ("bytes", (bytearray, array))):
        if issubclass(cls, bases):
            return kind
    if issubclass(cls, types.SimpleNamespace):
        return "object"
    if issubclass(cls, _PLAIN) or SHARED.of(cls) is not None:
        return "plain"
    # Objects that a library reduces in its own way have attributes that show nothing: loggers, pandas
    # indices.
    reducing = next(
        (base for base in cls.__mro__[:-1] if {"__reduce__", "__reduce_ex__"} & {*vars(base)}), None
    )
    return "plain" if reducing is not None and library_of(reducing.__module__) else "object"


# --- attributes that the dataset may change itself ----------------------------------------------------------


@per_class
def assigned(cls: type) -> frozenset[str]:
    """Attributes that the methods which read a dataset or a transform assign or write to: a handle that is
    opened late, a counter, a dict of samples read. Cached properties count among them.
    """
    found = set(kept_by_properties(cls))
    known: set[str] = set()
    todo = {*_READING}
    while todo:
        name = todo.pop()
        known.add(name)
        for member in (
            vars(base)[name] for base in cls.__mro__ if name in vars(base)
        ):  # super() calls others
            function = getattr(member, "__func__", getattr(member, "fget", getattr(member, "func", member)))
            if isinstance(function, types.FunctionType):
                code = inspect.unwrap(function).__code__
                found |= {name[1:] for name in names_written(code) if name.startswith(".")}
                todo |= attributes_read(code) - known
    return frozenset(found)
