"""NumPy arrays, tensors and Arrow tables to bytes and back, for `castore.serialize.serializers`.

Bytes to load may be hostile: claims are checked before memory is allocated for them. Heavy packages are
imported only when needed: an object can be a tensor only in a process that has imported torch already.

Must never: unpickle, or return another dtype, shape, order or kind than was put in.
"""

from __future__ import annotations

import functools
import importlib
import io
import json
import math
import struct
import sys
import warnings
from typing import Any, NoReturn

from castore.errors import CorruptError, MissingDependencyError, SerializationError
from castore.serialize.kinds import tensor_problem

_NPY_MAGIC = b"\x93NUMPY"
_NPY_HEADER = 1 << 16
#: Torch types that some version of safetensors cannot read. For each: a type of the same size that torch
#: copies without a warning, and the type in the file.
_WRITTEN_AS = {
    "complex32": ("int32", "float16"),
    "complex128": ("complex128", "float64"),
    "float8_e8m0fnu": ("uint8", "uint8"),
    "float4_e2m1fn_x2": ("uint8", "uint8"),
}
# NumPy dtypes that safetensors stores and returns unchanged.
_SAFE_DTYPES = {"|b1", "|i1", "|u1", "<i2", "<u2", "<i4", "<u4", "<i8", "<u8", "<f2", "<f4", "<f8", "<c8"}


def refuse(what: str, serializer: str) -> NoReturn:
    """Raise the SerializationError for a serializer that the caller named and that cannot store ``what``."""
    raise SerializationError(
        f"the serializer {serializer!r} cannot store {what}; leave it out to choose by the object"
    )


def corrupt(serializer: str, error: object) -> CorruptError:
    """Return the error for bytes that a serializer cannot read."""
    return CorruptError(f"the bytes are no valid {serializer}: {error}", where=f"serializer {serializer}")


def need(package: str, extra: str) -> Any:
    """Import a package, or raise the MissingDependencyError that names the extra to install."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise MissingDependencyError.of(package, extra) from error


# --- NumPy --------------------------------------------------------------------------------------------------


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


def dump_npy(obj: Any) -> bytes:
    """Return a `.npy` file of an array. Fortran order is kept."""
    if not is_array(obj):
        refuse(f"{type(obj)}{f' of {obj.dtype}' if hasattr(obj, 'dtype') else ''}", "npy")
    from numpy.lib import format as npy

    file = io.BytesIO()
    npy.write_array(file, obj, allow_pickle=False)
    return file.getvalue()


def load_npy(data: bytes) -> Any:
    """Return the array of a `.npy` file, writable."""
    np = need("numpy", "torch")
    try:
        dtype, shape, order, start = _npy_header(data)
        if dtype.hasobject:
            raise ValueError("it holds pickled objects")
        # Checked before memory is allocated: a header can claim a terabyte.
        if math.prod(shape) * dtype.itemsize != len(data) - start:
            raise ValueError(f"its header claims {shape} of {dtype}, which is not what follows")
        return np.ndarray(shape, dtype, memoryview(data)[start:], order=order).copy("K")
    except (
        ValueError,
        TypeError,
        LookupError,
        AttributeError,
        SyntaxError,
        struct.error,
        MemoryError,
        RecursionError,
    ) as error:
        raise corrupt("npy", error) from error


def _npy_header(data: bytes) -> tuple[Any, tuple[int, ...], Any, int]:
    """Return dtype, shape, order and offset of the elements. NEP 1 specifies the format."""
    import ast

    from numpy.lib import format as npy

    if len(data) < 8 or data[:6] != _NPY_MAGIC or data[6] not in (1, 2, 3):
        raise ValueError("it does not start as .npy does")
    length = struct.Struct("<H" if data[6] == 1 else "<I")
    (size,) = length.unpack_from(data, 8)
    start = 8 + length.size + size
    if size > _NPY_HEADER or start > len(data):
        raise ValueError(f"its header claims {size} bytes")
    text = bytes(data[8 + length.size : start]).decode("utf-8" if data[6] == 3 else "latin-1")
    header = ast.literal_eval(text)
    shape = header["shape"]
    if type(shape) is not tuple or not all(type(side) is int and side >= 0 for side in shape):
        raise ValueError(f"its shape is {shape!r}")
    return npy.descr_to_dtype(header["descr"]), shape, "F" if header["fortran_order"] is True else "C", start


# --- safetensors --------------------------------------------------------------------------------------------


def is_tensor(obj: Any) -> bool:
    """Whether `obj` is a dense torch tensor of numbers. Subclasses, such as Parameter, do not count."""
    torch = sys.modules.get("torch")
    return torch is not None and type(obj) is torch.Tensor and tensor_problem(obj) is None


def _is_safe_array(obj: Any) -> bool:
    # Arrays in Fortran order would come back in C order.
    return (
        is_array(obj)
        and obj.dtype.str in _SAFE_DTYPES
        and (obj.flags.c_contiguous or not obj.flags.f_contiguous)
    )


def fits_safetensors(obj: Any) -> bool:
    """Whether `obj` is a tensor, or a dict of str to only tensors or only plain arrays."""
    if type(obj) is not dict:
        return is_tensor(obj)
    named = bool(obj) and all(type(name) is str and name != "__metadata__" for name in obj)
    return named and any(all(map(fits, obj.values())) for fits in (is_tensor, _is_safe_array))


def dump_safetensors(obj: Any) -> bytes:
    """Return a safetensors file. Keeps `requires_grad`, but not autograd graph, device or shared memory."""
    if not fits_safetensors(obj):
        refuse(f"{type(obj)} (it takes a tensor, or a dict of str to tensors or arrays)", "safetensors")
    need("safetensors", "torch")
    tensors = obj if type(obj) is dict else {"tensor": obj}
    is_torch = is_tensor(next(iter(tensors.values())))
    about: dict[str, Any] = {
        "kind": "torch" if is_torch else "numpy",
        "bare": type(obj) is not dict,
        "order": list(tensors),
    }
    try:
        if is_torch:
            about["grad"] = [name for name, tensor in tensors.items() if tensor.requires_grad]
            types = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in tensors.items()}
            odd = {name: dtype for name, dtype in types.items() if dtype in _WRITTEN_AS}
            if odd:
                about["types"] = odd
            from safetensors.torch import save

            # A single key: safetensors writes several keys in random order, and equal objects must give equal
            # bytes.
            return bytes(save(_plain_tensors(tensors), metadata={"castore": json.dumps(about)}))
        from safetensors.numpy import save as save_arrays

        np = sys.modules["numpy"]
        plain = {name: np.asarray(array, order="C") for name, array in tensors.items()}
        return bytes(save_arrays(plain, metadata={"castore": json.dumps(about)}))
    except (RuntimeError, ValueError, KeyError, TypeError, UnicodeError, _safe_error()) as error:
        raise SerializationError(
            f"safetensors cannot store the value: {error}; convert the tensors"
        ) from error


def _plain_tensors(tensors: dict[str, Any]) -> dict[str, Any]:
    """Detached, dense CPU tensors that share no memory, as safetensors requires."""
    plain: dict[str, Any] = {}
    taken: set[int] = set()
    for name, tensor in tensors.items():
        dense = tensor.detach().cpu().resolve_conj().resolve_neg()
        others = _WRITTEN_AS.get(str(dense.dtype).removeprefix("torch."))
        if others is None:
            dense = dense.contiguous()
        else:
            like, written = (getattr(sys.modules["torch"], dtype) for dtype in others)
            # `view` may turn one element into two; they get a dimension of their own.
            dense = dense.view(like).contiguous().unsqueeze(-1).view(written)
        place = dense.untyped_storage().data_ptr()
        plain[name] = dense.clone() if place in taken else dense
        taken.add(place)
    return plain


def load_safetensors(data: bytes) -> Any:
    """Return the tensor, or the dict in its order, that `dump_safetensors` stored."""
    need("safetensors", "torch")
    data = bytes(data)
    try:
        (size,) = struct.unpack_from("<Q", data)
        about = json.loads(json.loads(data[8 : 8 + size])["__metadata__"]["castore"])
        if about["kind"] == "torch":
            torch = need("torch", "torch")
            from safetensors.torch import load as load_tensors

            tensors: dict[str, Any] = load_tensors(data)
            for name, dtype in about.get("types", {}).items():
                tensors[name] = _read_as(tensors[name], torch, dtype)
            for name in about["grad"]:
                tensors[name].requires_grad_()
        else:
            from safetensors.numpy import load as load_arrays

            tensors = load_arrays(data)
        ordered = {name: tensors[name] for name in about["order"]}
        return ordered["tensor"] if about["bare"] else ordered
    except (
        ValueError,
        KeyError,
        TypeError,
        RuntimeError,
        struct.error,
        RecursionError,
        MemoryError,
    ) as error:
        raise corrupt("safetensors", error) from error
    except _safe_error() as error:
        raise corrupt("safetensors", error) from error


def _read_as(tensor: Any, torch: Any, dtype: str) -> Any:
    """Undo `_plain_tensors` for a tensor whose bits it wrote as another type."""
    like, written = _WRITTEN_AS[dtype]
    if str(tensor.dtype) != f"torch.{written}":
        raise ValueError(f"a tensor of {dtype} is written as {tensor.dtype}")
    known = getattr(torch, dtype, None)
    if known is None:
        raise SerializationError(
            f"the value holds a tensor of {dtype}, which this torch does not know; update torch"
        )
    return tensor.view(getattr(torch, like)).squeeze(-1).view(known)


def _safe_error() -> type[Exception]:
    from safetensors import SafetensorError

    return SafetensorError


# --- Arrow --------------------------------------------------------------------------------------------------


def is_table(obj: Any) -> bool:
    """Whether `obj` is a pyarrow Table."""
    pa = sys.modules.get("pyarrow")
    return pa is not None and type(obj) is pa.Table


def dump_arrow(obj: Any) -> bytes:
    """Return an Arrow IPC file of a Table. A RecordBatch is stored as a Table."""
    pa = sys.modules.get("pyarrow")
    if pa is None or type(obj) not in (pa.Table, pa.RecordBatch):
        refuse(str(type(obj)), "arrow")
    table = obj if is_table(obj) else pa.Table.from_batches([obj])
    sink = pa.BufferOutputStream()
    try:
        # The IPC file format has one dictionary per column.
        table = table.unify_dictionaries()
        with pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
    except pa.ArrowException as error:
        raise SerializationError(f"Arrow cannot store the table: {error}") from error
    return bytes(sink.getvalue())


def load_arrow(data: bytes) -> Any:
    """Return the table of an Arrow IPC file."""
    pa = need("pyarrow", "datasets")
    try:
        table = pa.ipc.open_file(pa.py_buffer(data)).read_all()
        # Offsets outside the buffers would cause reads there when a value is accessed.
        table.validate(full=True)
    except (pa.ArrowException, OSError, ValueError, MemoryError) as error:
        raise corrupt("arrow", error) from error
    return table
