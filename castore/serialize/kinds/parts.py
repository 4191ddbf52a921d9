"""The words that all kinds share: a form, a kind, the error for a value that cannot be kept, and checks of parts.

Knows no kind itself, and imports nothing that a kind is about.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")


class MisfitError(Exception):
    """A value cannot be kept; collects the path to it on its way up. Never leaves castore."""

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self.problem = problem
        self.path: list[str] = []


class Form(NamedTuple):
    """A value taken apart.

    Attributes:
        kind: the name of its kind, as it is written.
        detail: which class it is, for kinds that have many; else None.
        parts: plain values, containers of them, and values of other kinds.
    """

    kind: str
    detail: str | None
    parts: Any

    def fields(self) -> Iterator[tuple[str, Any]]:
        """What the user knows of the parts: the way from the value to each, as code says it, and the part."""
        if self.kind not in _WITH_FIELDS:
            yield "", self.parts
            return
        fields, rest = self.parts
        if self.kind == "tensor":
            yield "", fields
            fields = {}
        for name, part in {**fields, **(rest or {})}.items():
            yield f".{name}", part

    def say_path(self, path: list[str]) -> list[str]:
        """Steps inside the parts, the innermost first, as the user knows them."""
        if self.kind not in _WITH_FIELDS:
            return path
        *inner, place = path
        if inner and (self.kind, place) != ("tensor", "[0]"):
            inner[-1] = f".{inner[-1][2:-2]}"  # ['name']
        return inner


#: Kinds whose parts are the fields by name and what else an instance holds by name; of a tensor, the plain one and that.
_WITH_FIELDS = frozenset({"namedtuple", "dataclass", "tensor"})


class Kind(NamedTuple):
    """One class of a library, and the two directions.

    Attributes:
        name: how it is written.
        module, attribute: where the class is.
        take: the parts of a value, or a whole `Form`, where values of one class are of several kinds; raises MisfitError.
        make: a value of these parts, which may be lies: raises any Exception that `put_together` knows.
    """

    name: str
    module: str
    attribute: str
    take: Callable[[Any], Any]
    make: Callable[[Any], Any]

    def loaded(self) -> type | None:
        """The class, if somebody has imported its module."""
        module = sys.modules.get(self.module)
        return None if module is None else getattr(module, self.attribute, None)


def expect(kind: type[T], value: Any) -> T:
    """A part that must be of exactly this type."""
    if type(value) is not kind:
        raise ValueError(f"a {type(value).__name__} stands where a {kind.__name__} belongs")
    return value


def listed(count: int, parts: Any) -> list[Any]:
    """Parts that must be a list of so many."""
    if len(expect(list, parts)) != count:
        raise ValueError(f"it has {len(parts)} parts, not {count}")
    return list(parts)
