"""cached_map and cached_filter return the results of datasets, and run once for each state of their input."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import PIL.Image
import pyarrow as pa
import pytest

from castore import Store
from castore.adapters.datasets import CacheWarning, cached_filter, cached_map, wait
from castore.adapters.datasets.background import pending_puts
from castore.errors import InvalidValueError, UnhashableError
from tests.adapters.datasets.small_blocks import small_blocks, told
from tests.helpers import flip, payload
from tests.warm import WarmPython

#: The calls of the functions below, in this process.
runs: list[str] = []


class Ran:
    """Notes that a function ran; the note does not count in keys."""

    def __castore_key__(self) -> str:
        return "Ran"

    def __call__(self) -> None:
        runs.append("ran")


ran = Ran()


def size(sample: dict[str, Any]) -> dict[str, Any]:
    ran()
    return {"size": len(sample["text"])}


def size_of_batch(batch: dict[str, list[Any]], extra: int = 0) -> dict[str, list[Any]]:
    ran()
    return {"size": [len(text) + extra for text in batch["text"]]}


def is_long(sample: dict[str, Any]) -> bool:
    ran()
    return len(sample["text"]) > 10_000


@pytest.fixture(autouse=True)
def _count_anew() -> None:
    runs.clear()


def again(make: Callable[[], datasets.Dataset]) -> bool:
    """Whether a call runs anything."""
    wait()
    before = len(runs)
    make()
    return len(runs) > before


def test_a_result_is_that_of_datasets_and_runs_once(store: Store, texts: datasets.Dataset) -> None:
    first = cached_map(texts, size, store=store)
    assert first[:] == texts.map(size)[:]
    wait()
    before = len(runs)
    second = cached_map(texts, size, store=store)
    assert second[:] == first[:]
    assert second._fingerprint == first._fingerprint
    assert second.features == first.features
    assert len(runs) == before


def test_a_filter_is_that_of_datasets_and_runs_once(store: Store, texts: datasets.Dataset) -> None:
    first = cached_filter(texts, is_long, store=store)
    assert first[:] == texts.filter(is_long)[:]
    assert 0 < len(first) < len(texts)
    assert not again(lambda: cached_filter(texts, is_long, store=store))
    assert cached_filter(texts, is_long, store=store)[:] == first[:]


def test_what_is_on_its_way_to_the_store_is_a_hit(store: Store, texts: datasets.Dataset) -> None:
    cached_map(texts, size, store=store)
    before = len(runs)
    cached_map(texts, size, store=store)
    assert len(runs) == before


@pytest.mark.parametrize(
    "other",
    [
        {"num_proc": 2}, {"writer_batch_size": 7}, {"batch_size": 3}, {"desc": "x"}, {"keep_in_memory": True},
        {"load_from_cache_file": True}, {"batched": False}, {"remove_columns": None}, {"fn_kwargs": {}},
    ],
    ids=str,
)  # fmt: skip
def test_what_cannot_change_the_result_does_not_count(
    other: dict[str, Any], store: Store, texts: datasets.Dataset
) -> None:
    cached_map(texts, size, store=store)
    assert not again(lambda: cached_map(texts, size, store=store, **other))


def count_of_batch(samples: dict[str, list[Any]]) -> dict[str, list[int]]:
    return {"count": [len(samples["text"])] * len(samples["text"])}


@pytest.mark.parametrize("size", [None, -1])
def test_a_batch_of_all_rows_is_one_for_each_process(
    store: Store, texts: datasets.Dataset, size: int | None
) -> None:
    for processes in (1, 2):
        given: dict[str, Any] = {"batched": True, "batch_size": size, "num_proc": processes}
        ours = cached_map(texts, count_of_batch, store=store, **given)
        assert ours["count"] == texts.map(count_of_batch, **given)["count"]
    assert {*ours["count"]} == {len(texts) // 2, (len(texts) + 1) // 2}


@pytest.mark.parametrize(
    "other",
    [
        {"remove_columns": ["name"]}, {"fn_kwargs": {"extra": 1}}, {"batch_size": 3},
        {"batch_size": 50, "drop_last_batch": True},
        {"features": datasets.Features({
            "text": datasets.Value("string"), "name": datasets.Value("string"),
            "number": datasets.Value("int64"),
            "size": datasets.Value("int32"),
        })},
    ],
    ids=lambda other: next(iter(other)),
)  # fmt: skip
def test_what_can_change_the_result_counts(
    other: dict[str, Any], store: Store, texts: datasets.Dataset
) -> None:
    cached_map(texts, size_of_batch, store=store, batched=True)
    made = []
    assert again(lambda: made.append(cached_map(texts, size_of_batch, store=store, batched=True, **other)))
    plain = texts.map(size_of_batch, batched=True, **other)
    assert made[0][:] == plain[:]
    assert made[0].features == plain.features


def test_running_it_anew_can_be_asked_for(store: Store, texts: datasets.Dataset) -> None:
    cached_map(texts, size, store=store)
    assert again(lambda: cached_map(texts, size, store=store, load_from_cache_file=False))


_INPUTS: dict[str, Callable[[datasets.Dataset], datasets.Dataset]] = {
    "other rows": lambda data: data.select(range(10)),
    "another order": lambda data: data.shuffle(seed=1),
    "one value": lambda data: data.map(lambda s: {"text": s["text"] + ("x" if s["number"] == 50 else "")}),
    "another format": lambda data: data.with_format("numpy"),
    "another name": lambda data: data.rename_column("number", "n"),
    "another type": lambda data: data.cast_column("number", datasets.Value("int32")),
}


@pytest.mark.parametrize("change", _INPUTS)
def test_another_input_is_another_result(change: str, store: Store, texts: datasets.Dataset) -> None:
    cached_map(texts, size, store=store)
    assert again(lambda: cached_map(_INPUTS[change](texts), size, store=store))


_SAME: dict[str, Callable[[datasets.Dataset, Path], datasets.Dataset]] = {
    "made again": lambda data, _: datasets.Dataset.from_dict(data[:]),
    "cut elsewhere": lambda data, _: datasets.concatenate_datasets(
        [data.select(range(30)), data.select(range(30, len(data)))]
    ),
    "formatted and back": lambda data, _: data.with_format("numpy").with_format(None),
}


@pytest.mark.parametrize("way", _SAME)
def test_the_same_rows_are_the_same_input(
    way: str, store: Store, texts: datasets.Dataset, tmp_path: Path
) -> None:
    cached_map(texts, size, store=store)
    assert not again(lambda: cached_map(_SAME[way](texts, tmp_path), size, store=store))


def test_a_file_that_changed_is_another_input(store: Store, tmp_path: Path) -> None:
    for content in ("one\ntwo\n", "one\ntoo\n"):
        (tmp_path / "lines.txt").write_text(content)
        loaded = datasets.load_dataset("text", data_files=str(tmp_path / "lines.txt"), split="train")
        assert again(lambda: cached_map(loaded, size, store=store))  # noqa: B023
        assert not again(lambda: cached_map(loaded, size, store=store))  # noqa: B023


@pytest.mark.parametrize("nested", [False, True])
def test_images_that_rows_name_are_a_part_of_the_input(nested: bool, store: Store, tmp_path: Path) -> None:
    image = tmp_path / "one.png"
    features = datasets.Features({"image": datasets.List(datasets.Image()) if nested else datasets.Image()})

    def pixel(sample: dict[str, Any]) -> dict[str, Any]:
        ran()
        shown = sample["image"][0] if nested else sample["image"]
        return {"pixel": list(shown.getpixel((0, 0)))}

    for side, color in ((8, [255, 0, 0]), (16, [0, 0, 255])):
        PIL.Image.new("RGB", (side, side), tuple(color)).save(image)
        named = [str(image)] if nested else str(image)
        pictures = datasets.Dataset.from_dict({"image": [named]}, features=features)
        assert cached_map(pictures, pixel, store=store)["pixel"][0] == color
        wait()
        before = len(runs)
        assert cached_map(pictures, pixel, store=store)["pixel"][0] == color
        assert len(runs) == before


def numbered(sample: dict[str, Any]) -> dict[str, Any]:
    ran()
    return {"number": 1}


def corner(sample: dict[str, Any]) -> dict[str, Any]:
    ran()
    return {"pixel": list(sample["image"].getpixel((0, 0)))}


def pictures(folder: Path, color: tuple[int, ...]) -> datasets.Dataset:
    PIL.Image.new("RGB", (8, 8), color).save(folder / "one.png")
    features = datasets.Features({"image": datasets.Image()})
    return datasets.Dataset.from_dict({"image": [str(folder / "one.png")]}, features=features)


def test_an_image_that_changes_between_two_steps_is_another_input_of_the_second(
    store: Store, tmp_path: Path
) -> None:
    first = cached_map(pictures(tmp_path, (255, 0, 0)), numbered, store=store)
    wait()
    assert cached_map(first, corner, store=store, remove_columns="image")["pixel"][0] == [255, 0, 0]
    pictures(tmp_path, (0, 0, 255))
    assert cached_map(first, corner, store=store, remove_columns="image")["pixel"][0] == [0, 0, 255]
    assert not again(lambda: cached_map(first, corner, store=store, remove_columns="image"))


def test_an_image_that_changes_before_its_row_is_stored_is_another_input_of_the_next_step(
    store: Store, tmp_path: Path
) -> None:
    cached_map(pictures(tmp_path, (0, 0, 0)), corner, store=store, remove_columns="image")
    wait()
    pool, go_on = pending_puts._pool, threading.Event()
    assert pool is not None
    pool.submit(go_on.wait)  # before the calls below
    source = pictures(tmp_path, (255, 0, 0))
    old = (tmp_path / "one.png").stat()
    cached_map(source, numbered, store=store)
    pictures(tmp_path, (0, 0, 255))
    go_on.set()
    wait()
    assert cached_map(cached_map(source, numbered, store=store), corner, store=store, remove_columns="image")[
        "pixel"
    ][0] == [0, 0, 255]
    pictures(tmp_path, (255, 0, 0))
    os.utime(tmp_path / "one.png", ns=(old.st_atime_ns, old.st_mtime_ns))
    assert cached_map(cached_map(source, numbered, store=store), corner, store=store, remove_columns="image")[
        "pixel"
    ][0] == [255, 0, 0]


def test_chains_over_images_are_hits_whether_their_files_or_their_bytes_are_at_hand(
    store: Store, tmp_path: Path
) -> None:
    source = pictures(tmp_path, (1, 2, 3))

    def chain() -> datasets.Dataset:
        return cached_map(
            cached_map(source, numbered, store=store), corner, store=store, remove_columns="image"
        )

    chain()
    assert not again(chain)  # the bytes of the files come from the store, as in a later process
    (tmp_path / "one.png").touch()
    assert again(chain)


def test_chains_are_hits_from_their_first_link(store: Store, texts: datasets.Dataset) -> None:
    def chain() -> datasets.Dataset:
        return cached_filter(cached_map(texts, size, store=store), is_long, store=store)

    first = chain()
    assert not again(chain)
    assert chain()[:] == first[:]


def test_splits_are_cached_one_by_one(store: Store, texts: datasets.Dataset) -> None:
    both = datasets.DatasetDict({"train": texts, "test": texts.select(range(5))})
    result = cached_map(both, size, store=store)
    assert isinstance(result, datasets.DatasetDict)
    assert result["test"][:] == texts.select(range(5)).map(size)[:]
    assert not again(lambda: cached_map(texts.select(range(5)), size, store=store, on_mixed_types=None))


def _of_several_types(sample: dict[str, Any]) -> dict[str, Any]:
    return {"several": len(sample["text"]) if "1" in sample["text"] else "none"}


def test_a_dictionary_has_the_defaults_of_its_own_map(store: Store) -> None:
    """Values of several types are JSON in a dataset, and an error in a dictionary of datasets."""
    rows = datasets.Dataset.from_dict({"text": ["1", "2", "11"]})
    assert told(cached_map(rows, _of_several_types, store=store)) == told(rows.map(_of_several_types))
    both = datasets.DatasetDict({"train": rows})
    with pytest.raises(pa.ArrowException) as plain:
        both.map(_of_several_types)
    with pytest.raises(plain.type, match=re.escape(str(plain.value))):
        cached_map(both, _of_several_types, store=store)
    arguments: dict[str, Any] = {"on_mixed_types": "use_json"}
    assert told(cached_map(both, _of_several_types, store=store, **arguments)) == told(
        both.map(_of_several_types, **arguments)
    )


def _named(sample: dict[str, Any], split: str) -> dict[str, Any]:
    ran()
    return {"split": f"{split} {sample['text']}"}


def _named_batch(text: list[str], indices: list[int], split: str) -> dict[str, Any]:
    ran()
    return {"split": [f"{split} {index} {value}" for index, value in zip(indices, text, strict=True)]}


async def _named_later(sample: dict[str, Any], split: str) -> dict[str, Any]:
    return _named(sample, split)


_WITH_SPLIT: dict[str, tuple[Any, dict[str, Any]]] = {
    "sample": (_named, {}),
    "batch": (
        _named_batch,
        {"batched": True, "batch_size": 3, "with_indices": True, "input_columns": "text"},
    ),
    "coroutine": (_named_later, {}),
}


@pytest.mark.parametrize("case", _WITH_SPLIT)
def test_a_function_of_a_dictionary_gets_the_name_of_the_split(store: Store, case: str) -> None:
    function, arguments = _WITH_SPLIT[case]
    same = _named if function is _named_later else function  # plain datasets leaves event loops open
    rows = datasets.Dataset.from_dict({"text": ["a", "b", "c", "d"]})
    both = datasets.DatasetDict({"train": rows, datasets.Split.TEST: rows})
    streams = datasets.IterableDatasetDict({name: part.to_iterable_dataset() for name, part in both.items()})
    expected = told(both.map(same, with_split=True, **arguments))
    lists = {name: list(part) for name, part in streams.map(same, with_split=True, **arguments).items()}
    for number in range(2):
        runs.clear()
        ours = cached_map(both, function, store=store, with_split=True, **arguments)
        assert told(ours) == expected
        found = cached_map(streams, function, store=store, with_split=True, **arguments)
        assert {name: list(part) for name, part in found.items()} == lists
        assert bool(runs) is not bool(number)
        wait()


def test_a_dictionary_takes_names_of_cache_files_and_uses_none(store: Store, tmp_path: Path) -> None:
    both = datasets.DatasetDict({"train": datasets.Dataset.from_dict({"text": ["a", "b"]})})
    names = {"train": str(tmp_path / "cache.arrow")}
    assert cached_map(both, size, store=store, cache_file_names=names)["train"]["size"][:] == [1, 1]
    kept = cached_filter(both, is_long, store=store, cache_file_names=names)
    assert len(kept["train"]) == 0
    assert not (tmp_path / "cache.arrow").exists()
    with pytest.raises(InvalidValueError, match=r"DatasetDict\.map has no argument 'cache_file_name'"):
        cached_map(both, size, store=store, cache_file_name="a")


_PROGRAM = """
import sys, datasets
sys.path.insert(0, sys.argv[2])
import steps
from castore import Store
from castore.adapters.datasets import cached_map, wait
datasets.disable_progress_bars()
texts = datasets.Dataset.from_dict({"text": ["a", "bb", "ccc"]})
first = cached_map(texts, steps.first, store=Store(sys.argv[1]))
result = cached_map(first, steps.second, store=Store(sys.argv[1]))
print(len(steps.runs), result["n"][:], result._fingerprint)
"""
_STEPS = """
from inner import measure
import logging, threading
runs, lock, log = [], threading.Lock(), logging.getLogger("steps")
class Noted:
    def __castore_key__(self): return "noted"
    def append(self, x): runs.append(x)
noted = Noted()
def first(sample):
    with lock: noted.append(1)
    return {"n": measure(sample["text"])}
def second(sample):
    noted.append(2)
    return {"n": sample["n"] + 1}
"""


def _run(warm_datasets: WarmPython, store: Store, folder: Path, seed: str = "") -> list[str]:
    """The output of the program in another process: with a seed of hashes, in a fresh Python."""
    (folder / "program.py").write_text(_PROGRAM)
    words = [str(folder / "program.py"), str(store.path), str(folder)]
    if seed:
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(__file__).parents[3])}
        done = subprocess.run(
            [sys.executable, *words], env=environment, capture_output=True, text=True, timeout=300
        )
    else:
        done = warm_datasets.run(words, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split(maxsplit=1)


def test_editing_an_imported_function_is_noticed_in_another_process(
    store: Store, tmp_path: Path, warm_datasets: WarmPython
) -> None:
    """datasets' issue 3297: dill pickles an imported function by its name alone."""
    (tmp_path / "steps.py").write_text(_STEPS)
    (tmp_path / "inner.py").write_text("def measure(text): return len(text)\n")
    runs, report = _run(warm_datasets, store, tmp_path)
    assert runs == "6"
    assert report.startswith("[2, 3, 4]")
    assert _run(warm_datasets, store, tmp_path, "77") == ["0", report]
    (tmp_path / "inner.py").write_text("def measure(text): return len(text) * 10\n")
    runs, other = _run(warm_datasets, store, tmp_path)
    assert runs == "6"
    assert other.startswith("[11, 21, 31]")


def test_a_program_that_ends_at_once_has_stored_its_results(
    store: Store, tmp_path: Path, warm_datasets: WarmPython
) -> None:
    (tmp_path / "steps.py").write_text(_STEPS)
    (tmp_path / "inner.py").write_text("def measure(text): return len(text)\n")
    _run(warm_datasets, store, tmp_path)
    assert sum(entry.name.endswith("state.json") for entry in store.entries("steps")) == 2
    assert not [path for path in (store.path / "work").iterdir() if path.is_dir()]


_IN_ONE_PIECE = """
import random, sys, datasets
from castore import Store
from castore.adapters.datasets import cached_map
datasets.disable_progress_bars()
def some(row): return {"text": row["text"].upper()} if row["n"] < 1500 else None
words = random.Random(1).choices("abcdef", k=30_000)
texts = ["".join(words[n:n + 10_000]) for n in range(3000)]
texts = datasets.Dataset.from_dict({"n": range(3000), "text": texts})
cached_map(texts, some, store=Store(sys.argv[1]))
"""


def test_a_program_that_ends_at_once_has_stored_a_result_in_one_piece(
    store: Store, warm_datasets: WarmPython
) -> None:
    """Threads store it while the program goes on, and Python starts no more of these at its end."""
    done = warm_datasets.run(["-c", _IN_ONE_PIECE, store.path], text=True)
    assert done.returncode == 0, done.stderr
    assert "ran as one piece" in done.stderr
    assert "was not stored" not in done.stderr
    assert sum(entry.name.endswith("state.json") for entry in store.entries("steps")) == 1


def test_storing_does_not_delay_whoever_goes_on(
    store: Store, texts: datasets.Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store is blocked, and the next step still gets its input. A step of many blocks waits."""
    texts = texts.select(range(20))  # one block
    with store.index.write():  # no other connection can commit
        first = cached_map(texts, size, store=store)
        assert first[:3]["size"] == [len(text) for text in texts[:3]["text"]]
        second = first.map(lambda sample: {"twice": 2 * sample["size"]})
        assert len(second) == len(texts)
    wait()
    assert not again(lambda: cached_map(texts, size, store=store))


def test_what_cannot_be_hashed_is_an_error_and_a_fingerprint_helps(
    store: Store, texts: datasets.Dataset
) -> None:
    handle = threading.Thread(target=print)
    stream = iter([1])

    def function(sample: dict[str, Any]) -> dict[str, Any]:
        ran()
        return {"n": str((handle, stream))}

    def unhashable(sample: dict[str, Any]) -> dict[str, Any]:
        return {"n": sqlite.total_changes}

    import sqlite3

    sqlite = sqlite3.connect(":memory:")
    with pytest.raises(UnhashableError, match=r"closure 'sqlite'.*fingerprint="):
        cached_map(texts, unhashable, store=store)
    first = cached_map(texts, unhashable, store=store, fingerprint="v1")
    assert set(first["n"]) == {0}
    wait()
    assert cached_map(texts, unhashable, store=store, fingerprint="v1")._fingerprint == first._fingerprint
    assert cached_map(texts, unhashable, store=store, fingerprint="v2")._fingerprint != first._fingerprint
    sqlite.close()


def test_a_function_that_fails_is_not_cached(store: Store, texts: datasets.Dataset) -> None:
    def fails(sample: dict[str, Any]) -> dict[str, Any]:
        raise RuntimeError("no")

    for _ in range(2):
        with pytest.raises(RuntimeError, match="no"):
            cached_map(texts, fails, store=store)
    assert not list(store.entries("steps"))
    assert not list((store.path / "work").rglob("*.arrow"))


def test_a_damaged_result_runs_again_and_says_so(store: Store, texts: datasets.Dataset) -> None:
    cached_map(texts, size, store=store)
    wait()
    name = next(entry.name for entry in store.entries("steps") if entry.name.endswith(".arrow"))
    path, offset, length = payload(store, name)
    flip(path, offset + length // 2)
    with pytest.warns(CacheWarning, match="damaged and runs again"):
        second = cached_map(texts, size, store=store)
    assert second[:] == texts.map(size)[:]
    assert not again(lambda: cached_map(texts, size, store=store))


def test_what_cannot_be_stored_is_said_and_the_result_is_good(
    tmp_path: Path, texts: datasets.Dataset
) -> None:
    store = Store(tmp_path / "small", max_size=50_000)
    with pytest.warns(CacheWarning, match="ran as one piece.*no room"):
        result = cached_map(texts, size, store=store)
    with pytest.warns(CacheWarning, match="was not stored"):
        wait()
    assert result[:] == texts.map(size)[:]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wait()  # one warning


def test_an_empty_dataset_is_as_datasets_has_it(store: Store, texts: datasets.Dataset) -> None:
    none = texts.select([])
    was = none._fingerprint
    for _ in range(2):
        result = cached_map(none, size, store=store, remove_columns=["name"])
        assert result.column_names == none.map(size, remove_columns=["name"]).column_names
        wait()
    assert none._fingerprint == was


def test_rows_of_extension_types_are_an_input_like_any_other(store: Store) -> None:
    grid = datasets.Array2D((2, 2), "int32")
    features = datasets.Features(
        {"any": datasets.Json(), "all": datasets.List(datasets.Json()), "grids": datasets.List(grid)}
    )
    rows = {"any": [{"x": 1}, [1, None], "text"], "all": [[1, "a"]] * 3, "grids": [[[[1, 2], [3, 4]]]] * 3}
    dataset = datasets.Dataset.from_dict(rows, features=features)

    def kinds(sample: dict[str, Any]) -> dict[str, Any]:
        return {"kind": type(sample["any"]).__name__, "any": {"was": sample["any"]}}

    result = cached_map(dataset, kinds, store=store)
    wait()
    for kept in (result, cached_map(dataset, kinds, store=store)):
        assert kept.to_list() == dataset.map(kinds).to_list()
        assert kept.features == dataset.map(kinds).features
    other = datasets.Dataset.from_dict({**rows, "any": [{"x": 2}, [1, None], "text"]}, features=features)
    assert cached_map(other, kinds, store=store)[0]["any"] == {"was": {"x": 2}}


def test_bad_arguments_say_what_to_do(store: Store, texts: datasets.Dataset) -> None:
    with pytest.raises(InvalidValueError, match="no argument 'num_procs'"):
        cached_map(texts, size, store=store, num_procs=2)
    with pytest.raises(InvalidValueError, match=r"store=Store\('cache'\)"):
        cached_map(texts, size, store="cache")  # type: ignore[arg-type]
    with pytest.raises(InvalidValueError, match="fingerprint="):
        cached_map(texts, size, store=store, new_fingerprint="x")
    with pytest.raises(InvalidValueError, match="or IterableDataset, not list"):
        cached_map([texts], size, store=store)


def test_a_result_has_the_description_and_the_ids_of_the_present_input(store: Store) -> None:
    for text in ("one", "only", "other", "one"):
        features = datasets.Features({"n": datasets.Value("int64", id=f"the id {text[:2]}")})
        info = datasets.DatasetInfo(text, license=f"of {text}", features=features)
        data = datasets.Dataset.from_dict({"n": list(range(20))}, info=info)
        plain = data.map(lambda row: {"more": row["n"] + 1}).filter(lambda row: row["n"] % 2)
        for _ in range(2):
            result = cached_map(data, lambda row: {"more": row["n"] + 1}, store=store)
            result = cached_filter(result, lambda row: row["n"] % 2, store=store)
            assert (result.info.description, result.info.license) == (text, f"of {text}")
            assert result.features.to_dict() == plain.features.to_dict()


@pytest.mark.parametrize("batched", [False, True])
def test_the_format_of_a_filter_over_several_blocks_names_columns_that_are_there(
    store: Store, batched: bool
) -> None:
    """`flatten` leaves names in the format of columns that it has replaced."""

    def keep(row: dict[str, Any]) -> Any:
        return [number > 1 for number in row["i"]] if batched else row["i"] > 1

    nested = datasets.Dataset.from_dict({"s": [{"x": 1}, {"x": 2}] * 300, "i": [1, 2] * 300, "h": [0] * 600})
    formatted = nested.with_format("numpy", columns=["s", "i"]).flatten()
    with small_blocks():
        kept = cached_filter(formatted, keep, batched=batched, store=store)
    plain = formatted.filter(keep, batched=batched)
    assert kept.format == plain.format
    assert [*kept.with_format(**kept.format)[0]] == [*plain[0]]
