"""Keys stay what they are: results of an earlier castore are found, and its errors name the same parts.

pins.json has the answers of castore 0.1.0 before its keys came from a registry of types; those for classes
with annotations are newer, since these count now, and so are those for Arrow's tables, whose chunks do not.
For a new case, take the row from `python -c "from tests.keys.test_pins import pins; print(pins())"`.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import datetime as dt
import decimal
import enum
import functools
import importlib.metadata
import itertools
import json
import pathlib
import random
import re
import sys
import threading
import types
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pytest
import torch

from castore import UnhashableError, key
from castore.adapters.datasets import operator_fingerprint
from castore.adapters.embeddings.table_identity import encoder_digest
from castore.adapters.torch import dataset_key
from castore.keys import libraries
from castore.keys.objects import function_fingerprint

PINS: dict[str, dict[str, str]] = json.loads(Path(__file__).with_name("pins.json").read_text("utf-8"))


class Colour(enum.Enum):
    RED = 1
    BLUE = "b"


class Flags(enum.Flag):
    ONE = 1
    TWO = 2


class Pair(NamedTuple):
    x: int
    y: Any


@dataclasses.dataclass
class Point:
    x: int
    y: Any = None


class Slotted:
    __slots__ = ("a", "b")

    def __init__(self) -> None:
        self.a, self.b = 1, [2]


class Plain:
    size = 3

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)

    @functools.cached_property
    def late(self) -> int:
        return self.size

    def __call__(self, x: int) -> int:
        return x + self.size + OUTER


class Reduced(Plain):
    def __getstate__(self) -> dict[str, Any]:
        return {"a": vars(self)["a"]}


class Keyed:
    def __castore_key__(self) -> Any:
        return {"b": 1, "a": [Colour.RED]}


class Own(dict[Any, Any]):
    pass


class Rude:
    def __getattribute__(self, name: str) -> Any:
        raise ZeroDivisionError(name)


class Settling:
    def __init__(self) -> None:
        self.model = torch.nn.ReLU()

    def __call__(self, x: Any) -> Any:
        return self.model.eval()(x)


OUTER = 7


def adds(x: int, y: int = 2, *, z: Any = (1, 2)) -> Any:
    import string

    return [x + y + OUTER + other for other in z] + [string.digits, Plain(a=adds)]


@functools.singledispatch
def kinds(x: Any) -> int:
    return 0


@kinds.register
def _(x: int) -> int:
    return 1


def _closing(bound: Any) -> Any:
    return lambda x: x + bound


def _twice(one: Any) -> Any:
    return [one, one, {"k": one}]


def _cyclic() -> Any:
    made = Plain(a=1)
    vars(made).update(me=made, items=[made, {"back": made}])
    return made


def _list_in_itself() -> Any:
    made: list[Any] = [1]
    made.append({"back": made})
    return made


def _deep() -> Any:
    made: Any = 1
    for _ in range(150):
        made = [made]
    return made


CASES: dict[str, Callable[[], Any]] = {
    "leaves": lambda: [None, ..., True, 1, -(2**70), 1.5, -0.0, 1j, "a\udc80", b"x" * 2000, bytearray(b"y")],
    "times": lambda: [
        dt.datetime(2020, 1, 2, 3, tzinfo=dt.timezone.utc), dt.date(2020, 1, 1), dt.time(1), dt.timedelta(1),
    ],
    "containers": lambda: {
        "b": [1, (2, {3, "x"})], "a": frozenset([(1,), (2, "y")]), 1: range(3), 2: slice(1),
    },
    "sorted dict": lambda: {"a": 1, "b": [2]},
    "long list of texts": lambda: [f"/no/such/{n}" for n in range(100)],
    "text with a slash": lambda: "/no/such/file",
    "enumerations": lambda: [Colour.BLUE, Flags.ONE | Flags.TWO, Colour],
    "named tuple": lambda: Pair(1, [2]),
    "dataclass": lambda: Point(1, {"z": 1, "a": 2}),
    "paths": lambda: [pathlib.PurePosixPath("a/b"), pathlib.PureWindowsPath("c"), Path("/no/such")],
    "slow leaves": lambda: [decimal.Decimal("1.50"), uuid.UUID(int=5)],
    "own key": Keyed,
    "arrays": lambda: [np.arange(6).reshape(2, 3).T, np.float32(1), np.dtype("<i4"), np.array("x")],
    "structured array": lambda: np.array([(1, 2.0)], dtype=[("a", "<i4"), ("b", "<f8")]),
    "masked and objects": lambda: [np.ma.array([1, 2], mask=[True, False]), np.array([{1: 2}, None])],
    "large array": lambda: np.arange(200_000, dtype="<i8"),
    "function": lambda: adds,
    "lambda with a closure": lambda: _closing([1, {"b": 2, "a": 1}]),
    "partial and method": lambda: [functools.partial(adds, 1, z=Point(1)), Plain(a=1).__call__],
    "dispatch": lambda: kinds,
    "class": lambda: Plain,
    "functions of libraries": lambda: [len, json.dumps, itertools.chain, str.upper, operator_fingerprint],
    "module of Python": lambda: json,
    "object": lambda: Plain(a=1, b={"z": [1], "a": 2}),
    "slots": Slotted,
    "own state": lambda: Reduced(a=1, b=threading.Lock()),
    "objects in cycles": _cyclic,
    "same object twice": lambda: _twice(Plain(a=[])),
    "list in itself": _list_in_itself,
    "deep": _deep,
    "collections": lambda: [
        collections.OrderedDict(b=1, a=2), collections.Counter("aab"), collections.deque([1]), Own(a=1),
    ],
    "objects in a set": lambda: {Pair(1, "a"), Pair(2, "b"), Colour.RED},
    "patterns and proxies": lambda: [re.compile("a+"), types.MappingProxyType({1: 2})],
    "handles": lambda: [threading.Lock(), threading.Event()],
    "generator of numbers": lambda: random.Random(1),
    "running generator": lambda: (n for n in [1]),
    "memoryview": lambda: memoryview(b"x"),
    "rude": Rude,
    "tensors": lambda: [
        torch.arange(6).reshape(2, 3).T, torch.nn.Parameter(torch.ones(2)), torch.eye(2).to_sparse(),
    ],
    "words of torch": lambda: [torch.float16, torch.device("cpu")],
    "model that is set to eval": Settling,
    "arrow": lambda: pa.table({"a": [1, None], "b": ["x", "y"]}),
}  # fmt: skip


class Held(list[int]):
    """A dataset that holds another object, and can be called."""

    def __init__(self, part: Any) -> None:
        super().__init__([1])
        self.part = part

    def __call__(self, sample: Any) -> Any:
        return sample


ASKED: dict[str, Callable[[Any], str]] = {
    "config": lambda part: key({"part": part}),
    "function": lambda part: function_fingerprint(lambda: part),
    "operator": lambda part: operator_fingerprint(Held(part)),
    "dataset": lambda part: dataset_key(Held(part)),
    "encoder": lambda part: encoder_digest(Held(part), "encoder"),
}


def _asked(adapter: str, part: Any) -> str:
    try:
        return ASKED[adapter](part)[:16]
    except UnhashableError as error:
        return str(error)


def pins() -> str:
    """The contents that pins.json should have, by the present code."""
    with _released():
        found = {
            name: {adapter: _asked(adapter, make()) for adapter in ASKED} for name, make in CASES.items()
        }
    return json.dumps(found, indent=1)


@contextlib.contextmanager
def _released() -> Iterator[None]:
    """The release that made the pins, of castore and of all libraries: later ones make other keys."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(importlib.metadata, "version", lambda name: "0.1.0")
        libraries._find_library.cache_clear()
        yield
    libraries._find_library.cache_clear()


def test_every_case_is_pinned_for_every_adapter() -> None:
    assert {name: [*row] for name, row in PINS.items()} == {name: [*ASKED] for name in CASES}


@pytest.mark.parametrize("name", CASES)
def test_a_config_has_the_key_or_the_error_that_it_had(name: str) -> None:
    # Python 3.10 calls the class of enumerations by another name in errors.
    assert _asked("config", CASES[name]()).replace("EnumMeta", "EnumType") == PINS[name]["config"]


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="bytecode, and so keys, differ between versions")
@pytest.mark.parametrize("adapter", [adapter for adapter in ASKED if adapter != "config"])
@pytest.mark.parametrize("name", CASES)
def test_a_value_has_the_key_or_the_error_that_it_had_in_every_adapter(name: str, adapter: str) -> None:
    with _released():
        assert _asked(adapter, CASES[name]()) == PINS[name][adapter]
