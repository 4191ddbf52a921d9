"""Batches taken apart and put together: places in a batch, the parts of single items, and the rest.

A place is a path of indices and names: (0, "image") is ``batch[0]["image"]``. `learn_layout` finds how a
collate function lays out samples, from two batches of different sizes that share samples. A leaf as long as
its batch has one element an item, a leaf that is the same in both is a constant, and any other leaf cannot be
cached. Knows no encoder and no store. Must never change a batch that it is given.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch

from castore.errors import InvalidValueError

Place: TypeAlias = tuple[Any, ...]
_STORABLE_TYPES = (None, str, bytes, bool, int, float, torch.Tensor)


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


def parse_place(where: Any) -> Place:
    """The path that an int, a text, or a tuple of these stands for."""
    path = where if isinstance(where, tuple) else (where,)
    if not all(isinstance(step, int | str) for step in path):
        raise InvalidValueError(
            f"{where!r} is not a place in a batch; give an int, a text, or a tuple of these"
        )
    return path


def format_place(path: Place) -> str:
    """A path in Python's syntax.

    >>> format_place((0, "image"))
    "batch[0]['image']"
    """
    return "batch" + "".join(f"[{step!r}]" for step in path)


def get_at(batch: Any, path: Place) -> Any:
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
                f"there is no {format_place(path[: at + 1])}: {format_place(path[:at])} is "
                f"{_describe(value)}; name the place of the encoder's input with encoders=..."
            ) from None
    return value


def replace_at(batch: Any, path: Place, value: Any) -> Any:
    """A copy of a batch with ``value`` at a place; everything else is shared with the batch."""
    if not path:
        return value
    inner = replace_at(batch[path[0]], path[1:], value)
    if isinstance(batch, tuple):
        items = [*batch]
        items[path[0]] = inner
        return rebuild_sequence(batch, items)
    changed = copy.copy(batch)
    changed[path[0]] = inner
    return changed


def find_place(batch: Any, value: Any) -> Place | None:
    """The place of this very object in a batch."""
    if batch is value:
        return ()
    for step, inner in _children(batch):
        found = find_place(inner, value)
        if found is not None:
            return (step, *found)
    return None


def is_covered(value: Any, path: Place, places: Sequence[Place]) -> bool:
    """Whether every part of ``value``, which is at ``path``, is at one of the places.

    >>> is_covered({"text": 1, "image": 2}, (0,), [(0, "text"), (0, "image")])
    True
    """
    if path in places:
        return True
    inner = list(_children(value))
    return bool(inner) and all(is_covered(one, (*path, step), places) for step, one in inner)


def _describe(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"a {type(value).__name__} of {', '.join(map(repr, value))}"
    return f"a {type(value).__name__}" + (f" of {len(value)}" if isinstance(value, list | tuple) else "")


def _children(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        yield from value.items()
    elif isinstance(value, list | tuple):
        yield from enumerate(value)


def rebuild_sequence(example: Any, items: list[Any]) -> Any:
    """Items as a list, or as a tuple of the type of ``example``."""
    if isinstance(example, tuple):
        return type(example)(*items) if hasattr(example, "_fields") else tuple(items)
    return items


def map_leaves(layout: Any, replace: Callable[[Any, Any], Any], value: Any = None) -> Any:
    """A structure like ``layout``, with ``replace(leaf, value's leaf)`` in the place of each leaf."""
    if isinstance(layout, Mapping):
        changed = copy.copy(layout)
        for name, inner in layout.items():
            changed[name] = map_leaves(  # type: ignore[index]
                inner, replace, None if value is None else value[name]
            )
        return changed
    if isinstance(layout, list | tuple):
        values = [None] * len(layout) if value is None else value
        return rebuild_sequence(
            layout, [map_leaves(inner, replace, one) for inner, one in zip(layout, values, strict=True)]
        )
    return replace(layout, value)


# --- what belongs to single items ---------------------------------------------------------------------------


def learn_layout(one: Any, others: Sequence[Any], sizes: tuple[int, int], path: Place = ()) -> Any:
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
            inner = learn_layout(one[name], [other[name] for other in others], sizes, (*path, name))
            layout[name] = inner  # type: ignore[index]
        return layout
    if isinstance(one, list | tuple) and all(
        isinstance(other, list | tuple) and len(one) == len(other) for other in others
    ):
        parts = [[other[step] for other in others] for step in range(len(one))]
        return rebuild_sequence(
            one, [learn_layout(one[step], part, sizes, (*path, step)) for step, part in enumerate(parts)]
        )
    if all(is_same(one, other) for other in others):
        return one
    return Varying(
        f"{format_place(path)} is {_describe(one)} that has no element for each "
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


def select_items(layout: Any, value: Any, positions: Sequence[int]) -> Any:
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
        return rebuild_sequence(whole, [whole[position] for position in positions])

    return map_leaves(layout, pick, value)


def is_same(one: Any, other: Any) -> bool:
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
        return list(one) == list(other) and all(is_same(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(is_same, one, other))
    if getattr(type(one), "__eq__", None) is object.__eq__:
        return True
    return bool(one == other) or one != one


def has_same_items(layout: Any, one: Any, other: Any, positions: Sequence[int]) -> bool:
    """Whether the items of ``one`` at ``positions`` are those of ``other``, all laid out as ``layout``.

    Leaves that do not belong to single items are passed over, and so are arrays that are padded otherwise.
    """
    pairs: list[tuple[Any, Any]] = []

    def pick(leaf: Any, value: Any) -> None:
        if isinstance(leaf, PerItem):
            pairs.append((leaf, value))

    map_leaves(layout, pick, one)
    ours = pairs.copy()
    pairs.clear()
    map_leaves(layout, pick, other)
    return all(
        _are_same_items(leaf, first, second, positions)
        for (leaf, first), (_, second) in zip(ours, pairs, strict=True)
    )


def _are_same_items(leaf: PerItem, one: Any, other: Any, positions: Sequence[int]) -> bool:
    if leaf.form not in ("tensor", "numpy"):
        return is_same([one[position] for position in positions], [*other])
    if isinstance(one, torch.Tensor) and (one.is_nested or one.layout is not torch.strided):
        return True
    if one.shape[1:] != other.shape[1:]:
        return True
    one = one[list(positions)]
    if leaf.form == "numpy":
        if one.dtype.kind not in "biufc" or other.dtype.kind not in "biufc":
            return bool(one.tolist() == other.tolist())  # the dtype of texts depends on the longest
        one, other = torch.from_numpy(one), torch.from_numpy(np.ascontiguousarray(other))
    if one.dtype != other.dtype or not one.is_floating_point():
        return is_same(one, other)
    # The last bits of a product may depend on the size of the batch.
    one, other = one.double(), other.double()
    finite = one[one.isfinite()].abs()
    most = float(finite.max()) if len(finite) else 0.0
    return torch.allclose(one, other, rtol=1e-2, atol=1e-3 * most, equal_nan=True)


# --- the rest of a batch as leaves of a table ---------------------------------------------------------------


class RestOfBatch:
    """The parts of a batch besides the inputs of cached encoders, as numbered values, and joined again.

    Args:
        layout: result of `learn_layout`.
        holes: places that hold something else.

    Raises:
        InvalidValueError: a part cannot be kept for single items; the message names its place.
    """

    def __init__(self, layout: Any, holes: Sequence[Place]) -> None:
        for number, hole in enumerate(holes):
            layout = replace_at(layout, hole, _Hole(number))
        self._layout = layout
        self.leaves: list[PerItem] = []
        self._item_shapes: list[Any] | None = None
        map_leaves(layout, self._add_leaf)

    def _add_leaf(self, leaf: Any, _: Any) -> None:
        if isinstance(leaf, Varying):
            raise InvalidValueError(f"the labels cannot be cached: {leaf.problem}; {_ADVICE}")
        if isinstance(leaf, PerItem):
            if leaf.kind not in _STORABLE_TYPES:
                raise InvalidValueError(
                    f"the labels cannot be cached: they contain a {leaf.form} of {leaf.kind}, and only "
                    f"tensors, arrays, numbers, text and bytes can be cached; {_ADVICE}"
                )
            self.leaves.append(leaf)

    def take(self, batch: Any, size: int) -> dict[str, Any]:
        """The values of a batch's items: tensors (B, ...), and lists of texts, bytes, numbers or tensors.

        The layout was learnt from a few samples, so it is a guess, which each batch may show to be wrong.

        Args:
            batch: the batch.
            size: number of its items.

        Raises:
            InvalidValueError: the tensors of an item have other sizes than in the batches before, or a part
                has not one element an item, or is another one than in those samples.
        """
        values: list[Any] = []

        def keep(leaf: Any, value: Any) -> None:
            if isinstance(leaf, PerItem):
                if len(value) != size:
                    raise InvalidValueError(
                        f"the labels cannot be cached: a batch of {size} items has {_describe(value)} of"
                        f" {len(value)} elements; {_ADVICE}"
                    )
                values.append(_to_stored(leaf, value))
            elif not isinstance(leaf, _Hole) and not is_same(leaf, value):
                raise InvalidValueError(
                    f"the labels cannot be cached: {_describe(value)} has no element for each item, and is"
                    f" not the same in every batch; {_ADVICE}"
                )

        try:
            map_leaves(self._layout, keep, batch)
        except InvalidValueError:
            raise
        except (LookupError, TypeError, ValueError) as error:
            raise InvalidValueError(
                f"the labels cannot be cached: a batch has other parts than the first samples; {_ADVICE}"
            ) from error
        sides = [value.shape[1:] if isinstance(value, torch.Tensor) else None for value in values]
        if self._item_shapes is None:
            self._item_shapes = sides
        for value, side, before in zip(values, sides, self._item_shapes, strict=True):
            if side != before:
                raise _label_error(value)
        return {str(number): value for number, value in enumerate(values)}

    def check(self, one: Any, others: Sequence[Any]) -> None:
        """Check that a label is the same in every batch.

        Number i of ``others`` has all items of ``one`` but i.

        Raises:
            InvalidValueError: a label depends on its batch, as when texts are padded to the longest.
        """
        whole = self.take(one, len(others)).values()
        for place, other in enumerate(others):
            for first, second in zip(whole, self.take(other, len(others) - 1).values(), strict=True):
                kept = [number for number in range(len(first)) if number != place]
                if not is_same(
                    first[kept] if isinstance(first, torch.Tensor) else [first[i] for i in kept], second
                ):
                    raise _label_error(first)

    def join(self, values: Mapping[str, Any], fillings: Sequence[Any]) -> Any:
        """A batch of these values, with ``fillings`` in the holes."""
        stored = iter([values[str(number)] for number in range(len(self.leaves))])

        def fill(leaf: Any, _: Any) -> Any:
            if isinstance(leaf, PerItem):
                return _from_stored(leaf, next(stored))
            return fillings[leaf.number] if isinstance(leaf, _Hole) else leaf

        return map_leaves(self._layout, fill)


@dataclass(frozen=True)
class _Hole:
    number: int


_ADVICE = "change it in the collate function, or read the raw data in training with CacheConfig(labels=False)"


def _label_error(label: Any) -> InvalidValueError:
    sides = f" of {tuple(label.shape)}" if isinstance(label, torch.Tensor) else ""
    return InvalidValueError(
        "the labels cannot be cached: the label of an item differs between batches, as when a batch is "
        f"padded to its longest item ({_describe(label)}{sides}); {_ADVICE}"
    )


def _to_stored(leaf: PerItem, value: Any) -> Any:
    if leaf.form == "numpy":
        return torch.from_numpy(np.ascontiguousarray(value))
    return value if leaf.form == "tensor" else list(value)


def _from_stored(leaf: PerItem, value: Any) -> Any:
    if leaf.form == "numpy":
        return value.numpy()
    return tuple(value) if leaf.form == "tuple" else value
