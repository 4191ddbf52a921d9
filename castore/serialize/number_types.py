"""The number types of torch, with what stands for each of them in NumPy and in a safetensors file.

Samples, saved tensors and shared slots read this one table. Must never: import torch or NumPy.
"""

from __future__ import annotations

from typing import NamedTuple


class NumberType(NamedTuple):
    """One number type of torch.

    Attributes:
        name: torch's name of the type.
        code: the type of its elements in a sample's record. Only codes that every safetensors reads.
        tail: dimensions that the tensor in the record has beyond the value's, for the halves of a complex
            number.
        numpy: NumPy's type of the same size.
        carrier: torch's type that NumPy has in place of this one; None if NumPy has this one.
    """

    name: str
    code: str
    tail: tuple[int, ...]
    numpy: str
    carrier: str | None = None


NUMBER_TYPES = {
    row.name: row
    for row in (
        NumberType("bool", "BOOL", (), "?"),
        NumberType("uint8", "U8", (), "u1"),
        NumberType("int8", "I8", (), "i1"),
        NumberType("uint16", "U16", (), "u2"),
        NumberType("int16", "I16", (), "i2"),
        NumberType("uint32", "U32", (), "u4"),
        NumberType("int32", "I32", (), "i4"),
        NumberType("uint64", "U64", (), "u8"),
        NumberType("int64", "I64", (), "i8"),
        NumberType("float16", "F16", (), "f2"),
        NumberType("float32", "F32", (), "f4"),
        NumberType("float64", "F64", (), "f8"),
        NumberType("complex64", "F32", (2,), "c8"),
        NumberType("complex128", "F64", (2,), "c16"),
        NumberType("bfloat16", "BF16", (), "i2", "int16"),
        NumberType("complex32", "F16", (2,), "i4", "int32"),
        NumberType("float8_e4m3fn", "F8_E4M3", (), "u1", "uint8"),
        NumberType("float8_e5m2", "F8_E5M2", (), "u1", "uint8"),
        NumberType("float8_e4m3fnuz", "U8", (), "u1", "uint8"),
        NumberType("float8_e5m2fnuz", "U8", (), "u1", "uint8"),
        NumberType("float8_e8m0fnu", "U8", (), "u1", "uint8"),
        NumberType("float4_e2m1fn_x2", "U8", (), "u1", "uint8"),
    )
}

#: Bytes of an element by its code in a safetensors file, in the order in which a saved file has its tensors.
SIZES = {
    "U64": 8, "I64": 8, "F64": 8, "C64": 8, "F32": 4, "U32": 4, "I32": 4, "BF16": 2, "F16": 2, "U16": 2,
    "I16": 2, "F8_E5M2FNUZ": 1, "F8_E4M3FNUZ": 1, "F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip
