"""Leaves: the values that are one run of bytes. Numbers, text, arrays, tensors, the pixels of an image.

A taker turns a value into a *payload*, a buffer that it appends to a list, and a *mark*: a hashable that
describes all of the value but its bytes. Where the value lies in one piece, the payload is the value's own
memory. `leaf_of` gives the form of a mark in a safetensors file. `BUILDERS` make the function that builds the
value out of such a file again, without a copy: tensors and arrays are views of the buffer that it is given.

The samples of `castore.adapters.torch` consist of leaves. `castore.serialize.safetensors_files` stores the
tensors that users save through the same two halves. Assumes a little-endian machine, as torch does.

Must never: pickle; import torch or NumPy before `know_torch` or `know_numpy` is called; take a value that
would come back as another type or value; trust a file's description of its content. A builder refuses bad
content with a ValueError.
"""

from __future__ import annotations

import functools
import struct
from array import array
from collections.abc import Callable
from math import prod
from typing import Any, Literal, NamedTuple, TypeAlias

from castore.errors import SerializationError
from castore.serialize.kinds import MisfitError, tensor_problem
from castore.serialize.kinds.images import image_maker, pixel_shape, pixels_of
from castore.serialize.npy import dump_npy, elements, is_array, load_npy
from castore.serialize.number_types import NUMBER_TYPES, NumberType
from castore.serialize.problems import need

Mark: TypeAlias = Any
Payloads: TypeAlias = "list[Any]"
Shape: TypeAlias = "tuple[int, ...]"
Build: TypeAlias = "Callable[[bytearray | memoryview], Any]"


class NoLeafError(MisfitError):
    """A value exceeds one payload: `castore.serialize.kinds` may be able to take it apart."""


class Leaf(NamedTuple):
    """The written form of a value with a payload: its kind, the kind's details, and a tensor of the file."""

    kind: str
    detail: str | None
    code: str
    shape: Shape


# --- libraries ----------------------------------------------------------------------------------------------

#: Modules, once `know_numpy` and `know_torch` have imported them.
np: Any = None
torch: Any = None
#: Arrays that a safetensors file can hold unchanged, by dtype, and dtypes by their name in a file.
_NUMPY: dict[Any, NumberType] = {}
_NUMPY_NAMES: dict[str, Any] = {}
#: torch's dtypes with their rows, with their carriers, and by name with carrier and NumPy dtype.
_TORCH: dict[Any, NumberType] = {}
_CARRIERS: dict[Any, Any] = {}
_TORCH_NAMES: dict[str, tuple[Any, Any, Any]] = {}


@functools.cache
def know_numpy() -> None:
    """Import NumPy, and take its arrays.

    Raises:
        MissingDependencyError: NumPy is not installed.
    """
    global np
    np = need("numpy", "torch")
    _NUMPY.update({np.dtype(row.numpy): row for row in NUMBER_TYPES.values() if row.carrier is None})
    _NUMPY_NAMES.update({dtype.str: dtype for dtype in _NUMPY})
    TAKERS.update({np.ndarray: take_array, np.memmap: take_array})
    TAKERS.update(
        dict.fromkeys([*(dtype.type for dtype in _NUMPY), np.datetime64, np.timedelta64], take_scalar)
    )
    TAKERS.update({np.str_: take_numpy_str, np.bytes_: take_numpy_bytes})


@functools.cache
def know_torch() -> None:
    """Import torch and NumPy, and take their tensors and arrays.

    Raises:
        MissingDependencyError: torch or NumPy is not installed.
    """
    global torch
    know_numpy()
    torch = need("torch", "torch")
    for name, row in NUMBER_TYPES.items():
        dtype = getattr(torch, name, None)  # the oldest supported torch lacks the last ones
        if dtype is not None:
            carrier = None if row.carrier is None else getattr(torch, row.carrier)
            _TORCH[dtype], _CARRIERS[dtype] = row, carrier
            _TORCH_NAMES[name] = dtype, carrier, np.dtype(row.numpy)
    TAKERS[torch.Tensor] = take_tensor


# --- takers -------------------------------------------------------------------------------------------------


def take_tensor(value: Any, payloads: Payloads) -> Mark:
    """A dense tensor of any dtype."""
    dtype = value.dtype
    if value.requires_grad:  # a view as another type would hide the gradient flag
        raise NoLeafError("is a tensor that requires grad")
    try:
        carrier = _CARRIERS[dtype]
        payloads.append(np.ascontiguousarray((value if carrier is None else value.view(carrier)).numpy()))
    except (KeyError, TypeError, ValueError, RuntimeError):
        payloads.append(_odd_elements(value))
    return "tensor", dtype, value.shape


def _odd_elements(value: Any) -> Any:
    """The elements of a tensor that NumPy does not take as it is: on a GPU, lazily conjugated, or refused."""
    if str(value.layout).startswith("torch.sparse"):
        raise NoLeafError(f"is a tensor of layout {value.layout}; convert it with to_dense()")
    problem = tensor_problem(value)
    if problem:
        raise MisfitError(problem)
    try:
        plain = value.cpu().resolve_conj().resolve_neg()
        # In one dimension, for torch has more of them than NumPy. Zeros without memory get some by a clone.
        flat = (plain.clone() if plain._is_zerotensor() else plain).contiguous().reshape(-1)
        carrier = _CARRIERS[plain.dtype]
        return (flat if carrier is None else flat.view(carrier)).numpy()
    except RuntimeError as error:
        raise MisfitError(
            f"is a tensor without elements of its own ({error}); convert it with clone()"
        ) from error


def take_array(value: Any, payloads: Payloads) -> Mark:
    """A NumPy array without Python objects; a dtype that safetensors lacks becomes a .npy file."""
    dtype = value.dtype
    if dtype in _NUMPY:
        payloads.append(np.ascontiguousarray(value))
        return "array", dtype, value.shape
    if _is_time(dtype):
        payloads.append(elements(value))
        return "array", dtype, value.shape
    if not is_array(value):
        raise NoLeafError(f"is an array of {dtype}")
    payloads.append(dump_npy(value))
    return "npy", len(payloads[-1])


def _is_time(dtype: Any) -> bool:
    return dtype.kind in "mM" and dtype.isnative


def take_scalar(value: Any, payloads: Payloads) -> Mark:
    """A NumPy scalar of a type to which its dtype leads back; `longlong` is none, for NumPy has two such."""
    payloads.append(value.tobytes())
    return "scalar", value.dtype


def take_numpy_str(value: Any, payloads: Payloads) -> Mark:
    """NumPy text with the NULs at its end, which `str()` drops."""
    payloads.append(str.__str__(value).encode("utf-8", "surrogatepass"))
    return "numpy.str", len(payloads[-1])


def take_numpy_bytes(value: Any, payloads: Payloads) -> Mark:
    """NumPy bytes."""
    payloads.append(bytes(value))
    return "numpy.bytes", len(value)


_INT, _FLOAT, _COMPLEX = struct.Struct("<q"), struct.Struct("<d"), struct.Struct("<dd")


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


def take_bytes(value: bytes | bytearray, payloads: Payloads) -> Mark:
    """Bytes, or a bytearray, which stays one."""
    payloads.append(value)
    return type(value).__name__, len(value)


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


def take_pixels(image: Any, payloads: Payloads) -> Mark:
    """The pixels of a PIL image, as a tensor of rows; mode 1 packs eight of them into a byte."""
    payloads.append(pixels_of(image))
    return "pixels", f"{image.mode} {image.width}", *pixel_shape(image.mode, *image.size)


TAKERS: dict[type, Callable[[Any, Payloads], Mark]] = {
    int: take_int,
    float: take_float,
    bool: take_bool,
    complex: take_complex,
    str: take_str,
    bytes: take_bytes,
    bytearray: take_bytes,
}
NUMBERS = frozenset({int, float, bool})


# --- the written form of a mark -----------------------------------------------------------------------------

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
        return Leaf(kind, row.name, row.code, (*map(int, rest[0]), *row.tail))
    if kind in ("array", "scalar"):
        code, tail = _written(about)
        return Leaf(kind, about.str, code, (*(rest[0] if rest else ()), *tail))
    if kind == "pixels":
        return Leaf(kind, about, *rest)
    # The remaining kinds are runs of elements: bytes, or the numbers of a list.
    return Leaf(kind, None, _RUNS.get(kind.rpartition(" ")[2], "U8"), (about,))


def number_type(mark: Mark) -> str:
    """The name of the number type of a tensor's or an array's mark."""
    return (_TORCH[mark[1]] if mark[0] == "tensor" else _NUMPY[mark[1]]).name


def _written(dtype: Any) -> tuple[str, Shape]:
    """Code and last dimensions of an array's tensor; a time is written as a number."""
    row = _NUMPY.get(dtype)
    return ("I64", ()) if row is None else (row.code, row.tail)


# --- builders -----------------------------------------------------------------------------------------------

#: Dimensions of an array, in any version of NumPy.
_MOST_DIMENSIONS = 32


def tensor_at(name: str, shape: Shape, start: int, stop: int) -> Build:
    """The function that builds the tensor of this type and shape out of these bytes of a file."""
    if name not in _TORCH_NAMES:
        raise SerializationError(
            f"the value holds a tensor of {name}, which this torch does not know; update torch"
        )
    dtype, carrier, kind = _TORCH_NAMES[name]
    if start == stop:
        # NumPy makes no array at the very end of a buffer, and torch warns about empty complex32 tensors.
        return lambda _: torch.empty(shape, dtype=carrier or dtype, device="cpu").view(dtype)
    from_numpy, ndarray = torch.from_numpy, np.ndarray
    if len(shape) > _MOST_DIMENSIONS:
        count = prod(shape)
        return lambda record: from_numpy(ndarray(count, kind, record, start)).view(dtype).view(shape)
    if carrier is None:
        return lambda record: from_numpy(ndarray(shape, kind, record, start))
    return lambda record: from_numpy(ndarray(shape, kind, record, start)).view(dtype)


def array_at(name: str, shape: Shape, start: int, stop: int) -> Build:
    """Like `tensor_at`, for an array of NumPy's twin of the type."""
    return _array_at(np.dtype(NUMBER_TYPES[name].numpy), shape, start, stop)


def _array_at(dtype: Any, shape: Shape, start: int, stop: int) -> Build:
    ndarray = np.ndarray
    if start == stop:
        return lambda _: np.empty(shape, dtype)
    return lambda record: ndarray(shape, dtype, record, start)


def _build_tensor(leaf: Leaf, start: int, stop: int) -> Build:
    row = NUMBER_TYPES[_known(leaf, NUMBER_TYPES)]
    return tensor_at(row.name, _shape(leaf, row.code, row.tail), start, stop)


def _array_dtype(leaf: Leaf) -> tuple[Any, Shape]:
    text = leaf.detail or ""
    # Accept only spellings that this module writes: numpy.dtype parses a small language.
    dtype = _NUMPY_NAMES.get(text)
    if dtype is None:
        if text[:3] not in ("<M8", "<m8") or len(text) > 30:
            raise ValueError(f"there is no array of {text!r}")
        dtype = np.dtype(text)
    return dtype, _shape(leaf, *_written(dtype))


def _build_array(leaf: Leaf, start: int, stop: int) -> Build:
    return _array_at(*_array_dtype(leaf), start, stop)


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


def _build_pixels(leaf: Leaf, start: int, stop: int) -> Build:
    mode, _, text = (leaf.detail or "").partition(" ")
    width, height = int(text), leaf.shape[0]
    if pixel_shape(mode, width, height) != (leaf.code, leaf.shape):
        raise ValueError(f"an image of {leaf.detail!r} is written as {leaf.code} of shape {leaf.shape}")
    make = image_maker(mode, width, height, stop - start)
    return lambda record: make(bytes(memoryview(record)[start:stop]))


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
    "pixels": _build_pixels,
    "bigint": _run(lambda data: int.from_bytes(data, "little", signed=True)),
    "str": _run(lambda data: data.decode("utf-8", "surrogatepass")),
    "bytes": _run(bytes),
    "bytearray": _run(bytearray),
    "numpy.str": _run(lambda data: np.str_(data.decode("utf-8", "surrogatepass"))),
    "numpy.bytes": _run(lambda data: np.bytes_(data)),  # noqa: PLW0108 - NumPy is not imported yet
    **dict.fromkeys(_FIXED, _build_number),
    **{f"{outer} of {inner}": _build_numbers for outer in ("list", "tuple") for inner in _RUNS},
}
