"""The base of all kinds: `Form`, `Kind`, the error for a value that cannot be stored, and checks of parts.

Must never: know a particular kind, or import a library that a kind is about.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")


class MisfitError(Exception):
    """A value cannot be stored. Never leaves castore."""

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self.problem = problem


class Form(NamedTuple):
    """A value taken apart.

    Attributes:
        kind: name of the value's kind, as it is stored.
        detail: name of the class, for kinds that have many classes; else None.
        parts: plain values, containers of them, and values of other kinds.
    """

    kind: str
    detail: str | None
    parts: Any


def whole(parts: Any) -> Iterator[tuple[str, Any]]:
    """Yield the parts of a kind as one, at the value's own path."""
    yield "", parts


class Kind(NamedTuple):
    """One class of a library, and both directions.

    Attributes:
        name: name of the kind, as it is stored.
        module, attribute: where the class is.
        take: returns the parts of a value, or a whole `Form` if values of one class are of several kinds.
            Raises MisfitError.
        make: returns a value made of parts, which may be false. Raises any of the exceptions that
            `put_together` handles.
        fields: yields each part as the user knows it: the path from the value, written as code, and the part.
    """

    name: str
    module: str
    attribute: str
    take: Callable[[Any], Any]
    make: Callable[[Any], Any]
    fields: Callable[[Any], Iterator[tuple[str, Any]]] = whole

    def loaded(self) -> type | None:
        """The class if its module is imported, else None."""
        module = sys.modules.get(self.module)
        return None if module is None else getattr(module, self.attribute, None)


def expect(kind: type[T], value: Any) -> T:
    """Return the value if it is of exactly this type, else raise ValueError."""
    if type(value) is not kind:
        raise ValueError(f"a {type(value).__name__} stands where a {kind.__name__} belongs")
    return value


def listed(count: int, parts: Any) -> list[Any]:
    """Return the parts if they are a list of ``count`` items, else raise ValueError."""
    if len(expect(list, parts)) != count:
        raise ValueError(f"it has {len(parts)} parts, not {count}")
    return list(parts)
