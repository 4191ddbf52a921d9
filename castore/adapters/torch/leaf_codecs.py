"""Codecs of the values in a sample that hold bytes: tensors, arrays, numbers, text, images; one payload each.

A taker turns a value into a payload (appended to a list) and a mark: a hashable that describes all of the
value but its bytes. `leaf_of` decides how a record writes a mark, and `BUILDERS` make the function that reads
the value out of a record again. `castore.adapters.torch.samples` handles nesting and the record around the
values. Assumes a little-endian machine, as torch does. Must never pickle, nor take a value that would come
back as another type or value. Content of a record is not to be trusted: a builder refuses bad content with a
ValueError.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import torch

from castore.serialize.arrays import dump_npy, is_array, load_npy
from castore.serialize.kinds import MisfitError, tensor_problem

Mark: TypeAlias = Any
Payloads: TypeAlias = "list[Any]"
Shape: TypeAlias = "tuple[int, ...]"
Build: TypeAlias = "Callable[[bytearray | memoryview], Any]"

#: Bytes of an element, by its code in a safetensors header. Only codes that every version of safetensors
#: reads.
SIZES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip


class NoLeafError(MisfitError):
    """A value exceeds one payload: `castore.serialize.kinds` may be able to take it apart."""


class Leaf(NamedTuple):
    """The written form of a value with a payload: its kind, the kind's details, and a tensor of the file."""

    kind: str
    detail: str | None
    code: str
    shape: Shape


class _TorchType(NamedTuple):
    code: str
    tail: Shape
    array: np.dtype[Any]
    view: torch.dtype | None  # the dtype that NumPy knows in its place


def _torch_types() -> dict[torch.dtype, _TorchType]:
    # name: code in the file, dimensions that precede it, NumPy's type, torch's type of the same size
    rows: dict[str, tuple[str, Shape, str, torch.dtype | None]] = {
        "bool": ("BOOL", (), "?", None),
        "uint8": ("U8", (), "u1", None),
        "int8": ("I8", (), "i1", None),
        "uint16": ("U16", (), "u2", None),
        "int16": ("I16", (), "i2", None),
        "uint32": ("U32", (), "u4", None),
        "int32": ("I32", (), "i4", None),
        "uint64": ("U64", (), "u8", None),
        "int64": ("I64", (), "i8", None),
        "float16": ("F16", (), "f2", None),
        "float32": ("F32", (), "f4", None),
        "float64": ("F64", (), "f8", None),
        "complex64": ("F32", (2,), "c8", None),
        "complex128": ("F64", (2,), "c16", None),
        "bfloat16": ("BF16", (), "i2", torch.int16),
        "complex32": ("F16", (2,), "i4", torch.int32),
        "float8_e4m3fn": ("F8_E4M3", (), "u1", torch.uint8),
        "float8_e5m2": ("F8_E5M2", (), "u1", torch.uint8),
        "float8_e4m3fnuz": ("U8", (), "u1", torch.uint8),
        "float8_e5m2fnuz": ("U8", (), "u1", torch.uint8),
        "float8_e8m0fnu": ("U8", (), "u1", torch.uint8),
        "float4_e2m1fn_x2": ("U8", (), "u1", torch.uint8),
    }
    return {
        getattr(torch, name): _TorchType(code, tail, np.dtype(kind), view)
        for name, (code, tail, kind, view) in rows.items()
        if hasattr(torch, name)  # the oldest supported torch lacks the last ones
    }


_TORCH = _torch_types()
_TORCH_VIEWS = {dtype: row.view for dtype, row in _TORCH.items()}
_TORCH_NAMES = {str(dtype).removeprefix("torch."): dtype for dtype in _TORCH}
#: Arrays that a safetensors file can hold unchanged: the file's code, and the extra dimension of 2 for
#: complex ones.
_NUMPY: dict[np.dtype[Any], tuple[str, Shape]] = {
    row.array: (row.code, row.tail) for row in _TORCH.values() if row.view is None
}
_MOMENTS = ("M", "m")
_INT, _FLOAT, _COMPLEX = struct.Struct("<q"), struct.Struct("<d"), struct.Struct("<dd")


# --- takers -------------------------------------------------------------------------------------------------


def take_tensor(value: torch.Tensor, payloads: Payloads) -> Mark:
    """A dense tensor of any dtype."""
    dtype = value.dtype
    if value.requires_grad:  # a view as another type would hide the gradient flag
        raise MisfitError("is a tensor that requires grad; convert it with detach()")
    try:
        view = _TORCH_VIEWS[dtype]
        payloads.append(np.ascontiguousarray((value if view is None else value.view(view)).numpy()))
    except (KeyError, TypeError, RuntimeError):
        payloads.append(_take_odd_tensor(value))
    return "tensor", dtype, value.shape


def _take_odd_tensor(value: torch.Tensor) -> Any:
    """The bytes of a tensor that NumPy does not take as it is: on a GPU, lazily conjugated, or refused."""
    if str(value.layout).startswith("torch.sparse"):
        raise NoLeafError(f"is a tensor of layout {value.layout}; convert it with to_dense()")
    problem = tensor_problem(value)
    if problem:
        raise MisfitError(problem)
    plain = value.cpu().resolve_conj().resolve_neg()
    view = _TORCH_VIEWS[plain.dtype]
    return np.ascontiguousarray((plain if view is None else plain.view(view)).numpy())


def take_array(value: np.ndarray[Any, Any], payloads: Payloads) -> Mark:
    """A NumPy array without Python objects; a dtype that safetensors lacks becomes a .npy file."""
    dtype = value.dtype
    if dtype in _NUMPY:
        payloads.append(np.ascontiguousarray(value))
        return "array", dtype, value.shape
    if dtype.kind in _MOMENTS and dtype.isnative:
        payloads.append(np.ascontiguousarray(value).view(np.int64))  # NumPy lends no buffer of datetimes
        return "array", dtype, value.shape
    if not is_array(value):
        raise NoLeafError(f"is an array of {dtype}")
    payloads.append(dump_npy(value))
    return "npy", len(payloads[-1])


def is_plain_scalar(value: np.generic) -> bool:
    """Whether `take_scalar` takes the scalar."""
    dtype = value.dtype
    if isinstance(value, np.str_ | np.bytes_):
        return type(value) in (np.str_, np.bytes_)
    restorable = dtype in _NUMPY or (dtype.kind in _MOMENTS and dtype.isnative)
    # NumPy has two 64-bit integers: `longlong` would come back as the other one.
    return restorable and type(value) is np.dtype(dtype.str).type


def take_scalar(value: np.generic, payloads: Payloads) -> Mark:
    """A NumPy scalar."""
    if isinstance(
        value, np.str_ | np.bytes_
    ):  # arrays drop the NULs at their end, as str() of a np.str_ does
        if isinstance(value, np.str_):
            payloads.append(str.__str__(value).encode("utf-8", "surrogatepass"))
            return "numpy.str", len(payloads[-1])
        payloads.append(bytes(value))
        return "numpy.bytes", len(value)
    payloads.append(value.tobytes())
    return "scalar", value.dtype


def take_int(value: int, payloads: Payloads) -> Mark:
    """An int of any size."""
    try:
        payloads.append(_INT.pack(value))
    except struct.error:
        payloads.append(value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))
        return "bigint", len(payloads[-1])
    return "int"


def take_float(value: float, payloads: Payloads) -> Mark:
    """A float, bit for bit."""
    payloads.append(_FLOAT.pack(value))
    return "float"


def take_bool(value: bool, payloads: Payloads) -> Mark:
    """True or False."""
    payloads.append(b"\1" if value else b"\0")
    return "bool"


def take_complex(value: complex, payloads: Payloads) -> Mark:
    """A complex number, bit for bit."""
    payloads.append(_COMPLEX.pack(value.real, value.imag))
    return "complex"


def take_str(value: str, payloads: Payloads) -> Mark:
    """Text, as UTF-8; names of files that are not UTF-8 arrive with lone surrogates and leave with them."""
    payloads.append(value.encode("utf-8", "surrogatepass"))
    return "str", len(payloads[-1])


def take_bytes(value: bytes, payloads: Payloads) -> Mark:
    """Bytes."""
    payloads.append(value)
    return "bytes", len(value)


def take_bytearray(value: bytearray, payloads: Payloads) -> Mark:
    """A bytearray, which stays one."""
    payloads.append(value)
    return "bytearray", len(value)


def take_numbers(values: list[Any] | tuple[Any, ...], payloads: Payloads) -> Mark | None:
    """A list or tuple of only 64-bit ints, floats or bools, as one tensor; None for any other list."""
    kinds = set(map(type, values))
    if len(kinds) != 1:
        return None
    kind = kinds.pop()
    try:
        payloads.append(bytes(values) if kind is bool else array("q" if kind is int else "d", values))
    except OverflowError:  # an int beyond 64 bits: the values are stored one by one
        return None
    return f"{type(values).__name__} of {kind.__name__}", len(values)


TAKERS: dict[type, Callable[[Any, Payloads], Mark]] = {
    torch.Tensor: take_tensor,
    np.ndarray: take_array,
    np.memmap: take_array,
    int: take_int,
    float: take_float,
    bool: take_bool,
    complex: take_complex,
    str: take_str,
    bytes: take_bytes,
    bytearray: take_bytearray,
}
NUMBERS = frozenset({int, float, bool})


# --- the written form of a mark
# -------------------------------------------------------------------------------

_FIXED = {
    "int": Leaf("int", None, "I64", ()),
    "float": Leaf("float", None, "F64", ()),
    "bool": Leaf("bool", None, "BOOL", ()),
    "complex": Leaf("complex", None, "F64", (2,)),
}
_RUNS = {"int": "I64", "float": "F64", "bool": "BOOL"}


def leaf_of(mark: Mark) -> Leaf:
    """The written form of a mark."""
    if type(mark) is str:
        return _FIXED[mark]
    kind, about, *rest = mark
    if kind == "tensor":
        row = _TORCH[about]
        return Leaf(kind, str(about).removeprefix("torch."), row.code, (*map(int, rest[0]), *row.tail))
    if kind in ("array", "scalar"):
        code, tail = _NUMPY.get(about, ("I64", ()))
        return Leaf(kind, about.str, code, (*(rest[0] if rest else ()), *tail))
    if kind == "pixels":
        return Leaf(kind, about, *rest)
    # The remaining kinds are runs of elements: bytes, or the numbers of a list.
    return Leaf(kind, None, _RUNS.get(kind.rpartition(" ")[2], "U8"), (about,))


# --- builders
# -------------------------------------------------------------------------------------------------


def _build_tensor(leaf: Leaf, start: int, stop: int) -> Build:
    dtype = _TORCH_NAMES[_known(leaf, _TORCH_NAMES)]
    code, tail, kind, view = _TORCH[dtype]
    shape = _shape(leaf, code, tail)
    if start == stop:
        # NumPy makes no array at the very end of a buffer, and torch warns about empty complex32 tensors.
        return lambda _: torch.empty(shape, dtype=view or dtype).view(dtype)
    if view is None:
        return lambda record: torch.from_numpy(np.ndarray(shape, kind, record, start))
    return lambda record: torch.from_numpy(np.ndarray(shape, kind, record, start)).view(dtype)


def _array_dtype(leaf: Leaf) -> tuple[np.dtype[Any], Shape]:
    text = leaf.detail or ""
    # Accept only spellings that this module writes: numpy.dtype parses a small language.
    dtype = next((dtype for dtype in _NUMPY if dtype.str == text), None)
    if dtype is None:
        if text[:3] not in ("<M8", "<m8") or len(text) > 30:
            raise ValueError(f"there is no array of {text!r}")
        dtype = np.dtype(text)
    code, tail = _NUMPY.get(dtype, ("I64", ()))
    return dtype, _shape(leaf, code, tail)


def _build_array(leaf: Leaf, start: int, stop: int) -> Build:
    dtype, shape = _array_dtype(leaf)
    if start == stop:
        return lambda _: np.empty(shape, dtype)
    return lambda record: np.ndarray(shape, dtype, record, start)


def _build_scalar(leaf: Leaf, start: int, stop: int) -> Build:
    dtype, shape = _array_dtype(leaf)
    if shape:
        raise ValueError(f"a scalar has the shape {shape}")
    return lambda record: np.ndarray((), dtype, record, start)[()]


def _build_number(leaf: Leaf, start: int, stop: int) -> Build:
    expected = _FIXED[leaf.kind]
    if leaf != expected:
        raise ValueError(f"a number is written as {leaf}")
    if leaf.kind == "bool":
        return lambda record: record[start] != 0
    if leaf.kind == "complex":
        return lambda record: complex(*_COMPLEX.unpack_from(record, start))
    read = (_INT if leaf.kind == "int" else _FLOAT).unpack_from
    return lambda record: read(record, start)[0]


def _build_numbers(leaf: Leaf, start: int, stop: int) -> Build:
    outer, _, inner = leaf.kind.partition(" of ")
    _shape(leaf, _RUNS[inner], leaf.shape[:1])
    make = tuple if outer == "tuple" else list
    if inner == "bool":
        return lambda record: make(map(bool, record[start:stop]))
    code: Literal["q", "d"] = "q" if inner == "int" else "d"
    return lambda record: make(memoryview(record)[start:stop].cast(code))


def _run(make: Callable[[bytes], Any]) -> Callable[[Leaf, int, int], Build]:
    """The builder of values that `make` constructs from all bytes of their payload."""

    def build(leaf: Leaf, start: int, stop: int) -> Build:
        _shape(leaf, "U8", leaf.shape[:1])
        return lambda record: make(bytes(memoryview(record)[start:stop]))

    return build


def _known(leaf: Leaf, table: dict[str, Any]) -> str:
    if leaf.detail not in table:
        raise ValueError(f"there is no {leaf.kind} of {leaf.detail!r}")
    return leaf.detail


def _shape(leaf: Leaf, code: str, tail: Shape) -> Shape:
    """The shape of the value, whose tensor in the file must have this code and end in these dimensions."""
    rank = len(leaf.shape) - len(tail)
    if leaf.code != code or rank < 0 or leaf.shape[rank:] != tail:
        raise ValueError(f"a {leaf.kind} of {leaf.detail} is written as {leaf.code} of shape {leaf.shape}")
    return leaf.shape[:rank]


BUILDERS: dict[str, Callable[[Leaf, int, int], Build]] = {
    "tensor": _build_tensor,
    "array": _build_array,
    "scalar": _build_scalar,
    "npy": _run(load_npy),
    "bigint": _run(lambda data: int.from_bytes(data, "little", signed=True)),
    "str": _run(lambda data: data.decode("utf-8", "surrogatepass")),
    "bytes": _run(bytes),
    "bytearray": _run(bytearray),
    "numpy.str": _run(lambda data: np.str_(data.decode("utf-8", "surrogatepass"))),
    "numpy.bytes": _run(np.bytes_),
    **dict.fromkeys(_FIXED, _build_number),
    **{f"{outer} of {inner}": _build_numbers for outer in ("list", "tuple") for inner in _RUNS},
}
