"""A caller that changes a result or an input changes neither the stored result nor that of another caller."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pytest

from castore import Store
from castore.adapters.datasets import (
    DatasetCache,
    Pipeline,
    PipelineConfig,
    cached_filter,
    cached_map,
    wait,
)
from castore.adapters.datasets.tables import find_whole_files
from castore.recipes.pipeline_config import CacheStageConfig
from castore.system import mappings as mappings_module
from tests.adapters.datasets.owned_job import (
    PLAIN,
    WAYS,
    Ran,
    both,
    first,
    is_even,
    nothing,
    texts,
    tokens,
    told,
)
from tests.warm import WarmPython


def parts_of(result: Any) -> Iterator[datasets.Dataset]:
    yield from result.values() if isinstance(result, dict) else [result]


def leave(dataset: datasets.Dataset) -> None:
    with dataset:
        pass


def edit_features(dataset: datasets.Dataset) -> None:
    dataset.info.features["number"] = datasets.Value("int8")
    dataset.info.features.clear()


def describe(dataset: datasets.Dataset) -> None:
    dataset.info.description = "mine"


HARMS: dict[str, Callable[[datasets.Dataset], Any]] = {
    "set_format": lambda data: data.set_format("numpy", columns=["number"]),
    "set_transform": lambda data: data.set_transform(lambda batch: {"mine": [0] * len(batch["number"])}),
    "with": leave,
    "info": describe,
    "features": edit_features,
}


def in_a_new_process(warm_datasets: WarmPython, store: Store, way: str) -> Any:
    program = "from tests.adapters.datasets.owned_job import main; main()"
    done = warm_datasets.run(["-c", program, store.path, way], text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("way", WAYS)
def test_a_new_process_gets_what_the_step_made_not_what_its_caller_made_of_it(
    way: str, store: Store, warm_datasets: WarmPython
) -> None:
    with store.index.write():  # no commit is possible before the caller has finished
        for part in parts_of(WAYS[way](texts(), store)):
            part.set_format("numpy", columns=["number"])
            part.info.description = "mine"
    wait()
    assert in_a_new_process(warm_datasets, store, way) == {"told": told(PLAIN[way](texts())), "ran": 0}


def _with_harms(names: Iterable[str]) -> Iterator[Any]:
    """Each name with every other harm, in turn; `make torture` has all of both."""
    for place, name in enumerate(names):
        for number, harm in enumerate(HARMS):
            yield pytest.param(name, harm, marks=[pytest.mark.matrix] * ((place + number) % 2))


@pytest.mark.parametrize(("way", "harm"), _with_harms(WAYS))
def test_nothing_that_a_caller_does_to_a_result_is_kept(way: str, harm: str, store: Store) -> None:
    expected = told(PLAIN[way](texts()))
    with store.index.write():
        result = WAYS[way](texts(), store)
        while_pending = WAYS[way](texts(), store)
        for mine, other in zip(parts_of(result), parts_of(while_pending), strict=True):
            assert mine is not other
            assert mine._info is not other._info
            HARMS[harm](mine)
        assert told(while_pending) == expected
        for other in parts_of(while_pending):
            HARMS[harm](other)
        assert told(WAYS[way](texts(), store)) == expected
    wait()
    before = Ran.count
    assert told(WAYS[way](texts(), store)) == expected
    assert Ran.count == before


def test_a_function_over_a_kept_step_sees_all_its_columns_whoever_set_a_format(store: Store) -> None:
    with store.index.write():
        cached_map(texts(), tokens, store=store).set_format("numpy", columns=["ids"])
    wait()
    kept = cached_map(texts(), tokens, store=store)
    assert cached_map(kept, first, store=store)["first"][:] == texts().map(tokens).map(first)["first"][:]


def test_a_result_within_a_with_block_is_kept(store: Store) -> None:
    with store.index.write(), cached_map(texts(), tokens, store=store):
        pass
    wait()
    before = Ran.count
    with cached_map(texts(), tokens, store=store) as again:
        assert again["ids"][3] == [4, 4, 4, 3]
    assert Ran.count == before


_IN_MEMORY: dict[str, Callable[[np.ndarray[Any, Any]], datasets.Dataset]] = {
    "a table over the array": lambda array: datasets.Dataset(
        datasets.table.InMemoryTable(pa.table({"number": pa.array(array)}))
    ),
    "a column of the array": lambda array: datasets.Dataset.from_dict({"x": [""] * len(array)}).add_column(
        "number", array
    ),
}


@pytest.mark.parametrize("step", [is_even, nothing])
@pytest.mark.parametrize("way", _IN_MEMORY)
def test_an_array_that_is_written_to_after_the_call_is_kept_as_it_was(
    way: str, step: Any, store: Store
) -> None:
    def make(numbers: np.ndarray[Any, Any]) -> datasets.Dataset:
        cached = cached_filter if step is is_even else cached_map
        return cached(_IN_MEMORY[way](numbers), step, store=store)

    array = np.arange(50)
    expected = [number for number in range(50) if step is nothing or number % 2 == 0]
    with store.index.write():
        result = make(array)
        array[:] = -1
        assert make(np.arange(50))["number"][:] == expected  # the put is pending
    next_step = cached_map(result, tenfold, batched=True, store=store)
    wait()
    assert make(np.arange(50))["number"][:] == result["number"][:] == expected
    # The next step is stored under the key of the unchanged rows.
    assert next_step["number"][:] == [10 * number for number in expected]
    again = cached_map(make(np.arange(50)), tenfold, batched=True, store=store)
    assert again["number"][:] == next_step["number"][:]


def test_features_that_a_caller_edited_count_for_the_next_step(store: Store) -> None:
    labels = datasets.Features({"label": datasets.ClassLabel(names=["good", "bad"])})
    labelled = datasets.Dataset.from_dict({"label": [0, 1]}, features=labels)
    step = cached_map(labelled, nothing, store=store)
    wait()
    step.info.features["label"].names[:] = ["cat", "dog"]
    assert cached_map(step, nothing, store=store).features["label"].names == ["cat", "dog"]
    wait()
    again = cached_map(labelled, nothing, store=store)
    assert cached_map(again, nothing, store=store).features["label"].names == ["good", "bad"]


@pytest.mark.parametrize(("kind", "harm"), _with_harms(["memory", "disk", "hierarchical"]))
def test_a_result_of_a_pipeline_is_its_callers_own(kind: Any, harm: str, tmp_path: Path) -> None:
    config = PipelineConfig([texts()], CacheStageConfig(cache_dir=str(tmp_path / "cache"), cache_type=kind))
    expected = told(texts().map(tokens).map(first))
    for _ in range(3):
        result = config.run([tokens, first])[0]
        assert told(result.dataset) == expected
        HARMS[harm](result.dataset)
        result.steps.clear()


def test_a_pipeline_that_changes_nothing_leaves_its_input_alone(store: Store) -> None:
    mine = texts()
    for pipeline in (Pipeline([], store=store), Pipeline([nothing], store=store, use_cache=False)):
        result = pipeline.run(mine).dataset
        result.set_format("numpy")
        result.info.description = "mine"
    assert told(mine) == told(texts())


@pytest.mark.parametrize("harm", HARMS)
def test_a_dataset_by_name_is_its_callers_own(harm: str, cache: DatasetCache) -> None:
    given, expected = both(texts()), told(both(texts()))
    cache.put("both", given)
    for part in parts_of(given):
        HARMS[harm](part)
    for _ in range(2):
        got = cache.get("both")
        assert told(got) == expected
        for part in parts_of(got):
            HARMS[harm](part)


def write(path: Path, value: int) -> None:
    new = path.with_suffix(".new")
    table = pa.table({"number": pa.array([value] * 400_000)})
    with pa.OSFile(str(new), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)
    new.replace(path)


def tenfold(batch: dict[str, list[int]]) -> dict[str, list[int]]:
    return {"number": [10 * number for number in batch["number"]]}


@pytest.fixture(params=["asked for one", "read as text"])
def mappings(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's answer about mapped files, of Linux 6.11 and of older ones."""
    if request.param == "read as text":
        monkeypatch.setattr(mappings_module, "_CODE", 0xC06866FF)  # no kernel knows this one


def a_file_replaced(folder: Path) -> tuple[datasets.Dataset, datasets.Dataset]:
    """A dataset of ones, and one of twos whose file lies at the path of the ones by now."""
    path = folder / "rows.arrow"
    write(path, 1)
    old = datasets.Dataset.from_file(str(path))
    write(path, 2)
    return old, datasets.Dataset.from_file(str(path))


def a_folder_moved(folder: Path) -> tuple[datasets.Dataset, datasets.Dataset]:
    """The same, where the folder of the ones was moved away, and another one put in its place."""
    place, other = folder / "rows", folder / "other"
    for made, value in ((place, 1), (other, 2)):
        datasets.Dataset.from_dict({"number": [value] * 400_000}).save_to_disk(made)
    old = datasets.load_from_disk(place)
    place.rename(folder / "aside")
    other.rename(place)
    return old, datasets.load_from_disk(place)


@pytest.mark.usefixtures("mappings")
@pytest.mark.parametrize("step", [tenfold, None])
@pytest.mark.parametrize("exchange", [a_file_replaced, a_folder_moved])
def test_rows_that_were_loaded_are_not_those_that_lie_at_their_path_by_now(
    exchange: Callable[[Path], tuple[datasets.Dataset, datasets.Dataset]],
    step: Any,
    store: Store,
    tmp_path: Path,
) -> None:
    (old, new), cache = exchange(tmp_path), DatasetCache(store)
    factor = 1 if step is None else 10
    assert cached_map(old, step, batched=True, store=store)["number"][:2] == [factor] * 2
    wait()
    assert cached_map(new, step, batched=True, store=store)["number"][:2] == [2 * factor] * 2
    cache.put("old", old)
    assert cache.get("old")["number"][:2] == [1, 1]


@pytest.mark.usefixtures("mappings")
def test_a_file_behind_links_whose_name_is_odd_is_known_as_the_file_of_its_rows(tmp_path: Path) -> None:
    folder = tmp_path / "odd\nname (deleted)"
    folder.mkdir()
    write(folder / "rows.arrow", 1)
    (tmp_path / "link").symlink_to(folder)
    path = tmp_path / "link" / "rows.arrow"
    loaded = datasets.Dataset.from_file(str(path))
    assert find_whole_files(loaded) == [str(path)]
    path.rename(tmp_path / "aside")
    assert find_whole_files(loaded) is None
    path.symlink_to(tmp_path / "aside")
    assert find_whole_files(loaded) == [str(path)]
