"""Types that users register, classes in other processes, and advice that works."""

from __future__ import annotations

import array
import collections
import contextlib
import dataclasses
import datetime as dt
import enum
import importlib
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.lib.recfunctions
import pytest
import torch
from PIL import Image

import castore
from castore import InvalidValueError, SerializationError, Store, register_type
from castore.adapters.torch import CachedDataset
from castore.adapters.torch.samples import pack, unpack
from castore.serialize.kinds import kind_registry, user_classes
from castore.serialize.serializers import dump, load
from tests.serialize.kinds.values import Image as Plane
from tests.serialize.kinds.values import Typed
from tests.warm import WarmPython


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test's registrations end with it."""
    for owner, name in ((user_classes, "registered"), (user_classes, "names"), (kind_registry, "_explained")):
        monkeypatch.setattr(owner, name, dict(getattr(owner, name)))


class Box:
    """A class that describes nothing of itself."""

    def __init__(self, corners: Any) -> None:
        self.corners = corners

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and vars(other) == vars(self)

    __hash__ = None  # type: ignore[assignment]


class Small(Box):
    pass


def _saved(value: Any) -> Any:
    name, data = dump(value)
    return load(data, name)


def both_ways(value: Any) -> list[Any]:
    return [unpack(pack(value)), _saved(value)]


# --- registering --------------------------------------------------------------------------------------------


def test_a_registered_type_is_kept_wherever_it_stands() -> None:
    register_type(Box, encode=lambda box: box.corners, decode=Box)
    value = {"boxes": [Box({1, 2}), Box(Box((1, "x")))], Colour.RED: collections.deque([Box(None)])}
    assert both_ways(value) == [value, value]
    record = pack({"box": Box(torch.ones(3))})
    assert torch.equal(unpack(record)["box"].corners, torch.ones(3))


def test_only_exactly_the_registered_class_is_taken() -> None:
    register_type(Box, encode=vars, decode=lambda parts: Box(**parts))
    with pytest.raises(
        SerializationError, match=r"Small'> has no serializer; explain it with castore.register_type\(Small"
    ):
        pack(Small(1))


class Colour(enum.Enum):
    RED = 1


def local_classes() -> dict[str, Any]:
    @dataclasses.dataclass
    class Local:
        x: int

    class Shade(enum.Enum):
        DARK = 1

    Alone: Any = collections.namedtuple("Alone", "x")  # noqa: N806 - a class

    class Labelled(torch.Tensor):
        pass

    labelled = torch.ones(2).as_subclass(Labelled)
    labelled.__dict__["label"] = 3
    return {
        "dataclass": Local(1),
        "enum": Shade.DARK,
        "tensor": labelled,
        "namedtuple": Alone(1),
    }


@pytest.mark.parametrize("kind", ["dataclass", "enum", "tensor", "namedtuple"])
def test_a_class_made_in_a_function_is_kept_under_a_name(kind: str) -> None:
    value = local_classes()[kind]
    for store in (pack, dump):
        with pytest.raises(
            SerializationError, match=r"define its class at the top of a module, or name it with"
        ):
            store(value)
    register_type(type(value), name=f"local/{kind}")
    for found in both_ways(value):
        assert type(found) is type(value)
        assert repr(found) == repr(value)
        assert getattr(found, "__dict__", {}) == getattr(value, "__dict__", {}) or kind == "enum"


def test_a_class_that_moved_reads_what_was_kept_under_its_name() -> None:
    old = local_classes()["dataclass"]
    register_type(type(old), name="point")
    record = pack(old)
    moved = type(local_classes()["dataclass"])
    register_type(moved, name="point")  # a module that is loaded again
    assert type(unpack(record)) is moved


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((dict,), "kept as it is"),
        ((set,), "kept as it is"),
        ((torch.Tensor,), "kept as it is"),
        ((dt.datetime,), "kept as it is"),
        ((5,), "is no class"),
        ((Box,), "give encode= and decode="),
        ((torch.nn.Parameter,), "give encode= and decode="),
    ],
)
def test_what_cannot_be_registered_is_refused(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(InvalidValueError, match=message):
        register_type(*arguments)


def test_half_an_explanation_and_a_taken_name_are_refused() -> None:
    with pytest.raises(InvalidValueError, match="needs encode and decode"):
        register_type(Box, encode=vars)
    register_type(Box, name="box", encode=vars, decode=Box)
    with pytest.raises(InvalidValueError, match=r"the name 'box' is .*Box'>'s"):
        register_type(Small, name="box", encode=vars, decode=Small)


def test_an_error_of_decode_is_told_as_such() -> None:
    register_type(Box, encode=vars, decode=lambda parts: parts["nothing"])
    with pytest.raises(SerializationError, match=r"decode of .*Box'> failed: KeyError: 'nothing'"):
        unpack(pack(Box(1)))
    with pytest.raises(SerializationError, match=r"decode of .*Box'> failed: KeyError: 'nothing'"):
        load(dump(Box(1))[1], "msgpack")


def test_fields_that_changed_are_told_and_the_sample_is_read_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = dataclasses.make_dataclass("Version", ["x"])
    register_type(first, name="version")
    with CachedDataset([first(1)], tmp_path / "samples", key="data") as cached:
        assert cached[0] == first(1)
    with Store(tmp_path / "objects") as store:
        store.save("one", first(1))
        second = dataclasses.make_dataclass("Version", ["x", "y"])
        register_type(second, name="version")
        with pytest.raises(
            SerializationError,
            match=r"with the fields \['x'\], and the class has \['x', 'y'\] now; delete the entry, or save",
        ):
            store.load("one")
    with CachedDataset([second(1, 2)], tmp_path / "samples", key="data") as cached:
        assert [cached[0], cached[0]] == [second(1, 2)] * 2
        assert (cached.hits, cached.misses) == (1, 1)
    assert "is read from the dataset again, and replaced" in caplog.text


def test_where_pickle_is_allowed_it_finds_the_users_classes_by_importing_them() -> None:
    name, data = dump({"c": Colour.RED}, allow_pickle=True)
    assert name == "pickle"
    assert load(data, name, allow_pickle=True) == {"c": Colour.RED}
    assert dump({"c": {1}}, allow_pickle=True)[0] == "msgpack"


# --- other processes ----------------------------------------------------------------------------------------

PROGRAM = '''
import collections, dataclasses, enum, os, sys
from typing import Any
import torch
from torch.utils.data import DataLoader, Dataset
from castore import Store
from castore.adapters.torch import BiLevelCachedDataset, CachedDataset

class Colour(enum.Enum):
    RED = 1

Point = collections.namedtuple("Point", "x y")

@dataclasses.dataclass
class Scan:
    pixels: torch.Tensor
    colour: Colour
    where: Point

class Image(torch.Tensor):
    pass

def first(batch):
    return batch[0]

class Scans(Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, index):
        if os.path.exists(os.path.join(sys.argv[1], "filled")):
            raise RuntimeError("read from the dataset")
        image = torch.full((2,), float(index)).as_subclass(Image)
        image.__dict__["where"] = Point(index, 2)
        return {"scan": Scan(torch.full((2,), index), Colour.RED, Point(1, index)), "image": image}

class Seen(Dataset):
    """What a worker got, as text: what it sends itself goes by pickle."""
    def __init__(self, cached):
        self.cached = cached
    def __len__(self):
        return len(self.cached)
    def __getitem__(self, index):
        sample = self.cached[index]
        assert type(sample["scan"]) is Scan and type(sample["image"]) is Image, type(sample["scan"])
        assert sample["scan"].colour is Colour.RED and type(sample["image"].where) is Point
        return repr(sample["scan"]) + repr(sample["image"])

if __name__ == "__main__":
    folder, start = sys.argv[1:]
    with CachedDataset(Scans(), folder + "/cached", key="scans") as cached:
        options = {"key": "scans", "write_through": True}
        with BiLevelCachedDataset(cached, 0, "10MB", folder + "/levels", **options) as levels:
            loader = DataLoader(Seen(levels), batch_size=None, num_workers=1, multiprocessing_context=start)
            print(list(loader), [Seen(cached)[index] for index in range(4)])
    with Store(folder + "/store") as store:
        if store.entry("scan") is None:
            store.save("scan", [Scan(torch.ones(1), Colour.RED, Point(1, 2))])
        print(store.load("scan"))
    open(folder + "/filled", "w").close()
'''


@pytest.mark.parametrize(
    "starts", [("fork", "spawn"), pytest.param(("spawn", "fork"), marks=pytest.mark.matrix)], ids="-".join
)
def test_classes_of_the_main_module_are_found_by_workers_and_later_runs(
    tmp_path: Path, starts: tuple[str, str], warm_torch: WarmPython
) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    first, second = (warm_torch.output([program, tmp_path, start], cwd=tmp_path) for start in starts)
    assert first == second


def test_a_module_that_is_run_and_one_that_is_imported_are_the_same(
    tmp_path: Path, warm_torch: WarmPython
) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    told = warm_torch.output(["-m", "program", tmp_path, "spawn"], cwd=tmp_path)
    assert warm_torch.output(["-m", "program", tmp_path, "fork"], cwd=tmp_path) == told
    read = "import program; from castore import Store; s = Store('store'); print(s.load('scan')); s.close()"
    assert warm_torch.output(["-c", read], cwd=tmp_path) == told.splitlines(keepends=True)[-1]


LATE = "import dataclasses\n@dataclasses.dataclass\nclass Late:\n    x: int\n"


def _run(command: list[str], folder: Path) -> str:
    done = subprocess.run([sys.executable, *command], cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize(
    "made",
    [
        "CachedDataset(Lazy(), 'cache', key='late')",
        "BiLevelCachedDataset(Lazy(), 0, '10MB', 'cache', key='late', write_through=True)",
    ],
    ids=["CachedDataset", "BiLevelCachedDataset"],
)
def test_a_class_that_is_not_imported_is_read_again_from_the_dataset_and_then_found(
    tmp_path: Path, made: str, warm_torch: WarmPython
) -> None:
    """A dataset may import a class only when it reads: the first sample of a new process imports it."""
    (tmp_path / "late.py").write_text(LATE)
    script = (
        "from castore.adapters.torch import BiLevelCachedDataset, CachedDataset\n"
        "class Lazy:\n"
        "    def __len__(self): return 3\n"
        "    def __getitem__(self, index):\n"
        "        from late import Late\n"
        "        return Late(index)\n"
        f"with {made} as cached:\n"
        "    print([cached[i] for i in range(3)], cached.misses)\n"
    )
    for reads in (3, 1):
        told = warm_torch.output(["-c", script], cwd=tmp_path)
        assert told == f"[Late(x=0), Late(x=1), Late(x=2)] {reads}\n"


def test_a_note_for_type_checkers_is_not_of_the_value() -> None:
    value = Typed[int](3)
    assert vars(value).keys() == {"x", "__orig_class__"}
    assert both_ways(value) == [Typed(3)] * 2


def test_an_object_whose_class_is_not_imported_says_what_to_import(tmp_path: Path) -> None:
    (tmp_path / "late.py").write_text(LATE)
    _run(
        [
            "-c",
            "from late import Late\nfrom castore import Store\nwith Store('s') as s: s.save('a', Late(1))",
        ],
        tmp_path,
    )
    script = (
        "from castore import Store, SerializationError\n"
        "with Store('s') as s:\n"
        "    try: s.load('a')\n"
        "    except SerializationError as error: print(error)\n"
        "    import late\n"
        "    print(s.load('a'))\n"
    )
    told, found = _run(["-c", script], tmp_path).splitlines()
    assert told.startswith(
        "the value is a 'late:Late', which this process does not have; import its module first"
    )
    assert found == "Late(x=1)"


# --- advice -------------------------------------------------------------------------------------------------


class OwnDict(dict[str, int]):
    pass


class OwnText(str):
    __slots__ = ()


class OwnArray(np.ndarray[Any, Any]):
    pass


class Zone(dt.tzinfo):
    def utcoffset(self, when: dt.datetime | None) -> dt.timedelta:
        return dt.timedelta(hours=1)

    def dst(self, when: dt.datetime | None) -> dt.timedelta | None:
        return None

    def tzname(self, when: dt.datetime | None) -> str | None:
        return "Zone"


@dataclasses.dataclass
class Handle:
    """Its pickle leaves out the file that it holds open."""

    path: str

    def __getstate__(self) -> dict[str, str]:
        return {"path": self.path}


@dataclasses.dataclass
class Wrong(Exception):
    code: int


def odd_fields() -> np.ndarray[Any, Any]:
    return np.zeros(2, np.dtype({"names": ["a", "b"], "formats": ["i4", "i4"], "offsets": [4, 0]}))


REFUSED: dict[str, Callable[[], Any]] = {
    "object": object,
    "class": lambda: Box([1]),
    "function": lambda: len,
    "dict": lambda: OwnDict(a=1),
    "mapping": lambda: collections.ChainMap({"a": 1}),
    "user dict": lambda: collections.UserDict(a=1),
    "text": lambda: OwnText("x"),
    "iterator": lambda: iter([1, 2]),
    "generator": lambda: (x for x in (1, 2)),
    "memoryview": lambda: memoryview(b"x"),
    "array of Python's": lambda: array.array("i", [1]),
    "array subclass": lambda: np.ones(2).view(OwnArray),
    "matrix": lambda: np.ones((2, 2)).view(np.matrix),
    "objects": lambda: np.array([1, None], dtype=object),
    "long doubles": lambda: np.ones(2, np.longdouble),
    "long double": lambda: np.longdouble(1),
    "long complex": lambda: np.ones(2, np.clongdouble),
    "long long": lambda: np.longlong(1),
    "odd fields": odd_fields,
    "parameter": lambda: torch.nn.Parameter(torch.ones(2)),
    "gradient": lambda: torch.ones(2, requires_grad=True) * 2,
    "gradient of a subclass": lambda: Plane.wrap(torch.ones(2)).requires_grad_(),
    "sparse gradient": lambda: torch.eye(2).to_sparse().requires_grad_() * 2,
    "quantised": lambda: torch.quantize_per_tensor(torch.rand(3), 0.1, 0, torch.qint8),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]),
    "nested and jagged": lambda: torch.nested.nested_tensor(
        [torch.ones(1), torch.ones(2)], layout=torch.jagged
    ),
    "four bits": lambda: torch.empty(2, dtype=vars(torch)["uint4"]),
    "tuple of a library": lambda: torch.ones(2, 2).max(0),
    "time zone": lambda: dt.datetime(2024, 1, 1, tzinfo=Zone()),
    "time in a zone": lambda: dt.time(1, tzinfo=Zone()),
    "factory": lambda: collections.defaultdict(object, a=1),
    "masked subclass": lambda: np.ma.MaskedArray(np.ones(2).view(OwnArray)),
    "image mode": lambda: Image.new("I;16B", (1, 1)),
    "handle": lambda: Handle("x"),
    "error": lambda: Wrong(1),
    "local class": lambda: local_classes()["dataclass"],
    "local enum": lambda: local_classes()["enum"],
}

_CONVERT = re.compile(r"convert it with (?P<how>.+?)(?=, or |$)")
_EXPLAIN = re.compile(
    r"castore\.register_type\((?P<cls>[^,]+), (?P<how>encode=\.\.\., decode=\.\.\.|name=\.\.\.)\)"
)


@pytest.fixture
def value(request: pytest.FixtureRequest) -> Iterator[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's warnings on its quantised and nested tensors
        yield REFUSED[request.param]()


@pytest.mark.parametrize("value", REFUSED, indirect=True)
def test_the_advice_of_every_refusal_leads_out(value: Any) -> None:
    with pytest.raises(SerializationError) as caught:
        pack({"x": [value]})
    message = str(caught.value)
    assert message.startswith("sample['x'][0]")
    convert, explain = _CONVERT.search(message), _EXPLAIN.search(message)
    assert convert or explain, message
    if convert:
        unpack(pack({"x": [_converted(value, convert["how"])]}))
    if explain:
        assert explain["cls"] == type(value).__name__
        if explain["how"].startswith("name"):
            register_type(type(value), name="mine")
        else:
            kept: list[Any] = [value]
            register_type(type(value), encode=lambda _: 0, decode=kept.__getitem__)
        found = unpack(pack({"x": [value]}))["x"][0]
        assert found is value or found == value


def _converted(value: Any, how: str) -> Any:
    """The value after following an error's advice: ``list(...)`` of it, or its method."""
    space = {
        "numpy": importlib.import_module("numpy"),
        "torch": torch,
        "datetime": dt,
        "os": os,
        "value": value,
    }
    return eval(how.replace("(...)", "(value)") if "(...)" in how else f"value.{how}", space)


@pytest.mark.parametrize("value", REFUSED, indirect=True)
def test_what_save_refuses_is_told_with_a_way_out_too(value: Any) -> None:
    with contextlib.suppress(SerializationError):  # `save` takes some values that samples refuse
        dump({"x": [value]})
        return
    with pytest.raises(
        SerializationError, match=r"convert it with|castore\.register_type\(|convert the tensors"
    ):
        dump({"x": [value]})


def test_registering_is_offered_by_the_package_itself() -> None:
    assert castore.register_type is register_type
