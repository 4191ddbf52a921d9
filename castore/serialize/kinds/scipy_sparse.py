"""Kinds of SciPy: sparse arrays and matrices, each by the arrays that make it up.

`take` imports nothing: an object can be of these kinds only in a process that has imported `scipy.sparse`.
Must never: hand out indices that have not been checked, since SciPy's compiled code trusts them.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

from castore.serialize.kinds.forms import Kind, MisfitError, expect, listed
from castore.serialize.problems import need


def _made(name: str, given: Any, shape: Any) -> Any:
    """A matrix of the class, which checks as much as its constructor does."""
    need("scipy")
    sides = tuple(expect(int, side) for side in expect(list, shape))
    return getattr(importlib.import_module("scipy.sparse"), name)(given, shape=sides)


def _arrays(parts: Any) -> list[Any]:
    numpy = need("numpy", "torch")
    for part in expect(list, parts):
        expect(numpy.ndarray, part)
    return list(parts)


#: Attributes of SciPy's own. The notes with an underscore are made again when a method asks.
_OWN = {
    "_shape", "maxprint", "data", "indices", "indptr", "coords", "row", "col", "offsets",
    "_has_sorted_indices", "_has_canonical_format", "has_canonical_format",
}  # fmt: skip


def _check_attributes(value: Any) -> None:
    others = sorted(set(vars(value)) - _OWN)
    if others:
        raise MisfitError(f"has the attribute {others[0]}, which would be lost; keep it beside the matrix")


def _take_compressed(value: Any) -> Any:
    _check_attributes(value)
    return [list(value.shape), [value.data, value.indices, value.indptr]]


def _make_compressed(name: str, parts: Any) -> Any:
    shape, arrays = listed(2, parts)
    data, indices, indptr = listed(3, _arrays(arrays))
    if indices.dtype.kind != "i" or indptr.dtype.kind != "i":
        raise ValueError(f"indices are numbers of {indices.dtype} and {indptr.dtype}")
    made = _made(name, (data, indices, indptr), shape)
    made.check_format(full_check=True)
    # The constructor takes narrower integers for both where these suffice.
    made.indices = made.indices.astype(indices.dtype, copy=False)
    made.indptr = made.indptr.astype(indptr.dtype, copy=False)
    return made


def _take_coordinates(value: Any) -> Any:
    _check_attributes(value)
    coordinates = [value.row, value.col] if value.ndim == 2 else list(value.coords)
    return [list(value.shape), value.data, coordinates, bool(value.has_canonical_format)]


def _make_coordinates(name: str, parts: Any) -> Any:
    shape, data, coordinates, canonical = listed(4, parts)
    made = _made(name, (*_arrays([data]), tuple(_arrays(coordinates))), shape)
    made.has_canonical_format = expect(bool, canonical)
    return made


def _take_diagonals(value: Any) -> Any:
    _check_attributes(value)
    return [list(value.shape), [value.data, value.offsets]]


def _make_diagonals(name: str, parts: Any) -> Any:
    shape, arrays = listed(2, parts)
    data, offsets = listed(2, _arrays(arrays))
    made = _made(name, (data, offsets), shape)
    made.offsets = made.offsets.astype(offsets.dtype, copy=False)
    return made


def _take_other(value: Any) -> Any:
    raise MisfitError(f"is a sparse matrix of the form {value.format}; convert it with tocsr()")


def _make_other(name: str, parts: Any) -> Any:
    raise ValueError(f"castore writes no {name}")


_FORMS: dict[str, tuple[Callable[[Any], Any], Callable[[str, Any], Any]]] = {
    "csr": (_take_compressed, _make_compressed),
    "csc": (_take_compressed, _make_compressed),
    "bsr": (_take_compressed, _make_compressed),
    "coo": (_take_coordinates, _make_coordinates),
    "dia": (_take_diagonals, _make_diagonals),
    "lil": (_take_other, _make_other),
    "dok": (_take_other, _make_other),
}

SCIPY = [
    Kind(
        f"scipy.{form}_{what}",
        "scipy.sparse",
        f"{form}_{what}",
        take,
        functools.partial(make, f"{form}_{what}"),
    )
    for form, (take, make) in _FORMS.items()
    for what in ("array", "matrix")
]
