"""The outputs of an encoder as columns of a table: tensors, arrays, tuples, dicts, lists, text, numbers.

`split_outputs` takes a batch of outputs apart into leaves, each of which becomes arrays with one row an item.
The same description puts the rows that `take` finds together again. Knows nothing of files or stores. Must
never give back another dtype, shape or value than was put in, except for floats whose storage was asked to be
narrower.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch

from castore.errors import InvalidValueError, OutOfRangeError, SerializationError

#: Kinds of leaves whose items differ in length: their elements lie one after the other in an array of their
#: own.
RAGGED = ("ragged", "str", "bytes")
#: All kinds of leaves.
KINDS = ("tensor", "array", "int", "float", "bool", *RAGGED)
#: Advice for outputs of which one batch is longer than another.
DIFFERENT_LENGTHS = (
    "where batches are padded to their longest item, CacheConfig(masks=...) keeps states without the "
    "padding; else return a list of one tensor an item, or only what the model uses"
)
_NUMBERS: dict[type, tuple[str, torch.dtype]] = {
    bool: ("bool", torch.bool), int: ("int", torch.int64), float: ("float", torch.float64),
}  # fmt: skip
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if type(dtype) is torch.dtype
}


class Output(dict[str, Any]):
    """A dict whose values are attributes too, as the ModelOutput of transformers is.

    A field that the encoder left out is an attribute of None. A number or a slice selects values by position.

    >>> out = Output({"logits": 1, "states": 2}, fields=("loss", "logits", "states"))
    >>> out.logits, out["states"], out[0], out[1:], out.loss
    (1, 2, 1, (2,), None)
    """

    def __init__(self, values: Any, fields: Sequence[str]) -> None:
        super().__init__(values)
        self._names = tuple(fields)

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        if name in self.__dict__.get("_names", ()):
            return None
        raise AttributeError(f"an output of {', '.join(map(repr, self))} has no {name!r}")

    def __getitem__(self, place: Any) -> Any:
        return super().__getitem__(place) if isinstance(place, str) else self.to_tuple()[place]

    def __reduce__(self) -> tuple[Any, ...]:
        return Output, (dict(self), self._names)

    def to_tuple(self) -> tuple[Any, ...]:
        """The values that are there."""
        return tuple(self.values())


class Leaf(NamedTuple):
    """One array of an encoder's outputs.

    Attributes:
        name: the folder it lies in.
        kind: ``tensor``, ``array`` (of NumPy), ``ragged`` (a list of tensors), ``str`` or ``bytes`` (lists of
            them), ``int``, ``float`` or ``bool`` (lists of numbers).
        dtype: of the returned values, by torch's name.
        stored: of the stored values; differs only for floats that are kept narrower.
        shape: of one item; for a ragged one, of one element.
    """

    name: str
    kind: str
    dtype: str
    stored: str
    shape: tuple[int, ...]

    @property
    def is_ragged(self) -> bool:
        """Whether items differ in length."""
        return self.kind in RAGGED


class LeafRows(NamedTuple):
    """The rows of one leaf for some items; for a ragged leaf also how many of the rows each item has."""

    values: torch.Tensor
    lengths: torch.Tensor | None


class Schema(NamedTuple):
    """The structure of every batch of a table.

    Attributes:
        structure: the number of a leaf, None, or ``{"tuple": [...]}``, or ``{"dict": [[name, ...], ...]}`` of
            such, with ``"fields": [name, ...]`` if its parts are attributes too.
        leaves: in the order of their numbers.
    """

    structure: Any
    leaves: tuple[Leaf, ...]

    def rebuild(self, values: Sequence[Any]) -> Any:
        """Put the values of the leaves together as the encoder returned them."""
        return _rebuild(self.structure, values)


def dtype_of(name: str) -> torch.dtype:
    """The torch dtype of a name such as ``"bfloat16"``.

    Raises:
        InvalidValueError: torch has none of that name.
    """
    if name not in _DTYPES:
        raise InvalidValueError(f"torch has no dtype {name!r}; a newer castore or torch wrote it")
    return _DTYPES[name]


def split_outputs(outputs: Any, count: int, dtype: torch.dtype | None) -> tuple[Schema, list[LeafRows]]:
    """Take the outputs for ``count`` items apart.

    Args:
        outputs: a tensor or a NumPy array (count, ...); a list of count tensors of one dtype that differ in
            their first dimension; a list of count str, bytes, int, float or bool; a tuple, or a dict with str
            keys, of such and of None.
        count: number of items.
        dtype: the dtype that floating leaves are stored as; None for their own.

    Raises:
        SerializationError: the outputs are of another kind, or not one for each item.
    """
    leaves: list[Leaf] = []
    parts: list[LeafRows] = []

    def walk(value: Any, name: str) -> Any:
        if value is None:
            return None
        if isinstance(value, tuple):
            return {
                "tuple": [walk(item, f"{name}.{place}") for place, item in enumerate(value)],
                **_field_names(value),
            }
        if isinstance(value, dict):
            if any(type(key) is not str for key in value):
                raise SerializationError(f"{name}: the keys of a dict of outputs must be text")
            return {
                "dict": [[key, walk(item, f"{name}.{key}")] for key, item in value.items()],
                **_field_names(value),
            }
        kind, logical, part = _to_rows(value, name, count)
        stored = logical if dtype is None or not logical.is_floating_point or kind == "float" else dtype
        values = _narrow(part.values, stored, name)
        # Batches wait until their shard is put, and encoders may write the next batch into the same memory,
        # as CUDA graphs do.
        parts.append(part._replace(values=values.clone() if _shares_memory(values, value) else values))
        folder = _free_folder(name, {leaf.name for leaf in leaves})
        leaves.append(
            Leaf(folder, kind, _dtype_name(logical), _dtype_name(stored), tuple(part.values.shape[1:]))
        )
        return len(leaves) - 1

    structure = walk(outputs, "output")
    if not leaves:
        raise SerializationError(
            "the encoder returned None, or an empty tuple or dict: there is nothing to keep"
        )
    return Schema(structure, tuple(leaves)), parts


def check_alike(kept: Schema, new: Schema, where: str) -> None:
    """Check that a batch has the structure of those before it.

    Raises:
        SerializationError: it does not; the message names the first leaf that differs.
    """
    if kept == new:
        return
    for old, fresh in zip(kept.leaves, new.leaves, strict=False):
        if old._replace(name="") != fresh._replace(name=""):
            hint = f"; {DIFFERENT_LENGTHS}" if old.kind == "tensor" else ""
            raise SerializationError(
                f"{where}: {old.name} is {_describe(fresh)}, where it was {_describe(old)}{hint}"
            )
    raise SerializationError(
        f"{where}: the outputs are nested otherwise than those kept before; if an argument of the call"
        " changes what the encoder returns (return_dict=False), build it into the encoder, and wrap one for"
        " each value"
    )


def restore_leaf(leaf: Leaf, values: torch.Tensor, lengths: torch.Tensor | None) -> Any:
    """The value of one leaf, from its gathered rows: a tensor, or a list with one object an item."""
    logical = dtype_of(leaf.dtype)
    if leaf.kind == "tensor":
        return values if values.dtype == logical else values.to(logical)
    if leaf.kind == "array":
        return values.to(logical).numpy(force=True)
    if lengths is None:
        return values.tolist()
    sizes = lengths.tolist()
    if leaf.kind == "ragged":
        return list(torch.split(values if values.dtype == logical else values.to(logical), sizes))
    data = values.numpy().tobytes()
    pieces = [data[end - size : end] for size, end in zip(sizes, lengths.cumsum(0).tolist(), strict=True)]
    return pieces if leaf.kind == "bytes" else [piece.decode("utf-8", "surrogatepass") for piece in pieces]


def check_rows(rows: torch.Tensor) -> None:
    """Check that `take` can look up ``rows``.

    Raises:
        InvalidValueError: it is no one-dimensional int64 tensor on the CPU.
    """
    if rows.dtype != torch.int64 or rows.ndim != 1:
        raise InvalidValueError("rows must be a one-dimensional int64 tensor, as `rows` and `find` give it")
    if rows.device.type != "cpu":
        raise OutOfRangeError("rows must be on the CPU; move them with .cpu()")


def _rebuild(structure: Any, values: Sequence[Any]) -> Any:
    if structure is None:
        return None
    if isinstance(structure, int):
        return values[structure]
    if "tuple" in structure:
        items = tuple(_rebuild(item, values) for item in structure["tuple"])
        return _named_tuple(tuple(structure["fields"]))(*items) if "fields" in structure else items
    found = {key: _rebuild(item, values) for key, item in structure["dict"]}
    return Output(found, structure["fields"]) if "fields" in structure else found


def _field_names(value: Any) -> dict[str, list[str]]:
    """The attribute names of the parts of a tuple or dict, if there are any."""
    if isinstance(value, Output):
        return {"fields": [*value._names]}
    if is_dataclass(type(value)):
        return {"fields": [field.name for field in fields(value)]}
    names = getattr(value, "_fields", None) if isinstance(value, tuple) else None
    if hasattr(type(value), "n_sequence_fields"):  # of torch.return_types
        names = type(value).__match_args__
    return {} if names is None else {"fields": [*names]}


@cache
def _named_tuple(names: tuple[str, ...]) -> Any:
    """A class of named tuples. Never looks up a class by a name in a file."""
    made = namedtuple("Output", names, rename=True)  # type: ignore[misc]
    return type("Output", (made,), {"__slots__": (), "__reduce__": _reduce_named_tuple, "_names": names})


def _reduce_named_tuple(value: Any) -> tuple[Any, ...]:
    return _make_named_tuple, (value._names, tuple(value))


def _make_named_tuple(names: tuple[str, ...], items: tuple[Any, ...]) -> Any:
    return _named_tuple(names)(*items)


def _to_rows(value: Any, name: str, count: int) -> tuple[str, torch.dtype, LeafRows]:
    if type(value) is np.ndarray:
        _, dtype, part = _to_rows(_from_numpy(value, name), name, count)
        return "array", dtype, part
    if isinstance(value, torch.Tensor):
        if not value.is_nested and (value.ndim == 0 or len(value) != count):
            raise SerializationError(
                f"{name}: shape {tuple(value.shape)} is not one row for each of {count} items"
            )
        plain = _to_dense(value, name)
        if plain[0].numel() == 0:
            raise SerializationError(f"{name}: its rows, of shape {tuple(plain.shape[1:])}, have no elements")
        return "tensor", plain.dtype, LeafRows(plain, None)
    if not isinstance(value, list) or len(value) != count:
        length = f" of {len(value)}" if isinstance(value, list) else ""
        raise SerializationError(
            f"{name}: {type(value).__name__}{length} is neither a tensor or array nor a list with one "
            f"element for each of {count} items; return one of these, or a tuple or dict of them"
        )
    kinds = {type(item) for item in value}
    if all(isinstance(item, torch.Tensor) for item in value):
        part = _join_ragged([_to_dense(item, name) for item in value], name)
        return "ragged", part.values.dtype, part
    if kinds in ({str}, {bytes}):
        return "str" if str in kinds else "bytes", torch.uint8, _join_text(value)
    if len(kinds) == 1 and (known := _NUMBERS.get(*kinds)):
        return known[0], known[1], LeafRows(_to_tensor(value, known[1], name), None)
    raise SerializationError(
        f"{name}: a list of {', '.join(sorted(kind.__name__ for kind in kinds))} cannot be kept; return a "
        "list of tensors, of text, of bytes or of numbers, and convert arrays with torch.from_numpy(...), "
        "or stack them"
    )


def _from_numpy(value: np.ndarray[Any, Any], name: str) -> torch.Tensor:
    """A tensor with memory of its own, because encoders may write their next batch into an array."""
    try:
        return torch.from_numpy(value.copy())
    except (TypeError, ValueError) as error:
        raise SerializationError(
            f"{name}: an array of {value.dtype} cannot be kept, since torch has no such dtype; return "
            "numbers that torch.from_numpy(...) takes, or a list of text"
        ) from error


def _to_dense(value: torch.Tensor, name: str) -> torch.Tensor:
    """A dense tensor on the CPU, without the graph."""
    if value.is_nested or value.layout is not torch.strided or value.is_quantized:
        raise SerializationError(
            f"{name}: a tensor that is nested, sparse or quantised cannot be "
            "kept; return a dense one, or a list of them"
        )
    return value.detach().cpu().resolve_conj().resolve_neg().contiguous()


def _shares_memory(values: torch.Tensor, output: Any) -> bool:
    """Whether the values lie in memory that the encoder returned."""
    return (
        isinstance(output, torch.Tensor)
        and values.untyped_storage().data_ptr() == output.untyped_storage().data_ptr()
    )


def _join_ragged(items: list[torch.Tensor], name: str) -> LeafRows:
    if any(item.ndim == 0 for item in items):
        raise SerializationError(f"{name}: a list of tensors without dimensions; stack them")
    first = items[0]
    for item in items:
        if item.shape[1:] != first.shape[1:] or item.dtype != first.dtype:
            raise SerializationError(
                f"{name}: a list of {item.dtype} {tuple(item.shape)} and {first.dtype} "
                f"{tuple(first.shape)}; the tensors may differ in their first dimension only"
            )
    if first.shape[1:].numel() == 0:
        raise SerializationError(f"{name}: its elements, of shape {tuple(first.shape[1:])}, have no elements")
    return LeafRows(torch.cat(items), torch.tensor([len(item) for item in items], device="cpu"))


def _join_text(items: list[Any]) -> LeafRows:
    encode: Callable[[Any], bytes] = lambda item: (  # noqa: E731 - one of two ways, written once
        item if isinstance(item, bytes) else item.encode("utf-8", "surrogatepass")
    )
    encoded = [encode(item) for item in items]
    joined = bytearray(b"".join(encoded))
    values = (
        torch.frombuffer(joined, dtype=torch.uint8)
        if joined
        else torch.empty(0, dtype=torch.uint8, device="cpu")
    )
    return LeafRows(values, torch.tensor([len(item) for item in encoded], device="cpu"))


def _to_tensor(items: list[Any], dtype: torch.dtype, name: str) -> torch.Tensor:
    try:
        return torch.tensor(items, dtype=dtype, device="cpu")
    except (RuntimeError, OverflowError, ValueError) as error:
        raise SerializationError(f"{name}: a number does not fit into 64 bits ({error})") from error


def _narrow(values: torch.Tensor, stored: torch.dtype, name: str) -> torch.Tensor:
    if values.dtype == stored:
        return values
    narrow = values.to(stored)
    if not torch.equal(narrow.isfinite(), values.isfinite()):
        raise SerializationError(
            f"{name}: a value does not fit into {stored}; use bfloat16, "
            "or the encoder's own dtype (dtype=None)"
        )
    return narrow


def _free_folder(name: str, taken: set[str]) -> str:
    plain = "".join(letter if letter.isalnum() or letter in "._-" else "_" for letter in name)[:60]
    for folder in _candidate_names(plain):
        if folder not in taken:
            return folder
    raise AssertionError  # `_candidate_names` has no end


def _candidate_names(name: str) -> Iterator[str]:
    yield name
    number = 2
    while True:
        yield f"{name}-{number}"
        number += 1


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _describe(leaf: Leaf) -> str:
    stored = f", stored as {leaf.stored}" if leaf.stored != leaf.dtype else ""
    return f"{leaf.kind} of {leaf.dtype} {leaf.shape}{stored}"
