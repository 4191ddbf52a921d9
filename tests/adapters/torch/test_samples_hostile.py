"""Records that are damaged, or lie: a CorruptError in bounded memory, or a sample, and nothing else."""

from __future__ import annotations

import contextlib
import json
import struct
import tracemalloc
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from castore import CorruptError
from castore.adapters.torch.samples import pack, unpack

HONEST = pack(
    {
        "x": torch.arange(40.0),
        "y": [1, 2, 3],
        "s": "text",
        "a": np.array(["u"]),
        "i": Image.new("P", (4, 4)),
        "b": [None, True],
    }
)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_damaged_records_give_a_corrupt_error_or_a_sample_and_nothing_else(data: Any) -> None:
    record = bytearray(HONEST)
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(record) - 1))
        record[place] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        del record[data.draw(st.integers(0, len(record))) :]
    with contextlib.suppress(CorruptError):
        unpack(record)


def forged(tree: object, tensors: dict[str, Any], data: bytes = b"", **extra: Any) -> bytes:
    """A record with a header of one's own; the tensors are (dtype, shape, offsets)."""
    header: dict[str, Any] = {"__metadata__": {"castore": json.dumps({"version": 1, "sample": tree} | extra)}}
    header |= {
        name: {"dtype": code, "shape": shape, "data_offsets": offsets}
        for name, (code, shape, offsets) in tensors.items()
    }
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


EIGHT = b"12345678"
LIES = {
    "nothing": b"",
    "short": b"123",
    "length beyond the record": struct.pack("<Q", 1 << 62) + b"{}",
    "length that wraps": struct.pack("<Q", (1 << 64) - 1) + b"{}",
    "no JSON": struct.pack("<Q", 4) + b"nope",
    "no object": struct.pack("<Q", 4) + b"1234",
    "null": struct.pack("<Q", 4) + b"null",
    "a list": struct.pack("<Q", 2) + b"[]",
    "no UTF-8": struct.pack("<Q", 4) + b'{"\xff}',
    "UTF-16": struct.pack("<Q", 4) + "{}".encode("utf-16-le"),
    "deep JSON": struct.pack("<Q", 200_000) + b"[" * 200_000,
    "no metadata": struct.pack("<Q", 2) + b"{}",
    "of somebody else": safetensors.torch.save({"x": torch.ones(2)}),
    "another version": forged(None, {}, version=3),
    "deep tree": forged(json.loads('["list",[' * 300 + "]]" * 300), {}),
    "deeper tree": struct.pack("<Q", 10**6) + b'{"__metadata__":{"castore":"' + b"[" * (10**6 - 28),
    "unknown kind": forged(["pickle", "x"], {"x": ("U8", [8], [0, 8])}, EIGHT),
    "unknown dtype": forged(["tensor", "x", "object"], {"x": ("U8", [8], [0, 8])}, EIGHT),
    "unknown code": forged(["tensor", "x", "uint8"], {"x": ("U1", [8], [0, 8])}, EIGHT),
    "unhashable name": forged(["tensor", ["x"], "uint8"], {"x": ("U8", [8], [0, 8])}, EIGHT),
    "missing tensor": forged(["tensor", "y", "uint8"], {"x": ("U8", [8], [0, 8])}, EIGHT),
    "tensor used twice": forged(["list", [["bytes", "x"], ["bytes", "x"]]], {"x": ("U8", [8], [0, 8])},
        EIGHT),
    "tensor not used": forged(None, {"x": ("U8", [8], [0, 8])}, EIGHT),
    "other dtype": forged(["tensor", "x", "float64"], {"x": ("U8", [8], [0, 8])}, EIGHT),
    "huge shape": forged(["tensor", "x", "uint8"], {"x": ("U8", [1 << 40], [0, 1 << 40])}, EIGHT),
    "wrapping shape": forged(["tensor", "x", "uint8"], {"x": ("U8", [1 << 62, 1 << 62, 0], [0, 0])}),
    "wrapping array": forged(["array", "x", "<f8"], {"x": ("F64", [1 << 62, 1 << 62, 0], [0, 0])}),
    "negative shape": forged(["tensor", "x", "uint8"], {"x": ("U8", [-1, -8], [0, 8])}, EIGHT),
    "shape of floats": forged(["tensor", "x", "uint8"], {"x": ("U8", [8.0], [0, 8])}, EIGHT),
    "shape of 1025 dimensions": forged(["tensor", "x", "uint8"], {"x": ("U8", [1] * 1025, [0, 1])}, b"1"),
    "array of 65 dimensions": forged(["array", "x", "|u1"], {"x": ("U8", [1] * 65, [0, 1])}, b"1"),
    "shape of a bool": forged(["tensor", "x", "uint8"], {"x": ("U8", [True], [0, 1])}, b"1"),
    "offsets backwards": forged(["tensor", "x", "uint8"], {"x": ("U8", [8], [8, 0])}, EIGHT),
    "offsets negative": forged(["tensor", "x", "uint8"], {"x": ("U8", [8], [-8, 0])}, EIGHT),
    "offsets of floats": forged(["tensor", "x", "uint8"], {"x": ("U8", [8], [0.0, 8.0])}, EIGHT),
    "overlap": forged(
        ["list", [["bytes", "x"], ["bytes", "y"]]], {"x": ("U8", [8], [0, 8]), "y": ("U8", [4], [4, 8])},
        EIGHT
    ),
    "gap": forged(["bytes", "x"], {"x": ("U8", [4], [4, 8])}, EIGHT),
    "bytes left over": forged(["bytes", "x"], {"x": ("U8", [4], [0, 4])}, EIGHT),
    "bytes missing": forged(["bytes", "x"], {"x": ("U8", [9], [0, 9])}, EIGHT),
    "number of another type": forged(["int", "x"], {"x": ("F64", [], [0, 8])}, EIGHT),
    "number of another shape": forged(["bool", "x"], {"x": ("BOOL", [8], [0, 8])}, EIGHT),
    "numbers of another type": forged(["list of int", "x"], {"x": ("F64", [1], [0, 8])}, EIGHT),
    "text that is no UTF-8": forged(["str", "x"], {"x": ("U8", [1], [0, 1])}, b"\xff"),
    "array of objects": forged(["array", "x", "|O"], {"x": ("U8", [8], [0, 8])}, EIGHT),
    "array of a program": forged(["array", "x", "<M8[1" + "0" * 20 + "s]"], {"x": ("I64", [1], [0, 8])},
        EIGHT),
    "npy of a pickle": forged(["npy", "x"], {"x": ("U8", [8], [0, 8])}, EIGHT),
    "scalar of a shape": forged(["scalar", "x", "<f8"], {"x": ("F64", [1], [0, 8])}, EIGHT),
    "huge image": forged(["image", [["pixels", "x", "L 100000"], None, None]],
        {"x": ("U8", [100000, 8], [0, 800000])}, EIGHT),
    "wide image": forged(["image", [["pixels", "x", "L 100000000"], None, None]],
        {"x": ("U8", [1, 8], [0, 8])}, EIGHT),
    "empty image of any width": forged(["image", [["pixels", "x", "L 9999999999"], None, None]],
        {"x": ("U8", [0, 9999999999], [0, 0])}),
    "image of no mode": forged(["image", [["pixels", "x", "XYZ 8"], None, None]],
        {"x": ("U8", [1, 8], [0, 8])}, EIGHT),
    "image of no image": forged(["image", [["int", "x"], None, None]], {"x": ("I64", [], [0, 8])}, EIGHT),
    "image with two parts": forged(["image", [["pixels", "x", "L 8"], None]], {"x": ("U8", [1, 8], [0, 8])},
        EIGHT),
    "palette of a number": forged(["image", [["pixels", "x", "L 8"], ["int", "p"], None]],
        {"p": ("I64", [], [0, 8]), "x": ("U8", [1, 8], [8, 16])}, EIGHT * 2),
    "dict without values": forged(["dict", [["k"]]], {}),
    "dict with a list for a key": forged(["dict", [[[1], None]]], {}),
    "tree of text": forged("text", {}),
    "tree of a number": forged(5, {}),
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
def test_hostile_records_give_a_corrupt_error_in_bounded_memory(lie: str) -> None:
    record = LIES[lie]
    tracemalloc.start()
    try:
        for _ in range(2):  # the second time, what was made of the header is remembered
            with pytest.raises(CorruptError):
                unpack(record)
        assert tracemalloc.get_traced_memory()[1] < 40 * len(record) + 100_000
    finally:
        tracemalloc.stop()


def test_a_header_that_is_remembered_does_not_excuse_a_wrong_length() -> None:
    record = pack(None)
    assert unpack(record) is None
    with pytest.raises(CorruptError):
        unpack(struct.pack("<Q", len(record)) + record[8:])
    with pytest.raises(CorruptError):
        unpack(record + b" ")


def test_what_is_remembered_of_headers_is_bounded() -> None:
    from castore.adapters.torch import samples

    for length in range(6000):
        unpack(pack(b"x" * length))
    assert sum(map(len, samples._plans)) <= 1 << 20
    assert sum(len(layout.header) for layout in samples._layouts.values()) <= 1 << 20
