"""Classes whose library keeps outside their bodies, or beside compiled forms, what the bodies declare.

Also classes to which a library adds, while they are used, what follows from their bodies.

The compiled form of a pydantic model has addresses in it, and follows from fields, validators and settings.
A struct of msgspec has its defaults and options in its metaclass. attrs puts a number of the process into the
hash function that it writes. Must never: import a library.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from castore.keys.classes import has_member
from castore.keys.encoder import AnyOrder, Encoder

# The origin and the arguments of a generic model. pydantic derives all else of this prefix.
_KEPT_OF_PYDANTIC = {"__pydantic_generic_metadata__"}
_PYDANTIC = "__pydantic_"


def declared(encoder: Encoder, cls: Any, noise: set[str]) -> Iterator[Any]:
    """The parts of a user's class that such a library keeps; what follows from them is added to ``noise``."""
    if has_member(cls, "__pydantic_fields__"):
        derived = {name for name in vars(cls) if name.startswith(_PYDANTIC)} | {"__signature__"}
        noise |= derived - _KEPT_OF_PYDANTIC
        yield from _of_pydantic(encoder, cls)
    if "__attrs_attrs__" in vars(cls) and _is_of_attrs(vars(cls).get("__hash__")):
        noise.add("__hash__")  # it has a number that differs in each process; the attributes determine it
        yield "hash", "of attrs"
    if "_explicit_class_assumptions" in vars(cls):  # sympy derives these, in an order of sets
        noise |= {"default_assumptions", "_prop_handler"}
    if {"_declared_fields", "_hooks"} <= vars(cls).keys():
        noise.add("_hooks")  # of marshmallow, which adds empty lists when it first looks
    msgspec = sys.modules.get("msgspec")
    if msgspec is not None and issubclass(type(cls), type(msgspec.Struct)):
        yield from _of_msgspec(encoder, cls, msgspec)


def _is_of_attrs(method: Any) -> bool:
    code = getattr(method, "__code__", None)
    return code is not None and code.co_filename.startswith("<attrs generated")


def _of_pydantic(encoder: Encoder, cls: Any) -> Iterator[Any]:
    for name, field in vars(cls).get("__pydantic_fields__", {}).items():
        # The annotation counts with those of the class; private attributes say how far pydantic is with it.
        told = {
            key: getattr(field, key, None) for key in field.__slots__ if key[0] != "_" and key != "annotation"
        }
        yield name, encoder.part(AnyOrder(told), f".{name}")
    kinds: Any = vars(cls).get("__pydantic_decorators__")
    for kind in getattr(kinds, "__dataclass_fields__", ()):
        # The functions themselves are in the class's body, or in that of a base.
        infos = getattr(kinds, kind, None)
        if isinstance(infos, dict) and infos:
            yield kind, [(name, encoder.part(info.info, f".{name}")) for name, info in infos.items()]


def _of_msgspec(encoder: Encoder, cls: Any, msgspec: Any) -> Iterator[Any]:
    yield cls.__struct_fields__, cls.__struct_encode_fields__
    for default in cls.__struct_defaults__:
        # A default is a value, a holder of the function that makes it, or the mark that there is none.
        if default is msgspec.NODEFAULT:
            yield "no default"
        else:
            yield "default", encoder.part(getattr(default, "factory", default), ".__struct_defaults__")
    config = cls.__struct_config__
    options = sorted(name for name in dir(config) if not name.startswith("__"))
    yield [(name, encoder.part(getattr(config, name), f".{name}")) for name in options]
