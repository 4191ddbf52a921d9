"""Any object in a dataset, a closure or an argument gives a key, or an error that names its place."""

# ruff: noqa: PLW0108 - a list of makers reads better if all look alike

from __future__ import annotations

import abc
import array
import ast
import asyncio
import collections
import contextvars
import dataclasses
import datetime as dt
import decimal
import enum
import fractions
import functools
import io
import ipaddress
import itertools
import mmap
import operator
import os
import pathlib
import random
import re
import socket
import sqlite3
import subprocess
import sys
import tempfile
import threading
import types
import typing
import uuid
import warnings
import weakref
import zipfile
import zoneinfo
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, NamedTuple
from unittest import mock

import attrs
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
import tokenizers
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from castore import UnhashableError
from castore.adapters.datasets import operator_fingerprint
from castore.adapters.embeddings.table_identity import encoder_digest
from castore.adapters.torch import dataset_key
from castore.keys.objects import OBJECTS, function_fingerprint
from castore.keys.tracing import encode
from tests.keys.fingerprinted import numba, regex

warnings.filterwarnings("ignore", category=DeprecationWarning)


class Rude:
    """Raises an error at every access."""

    def __getattribute__(self, name: str) -> Any:
        raise ZeroDivisionError(f"do not ask for {name}")


class Mute:
    """Has only attributes that are looked up by a number, as NpzFile's f has."""

    def __getattribute__(self, name: str) -> Any:
        raise AttributeError(name)


class Unshown:
    def __repr__(self) -> str:
        raise RuntimeError("cannot be shown")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise KeyError(self)


class Lying:
    """Claims to be something else."""

    __class__ = dict  # type: ignore[assignment]


class Odd(type):
    """A metaclass whose classes cannot be compared."""

    def __eq__(cls, other: object) -> bool:
        raise ValueError("no")

    __hash__ = type.__hash__


class Strange(metaclass=Odd):
    pass


class Reducing:
    def __init__(self, reduced: Any) -> None:
        self.reduced = reduced

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.reduced


class Endless:
    """Has another part inside it at every access."""

    def __getstate__(self) -> Any:
        return {"inner": Endless()}


class Colour(enum.Flag):
    RED = 1
    BLUE = 2


@dataclasses.dataclass
class Point:
    x: Any
    unset: int = dataclasses.field(init=False)


class Pair(NamedTuple):
    x: Any


@attrs.define
class Attributed:
    x: int


class Abstract(abc.ABC):  # noqa: B024
    _registry: typing.ClassVar[Any] = weakref.WeakSet()


def _circle() -> Any:
    inner: list[Any] = []
    inner.append({"back": inner})
    return inner


def _deep() -> Any:
    value: Any = 1
    for _ in range(5000):
        value = [value]
    return value


def _local() -> Any:
    class Local:
        base = threading.Lock()

        def method(self) -> Any:
            return __class__  # type: ignore[name-defined]

    return Local()


def _words() -> Any:
    return tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))


def _archive() -> Any:
    data = io.BytesIO()
    np.savez(data, x=np.arange(3))
    return np.load(io.BytesIO(data.getvalue()))


def _context() -> Any:
    return contextvars.ContextVar("x").set(1)  # type: ignore[arg-type]


def _ended() -> Any:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process


def _with_cell() -> Any:
    x = 1
    return (lambda: x).__closure__[0]  # type: ignore[index]


ANYTHING: list[Callable[[], Any]] = [
    # of Python
    lambda: pathlib.PurePosixPath("a"), lambda: pathlib.Path.cwd(), lambda: re.compile("a+"),
    lambda: re.match("a", "a"),
    lambda: dt.datetime.now(dt.timezone.utc), lambda: dt.timezone.utc, lambda: dt.timedelta(1),
    lambda: zoneinfo.ZoneInfo("UTC"),
    lambda: decimal.Decimal("1.5"), decimal.getcontext, lambda: fractions.Fraction(1, 3),
    lambda: uuid.uuid4(),
    lambda: Colour.RED | Colour.BLUE, lambda: Colour, lambda: Point(1), lambda: Pair(1),
    lambda: Attributed(1), lambda: Abstract,
    lambda: array.array("i", [1]), lambda: memoryview(b"x"), lambda: bytearray(b"x"), lambda: range(3),
    lambda: slice(1),
    lambda: collections.OrderedDict(a=1), lambda: collections.Counter("aab"), lambda: collections.deque([1]),
    lambda: collections.ChainMap({}, {1: 2}), lambda: collections.UserDict(a=1),
    lambda: types.SimpleNamespace(a=1),
    lambda: types.MappingProxyType({1: 2}), lambda: {}.keys(), lambda: {1: 2}.items(), lambda: ...,
    lambda: NotImplemented,
    lambda: iter([1]), lambda: iter({1}), lambda: zip([1], [2], strict=True), lambda: map(len, []),
    lambda: filter(None, []),
    lambda: itertools.count(3), lambda: itertools.chain([1]), lambda: itertools.cycle([1]),
    lambda: enumerate([1]), lambda: reversed([1]),
    lambda: (n for n in [1]), lambda: operator.itemgetter(1), lambda: operator.attrgetter("a.b"),
    lambda: operator.methodcaller("f", 1),
    lambda: functools.partial(len), lambda: functools.partialmethod(len),
    lambda: functools.cached_property(len),
    lambda: functools.lru_cache(len), lambda: property(len), lambda: staticmethod(len),
    lambda: classmethod(len), lambda: super,  # type: ignore[arg-type]
    lambda: len, lambda: [].append, lambda: "a".join, lambda: str.upper, lambda: dict.fromkeys,
    lambda: int.__add__, lambda: (1).__add__,
    lambda: os, lambda: sys.modules[__name__], lambda: types.ModuleType("made"),
    lambda: compile("1", "x", "eval"), _with_cell,
    lambda: sys._getframe(), lambda: ast.parse("x = 1"), lambda: list[int], lambda: typing.TypeVar("T"),
    lambda: typing.Any, lambda: int | str, lambda: type, lambda: object, object, lambda: ValueError("x"),
    lambda: KeyError(object()),
    lambda: weakref.ref(Point), lambda: weakref.WeakKeyDictionary(), lambda: weakref.WeakValueDictionary(),
    weakref.WeakSet,
    lambda: weakref.proxy(Point(1)), lambda: weakref.finalize(Point, id, 1),
    lambda: contextvars.ContextVar("x"), _context,
    contextvars.copy_context, lambda: ipaddress.ip_address("::1"), lambda: os.stat("/"), lambda: os.environ,
    lambda: sys.version_info,
    # handles and streams
    lambda: io.StringIO("x"), lambda: io.BytesIO(b"x"), lambda: sys.stdout,
    lambda: open(os.devnull), lambda: tempfile.TemporaryFile(),  # noqa: SIM115
    lambda: socket.socket(), lambda: mmap.mmap(-1, 16), lambda: sqlite3.connect(":memory:"),
    lambda: os.scandir("/"), _ended,
    threading.Lock, threading.Thread, threading.local, threading.current_thread, asyncio.Event,
    asyncio.new_event_loop,
    lambda: zipfile.ZipFile(io.BytesIO(), "w"), lambda: random.Random(1), lambda: random.SystemRandom(),
    lambda: random.random,
    # of users
    Rude, Mute, Unshown, Lying, lambda: Strange, Endless, _local, _circle, _deep, mock.Mock,
    lambda: mock.sentinel.x,
    *(lambda r=r: Reducing(r) for r in (  # type: ignore[var-annotated]
        None, 1, (), (len,), (len, None), (len, ()), "nothing", "ANYTHING",
        (len, (), {}, iter("a"), iter([(1, 2)]), len, 7),
    )),
    # of libraries
    lambda: np.dtype("f4"), lambda: np.dtype([("a", "i4"), ("b", "O")]), lambda: np.float32,
    lambda: np.float64(1), lambda: np.add,
    lambda: np.frompyfunc(len, 1, 1), lambda: np.vectorize(len), lambda: np.random.default_rng(1),
    lambda: np.random.RandomState(1),
    lambda: np.random.PCG64(1), lambda: np.random.SeedSequence(1), _archive,
    lambda: np.rec.array([(1, 2.0)]), lambda: np.matrix([[1]]),
    lambda: np.ma.array([1, 2], mask=[True, False]), lambda: np.ma.masked, lambda: np.array([{1: 2}, None]),
    lambda: np.array("x", "T"),
    lambda: np.longdouble(1), lambda: np.datetime64("2020-01-01"), lambda: np.poly1d([1]),
    lambda: np.nditer(np.arange(2)),
    lambda: torch.float16, lambda: torch.device("cpu"), lambda: torch.Generator(), lambda: torch.Size([1]),
    lambda: torch.eye(2).to_sparse(),
    lambda: torch.eye(2).to_sparse_csr(), lambda: torch.empty(2, device="meta"),
    lambda: torch.nn.Linear(2, 2), lambda: torch.ones(1, requires_grad=True) * 2,
    lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
    lambda: torch.optim.SGD([torch.ones(1, requires_grad=True)], 0.1),
    lambda: torch.ones(2).untyped_storage(),
    lambda: torch.utils.data.DataLoader([1]),  # type: ignore[arg-type]
    lambda: torch.finfo(torch.float16), lambda: torch.ops.aten.add,
    lambda: torch.nn.functional.relu, lambda: torch.vmap(len),
    lambda: torch.fx.symbolic_trace(torch.nn.Linear(1, 1)), lambda: torch.contiguous_format,
    lambda: torch.nested.nested_tensor([torch.ones(1)]), lambda: torch.autograd.Function,
    lambda: torch.cuda.is_available,
    lambda: pd.DataFrame({"a": [1], "b": ["x"]}), lambda: pd.Series([1]).groupby([1]),
    lambda: pd.Timestamp("2020"), lambda: pd.NA, lambda: pd.NaT,
    lambda: pl.DataFrame({"a": [1]}), lambda: pl.col("a") + 1, lambda: pl.LazyFrame({"a": [1]}),
    lambda: pa.table({"a": [1]}), lambda: pa.schema([("a", pa.int8())]),
    lambda: pa.scalar(1), lambda: pa.array([1]), lambda: pa.py_buffer(b"x"), lambda: pa.int8(),
    pa.default_memory_pool,
    lambda: Image.new("L", (2, 2)), lambda: Image.new, _words, lambda: tokenizers.models.BPE(),
    lambda: regex.compile("a"), lambda: numba.njit(_local),
]  # fmt: skip
if find_spec("zarr") is not None:  # not on Python 3.10
    import zarr

    ANYTHING.append(lambda: zarr.array(np.arange(3)))


class Held(list[int]):
    """A dataset that holds another object, and can be called."""

    def __init__(self, part: Any) -> None:
        super().__init__([1])
        self.part = part

    def __call__(self, sample: Any) -> Any:
        return sample


ASKED: dict[str, Callable[[Any], str]] = {
    "operator": lambda part: operator_fingerprint(Held(part), "operator"),
    "closure": lambda part: operator_fingerprint(lambda sample: (part, sample), "operator"),
    "dataset": lambda part: dataset_key(Held(part)),
    "encoder": lambda part: encoder_digest(Held(part), "encoder"),
    "function": lambda part: function_fingerprint(lambda: part),
    "argument": lambda part: encode(OBJECTS, {"part": part}, "arguments").code.hex(),
}
_PATHS = {
    "operator": "operator.part", "closure": "operator -> closure 'part'", "dataset": "dataset.part",
    "encoder": "encoder 'encoder'.part", "function": "<lambda> -> closure 'part'",
    "argument": "arguments['part']",
}  # fmt: skip


with os.scandir("/") as _entries:
    _CLOSED = io.IOBase, socket.socket, sqlite3.Connection, asyncio.AbstractEventLoop, type(_entries)

_open: list[Any] = []


def made(number: int) -> Any:
    """One of the objects that a user may hold; `close` must follow."""
    part = ANYTHING[number]()
    if issubclass(type(part), _CLOSED) and part is not sys.stdout:
        _open.append(part)
    return part


def close() -> None:
    """Close all objects made: the collector would warn of open ones, in another test."""
    while _open:
        _open.pop().close()


def check(ask: str, part: Any) -> None:
    """Check that the part has a key, twice the same, or an error that names the part."""
    told = None
    try:
        first = ASKED[ask](part)
    except UnhashableError as error:
        told = str(error)
    if told is None:
        assert ASKED[ask](part) == first
    else:
        # Nesting that is too deep has no end that could be named.
        assert _PATHS[ask] in told or "nested too deep" in told
        assert len(told) < 1500


@pytest.mark.parametrize("number", range(len(ANYTHING)))
@pytest.mark.filterwarnings("ignore")
def test_anything_a_user_holds_ends_in_a_key_or_an_error_that_names_it(number: int) -> None:
    part = made(number)
    try:
        for ask in ASKED:
            check(ask, part)
    finally:
        close()


_PARTS = st.integers(0, len(ANYTHING) - 1).map(made)


def _around(parts: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.lists(parts, max_size=3),
        st.dictionaries(st.text(max_size=3), parts, max_size=3),
        st.builds(lambda part: {"set": frozenset([id]), "part": part}, parts),
        st.builds(Held, parts), st.builds(Point, parts), st.builds(Pair, parts),
        st.builds(lambda part: functools.partial(max, key=part), parts),
        st.builds(lambda part: lambda: part, parts),
        st.builds(lambda part: types.SimpleNamespace(deep=[part, part]), parts),
    )  # fmt: skip


@given(part=st.recursive(_PARTS, _around, max_leaves=4), ask=st.sampled_from(sorted(ASKED)))
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck), database=None)
@pytest.mark.filterwarnings("ignore")
def test_anything_in_anything_ends_in_a_key_or_an_error(part: Any, ask: str) -> None:
    try:
        check(ask, part)
    finally:
        close()
