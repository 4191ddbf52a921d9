"""Everything that a function can distinguish has its own key, in every adapter; use changes no key."""

from __future__ import annotations

import _ctypes
import collections
import contextlib
import contextvars
import ctypes
import dataclasses
import enum
import functools
import importlib
import inspect
import io
import pathlib
import subprocess
import sys
import types
import zipfile
from collections.abc import Callable, Iterator
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import transformers
from datasets import Dataset, Features, Value
from PIL import Image, TiffImagePlugin
from torch.nn.utils import parametrizations, parametrize

from castore import InvalidValueError, Store, UnhashableError, key
from castore.adapters.datasets import cached_map
from castore.keys.objects import function_fingerprint
from tests.keys.test_values import ADAPTERS, ROOT, Holder

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CASTORE_TEST_FOLDER", str(tmp_path / "store"))
    return tmp_path


def transformer(*args: Any, **options: Any) -> Any:
    """sklearn takes a second to import, so that happens late."""
    from sklearn.preprocessing import FunctionTransformer

    return FunctionTransformer(*args, **options)


# --- values -------------------------------------------------------------------------------------------------


def layers(are_tied: bool) -> torch.nn.ModuleList:
    made = torch.nn.ModuleList([torch.nn.Linear(1, 1, bias=False) for _ in range(2)])
    for layer in made:
        torch.nn.init.ones_(layer.weight)  # type: ignore[arg-type]
    if are_tied:
        made[1].weight = made[0].weight
    return made


class Pair(collections.namedtuple("Pair", "a b")):
    """A named tuple with a `__dict__`."""


def attributed(mark: int) -> Pair:
    made = Pair(1, 2)
    made.mark = mark  # type: ignore[attr-defined]
    return made


class Boxes(torch.Tensor):
    """A tensor with a format, as those of torchvision have."""


def boxes(kind: str) -> Any:
    made = torch.ones(4).as_subclass(Boxes)
    made.format = kind  # type: ignore[attr-defined]
    return made


def hard() -> Any:
    made = np.ma.array([1, 2], mask=[False, True])
    made.harden_mask()
    return made


def quantised(scale: float, zero: int = 0) -> Any:
    return torch.quantize_per_tensor(torch.ones(3), scale, zero, torch.qint8)


def by_channel(scale: float) -> Any:
    zeros = torch.zeros(2, dtype=torch.long)
    return torch.quantize_per_channel(torch.ones(2, 2), torch.tensor([0.1, scale]), zeros, 0, torch.qint8)


def sparse(layout: Any, number: float) -> Any:
    dense = torch.tensor([[0.0, number], [0.0, 0.0]])
    return dense.to_sparse(layout=layout, blocksize=(1, 1) if "bs" in str(layout) else None)


def enumerated(value: int) -> Any:
    make: Any = enum.Enum
    return make("Own", {"A": value}, module=__name__)["A"]


@dataclasses.dataclass
class Fields:
    size: int = 1


def beside(**attributes: Any) -> Any:
    made = Fields()
    vars(made).update(attributes)
    return made


class Paths(pathlib.PosixPath):
    """A path with additional attributes."""


class Partial(functools.partial):  # type: ignore[type-arg]
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return None


def noted(**attributes: Any) -> Any:
    made = functools.partial(max, 1)
    vars(made).update(attributes)
    return made


class Scaled(torch.nn.Module):
    def __init__(self, scale: int, name: str = "x") -> None:
        super().__init__()
        self.scale, self.name = scale, name
        self.inner = torch.nn.ReLU()

    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(x) * self.scale


class Outer(torch.nn.Module):
    def __init__(self, scale: int) -> None:
        super().__init__()
        self.scaled = Scaled(scale)

    def forward(self, x: torch.Tensor) -> Any:
        return self.scaled(x)


class Symmetric(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.triu() + x.triu(1).mT


class Antisymmetric(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.triu(1) - x.triu(1).mT


def parametrized(how: torch.nn.Module) -> Any:
    torch.manual_seed(0)
    made = torch.nn.Linear(2, 2)
    parametrize.register_parametrization(made, "weight", how)
    return made


def weight_norm(dim: int) -> Any:
    torch.manual_seed(0)
    return parametrizations.weight_norm(torch.nn.Linear(2, 2), dim=dim)


def answered() -> Any:
    """A class with an answer to every access; not at module level, where pytest would access everything."""

    class Answering(type):
        def __getattr__(cls, name: str) -> Any:
            return lambda *args: name

    class Answered(metaclass=Answering):
        pass

    return Answered


def failed() -> Any:
    """A class with an error for every access."""

    class Failing(type):
        def __getattr__(cls, name: str) -> Any:
            raise KeyError(name)

    class Failed(metaclass=Failing):
        pass

    return Failed


def callback(number: int) -> Any:
    return ctypes.CFUNCTYPE(ctypes.c_int)(lambda: number)


def traced(seed: int) -> Any:
    noise = torch.rand(3000, generator=torch.Generator().manual_seed(seed))
    trace: Any = torch.jit.trace
    return trace(lambda x: x + noise, torch.ones(3000))


STEPS = {"add": 1, "double": 2}
BACK = {"double": 2, "add": 1}


def objects(order: dict[str, int]) -> Any:
    array = np.empty(1, object)
    array[0] = order
    return array


def features_of(order: dict[str, int]) -> Features:
    return Features({name: Value("int64") for name in order})


class InDict(dict[str, int]):
    """A dict of the user's own class."""


def closing(steps: Any) -> Any:
    return lambda: steps


def defaulting(steps: Any) -> Any:
    def step(*, steps: Any = steps) -> Any:
        return steps

    return step


PROCESS = ctypes.CDLL(None)
ORDER = np.dtype([("a", "u1"), ("b", "f8")])


#: Values that a function can distinguish. Each is made twice, and has the same key both times.
def clip(last: int, kind: str = "GIF", at: int = 0) -> Any:
    """An image of two frames, of which the first is black; opened from bytes, and read."""
    file = io.BytesIO()
    Image.new("L", (4, 4)).save(file, kind, save_all=True, append_images=[Image.new("L", (4, 4), last)])
    image = Image.open(file)
    image.seek(at)
    image.load()
    return image


def scan(text: str) -> Any:
    tags = TiffImagePlugin.ImageFileDirectory_v2()
    tags[270] = text
    file = io.BytesIO()
    Image.new("L", (4, 4)).save(file, "TIFF", tiffinfo=tags)
    return Image.open(file)


def turned(orientation: int, *, saved: bool) -> Any:
    image = Image.new("L", (1, 2))
    image.getexif()[0x112] = 1 if saved else orientation
    if saved:
        file = io.BytesIO()
        image.save(file, "PNG", exif=image.getexif())
        image = Image.open(file)
        image.getexif()[0x112] = orientation
    return image


def table(unit: str | None, kind: type[Any] = pd.DataFrame) -> Any:
    made = kind({"a": ["x"]})
    if unit is not None:
        made.unit = unit
    return made


DISTINCT: dict[str, list[Callable[[], Any]]] = {
    "images of several frames": [
        *(
            functools.partial(clip, last, kind)
            for kind in ("GIF", "TIFF", "PNG")
            for last in (1, 2)
        ),
        lambda: clip(1, "GIF", at=1), lambda: clip(0, "TIFF"), lambda: clip(0, "TIFF", at=1),
    ],
    "tags of images": [
        lambda: scan("one"), lambda: scan("two"), lambda: turned(1, saved=False),
        lambda: turned(6, saved=False), lambda: turned(1, saved=True), lambda: turned(6, saved=True),
    ],
    "attributes of tables": [
        lambda: table(None), lambda: table("cm"), lambda: table("m"), lambda: table("m", pd.Series),
        lambda: table("cm", pd.Series),
    ],
    "attributes of a tensor": [
        lambda: torch.ones(4), lambda: torch.ones(4).as_subclass(Boxes), lambda: boxes("XYXY"),
        lambda: boxes("XYWH"),
    ],
    "sparse tensors": [
        *(
            functools.partial(sparse, layout, number)
            for layout in (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr,
            torch.sparse_bsc)
            for number in (1.0, 2.0)
        ),
        lambda: sparse(torch.sparse_coo, 1.0).to_dense(),
    ],
    "quantised tensors": [
        lambda: quantised(0.1), lambda: quantised(0.2), lambda: quantised(0.1, 1), lambda: by_channel(0.1),
        lambda: by_channel(0.2),
    ],
    "nested tensors": [
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        lambda: torch.nested.nested_tensor([torch.ones(3), torch.ones(2)]),
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.zeros(3)]),
    ],
    "meta tensors": [
        lambda: torch.ones(3, device="meta"), lambda: torch.ones(4, device="meta"),
        lambda: torch.ones(3, device="meta", dtype=torch.float64), lambda: torch.ones(3),
    ],
    "masks": [
        lambda: np.ma.array([1, 2], mask=[False, True]), hard, lambda: np.ma.array([1, 2]),
        lambda: np.ma.array([1, 2], mask=[False, False]),
        lambda: np.ma.array([1, 2], mask=[False, True], fill_value=7), lambda: np.array([1, 2]),
        lambda: np.ma.masked,
    ],
    "arrays of fields": [
        lambda: np.zeros(2, ORDER), lambda: np.zeros(2, np.dtype(ORDER.descr, align=True)),
        lambda: np.zeros(2, ORDER).view(np.recarray),
        lambda: np.zeros(2, np.dtype((np.record, ORDER.descr))),
    ],
    "arrays of objects": [
        lambda: np.array(["a"], object), lambda: np.zeros(1, [("a", "O")]), lambda: np.zeros(1, [("b", "O")]),
        lambda: np.zeros(1, np.dtype([("a", "O"), ("b", "u1")], align=True)),
        lambda: np.zeros(1, [("a", "O"), ("b", "u1")]),
        *([lambda: np.array(["a"], np.dtypes.StringDType())] if hasattr(np.dtypes, "StringDType") else []),
    ],
    "classes of arrays": [lambda: np.zeros((2, 2)), lambda: np.matrix(np.zeros((2, 2)))],
    "members of an enumeration": [lambda: enumerated(1), lambda: enumerated(2)],
    "attributes beside fields": [beside, lambda: beside(more=1), lambda: beside(more=2)],
    "classes of paths": [lambda: Path("a"), lambda: Paths("a"), lambda: pathlib.PurePosixPath("a")],
    "orders of dicts": [
        lambda: STEPS, lambda: BACK, lambda: collections.OrderedDict(BACK),
        lambda: types.MappingProxyType(BACK),
    ],
    "orders of keys of other kinds": [lambda: {(1,): 1, (2,): 2}, lambda: {(2,): 2, (1,): 1}],
    "orders of numbers": [lambda: {1: 1, 2: 2}, lambda: {2: 2, 1: 1}],
    "orders inside": [lambda: [{"steps": STEPS}], lambda: [{"steps": BACK}]],
    "orders in kinds of dicts": [
        *(
            functools.partial(kind, held)
            for kind in (lambda held: collections.defaultdict(None, held), collections.Counter,
            collections.UserDict, InDict)
            for held in (STEPS, BACK)
        ),
    ],
    "orders in attributes": [lambda: Holder(steps=STEPS), lambda: Holder(steps=BACK)],
    "orders in fields": [lambda: Fields(STEPS), lambda: Fields(BACK)],  # type: ignore[arg-type]
    "orders in closures": [lambda: closing(STEPS), lambda: closing(BACK)],
    "orders in defaults": [lambda: defaulting(STEPS), lambda: defaulting(BACK)],
    "orders in partials": [
        lambda: functools.partial(dict, a=1, b=2), lambda: functools.partial(dict, b=2, a=1),
    ],
    "orders in modules of the user's": [
        lambda: Scaled(1, STEPS), lambda: Scaled(1, BACK),  # type: ignore[arg-type]
    ],
    "orders in arrays of objects": [lambda: objects(STEPS), lambda: objects(BACK)],
    "orders in frames": [
        lambda: pd.DataFrame({"a": [STEPS]}), lambda: pd.DataFrame({"a": [BACK]}),
        lambda: pd.Series([STEPS]), lambda: pd.Series([BACK]),
    ],
    "orders in mappings of libraries": [
        lambda: transformers.BatchEncoding(STEPS), lambda: transformers.BatchEncoding(BACK),
        *(functools.partial(features_of, order) for order in (STEPS, BACK)),
    ],
    "orders inside of a library's object": [
        lambda: transformer(closing(STEPS)), lambda: transformer(closing(BACK)),
    ],
    "partials": [noted, lambda: noted(note=1), lambda: Partial(max, 1)],
    "functions of C": [lambda: PROCESS.abs, lambda: PROCESS.labs, lambda: callback(1), lambda: callback(2)],
    "scripted modules": [
        lambda: torch.jit.script(Scaled(2)), lambda: torch.jit.script(Scaled(3)),
        lambda: torch.jit.script(Scaled(2, "y")),
        lambda: torch.jit.script(Outer(2)), lambda: torch.jit.script(Outer(3)),
    ],
    "traced functions": [
        functools.partial(traced, number) for number in (1, 2)],
    "parametrised modules": [
        lambda: parametrized(Symmetric()), lambda: parametrized(Antisymmetric()), lambda: weight_norm(0),
        lambda: weight_norm(1),
    ],
    "sparse tensors that are coalesced, or not": [
        lambda: torch.sparse_coo_tensor(torch.tensor([[0, 1]]), torch.ones(2), (2,)),
        lambda: torch.sparse_coo_tensor(torch.tensor([[0, 1]]), torch.ones(2), (2,)).coalesce(),
    ],
    "sparse tensors with a place twice": [
        lambda: torch.sparse_coo_tensor(torch.tensor([[0, 0]]), torch.ones(2), (2,)),
        lambda: torch.sparse_coo_tensor(torch.tensor([[0]]), torch.full((1,), 2.0), (2,)),
    ],
    "named tuples with attributes": [lambda: Pair(1, 2), lambda: attributed(1), lambda: attributed(2)],
    "metaclasses with answers": [answered, lambda: [answered()()], failed],
}  # fmt: skip


@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("case", DISTINCT)
def test_what_a_function_can_tell_apart_has_a_key_of_its_own(case: str, adapter: str) -> None:
    told = ADAPTERS[adapter]
    codes = [told(make()) for make in DISTINCT[case]]
    assert len({*codes}) == len(codes)
    assert [told(make()) for make in DISTINCT[case]] == codes


def one_of(first: bool) -> list[Callable[[], Any]]:
    """Values that count alike in either order: names of attributes, a config, libraries' bookkeeping."""
    order = STEPS if first else BACK

    class Configured:
        def __castore_key__(self) -> Any:
            return order

    def noted_function() -> None:
        pass

    vars(noted_function).update(order)
    torch.manual_seed(0)
    module = Scaled(1)
    for name in order:
        module.register_buffer(f"of_{name}", torch.tensor(order[name]))
    return [
        Configured, lambda: noted(**order), lambda: noted_function, lambda: Holder(**order), lambda: module,
        lambda: transformer(kw_args=order),
    ]  # fmt: skip


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_orders_that_say_nothing_do_not_count(adapter: str) -> None:
    told = ADAPTERS[adapter]
    assert [told(make()) for make in one_of(True)] == [told(make()) for make in one_of(False)]
    assert key(STEPS) == key(BACK)


def test_the_order_of_keyword_arguments_counts(folder: Path) -> None:
    with Store(folder / "orders") as store:

        @store.cached
        def names(first: Any = None, /, **named: Any) -> list[str]:
            return [*(first or named)]

        assert names(b=1, a=2) == names({"b": 1, "a": 2}) == ["b", "a"]
        assert names(a=2, b=1) == names({"a": 2, "b": 1}) == ["a", "b"]


def looked_at(value: Any, look: Callable[[Any], object]) -> Any:
    look(value)
    return value


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    yield


def same(number: int) -> int:
    return number


USED: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "image": (lambda: scan("one"), lambda image: image.getexif()),
    "frames": (lambda: clip(1), lambda image: [image.seek(1), image.load(), image.seek(0)]),
    "column": (lambda: pd.Series(["a"]), lambda column: column.str.upper()),
    "stream": (lambda: Dataset.from_dict({"a": [1]}).to_iterable_dataset(), list),
    "profiled": (lambda: torch.profiler.record_function("same")(same), lambda function: function(1)),
    "half precision": (lambda: torch.autocast("cpu", torch.bfloat16)(same), lambda function: function(1)),
    "manager": (lambda: quiet()(same), lambda function: function(1)),
}


@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("case", USED)
def test_what_a_library_leaves_behind_in_its_objects_does_not_count(case: str, adapter: str) -> None:
    make, use = USED[case]
    told = ADAPTERS[adapter]
    assert told(looked_at(make(), use)) == told(make())


def test_an_array_of_records_has_one_key_whatever_is_imported(folder: Path) -> None:
    """Its class names `numpy.rec`, which NumPy imports late."""
    program = """
import sys
import numpy as np
from castore import Store
if sys.argv[2] == "late":
    assert "numpy.rec" not in sys.modules
else:
    import numpy.rec
array = np.array([(1,), (2,)], dtype=[("x", "i4")]).view(np.recarray)
with Store(sys.argv[1]) as store:
    print(store.cached(lambda array: 1).cache_name(array))
"""
    names = {
        subprocess.run(
            [sys.executable, "-c", program, str(folder / "store"), when],
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for when in ("late", "early")
    }
    assert len(names) == 1


def test_a_key_that_is_the_object_itself_is_refused(folder: Path) -> None:
    class Own:
        def __castore_key__(self) -> Any:
            return self

    with Store(folder / "own") as store, pytest.raises(UnhashableError, match="returns the object itself"):
        store.cached(same).cache_name(Own())  # type: ignore[attr-defined]


def test_a_module_that_ends_the_program_is_an_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "ends_the_program.py").write_text("import sys; sys.exit(7)")
    monkeypatch.syspath_prepend(folder)

    def never(number: int) -> None:
        if number:
            import ends_the_program  # type: ignore[import-not-found]  # noqa: F401

    with Store(folder / "ends") as store, pytest.raises(UnhashableError, match="cannot import 'ends_the_pr"):
        store.cached(never)(0)


@pytest.mark.parametrize("adapter", [name for name in ADAPTERS if name != "embeddings"])
def test_parameters_that_are_one_are_told_from_equal_ones(adapter: str) -> None:
    told = ADAPTERS[adapter]
    assert told(layers(True)) == told(layers(True)) != told(layers(False))
    assert told([layers(True)[0], layers(False)]) == told([layers(False)[0], layers(False)])


@pytest.mark.parametrize("adapter", [name for name in ADAPTERS if name != "embeddings"])
def test_whether_a_tensor_is_trained_counts(adapter: str) -> None:
    """Not so in an encoder, which runs without gradients."""
    told = ADAPTERS[adapter]
    made = [
        torch.ones(2), torch.ones(2, requires_grad=True), torch.nn.Parameter(torch.ones(2)),
        torch.nn.Parameter(torch.ones(2), requires_grad=False),
    ]  # fmt: skip
    assert len({told(tensor) for tensor in made}) == 4
    assert ADAPTERS["embeddings"](made[0]) == ADAPTERS["embeddings"](made[3])


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_memory_says_nothing(adapter: str) -> None:
    """Memory order, addresses and write permission of an array do not count: values are kept in one order."""
    told = ADAPTERS[adapter]
    array, tensor = np.arange(6.0).reshape(2, 3), torch.arange(6.0).reshape(2, 3)
    fixed = array.copy()
    fixed.flags.writeable = False
    assert (
        len(
            {
                told(like)
                for like in (array, np.asfortranarray(array), fixed, np.arange(12.0)[::2].reshape(2, 3) / 2)
            }
        )
        == 1
    )
    assert (
        len({told(like) for like in (tensor, tensor.t().contiguous().t(), torch.stack([tensor, tensor])[1])})
        == 1
    )


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_an_object_without_a_way_to_be_asked_is_an_error_with_a_way_out(adapter: str) -> None:
    with pytest.raises(UnhashableError, match=r"cannot hash <class '.*Failed'>: KeyError.*__getstate__"):
        ADAPTERS[adapter](failed()())


def test_the_segment_of_a_shared_memory_counts_by_its_bytes() -> None:
    segments = [SharedMemory(create=True, size=4096) for _ in range(2)]
    try:
        told = ADAPTERS["functions"]
        assert told(segments[0]) == told(segments[1])
        memoryview(segments[1].buf or b"")[5] = 1
        assert told(segments[0]) != told(segments[1])
    finally:
        for segment in segments:
            segment.close()
            segment.unlink()
    with pytest.raises(UnhashableError, match="SharedMemory that was closed"):
        told(segments[0])


def test_libraries_of_c_at_a_path_count_by_their_code(folder: Path) -> None:
    codes = []
    for number in (1, 1, 2):
        (folder / "own.c").write_text(f"int answer(void) {{ return {number}; }}")
        built = folder / "own.so"
        built.unlink(missing_ok=True)
        subprocess.run(["cc", "-shared", "-fPIC", "-o", built, folder / "own.c"], check=True)
        library = ctypes.CDLL(str(built))
        codes.append(ADAPTERS["functions"](library))
        _ctypes.dlclose(library._handle)  # else the next one would be this one: the loader knows the path
    assert codes[0] == codes[1] != codes[2]


# --- traces of use ------------------------------------------------------------------------------------------


class Cached:
    @functools.cached_property
    def worked_out(self) -> int:
        return 3


class InSlots(Cached):
    __slots__ = ("size",)

    def __init__(self) -> None:
        self.size = 1


class InModule(torch.nn.Module):
    @functools.cached_property
    def worked_out(self) -> int:
        return 3

    def forward(self, x: Any) -> Any:
        return x


class InArray(np.ndarray[Any, Any]):
    @functools.cached_property
    def worked_out(self) -> int:
        return 3


class InTensor(torch.Tensor):
    @functools.cached_property
    def worked_out(self) -> int:
        return 3


class InList(list[int], Cached):
    pass


class InError(ValueError, Cached):
    pass


@dataclasses.dataclass
class InFields(Cached):
    size: int = 1


@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize(
    "make",
    [
        Cached, InSlots, InModule, InList, InError, InFields, lambda: np.zeros(2).view(InArray),
        lambda: torch.zeros(2).as_subclass(InTensor),
    ],
)  # fmt: skip
def test_what_a_cached_property_keeps_does_not_count(make: Callable[[], Any], adapter: str) -> None:
    told = ADAPTERS[adapter]
    held = make()
    before = told(held)
    assert held.worked_out == 3
    assert told(held) == before


class Assigns(Cached):
    """Sets what the property would work out."""

    def __init__(self, worked_out: int) -> None:
        self.worked_out = worked_out


class Overrides(Cached):
    worked_out: Any = None

    def __init__(self, worked_out: int) -> None:
        vars(self)["worked_out"] = worked_out


class OverridesByProperty(Cached):
    def __init__(self, worked_out: int) -> None:
        vars(self)["worked_out"] = worked_out

    @property
    def worked_out(self) -> int:
        return int(vars(self)["worked_out"])


@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("cls", [Assigns, Overrides, OverridesByProperty])
def test_an_attribute_in_the_place_of_a_cached_property_counts(cls: type[Any], adapter: str) -> None:
    told = ADAPTERS[adapter]
    assert told(cls(1)) == told(cls(1)) != told(cls(2))


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_a_module_that_the_first_look_imports_changes_no_later_one(
    adapter: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"castore_test_late_{[*ADAPTERS].index(adapter)}"
    (folder / name).mkdir()
    (folder / name / "__init__.py").touch()
    (folder / name / "data.py").write_text("TABLE = {'a': 1}")
    (folder / f"{name}_steps.py").write_text(
        f"import {name} as package\n"
        "def early(x):\n    return package.data.TABLE[x]\n"
        f"def late(x):\n    from {name} import data\n    return data.TABLE[x]\n"
        "def both(x):\n    return late(x) + early(x)\n"
    )
    monkeypatch.syspath_prepend(str(folder))
    both = importlib.import_module(f"{name}_steps").both
    assert f"{name}.data" not in sys.modules
    first = ADAPTERS[adapter](both)
    assert f"{name}.data" in sys.modules
    assert ADAPTERS[adapter](both) == first


def test_options_of_vectorizers_count() -> None:
    """tests/keys/test_values.py compares processes by one that was used."""
    from sklearn.feature_extraction.text import CountVectorizer

    made, other = CountVectorizer(), CountVectorizer(lowercase=False)
    assert function_fingerprint(lambda: made) != function_fingerprint(lambda: other)


# --- the names in errors ------------------------------------------------------------------------------------


def test_an_error_names_the_librarys_object_that_somebody_holds(folder: Path) -> None:
    from sklearn.pipeline import Pipeline

    with open(folder / "file", "w") as file:
        held = Pipeline([("own", transformer(kw_args={"file": file}))])
        with pytest.raises(
            UnhashableError,
            match=r"closure 'held': cannot hash this sklearn\.pipeline\.Pipeline: its part \.steps\[0\]",
        ):
            ADAPTERS["functions"](held)
        inside = Pipeline([("own", transformer(kw_args={"own": Holder(file=file)}))])
        with pytest.raises(
            UnhashableError, match=r"closure 'held'\.steps.*\['own'\]\.file: cannot hash <class '_io"
        ):
            ADAPTERS["functions"](inside)


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_an_error_gives_advice_that_fits_the_class(adapter: str) -> None:
    with pytest.raises(UnhashableError, match=r"memoryview'>: pass bytes\(...\) of it"):
        ADAPTERS[adapter](memoryview(b"abc"))
    with pytest.raises(UnhashableError, match=r"ContextVar'>: pass the value that it has"):
        ADAPTERS[adapter](contextvars.ContextVar("castore_test"))


# --- libraries installed in other places by pip -------------------------------------------------------------


def wheel(folder: Path, version: str, body: str) -> Path:
    """A package that pip can install."""
    path = folder / f"castore_test_elsewhere-{version}-py3-none-any.whl"
    about = f"castore_test_elsewhere-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("castore_test_elsewhere/__init__.py", f"def go():\n    return {body}\n")
        file.writestr(
            f"{about}/METADATA", f"Metadata-Version: 2.1\nName: castore_test_elsewhere\nVersion: {version}\n"
        )
        file.writestr(
            f"{about}/WHEEL",
            "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        file.writestr(f"{about}/RECORD", "")
    return path


@pytest.fixture
def told_elsewhere() -> Callable[[Path], str]:
    code = (
        "import sys\nsys.path.insert(0, sys.argv[1])\nimport castore_test_elsewhere as held\n"
        "from castore.keys.objects import function_fingerprint\nprint(function_fingerprint(held.go))"
    )

    def tell(place: Path) -> str:
        done = subprocess.run(
            [sys.executable, "-c", code, str(place)], cwd=ROOT, capture_output=True, text=True, check=True
        )
        return done.stdout

    return tell


def test_what_pip_puts_into_a_folder_counts_by_its_version(
    folder: Path, told_elsewhere: Callable[[Path], str]
) -> None:
    codes = []
    for version in ("1.0", "2.0"):
        place = folder / version
        pip = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-index",
            "--no-deps",
            "--target",
            str(place),
        ]
        subprocess.run([*pip, str(wheel(folder, version, "1"))], check=True, capture_output=True)
        codes.append(told_elsewhere(place))
        again = folder / f"{version} again"
        place.rename(again)
        assert told_elsewhere(again) == codes[-1]
    assert codes[0] != codes[1]
    (beside,) = (folder / "2.0 again").glob("*.dist-info")
    (beside / "RECORD").write_text(
        "another/__init__.py,,\n"
    )  # a project of the user's, beside what pip installed
    own = told_elsewhere(folder / "2.0 again")
    module = folder / "2.0 again" / "castore_test_elsewhere" / "__init__.py"
    module.write_text(module.read_text().replace("return 1", "return 22"))
    assert told_elsewhere(folder / "2.0 again") != own


# --- store.cached -------------------------------------------------------------------------------------------


class Adder:
    def __init__(self, more: int) -> None:
        self.more = more

    def __call__(self, x: int) -> int:
        return x + self.more


def add(x: int, y: int, z: int = 0) -> int:
    return x + y + z


@pytest.fixture
def store(folder: Path) -> Iterator[Store]:
    with Store(folder / "store") as made:
        yield made


def test_partials_and_objects_are_cached_as_functions_are(store: Store) -> None:
    decorate: Any = store.cached()
    part, other = decorate(functools.partial(add, 1)), decorate(functools.partial(add, 2))
    assert (part(1), part(y=1), other(1), part(1, z=3)) == (2, 2, 3, 5)
    one, two = decorate(Adder(1)), decorate(Adder(2))
    assert (one(1), two(1), one(1)) == (2, 3, 2)
    assert part.cache_name(1).startswith(f"cached/{__name__}.add/")
    assert one.cache_name(1).startswith(f"cached/{__name__}.Adder/")
    assert len(list(store.entries("cached"))) == 5


def with_default(rate: float) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **{"rate": rate, **kwargs})

        return wrapper

    return decorate


def rated(x: int, rate: float = 0.1) -> tuple[int, float]:
    return x, rate


class Rated:
    @with_default(1.0)
    def method(self, x: int, rate: float = 0.1) -> tuple[int, float]:
        return x, rate

    __call__ = method


def test_a_wrapper_has_its_own_arguments_whatever_it_wraps(store: Store) -> None:
    decorate: Any = store.cached()
    wrapper = with_default(1.0)(rated)
    for function in (wrapper, functools.partial(wrapper), Rated(), Rated().method, decorate(wrapper)):
        cached = decorate(function)
        assert (cached(0), cached(0, rate=0.1), cached(0)) == ((0, 1.0), (0, 0.1), (0, 1.0)), function

    @functools.wraps(rated)
    def other(x: int, *, is_loud: bool = False) -> tuple[int, bool]:
        return x, is_loud

    loud = decorate(other)
    assert (loud(1), loud(1, is_loud=True)) == ((1, False), (1, True))
    cached = decorate(functools.lru_cache(rated))
    assert cached.cache_name(1) == cached.cache_name(x=1) == cached.cache_name(1, 0.1)


@pytest.mark.parametrize("function", [[3].__contains__, "ab".__contains__, len, str.upper])
def test_functions_in_c_are_cached(function: Any, store: Store) -> None:
    cached: Any = store.cached()(function)
    assert cached("a") == function("a")
    assert cached("a") == function("a")


def test_the_decorator_needs_no_parentheses(store: Store) -> None:
    @store.cached
    def twice(x: int) -> int:
        """Twice as much."""
        return 2 * x

    assert (twice(2), twice(2)) == (4, 4)
    assert len(list(store.entries("cached"))) == 1
    assert (twice.__name__, twice.__doc__) == ("twice", "Twice as much.")


async def awaited(x: int) -> int:
    return x


async def awaited_and_yielded(x: int) -> Any:
    yield x


def yielded(x: int) -> Iterator[int]:
    yield x


class Awaited:
    async def __call__(self, x: int) -> int:
        return x


@pytest.mark.parametrize(
    ("what", "problem"),
    [
        (3, "decorates a function, not <class 'int'>"), (min, "cannot tell the arguments of"),
        (awaited, "awaited is an async function, which .* decorate a function that awaits it"),
        (functools.partial(awaited, 1), "an async function"), (Awaited(), "Awaited is an async function"),
        (Awaited().__call__, "an async function"),
        (yielded, "yielded is a generator, which .* decorate a function that collects what it yields"),
        (awaited_and_yielded, "awaited_and_yielded is an async generator, .* collects what it yields"),
    ],
)  # fmt: skip
def test_what_cannot_be_cached_is_one_clear_error(store: Store, what: Any, problem: str) -> None:
    with pytest.raises(InvalidValueError, match=problem):
        store.cached()(what)
    with pytest.raises(InvalidValueError, match=problem):
        store.cached(what)


def _tool(annotation: type, text: str) -> Callable[..., Any]:
    def tool(x: Any) -> None: ...

    tool.__doc__, tool.__annotations__ = text, {"x": annotation}
    return tool


class _Described:
    def __init__(self, text: str) -> None:
        self.__class__ = type("Described", (), {"__doc__": text})


_READ_BY_ARGUMENT: dict[str, tuple[Callable[[Any], Any], Callable[[], list[Any]]]] = {
    "__doc__": (lambda f: f.__doc__, lambda: [_tool(int, "a"), _tool(int, "b")]),
    "of several": (lambda f: [one.__doc__ for one in f], lambda: [[_tool(int, "a")], [_tool(int, "b")]]),
    "of a class": (lambda f: type(f).__doc__, lambda: [_Described("a"), _Described("b")]),
    "signature": (lambda f: str(inspect.signature(f)), lambda: [_tool(int, "a"), _tool(str, "a")]),
    "__annotations__": (lambda f: f.__annotations__["x"](5), lambda: [_tool(int, "a"), _tool(str, "a")]),
}


@pytest.mark.parametrize("name", _READ_BY_ARGUMENT)
def test_texts_beside_the_code_of_an_argument_count_where_the_function_reads_them(
    name: str, store: Store
) -> None:
    """Regression: the function was encoded by itself, so its arguments were as if nobody read their texts."""
    read, make = _READ_BY_ARGUMENT[name]
    one, other = make()
    cached: Any = store.cached(read)
    assert cached.cache_name(one) != cached.cache_name(other)
    plain: Any = store.cached(lambda f: 1)
    assert plain.cache_name(one) == plain.cache_name(other)  # nothing reads them
    rows = Dataset.from_dict({"a": [0]})

    def step(row: Any, f: Any) -> Any:
        return {"read": repr(read(f))}

    for given in (one, other):
        found = cached_map(rows, step, store=store, fn_kwargs={"f": given})
        assert found[0]["read"] == repr(read(given))
        [streamed] = cached_map(rows.to_iterable_dataset(), step, store=store, fn_kwargs={"f": given})
        assert streamed["read"] == repr(read(given))


_OWN_NAMES = {
    "__version__": "def f(): return own.__version__",
    "imported": "def f():\n    from own import __version__\n    return __version__",
    "__all__": "def f(): return own.__all__",
    "__doc__": "def f(): return own.__doc__",
    "a function": "def f(): return own.__run__()",
    "given late": "def f(): return own.__late__",
    "handed on": "def f(): return vars(own)['__version__']",
}


@pytest.mark.parametrize("name", _OWN_NAMES)
def test_names_with_underscores_in_a_module_of_the_users_count(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: they counted as if Python had set them all."""
    found: list[str] = []
    for edit in ("1", "2", "1"):
        own = types.ModuleType("own", doc=f"text {edit}")
        own.__file__ = f"/somewhere/{len(found)}/own.py"
        exec(
            f"__version__ = '{edit}'\n__all__ = ['a{edit}']\ndef __run__(): return {edit}\n"
            f"def __getattr__(name):\n  if name == '__late__': return {edit}\n  raise AttributeError(name)",
            vars(own),
        )
        monkeypatch.setitem(sys.modules, "own", own)
        scope: dict[str, Any] = {"own": own, "__name__": "program"}
        exec(_OWN_NAMES[name], scope)
        found.append(function_fingerprint(scope["f"]))
    assert found[0] == found[2] != found[1]
