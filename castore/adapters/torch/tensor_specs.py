"""The structure of samples in shared memory: one tensor, or a tuple or dict of tensors, with the expected
shapes.

A *part* is one tensor of a sample. The dimensions of a part are numbers, or None where they may differ from
sample to sample. Must never let a sample through that would come back as another shape or dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch

from castore.errors import InvalidValueError
from castore.serialize.number_types import NUMBER_TYPES
from castore.units import as_whole

#: dtypes that NumPy has too; other dtypes are stored as integers of their size.
_SAME = {
    getattr(torch, row.name): np.dtype(row.numpy).type for row in NUMBER_TYPES.values() if row.carrier is None
}
#: A slot holds only numbers. Of a parameter it keeps the values without the graph, as documented.
_KEPT_PLAIN = (torch.Tensor, torch.nn.Parameter)
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Part:
    """One tensor of a sample.

    Args:
        path: the part as the user writes it, for errors: ``sample["image"]``.
        dims: the part's dimensions, None for one that may differ; None if even their number may differ.
        dtype: the part's dtype.
    """

    path: str
    dims: tuple[int | None, ...] | None
    dtype: torch.dtype

    @property
    def carrier(self) -> torch.dtype:
        """The dtype under which the part's bytes are stored: its own, or an integer of the same size."""
        return self.dtype if self.dtype in _SAME else _INTEGERS[self.dtype.itemsize]

    @property
    def numpy(self) -> type[np.generic]:
        """NumPy's type for the carrier."""
        return _SAME[self.carrier]

    @property
    def shape(self) -> tuple[int, ...]:
        """The dimensions of a part that does not vary."""
        assert self.dims is not None
        return tuple(dim for dim in self.dims if dim is not None)

    @property
    def varies(self) -> bool:
        """Whether two samples may differ in shape."""
        return self.dims is None or None in self.dims

    @property
    def nbytes(self) -> int:
        """Bytes of a part that does not vary."""
        return prod(self.shape) * self.dtype.itemsize

    def take(self, index: int, value: Any) -> torch.Tensor:
        """``value`` as this part of sample ``index``, checked and detached from any graph."""
        if not isinstance(value, torch.Tensor):
            raise InvalidValueError(
                f"slot {index}: {self.path} is a {type(value).__name__}, but a tensor of {self} is kept "
                "there; convert it with torch.as_tensor"
            )
        if type(value) not in _KEPT_PLAIN:
            raise InvalidValueError(
                f"slot {index}: {self.path} is a {type(value).__name__}, whose class and attributes a slot "
                "does not keep; convert it with as_subclass(torch.Tensor), or keep it in a "
                "BiLevelCachedDataset"
            )
        if value.dtype is not self.dtype or not self._admits(value.shape):
            raise InvalidValueError(
                f"slot {index}: {self.path} has the shape {tuple(value.shape)} and is of {value.dtype}, but "
                f"a tensor of {self} is kept there; convert it, or make the cache with other data_dims or "
                "dtype"
            )
        if value.layout is not torch.strided or value.is_meta:
            raise InvalidValueError(
                f"slot {index}: {self.path} is a tensor of layout {value.layout} on {value.device}, which "
                "has no plain bytes; convert it with to_dense()"
            )
        return value.detach()

    def take_block(self, count: int, value: Any) -> torch.Tensor:
        """``value`` as the place of this part of ``count`` samples; the part does not vary."""
        wanted = (count, *self.shape)
        if not isinstance(value, torch.Tensor):
            found = f"a {type(value).__name__}"
        elif value.shape != wanted or value.dtype is not self.dtype:
            found = f"of shape {tuple(value.shape)} and {value.dtype}"
        elif value.device.type != "cpu" or value.layout is not torch.strided or not value.is_contiguous():
            found = f"on {value.device} or with gaps"
        else:
            return value.detach()
        path = self.path.replace("sample", "out", 1)
        raise InvalidValueError(
            f"{path} is {found}; give a contiguous tensor on the CPU of shape {wanted} and {self.dtype}"
        )

    def _admits(self, shape: torch.Size) -> bool:
        if shape == self.dims or self.dims is None:
            return True
        return len(shape) == len(self.dims) and all(
            want is None or want == found for want, found in zip(self.dims, shape, strict=True)
        )

    def __str__(self) -> str:
        return f"shape {'any' if self.dims is None else self.dims} and {self.dtype}"


class Structure:
    """The parts of every sample, and their nesting.

    Args:
        data_dims: for a tensor its dimensions, None where they vary; for a tuple or dict of tensors a tuple
            or dict of such. A named tuple makes samples come back as that named tuple.
        dtype: one for all parts, or a tuple or dict of the same form.

    Raises:
        InvalidValueError: an argument is not understood, or the two do not fit one another.

    >>> Structure(((3, 32, 32), ()), (torch.uint8, torch.int64))
    Structure(((3, 32, 32), ()), (torch.uint8, torch.int64))
    >>> Structure({"tokens": (None,)}, torch.int32).varies
    True
    """

    def __init__(self, data_dims: Any, dtype: Any) -> None:
        #: The arguments from which a pickle, or another process, makes the same structure.
        self.arguments = (data_dims, dtype)
        self._keys: tuple[str, ...] | None = None
        self._named: Any = type(data_dims) if hasattr(data_dims, "_fields") else None
        self.is_single = not _is_nested(data_dims)
        if self.is_single:
            self.parts = [Part("sample", _dims(data_dims), _dtype(dtype))]
            return
        if isinstance(data_dims, dict):
            self._keys = tuple(data_dims)
            if not all(isinstance(key, str) for key in data_dims):
                raise InvalidValueError(f"data_dims has keys that are no text: {list(data_dims)}; use texts")
            paths = [f"sample[{key!r}]" for key in data_dims]
        else:
            paths = [f"sample[{number}]" for number in range(len(data_dims))]
        dims = list(data_dims.values()) if isinstance(data_dims, dict) else list(data_dims)
        dtypes = self._spread(dtype, len(dims))
        self.parts = [
            Part(path, _dims(dim), _dtype(kind)) for path, dim, kind in zip(paths, dims, dtypes, strict=True)
        ]

    def _spread(self, dtype: Any, count: int) -> list[Any]:
        """The dtype of each part."""
        if isinstance(dtype, dict):
            if self._keys is not None and set(dtype) == set(self._keys):
                return [dtype[key] for key in self._keys]
        elif isinstance(dtype, tuple | list):
            if self._keys is None and len(dtype) == count:
                return list(dtype)
        else:
            return [dtype] * count
        raise InvalidValueError(
            f"dtype is {dtype!r}, but data_dims is {self.arguments[0]!r}; give one dtype, or one for each "
            "part"
        )

    @property
    def varies(self) -> bool:
        """Whether samples may differ in shape."""
        return any(part.varies for part in self.parts)

    @property
    def nbytes(self) -> int:
        """Bytes of a sample that does not vary."""
        return sum(part.nbytes for part in self.parts)

    def take(self, index: int, sample: Any) -> list[torch.Tensor]:
        """The parts of sample ``index``.

        Raises:
            InvalidValueError: the sample has another structure; the message names the part, what was expected
                and what was found.
        """
        values = self._split(sample, f"slot {index}: {{}} is kept there, not {{}}")
        return [part.take(index, value) for part, value in zip(self.parts, values, strict=True)]

    def take_batch(self, count: int, batch: Any) -> list[torch.Tensor]:
        """The parts of a batch that ``count`` samples, which do not vary, are to be copied to.

        Raises:
            InvalidValueError: the batch cannot take them; the message names the part, what was expected and
                what was found.
        """
        values = self._split(batch, "out: {} is wanted, not {}")
        return [part.take_block(count, value) for part, value in zip(self.parts, values, strict=True)]

    def _split(self, value: Any, error: str) -> Sequence[Any]:
        """The values of the parts in a user's form; ``error`` is formatted with what is wanted and found."""
        if self.is_single:
            return [value]
        if self._keys is not None:
            if not isinstance(value, dict) or value.keys() != set(self._keys):
                found = list(value) if isinstance(value, dict) else type(value).__name__
                raise InvalidValueError(error.format(f"a dict with {list(self._keys)}", found))
            return [value[key] for key in self._keys]
        if not isinstance(value, tuple | list) or len(value) != len(self.parts):
            found = f"{len(value)}" if isinstance(value, tuple | list) else f"a {type(value).__name__}"
            raise InvalidValueError(error.format(f"a tuple of {len(self.parts)} tensors", found))
        return value

    def build(self, values: Sequence[Any]) -> Any:
        """Combine one value for each part in the user's form."""
        if self.is_single:
            return values[0]
        if self._keys is not None:
            return dict(zip(self._keys, values, strict=True))
        return tuple(values) if self._named is None else self._named(*values)

    def describe(self) -> dict[str, Any]:
        """The whole structure, as JSON values."""
        dims = [None if part.dims is None else list(part.dims) for part in self.parts]
        dtypes = [str(part.dtype).removeprefix("torch.") for part in self.parts]
        if self._keys is not None:
            return {
                "data_dims": dict(zip(self._keys, dims, strict=True)),
                "dtype": dict(zip(self._keys, dtypes, strict=True)),
            }
        return (
            {"data_dims": dims[0], "dtype": dtypes[0]}
            if self.is_single
            else {"data_dims": dims, "dtype": dtypes}
        )

    def __repr__(self) -> str:
        dims = self.build([part.dims for part in self.parts])
        return f"Structure({dims}, {self.build([part.dtype for part in self.parts])})"


def _is_nested(data_dims: Any) -> bool:
    """Whether these are the dimensions of several tensors."""
    if isinstance(data_dims, dict):
        return True
    return isinstance(data_dims, tuple | list) and any(isinstance(dim, tuple | list) for dim in data_dims)


def _dims(dims: Any) -> tuple[int | None, ...] | None:
    if dims is None:
        return None
    if isinstance(dims, tuple | list):
        sizes = tuple(None if dim is None else as_whole(dim) for dim in dims)
        if all(
            dim is None or (size is not None and size >= 0) for dim, size in zip(dims, sizes, strict=True)
        ):
            return sizes
    raise InvalidValueError(
        f"{dims!r} are no dimensions; give a tuple like (3, 32, 32), with None for one that varies, or None"
    )


def _dtype(dtype: Any) -> torch.dtype:
    if not isinstance(dtype, torch.dtype):
        raise InvalidValueError(f"{dtype!r} is no dtype; give one like torch.uint8")
    if str(dtype).startswith("torch.q"):
        raise InvalidValueError(
            f"{dtype} has scales that a slot does not keep; keep int_repr() of the samples"
        )
    return dtype
