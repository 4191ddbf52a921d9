"""Annotations, docstrings and source text: texts beside the code, and where they count.

Annotations of a class always count: dataclasses, msgspec, pydantic and others make of them how a value is
read. Those of functions, all docstrings, and source text with its comments count only where some of the code
reads such texts, as a function that sends `step.__doc__` to a language model. Of the user's classes in an
annotation, those follow by their code that have annotations of their own or hooks of pydantic, and
enumerations; others count by name, since an edit of a trainer changes nothing for a record that has a field
for one. Where some of the code reads annotations, it may call any class in them, and all follow by their
code. So do those in a form such as ``Word | None`` that the code has as a value. The arguments of a generic
base (``Base[Word]``) are like annotations.

Must never: evaluate an annotation that is a text; its names are only looked up.
"""

from __future__ import annotations

import enum
import inspect
import re
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from castore.keys.bytecode import codes
from castore.keys.classes import full_name, has_member
from castore.keys.encoder import Encoder, UnencodableError
from castore.keys.libraries import library_of_class
from castore.keys.moved import name_in_keys

#: Marks of an encoder in whose code something reads docstrings, annotations, or source text.
DOCSTRINGS = "docstrings"
ANNOTATIONS = "annotations"
SOURCE = "source"
#: Mark of an encoder in whose code something uses the rules of a `transformers` tokenizer past the tokenizer.
BACKEND = "backend"
#: Names that code reads such texts by. Those of `transformers` describe functions to a model.
READERS: Mapping[str, frozenset[str]] = {
    "__doc__": frozenset({DOCSTRINGS}),
    "getdoc": frozenset({DOCSTRINGS}),
    "__annotations__": frozenset({ANNOTATIONS}),
    "__annotate__": frozenset({ANNOTATIONS}),  # since Python 3.14
    "get_annotations": frozenset({ANNOTATIONS}),
    "get_type_hints": frozenset({ANNOTATIONS}),
    "fields": frozenset({ANNOTATIONS}),  # of dataclasses: each has its annotation
    "__dataclass_fields__": frozenset({ANNOTATIONS}),
    "__orig_bases__": frozenset({ANNOTATIONS}),
    "get_original_bases": frozenset({ANNOTATIONS}),
    "__parameters__": frozenset({ANNOTATIONS}),
    "signature": frozenset({ANNOTATIONS}),
    "getfullargspec": frozenset({ANNOTATIONS}),
    "getsource": frozenset({SOURCE}),
    "getsourcelines": frozenset({SOURCE}),
    "getcomments": frozenset({SOURCE}),
    "validate_call": frozenset({ANNOTATIONS}),  # of pydantic, as the next one
    "TypeAdapter": frozenset({ANNOTATIONS}),
    "render_doc": frozenset({ANNOTATIONS, DOCSTRINGS}),
    "get_json_schema": frozenset({ANNOTATIONS, DOCSTRINGS}),
    "apply_chat_template": frozenset({ANNOTATIONS, DOCSTRINGS}),
    "model_json_schema": frozenset({DOCSTRINGS}),  # of pydantic, as the next one
    "json_schema": frozenset({DOCSTRINGS}),
    "backend_tokenizer": frozenset({BACKEND}),
    "_tokenizer": frozenset({BACKEND}),
}
_ALIASES = (type(typing.List[int]), type(typing.Union[int, str]))  # noqa: UP006, UP007 - types of old forms
#: Types of the values that stand for types.
TYPING = (types.GenericAlias, types.UnionType, typing.TypeVar, *_ALIASES)
#: Attributes of a class that have the arguments of its generic bases, and its parameters.
_GENERIC = frozenset({"__orig_bases__", "__parameters__", "__type_params__"})
#: Mark of an encoder that encodes such an attribute.
_ARGUMENTS = "arguments"
#: Methods of a class by which pydantic reads values of a field.
_PYDANTIC_HOOKS = ("__get_pydantic_core_schema__", "__get_pydantic_json_schema__", "__get_validators__")
_ADDRESS = re.compile("0x[0-9a-f]{4}", re.IGNORECASE)
_NAME = re.compile(r"[A-Za-z_][\w.]*")


def of_class(encoder: Encoder, cls: type) -> Iterator[Any]:
    """The annotations in the body of a user's class."""
    scope = getattr(sys.modules.get(cls.__module__), "__dict__", {})
    if own := _own(cls):
        yield ANNOTATIONS, [(name, [*_annotation(encoder, kind, scope)]) for name, kind in own.items()]
    if DOCSTRINGS in encoder.marks:
        yield DOCSTRINGS, _text(vars(cls).get("__doc__"))
    yield from source_of(encoder, cls)


def of_function(encoder: Encoder, function: types.FunctionType) -> Iterator[Any]:
    """The annotations and docstrings of a user's function, where code reads them."""
    if ANNOTATIONS in encoder.marks:
        scope = function.__globals__
        own = _own(function)
        yield ANNOTATIONS, [(name, [*_annotation(encoder, kind, scope)]) for name, kind in own.items()]
    if DOCSTRINGS in encoder.marks:
        inner = [code.co_consts[:1] for code in codes(function.__code__)]
        yield DOCSTRINGS, _text(function.__doc__), [_text(first) for firsts in inner for first in firsts]
    yield from source_of(encoder, function)


def source_of(encoder: Encoder, value: Any) -> Iterator[Any]:
    """The source text of a function, class or module, where code reads it and there is a file."""
    if SOURCE in encoder.marks:
        try:
            yield SOURCE, inspect.getsource(value)
        except (OSError, TypeError):
            yield SOURCE, None


def alias(encoder: Encoder, value: Any) -> Iterator[Any]:
    """The parts of a value that stands for a type: its text, and the user's classes and values in it."""
    around = encoder.marks
    counts_little = _ARGUMENTS in around and ANNOTATIONS not in around
    encoder.marks = around - {_ARGUMENTS}
    try:
        yield _spelled(value)
        for inside in _inside(value, _is_record if counts_little else _is_users_class):
            yield encoder.part(inside)
    finally:
        encoder.marks = around


def attribute(encoder: Encoder, name: str, value: Any) -> bytes:
    """The encoding of an attribute of a user's class: arguments of a generic base are like annotations."""
    around = encoder.marks
    if name in _GENERIC:
        encoder.marks = around | {_ARGUMENTS}
    try:
        return encoder.part(value, f".{name}")
    finally:
        encoder.marks = around


def new_type(encoder: Encoder, value: Any) -> Iterator[Any]:
    """The parts of a `typing.NewType`."""
    yield value.__name__, encoder.part(value.__supertype__, ".__supertype__")


def named_alias(encoder: Encoder, value: Any) -> Iterator[Any]:
    """The parts of an alias by the ``type`` statement."""
    yield "alias", value.__name__, encoder.part(value.__value__, ".__value__")


def _own(value: Any) -> Mapping[str, Any]:
    if sys.version_info >= (3, 14):
        import annotationlib

        try:
            return annotationlib.get_annotations(value)
        except Exception:  # noqa: BLE001 - annotations are evaluated late, and may name what is not there
            return annotationlib.get_annotations(value, format=annotationlib.Format.STRING)
    return inspect.get_annotations(value)


def _annotation(encoder: Encoder, kind: Any, scope: Mapping[str, Any]) -> Iterator[Any]:
    follows = _is_users_class if ANNOTATIONS in encoder.marks else _is_record
    if type(kind) is str:
        yield kind
        named = [_named(name, scope) for name in _NAME.findall(kind)]
        found = [inside for one in named for inside in _inside(one, follows)]
    elif isinstance(kind, TYPING):
        yield _spelled(kind)
        found = [*_inside(kind, follows)]
    elif issubclass(type(kind), type):
        yield f"{name_in_keys(kind.__module__)}.{kind.__qualname__}"
        found = [*_inside(kind, follows)]
    else:
        yield full_name(type(kind))
        found = [kind]
    for inside in found:
        try:
            yield encoder.part(inside)
        except UnencodableError:
            if _is_users_class(inside):
                raise
            yield _described(inside)


def _described(value: Any) -> list[str]:
    """A part of an annotation that has no encoding, by its type and text. Mostly, type checkers read it."""
    known = full_name(type(value))
    text = repr(value)
    return [known] if _ADDRESS.search(text) else [known, text]


def _named(name: str, scope: Mapping[str, Any]) -> Any:
    first, *rest = name.split(".")
    found = scope.get(first)
    for attribute in rest:
        found = vars(found).get(attribute) if isinstance(found, types.ModuleType) else None
    return found


def _is_users_class(value: Any) -> bool:
    if not issubclass(type(value), type) or isinstance(value, types.GenericAlias):
        return False
    return library_of_class(value) is None


def _is_record(value: Any) -> bool:
    if not _is_users_class(value):
        return False
    reads_itself = any(has_member(value, name) for name in _PYDANTIC_HOOKS)
    return reads_itself or issubclass(value, enum.Enum) or bool(_own(value))


def _inside(value: Any, follows: Callable[[Any], bool]) -> Iterator[Any]:
    """The user's classes that ``follows`` is true of, and the metadata of `typing.Annotated`, in a value that
    stands for a type.
    """
    if follows(value):
        yield value
    elif isinstance(value, list | tuple):  # the arguments of a Callable
        for item in value:
            yield from _inside(item, follows)
    elif isinstance(value, typing.TypeVar):
        if bounds := [bound for bound in (value.__bound__, *value.__constraints__) if bound is not None]:
            yield [_spelled(bound) for bound in bounds]
            yield from _inside(bounds, follows)
    elif isinstance(value, TYPING):
        yield from getattr(value, "__metadata__", ())
        yield from _inside(typing.get_origin(value), follows)
        yield from _inside(typing.get_args(value)[: 1 if hasattr(value, "__metadata__") else None], follows)
    elif type(value).__name__ == "TypeAliasType" and follows is _is_users_class:
        yield value  # may contain itself


def _spelled(value: Any) -> str:
    """A value that stands for a type, as text; without the metadata of `typing.Annotated`."""
    if isinstance(value, TYPING) and "Annotated[" in repr(value):
        if hasattr(value, "__metadata__"):
            return f"Annotated[{_spelled(typing.get_args(value)[0])}]"
        arguments = ", ".join(map(_spelled, typing.get_args(value)))
        return f"{typing.get_origin(value)!r}[{arguments}]"
    return repr(value)


def _text(value: Any) -> str | None:
    return value if type(value) is str else None
