"""Kinds of NumPy, ml_dtypes, torch and transformers: values that are more than one dense array of numbers.

`take` imports nothing: an object can be of these kinds only in a process that has imported the library.
`make` imports NumPy, ml_dtypes and torch. Must never: import transformers, or make a sparse tensor without
torch's check of its invariants.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

from castore.errors import SerializationError
from castore.serialize.kinds.forms import (
    Form,
    Kind,
    MisfitError,
    expect,
    listed,
)
from castore.serialize.number_types import NUMBER_TYPES
from castore.serialize.problems import need

#: Number types that NumPy has only through ml_dtypes. A `.npy` file does not keep their names.
_ML_TYPES = (
    "bfloat16", "float4_e2m1fn", "float6_e2m3fn", "float6_e3m2fn",
    "float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz",
    "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu",
    "int1", "int2", "int4", "uint1", "uint2", "uint4",
)  # fmt: skip


def _need(package: str) -> Any:
    return need(package, "torch")


# --- NumPy --------------------------------------------------------------------------------------------------


def _plain(array: Any) -> Any:
    """The array as numpy.ndarray, with a structured dtype in place of a record dtype."""
    np = sys.modules["numpy"]
    base = array.view(np.ndarray)
    return base.view(np.dtype((np.void, base.dtype))) if base.dtype.type is np.record else base


def _array(value: Any) -> Any:
    np = _need("numpy")
    if type(value) is not np.ndarray:
        raise ValueError(f"a {type(value).__name__} stands where an array belongs")
    return value


def _take_records(value: Any) -> Any:
    """Parts of an array of records: whether its class is recarray, and the array."""
    np = sys.modules["numpy"]
    return [type(value) is np.recarray, _plain(value)]


def _take_odd_array(value: Any) -> Any:
    """Parts of an array whose dtype a `.npy` file does not preserve."""
    dtype = value.dtype
    if dtype.type is sys.modules["numpy"].record:
        return _take_records(value)
    if _is_of_ml_types(dtype):
        return Form(_ML_KIND, None, _take_ml(value))
    raise MisfitError(f"is an array of {dtype}, {_array_problem(dtype)}")


def _array_problem(dtype: Any) -> str:
    if dtype.names is None:
        return long_problem(dtype) or "which cannot be kept; convert it with tolist()"
    if dtype.hasobject:
        return "which holds Python objects; convert it with tolist()"
    for name in dtype.names:
        inner = dtype[name].base
        if inner.names is None and (long_problem(inner) or _is_of_ml_types(inner)):
            return f"whose field {name!r} cannot be kept in it; keep each field as an array of its own"
    return (
        "whose fields cannot be written one after another; "
        "convert it with numpy.lib.recfunctions.repack_fields(...), or keep each field as an array of its own"
    )


def long_problem(dtype: Any) -> str | None:
    """The problem with a dtype if it is a long double, whose bytes mean other numbers on other processors."""
    np = sys.modules["numpy"]
    if dtype.type not in (np.longdouble, np.clongdouble):
        return None
    remedy = "astype('complex128')" if dtype.kind == "c" else "astype('float64')"
    return f"which differs between machines; convert it with {remedy}"


def _make_records(parts: Any) -> Any:
    np = _need("numpy")
    is_recarray, value = listed(2, parts)
    array = _array(value)
    if expect(bool, is_recarray):
        return array.view(np.recarray)
    return array.view(np.dtype((np.record, array.dtype)))


def _take_void(value: Any) -> Any:
    """Parts of an element of a structured array: whether it is a record, and an array of no dimensions."""
    np = sys.modules["numpy"]
    array = np.empty((), np.dtype((np.void, value.dtype)))
    array[()] = value
    return [isinstance(value, np.record), array]


def _make_void(parts: Any) -> Any:
    np = _need("numpy")
    is_record, value = listed(2, parts)
    array = _array(value)
    if array.shape or array.dtype.kind != "V":
        raise ValueError(f"an element is written as an array of {array.dtype} and shape {array.shape}")
    return (array.view(np.dtype((np.record, array.dtype))) if expect(bool, is_record) else array)[()]


def _take_masked(value: Any) -> Any:
    np = sys.modules["numpy"]
    if value._baseclass is not np.ndarray or value._optinfo:
        raise MisfitError(
            f"is a masked array over {value._baseclass}, maybe with notes; "
            "convert it with numpy.ma.MaskedArray(numpy.asarray(...), numpy.ma.getmaskarray(...))"
        )
    mask = None if value.mask is np.ma.nomask else np.asarray(value.mask)
    fill = None if value._fill_value is None else np.asarray(value._fill_value)
    # The masked elements' data counts too: unmasking shows it.
    return [np.asarray(value.data), mask, fill, bool(value.hardmask)]


def _make_masked(parts: Any) -> Any:
    np = _need("numpy")
    data, mask, fill, hard = listed(4, parts)
    array = _array(data)
    hidden = np.ma.nomask if mask is None else _array(mask)
    if mask is not None and (hidden.shape, hidden.dtype) != (array.shape, np.ma.make_mask_descr(array.dtype)):
        raise ValueError(f"a mask of {hidden.dtype} and shape {hidden.shape} does not fit its array")
    masked = np.ma.MaskedArray(array, mask=hidden, hard_mask=expect(bool, hard))
    if fill is not None:
        masked.set_fill_value(_array(fill)[()])
    return masked


def _make_constant(parts: Any) -> Any:
    expect(type(None), parts)
    return _need("numpy").ma.masked


def _take_text(value: Any) -> str:
    """NumPy text with its trailing NULs, which `str()` drops."""
    return str.__str__(value)


# --- ml_dtypes ----------------------------------------------------------------------------------------------

_ML_KIND = "ml_dtypes"


def _is_of_ml_types(dtype: Any) -> bool:
    cls = dtype.type
    return cls.__module__ == "ml_dtypes" and cls.__name__ in _ML_TYPES and dtype.isnative


def _take_ml(value: Any) -> Any:
    """Parts of an array or a scalar: name of the number type, whether it is an array, and the bits."""
    np = sys.modules["numpy"]
    is_array = type(value) is not value.dtype.type
    return [value.dtype.type.__name__, is_array, np.asarray(value).view(f"u{value.dtype.itemsize}")]


def _make_ml(parts: Any) -> Any:
    np = _need("numpy")
    name, is_array, bits = listed(3, parts)
    if name not in _ML_TYPES:
        raise ValueError(f"there are no numbers {name!r}")
    try:
        dtype = np.dtype(getattr(importlib.import_module("ml_dtypes"), name))
    except (ImportError, AttributeError):
        raise SerializationError(
            f"the value holds numbers of ml_dtypes.{name}, which this Python does not have; "
            "pip install -U ml_dtypes"
        ) from None
    array = _array(bits)
    if array.dtype != np.dtype(f"u{dtype.itemsize}") or not (expect(bool, is_array) or array.shape == ()):
        raise ValueError(f"numbers of {name} are written as {array.dtype} of shape {array.shape}")
    return array.view(dtype) if is_array else array.view(dtype)[()]


# --- torch --------------------------------------------------------------------------------------------------


def tensor_problem(value: Any) -> str | None:
    """The problem with a `torch.Tensor` that cannot be stored as a dense tensor of numbers, or None."""
    if value.is_nested:
        return "is a nested tensor; convert it with unbind()"
    if value.is_quantized:
        return "is a quantised tensor; convert it with dequantize()"
    if value.is_meta:
        return "is a meta tensor, which has no data; return a real one"
    if str(value.layout) != "torch.strided":
        return f"is a tensor of layout {value.layout}; convert it with to_dense()"
    if str(value.dtype).removeprefix("torch.") not in NUMBER_TYPES:
        return f"is a tensor of {value.dtype}; convert it with view(torch.uint8)"
    return None


#: Names of the two index tensors by compressed layout.
_COMPRESSED = {
    "sparse_csr": ("crow_indices", "col_indices"),
    "sparse_csc": ("ccol_indices", "row_indices"),
    "sparse_bsr": ("crow_indices", "col_indices"),
    "sparse_bsc": ("ccol_indices", "row_indices"),
}


def _take_odd_tensor(value: Any) -> Any:
    """Parts of a tensor that one run of elements does not describe: it requires grad, or is sparse."""
    if not value.requires_grad:
        return Form("torch.sparse", None, _take_sparse(value))
    if value.is_leaf:
        return Form("torch.grad", None, value.detach())
    raise MisfitError("is a tensor with a graph, which would be lost; convert it with detach()")


def _make_grad(parts: Any) -> Any:
    return expect(_need("torch").Tensor, parts).requires_grad_()


def _take_sparse(value: Any) -> Any:
    """Parts of a sparse tensor: layout, size, index tensor or two, elements, and whether it is coalesced."""
    layout = str(value.layout).removeprefix("torch.")
    if value.is_meta or (layout != "sparse_coo" and layout not in _COMPRESSED):
        raise MisfitError(tensor_problem(value) or "is a dense tensor")
    size = list(value.shape)
    if layout == "sparse_coo":
        return [layout, size, value._indices(), value._values(), value.is_coalesced()]
    first, second = _COMPRESSED[layout]
    return [layout, size, [getattr(value, first)(), getattr(value, second)()], value.values(), True]


def _make_sparse(parts: Any) -> Any:
    torch = _need("torch")
    layout, size, where, values, coalesced = listed(5, parts)
    sides = [expect(int, side) for side in expect(list, size)]
    if layout == "sparse_coo":
        return torch.sparse_coo_tensor(
            where,
            values,
            sides,
            is_coalesced=expect(bool, coalesced),
            check_invariants=True,
            device="cpu",
        )
    if layout not in _COMPRESSED:
        raise ValueError(f"there is no layout {layout!r}")
    first, second = listed(2, where)
    return torch.sparse_compressed_tensor(
        first,
        second,
        values,
        sides,
        layout=getattr(torch, layout),
        check_invariants=True,
        device="cpu",
    )


def _make_size(parts: Any) -> Any:
    return _need("torch").Size([expect(int, side) for side in expect(list, parts)])


def _make_torch_dtype(parts: Any) -> Any:
    torch = _need("torch")
    return expect(torch.dtype, vars(torch).get(expect(str, parts)))


# --- transformers -------------------------------------------------------------------------------------------


def _take_batch_encoding(value: Any) -> Any:
    encodings = value._encodings
    saved = None if encodings is None else [bytes(encoding.__getstate__()) for encoding in encodings]
    return [dict(value.data), saved, value._n_sequences]


def _make_batch_encoding(parts: Any) -> Any:
    data, saved, sequences = listed(3, parts)
    encodings = None if saved is None else [_encoding(part) for part in expect(list, saved)]
    made = _imported("transformers.tokenization_utils_base", "BatchEncoding")(
        expect(dict, data), encodings, n_sequences=sequences
    )
    # The constructor replaces None by the number that the encodings state.
    made._n_sequences = sequences
    return made


def _encoding(saved: Any) -> Any:
    encoding = _imported("tokenizers", "Encoding")()
    try:
        encoding.__setstate__(expect(bytes, saved))  # JSON, which the library parses without running code
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(str(error)) from error
    return encoding


def _take_batch_feature(value: Any) -> Any:
    others = {name: part for name, part in vars(value).items() if name != "data"}
    if not set(others) <= {"skip_tensor_conversion"} or any(part is not None for part in others.values()):
        raise MisfitError(f"is a {type(value)} with {', '.join(others)}; convert it with dict(...)")
    return dict(value.data)


def _make_batch_feature(parts: Any) -> Any:
    return _imported("transformers.feature_extraction_utils", "BatchFeature")(expect(dict, parts))


def _imported(module: str, attribute: str) -> Any:
    """Return a class of a module that this process has imported already, else raise SerializationError."""
    found = vars(sys.modules[module]).get(attribute) if module in sys.modules else None
    if found is None:
        raise SerializationError(
            f"the value is a {module}.{attribute}, and this process has not imported it; "
            f"import {module} first"
        )
    return found


def _text_of(prefix: str) -> Callable[[Any], str]:
    return lambda value: str(value).removeprefix(prefix)


NUMERIC = [
    Kind("numpy.records", "numpy", "recarray", _take_records, _make_records),
    Kind("numpy.records", "numpy", "ndarray", _take_odd_array, _make_records),
    Kind("numpy.void", "numpy", "void", _take_void, _make_void),
    Kind("numpy.void", "numpy", "record", _take_void, _make_void),
    Kind("numpy.masked array", "numpy.ma", "MaskedArray", _take_masked, _make_masked),
    Kind("numpy.masked", "numpy.ma.core", "MaskedConstant", lambda _: None, _make_constant),
    Kind("numpy.str", "numpy", "str_", _take_text, lambda parts: _need("numpy").str_(expect(str, parts))),
    Kind("numpy.bytes", "numpy", "bytes_", bytes, lambda parts: _need("numpy").bytes_(expect(bytes, parts))),
    *(Kind(_ML_KIND, "ml_dtypes", name, _take_ml, _make_ml) for name in _ML_TYPES),
    Kind("torch.grad", "torch", "Tensor", _take_odd_tensor, _make_grad),
    Kind("torch.sparse", "torch", "Tensor", _take_odd_tensor, _make_sparse),
    Kind("torch.size", "torch", "Size", list, _make_size),
    Kind("torch.dtype", "torch", "dtype", _text_of("torch."), _make_torch_dtype),
    Kind("torch.device", "torch", "device", str, lambda parts: _need("torch").device(expect(str, parts))),
    Kind(
        "transformers.batch_encoding", "transformers.tokenization_utils_base", "BatchEncoding",
        _take_batch_encoding, _make_batch_encoding,
    ),
    Kind(
        "transformers.batch_feature", "transformers.feature_extraction_utils", "BatchFeature",
        _take_batch_feature, _make_batch_feature,
    ),
]  # fmt: skip
