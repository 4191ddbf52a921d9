"""Every value comes back exactly, or an error names the part that cannot; bytes never run code."""

from __future__ import annotations

import collections
import datetime as dt
import math
import os
import pickle
import struct
import subprocess
import sys
from typing import Any, NamedTuple
from zoneinfo import ZoneInfo

import msgpack
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from castore.errors import CorruptError, InvalidValueError, SerializationError
from castore.serialize.serializers import SERIALIZERS, dump, load
from tests.warm import WarmPython


def round_trip(obj: object) -> Any:
    name, data = dump(obj)
    assert type(data) is bytes
    return load(data, name)


def same(one: Any, two: Any) -> bool:
    """Equality that is exact in types, NaN, dtypes and layouts."""
    if type(one) is not type(two):
        return False
    if isinstance(one, list | tuple):
        return len(one) == len(two) and all(map(same, one, two))
    if isinstance(one, dict):
        return same(list(one), list(two)) and same(list(one.values()), list(two.values()))
    if isinstance(one, np.ndarray):
        about = (one.dtype, one.shape, np.isfortran(one))
        return about == (two.dtype, two.shape, np.isfortran(two)) and one.tobytes() == two.tobytes()
    if type(one).__name__ == "Tensor":  # also where torch is not installed
        about = (one.dtype, one.shape, one.requires_grad)
        alike = about == (two.dtype, two.shape, two.requires_grad)
        return alike and bool(one.nan_to_num().equal(two.nan_to_num()))
    if isinstance(one, float):
        return struct.pack("d", one) == struct.pack("d", two) or (math.isnan(one) and math.isnan(two))
    return bool(one == two)


UTC = dt.timezone.utc
VALUES: list[tuple[str, Any]] = [
    ("bytes", b""), ("bytes", b"\x00\xff"), ("bytearray", bytearray(b"x")), ("text", ""),
    ("text", "é\ud800"),
    ("msgpack", None), ("msgpack", True), ("msgpack", 0), ("msgpack", 2**63), ("msgpack", 2**64),
    ("msgpack", -(2**63) - 1), ("msgpack", 10**50),
    ("msgpack", 1.5), ("msgpack", math.inf), ("msgpack", math.nan), ("msgpack", -0.0), ("msgpack", []),
    ("msgpack", ()), ("msgpack", {}),
    ("msgpack", [1, (2, [3, (4,)]), {"a": ({},)}]),
    ("msgpack", {1: "a", "1": "b", (1, 2): "c", None: "d", b"k": "e"}),
    ("msgpack", {"z": 1, "a": 2}), ("msgpack", ["\ud800"]),
    ("msgpack", dt.datetime(2024, 1, 1, 12, 0, 0, 123456, UTC)),
    ("msgpack", dt.datetime(1, 1, 1, tzinfo=UTC)),
    ("msgpack", dt.datetime(9999, 12, 31, 23, 59, 59, 999999, UTC)),
    ("msgpack", dt.datetime(1969, 12, 31, 23, 59, 59, 999999, UTC)),
    ("msgpack", dt.datetime(2024, 1, 1)),  # noqa: DTZ001
    ("msgpack", dt.datetime(2024, 1, 1, tzinfo=dt.timezone(dt.timedelta(hours=2)))),
    ("msgpack", np.float64(1.5)), ("msgpack", np.int8(-1)), ("msgpack", np.bool_(True)),
    ("msgpack", np.str_("é")), ("msgpack", np.datetime64("2024-01-01")),
    ("msgpack", {"x": np.arange(3), "y": "label"}),
    ("npy", np.arange(6).reshape(2, 3)), ("npy", np.asfortranarray(np.arange(6.0).reshape(2, 3))),
    ("npy", np.array(1)), ("npy", np.zeros((0, 3))),
    ("npy", np.array(["é", "bb"])), ("npy", np.array([b"a"])),
    ("npy", np.array([(1, 2.0)], [("x", "i4"), ("é", "f8", (1,))])),
    ("npy", np.array([1], ">i4")), ("npy", np.array(["2024-01-01"], "M8[D]")), ("npy", np.arange(10)[::2]),
    ("npy", np.array([1j])), ("npy", np.zeros(3, "S0")), ("npy", np.zeros(3, "V0")),
    ("safetensors", {"b": np.zeros(2), "a": np.ones((3, 1), np.int8), "c": np.array(1.5)}),
    ("msgpack", {"a": np.zeros(2, "M8[s]")}), ("msgpack", {"a": np.array(["x"])}),
    ("msgpack", {"a": np.zeros(2, ">f4")}),
    ("msgpack", {"a": np.asfortranarray(np.ones((2, 3)))}), ("msgpack", {"__metadata__": np.zeros(2)}),
    ("arrow", pa.table({"a": [1, None], "b": ["x", "y"]})), ("arrow", pa.table({})),
    ("arrow", pa.table({"d": pa.array(["x", "x"]).dictionary_encode()})),
]  # fmt: skip


@pytest.mark.parametrize(("serializer", "value"), VALUES)
def test_values_come_back_as_they_were(serializer: str, value: Any) -> None:
    name, data = dump(value)
    assert name == serializer
    assert same(load(data, name), value)
    assert dump(value, name) == (name, data)


NESTED = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(),
    max_size=5) | st.binary(max_size=5)
    | st.datetimes(timezones=st.just(UTC) | st.none()),
    lambda part: st.lists(part, max_size=4) | st.lists(part, max_size=4).map(tuple)
    | st.dictionaries(st.text(max_size=4) | st.integers(), part, max_size=4),
    max_leaves=20,
)  # fmt: skip


@given(NESTED)
def test_nested_values_come_back_as_they_were(value: Any) -> None:
    assert same(round_trip(value), value)


def test_conveniences_are_those_that_are_stated() -> None:
    for raw in (bytearray(b"x"), memoryview(b"x")):
        assert same(load(dump(raw, "bytes")[1], "bytes"), b"x")
    batch = pa.record_batch({"a": [1, 2]})
    assert load(dump(batch, "arrow")[1], "arrow") == pa.Table.from_batches([batch])
    paris = dt.datetime(2024, 7, 1, 12, tzinfo=ZoneInfo("Europe/Paris"))
    assert round_trip(paris) == paris
    assert round_trip(paris).utcoffset() == dt.timedelta(hours=2)


def test_arrays_come_back_writable() -> None:
    for value in (np.arange(3), {"a": np.arange(3)}):
        back = round_trip(value)
        array = back["a"] if isinstance(back, dict) else back
        array[0] = 7
        assert array[0] == 7


def test_equal_objects_give_equal_bytes() -> None:
    value = {"b": np.zeros(2), "a": np.ones(2)}
    assert len({dump(value)[1] for _ in range(20)}) == 1


class Pair(NamedTuple):
    x: Any


class Text(str):
    __slots__ = ()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"x": [1, iter([2])]},
        r"value\['x'\]\[1\]: <class 'list_iterator'> has no serializer; .*allow_pickle=True"),
        ([(1, {"a": object()})], r"value\[0\]\[1\]\['a'\]: <class 'object'>"),
        ({iter: 1}, r"value\.keys\(\): <class 'builtin_function_or_method'>"),
        (collections.UserDict(a=1), r"value: .*UserDict'>.*convert it with dict\(\.\.\.\)"),
        ([Pair(object())], r"value\[0\]\.x: <class 'object'>"),
        ([Text("x")], r"value\[0\]: .*Text"),
        (np.array([None]), "value: <class 'numpy.ndarray'>|array of object"),
        (memoryview(b"x"), r"bytes\(\.\.\.\)"),
    ],
)  # fmt: skip
def test_what_would_not_come_back_is_refused_with_its_path(value: Any, message: str) -> None:
    with pytest.raises(SerializationError, match=message):
        dump(value)


def test_cycles_and_depths_are_refused() -> None:
    circle: list[Any] = []
    circle.append(circle)
    deep: Any = 1
    for _ in range(100_000):
        deep = (deep,)
    long: Any = 1
    for _ in range(100_000):
        long = [long]
    for value in (circle, deep, long, (circle,)):
        with pytest.raises(SerializationError):
            dump(value)


def test_pickle_is_used_only_where_allowed_and_needed() -> None:
    value = {"x": print}
    assert dump([1], allow_pickle=True)[0] == "msgpack"
    name, data = dump(value, allow_pickle=True)
    assert name == "pickle"
    assert load(data, name, allow_pickle=True) == value
    with pytest.raises(SerializationError, match="allow_pickle=True"):
        load(data, name)
    with pytest.raises(SerializationError, match="allow_pickle=True"):
        dump(1, "pickle")
    with pytest.raises(SerializationError, match="pickle cannot store"):
        dump(lambda: 0, allow_pickle=True)


def test_a_serializer_asked_for_by_name_takes_only_what_it_can() -> None:
    assert load(dump("a", "msgpack")[1], "msgpack") == "a"
    for value, name in [
        ("a", "bytes"),
        (b"a", "text"),
        ([1], "npy"),
        ({}, "safetensors"),
        (1, "arrow"),
        (object(), "msgpack"),
    ]:
        with pytest.raises(SerializationError):
            dump(value, name)
    with pytest.raises(InvalidValueError, match="take one of bytes, bytearray, text"):
        dump(1, "yaml")
    with pytest.raises(SerializationError, match="does not know"):
        load(b"", "yaml")


class Bomb:
    def __reduce__(self) -> Any:
        return os.system, ("touch /tmp/castore-bomb-went-off",)


def npy(header: str, body: bytes = b"", version: int = 1) -> bytes:
    length = struct.pack("<H" if version == 1 else "<I", len(header))
    return b"\x93NUMPY" + bytes([version, 0]) + length + header.encode() + body


def safe(header: str, size: int | None = None) -> bytes:
    return struct.pack("<Q", len(header) if size is None else size) + header.encode()


def ext_nest(depth: int) -> bytes:
    data = msgpack.packb([])
    for _ in range(depth):
        data = msgpack.packb([msgpack.ExtType(1, data)])
    return bytes(data)


HOSTILE: list[tuple[str, bytes]] = [
    ("text", b"\xff"), ("npy", b""), ("npy", b"\x93NUMPY"), ("npy", b"\x93NUMPY\x01\x00\xff\xff"),
    ("npy", b"\x93NUMPY\x02\x00\xff\xff\xff\xff"),
    ("npy", npy("{'descr': '<f8', 'fortran_order': False, 'shape': (137438953472,)}", b"x" * 8)),
    ("npy", npy("{'descr': '<f8', 'fortran_order': False, 'shape': (-1,)}")),
    ("npy", npy("{'descr': '<f8', 'fortran_order': False, 'shape': (True,)}", b"x" * 8)),
    ("npy", npy("{'descr': '<f8', 'fortran_order': False, 'shape': 1}", b"x" * 8)),
    ("npy", npy("{'descr': '|O', 'fortran_order': False, 'shape': (1,)}", pickle.dumps(Bomb()))),
    ("npy", npy("{'descr': '|S0', 'fortran_order': False, 'shape': (99999999999999999999999,)}")),
    ("npy", npy("[]")), ("npy", npy("{}")), ("npy", npy("(" * 5000)),
    ("npy", npy("-" * 60000 + "1")),
    ("npy", npy("__import__('os').system('touch /tmp/castore-bomb-went-off')")),
    ("npy", npy("{'descr': '<f8'}", version=3)),
    ("npy", npy("{'descr': '<f8', 'fortran_order': False, 'shape': (2,)}", b"x" * 15)),
    ("npy", npy("{'descr': ('<f8', (2**40,)), 'fortran_order': False, 'shape': ()}")),
    ("npy", npy("{'descr': ('<f8', (1099511627776,)), 'fortran_order': False, 'shape': ()}")),
    ("npy", npy("{'descr': 'V9999999999999', 'fortran_order': False, 'shape': (1,)}")),
    ("msgpack", b""), ("msgpack", b"\xc1"), ("msgpack", b"\x01\x02"), ("msgpack", b"\x91"),
    ("msgpack", b"\x91" * 100_000), ("msgpack", b"\xdd\xff\xff\xff\xff"),
    ("msgpack", b"\xdb\xff\xff\xff\xff"), ("msgpack", b"\xc9\xff\xff\xff\xff\x01"),
    ("msgpack", b"\xdd\x00\x0f\xff\xff" * 200_000), ("msgpack", b"\x81\x90\x01"),
    ("msgpack", ext_nest(65)), ("msgpack", ext_nest(3000)),
    ("msgpack", msgpack.packb(msgpack.ExtType(99, b""))),
    ("msgpack", msgpack.packb(msgpack.ExtType(1, b"\x01"))),
    ("msgpack", msgpack.packb(msgpack.ExtType(3, b"soon"))),
    ("msgpack", msgpack.packb(msgpack.ExtType(3, b"\xff"))),
    ("msgpack", msgpack.packb(msgpack.ExtType(4, b"junk"))),
    ("msgpack", msgpack.packb(msgpack.ExtType(6, b"junk"))), ("msgpack", b"\xc7\x0c\xff" + b"\xff" * 12),
    ("msgpack", b"\xa1\xff"),
    ("safetensors", b""), ("safetensors", b"\xff" * 8), ("safetensors", safe("{}", 2**40)),
    ("safetensors", safe("{}")), ("safetensors", safe("[" * 100_000)),
    ("safetensors", safe('{"__metadata__":{"castore":"{}"}}')),
    ("safetensors", safe('{"__metadata__":{"castore":"[]"}}')), ("safetensors", safe("[]")),
    ("safetensors", b"\x00" * 7),
    ("safetensors", dump({"a": np.zeros(9)})[1][:-1]),
    ("safetensors", safe(
        '{"a":{"dtype":"F64","shape":[1099511627776],"data_offsets":[0,8796093022208]},'
        '"__metadata__":{"castore":"{\\"kind\\":\\"numpy\\"}"}}'
    )),
    ("arrow", b""), ("arrow", b"ARROW1"), ("arrow", b"ARROW1\0\0" + b"\xff" * 100 + b"ARROW1"),
    ("arrow", dump(pa.table({"a": [1]}))[1][:-9]),
]  # fmt: skip

LIMITED = """
import sys, resource, pickle
import numpy, pyarrow, msgpack, safetensors.numpy
from castore.errors import CorruptError, SerializationError
from castore.serialize.serializers import load
for name, data in pickle.loads(sys.stdin.buffer.read()):
    try:
        got = load(data, name)
    except (CorruptError, SerializationError) as error:
        assert str(error)
    else:
        print(name, data[:80], got)
    now = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    base = globals().setdefault("base", now)
    if now - base > 64 * 1024:
        print("memory", now - base, name, data[:80])
        base = now
"""


def test_hostile_bytes_give_a_clear_error_in_bounded_memory() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LIMITED],
        input=pickle.dumps(HOSTILE),
        capture_output=True,
        check=False,
        timeout=300,
    )
    assert (done.returncode, done.stdout.decode(), done.stderr.decode()) == (0, "", "")
    assert not os.path.exists("/tmp/castore-bomb-went-off")


@pytest.mark.parametrize(
    "name", [name for name in SERIALIZERS if name not in ("bytes", "bytearray", "text", "pickle")]
)
def test_cut_and_flipped_bytes_give_a_value_or_a_clear_error(name: str) -> None:
    value = next(
        value
        for kind, value in VALUES
        if kind == name and (name != "msgpack" or (isinstance(value, dict) and "y" in value))
    )
    data = dump(value)[1]
    for at in range(len(data)):
        with pytest.raises(CorruptError):
            load(data[:at], name)
        for bit in (1, 16, 128):
            hurt = bytearray(data)
            hurt[at] ^= bit
            try:
                load(bytes(hurt), name)
            except (CorruptError, SerializationError):
                continue


def test_plain_values_import_nothing_heavy() -> None:
    script = (
        "import sys; from castore.serialize.serializers import dump, load\n"
        "for v in (b'x', 'x', [1, (2,), {'a': 2**70}]):\n    n, d = dump(v); assert load(d, n) == v\n"
        "heavy = {'numpy', 'torch', 'pyarrow', 'safetensors'} & set(sys.modules); assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_missing_package_is_named_with_its_extra() -> None:
    script = (
        "import sys; sys.modules['pyarrow'] = None; from castore.serialize.serializers import load; "
        "from castore.errors import *\ntry: load(b'', 'arrow')\nexcept MissingDependencyError as e: "
        "assert 'castore[datasets]' in str(e)\nelse: sys.exit(1)"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_no_module_of_the_room_imports_a_library_before_a_value_needs_it() -> None:
    script = (
        "import importlib, pkgutil, sys, castore.serialize as room\n"
        "for found in pkgutil.walk_packages(room.__path__, room.__name__ + '.'):\n"
        "    importlib.import_module(found.name)\n"
        "assert 'castore.serialize.leaves' in sys.modules\n"
        "heavy = {'numpy', 'torch', 'pyarrow', 'safetensors', 'PIL'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_arrays_are_saved_and_loaded_without_the_safetensors_package() -> None:
    script = (
        "import sys; sys.modules['safetensors'] = None; import numpy as np\n"
        "from castore.serialize.serializers import dump, load\n"
        "name, data = dump({'a': np.arange(3)}); assert name == 'safetensors'\n"
        "assert load(data, name)['a'].tolist() == [0, 1, 2]"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_an_image_without_pillow_is_an_error_that_names_it(warm_torch: WarmPython) -> None:
    pytest.importorskip("torch")
    from PIL import Image

    from castore.adapters.torch.samples import pack

    image = Image.new("L", (2, 2))
    script = (
        "import sys; sys.modules['PIL.Image'] = None; from castore.errors import SerializationError\n"
        "from castore.serialize.serializers import load; from castore.adapters.torch.samples import unpack\n"
        f"for read in (lambda: unpack({pack(image)!r}), lambda: load({dump([image])[1]!r}, 'msgpack')):\n"
        "    try: read()\n"
        "    except SerializationError as error: assert 'pip install pillow' in str(error)\n"
        "    else: sys.exit('no error')"
    )
    assert warm_torch.output(["-c", f"import sys; assert 'PIL' not in sys.modules\n{script}"]) == ""


@pytest.mark.parametrize("kind", ["|S0", "<U0", "|V0", []])
def test_elements_without_bytes_take_no_memory_however_many_a_header_claims(kind: Any) -> None:
    header = f"{{'descr': {kind!r}, 'fortran_order': False, 'shape': ({2**40},)}}"
    array = load(npy(header), "npy")
    assert (array.shape, array.nbytes, array.dtype) == ((2**40,), 0, np.dtype(kind))
