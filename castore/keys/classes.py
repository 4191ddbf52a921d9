"""Remembers answers to questions about classes, for answers that never change.

Classes are compared by identity: a metaclass may forbid comparing or hashing its classes. A remembered answer
does not keep its class alive.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import TypeVar

Answer = TypeVar("Answer")


def per_class(ask: Callable[[type], Answer]) -> Callable[[type], Answer]:
    """Wrap ``ask`` so that it is called once for each class."""
    known: dict[int, tuple[weakref.ref[type], Answer]] = {}

    @functools.wraps(ask)
    def answer(cls: type) -> Answer:
        found = known.get(id(cls))
        if found is None:
            found = known[id(cls)] = weakref.ref(cls, _forget(known, id(cls))), ask(cls)
        return found[1]

    return answer


def has_member(cls: type, name: str) -> bool:
    """Whether a class or one of its bases defines a name. Unlike `hasattr`, runs no code of a metaclass."""
    return any(name in vars(base) for base in cls.__mro__)


def _forget(known: dict[int, tuple[weakref.ref[type], Answer]], number: int) -> Callable[[object], object]:
    return lambda _: known.pop(number, None)
