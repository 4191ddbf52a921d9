"""NumPy arrays as `.npy` files: which arrays and scalars such a file preserves, and both directions.

The header of a file depends on dtype, shape and order only, so both directions remember headers. Bytes to
load may be hostile: a header's claims are checked before memory is allocated for them. NumPy is imported only
when needed: an object can be an array only in a process that has imported NumPy already.

Must never: unpickle, or return another dtype, shape or order than was put in.
"""

from __future__ import annotations

import functools
import io
import math
import struct
import sys
import warnings
from typing import Any

from castore.serialize.bounded_dict import BoundedDict
from castore.serialize.problems import corrupt, need, refuse

_MAGIC = b"\x93NUMPY"
_LONGEST_HEADER = 1 << 16
_LENGTH, _LONG_LENGTH = struct.Struct("<H"), struct.Struct("<I")

_parsed: BoundedDict[tuple[Any, tuple[int, ...], Any]] = BoundedDict(1 << 18)


def is_array(obj: Any) -> bool:
    """Whether `obj` is a plain NumPy array that a `.npy` file preserves."""
    np = sys.modules.get("numpy")
    # A record dtype compares equal to the structured dtype with the same fields, so `_is_written_whole`
    # misses it.
    return (
        np is not None
        and type(obj) in (np.ndarray, np.memmap)
        and obj.dtype.type is not np.record
        and _is_written_whole(obj.dtype)
    )


@functools.lru_cache(maxsize=512)
def _is_written_whole(dtype: Any) -> bool:
    """Whether a `.npy` file preserves the dtype on every machine.

    Not so for Python objects, number types of NumPy extensions, and long doubles.
    """
    from numpy.lib import format as npy

    if dtype.hasobject or _holds_longest(dtype):
        return False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about dtype metadata, which is no part of the values
            written = npy.descr_to_dtype(npy.dtype_to_descr(dtype))
    except (ValueError, TypeError):
        return False
    return bool(written == dtype)


def _holds_longest(dtype: Any) -> bool:
    np = sys.modules["numpy"]
    if dtype.names is not None:
        return any(_holds_longest(dtype[name].base) for name in dtype.names)
    return dtype.type in (np.longdouble, np.clongdouble)


def is_numpy_scalar(obj: Any) -> bool:
    """Whether `obj` is a NumPy scalar that survives as an array of no dimensions."""
    np = sys.modules.get("numpy")
    if np is None or not isinstance(obj, np.generic) or not _is_written_whole(obj.dtype):
        return False
    # NumPy has two 64-bit integers: `longlong` would come back as the other. Arrays drop trailing NULs of
    # text.
    return type(obj) is np.dtype(obj.dtype.str).type and not (
        isinstance(obj, np.bytes_ | np.str_) and obj[-1:] in ("\0", b"\0")
    )


def elements(array: Any) -> Any:
    """The elements of an array in C order, as a buffer that is the array's own memory where it can be."""
    np = sys.modules["numpy"]
    kind = array.dtype.kind
    if kind in "biufc":
        return np.ascontiguousarray(array)
    if kind in "mM":  # NumPy lends no buffer of times
        return np.ascontiguousarray(array).view("i8")
    return array.tobytes()


def _has_gaps(dtype: Any) -> bool:
    """Whether there are bytes between the fields of a structured dtype."""
    if dtype.names is None:
        return dtype.subdtype is not None and _has_gaps(dtype.base)
    fields = [dtype[name] for name in dtype.names]
    return sum(field.itemsize for field in fields) != dtype.itemsize or any(map(_has_gaps, fields))


def dump_npy(obj: Any) -> bytes:
    """Return a `.npy` file of an array. Fortran order is kept. Bytes between fields are written as zeros."""
    if not is_array(obj):
        refuse(f"{type(obj)}{f' of {obj.dtype}' if hasattr(obj, 'dtype') else ''}", "npy")
    in_fortran = obj.flags.f_contiguous and not obj.flags.c_contiguous
    if _has_gaps(obj.dtype):
        np, gapped = sys.modules["numpy"], obj
        obj = np.zeros(gapped.shape, gapped.dtype, "F" if in_fortran else "C")
        obj[...] = gapped
    header = _header(obj.dtype, obj.shape, in_fortran)
    if header is not None:
        return b"".join([header, elements(obj.T if in_fortran else obj)])
    from numpy.lib import format as npy

    file = io.BytesIO()
    npy.write_array(file, obj, allow_pickle=False)
    return file.getvalue()


@functools.lru_cache(maxsize=2048)
def _header(dtype: Any, shape: tuple[int, ...], in_fortran: bool) -> bytes | None:
    """The start of a file, up to the elements; None if version 1 of the format has no words for it."""
    from numpy.lib import format as npy

    file = io.BytesIO()
    about = {"descr": npy.dtype_to_descr(dtype), "fortran_order": in_fortran, "shape": shape}
    try:
        npy.write_array_header_1_0(file, about)
    except ValueError:
        return None
    return file.getvalue()


def load_npy(data: bytes) -> Any:
    """Return the array of a `.npy` file, writable."""
    np = need("numpy", "torch")
    try:
        start = _start(data)
        header = bytes(data[:start])
        found = _parsed.get(header)
        if found is None:
            found = _parse(header)
            _parsed.remember(header, found, start)
        dtype, shape, order = found
        # Checked before memory is allocated: a header can claim a terabyte.
        if math.prod(shape) * dtype.itemsize != len(data) - start:
            raise ValueError(f"its header claims {shape} of {dtype}, which is not what follows")
        # NumPy copies no bytes between fields. Of elements without bytes, of which a header can claim any
        # number, a copy has one byte each.
        if dtype.names is not None or not dtype.itemsize:
            return np.ndarray(shape, dtype, bytearray(memoryview(data)[start:]), order=order)
        return np.ndarray(shape, dtype, memoryview(data)[start:], order=order).copy("K")
    except (
        ValueError, TypeError, LookupError, AttributeError, SyntaxError, struct.error, MemoryError,
        RecursionError,
    ) as error:  # fmt: skip
        raise corrupt("npy", error) from error


def _start(data: bytes) -> int:
    """The offset of the elements. NEP 1 specifies the format."""
    if len(data) < 8 or data[:6] != _MAGIC or data[6] not in (1, 2, 3):
        raise ValueError("it does not start as .npy does")
    length = _LENGTH if data[6] == 1 else _LONG_LENGTH
    (size,) = length.unpack_from(data, 8)
    start: int = 8 + length.size + size
    if size > _LONGEST_HEADER or start > len(data):
        raise ValueError(f"its header claims {size} bytes")
    return start


def _parse(header: bytes) -> tuple[Any, tuple[int, ...], Any]:
    """Return dtype, shape and order."""
    import ast

    from numpy.lib import format as npy

    text = header[8 + (_LENGTH if header[6] == 1 else _LONG_LENGTH).size :]
    about = ast.literal_eval(text.decode("utf-8" if header[6] == 3 else "latin-1"))
    shape = about["shape"]
    if type(shape) is not tuple or not all(type(side) is int and side >= 0 for side in shape):
        raise ValueError(f"its shape is {shape!r}")
    dtype = npy.descr_to_dtype(about["descr"])
    if dtype.hasobject:
        raise ValueError("it holds pickled objects")
    return dtype, shape, "F" if about["fortran_order"] is True else "C"
