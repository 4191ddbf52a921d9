"""Questions about classes, and their answers remembered where these never change.

Classes are compared by identity: a metaclass may forbid comparing or hashing its classes. A remembered answer
does not keep its class alive.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

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
    for base in cls.__mro__:  # noqa: SIM110 - `any` takes twice the time, and each encoded object asks
        if name in vars(base):
            return True
    return False


def full_name(cls: type) -> str:
    """Module and name of a type, the same in a spawned worker, which has another name for the main module."""
    module = cls.__module__
    return f"{'__main__' if module == '__mp_main__' else module}.{cls.__qualname__}"


def registered(cls: type, value: Any) -> Any:
    """The part of a class attribute that counts: of a weak collection its present items, of other values all.

    Instances of the class do not count in a `WeakSet` or as values of a `WeakValueDictionary`: such a
    collection lists the instances that happen to live, as ``__subclasses__`` lists classes.
    """
    kind = type(value)
    if kind not in (weakref.WeakSet, weakref.WeakValueDictionary, weakref.WeakKeyDictionary):
        return value
    if kind is weakref.WeakKeyDictionary:
        return kind.__name__, dict(value)
    if kind is weakref.WeakSet:
        return kind.__name__, {item for item in value if not issubclass(type(item), cls)}
    return kind.__name__, {name: item for name, item in value.items() if not issubclass(type(item), cls)}


def _forget(known: dict[int, tuple[weakref.ref[type], Answer]], number: int) -> Callable[[object], object]:
    return lambda _: known.pop(number, None)
