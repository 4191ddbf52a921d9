"""Objects that a call's result has in two places, or shares with the columns that the call was given.

A function may return one list under two names, or hand on a column under a second name. A later change of
such a list in place changes both. Bytes hold a list for each place. So the places are noted beside them, and
hold one object again when the result is read. Two arrays that share memory are not seen.

Must never share with an argument what the call has changed in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from castore.errors import SerializationError

#: Types of values that nobody can change.
FIXED = frozenset({str, int, float, bool, bytes, type(None)})

# The number of an argument, or None for the result, and the keys and numbers on the way.
_Place = list[Any]
#: A place in a result, and the place that has the same object.
Shared = list[_Place]


def find_shared(output: Any, arguments: Sequence[Any]) -> list[Shared]:
    """The places of a result whose object is in another place as well.

    Of columns that the result has, too, those of the result count: `datasets` goes on with them, and the
    call may have changed the others.

    Args:
        output: the result.
        arguments: of the call, as they were before it, for the function may have put other columns there. The
            call has changed none of the columns that are not in the result.

    Raises:
        SerializationError: such a place is in a tuple, or behind a key that is no text and no number.
    """
    if next(_inside(output), None) is None:
        return []
    seen: dict[int, _Place] = {}
    for number, given in enumerate(arguments):
        if type(given) is dict:
            returned = output if isinstance(output, dict) else {}
            for name, column in _inside(given):
                if name not in returned:
                    _note(column, [number, name], seen)
        elif type(given) not in FIXED:
            _note(given, [number], seen)
    shared: list[Shared] = []
    for key, value in _inside(output):
        _note(value, [None, key], seen, shared, is_in_tuple=type(output) is tuple)
    return shared


def share(shared: Sequence[Shared], output: Any, arguments: Sequence[Any]) -> None:
    """Have one object again in the places of a result that had one.

    Args:
        shared: what `find_shared` gave.
        output: the result, changed in place.
        arguments: those of a call that are equal to the arguments then.

    Raises:
        LookupError, TypeError: there are no such places.
    """
    for (_, *way, last), (number, *other) in shared:
        _at(output, way)[last] = _at(output if number is None else arguments[number], other)


def _at(value: Any, way: Sequence[Any]) -> Any:
    for key in way:
        value = value[key]
    return value


def _note(
    value: Any,
    place: _Place,
    seen: dict[int, _Place],
    shared: list[Shared] | None = None,
    *,
    is_in_tuple: bool = False,
) -> None:
    """Note the place of a value, and of all in it.

    Args:
        value, place: the value, and its place.
        seen: the first place of each object, by its id.
        shared: receives the places of a result whose objects are in ``seen``; None for an argument.
        is_in_tuple: whether the value lies in a tuple.
    """
    if _is_changeable(value):
        first = seen.setdefault(id(value), place)
        if first is not place:
            if shared is not None:
                if is_in_tuple or type(place[-1]) not in (str, int):
                    raise SerializationError(
                        f"an object of {type(value)} is in two places, of which one is in a tuple or has a "
                        "key that is no text and no number; copy it there"
                    )
                shared.append([place, first])
            return
    for key, inner in _inside(value):
        _note(inner, [*place, key], seen, shared, is_in_tuple=type(value) is tuple)


def _inside(value: Any) -> Iterator[tuple[Any, Any]]:
    """The contents of a dict, a list or a tuple, by key or number, but for plain values."""
    if isinstance(value, dict):
        if not FIXED.issuperset(map(type, value.values())):
            yield from ((key, item) for key, item in value.items() if type(item) not in FIXED)
    elif isinstance(value, list | tuple) and not FIXED.issuperset(map(type, value)):
        yield from ((place, item) for place, item in enumerate(value) if type(item) not in FIXED)


def _is_changeable(value: Any) -> bool:
    """Whether a value can be changed in place."""
    kind = type(value)
    return isinstance(value, set) or hasattr(kind, "__setitem__") or kind.__module__.startswith("PIL.")
