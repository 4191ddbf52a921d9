"""CachedIterableDataset: what a function makes of an item is made once, in whatever order, worker or run the
item comes.
"""

from __future__ import annotations

import dataclasses
import os
import pickle
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps, ImageSequence
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from castore import InvalidValueError, SerializationError, Store, UnhashableError
from castore.adapters.torch import CachedDataset, CachedIterableDataset
from tests.adapters.torch.items import Items, Makes, Plain
from tests.helpers import flip, payload
from tests.images import animation, photo

COUNT = 60


@pytest.fixture
def makes(tmp_path: Path) -> Makes:
    """The slow function."""
    return Makes(tmp_path / "log")


def numbers(samples: Any) -> list[int]:
    """The first element of each sample."""
    return [int(sample["x"][0]) for sample in samples]


def batches(loader: Any) -> list[list[int]]:
    """The first element of each sample, by batch."""
    return [batch["x"][:, 0].tolist() for batch in loader]


def test_samples_are_those_of_the_function_and_made_once_in_any_order(store: Store, makes: Makes) -> None:
    cached = CachedIterableDataset(Items(COUNT), makes, store)
    for epoch in range(3):
        cached.set_epoch(epoch)
        plain = Items(COUNT)
        plain.set_epoch(epoch)
        assert [(sample["x"].tolist(), sample["text"]) for sample in cached] == [
            ([item["number"]] * 3, item["text"]) for item in plain
        ]
    assert makes.made == list(range(COUNT))
    assert (cached.hits, cached.misses) == (2 * COUNT, COUNT)
    again = CachedIterableDataset(Items(COUNT + 5), Makes(Path(makes.log)), store)
    assert sorted(numbers(again)) == list(range(COUNT + 5))
    assert makes.made == list(range(COUNT + 5)), "new items alone"


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_workers_share_the_samples(store: Store, makes: Makes, workers: int) -> None:
    def expected(epoch: int) -> list[list[int]]:
        items = Items(COUNT)
        items.set_epoch(epoch)
        loader: Any = DataLoader(items, batch_size=7, num_workers=workers)
        return [batch["number"].tolist() for batch in loader]

    cached = CachedIterableDataset(Items(COUNT), makes, store)
    for epoch in range(2):
        cached.set_epoch(epoch)
        assert batches(DataLoader(cached, batch_size=7, num_workers=workers)) == expected(epoch)
    assert makes.made == list(range(COUNT))
    assert (cached.hits, cached.misses) == (COUNT, COUNT), "counted in all processes"


# Either gets the dataset pickled. A spawned one imports torch for a second.
@pytest.mark.parametrize("start", ["forkserver", pytest.param("spawn", marks=pytest.mark.matrix)])
def test_a_worker_that_is_no_fork_finds_the_samples(store: Store, makes: Makes, start: str) -> None:
    cached = CachedIterableDataset(Items(COUNT), makes, store)
    expected = numbers(cached)
    assert len(pickle.dumps(cached)) < 2000
    loader: Any = DataLoader(cached, batch_size=COUNT, num_workers=1, multiprocessing_context=start)
    assert batches(loader) == [expected]
    assert makes.made == list(range(COUNT))


def test_an_epoch_that_was_broken_off_leaves_its_samples(store: Store, makes: Makes) -> None:
    cached = CachedIterableDataset(Items(COUNT), makes, store)
    for number, _sample in enumerate(cached):
        if number == 9:
            break
    assert len(makes.made) == 10, "nothing is read ahead"
    cached.set_epoch(1)
    assert sorted(numbers(cached)) == makes.made == list(range(COUNT))


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata calls it
@pytest.mark.parametrize("workers", [0, 2])
def test_the_state_is_that_of_the_dataset_behind(store: Store, makes: Makes, workers: int) -> None:
    def loader() -> Any:
        cached = CachedIterableDataset(Items(COUNT), makes, store)
        return StatefulDataLoader(cached, batch_size=4, num_workers=workers)

    begun = loader()
    going = iter(begun)
    taken = [next(going)["x"][:, 0].tolist() for _ in range(5)]
    state = begun.state_dict()
    del going, begun
    going_on = loader()
    going_on.load_state_dict(state)
    rest = batches(going_on)
    assert taken + rest == batches(loader())
    assert makes.made == list(range(COUNT))


def test_other_attributes_are_those_of_the_dataset_behind(store: Store, makes: Makes) -> None:
    cached = CachedIterableDataset(Items(COUNT), makes, store)
    assert cached.name == "items"
    assert cached.state_dict() == {"done": 0}
    without: Any = CachedIterableDataset(Plain(), str, store)
    assert list(without) == ["0", "1", "2", "3", "4"]
    for name in ("state_dict", "set_epoch"):
        assert not hasattr(without, name)
    with pytest.raises(TypeError):
        len(without)
    assert len(CachedIterableDataset([1, 2], str, store)) == 2


def test_an_item_that_names_a_file_counts_by_the_file_too(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "text"
    file.write_text("one")

    def read(item: Any) -> str:
        return Path(item["path"] if isinstance(item, dict) else item).read_text()

    for item in (str(file), file, {"path": str(file)}, "text", "./text"):
        cached = CachedIterableDataset([item], read, store)
        assert list(cached) == ["one"]
        file.write_text("other")
        assert list(cached) == ["other"]
        file.write_text("one")
        os.utime(file, ns=(1, 1))


@dataclasses.dataclass
class Row:
    """An item with a field."""

    path: Any


@pytest.mark.parametrize("deep", [False, True])
def test_files_count_at_any_depth_of_an_item(store: Store, tmp_path: Path, deep: bool) -> None:
    """Regression: those of lists in rows, and of images as Hugging Face's rows have them, did not."""
    file = tmp_path / "text"
    path = str(file)
    items: list[Any] = [
        {"image": {"path": path, "bytes": None}}, {"frames": [path]}, ((path, 1), 2), [[path]], Row(path),
        {"frames": [file]}, {path: 1}, {path, "x"}, deque([path]), np.array([path]),
    ]  # fmt: skip
    for item in items:
        file.write_text("one")
        os.utime(file, ns=(1, 1))
        given = [[item]] if deep else [item]
        cached = CachedIterableDataset(given, lambda _: file.read_text(), store, key="files")
        assert list(cached) == ["one"]
        file.write_text("other")
        assert list(cached) == ["other"]


def test_what_comes_into_a_folder_changes_no_item_that_names_it(store: Store, tmp_path: Path) -> None:
    cached = CachedIterableDataset([{"root": str(tmp_path), "id": 1}], lambda item: item["id"], store)
    assert list(cached) == [1]
    (tmp_path / "new").touch()
    assert [*cached, cached.hits, cached.misses] == [1, 1, 1]


def test_a_function_that_stops_iteration_is_an_error_and_no_early_end(store: Store) -> None:
    """Regression: the epoch ended there, and nobody noticed."""

    def takes(item: int) -> int:
        return item if item < 3 else next(iter([]))

    cached = CachedIterableDataset(range(5), takes, store)
    found: list[int] = []
    with pytest.raises(RuntimeError, match="StopIteration"):
        found.extend(cached)
    assert found == [0, 1, 2]


def test_a_key_of_items_decides_what_is_the_same(store: Store, makes: Makes) -> None:
    items = [{"number": 1, "text": "a"}, {"number": 1, "text": "b"}, {"number": 2, "text": "a"}]
    by_number = CachedIterableDataset(items, makes, store, item_key=lambda item: item["number"])
    assert [sample["text"] for sample in by_number] == ["a", "a", "a"]
    assert makes.made == [1, 2]
    odd: Any = [{"number": 1, "what": iter([])}]
    with pytest.raises(SerializationError, match=r"\['what'\].*item_key"):
        list(CachedIterableDataset(odd, makes, store))


def test_another_function_makes_its_own_samples(store: Store) -> None:
    def by(factor: int) -> Any:
        return lambda item: item * factor

    assert list(CachedIterableDataset([1, 2], by(2), store)) == [2, 4]
    assert list(CachedIterableDataset([1, 2], by(3), store)) == [3, 6]
    assert list(CachedIterableDataset([1, 2], by(4), store, key="by")) == [4, 8]
    assert list(CachedIterableDataset([1, 2], by(5), store, key="by")) == [4, 8], "the user says so"
    generator = torch.Generator()
    with pytest.raises(UnhashableError, match="generator"):
        CachedIterableDataset([1], lambda item: torch.rand(item, generator=generator), store)


def test_a_function_that_is_changed_is_an_error(store: Store) -> None:
    class Adds:
        def __init__(self) -> None:
            self.by = 1

        def __call__(self, item: int) -> int:
            return item + self.by

    adds = Adds()
    cached = CachedIterableDataset([1], adds, store)
    assert list(cached) == [2]
    adds.by = 2
    with pytest.raises(InvalidValueError, match="by"):
        list(cached)


class _Settings:
    def __init__(self) -> None:
        self.by = 1
        self.asked = 0

    def get(self) -> int:
        self.asked += 1
        return self.by


_factor = 1
_settings = {"by": 1}
_held = _Settings()
_known: dict[int, int] = {}
_asked = 0
_model: Any = None


def _scaled(item: int) -> int:
    return item * _factor


def _by_global(item: int) -> int:
    return _scaled(item)


def _by_settings(item: int) -> int:
    return item + _settings["by"]


def _by_object(item: int) -> int:
    return item + _held.get()


def _by_what_it_keeps(item: int) -> int:
    global _asked, _model
    _asked += 1
    _model = _model or {"by": 1}
    _known[item] = item
    return item + int(_model["by"])


class _HasSettings:
    def __init__(self) -> None:
        self.settings = {"by": 1}

    def __call__(self, item: int) -> int:
        return item + self.settings["by"]


_has_settings = _HasSettings()


def _other_scaled(item: int) -> int:
    return item * 2


_CHANGES: list[tuple[Any, dict[str, Any], str, Any, str]] = [
    (_by_global, globals(), "_factor", 5, "the global '_factor' of tests"),
    (_by_global, globals(), "_scaled", _other_scaled, "the global '_scaled' of tests"),
    (_by_settings, _settings, "by", 5, r"the part \['by'\] of global '_settings' of tests"),
    (_by_object, vars(_held), "by", 5, "the attribute 'by' of global '_held' of tests"),
    (_has_settings, _has_settings.settings, "by", 5, r"dataset.settings\['by'\]"),
]


@pytest.mark.parametrize(
    ("workers", "transform", "target", "name", "value", "told"),
    [
        pytest.param(workers, *change, marks=[pytest.mark.matrix] * (workers > 0 and number > 0))
        for workers in (0, 1)
        for number, change in enumerate(_CHANGES)
    ],
)
def test_an_epoch_begins_with_a_look_whether_anything_has_changed(
    store: Store,
    monkeypatch: pytest.MonkeyPatch,
    workers: int,
    transform: Any,
    target: dict[str, Any],
    name: str,
    value: Any,
    told: str,
) -> None:
    expected = [transform(1), transform(2)]
    cached = CachedIterableDataset([1, 2], transform, store)
    loader: Any = DataLoader(cached, batch_size=None, num_workers=workers)
    for _ in range(2):
        assert list(loader) == expected
    monkeypatch.setitem(target, name, value)
    with pytest.raises(InvalidValueError, match=rf"({told}).* has been changed since"):
        list(loader)
    monkeypatch.undo()
    assert list(loader) == expected


def test_what_a_function_keeps_in_globals_is_its_own_business(store: Store) -> None:
    cached = CachedIterableDataset([1, 2, 3], _by_what_it_keeps, store)
    for _ in range(2):
        assert list(cached) == [2, 3, 4]
        _by_what_it_keeps(7)  # somebody looks past the cache
    assert list(CachedIterableDataset([1, 2, 3, 4], _by_what_it_keeps, store, key="own")) == [2, 3, 4, 5]


def test_a_store_without_room_gives_the_samples_and_one_warning(tmp_path: Path) -> None:
    with Store(tmp_path / "full", max_size=1000, memory=0) as full:
        cached = CachedIterableDataset(range(3), lambda item: os.urandom(5000) + bytes([item]), full)
        with pytest.warns(RuntimeWarning, match="no more samples are kept") as warned:
            assert [sample[-1] for sample in cached] == [0, 1, 2]
        assert len(warned) == 1


def test_a_damaged_sample_is_made_again(store: Store, makes: Makes) -> None:
    cached = CachedIterableDataset(Items(3), makes, store)
    expected = numbers(cached)
    path, offset, length = payload(store, cached.name_of({"number": 1, "text": "item 1"}))
    flip(path, offset + length // 2)
    assert numbers(cached) == expected
    assert makes.made == [0, 1, 1, 2]
    assert numbers(cached) == expected
    assert makes.made == [0, 1, 1, 2]


def test_the_map_style_wrapper_names_this_one(store: Store) -> None:
    with pytest.raises(InvalidValueError, match="CachedIterableDataset"):
        CachedDataset(Items(3), store)


class Given(torch.utils.data.IterableDataset[Any]):
    """Items that are given."""

    def __init__(self, *items: Any) -> None:
        self.items = items

    def __iter__(self) -> Any:
        return iter(self.items)


def test_items_count_by_all_that_a_function_can_see_of_images(store: Store) -> None:
    def seen(image: Image.Image) -> Any:
        frames = [frame.convert("RGB").getpixel((0, 0)) for frame in ImageSequence.Iterator(image)]
        return [ImageOps.exif_transpose(image).size, image.format or "", frames]

    def items() -> list[Image.Image]:
        return [*(photo(lies, format="PNG") for lies in (6, 1)), animation("red"), animation("blue")]

    expected = [seen(image) for image in items()]
    for _ in range(2):
        cached = CachedIterableDataset(Given(*items()), seen, store)
        assert list(cached) == expected
    assert cached.hits == len(expected)


def test_a_tensor_with_attributes_of_its_own_is_no_item(store: Store) -> None:
    item = torch.ones(2)
    item.scale = 2  # type: ignore[attr-defined]
    with pytest.raises(
        SerializationError, match=r"\['x'\] is a tensor with the attribute 'scale'.*item_key="
    ):
        list(CachedIterableDataset(Given({"x": item}), len, store))
