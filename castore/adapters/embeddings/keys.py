"""Keys: stand in a batch for features whose embeddings are cached.

A row of Keys is an item, a column an encoder. The number is the place of the embedding in that encoder's
tables. Keys are a class of their own, because features may be int64 tensors too. Keys move like a tensor
(devices, pinned memory, workers, slices, concatenation) and refuse every computation: row numbers mean
nothing to a layer. Must never be made of anything but int64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from castore.errors import InvalidValueError

#: In a column of Keys: the encoder takes no input from this place.
ABSENT = -1
#: A key is the number of a table, below `TABLES`, times `ROWS_PER_TABLE`, plus a row of the table.
ROWS_PER_TABLE, TABLES = 1 << 40, 1 << 23
# Operations that move, cut, join or describe. They are names, because a method and the function of the same
# name are two objects.
_MOVES = {
    "to", "cpu", "cuda", "pin_memory", "clone", "detach", "contiguous", "share_memory_", "__getitem__",
    "index_select",
    "narrow", "split", "chunk", "unbind", "cat", "concat", "concatenate", "__iter__",
}  # fmt: skip
#: Those of them that keep every row in its place.
_MOVES_WHOLE = {"to", "cuda", "clone", "detach", "contiguous"}
#: The place of the dimension among the arguments of those that have one.
_DIMENSION = {
    "index_select": 1, "narrow": 1, "split": 2, "chunk": 2, "unbind": 1, "cat": 1, "concat": 1,
    "concatenate": 1,
}  # fmt: skip
_DESCRIBES = {
    "size", "dim", "ndimension", "numel", "nelement", "stride", "storage_offset", "element_size", "data_ptr",
    "get_device",
    "is_pinned", "is_shared", "is_contiguous", "is_floating_point", "is_complex", "is_neg", "is_conj",
    "is_inference",
    "is_same_size", "equal", "tolist", "record_stream", "untyped_storage", "storage", "_typed_storage",
    "__reduce_ex__",
    "__setstate__", "_is_view", "__len__", "__repr__", "__format__", "__hash__", "__get__", "__set__",
}  # fmt: skip


class Keys(torch.Tensor):
    """The places of a batch's embeddings: int64, shape (B, E), for B items and E encoders.

    Made by the loaders of `cache_embeddings`, read by `CachedEncoder`.

    Raises:
        InvalidValueError: an operation computes with it, as a layer that is no CachedEncoder does.

    >>> keys = Keys.of(torch.tensor([[3], [0]]))
    >>> keys[:1], len(keys), keys.column(0)
    (Keys([[3]]), 2, tensor([3, 0]))
    >>> keys * 0.5
    Traceback (most recent call last):
    castore.errors.InvalidValueError: mul of Keys: this batch holds keys of cached embeddings ...
    """

    # Of Keys on a device: the same numbers in memory, so that a look-up need not wait for the device.
    _in_memory: torch.Tensor | None = None

    @staticmethod
    def of(places: torch.Tensor) -> Keys:
        """These numbers, int64 of shape (B, E), as Keys."""
        if places.dtype is not torch.int64 or places.ndim != 2:
            raise InvalidValueError(
                f"keys are int64 of shape (B, E), not {places.dtype} of {tuple(places.shape)}"
            )
        return places.as_subclass(Keys)

    def column(self, number: int) -> torch.Tensor:
        """The keys of one encoder: a plain tensor, int64, shape (B,)."""
        with torch._C.DisableTorchFunctionSubclass():
            plain = self.as_subclass(torch.Tensor)
            if plain.ndim != 2:
                raise InvalidValueError(
                    "these keys are of one item, without the dimension of the "
                    "batch; keep it with keys[i : i + 1]"
                )
            return plain[:, number]

    def column_in_memory(self, number: int) -> torch.Tensor:
        """`column` on the CPU. A part of Keys on a device is copied from there, once the device has it."""
        column = self.column(number)
        return column.cpu() if self._in_memory is None else self._in_memory[:, number]

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Let operations move or describe Keys, and refuse all others."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        with torch._C.DisableTorchFunctionSubclass():
            if name in _DESCRIBES:
                return func(*args, **kwargs)
            if name in _MOVES:
                if not _is_along_rows(name, args, kwargs):
                    raise _refusal_error(f"{name} beyond the first dimension")
                result = _as_keys(func(*args, **kwargs), name)
                if name in _MOVES_WHOLE and result.device.type != "cpu":
                    source: Keys = args[0] if args else kwargs["input"]
                    on_device = source.device.type != "cpu"
                    # A copy: a loader may fill the same memory with its next batch.
                    result._in_memory = (
                        source._in_memory if on_device else source.as_subclass(torch.Tensor).clone()
                    )
                return result
        raise _refusal_error(name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Keys:
        return self.clone()  # type: ignore[return-value]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        with torch._C.DisableTorchFunctionSubclass():
            return f"Keys({self.tolist()})"


def _is_along_rows(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a move treats rows alone. Features have other dimensions than the Keys in their place, so a
    part of each row would be another thing.
    """
    if name == "__getitem__":
        first, *others = args[1] if isinstance(args[1], tuple) and args[1] else (args[1],)
        return first is not Ellipsis and all(
            other is Ellipsis or (isinstance(other, slice) and other == slice(None)) for other in others
        )
    place = _DIMENSION.get(name)
    if place is None:
        return True
    given = args[place] if len(args) > place else kwargs.get("dim", kwargs.get("axis", 0))
    return bool(given == 0)


def _as_keys(result: Any, name: str) -> Any:
    if isinstance(result, torch.Tensor):
        if result.dtype is not torch.int64:
            raise _refusal_error(f"{name}({result.dtype})")
        return result if isinstance(result, Keys) else result.as_subclass(Keys)
    if isinstance(result, tuple | list):
        return type(result)(_as_keys(item, name) for item in result)
    return result


def _refusal_error(what: str) -> InvalidValueError:
    return InvalidValueError(
        f"{what} of Keys: this batch holds keys of cached embeddings in the place of features, and "
        "only a CachedEncoder takes them; name whatever else reads these features in "
        "encoders=..., or leave its encoder uncached with CacheType.NONE"
    )
