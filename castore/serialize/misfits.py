"""Finds the part of a value that cannot be stored, and the path to it as the user would write it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from castore.serialize.kinds import Form, MisfitError, fields_of, take_apart, way_out


def find_misfit(
    value: Any, path: str, is_leaf: Callable[[Any], bool], is_refused: Callable[[Form], bool] | None = None
) -> tuple[str, str] | None:
    """Return the path of the first part that cannot be stored, with the problem and the remedy; else None.

    Args:
        value: the whole value.
        path: how the path begins.
        is_leaf: whether the caller stores a part as it is.
        is_refused: whether the caller does not want parts of a form.
    """

    def misfits(obj: Any, path: str) -> Iterator[tuple[str, str]]:
        if type(obj) in (list, tuple):
            for place, item in enumerate(obj):
                yield from misfits(item, f"{path}[{place}]")
        elif type(obj) is dict:
            for name, item in obj.items():
                yield from misfits(name, f"{path}.keys()")
                yield from misfits(item, f"{path}[{name!r}]")
        elif not is_leaf(obj):
            try:
                form = take_apart(obj)
            except MisfitError as error:
                yield path, error.problem
                return
            if form is None or (is_refused is not None and is_refused(form)):
                yield path, f"{type(obj)} has no serializer; {way_out(obj)}"
                return
            for step, part in fields_of(form):
                yield from misfits(part, path + step)

    try:
        return next(misfits(value, path), None)
    except RecursionError:
        return path, "is nested too deep, or contains itself; keep its parts in entries of their own"
