"""The values in ``bytes-2026-11.xz``, each under the name that it has there.

Run as a program, the module writes what the castore that it finds makes of them::

    python -m tests.serialize.old_values PATH

The archive must stay: it was made by the castore of November 2026, before samples and serializers shared
their leaves.
"""

from __future__ import annotations

import collections
import datetime as dt
import decimal
import fractions
import ipaddress
import lzma
import pathlib
import sys
import types
import uuid
from typing import Any

import ml_dtypes
import msgpack
import numpy as np
import pyarrow as pa
import torch

from castore.adapters.torch.samples import pack
from castore.serialize.serializers import dump
from tests.adapters.torch.test_samples import DTYPES, images
from tests.serialize.kinds.values import (
    MASKED,
    PARIS,
    RECORD,
    SPARSE,
    UTC,
    Access,
    Colour,
    Frozen,
    Image,
    Pair,
    Point,
    Scan,
    Slim,
    Volume,
)


def _bits(count: int) -> bytes:
    """Bytes of which no two neighbours are equal."""
    return bytes((7 + 37 * place) % 251 for place in range(count))


def tensor_of(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """A tensor of the same bits in every run."""
    count = int(np.prod(shape)) * dtype.itemsize
    made = torch.tensor(list(_bits(count)), dtype=torch.uint8)
    return (made % 2 if dtype is torch.bool else made).view(dtype).view(shape)


def array_of(dtype: Any, *shape: int) -> np.ndarray[Any, Any]:
    """An array of the same bits in every run."""
    kind = np.dtype(dtype)
    made = np.frombuffer(_bits(int(np.prod(shape)) * kind.itemsize), "u1")
    found: np.ndarray[Any, Any] = (made % 2 if kind.kind == "b" else made.copy()).view(kind).reshape(shape)
    return found


def values() -> dict[str, Any]:
    """All values by name."""
    rows = np.zeros(2, RECORD)
    rows["a"], rows["b"]["d"] = [1, 2], ["x", "Ωy"]
    utc = dt.datetime(2024, 1, 1, 12, 0, 0, 123456, UTC)
    plain: list[Any] = [
        None, True, False, 0, -1, 2**63 - 1, 2**63, 2**64, -(2**63) - 1, 10**50, 1.5, -0.0, float("inf"),
        1 + 2j,
        "", "é\ud800\0", b"", b"\x00\xff", bytearray(b"xy"), [], (), {}, [1, 2, 3], (1, 2**63), [1, 2.5],
        [True, False], (0.5,), [1, (2, [3, (4,)]), {"a": ({},)}], [bytearray(b"x"), b"x"],
        {1: "a", "1": "b", (1, 2): "c", None: "d", b"k": "e", 1.5: "f", True + 1: "g"},
        {"a.b": 1, "a": {"b": 2}, "": 3, "__metadata__": 4, "\udcff": 5},
        utc, utc.replace(tzinfo=None), utc.replace(tzinfo=PARIS, fold=1),
        dt.datetime(1, 1, 1, tzinfo=dt.timezone(dt.timedelta(hours=2))),
        dt.datetime(1969, 12, 31, 23, 59, 59, 999999, UTC),
    ]  # fmt: skip
    arrays: list[Any] = [
        *(array_of(kind, 2, 3) for kind in [*"?bBhHiIlLefdFD", ">i4", ">f8", "M8[D]", "m8[25us]", ">M8[s]"]),
        array_of("f8"), array_of("u1", 0, 3), np.array(["a", "Ωc"]), np.array([b"a", b"bcd"]),
        array_of("V5", 2),
        array_of([("a", "i1"), ("b", ">f8")], 2), np.asfortranarray(array_of("f4", 3, 4)),
        array_of("i8", 9)[::2],
        np.ones(2, ml_dtypes.bfloat16), np.array([1, -2], ml_dtypes.int4), ml_dtypes.float8_e4m3fn(1.5),
        np.float32(0.1), np.int8(-3), np.bool_(True), np.complex128(1 - 2j), np.datetime64("2024-02-29", "D"),
        np.timedelta64(5, "h"), np.str_("Ω\0"), np.bytes_(b"\0x\0"), rows[1], np.void(b"raw"),
        rows, rows.view(np.recarray), MASKED([1, 2, 3], [0, 1, 0], fill_value=7, hard_mask=True),
        np.ma.masked,
    ]  # fmt: skip
    tensors = [
        *(tensor_of(dtype, *shape) for dtype in DTYPES for shape in [(), (0, 2), (2, 3)]),
        tensor_of(torch.float32, 4, 6).T, tensor_of(torch.bfloat16, 9)[::2],
        tensor_of(torch.complex64, 3).conj(), torch.ones(2), *SPARSE,
        torch.float16, torch.Size([1, 2]), torch.device("cuda", 1),
        Image.wrap(tensor_of(torch.uint8, 4), format=Colour.GREEN),
        Volume(
            torch.arange(4.0), torch.eye(4, dtype=torch.float64), {"path": "a.nii", "shape": np.array([8])},
        ),
    ]  # fmt: skip
    kinds: list[Any] = [
        set(), {1, 2}, {("x", 1), 2.5}, frozenset({1, (2, "x")}), range(1, 9, 3), slice(0, 9, 2),
        collections.OrderedDict(b=1, a=[2]), collections.Counter("abca"),
        collections.defaultdict(list, {1: [2]}),
        collections.deque([1, [2]], 5), types.SimpleNamespace(a=1, b=[2]), dt.date(2024, 2, 29),
        dt.time(1, tzinfo=UTC, fold=1), dt.timedelta(-1, 2, 3), UTC, PARIS, decimal.Decimal("1.10"),
        fractions.Fraction(3, -9), uuid.UUID(int=7), pathlib.PurePosixPath("a"),
        pathlib.PureWindowsPath("c:/x"),
        ipaddress.ip_address("10.0.0.1"), ipaddress.ip_network("10.0.0.0/8"),
        ipaddress.ip_interface("::1/64"),
        Colour.RED, Access.READ | Access.WRITE, Point(1, "y"), Pair(torch.ones(2), 3), Frozen(1, (2,)),
        Slim("s"),
        Scan(np.ones(2), notes={"who": Colour.GREEN}), pa.table({"a": [1, None], "b": ["x", "y"]}),
        pa.record_batch({"a": [1, 2]}),
    ]  # fmt: skip
    named = {
        "sample of an image": {"image": tensor_of(torch.uint8, 3, 8, 8), "label": 7},
        "sample of arrays": {name: array_of("f4", 4, 4) for name in "abc"},
        "sample of text": {"text": "a line", "tokens": [1, 2, 3], "mask": tensor_of(torch.bool, 3)},
        "dict of tensors": {
            name: tensor_of(dtype, 2) for name, dtype in zip("zyxwvut", DTYPES, strict=False)
        },
        "dict of all tensors": {str(dtype): tensor_of(dtype, 3) for dtype in DTYPES},
        "dict of odd names": {'é\n"\x7f\x01/\\😀': torch.ones(1), "b": torch.ones(2), "": torch.zeros(0)},
        "dict of arrays": {kind: array_of(kind, 3) for kind in "?bBhHiIlLefdF"},
        "dict of views": {"whole": torch.arange(6.0), "half": torch.arange(6.0)[3:]},
    }
    groups = {"plain": plain, "array": arrays, "tensor": tensors, "kind": kinds}
    numbered = {
        f"{group} {place}": value for group, items in groups.items() for place, value in enumerate(items)
    }
    return numbered | {f"image {name}": image for name, image in images().items()} | named


def written(value: Any) -> list[Any]:
    """The bytes of a value: as a sample, by its serializer (with its name), and inside a list."""
    return [pack(value), *dump(value), dump([value, 1])[1]]


if __name__ == "__main__":
    made = msgpack.packb({name: written(value) for name, value in values().items()})
    pathlib.Path(sys.argv[1]).write_bytes(lzma.compress(made, preset=9 | lzma.PRESET_EXTREME))
