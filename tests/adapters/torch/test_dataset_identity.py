"""A dataset's key changes when its samples may have changed, and at no other time: not by process, day or
use.
"""

from __future__ import annotations

import collections
import functools
import io
import logging
import os
import pickle
import random
import tempfile
import threading
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pytest
import torch
from PIL import Image
from torch.utils.data import ConcatDataset, Dataset, StackDataset, Subset, TensorDataset

from castore import InvalidNameError, UnhashableError, key
from castore.adapters.torch.dataset_identity import dataset_key


class Held(Dataset[int]):
    """A dataset that holds what it is given."""

    def __init__(self, **parts: Any) -> None:
        self.__dict__.update(parts)

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> int:
        return index


class Slotted:
    __slots__ = ("__dict__", "x")

    def __init__(self, x: object, y: object) -> None:
        self.x = x
        self.y = y


class Dropping(Held):
    """Leaves its handle out of what it is."""

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "handle"}


class Named(Held):
    def __castore_key__(self) -> str:
        return str(self.__dict__["name"])


class Numbers(list[int]):
    """A list with a method."""


class Scaled:
    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, value: float) -> float:
        return value * self.factor


def plus(value: int, amount: int) -> int:
    return value + amount


def palette() -> Image.Image:
    image = Image.new("P", (2, 2))
    image.putpalette([1, 2, 3])
    return image


#: One of each kind, and another that differs by as little as can be.
PAIRS: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
    "list": (lambda: [1, 2], lambda: [1, 2.0]),
    "long list": (lambda: list(range(1000)), lambda: [*range(999), 999.0]),
    "long list of tuples": (lambda: [(f"a{i}", i) for i in range(99)],
        lambda: [(f"a{i}", i) for i in range(98)]),
    "long tuple": (lambda: tuple(range(99)), lambda: list(range(99))),
    "array": (lambda: np.arange(4), lambda: np.arange(4).astype("u8")),
    "object array": (lambda: np.array(["a", None], object), lambda: np.array(["a", 0], object)),
    "tensor": (lambda: torch.zeros(2), lambda: torch.zeros(2, 1)),
    "bfloat16": (lambda: torch.ones(2, dtype=torch.bfloat16), lambda: torch.ones(2, dtype=torch.float16)),
    "TensorDataset": (lambda: TensorDataset(torch.zeros(2)), lambda: TensorDataset(torch.ones(2))),
    "Subset": (lambda: Subset(Held(a=1), [0, 1]), lambda: Subset(Held(a=1), [1, 0])),
    "Subset of another": (lambda: Subset(Held(a=1), [0]), lambda: Subset(Held(a=2), [0])),
    "ConcatDataset": (lambda: ConcatDataset([Held(a=1), Held(a=2)]),
        lambda: ConcatDataset([Held(a=2), Held(a=1)])),
    "StackDataset": (lambda: StackDataset(x=Held(a=1)), lambda: StackDataset(y=Held(a=1))),
    "order of a StackDataset": (lambda: StackDataset(x=Held(a=1), y=Held(a=1)),
        lambda: StackDataset(y=Held(a=1), x=Held(a=1))),
    "attribute": (lambda: Held(a=1), lambda: Held(a=2)),
    "attribute name": (lambda: Held(a=1), lambda: Held(b=1)),
    "slots": (lambda: Held(o=Slotted(1, 2)), lambda: Held(o=Slotted(2, 2))),
    "slots and dict": (lambda: Held(o=Slotted(1, 2)), lambda: Held(o=Slotted(1, 3))),
    "transform": (lambda: Held(t=Scaled(1.0)), lambda: Held(t=Scaled(2.0))),
    "lambda": (lambda: Held(t=lambda x: x + 1), lambda: Held(t=lambda x: x + 2)),
    "partial": (lambda: Held(t=functools.partial(plus, amount=1)),
        lambda: Held(t=functools.partial(plus, amount=2))),
    "module": (lambda: Held(m=torch.nn.Identity()), lambda: Held(m=torch.nn.Flatten())),
    "module's mode": (lambda: Held(m=torch.nn.Dropout(0.5)), lambda: Held(m=torch.nn.Dropout(0.5).eval())),
    "weights": (lambda: Held(m=linear(0)), lambda: Held(m=linear(1))),
    "parameter": (lambda: Held(p=torch.nn.Parameter(torch.ones(1))), lambda: Held(p=torch.ones(1))),
    "dtype": (lambda: Held(d=torch.float16), lambda: Held(d=torch.bfloat16)),
    "device": (lambda: Held(d=torch.device("cpu")), lambda: Held(d=torch.device("meta"))),
    "OrderedDict": (lambda: Held(o=collections.OrderedDict(a=1)),
        lambda: Held(o=collections.OrderedDict(a=2))),
    "defaultdict": (lambda: Held(o=collections.defaultdict(int, a=1)),
        lambda: Held(o=collections.defaultdict(str, a=1))),
    "deque": (lambda: Held(o=collections.deque([1, 2])), lambda: Held(o=collections.deque([2, 1]))),
    "list of a class": (lambda: Held(o=Numbers([1])), lambda: Held(o=Numbers([2]))),
    "list with attributes": (lambda: with_note(Numbers([1]), 1), lambda: with_note(Numbers([1]), 2)),
    "frame": (lambda: Held(df=pd.DataFrame({"a": [1, 2], "b": ["x", "y"]})),
        lambda: Held(df=pd.DataFrame({"a": [1, 2], "b": ["x", "z"]}))),
    "image": (lambda: Held(i=Image.new("P", (2, 2))), lambda: Held(i=palette())),
    "path": (lambda: Held(p=Path("/nowhere/a")), lambda: Held(p=Path("/nowhere/b"))),
    "path and text": (lambda: Held(p=Path("/nowhere/a")), lambda: Held(p="/nowhere/a")),
    "own key": (lambda: Named(name="a", x=1), lambda: Named(name="b", x=1)),
    "Hugging Face": (lambda: hugging_face().select([0, 1]), lambda: hugging_face().select([0, 2])),
    "Hugging Face format": (lambda: hugging_face().with_format("torch"),
        lambda: hugging_face().with_format("numpy")),
    "Hugging Face transform": (lambda: hugging_face().with_transform(lambda b: b),
        lambda: hugging_face().with_transform(dict)),
}  # fmt: skip
if find_spec("zarr") is not None:  # not on Python 3.10
    import zarr

    PAIRS["zarr in memory"] = (lambda: zarr.array(np.arange(5)), lambda: zarr.array(np.arange(1, 6)))


def linear(seed: int) -> torch.nn.Linear:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return torch.nn.Linear(2, 2)


def with_note(value: Any, note: object) -> Held:
    value.note = note
    return Held(o=value)


def hugging_face() -> Any:
    return datasets.Dataset.from_dict({"a": [1, 2, 3], "b": ["x", "y", "z"]})


@pytest.mark.parametrize("kind", PAIRS)
def test_equal_datasets_have_equal_keys_and_others_others(kind: str) -> None:
    one, other = PAIRS[kind]
    assert dataset_key(one()) == dataset_key(one())
    assert dataset_key(one()) != dataset_key(other())


def keys_of_pairs() -> list[str]:
    """The keys of all pairs. tests/keys/test_values.py compares those of processes: it has a fresh one."""
    return [dataset_key(make()) for pair in PAIRS.values() for make in pair]


@pytest.mark.parametrize("kind", [kind for kind in PAIRS if kind not in ("lambda", "Hugging Face transform")])
def test_a_pickled_dataset_keeps_its_key(kind: str) -> None:
    one = PAIRS[kind][0]()
    assert dataset_key(pickle.loads(pickle.dumps(one))) == dataset_key(one)


def test_a_bound_method_that_leads_back_is_no_endless_loop() -> None:
    held = Held(a=1)
    held.load = held.__getitem__  # type: ignore[attr-defined]
    other = Held(a=2)
    other.load = other.__getitem__  # type: ignore[attr-defined]
    assert dataset_key(held) != dataset_key(other)


def test_what_pickle_leaves_out_does_not_count(tmp_path: Path) -> None:
    with open(tmp_path / "file", "w") as file:
        assert dataset_key(Dropping(a=1, handle=file)) == dataset_key(Dropping(a=1, handle=None))
        assert dataset_key(Dropping(a=1, handle=file)) != dataset_key(Dropping(a=2, handle=file))
        assert dataset_key(Named(name="a", handle=file)) == dataset_key(Named(name="a"))


def test_loggers_and_locks_do_not_count() -> None:
    def make(name: str) -> Held:
        return Held(log=logging.getLogger(name), lock=threading.Lock())

    assert dataset_key(make("a")) == dataset_key(make("b"))


def test_the_subset_is_the_same_however_its_indices_are_kept() -> None:
    kinds: list[Callable[[Any], Any]] = [list, tuple, np.array, torch.tensor]
    keys = {dataset_key(Subset(Held(a=1), kind([0, 2]))) for kind in kinds}
    assert len(keys) == 1


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (torch.Generator, "generator"),
        (lambda: np.random.default_rng(1), "generator"),
        (lambda: np.random.RandomState(1), "generator"),
        (lambda: random.Random(1), "generator"),
        (lambda: (value for value in [1]), "stream"),
        (lambda: memoryview(b""), "view"),
        (lambda: io.StringIO("a"), "input"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_has_no_stable_hash_is_refused_by_name(make: Callable[[], object], name: str) -> None:
    for held, path in (
        (Held(**{name: make()}), f"dataset.{name}"),
        (Held(inner=Held(**{name: make()})), f"dataset.inner.{name}"),
    ):
        with pytest.raises(UnhashableError) as caught:
            dataset_key(held)
        message = str(caught.value)
        assert message.startswith(f"{path}: ")
        assert "key=" in message
    assert dataset_key(Held(**{name: make()}), key="mine") == "mine"


def test_random_sources_are_refused_because_samples_drawn_from_them_must_not_be_cached() -> None:
    with pytest.raises(UnhashableError, match="behind the cache"):
        dataset_key(Held(rng=random.Random(1)))


# --- files --------------------------------------------------------------------------------------------------


def touch(path: Path) -> None:
    """Another time of change, as an edit makes it."""
    found = path.stat()
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns + 1))


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / "data" / f"{number:03d}.txt" for number in range(100)]
    paths[0].parent.mkdir()
    for path in paths:
        path.write_text("text")
    return paths


@pytest.mark.parametrize("count", [3, 100])
@pytest.mark.parametrize("kind", ["(path, label)", "texts", "paths"])
def test_a_list_of_files_notices_an_edit_of_one(files: list[Path], kind: str, count: int) -> None:
    kinds: dict[str, Callable[[Path], object]] = {
        "(path, label)": lambda path: (str(path), 1),
        "texts": str,
        "paths": lambda path: path,
    }

    def make() -> Held:
        return Held(root=str(files[0].parent), samples=list(map(kinds[kind], files[:count])))

    before = dataset_key(make())
    assert dataset_key(make()) == before
    files[1].write_text("text that is longer")
    longer = dataset_key(make())
    assert longer != before
    touch(files[1])
    touched = dataset_key(make())
    assert touched != longer
    files[1].unlink()
    assert dataset_key(make()) not in (before, longer, touched)


@pytest.mark.parametrize("form", ["alone", "list", "pairs", "objects", "record"])
def test_names_of_files_that_come_out_of_an_array_count(files: list[Path], form: str) -> None:
    """Regression: they are NumPy's own texts, and those counted by their letters alone."""
    names = np.array(list(map(str, files[:3])))
    record = np.array([(str(files[0]), 1)], [("p", "U200"), ("y", "i4")])[0]
    values = {
        "alone": names[0], "list": list(names), "pairs": list(zip(names, range(3), strict=True)),
        "objects": np.array([*names, None], object), "record": record,
    }  # fmt: skip
    before = dataset_key(Held(value=values[form]))
    assert dataset_key(Held(value=values[form])) == before
    touch(files[0])
    assert dataset_key(Held(value=values[form])) != before


@pytest.mark.parametrize("count", [4, 100])
@pytest.mark.parametrize(
    "form", ["(image, mask)", "[label, path]", "path of ten", "first is missing", "one is empty"]
)
def test_files_anywhere_in_a_list_count_however_long_it_is(files: list[Path], form: str, count: int) -> None:
    """Regression: of a long list the first elements of tuples counted alone, and only if all were files."""
    paths = list(map(str, files[:count]))
    values: dict[str, list[Any]] = {
        "(image, mask)": [("/no/image", path) for path in paths],
        "[label, path]": [[place, path] for place, path in enumerate(paths)],
        "path of ten": [(*range(9), path) for path in paths],
        "first is missing": ["/no/file", *paths],
        "one is empty": [*paths[:2], "", *paths[2:]],
    }
    before = dataset_key(values[form])
    assert dataset_key([*values[form]]) == before
    touch(files[count - 1])
    assert dataset_key(values[form]) != before


def test_one_file_by_name_notices_an_edit(files: list[Path]) -> None:
    makes: list[Callable[[], Held]] = [
        lambda: Held(annotations=str(files[0])),
        lambda: Held(annotations={"train": files[0]}),
    ]
    for make in makes:
        before = dataset_key(make())
        touch(files[0])
        assert dataset_key(make()) != before


def test_folders_count_by_path_alone(files: list[Path]) -> None:
    held = Held(root=str(files[0].parent), path=files[0].parent)
    before = dataset_key(held)
    (files[0].parent / "new").write_text("")
    assert dataset_key(held) == before


def _reads(path: Any) -> Callable[[], str]:
    return lambda: open(path).read()


class Reader:
    """An object whose method reads a file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def read(self) -> str:
        return Path(self.path).read_text()


@pytest.mark.parametrize(
    "form", ["closure", "list in a closure", "array", "default", "class", "method", "global"]
)
def test_files_that_variables_of_code_name_count(files: list[Path], form: str) -> None:
    """Regression: only path objects did there, and text in the attributes of the dataset."""
    path = str(files[0])

    def by_default(path: str = path) -> str:
        return Path(path).read_text()

    def make() -> Any:
        if form == "class":
            return Held(kind=type("Kind", (), {"path": path, "__module__": __name__}))
        if form == "global":
            scope = {"__name__": __name__, "PATH": path}
            exec("def read(): return open(PATH).read()", scope)
            return Held(read=scope["read"])
        reads = {
            "closure": _reads(path), "list in a closure": _reads([path]), "array": _reads(np.array([path])),
            "default": by_default, "method": Reader(path).read,
        }  # fmt: skip
        return Held(read=reads[form])

    before = dataset_key(make())
    assert dataset_key(make()) == before
    touch(files[0])
    assert dataset_key(make()) != before


def test_files_of_the_kernel_do_not_count() -> None:
    """The time of a file in /proc is that of the first look at it."""
    held = Held(cpus="/proc/cpuinfo", null=Path("/dev/null"))
    before = dataset_key(held)
    Path("/dev/null").write_text("nothing")
    assert dataset_key(held) == before


def test_files_in_shared_memory_count_as_all_do() -> None:
    with tempfile.NamedTemporaryFile(dir="/dev/shm", suffix=".txt") as file:
        held = Held(path=file.name)
        before = dataset_key(held)
        touch(Path(file.name))
        assert dataset_key(held) != before


def test_a_private_map_counts_by_its_values_and_a_shared_one_notices_each_write(tmp_path: Path) -> None:
    """Regression: values that differ from the file, and a page that was written twice, had the same key."""
    file = tmp_path / "a.npy"
    np.save(file, np.arange(4.0))
    keys = set()
    for factor in (1, 2):
        private = np.load(file, mmap_mode="c")
        private *= factor
        keys.add(dataset_key(private))
    shared = np.load(file, mmap_mode="r+")
    for value in (3, 4, 5):
        shared[:] = value
        keys.add(dataset_key(shared))
    assert len(keys) == 5
    cached = Held(x=shared)
    assert dataset_key(cached) == dataset_key(cached)


@pytest.mark.parametrize("kind", ["group", "zip"])
def test_zarr_groups_and_archives_notice_another_chunk(tmp_path: Path, kind: str) -> None:
    """Regression: a group counted by its description, and an archive by its path."""
    zarr = pytest.importorskip("zarr")

    def make(value: int) -> Any:
        if kind == "group":
            group = zarr.open_group(tmp_path / "group", mode="w")
            group.create_array("a", shape=(3,), dtype="i8")[:] = value
            return zarr.open_group(tmp_path / "group", mode="r")
        path = tmp_path / "a.zip"
        path.unlink(missing_ok=True)
        store = zarr.storage.ZipStore(path, mode="w")
        zarr.create_array(store, shape=(3,), dtype="i8")[:] = value
        store.close()
        return zarr.open_array(zarr.storage.ZipStore(path, mode="r"), mode="r")

    before = dataset_key(make(1))
    assert dataset_key(make(2)) != before


def test_groups_of_zarr_in_memory_count_by_their_values() -> None:
    zarr = pytest.importorskip("zarr")
    keys = set()
    for value in (1, 1, 2):
        group = zarr.create_group({})
        group.create_group("inner").create_array("a", shape=(3,), dtype="i8")[:] = value
        keys.add(dataset_key(group))
    assert len(keys) == 2


def test_a_lazy_frame_over_a_file_is_refused(tmp_path: Path) -> None:
    """Regression: its plan says nothing of the file, so an edit gave the old rows."""
    (tmp_path / "a.csv").write_text("a\n1\n")
    with pytest.raises(UnhashableError, match=r"dataset.frame: is a LazyFrame that will read files.*collect"):
        dataset_key(Held(frame=pl.scan_csv(tmp_path / "a.csv")))
    one, other = (Held(frame=pl.DataFrame({"a": [value]}).lazy()) for value in (1, 2))
    assert dataset_key(one) != dataset_key(other)


def test_files_that_code_names_are_constants(files: list[Path]) -> None:
    """A log that a transform writes to would change the key with every use."""
    program = f"lambda x: open({str(files[0])!r}, 'a').write(x)"
    held = Held(transform=eval(program))
    before = dataset_key(held)
    touch(files[0])
    assert dataset_key(held) == before


def test_mapped_arrays_count_by_file_without_being_read(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(10))
    first = dataset_key(Held(data=np.load(tmp_path / "a.npy", mmap_mode="r")))
    assert dataset_key(Held(data=np.load(tmp_path / "a.npy", mmap_mode="r"))) == first
    touch(tmp_path / "a.npy")
    assert dataset_key(Held(data=np.load(tmp_path / "a.npy", mmap_mode="r"))) != first


def test_a_map_of_a_file_that_was_replaced_is_none_of_the_file_in_its_place(tmp_path: Path) -> None:
    for name, first in (("a", 0), ("b", 50)):
        np.save(tmp_path / f"{name}.npy", np.arange(first, first + 10))
    old = np.load(tmp_path / "a.npy", mmap_mode="r")
    before = dataset_key(Held(data=old))
    (tmp_path / "b.npy").replace(tmp_path / "a.npy")
    new = np.load(tmp_path / "a.npy", mmap_mode="r")
    keys = {before, dataset_key(Held(data=old)), dataset_key(Held(data=new))}
    assert len(keys) == 3
    assert dataset_key(Held(data=np.load(tmp_path / "a.npy", mmap_mode="r"))) in keys


def test_views_of_mapped_arrays_count_by_what_they_show(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(10))
    whole = np.load(tmp_path / "a.npy", mmap_mode="r")
    keys = {dataset_key(Held(data=part)) for part in (whole, whole[:5], whole[5:], whole[::2], whole[5:])}
    assert len(keys) == 4


def test_zarr_arrays_on_disk_notice_an_edit_of_a_chunk(tmp_path: Path) -> None:
    zarr = pytest.importorskip("zarr", reason="zarr 3 has no release for Python 3.10")
    array: Any = zarr.create_array(tmp_path / "a.zarr", shape=(10, 3), chunks=(5, 3), dtype="f4")
    array[:] = 1

    def reopened() -> Any:
        return zarr.open_array(tmp_path / "a.zarr", mode="r")

    before = dataset_key(reopened())
    assert dataset_key(reopened()) == before == dataset_key(array)
    assert dataset_key(Held(array=reopened())) == dataset_key(Held(array=reopened()))
    array[0, 0] = 2
    changed = dataset_key(reopened())
    assert changed != before
    array.attrs["unit"] = "m"
    assert dataset_key(reopened()) not in (before, changed)


def test_long_lists_take_little_time() -> None:
    """The list of ImageNet's files, without the files: well under a second a million."""
    import time

    samples = [(f"n{number:08d}.JPEG", number % 1000) for number in range(200_000)]
    start = time.process_time()
    dataset_key(Held(samples=samples, imgs=samples, targets=[label for _, label in samples]))
    assert time.process_time() - start < 2


# --- keys of one's own --------------------------------------------------------------------------------------


def test_a_key_of_ones_own_stands_for_the_data() -> None:
    assert dataset_key([1], "imagenet/train") == "imagenet/train"
    assert dataset_key([1], {"version": 2}) == key({"version": 2})
    for bad in ("", "../x", "/x"):
        with pytest.raises(InvalidNameError):
            dataset_key([1], bad)


def test_boxes_of_an_image_without_objects_have_a_key() -> None:
    empty, narrow = (TensorDataset(torch.zeros(0, columns)) for columns in (4, 5))
    assert dataset_key(empty) == dataset_key(empty) != dataset_key(narrow)


IN_COLUMNS: dict[str, Callable[[list[str]], Any]] = {
    "array": np.array,
    "bytes": lambda paths: np.array([path.encode() for path in paths]),
    "records": lambda paths: np.array([(path, 1) for path in paths], [("p", "U200"), ("y", "i4")]),
    "strings": lambda paths: np.array(paths, np.dtypes.StringDType()),
    "big-endian": lambda paths: np.array(paths, ">U200"),
    "first is missing": lambda paths: np.array(["/no/file", "", *paths]),
    "series": pd.Series,
    "index": lambda paths: pd.Series(range(len(paths)), index=paths),
    "frame": lambda paths: pd.DataFrame({"y": range(len(paths)), "path": paths}),
    "objects": lambda paths: pd.DataFrame({"path": np.array(paths, object)}),
    "categories": lambda paths: pd.DataFrame({"path": pd.Categorical(paths)}),
    "arrow": lambda paths: pa.table({"y": range(len(paths)), "path": paths}),
    "dictionary": lambda paths: pa.table({"path": pa.array(paths).dictionary_encode()}),
    "runs": lambda paths: pa.table({"path": pc.run_end_encode(pa.array(paths))}),
    "lists": lambda paths: pa.table({"path": [[path] for path in paths]}),
    "structs": lambda paths: pa.table({"image": [{"path": path, "bytes": None} for path in paths]}),
    "polars lists": lambda paths: pl.DataFrame({"path": [[path] for path in paths]}),
    "polars structs": lambda paths: pl.DataFrame({"image": [{"path": path} for path in paths]}),
    "polars": lambda paths: pl.DataFrame({"y": range(len(paths)), "path": paths}),
    "polars series": pl.Series,
}


@pytest.mark.parametrize("length", [2, 200])
@pytest.mark.parametrize("form", IN_COLUMNS)
def test_files_that_arrays_and_frames_name_count(form: str, length: int, tmp_path: Path) -> None:
    paths = [str(tmp_path / f"{place}.png") for place in range(length)]
    for path in paths:
        Path(path).write_bytes(b"image")
    columns, alike = IN_COLUMNS[form](paths), IN_COLUMNS[form]([*paths])
    before = dataset_key(columns)
    assert dataset_key(alike) == before
    Path(paths[-1]).write_bytes(b"another image")
    assert dataset_key(columns) != before
