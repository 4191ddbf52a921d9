"""A dataset, or an encoder, that somebody changes after it was wrapped gives no samples under a key that
is not theirs.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import functools
import os
import pickle
import subprocess
import sys
import threading
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pydantic
import pytest
import torch
from omegaconf import OmegaConf
from torch.utils.data import DataLoader, Dataset, TensorDataset

from castore import InvalidValueError
from castore.adapters.embeddings import CachedEncoder
from castore.adapters.torch import BiLevelCachedDataset, CachedDataset, changes
from castore.errors import OutOfRangeError


class Shift:
    def __init__(self, by: int) -> None:
        self.by = by
        self.steps = [by]

    def __call__(self, x: Any) -> Any:
        return x + self.by


class Shifted(Dataset[Any]):
    """Opens its file late, and counts its reads, as datasets do."""

    def __init__(self, by: int = 1) -> None:
        self.data = np.arange(100.0)
        self.tensor = torch.arange(100.0)
        self.names: Any = ()
        self.transform = Shift(by)
        self.file: Any = None
        self.reads = 0

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> float:
        self._open()
        self.reads += 1
        return float(self.transform(self.data[index]))

    def _open(self) -> None:
        self.file = self.file or object()


WRAPPERS: dict[str, Callable[..., Any]] = {
    "simple": CachedDataset,
    "bilevel": lambda data, folder, **given: BiLevelCachedDataset(data, "1MB", "10MB", folder, **given),
}


def set_transform(data: Any) -> None:
    data.transform = Shift(5)


def reach_inside(data: Any) -> None:
    data.transform.by = 5


def add_a_step(data: Any) -> None:
    data.transform.steps.append(5)


def write_to_an_array(data: Any) -> None:
    data.data *= 2


def write_to_a_tensor(data: Any) -> None:
    data.tensor[3] = 7


@pytest.fixture(params=WRAPPERS)
def wrap(request: pytest.FixtureRequest) -> Callable[..., Any]:
    return WRAPPERS[request.param]


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (set_transform, "transform"), (reach_inside, r"transform\.by"), (add_a_step, r"transform\.steps"),
        (write_to_an_array, "data"), (write_to_a_tensor, "tensor"),
    ],
)  # fmt: skip
def test_nothing_is_kept_of_a_dataset_that_was_changed(
    wrap: Callable[..., Any], change: Callable[[Any], None], part: str, tmp_path: Path
) -> None:
    data = Shifted()
    with wrap(data, tmp_path / "cache") as cached:
        assert cached[3] == 4
        change(data)
        with pytest.raises(
            InvalidValueError, match=rf"dataset\.{part} has been changed since .*wrap it anew.*key="
        ):
            cached[4]
    with wrap(Shifted(), tmp_path / "cache") as again:
        assert again[4] == 5


def test_what_is_there_is_not_given_out_either_once_an_attribute_was_set(
    wrap: Callable[..., Any], tmp_path: Path
) -> None:
    data = Shifted()
    with wrap(data, tmp_path / "cache") as cached:
        assert cached[3] == 4
        data.transform = Shift(1)  # another one that does the same
        assert cached[3] == 4
        data.transform = Shift(2)
        with pytest.raises(InvalidValueError, match=r"dataset\.transform has been changed"):
            cached[3]


def test_what_a_dataset_changes_itself_is_its_own_business(wrap: Callable[..., Any], tmp_path: Path) -> None:
    data = Shifted()
    with wrap(data, tmp_path / "cache") as cached:
        for index in (0, 1, 0, 2):
            data[index]  # somebody looks past the cache
            assert cached[index] == index + 1
        assert [float(x) for x in cached.__getitems__([1, 5, 6])] == [2, 6, 7]


def test_who_says_what_identifies_the_data_may_change_it(wrap: Callable[..., Any], tmp_path: Path) -> None:
    data = Shifted()
    with wrap(data, tmp_path / "cache", key="mine") as cached:
        assert cached[3] == 4
        data.transform = Shift(5)
        assert cached[4] == 9


class Keyed(Shifted):
    def __castore_key__(self) -> int:
        return self.transform.by


def test_a_dataset_with_a_key_of_its_own_changes_with_that_key(
    wrap: Callable[..., Any], tmp_path: Path
) -> None:
    data = Keyed()
    with wrap(data, tmp_path / "cache") as cached:
        assert cached[3] == 4
        data.data = data.data + 0
        data.transform = Shift(1)
        assert cached[4] == 5
        data.transform = Shift(5)
        with pytest.raises(InvalidValueError, match="dataset has been changed since"):
            cached[5]


# A worker of a fork server gets its dataset pickled as a spawned one does, which imports torch for a second.
@pytest.mark.parametrize(
    ("wrap", "start"),
    [
        pytest.param(name, start, marks=[pytest.mark.matrix] * (start == "spawn"))
        for name in WRAPPERS
        for start in ("fork", "forkserver", "spawn")
    ],
    indirect=["wrap"],
)
def test_workers_see_a_change_too(wrap: Callable[..., Any], start: str, tmp_path: Path) -> None:
    data = TensorDataset(torch.arange(10.0))
    with wrap(data, tmp_path / "cache") as cached:
        loader: Any = DataLoader(cached, batch_size=5, num_workers=1, multiprocessing_context=start)
        assert [batch[0].tolist() for batch in loader] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
        data.tensors = (torch.zeros(10),)
        with pytest.raises(InvalidValueError, match=r"dataset\.tensors has been changed"):
            list(loader)


def test_a_copy_is_watched_as_well(tmp_path: Path) -> None:
    with CachedDataset(Shifted(), tmp_path / "cache") as cached:
        copy = pickle.loads(pickle.dumps(cached))
        assert copy[3] == 4
        copy._data.transform = Shift(5)
        with pytest.raises(InvalidValueError, match="transform has been changed"):
            copy[4]
        copy.close()


# --- what hangs deeper --------------------------------------------------------------------------------------


class Compose:
    def __init__(self, *steps: Any) -> None:
        self.steps = [*steps]

    def __call__(self, x: Any) -> Any:
        for step in self.steps:
            x = step(x)
        return x


class Transformed(Dataset[Any]):
    def __init__(self, transform: Any) -> None:
        self.transform = transform

    def __len__(self) -> int:
        return 10

    @torch.no_grad()
    def __getitem__(self, index: int) -> Any:
        return self.transform(torch.full((2,), float(index)))


def using(shift: Shift) -> Callable[[Any], Any]:
    def transform(x: Any) -> Any:
        return shift(x)

    return transform


def shifted_with(x: Any, shift: Any) -> Any:
    return shift(x)


class BySettings:
    def __init__(self, **settings: int) -> None:
        self.settings = settings

    def __call__(self, x: Any) -> Any:
        return x + self.settings["by"]


def trained(model: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with torch.enable_grad():
        model(torch.ones(3, 2)).sum().backward()
    optimizer.step()


def load_noughts(model: Any) -> None:
    model.load_state_dict({name: value * 0 for name, value in model.state_dict().items()})


def model() -> Any:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Sequential(torch.nn.Linear(2, 1))).eval()


DEEP: dict[str, tuple[Callable[[], Any], Callable[[Any], None], str]] = {
    "compose": (lambda: Compose(Compose(Compose(Shift(1)))),
                lambda t: setattr(t.steps[0].steps[0].steps[0], "by", 2),
                r"transform\.steps\[0\]\.steps\[0\]\.steps\[0\]\.by"),
    "partial": (lambda: functools.partial(shifted_with, shift=Shift(1)),
                lambda t: setattr(t.keywords["shift"], "by", 2), r"transform\.keywords\['shift'\]\.by"),
    "method": (lambda: Shift(1).__call__, lambda t: setattr(t.__self__, "by", 2), r"transform\.__self__\.by"),
    "closure": (lambda: using(Shift(1)), lambda t: setattr(t.__closure__[0].cell_contents, "by", 2),
                r"transform\.shift\.by"),
    "dict": (lambda: BySettings(by=1), lambda t: t.settings.update(by=2), r"transform\.settings\['by'\]"),
    "trained": (model, trained, "transform"),
    "loaded": (model, load_noughts, "transform"),
    "mode": (model, lambda t: t.train(), "transform"),
    "weight": (model, lambda t: setattr(t[1][0], "weight", torch.nn.Parameter(torch.ones(1, 2))),
        "transform"),
}  # fmt: skip


@pytest.mark.parametrize("case", DEEP)
def test_a_change_deep_inside_shows(wrap: Callable[..., Any], case: str, tmp_path: Path) -> None:
    make, change, part = DEEP[case]
    data = Transformed(make())
    with wrap(data, tmp_path / "cache") as cached:
        assert torch.equal(cached[3], data[3])
        change(data.transform)
        with pytest.raises(InvalidValueError, match=rf"dataset\.{part} has been changed since"):
            cached[4]
    again = Transformed(make())
    with wrap(again, tmp_path / "cache") as cached:
        assert torch.equal(cached[4], again[4])


@pytest.mark.parametrize("start", ["forkserver", pytest.param("spawn", marks=pytest.mark.matrix)])
def test_weights_that_go_to_workers_have_not_changed(
    wrap: Callable[..., Any], start: str, tmp_path: Path
) -> None:
    data = Transformed(model().requires_grad_(False))
    with wrap(data, tmp_path / "cache") as cached:
        loader: Any = DataLoader(cached, batch_size=5, num_workers=1, multiprocessing_context=start)
        assert sum(len(batch) for batch in loader) == 10
        assert torch.equal(cached[3], data[3])


class Remembering(Dataset[Any]):
    """Keeps what it has read in all the ways that datasets do."""

    def __init__(self, meet: Callable[[], object] = int) -> None:
        self.known: dict[int, float] = {}
        self.counts: collections.Counter[str] = collections.Counter()
        self.asked: list[int] = []
        self.places = dict.fromkeys(range(3), 0)
        self.buffer = np.zeros(4)
        self.filled = torch.zeros(4)
        self.norm = torch.nn.BatchNorm1d(1)
        self.add = adding({})
        self.meet = meet

    def __len__(self) -> int:
        return 100

    @functools.cached_property
    def table(self) -> list[int]:
        return [*range(100)]

    @torch.no_grad()
    def __getitem__(self, index: int) -> float:
        known, self.buffer[index % 4] = self.places, index
        known[index % 3] += 1
        self.known[self.table[index]] = float(index)
        self.counts["reads"] += 1
        self.asked.append(index)
        self.filled[index % 4] = index
        self.norm(torch.rand(4, 1))
        self.meet()
        return self.add(index)


def adding(known: dict[int, float]) -> Callable[[int], float]:
    def add(index: int) -> float:
        known[index] = index + 1.0
        return known[index]

    return add


def test_what_a_dataset_remembers_is_its_own_business(wrap: Callable[..., Any], tmp_path: Path) -> None:
    data = Remembering()
    with wrap(data, tmp_path / "cache") as cached:
        assert [cached[index] for index in range(30)] == [index + 1.0 for index in range(30)]
        assert cached.__getitems__([40, 41]) == [41, 42]
        assert len(data.known) == 32


class Kept(Remembering):
    """Leaves alone the attributes that `Remembering` changes without its code's showing it."""

    def __getitem__(self, index: int) -> float:
        self.buffer[index % 4] = index
        self.known[self.table[index]] = float(index)
        self.counts["reads"] += 1
        self.asked.append(index)
        self.filled[index % 4] = index
        return self.add(index)


def test_what_its_code_writes_to_may_change_past_the_cache(wrap: Callable[..., Any], tmp_path: Path) -> None:
    data = Kept()
    with wrap(data, tmp_path / "cache") as cached:
        for index in range(30):
            data[index + 40]
            assert cached[index] == index + 1


def test_threads_that_read_at_once_do_not_see_each_other(wrap: Callable[..., Any], tmp_path: Path) -> None:
    both = threading.Barrier(2, timeout=60)
    data = Remembering(both.wait)
    with wrap(data, tmp_path / "cache") as cached, ThreadPoolExecutor(2) as threads:
        # Each sample waits for the other thread's, so that at any time one has written while the other
        # begins.
        read = [
            threads.submit(lambda start: [cached[start + place] for place in range(25)], start)
            for start in (0, 50)
        ]
        assert [found.result() for found in read] == [
            [start + place + 1.0 for place in range(25)] for start in (0, 50)
        ]
        both.abort()
        data.meet = int
        data.add = float
        with pytest.raises(InvalidValueError, match=r"dataset\.(meet|add) has been changed"):
            cached[30]


def test_texts_of_any_length_in_an_array_are_compared_by_value(tmp_path: Path) -> None:
    """Regression: those of more than 15 bytes lie elsewhere, and each look found another place."""
    dataset = Shifted()
    dataset.names = np.array(
        [f"a name that is long, {place}" for place in range(40)], np.dtypes.StringDType()
    )
    cached = CachedDataset(dataset, tmp_path)
    assert [cached[place] for place in (3, 4)] == [4.0, 5.0]
    dataset.names[0] = "another name, just as long"
    with pytest.raises(InvalidValueError, match=r"dataset\.names has been changed"):
        cached[5]


@pytest.mark.parametrize("mode", ["c", "r+"])
def test_a_map_that_can_be_written_to_is_watched(tmp_path: Path, mode: Any) -> None:
    np.save(tmp_path / "a.npy", np.arange(100.0))
    dataset = Shifted()
    dataset.data = np.load(tmp_path / "a.npy", mmap_mode=mode)
    cached = CachedDataset(dataset, tmp_path / "store")
    assert cached[3] == 4.0
    dataset.data[:] = 7
    with pytest.raises(InvalidValueError, match=r"dataset\.data has been changed"):
        cached[4]


def test_a_look_at_a_large_model_is_bounded(tmp_path: Path) -> None:
    large: Any = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(400)))
    with CachedDataset(Transformed(large), tmp_path / "cache") as cached:
        assert cached[3].shape == (2,)
        with torch.no_grad():
            large[-1].bias.add_(1)
        with pytest.raises(InvalidValueError, match=r"dataset\.transform has been changed"):
            cached[4]


class Growing(Dataset[Any]):
    def __init__(self) -> None:
        self.length = 60

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


def test_a_dataset_that_has_grown_says_so(wrap: Callable[..., Any], tmp_path: Path) -> None:
    data = Growing()
    with wrap(data, tmp_path / "cache") as cached:
        assert cached[59] == 59
        with pytest.raises(OutOfRangeError, match="index 65 is out of range: there are 60 samples"):
            cached[65]
        data.length = 70
        for look in (len, lambda c: c[65], lambda c: c.__getitems__([65])):
            with pytest.raises(InvalidValueError, match=r"dataset\.length has been changed"):
                look(cached)


# --- globals ------------------------------------------------------------------------------------------------


SCALE = 1


def scaled(x: Any) -> Any:
    return x * SCALE


@pytest.mark.parametrize(
    "start",
    ["here", "fork", *(pytest.param(start, marks=pytest.mark.matrix) for start in ("forkserver", "spawn"))],
)
def test_a_pass_and_a_worker_see_a_global_that_has_changed(
    wrap: Callable[..., Any], start: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with wrap(Transformed(scaled), tmp_path / "cache") as cached:
        context = None if start == "here" else start
        workers = 0 if start == "here" else 1
        loader: Any = DataLoader(cached, batch_size=5, num_workers=workers, multiprocessing_context=context)
        passes = cached if start == "here" else loader
        for _ in range(2):
            assert len(list(passes)) == (10 if start == "here" else 2)
        monkeypatch.setattr(f"{__name__}.SCALE", 3)
        with pytest.raises(
            InvalidValueError, match=r"the global 'SCALE' of tests\..* has been changed since"
        ):
            list(passes)


class ByHelper(Dataset[Any]):
    """As in a notebook, whose cell with the helper may run again."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> float:
        return float(scaled(index))


def _other_scaled(x: Any) -> Any:
    return x * SCALE + 100


@pytest.mark.parametrize(("name", "new"), [("scaled", _other_scaled), ("SCALE", 3)])
def test_a_read_sees_a_global_that_was_bound_anew(
    wrap: Callable[..., Any], name: str, new: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with wrap(ByHelper(), tmp_path / "cache") as cached:
        assert cached[3] == 3
        monkeypatch.setattr(f"{__name__}.{name}", new)
        with pytest.raises(
            InvalidValueError, match=rf"the global '{name}' of tests\..* has been changed since"
        ):
            cached[4]
        monkeypatch.undo()
        assert cached[4] == 4


class Table:
    factor = 1
    factors: dict[str, int]
    reads = 0


SETTINGS: Any = {}


def _by_settings(x: Any) -> Any:
    Table.reads += 1
    tensor, inner = SETTINGS["tensor"], SETTINGS["inner"]
    return x * tensor[0].item() * inner["list"][0].factor * Table.factor * Table.factors["a"]


class ReadsSettings(Dataset[Any]):
    def __init__(self) -> None:
        self.factor, self.factors = Table.factor, dict(Table.factors)

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> float:
        return float(_by_settings(index))


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda: SETTINGS["tensor"].fill_(3), r"part \['tensor'\] of global 'SETTINGS'"),
        (
            lambda: setattr(SETTINGS["inner"]["list"][0], "factor", 3),
            r"part \['inner'\] of global 'SETTINGS'",
        ),
        (lambda: setattr(Table, "factor", 3), "attribute 'factor' of global 'Table'"),
        (lambda: Table.factors.update(a=3), "attribute 'factors' of global 'Table'"),
    ],
)
def test_a_read_sees_a_change_inside_of_a_global(
    wrap: Callable[..., Any], change: Callable[[], object], what: str, tmp_path: Path
) -> None:
    SETTINGS.update(tensor=torch.ones(2), inner={"list": [types.SimpleNamespace(factor=1)]})
    Table.factor, Table.factors = 1, {"a": 1}
    with wrap(ReadsSettings(), tmp_path / "cache") as cached:
        assert [cached[index] for index in range(3)] == [0, 1, 2]
        change()
        with pytest.raises(InvalidValueError, match=rf"the {what} of tests\..* has been changed since"):
            cached[4]


@dataclasses.dataclass
class Options:
    size: int = 2
    step: int = 0
    losses: list[float] = dataclasses.field(default_factory=list)
    inner: Any = None


CONFIG: dict[str, Any] = {}


class ByConfig(Dataset[Any]):
    """Reads settings of a global dict that a training loop writes to."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> int:
        return index * int(CONFIG["size"]) + int(CONFIG["inner"]["shift"])


def test_an_element_of_a_dict_that_reading_does_not_name_may_change(
    wrap: Callable[..., Any], tmp_path: Path
) -> None:
    CONFIG.clear()
    CONFIG.update(size=2, step=0, inner={"shift": 1, "lr": 0.1})
    with wrap(ByConfig(), tmp_path / "cache") as cached:
        for index in range(5):
            assert cached[index] == 2 * index + 1
            CONFIG["step"] += 1
            CONFIG[f"loss {index}"] = CONFIG["inner"]["lr"] = 0.5 / (index + 1)
        assert list(cached) == [2 * index + 1 for index in range(10)]
    changes: list[tuple[Callable[[], object], str]] = [
        (lambda: CONFIG.update(size=3), r"part \['size'\]"),
        (lambda: CONFIG["inner"].update(shift=3), r"part \['inner'\]\['shift'\]"),
    ]
    for change, what in changes:
        with wrap(ByConfig(), tmp_path / f"cache of {len(what)}") as cached:
            before = cached[3]
            change()
            with pytest.raises(InvalidValueError, match=rf"the {what} of global 'CONFIG' of tests\."):
                cached[4]
            assert before == cached[3]


def _prepare(CONFIG: dict[str, Any]) -> int:  # noqa: N803 - the name of the global is the point
    CONFIG = dict(CONFIG)  # noqa: N806
    CONFIG["n"] = 0
    return int(CONFIG["n"])


class PreparesConfig(ByConfig):
    def __getitem__(self, index: int) -> int:
        return super().__getitem__(index) + _prepare({})


def test_a_write_to_a_local_variable_of_a_globals_name_is_none_to_the_global(
    wrap: Callable[..., Any], tmp_path: Path
) -> None:
    CONFIG.clear()
    CONFIG.update(size=2, inner={"shift": 1})
    with wrap(PreparesConfig(), tmp_path / "cache") as cached:
        assert cached[3] == 7
        CONFIG["size"] = 3
        with pytest.raises(InvalidValueError, match="of global 'CONFIG' of tests"):
            cached[4]


@dataclasses.dataclass(slots=True)
class SlotsOfLoop:
    size: int = 2
    step: int = 0


class ModelOfLoop(pydantic.BaseModel):
    size: int = 2
    step: int = 0


class StructOfLoop(msgspec.Struct):
    size: int = 2
    step: int = 0


LOOP: Any = None


class ByLoop(Dataset[Any]):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> int:
        return index * int(LOOP.size)


@pytest.mark.parametrize(
    "make",
    [SlotsOfLoop, ModelOfLoop, StructOfLoop, lambda: OmegaConf.create({"size": 2, "step": 0})],
    ids=["slots", "pydantic", "msgspec", "OmegaConf"],
)
def test_settings_of_every_kind_change_where_reading_names_them(
    wrap: Callable[..., Any], make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{__name__}.LOOP", make())
    with wrap(ByLoop(), tmp_path / "cache") as cached:
        for index in range(5):
            assert cached[index] == 2 * index
            LOOP.step += 1
        assert list(cached) == [2 * index for index in range(10)]
    with wrap(ByLoop(), tmp_path / "another") as cached:
        assert cached[3] == 6
        LOOP.size = 3
        with pytest.raises(InvalidValueError, match=r"the part \.size of global 'LOOP' of tests\."):
            cached[4]


OPTIONS: Any = Options()


def _show(options: Any) -> None:
    del options


class ByOptions(Dataset[Any]):
    """Reads settings of a global that a training loop writes to."""

    def __init__(self) -> None:
        self.step, self.size, self.scale = OPTIONS.step, OPTIONS.size, OPTIONS.inner.scale

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> float:
        return float(index * OPTIONS.size * OPTIONS.inner.scale)


class HandsOptionsOn(ByOptions):
    def __getitem__(self, index: int) -> float:
        _show(OPTIONS)
        return super().__getitem__(index)


@pytest.fixture(params=[Options, lambda **given: argparse.Namespace(step=0, losses=[], **given)])
def options(request: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    made = request.param(size=1, inner=types.SimpleNamespace(scale=1, seen=0))
    monkeypatch.setattr(f"{__name__}.OPTIONS", made)
    return made


def test_a_setting_that_reading_does_not_name_may_change(
    wrap: Callable[..., Any], options: Any, tmp_path: Path
) -> None:
    with wrap(ByOptions(), tmp_path / "cache") as cached:
        for index in range(10):
            assert cached[index] == index
            options.losses.append(0.5)
            options.inner.seen += 1
        assert list(cached) == [*range(10)]


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda options: setattr(options, "size", 3), "attribute 'size' of global 'OPTIONS'"),
        (
            lambda options: setattr(options.inner, "scale", 3),
            "attribute 'scale' of attribute 'inner' of global 'OPTIONS'",
        ),
    ],
)
def test_a_setting_that_reading_names_may_not(
    wrap: Callable[..., Any], options: Any, change: Callable[[Any], object], what: str, tmp_path: Path
) -> None:
    with wrap(ByOptions(), tmp_path / "cache") as cached:
        assert cached[3] == 3
        change(options)
        with pytest.raises(InvalidValueError, match=rf"the {what} of tests\..* has been changed since"):
            cached[4]


def test_each_setting_counts_of_an_object_that_others_are_handed(
    wrap: Callable[..., Any], options: Any, tmp_path: Path
) -> None:
    with wrap(HandsOptionsOn(), tmp_path / "cache") as cached:
        assert cached[3] == 3
        options.losses.append(0.5)
        with pytest.raises(InvalidValueError, match="the attribute 'losses' of global 'OPTIONS'"):
            cached[4]


def test_hits_alone_ask_for_no_globals(options: Any, tmp_path: Path) -> None:
    with CachedDataset(ByOptions(), tmp_path / "cache") as cached:
        before = cached.__getitems__([*range(10)])
        options.size = 3
        assert cached.__getitems__([*range(10)]) == before


def test_large_globals_are_digested_once_where_workers_are_forked(
    wrap: Callable[..., Any], options: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(changes, "_SLOW", -1.0)
    with wrap(ByOptions(), tmp_path / "cache") as cached:
        monkeypatch.setattr(changes, "outside_of", lambda code: pytest.fail("digested anew"))
        loader: Any = DataLoader(cached, batch_size=5, num_workers=1, multiprocessing_context="fork")
        for _ in range(2):
            assert [number for batch in loader for number in batch.tolist()] == [*range(10)]
        monkeypatch.undo()
        monkeypatch.setattr(f"{__name__}.OPTIONS", Options(size=3, inner=options.inner))
        with pytest.raises(InvalidValueError, match="global 'OPTIONS'"):
            list(loader)


class Meter:
    """Counts what it is asked, and has a setting that a method changes."""

    def __init__(self) -> None:
        self.seen, self.scale = [0], 1

    def scaled(self, index: int) -> int:
        self.seen.append(index)
        return index * self.scale

    def grow(self) -> None:
        self.scale += 1


METER: Any = None


class ByMeter(Dataset[Any]):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> int:
        return int(METER.scaled(index))


def test_an_object_may_change_by_the_methods_that_reading_calls_and_by_no_others(
    wrap: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{__name__}.METER", Meter())
    with wrap(ByMeter(), tmp_path / "cache") as cached:
        assert cached[3] == 3
        METER.scaled(5)
        assert cached[4] == 4
        METER.grow()
        with pytest.raises(InvalidValueError, match="the attribute 'scale' of global 'METER'"):
            cached[5]


class Log:
    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, index: int) -> None:
        with self.path.open("a") as file:
            file.write(f"{index}\n")


LOG: Any = None


class WithLog(Dataset[Any]):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> int:
        LOG.write(index)
        return index


def test_a_log_that_workers_append_to_is_no_change(
    wrap: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "log").write_text("begins\n")
    monkeypatch.setattr(f"{__name__}.LOG", Log(tmp_path / "log"))
    with wrap(WithLog(), tmp_path / "cache") as cached:
        loader: Any = DataLoader(cached, batch_size=1, num_workers=2, multiprocessing_context="fork")
        for _ in range(3):
            assert [number for batch in loader for number in batch.tolist()] == [*range(10)]


class CountsCalls(torch.nn.Module):
    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x


class CountsInBuffer(Dataset[Any]):
    def __init__(self) -> None:
        self.module = CountsCalls()

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Any:
        return self.module(torch.tensor(index))


def test_a_buffer_that_counts_calls_is_the_datasets_own_business(
    wrap: Callable[..., Any], tmp_path: Path
) -> None:
    dataset = CountsInBuffer()
    with wrap(dataset, tmp_path / "cache") as cached:
        assert cached[3] == 3
        dataset.module.calls += 1  # as another worker does, with which torch shares the memory
        assert cached[4] == 4


def test_a_helper_that_is_defined_once_more_as_it_was_changes_nothing(
    wrap: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    again = types.FunctionType(scaled.__code__, scaled.__globals__, "scaled")
    with wrap(ByHelper(), tmp_path / "cache") as cached:
        assert cached[3] == 3
        monkeypatch.setattr(f"{__name__}.scaled", again)
        assert cached[4] == 4


_latest: Any = None


def _keep_latest(index: int) -> Any:
    global _latest
    before, _latest = _latest, [index]
    return before


class KeepsLatest(Dataset[Any]):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> int:
        _keep_latest(index)
        return index


def test_globals_that_reads_themselves_bind_anew_are_no_change(
    wrap: Callable[..., Any], tmp_path: Path
) -> None:
    with wrap(KeepsLatest(), tmp_path / "cache") as cached:
        assert [cached[index] for index in range(10)] == [*range(10)]


# --- encoders -----------------------------------------------------------------------------------------------


FACTOR = 2


def times(x: torch.Tensor) -> torch.Tensor:
    return x * FACTOR


def test_weights_that_are_written_to_give_other_embeddings(tmp_path: Path) -> None:
    x = torch.ones(4, 3)
    linear = torch.nn.Linear(3, 2).requires_grad_(False)
    encoder = CachedEncoder(linear, store=tmp_path / "store")

    def assert_computed_with_these_weights(x: torch.Tensor) -> None:
        # Equal rows are computed once, and a batch of another size may round the last bit otherwise.
        torch.testing.assert_close(encoder(x), linear(x))

    for _ in range(3):
        assert_computed_with_these_weights(x)
        with torch.no_grad():
            linear.weight.mul_(2)
        assert_computed_with_these_weights(x)
        linear.weight.data = torch.rand(2, 3)
    linear.weight = torch.nn.Parameter(torch.rand(2, 3), requires_grad=False)
    assert_computed_with_these_weights(x + 1)
    assert_computed_with_these_weights(x)


def test_globals_of_an_encoders_function_may_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(4, 3)
    encoder = CachedEncoder(times, store=tmp_path / "store")
    assert encoder(x)[0].tolist() == [2, 2, 2]
    monkeypatch.setattr(f"{__name__}.FACTOR", 3)
    assert encoder(x)[0].tolist() == [3, 3, 3]
    monkeypatch.undo()
    assert encoder(x)[0].tolist() == [2, 2, 2]


# --- changes by other people's tools


@dataclasses.dataclass(slots=True)
class Scale:
    by: float

    def __call__(self, x: float) -> float:
        return x * self.by


class Slotted(Dataset[Any]):
    __slots__ = ("by",)

    def __init__(self) -> None:
        self.by = 1.0

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> float:
        return index * self.by


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.act, self.weight = torch.nn.Identity(), torch.nn.Parameter(torch.ones(3))

    def forward(self, x: float) -> Any:
        return (self.act(torch.full((3,), float(x))) * self.weight).sum().item()


class Holding(Dataset[Any]):
    """Makes its samples with a function, a value, and an attribute of the class."""

    size = 1

    def __init__(self, get: Callable[[Any, int], Any], value: Any = None) -> None:
        self.get, self.value = get, value

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return self.get(self, index)


class Stack(list[Any]):
    pass


def step(data: Any, **options: Any) -> None:
    data.value.weight.grad = torch.ones(3)
    torch.optim.AdamW(data.value.parameters(), 5.0, **options).step()


GLOBAL_NET = Net()


def of_net(data: Any, index: int) -> float:
    return float(data.value(index))


def hook(module: Any, given: Any, output: Any) -> Any:
    return output * 100


_OTHER_CHANGES: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "an attribute in __slots__": (Slotted, lambda data: setattr(data, "by", 9.0)),
    "a slot of a transform": (
        lambda: Holding(lambda data, index: data.value(index), Scale(1.0)),
        lambda data: setattr(data.value, "by", 9.0),
    ),
    "a hook": (lambda: Holding(of_net, Net()), lambda data: data.value.register_forward_hook(hook)),
    "a step": (lambda: Holding(of_net, Net()), step),
    "a fused step": (lambda: Holding(of_net, Net()), lambda data: step(data, fused=True)),
    "another activation": (
        lambda: Holding(of_net, Net()), lambda data: setattr(data.value, "act", torch.nn.Threshold(9, 3)),
    ),
    "a namespace": (
        lambda: Holding(lambda data, index: index * data.value.k, types.SimpleNamespace(k=1)),
        lambda data: setattr(data.value, "k", 9),
    ),
    "an attribute of the class": (
        lambda: Holding(lambda data, index: index * data.size), lambda data: setattr(Holding, "size", 9),
    ),
    "a deque": (
        lambda: Holding(lambda data, index: index * len(data.value), collections.deque([1])),
        lambda data: data.value.append(9),
    ),
    "a set": (
        lambda: Holding(lambda data, index: index * len(data.value), {1}), lambda data: data.value.add(9),
    ),
    "a list of a class of one's own": (
        lambda: Holding(lambda data, index: index * data.value[0], Stack([1])),
        lambda data: data.value.__setitem__(0, 9),
    ),
    "an array of records": (
        lambda: Holding(
            lambda data, index: index * int(data.value["k"][0]), np.ones(3, dtype=[("k", "i4"), ("j", "i4")])
        ),
        lambda data: data.value["k"].fill(9),
    ),
    "bytes": (
        lambda: Holding(lambda data, index: index * data.value[0], bytearray(b"\1")),
        lambda data: data.value.__setitem__(0, 9),
    ),
    "a tensor through NumPy": (
        lambda: Holding(lambda data, index: index * float(data.value[0]), torch.ones(3)),
        lambda data: data.value.numpy().fill(9),
    ),
    "a global model": (
        lambda: Holding(lambda data, index: GLOBAL_NET(index)),
        lambda data: GLOBAL_NET.weight.data.fill_(9),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", _OTHER_CHANGES)
def test_changes_by_other_tools_are_an_error_and_leave_nothing(
    wrap: Callable[..., Any], name: str, tmp_path: Path
) -> None:
    make, change = _OTHER_CHANGES[name]
    data = make()
    try:
        with wrap(data, tmp_path / "cache") as cached:
            cached[0]
            change(data)
            with pytest.raises(InvalidValueError, match="has been changed since"):
                cached[2]
    finally:
        Holding.size = 1
        GLOBAL_NET.weight.data.fill_(1)
    fresh = make()
    with wrap(fresh, tmp_path / "cache") as again:
        assert [again[index] for index in range(4)] == [fresh[index] for index in range(4)]


class Counting(Holding):
    """Counts its reads and its objects in the class."""

    reads = made = 0

    def __init__(self, get: Callable[[Any, int], Any]) -> None:
        super().__init__(get)
        Counting.made += 1

    def __getitem__(self, index: int) -> Any:
        Counting.reads += 1
        return super().__getitem__(index)


def test_what_a_dataset_counts_in_its_class_is_no_change(wrap: Callable[..., Any], tmp_path: Path) -> None:
    data = Counting(lambda data, index: index)
    with wrap(data, tmp_path / "cache") as cached:
        for index in range(4):
            Counting(lambda data, index: index)[0]  # another one counts beside it
            assert cached[index] == index


def test_a_module_of_the_name_of_torchs_compiled_ones_is_a_module(
    wrap: Callable[..., Any], tmp_path: Path
) -> None:
    class OptimizedModule(torch.nn.Module):
        pass

    held = OptimizedModule()
    with wrap(Holding(lambda data, index: index), tmp_path / "cache") as cached:
        cached._data.net = held
        cached._changes.note()
        assert [cached[index] for index in range(4)] == [0, 1, 2, 3]


_PROGRAM = """
import dataclasses, enum, sys
from typing import NamedTuple
from torch.utils.data import DataLoader, Dataset
from castore import Store
from castore.adapters.torch import CachedDataset

@dataclasses.dataclass
class Config:
    size: int = 3

class Mode(enum.Enum):
    FAST = 1

class Bits(enum.Flag):
    ONE = 1
    TWO = 2

class Pair(NamedTuple):
    left: int = 5

class Plain:
    def scaled(self, number):
        return number * 7

CONFIG, MODE, PAIR, PLAIN, TABLE = Config(), Mode.FAST, Pair(), Plain(), {Mode.FAST: 2}

class Numbers(Dataset):
    def __len__(self):
        return 3

    def __getitem__(self, index):
        bits = Bits(1 + index % 2 * 2).value
        return index * CONFIG.size + MODE.value + PAIR.left + PLAIN.scaled(index) + TABLE[MODE] + bits

def key_of(index):
    return [Store(sys.argv[1]).cached(lambda mode, pair: CONFIG).cache_name(MODE, PAIR)]

if __name__ == "__main__":
    Bits(3)  # it is noted in the class from now on
    cached = CachedDataset(Numbers(), sys.argv[1])
    loader = DataLoader(cached, num_workers=1, multiprocessing_context="spawn", collate_fn=list)
    print([sample for [sample] in loader], [Numbers()[index] for index in range(3)])
    [[name]] = DataLoader([0], num_workers=1, multiprocessing_context="spawn", collate_fn=key_of)
    print(name == key_of(0)[0])
"""


def test_objects_of_a_programs_own_classes_are_no_change_in_a_spawned_worker(tmp_path: Path) -> None:
    """Regression: there the program's module has another name, and so had the classes of its globals."""
    (tmp_path / "program.py").write_text(_PROGRAM)
    ended = subprocess.run(
        [sys.executable, str(tmp_path / "program.py"), str(tmp_path / "store")],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "[9, 21, 29] [9, 21, 29]\nTrue\n"


# A loader's worker prefetches: it goes on after an error. The module changes between wrapping and workers.
EDITED_MEANWHILE = """
import sys
from pathlib import Path
from torch.utils.data import DataLoader
from castore import InvalidValueError
from castore.adapters.torch import CachedDataset, LazyShardDataset

if __name__ == "__main__":
    import scaled
    data = scaled.Scaled()
    cached = CachedDataset(data, sys.argv[1])
    Path(scaled.__file__).write_text(Path(scaled.__file__).read_text().replace("return 2", "return 33"))
    loader = DataLoader(cached, batch_size=2, num_workers=1, multiprocessing_context="spawn", collate_fn=list)
    batches = iter(loader)
    for _ in range(4):
        try:
            next(batches)
        except InvalidValueError as error:
            assert "has been changed since the dataset was wrapped" in str(error), error
        else:
            raise AssertionError("a sample of changed code")
    del batches
    assert [int(cached[index]) for index in range(8)] == [0, 2, 4, 6, 8, 10, 12, 14]
"""
SCALED = """
import torch

def scale():
    return 2

class Scaled(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.tensor(index * scale())
"""


def test_a_worker_whose_code_differs_keeps_nothing_after_its_first_error_either(tmp_path: Path) -> None:
    (tmp_path / "scaled.py").write_text(SCALED)
    (tmp_path / "program.py").write_text(EDITED_MEANWHILE)
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, "-B", str(tmp_path / "program.py"), str(tmp_path / "store")]
    subprocess.run(command, check=True, env=environment, cwd=tmp_path, timeout=120)
