"""Checkpoints take 3 x S by construction: they are links to the files that steps read, and are compressed at
the end.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import datasets
import pytest

from castore import Store
from castore.adapters.datasets import CacheWarning, Pipeline, scratch
from tests.adapters.datasets.noting import Adds


class DropsLast:
    """A deduplicator that drops one row."""

    def compute_hash(self, sample: dict[str, Any]) -> dict[str, Any]:
        return {**sample, "hash": sample["number"]}

    def process(self, data: datasets.Dataset) -> datasets.Dataset:
        return data.select(range(len(data) - 1))


class KeepsMost:
    """A filter with small statistics."""

    def compute_stats(self, sample: dict[str, Any]) -> dict[str, Any]:
        return sample

    def process(self, sample: dict[str, Any]) -> bool:
        return len(sample["text"]) > 2


FALLS = {"os.remove", "os.rename", "os.truncate", "shutil.rmtree"}  # the events arrive before their actions
_looking: list[Callable[[], None]] = []


@cache  # an audit hook cannot be removed
def _listen() -> None:
    def listen(event: str, _: tuple[Any, ...]) -> None:
        if _looking and event in FALLS:
            _looking[-1]()

    sys.addaudithook(listen)


@contextmanager
def peak_of(*folders: Path) -> Iterator[Callable[[], int]]:
    """The disk space of folders at the worst moment, just before a file is removed. A file of many names
    counts once.
    """
    worst = 0

    def taken() -> int:
        found = {}
        # Not `Path.rglob`, which raises an error when a folder is removed meanwhile.
        for place, below, files in chain.from_iterable(map(os.walk, folders)):
            for name in (*below, *files):
                with suppress(FileNotFoundError):
                    status = os.lstat(os.path.join(place, name))
                    found[status.st_ino] = status.st_blocks * 512
        return sum(found.values())

    def look() -> None:
        nonlocal worst
        worst = max(worst, taken())

    _listen()
    _looking.append(look)
    try:
        yield lambda: worst
        look()
    finally:
        _looking.remove(look)


@pytest.mark.parametrize("codec", ["zstd", pytest.param("none", marks=pytest.mark.matrix)])
def test_the_peak_on_disk_stays_within_three_copies(
    store: Store, texts: datasets.Dataset, tmp_path: Path, codec: str
) -> None:
    datasets.concatenate_datasets([texts] * 6).save_to_disk(tmp_path / "input")
    source = datasets.load_from_disk(tmp_path / "input")
    assert isinstance(source, datasets.Dataset)
    size = sum(path.stat().st_size for path in (tmp_path / "input").iterdir())
    operators = [Adds("a"), KeepsMost(), Adds("b"), DropsLast(), Adds("c")]

    def run(*more: Any) -> datasets.Dataset:
        steps = [*operators, *more]
        return Pipeline(steps, store=store, name="demo", codec=codec, use_checkpoint=True).run(source).dataset

    folders = [tmp_path / "input", *(store.path / name for name in ("objects", "work", "tmp"))]
    with peak_of(*folders) as peak:
        result = run()
    # The run's input, a step's input and its output; a hundredth for the column of statistics and blocks
    # half full.
    assert 2.5 * size < peak() < 3.03 * size
    plain = Pipeline(operators, store=store, use_cache=False).run(source).dataset
    assert result[:] == plain[:]
    del result, plain
    # The checkpoint of a finished run is compressed: the copy that a longer run reads replaces it.
    scratch.remove_unused(
        set(store.path.glob("work/*/*/*.arrow")), set()
    )  # the first run's process has ended
    with peak_of(*folders) as peak:
        longer = run(Adds("d"))
    assert 2.5 * size < peak() < 3.03 * size
    assert longer["text"][-1].endswith("abcd")


class Fails:
    """Keeps the run from finishing."""

    def process(self, sample: dict[str, Any]) -> dict[str, Any]:
        raise RuntimeError("not today")


@pytest.fixture
def source(texts: datasets.Dataset, tmp_path: Path) -> datasets.Dataset:
    """A dataset in files of the user."""
    texts.save_to_disk(tmp_path / "mine")
    loaded = datasets.load_from_disk(tmp_path / "mine")
    assert isinstance(loaded, datasets.Dataset)
    return loaded


def stopped(store: Store, source: datasets.Dataset, *operators: Any, **options: Any) -> None:
    """A run that ends after those operators."""
    with pytest.raises(RuntimeError, match="not today"):
        Pipeline([*operators, Fails()], store=store, name="demo", use_checkpoint=True, **options).run(source)


def resumed(store: Store, source: datasets.Dataset, *operators: Any) -> datasets.Dataset:
    """A run of those operators, all of which must be done already."""
    result = Pipeline(operators, store=store, name="demo", use_checkpoint=True).run(source)
    assert [step.hit for step in result.steps] == [True] * len(result.steps)
    return result.dataset


def stored(store: Store) -> list[tuple[str, str]]:
    return [
        (entry.name.rpartition("/")[2], entry.codec)
        for entry in store.entries("checkpoints/demo")
        if entry.size > 1 << 20
    ]


def test_between_steps_a_checkpoint_is_a_second_name_and_at_the_end_it_is_compressed(
    store: Store, source: datasets.Dataset
) -> None:
    stopped(store, source, Adds("a"))
    assert stored(store) == [("data-00000-of-00001.arrow", "none")]
    Pipeline([Adds("a"), Adds("b")], store=store, name="demo", use_checkpoint=True).run(source)
    assert stored(store) == [("data-00000-of-00001.arrow", "zstd")]
    assert len(list(store.path.glob("objects/??/*"))) == 1
    assert store.verify().bad == []


@pytest.mark.parametrize("last", [KeepsMost(), DropsLast()], ids=lambda operator: type(operator).__name__)
def test_what_a_filter_or_a_deduplicator_left_comes_back_from_files_that_have_more(
    store: Store, source: datasets.Dataset, last: Any, tmp_path: Path
) -> None:
    stopped(store, source, Adds("a"), last)
    assert [codec for _, codec in stored(store)] == ["none"]
    again = resumed(store, source, Adds("a"), last)
    plain = Pipeline([Adds("a"), last], store=store, use_cache=False).run(source).dataset
    assert len(again) < len(source) or isinstance(last, KeepsMost)
    assert again[:] == plain[:]
    assert (again.features, again[3]) == (plain.features, plain[3])


def test_no_other_program_takes_the_files_of_a_selection_for_the_dataset(
    store: Store, source: datasets.Dataset, tmp_path: Path
) -> None:
    stopped(store, source, Adds("a"), DropsLast())
    for entry in store.entries("checkpoints/demo"):
        path = tmp_path / "seen" / entry.name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(store.get(entry.name) or b"")
    with pytest.raises(KeyError, match="_data_files"):
        datasets.load_from_disk(tmp_path / "seen/checkpoints/demo")


class Brings:
    """A deduplicator that returns another dataset."""

    def __init__(self, other: datasets.Dataset) -> None:
        self.other = other

    def compute_hash(self, sample: dict[str, Any]) -> dict[str, Any]:
        return {**sample, "hash": 0}

    def process(self, data: datasets.Dataset) -> datasets.Dataset:
        return self.other


def test_files_of_the_users_are_never_linked(store: Store, source: datasets.Dataset, tmp_path: Path) -> None:
    def seen() -> list[tuple[int, int]]:
        return [(path.stat().st_mode, path.stat().st_nlink) for path in (tmp_path / "mine").iterdir()]

    before = seen()
    stopped(store, source, Brings(source))
    assert stored(store) == [("data-00000-of-00001.arrow", "zstd")]
    assert seen() == before
    assert resumed(store, source, Brings(source))[:] == source[:]


def test_where_no_link_leads_or_the_budget_is_small_a_checkpoint_is_compressed_at_once(
    store: Store, source: datasets.Dataset, tmp_path: Path
) -> None:
    shm = Path("/dev/shm")
    assert os.stat(shm).st_dev != os.stat(tmp_path).st_dev
    with tempfile.TemporaryDirectory(dir=shm) as elsewhere:
        stopped(store, source, Adds("a"), temp_dir=elsewhere)
    assert stored(store) == [("data-00000-of-00001.arrow", "zstd")]
    with Store(tmp_path / "small", max_size="3MB", memory=0) as small:
        stopped(small, source, Adds("a"))
        assert stored(small) == [("data-00000-of-00001.arrow", "zstd")]


def test_resumed_steps_tell_their_rows(store: Store, source: datasets.Dataset) -> None:
    operators = [Adds("a"), DropsLast(), Adds("b")]
    first = Pipeline(operators, store=store, name="demo", use_checkpoint=True).run(source)
    again = Pipeline(operators, store=store, name="demo", use_checkpoint=True).run(source)
    rows = len(source)
    report = [(rows, rows), (rows, rows - 1), (rows - 1, rows - 1)]
    assert [(step.rows_in, step.rows_out) for step in first.steps] == report
    assert [(step.rows_in, step.rows_out) for step in again.steps] == report


def test_a_project_below_another_keeps_its_checkpoint(store: Store, source: datasets.Dataset) -> None:
    for name in ("demo", "demo/inner"):
        Pipeline([Adds("a")], store=store, name=name, use_checkpoint=True).run(source)
    with pytest.warns(CacheWarning, match="starting over"):
        Pipeline([Adds("z")], store=store, name="demo", use_checkpoint=True).run(source)
    inner = Pipeline([Adds("a")], store=store, name="demo/inner", use_checkpoint=True).run(source)
    assert [step.hit for step in inner.steps] == [True]
