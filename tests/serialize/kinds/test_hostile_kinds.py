"""Bytes that lie about kinds: a clear error, no import, no code of a class, and no value of another kind."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from castore import CorruptError, SerializationError
from castore.adapters.torch import samples
from castore.adapters.torch.samples import pack, unpack
from castore.serialize import serializers
from castore.serialize.kinds import Form, take_apart
from castore.serialize.serializers import dump, load
from tests.serialize.kinds.values import VALUES
from tests.warm import WarmPython

HERE = "tests.serialize.kinds.test_hostile_kinds"
ran: list[str] = []


@dataclasses.dataclass
class Loud:
    """Raises an alarm when any of its code runs."""

    x: int = 0

    def __new__(cls, *_: Any) -> Any:
        ran.append("__new__")
        return super().__new__(cls)

    def __init__(self, *_: Any) -> None:
        ran.append("__init__")

    def __post_init__(self) -> None:
        ran.append("__post_init__")

    def __setattr__(self, name: str, value: object) -> None:
        ran.append("__setattr__")

    def __setstate__(self, state: object) -> None:
        ran.append("__setstate__")


@dataclasses.dataclass
class Ending:
    x: int = 0

    def __del__(self) -> None:
        ran.append("__del__")


class Ordinary:
    pass


@dataclasses.dataclass
class Own:
    """Its pickle has more than its fields."""

    x: int = 0

    def __reduce__(self) -> Any:
        return Own, (self.x,)


class Lie:
    """Stands for a value, and is written as a false form of it."""


def _told(form: Form) -> Callable[[Any], Form | None]:
    return lambda value: form if type(value) is Lie else take_apart(value)


def as_record(form: Form) -> Callable[[], Any]:
    """A reader of a sample that claims to be this form."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(samples, "take_apart", _told(form))
        record = pack(Lie())
    return lambda: unpack(record)


def as_msgpack(form: Form) -> Callable[[], Any]:
    """A reader of a stored object that claims to be this form."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(serializers, "take_apart", _told(form))
        data = dump(Lie())[1]
    return lambda: load(data, "msgpack")


READERS = [as_record, as_msgpack]
FIELDS = [{"x": 1}, None]
RECORDS = np.zeros(2, [("a", "i4")])

LIES: dict[str, Form] = {
    "unknown kind": Form("pickle", None, b""),
    "kind of a newer castore": Form("hologram", None, [1]),
    "kind that is no text": Form(3, None, []),  # type: ignore[arg-type]
    "class without a name": Form("dataclass", None, FIELDS),
    "class that is a number": Form("dataclass", 7, FIELDS),  # type: ignore[arg-type]
    "function": Form("dataclass", "os:system", FIELDS),
    "class of another kind": Form("enum", f"{HERE}:Loud", "x"),
    "ordinary class": Form("dataclass", f"{HERE}:Ordinary", FIELDS),
    "process": Form("dataclass", "subprocess:Popen", [{"args": ["touch", "x"]}, None]),
    "class that runs code when it ends": Form("dataclass", f"{HERE}:Ending", FIELDS),
    "class with a reduce of its own": Form("dataclass", f"{HERE}:Own", FIELDS),
    "plain tuple": Form("namedtuple", "builtins:tuple", FIELDS),
    "plain tensor": Form("tensor", "torch:Tensor", [torch.ones(1), {"grad_fn": 1}]),
    "parameter": Form("tensor", "torch.nn.parameter:Parameter", [torch.ones(1), None]),
    "wrapper of tensors": Form("tensor", "torch.testing._internal.two_tensor:TwoTensor",
    [torch.ones(1), None]),
    "tensor of a list": Form("tensor", "tests.serialize.kinds.values:Image", [[1], None]),
    "tensor with numbers for names": Form("tensor", "tests.serialize.kinds.values:Image",
    [torch.ones(1), {1: 2}]),
    "fields that are a list": Form("dataclass", "tests.serialize.kinds.values:Frozen", [["x", "y"], None]),
    "one part": Form("dataclass", "tests.serialize.kinds.values:Frozen", [{"x": 1, "y": 2}]),
    "state in slots that has none": Form("dataclass", "tests.serialize.kinds.values:Slim",
    [{"x": 1}, {"z": 1}]),
    "member that is a list": Form("enum", "tests.serialize.kinds.values:Colour", ["RED"]),
    "member by value": Form("enum", "tests.serialize.kinds.values:Colour", 1),
    "name of a step too many": Form("enum", "tests.serialize.kinds.values:Outer.Inner.HERE", "HERE"),
    "not registered": Form("registered", "nobody", 1),
    "registered under a number": Form("registered", 7, 1),  # type: ignore[arg-type]
    "set of lists": Form("set", None, [[1]]),
    "set of a number": Form("set", None, 1),
    "counter of a list": Form("counter", None, [1]),
    "factory that is code": Form("defaultdict", None, ["eval", {}]),
    "deque of negative length": Form("deque", None, [[1], -1]),
    "range of text": Form("range", None, ["1", 2, 3]),
    "date of no calendar": Form("date", None, [2024, 13, 1]),
    "date of huge numbers": Form("date", None, [2**70, 1, 1]),
    "datetime of nine": Form("datetime", None, [[2024, 1, 1, 0, 0, 0, 0, 0, 0], None]),
    "datetime in a zone of text": Form("datetime", None, [[2024, 1, 1, 0, 0, 0, 0, 0], "UTC"]),
    "zone of a path": Form("zone", None, "../../../etc/passwd"),
    "zone that is nowhere": Form("zone", None, "Europe/Atlantis"),
    "number that is none": Form("decimal.Decimal", None, "one"),
    "fraction of nothing": Form("fraction", None, [1, 0]),
    "path of bytes": Form("pathlib.PosixPath", None, b"x"),
    "uuid of three bytes": Form("uuid", None, [b"abc", None]),
    "address of text": Form("ipaddress.IPv4Address", None, "300.0.0.1"),
    "records of a number": Form("numpy.records", None, [True, 5]),
    "element of many": Form("numpy.void", None, [False, RECORDS]),
    "element of a number": Form("numpy.void", None, [False, np.zeros(())]),
    "mask of another shape": Form("numpy.masked array", None, [np.zeros(3), np.zeros(2, bool), None, False]),
    "mask of numbers": Form("numpy.masked array", None, [np.zeros(3), np.zeros(3), None, False]),
    "masked with a value": Form("numpy.masked", None, 1),
    "size of text": Form("torch.size", None, ["1"]),
    "dtype that is a function": Form("torch.dtype", None, "load"),
    "device of nowhere": Form("torch.device", None, "moon:1"),
    "sparse index outside": Form("torch.sparse", None,
    ["sparse_coo", [3], torch.tensor([[9]]), torch.ones(1), False]),
    "sparse index below": Form("torch.sparse", None,
    ["sparse_coo", [3], torch.tensor([[-1]]), torch.ones(1), False]),
    "sparse in false order": Form("torch.sparse", None,
    ["sparse_coo", [3], torch.tensor([[2, 1]]), torch.ones(2), True]),
    "sparse of negative size": Form("torch.sparse", None,
    ["sparse_coo", [-3], torch.tensor([[0]]), torch.ones(1), False]),
    "sparse of no layout": Form("torch.sparse", None,
    ["strided", [3], [torch.zeros(1), torch.zeros(1)], torch.ones(1), True]),
    "compressed rows outside": Form(
        "torch.sparse", None, ["sparse_csr", [2, 3], [torch.tensor([0, 1, 99]), torch.tensor([0, 9])],
        torch.ones(2), True]
    ),
    "frame of a number": Form("pandas.frame", None, 5),
    "frame of three rows and two": Form(
        "pandas.frame", None,
        [pd.Index(["a", "b"]), pd.RangeIndex(3), [[[0], np.zeros(3)], [[1], np.zeros(2)]], {}, True],
    ),
    "frame without a label": Form(
        "pandas.frame", None, [pd.Index(["a"]), pd.RangeIndex(3), [[[0, 1], np.zeros((2, 3))]], {}, True]
    ),
    "frame of labels that are a list": Form(
        "pandas.frame", None, [["a"], pd.RangeIndex(1), [[[0], np.zeros(1)]], {}, True]
    ),
    "frame of squares": Form(
        "pandas.frame", None, [pd.Index(["a"]), pd.RangeIndex(2), [[[0], np.zeros((2, 2))]], {}, True]
    ),
    "frame of text": Form("pandas.frame", None, [pd.Index(["a"]), pd.RangeIndex(1), [[[0], "x"]], {}, True]),
    "labels twice where once is told": Form(
        "pandas.frame", None,
        [pd.Index(["a", "a"]), pd.RangeIndex(1), [[[0, 1], np.zeros((2, 1))]], {}, False],
    ),
    "series of a frame": Form("pandas.series", None, [pd.RangeIndex(1), pd.DataFrame([1]), None, {}, True]),
    "rows of a range of text": Form("pandas.range_index", None, ["0", 2, 1, None]),
    "range without steps": Form("pandas.range_index", None, [0, 5, 0, None]),
    "level that is not there": Form(
        "pandas.multi_index", None, [[pd.Index([1])], [np.array([0, 5], "i1")], [None], None]
    ),
    "more codes than levels": Form("pandas.multi_index", None, [[], [np.array([0], "i1")], [None], None]),
    "places twice": Form(
        "pandas.frame", None, [pd.Index(["a", "b"]), pd.RangeIndex(1), [[[0, 0], np.zeros((2, 1))]], {}, True]
    ),
    "one column with two places": Form(
        "pandas.frame", None, [pd.Index(["a", "b"]), pd.RangeIndex(1), [[[0, 1], ["x"]]], {}, True]
    ),
    "places of text": Form(
        "pandas.frame", None, [pd.Index(["a"]), pd.RangeIndex(1), [[["0"], np.zeros((1, 1))]], {}, True]
    ),
    "codes below none": Form(
        "pandas.multi_index", None, [[pd.Index([1])], [np.array([0, -5], "i1")], [None], None]
    ),
    "codes of two lengths": Form(
        "pandas.multi_index", None,
        [[pd.Index([1]), pd.Index([1])], [np.array([0, 0], "i1"), np.array([0], "i1")], [None, None], None],
    ),
    "codes of text": Form("pandas.multi_index", None, [[pd.Index([1])], [["0"]], [None], None]),
    "frequency that is none": Form(
        "pandas.time_index", None, [np.array(["2024-01-01"], "M8[ns]"), None, "moon"]
    ),
    "category that is not there": Form(
        "pandas.categorical", None, [np.array([7], "i1"), pd.Index(["a"]), False]
    ),
    "category below none": Form("pandas.categorical", None, [np.array([-7], "i1"), pd.Index(["a"]), False]),
    "categories twice": Form("pandas.categorical", None, [np.array([0], "i1"), pd.Index(["a", "a"]), False]),
    "times by the year": Form("pandas.datetimes", None, [np.array(["2024"], "M8[Y]"), None]),
    "times of numbers": Form("pandas.timedeltas", None, np.zeros(3)),
    "period of no frequency": Form("pandas.periods", None, [np.zeros(3, "i8"), "moon"]),
    "intervals of two lengths": Form("pandas.intervals", None, [pd.Index([1, 2]), pd.Index([2]), "left"]),
    "interval that ends first": Form("pandas.intervals", None, [pd.Index([2]), pd.Index([1]), "left"]),
    "interval open at noon": Form("pandas.interval", None, [0, 1, "noon"]),
    "numbers of another mask": Form("pandas.integers", None, [np.zeros(3, "i8"), np.zeros(2, bool)]),
    "whole numbers of floats": Form("pandas.integers", None, [np.zeros(3), np.zeros(3, bool)]),
    "texts of numbers": Form("pandas.strings", None, [[1], "python", True]),
    "texts kept nowhere": Form("pandas.strings", None, [["a"], "moon", True]),
    "column of no table": Form("pandas.arrow", None, [1]),
    "table of another column": Form("pandas.arrow", None, pa.table({"x": [1]})),
    "sparse array": Form("pandas.sparse", None, [1]),
    "matrix index outside": Form(
        "scipy.csr_array", None, [[2, 2], [np.ones(1), np.array([9], "i4"), np.array([0, 1, 1], "i4")]]
    ),
    "matrix index below": Form(
        "scipy.csc_matrix", None, [[2, 2], [np.ones(1), np.array([-1], "i4"), np.array([0, 1, 1], "i4")]]
    ),
    "matrix rows that go back": Form(
        "scipy.csr_array", None, [[2, 2], [np.ones(1), np.array([0], "i4"), np.array([0, 9, 1], "i4")]]
    ),
    "matrix of floats for places": Form(
        "scipy.csr_array", None, [[2, 2], [np.ones(1), np.array([0.5]), np.array([0.0, 1, 1])]]
    ),
    "blocks of no size": Form(
        "scipy.bsr_array", None, [[2, 2], [np.ones((1, 0, 0)), np.array([0], "i4"), np.array([0, 1], "i4")]]
    ),
    "coordinates outside": Form(
        "scipy.coo_array", None, [[2, 2], np.ones(1), [np.array([9]), np.array([0])], False]
    ),
    "coordinates below": Form(
        "scipy.coo_matrix", None, [[2, 2], np.ones(1), [np.array([-9]), np.array([0])], False]
    ),
    "diagonals twice": Form("scipy.dia_array", None, [[2, 2], [np.ones((2, 2)), np.array([0, 0])]]),
    "matrix of objects": Form("scipy.dia_array", None, [[2, 2], [[1], [2]]]),
    "matrix of text": Form("scipy.dia_array", None, [["2", 2], [np.ones((1, 2)), np.array([0])]]),
    "matrix of another form": Form("scipy.lil_array", None, [[2, 2], []]),
    "encodings that are no JSON": Form("transformers.batch_encoding", None, [{}, [b"pickle"], None]),
    "features of a list": Form("transformers.batch_feature", None, [1]),
}  # fmt: skip


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("lie", LIES)
def test_a_lie_is_a_clear_error_and_runs_nothing(
    lie: str, reader: Callable[[Form], Callable[[], Any]]
) -> None:
    read = reader(LIES[lie])
    ran.clear()
    for _ in range(2):  # the second time, the record's header comes from a cache
        with pytest.raises((CorruptError, SerializationError)):
            read()
    assert ran == []


@pytest.mark.parametrize("reader", READERS)
def test_fields_are_set_past_all_code_of_the_class(reader: Callable[[Form], Callable[[], Any]]) -> None:
    ran.clear()
    made = reader(Form("dataclass", f"{HERE}:Loud", [{"x": 5}, {"more": 6}]))()
    assert (type(made), vars(made), ran) == (Loud, {"x": 5, "more": 6}, [])


@pytest.fixture
def absent(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module that can be imported, and reports its import."""
    (tmp_path / "castore_trap.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    yield "castore_trap"
    sys.modules.pop("castore_trap", None)


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("kind", ["dataclass", "namedtuple", "enum", "tensor"])
def test_no_module_is_imported_for_a_record(absent: str, kind: str, reader: Any) -> None:
    with pytest.raises(
        SerializationError, match="castore_trap:X', which this process does not have; import its module"
    ):
        reader(Form(kind, f"{absent}:X", [{}, None] if kind != "enum" else "A"))()
    assert absent not in sys.modules


@pytest.mark.parametrize("reader", READERS)
def test_a_module_is_not_asked_for_what_it_would_load_first(absent: str, reader: Any) -> None:
    asked: list[str] = []
    eager = types.ModuleType("castore_eager")
    eager.__getattr__ = asked.append  # type: ignore[method-assign]
    spec = importlib.util.find_spec(absent)
    assert spec is not None
    assert spec.loader is not None
    spec.loader = importlib.util.LazyLoader(spec.loader)
    lazy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(lazy)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "castore_eager", eager)
        patch.setitem(sys.modules, "castore_trap", lazy)
        for module in ("castore_eager", "castore_trap"):
            with pytest.raises(SerializationError, match="does not have"):
                reader(Form("dataclass", f"{module}:X", FIELDS))()
    assert asked == []


def test_a_record_of_transformers_does_not_import_it(warm_torch: WarmPython) -> None:
    record, data = pack(_encoding()), dump(_encoding())[1]
    script = (
        "import sys, castore; from castore.adapters.torch.samples import unpack; from "
        "castore.serialize.serializers import load\nheavy = {name for name in sys.modules if "
        "name.startswith('transformers')}\nfor read in (lambda: unpack(RECORD), lambda: load(DATA, "
        "'msgpack')):\n    try: read()\n    except castore.SerializationError as error: assert 'import "
        "transformers.tokenization_utils_base first' in str(error)\n    else: raise SystemExit('no "
        "error')\nassert {name for name in sys.modules if name.startswith('transformers')} == heavy\nimport "
        "transformers.tokenization_utils_base\nassert unpack(RECORD)['ids'] == load(DATA, 'msgpack')['ids'] "
        "== [1]\n"
    ).replace("RECORD", repr(record)).replace("DATA", repr(data))  # fmt: skip
    assert warm_torch.output(["-c", script]) == ""


def _encoding() -> Any:
    from transformers import BatchEncoding

    return BatchEncoding({"ids": [1]})


HONEST = [
    pack([value for value in VALUES if type(value).__module__.partition(".")[0] != "transformers"][start::4])
    for start in range(4)
]


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_damaged_records_of_all_kinds_give_an_error_of_castore_or_a_sample(data: Any) -> None:
    record = bytearray(data.draw(st.sampled_from(HONEST)))
    for _ in range(data.draw(st.integers(1, 3))):
        record[data.draw(st.integers(0, len(record) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(CorruptError, SerializationError):
        unpack(record)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_damaged_objects_of_all_kinds_give_an_error_of_castore_or_an_object(data: Any) -> None:
    hurt = bytearray(dump([data.draw(st.sampled_from(VALUES))], "msgpack")[1])
    hurt[data.draw(st.integers(0, len(hurt) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(CorruptError, SerializationError):
        load(bytes(hurt), "msgpack")


def test_a_reader_that_knows_version_1_alone_says_what_it_lacks() -> None:
    assert b'{\\"version\\":1,' in pack({"x": (1, "a")})
    assert b'{\\"version\\":2,' in pack({"x": {1.5: 1}})
    assert b'{\\"version\\":2,' in pack([{"x": {1, 2}}])
