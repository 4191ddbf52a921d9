"""NumPy arrays of Python objects inside a value, in a form that has exact bytes, and back.

`datasets` gives texts, and lists of different lengths, as such arrays where the format is numpy's.
"""

from __future__ import annotations

from typing import Any

import numpy as np

# The way to a part of a value: keys and places, from the outside in.
_Path = tuple[Any, ...]


def take_apart(value: Any) -> tuple[Any, list[Any]]:
    """A value with a list in the place of each array of objects, and where these were, with their shapes."""
    arrays: list[Any] = []
    return _listed(value, (), arrays), arrays


def put_together(value: Any, arrays: list[Any]) -> Any:
    """The value that `take_apart` took apart."""
    return _with_arrays(value, (), {tuple(path): tuple(shape) for path, shape in arrays})


def _listed(value: Any, path: _Path, arrays: list[Any]) -> Any:
    if isinstance(value, np.ndarray) and value.dtype == object:
        arrays.append([list(path), list(value.shape)])
        return [_listed(item, (*path, place), arrays) for place, item in enumerate(value.flat)]
    if type(value) is dict:
        return {name: _listed(item, (*path, name), arrays) for name, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_listed(item, (*path, place), arrays) for place, item in enumerate(value))
    return value


def _with_arrays(value: Any, path: _Path, shapes: dict[_Path, tuple[int, ...]]) -> Any:
    if type(value) is dict:
        return {name: _with_arrays(item, (*path, name), shapes) for name, item in value.items()}
    if type(value) not in (list, tuple):
        return value
    items = [_with_arrays(item, (*path, place), shapes) for place, item in enumerate(value)]
    if path not in shapes:
        return type(value)(items)
    array = np.empty(len(items), object)
    for place, item in enumerate(items):
        array[place] = item
    return array.reshape(shapes[path])
