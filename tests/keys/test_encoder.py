"""One config has one key, whatever the order, the process or the day; two configs never share one."""

from __future__ import annotations

import dataclasses
import datetime as dt
import enum
import importlib
import io
import math
import os
import re
import struct
import subprocess
import sys
import uuid
from decimal import Decimal
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, NamedTuple
from zoneinfo import ZoneInfo

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as nps

from castore.errors import InvalidNameError, InvalidValueError, UnhashableError
from castore.keys.encoder import fingerprint, key


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


class Number(enum.IntEnum):
    ONE = 1


class Flags(enum.Flag):
    A = 1
    B = 2


class Point(NamedTuple):
    x: int
    y: int


class Place(NamedTuple):
    x: int
    y: int


@dataclasses.dataclass
class Model:
    name: str
    layers: list[Any]


@dataclasses.dataclass
class Other:
    name: str
    layers: list[Any]


# A dtype that a library defines: NumPy brings one for its tests.
_NUMPY_INSIDE = "numpy._core" if np.__version__ >= "2" else "numpy.core"
rational = importlib.import_module(f"{_NUMPY_INSIDE}._rational_tests").rational

_FIELDS = [("a", "u1"), ("b", "f8")]
#: The same fields, in layouts that a function can distinguish.
STRUCTURED = [
    np.dtype(_FIELDS), np.dtype(_FIELDS, align=True), np.dtype((np.record, _FIELDS)),
    np.dtype({"names": ["a", "b"], "formats": ["u1", "f8"], "offsets": [0, 8]}),
    np.dtype({"names": ["a", "b"], "formats": ["u1", "f8"], "offsets": [0, 1], "itemsize": 12}),
    np.dtype({"names": ["b", "a"], "formats": ["f8", "u1"], "offsets": [1, 0]}),
    np.dtype([(("title", "a"), "u1"), ("b", "f8")]),
    np.dtype([("a", "u1"), ("b", np.dtype("f8", metadata={"unit": "m"}))]),
]  # fmt: skip
UTC = dt.timezone.utc
NOON = dt.datetime(2024, 1, 1, 12)  # noqa: DTZ001 - naive on purpose
DIFFERENT: list[Any] = [
    None, False, True, 0, 1, -1, 255, 256, -256, 2**63, 2**64, 10**40, -(10**40), 0.0, -0.0, 1.0, math.nan,
    math.inf, -math.inf,
    1j, 1 + 0j, complex(0.0, -0.0), "", "1", "a", "True", "None", "é", "e\u0301", "\ud800", b"", b"1", b"a",
    bytearray(b"a"), ...,
    [], (), {}, set(), frozenset(), [1], (1,), {1}, frozenset({1}), {1: 1}, [[1], []], [[], [1]], [[1, 2]],
    [1, 2], [2, 1], [1, [2]],
    ["ab", "c"], ["a", "bc"], ["abc"], {"a": 1, "b": 2}, {"a": 2, "b": 1}, {"a": 1}, {"b": 1}, {1: "a"},
    {1.0: "a"}, {True: "a"},
    {"1": "a"}, {b"1": "a"}, [("a", 1)], {"a": {"b": 1}}, {("a", "b"): 1}, "x" * 5000, "x" * 5001,
    b"x" * 5000, range(3), range(4),
    slice(3), slice(0, 3), Path("a"), Path("/a"), PurePosixPath("a"), PureWindowsPath("a"), Colour.RED,
    Colour.BLUE, Number.ONE, Flags.A, Flags.A | Flags.B,
    Point(1, 2), Place(1, 2), (1, 2), Model("m", []), Model("m", [1]), Model("n", []), Other("m", []),
    {"name": "m", "layers": []},
    NOON, NOON.replace(tzinfo=UTC), NOON.replace(fold=1), NOON.date(), NOON.time(), dt.timedelta(1),
    dt.timedelta(microseconds=1),
    dt.timedelta(-1), Decimal(1), Decimal("1.0"), Decimal("NaN"), uuid.UUID(int=1), uuid.UUID(int=2),
    np.int64(1), np.int32(1), np.float64(1), np.float32(1), np.bool_(True), np.str_("a"), np.bytes_(b"a"),
    np.datetime64("2024-01-01"),
    np.array(1), np.array([1]), np.array([[1]]), np.array([1], np.int32), np.array([1], ">i8"),
    np.array([1.0]), np.zeros(4), np.zeros((2, 2)),
    np.zeros(0), np.zeros((0, 3)), np.array([0.0]), np.array([-0.0]), np.dtype("f4"), np.dtype("f8"),
    np.array(["a"]), np.array([b"a"]),
    np.array(["2024-01-01"], "M8[D]"), np.array(["2024-01-01"], "M8[s]"), np.array([(1, 2)], "i4,i4"),
    np.array([(1, 2)], "i4,i2"),
    np.array([(1, 2)], [("x", "i4"), ("y", "i4")]), np.arange(2000), np.arange(2000) + 1,
    *(array for fields in STRUCTURED for array in (fields, np.zeros(2, fields))), np.dtype(rational),
    np.zeros(2, rational),
    np.dtype("f4", metadata={"unit": "m"}), np.dtype("f4", metadata={"unit": "s"}),
]  # fmt: skip


def test_every_value_has_a_key_of_its_own() -> None:
    keys: dict[str, Any] = {}
    for value in DIFFERENT:
        for config in (value, ["wrapped", value], {"wrapped": value}):
            code = key(config)
            assert code not in keys, (config, keys[code])
            keys[code] = config


def test_equal_values_have_equal_keys() -> None:
    for one, two in [
        ({"a": 1, "b": {2, 3}}, {"b": {3, 2}, "a": 1}),
        ({1: 1, "1": 2, None: 3, (1, "x"): 4}, {(1, "x"): 4, None: 3, "1": 2, 1: 1}),
        (math.nan, -float("nan")),
        (Path("a/b"), Path("a//b")),
        (np.arange(6).reshape(2, 3), np.asfortranarray(np.arange(6).reshape(2, 3))),
        (np.arange(10)[::2], np.array([0, 2, 4, 6, 8])),
        (Model("m", [{"a", "b"}]), Model("m", [{"b", "a"}])),
        ({math.nan: 1, float("nan"): 2}, {float("nan"): 2, math.nan: 1}),
    ]:
        assert key(one) == key(two)


def test_padding_between_fields_does_not_count() -> None:
    aligned = np.dtype([("a", "u1"), ("b", "f8")], align=True)
    one, two = (np.frombuffer(bytes([fill]) * 32, np.uint8).copy().view(aligned) for fill in (0, 255))
    for array in (one, two):
        array["a"], array["b"] = 1, 2.0
    assert one.tobytes() != two.tobytes()
    assert key(one) == key(two)


@given(nps.nested_dtypes(max_leaves=4), nps.nested_dtypes(max_leaves=4), st.booleans(), st.booleans())
def test_dtypes_share_a_key_only_if_they_are_the_same(one: Any, two: Any, align: bool, aligned: bool) -> None:
    pair = [_realigned(one) if align else one, _realigned(two) if aligned else two]
    codes = []
    for dtype in pair:
        try:
            codes.append(key(dtype))
        except UnhashableError:
            return
    same = pair[0] == pair[1] and _aligned(pair[0]) == _aligned(pair[1])
    assert (codes[0] == codes[1]) == same


def _realigned(dtype: Any) -> Any:
    fields = [(name, dtype.fields[name][0]) for name in dtype.names or ()]
    return np.dtype(fields, align=True) if fields else dtype


def _aligned(dtype: Any) -> Any:
    if dtype.subdtype is not None:
        return _aligned(dtype.subdtype[0])
    return dtype.isalignedstruct, [_aligned(dtype.fields[name][0]) for name in dtype.names or ()]


def test_a_time_zone_that_nothing_names_is_refused() -> None:
    counts = struct.pack(">6l", 0, 0, 0, 0, 1, 4)
    zone = ZoneInfo.from_file(io.BytesIO(b"TZif" + bytes(16) + counts + bytes(6) + b"UTC\0"))
    with pytest.raises(UnhashableError, match="time zone without a name"):
        key({"at": NOON.replace(tzinfo=zone)})


class Shifted(dt.tzinfo):
    """A zone of the user's own with the name of another."""

    def utcoffset(self, moment: Any) -> dt.timedelta:
        return dt.timedelta(0)

    def tzname(self, moment: Any) -> str:
        return "UTC"

    dst = utcoffset


def test_zones_of_two_kinds_are_two() -> None:
    assert key(NOON.replace(tzinfo=Shifted())) != key(NOON.replace(tzinfo=UTC))


def test_memory_maps_count_as_their_arrays(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(100))
    assert key(np.load(tmp_path / "a.npy", mmap_mode="r")) == key(np.arange(100))


LEAVES = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=5)
    | st.complex_numbers()
)  # fmt: skip
CONFIGS = st.recursive(
    LEAVES,
    lambda part: (
        st.lists(part, max_size=4)
        | st.lists(part, max_size=4).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.integers() | st.tuples(st.integers()), part, max_size=4)
    ),
    max_leaves=15,
)


def exact(value: Any) -> Any:
    """A form of a value whose equality is exact in types, signs of zero and NaN, and ignores dicts' order."""
    if type(value) in (list, tuple):
        return (type(value).__name__, [exact(item) for item in value])
    if type(value) is dict:
        return ("dict", sorted(repr((exact(name), exact(item))) for name, item in value.items()))
    return (type(value).__name__, repr(value))


@given(CONFIGS, CONFIGS)
def test_keys_are_equal_exactly_when_configs_are(one: Any, two: Any) -> None:
    assert (key(one) == key(two)) == (exact(one) == exact(two))


@given(st.dictionaries(st.text(max_size=3) | st.integers(), CONFIGS, max_size=8), st.randoms())
def test_order_of_dicts_and_sets_does_not_matter(config: dict[Any, Any], random: Any) -> None:
    names = list(config)
    random.shuffle(names)
    assert key({name: config[name] for name in names}) == key(config)
    assert key(set(names)) == key(set(config))


class Opaque:
    pass


@pytest.mark.parametrize(
    ("config", "path"),
    [
        ({"model": Opaque()}, r"config\['model'\]: cannot hash <class '.*Opaque'>; pass a str or a number"),
        ({"m": Model("x", [0, Opaque()])}, r"config\['m'\]\.layers\[1\]: cannot hash"),
        ([{"a": ({Opaque()},)}], r"config\[0\]\['a'\]\[0\]\{\.\.\.\}: cannot hash"),
        ({Opaque(): 1}, r"config\.keys\(\)\[0\]: cannot hash"),
        (Point(1, Opaque()), r"config\.y: cannot hash"),  # type: ignore[arg-type]
        (lambda: 0, r"config: cannot hash <class 'function'>"),
        (Opaque, "config: cannot hash <class 'type'>"),
        (np.array([None]), "config: cannot hash dtype object"),
        (np.ma.masked_array([1], [True]), "config: cannot hash"),
        (np.longdouble(1), "padding"),
        (type("D", (dict,), {})(), r"config: cannot hash .*; pass dict\(\.\.\.\) of it"),
    ],
)  # fmt: skip
def test_what_has_no_stable_hash_is_named_with_its_path(config: Any, path: str) -> None:
    with pytest.raises(UnhashableError, match=path):
        key(config)


def test_cycles_and_depths_are_errors_and_shared_parts_are_not() -> None:
    circle: list[Any] = [1]
    circle.append({"x": circle})
    with pytest.raises(UnhashableError, match=r"config\[1\]\['x'\]: contains itself"):
        key(circle)
    deep: Any = 1
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(UnhashableError, match="levels deep"):
        key(deep)
    part = [1]
    assert key([part, part]) == key([[1], [1]])


def test_the_name_is_the_prefix_and_160_bits() -> None:
    assert re.fullmatch(r"[0-9a-f]{40}", key({}))
    assert key({"a": 1}, prefix="runs/tokenized") == f"runs/tokenized_{key({'a': 1})}"
    assert re.fullmatch(r"[0-9a-f]{64}", fingerprint({}))
    for bad in ("", "a/", "../a", "/a", "x" * 220):
        with pytest.raises(InvalidNameError):
            key({}, prefix=bad)


def test_content_counts_and_comes_in_any_form(tmp_path: Path) -> None:
    data = os.urandom(3_000_000)
    file = tmp_path / "data.bin"
    file.write_bytes(data)
    chunks = (data[at : at + 70_001] for at in range(0, len(data), 70_001))
    keys = {key(1, content=content) for content in (data, bytearray(data), memoryview(data), file, chunks)}
    assert len(keys) == 1
    assert key(1, content="é") == key(1, content="é".encode())
    others = [key(1), key(1, content=b""), key(2, content=data), key([1, data]), key(1, content=data[:-1])]
    assert len(keys | set(others)) == 6
    assert key(1, content=str(file)) != key(1, content=file)


@pytest.mark.parametrize(
    "content", [1, {b"a"}, {b"a": 1}, ["a"], [b"a", None], Path("/no/such/file"), Path("/")]
)
def test_content_of_other_kinds_is_refused(content: Any) -> None:
    with pytest.raises(InvalidValueError, match="content"):
        key(1, content=content)


def test_keys_are_the_same_in_other_processes_and_import_no_numpy() -> None:
    config = "{'b': {'x', 'y', 'z'}, 'a': [1, 2.5, None, frozenset('hello')], ('k', 1): {1, 2, 'q'}}"
    script = (
        f"import sys, castore.keys.encoder as k; print(k.key({config})); assert 'numpy' not in sys.modules"
    )
    keys = {
        subprocess.run(
            [sys.executable, "-c", script], env={**os.environ, "PYTHONHASHSEED": seed}, check=True,
            capture_output=True, text=True
        ).stdout.strip()
        for seed in ("0", "1", "77")
    }  # fmt: skip
    assert keys == {key(eval(config))}


def test_a_known_key_stays_known() -> None:
    # Fails when the encoding changes: then the encoding's version must change as well, and this line.
    assert (
        key({"model": "bert", "length": 128}, prefix="tokenized")
        == "tokenized_bcd4f5841631aadc72ac8ba3de7494fe38d36fb3"
    )


class Encoderish:
    def __init__(self, checkpoint: str) -> None:
        self.checkpoint = checkpoint

    def __castore_key__(self) -> str:
        return self.checkpoint


def test_own_classes_can_say_what_identifies_them() -> None:
    assert key({"model": Encoderish("a")}) == key({"model": Encoderish("a")})
    assert key({"model": Encoderish("a")}) != key({"model": Encoderish("b")})
    assert key({"model": Encoderish("a")}) != key({"model": "a"})
