"""Questions about classes whose answers never change, each asked once.

By identity: a metaclass may forbid to compare or to hash its classes. A class that nobody uses any more is not kept
alive by what was asked about it.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import TypeVar

Answer = TypeVar("Answer")


def per_class(ask: Callable[[type], Answer]) -> Callable[[type], Answer]:
    """``ask``, called once for each class."""
    known: dict[int, tuple[weakref.ref[type], Answer]] = {}

    @functools.wraps(ask)
    def answer(cls: type) -> Answer:
        found = known.get(id(cls))
        if found is None:
            found = known[id(cls)] = weakref.ref(cls, _forget(known, id(cls))), ask(cls)
        return found[1]

    return answer


def has_member(cls: type, name: str) -> bool:
    """Whether a class or one above it defines a name: `hasattr` would ask a metaclass, which may answer anything."""
    return any(name in vars(base) for base in cls.__mro__)


def _forget(known: dict[int, tuple[weakref.ref[type], Answer]], number: int) -> Callable[[object], object]:
    return lambda _: known.pop(number, None)
