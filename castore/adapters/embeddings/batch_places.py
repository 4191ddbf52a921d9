"""Batches taken apart and put together: places in a batch, the parts of single items, and the rest.

A place is a path of indices and names: (0, "image") is ``batch[0]["image"]``. `learn` finds how a collate
function lays out samples, from two batches of different sizes that share samples. A leaf as long as its batch
has one element an item, a leaf that is the same in both is a constant, and any other leaf cannot be cached.
Knows no encoder and no store. Must never change a batch that it is given.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch

from castore.errors import InvalidValueError

Path: TypeAlias = tuple[Any, ...]
_KEPT = (None, str, bytes, bool, int, float, torch.Tensor)


@dataclass(frozen=True)
class PerItem:
    """Stands in a layout for a leaf with an element for each item.

    Attributes:
        form: type of the leaf: "tensor", "numpy", or a "list" or "tuple" of elements.
        kind: the type of the elements of a list.
    """

    form: str
    kind: type | None = None


@dataclass(frozen=True)
class Varying:
    """Stands in a layout for a leaf that differs without an element for each item.

    `problem` has the place and the reason.
    """

    problem: str


# --- places -------------------------------------------------------------------------------------------------


def as_path(where: Any) -> Path:
    """The path that an int, a text, or a tuple of these stands for."""
    path = where if isinstance(where, tuple) else (where,)
    if not all(isinstance(step, int | str) for step in path):
        raise InvalidValueError(f"{where!r} is no place in a batch; give an int, a text, or a tuple of these")
    return path


def shown(path: Path) -> str:
    """A path in Python's syntax.

    >>> shown((0, "image"))
    "batch[0]['image']"
    """
    return "batch" + "".join(f"[{step!r}]" for step in path)


def look(batch: Any, path: Path) -> Any:
    """The value at a place.

    Raises:
        InvalidValueError: there is no such place; the message lists what is there.
    """
    value = batch
    for at, step in enumerate(path):
        try:
            value = value[step]
        except (KeyError, IndexError, TypeError):
            raise InvalidValueError(
                f"there is no {shown(path[: at + 1])}: {shown(path[:at])} is {_described(value)}; "
                "say with encoders=... where the encoder's input is"
            ) from None
    return value


def put(batch: Any, path: Path, value: Any) -> Any:
    """A copy of a batch with ``value`` at a place; everything else is shared with the batch."""
    if not path:
        return value
    inner = put(batch[path[0]], path[1:], value)
    if isinstance(batch, tuple):
        items = [*batch]
        items[path[0]] = inner
        return like(batch, items)
    changed = copy.copy(batch)
    changed[path[0]] = inner
    return changed


def place_of(batch: Any, value: Any) -> Path | None:
    """The place of this very object in a batch."""
    if batch is value:
        return ()
    for step, inner in _children(batch):
        found = place_of(inner, value)
        if found is not None:
            return (step, *found)
    return None


def is_covered(value: Any, path: Path, places: Sequence[Path]) -> bool:
    """Whether every part of ``value``, which is at ``path``, is at one of the places.

    >>> is_covered({"text": 1, "image": 2}, (0,), [(0, "text"), (0, "image")])
    True
    """
    if path in places:
        return True
    inner = list(_children(value))
    return bool(inner) and all(is_covered(one, (*path, step), places) for step, one in inner)


def _described(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"a {type(value).__name__} of {', '.join(map(repr, value))}"
    return f"a {type(value).__name__}" + (f" of {len(value)}" if isinstance(value, list | tuple) else "")


def _children(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        yield from value.items()
    elif isinstance(value, list | tuple):
        yield from enumerate(value)


def like(example: Any, items: list[Any]) -> Any:
    """Items as a list, or as a tuple of the type of ``example``."""
    if isinstance(example, tuple):
        return type(example)(*items) if hasattr(example, "_fields") else tuple(items)
    return items


def over(layout: Any, replace: Callable[[Any, Any], Any], value: Any = None) -> Any:
    """A structure like ``layout``, with ``replace(leaf, value's leaf)`` in the place of each leaf."""
    if isinstance(layout, Mapping):
        changed = copy.copy(layout)
        for name, inner in layout.items():
            changed[name] = over(  # type: ignore[index]
                inner, replace, None if value is None else value[name]
            )
        return changed
    if isinstance(layout, list | tuple):
        values = [None] * len(layout) if value is None else value
        return like(layout, [over(inner, replace, one) for inner, one in zip(layout, values, strict=True)])
    return replace(layout, value)


# --- what belongs to single items ---------------------------------------------------------------------------


def learn(one: Any, others: Sequence[Any], sizes: tuple[int, int], path: Path = ()) -> Any:
    """The layout of a batch: which leaves belong to single items.

    Args:
        one: a batch.
        others: batches of the same collate function, of some of its samples.
        sizes: number of samples in ``one``, and in each of ``others``; the two differ.

    Returns:
        the batch's structure, with PerItem, a constant, or Varying in the place of each leaf.
    """
    leaf = _per_item(one, others, sizes)
    if leaf is not None:
        return leaf
    if isinstance(one, Mapping) and all(
        isinstance(other, Mapping) and list(one) == list(other) for other in others
    ):
        layout = copy.copy(one)
        for name in one:
            inner = learn(one[name], [other[name] for other in others], sizes, (*path, name))
            layout[name] = inner  # type: ignore[index]
        return layout
    if isinstance(one, list | tuple) and all(
        isinstance(other, list | tuple) and len(one) == len(other) for other in others
    ):
        parts = [[other[step] for other in others] for step in range(len(one))]
        return like(one, [learn(one[step], part, sizes, (*path, step)) for step, part in enumerate(parts)])
    if all(same(one, other) for other in others):
        return one
    return Varying(
        f"{shown(path)} is {_described(one)} that has no element for each "
        "item and is not the same in every batch"
    )


def _per_item(one: Any, others: Sequence[Any], sizes: tuple[int, int]) -> PerItem | None:
    size, less = sizes
    if any(type(other) is not type(one) for other in others):
        return None
    if isinstance(one, torch.Tensor | np.ndarray):
        if one.ndim and len(one) == size and all(len(other) == less for other in others):
            return PerItem("tensor" if isinstance(one, torch.Tensor) else "numpy")
    elif isinstance(one, list | tuple) and len(one) == size and all(len(other) == less for other in others):
        kinds = {type(item) for batch in (one, *others) for item in batch}
        return PerItem(
            "tuple" if isinstance(one, tuple) else "list", kinds.pop() if len(kinds) == 1 else object
        )
    return None


def select(layout: Any, value: Any, positions: Sequence[int]) -> Any:
    """The part of ``value``, laid out as ``layout``, that belongs to the items at ``positions``.

    Raises:
        InvalidValueError: a leaf of it does not belong to single items.
    """

    def pick(leaf: Any, whole: Any) -> Any:
        if isinstance(leaf, Varying):
            raise InvalidValueError(leaf.problem)
        if not isinstance(leaf, PerItem):
            return whole
        if leaf.form in ("tensor", "numpy"):
            return whole[list(positions)]
        return like(whole, [whole[position] for position in positions])

    return over(layout, pick, value)


def same(one: Any, other: Any) -> bool:
    """Whether two values are the same, as far as can be found out.

    Objects whose type defines no `__eq__` count as the same.
    """
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        if one.dtype != other.dtype or one.shape != other.shape:
            return False
        return bool(torch.equal(one, other) or ((one == other) | ((one != one) & (other != other))).all())
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other, equal_nan=one.dtype.kind in "fc")
    if isinstance(one, Mapping):
        return list(one) == list(other) and all(same(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if getattr(type(one), "__eq__", None) is object.__eq__:
        return True
    return bool(one == other) or one != one


# --- the rest of a batch as leaves of a table ---------------------------------------------------------------


class Rest:
    """The parts of a batch besides the inputs of cached encoders, as numbered values, and joined again.

    Args:
        layout: result of `learn`.
        holes: places that hold something else.

    Raises:
        InvalidValueError: a part cannot be kept for single items; the message names its place.
    """

    def __init__(self, layout: Any, holes: Sequence[Path]) -> None:
        for number, hole in enumerate(holes):
            layout = put(layout, hole, _Hole(number))
        self._layout = layout
        self.leaves: list[PerItem] = []
        self._sides: list[Any] | None = None
        over(layout, self._note)

    def _note(self, leaf: Any, _: Any) -> None:
        if isinstance(leaf, Varying):
            raise InvalidValueError(f"the labels cannot be kept: {leaf.problem}; {_WAYS_OUT}")
        if isinstance(leaf, PerItem):
            if leaf.kind not in _KEPT:
                raise InvalidValueError(
                    f"the labels cannot be kept: a {leaf.form} of {leaf.kind} is among them, and only "
                    f"tensors, arrays, numbers, texts and bytes are kept; {_WAYS_OUT}"
                )
            self.leaves.append(leaf)

    def take(self, batch: Any) -> dict[str, Any]:
        """The values of a batch's items: tensors (B, ...), and lists of texts, bytes, numbers or tensors.

        Raises:
            InvalidValueError: the tensors of an item have other sizes than in the batches before.
        """
        values: list[Any] = []

        def keep(leaf: Any, value: Any) -> None:
            if isinstance(leaf, PerItem):
                values.append(_stored(leaf, value))

        over(self._layout, keep, batch)
        sides = [value.shape[1:] if isinstance(value, torch.Tensor) else None for value in values]
        if self._sides is None:
            self._sides = sides
        for value, side, before in zip(values, sides, self._sides, strict=True):
            if side != before:
                raise _differs(value)
        return {str(number): value for number, value in enumerate(values)}

    def check(self, one: Any, others: Sequence[Any]) -> None:
        """Check that a label is the same in every batch.

        Number i of ``others`` has all items of ``one`` but i.

        Raises:
            InvalidValueError: a label depends on its batch, as when texts are padded to the longest.
        """
        whole = self.take(one).values()
        for place, other in enumerate(others):
            for first, second in zip(whole, self.take(other).values(), strict=True):
                kept = [number for number in range(len(first)) if number != place]
                if not same(
                    first[kept] if isinstance(first, torch.Tensor) else [first[i] for i in kept], second
                ):
                    raise _differs(first)

    def join(self, values: Mapping[str, Any], fillings: Sequence[Any]) -> Any:
        """A batch of these values, with ``fillings`` in the holes."""
        stored = iter([values[str(number)] for number in range(len(self.leaves))])

        def fill(leaf: Any, _: Any) -> Any:
            if isinstance(leaf, PerItem):
                return _loaded(leaf, next(stored))
            return fillings[leaf.number] if isinstance(leaf, _Hole) else leaf

        return over(self._layout, fill)


@dataclass(frozen=True)
class _Hole:
    number: int


_WAYS_OUT = (
    "make it so in the collate function, or read the raw data in training with CacheConfig(labels=False)"
)


def _differs(label: Any) -> InvalidValueError:
    sides = f" of {tuple(label.shape)}" if isinstance(label, torch.Tensor) else ""
    return InvalidValueError(
        "the labels cannot be kept: the same item has another one in another batch, as when a batch is "
        f"padded to its longest item ({_described(label)}{sides}); {_WAYS_OUT}"
    )


def _stored(leaf: PerItem, value: Any) -> Any:
    if leaf.form == "numpy":
        return torch.from_numpy(np.ascontiguousarray(value))
    return value if leaf.form == "tensor" else list(value)


def _loaded(leaf: PerItem, value: Any) -> Any:
    if leaf.form == "numpy":
        return value.numpy()
    return tuple(value) if leaf.form == "tuple" else value
