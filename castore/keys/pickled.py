"""The state of objects as pickle's protocol defines it: `copyreg` first, then `__reduce_ex__`.

Attributes that `__getstate__` leaves out do not count, nor do attributes that an object's use changes and no
result depends on.

Must never: pickle anything.
"""

from __future__ import annotations

import copyreg
import functools
import pickle
import sys
import types
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

from castore.keys.bytecode import names_written
from castore.keys.classes import per_class
from castore.keys.encoder import AnyOrder, Encoder, UnencodableError, order_of_keys
from castore.keys.libraries import library_of, library_of_class
from castore.keys.torch_modules import (
    EVAL,
    EVAL_BEHIND,
    IN_ORDER,
    TABLES,
    class_lists_parts,
    is_module,
    order_of_parts,
    renumbered,
    settles,
    settles_behind,
)

_PARAMETRIZED = "torch.nn.utils.parametrize"
#: torch sets these on a module that it compiles, Lightning the third one, and torch.jit.script the last one.
_MODULE_NOISE = {"_compiled_call_impl", "_is_torch_compile", "_compile_kwargs", "__overloads__"}
#: Vectorizers of scikit-learn store here the id of the stop word list that they have checked.
_SKLEARN_NOISE = {"_stop_words_id"}
#: Configs of transformers store in the first Python's hash of a text, which is another one in each process,
#: and pipelines count their calls in the second.
_TRANSFORMERS_NOISE = {"_original_object_hash", "call_count"}
#: Templates that jinja2 has loaded or run already, and its question whether a template's file is newer.
_JINJA_NOISE = {"cache", "_module", "_uptodate"}


def object_parts(encoder: Encoder, value: Any) -> Iterator[Any]:
    """Yield the parts of an object: its class, and its state as pickle's protocol defines it."""
    encoder.number(value)
    yield encoder.part(type(value), f" -> {type(value).__name__}")
    reduced = _reduced(value)
    if type(reduced) is str:  # the name of a global object
        yield from _global_parts(encoder, value, reduced)
        return
    make, arguments, state, items, pairs, setter = (*reduced, None, None, None, None)[:6]
    yield encoder.part(make)
    # The class was encoded above, and is among the arguments of every object.
    yield encoder.part(tuple(item for item in arguments if item is not type(value)), " -> arguments")
    yield encoder.part(list(items) if items is not None else None)
    # The order of an OrderedDict follows after its attributes.
    ordered = issubclass(type(value), OrderedDict)
    pairs = None if pairs is None else AnyOrder(pairs) if ordered else dict(pairs)
    yield encoder.part(pairs)
    if setter is not None:
        yield "setter", encoder.part(setter)
    around = encoder.marks
    encoder.marks = around | marks_of(type(value))
    try:
        yield from state_parts(encoder, lasting(encoder, value, state))
        order = order_of_keys(pairs or {}) if ordered else order_of_parts(value, encoder.marks)
    finally:
        encoder.marks = around
    if order is not None:
        yield "order", encoder.part(order)


@per_class
def marks_of(cls: type) -> frozenset[str]:
    """The marks of an encoder inside an object of a class."""
    return frozenset(
        mark
        for mark, applies in ((EVAL, settles), (EVAL_BEHIND, settles_behind), (IN_ORDER, class_lists_parts))
        if applies(cls)
    )


def lasting(encoder: Encoder, value: Any, state: Any) -> Any:
    """The state of an object without attributes that its use changes and no result depends on.

    Returns:
        None if nothing is left.
    """
    if type(state) is tuple and len(state) == 2:  # of a class with __slots__
        attributes, slots = state
        return state if type(attributes) is not dict else (lasting(encoder, value, attributes), slots)
    if type(state) is not dict:
        return state
    if "__pydantic_fields_set__" in state and type(state.get("__dict__")) is dict:
        return {**state, "__dict__": lasting(encoder, value, state["__dict__"])}
    noise, of_module = _noise_of(type(value))
    if of_module and EVAL in encoder.marks:
        noise = noise | {"training"}
    kept = {name: item for name, item in state.items() if name not in noise}
    if "_random_state" in kept and _is_global_generator(kept["_random_state"]):
        del kept["_random_state"]  # of scipy's distributions; a generator of the user's own counts
    if of_module and EVAL_BEHIND in encoder.marks and "training" in kept:
        # Models that are in eval mode already keep the keys under which stores have their results.
        kept["training"] = False
    if of_module:
        encoder.unordered |= {id(kept[name]) for name in TABLES & kept.keys()}
    return (renumbered(kept) if of_module else kept) or None


def _is_global_generator(value: Any) -> bool:
    """Whether a value is the generator that NumPy's functions draw from."""
    numpy = sys.modules.get("numpy.random.mtrand")
    return numpy is not None and value is numpy._rand


def state_parts(encoder: Encoder, state: Any) -> Iterator[Any]:
    """Yield the encoded attributes of an object, or the encoded result of its `__getstate__`."""
    left_out = encoder.rules.left_out
    if left_out and type(state) is dict:
        state = {name: item for name, item in state.items() if name not in left_out}
    # With __slots__ there are two dicts: attributes in `__dict__`, and those in slots.
    parts = state if type(state) is tuple and len(state) == 2 else (state,)
    for part in parts:
        if type(part) is dict and all(type(name) is str for name in part):
            yield [(name, encoder.part(part[name], f".{name}")) for name in sorted(part)]
        else:
            yield encoder.part(part, ".__getstate__()")


def _reduced(value: Any) -> Any:
    """Reduce an object as pickle does: by `copyreg`'s table, or by the object's `__reduce_ex__`."""
    cls = type(value)
    # A parametrized module refuses to be pickled, because its class has no global name.
    if is_module(cls) and cls.__module__ == _PARAMETRIZED:
        return copyreg.__newobj__, (cls,), vars(value)  # type: ignore[attr-defined]
    registered = copyreg.dispatch_table.get(cls)
    try:
        reduced = value.__reduce_ex__(4) if registered is None else registered(value)
    except RecursionError:
        raise
    except Exception as error:  # the user's __getstate__ may raise anything
        problem = f"{type(error).__name__}: {error}" if isinstance(error, LookupError) else error
        advice = (
            "pass what it was made of, or leave it out in the __getstate__ of what holds it"
            if library_of_class(cls)
            else "leave it out in __getstate__, or give its class a __castore_key__ method"
        )
        raise UnencodableError(f"cannot hash {cls}: {problem}; {advice}") from error
    if type(reduced) is str or (type(reduced) is tuple and 2 <= len(reduced) <= 6):
        return reduced
    raise UnencodableError(
        f"cannot hash {cls}: its __reduce_ex__ gives {type(reduced)}, which pickle cannot use"
    )


def pickled_attributes(value: Any) -> dict[str, Any] | None:
    """The attributes of an object in its pickled state; None if that state is no dict."""
    reduced = _reduced(value)
    state = reduced[2] if type(reduced) is tuple and len(reduced) > 2 else None
    return state if type(state) is dict else None


def _global_parts(encoder: Encoder, value: Any, name: str) -> Iterator[Any]:
    """The name by which pickle would look an object up; of an object of the user's also its state, since the
    module that pickle would import may say something else by then.
    """
    module: str = pickle.whichmodule(value, name)  # type: ignore[attr-defined]
    yield _global(value, module, name)
    if library_of(module):
        return
    held = getattr(value, "__dict__", None) or {}
    if library_of_class(type(value)) is None:
        yield from state_parts(encoder, lasting(encoder, value, _attributes(value)))
    elif "__wrapped__" in held:  # a wrapper, such as those of cachetools, whose own state is a memory
        yield encoder.part(held["__wrapped__"], ".__wrapped__")


def _attributes(value: Any) -> dict[str, Any]:
    """The attributes of an object, those in slots too."""
    slots = [
        (name, item)
        for base in type(value).__mro__
        for name, item in vars(base).items()
        if isinstance(item, types.MemberDescriptorType)
    ]
    found = {name: item.__get__(value) for name, item in slots if hasattr(value, name)}
    return {**found, **getattr(value, "__dict__", {})}


def _global(value: Any, module: str, name: str) -> str:
    """The name of a global object, with its library's where the library put it there."""
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is not value and (library := library_of(module)):
        return f"{name} in {library}"  # the library chose between several, by the processor
    if found is not value:
        raise UnencodableError(
            f"cannot hash {type(value)}: it calls itself {name!r}, and {module} has another of that name; "
            "give its class a __castore_key__ method"
        )
    return name


@per_class
def kept_by_properties(cls: type) -> frozenset[str]:
    """Names of the attributes in which a class's cached properties keep their values, and nothing else.

    A subclass may put another member in a property's place, and methods may assign to the name.
    """
    members = {name: member for base in reversed(cls.__mro__) for name, member in vars(base).items()}
    names = {name for name, member in members.items() if isinstance(member, functools.cached_property)}
    if names:
        methods = [member for base in cls.__mro__ for member in vars(base).values()]
        written = [names_written(one.__code__) for one in methods if isinstance(one, types.FunctionType)]
        names -= {name[1:] for found in written for name in found if name.startswith(".")}
    return frozenset(names)


@per_class
def _noise_of(cls: type) -> tuple[frozenset[str], bool]:
    """Names of attributes that do not count, and whether the class is a torch module."""
    # Values of cached properties do not count: the properties' code counts, with the class.
    noise = kept_by_properties(cls)
    of_module = is_module(cls)
    noise |= _MODULE_NOISE if of_module else set()
    for library, names in (
        ("sklearn.", _SKLEARN_NOISE), ("transformers.", _TRANSFORMERS_NOISE), ("jinja2.", _JINJA_NOISE),
    ):  # fmt: skip
        noise |= names if any(base.__module__.startswith(library) for base in cls.__mro__) else set()
    return frozenset(noise), of_module
