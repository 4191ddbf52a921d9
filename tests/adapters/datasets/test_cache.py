"""A DatasetCache returns what was put, mapped, whether the object, a mount or a copy serves the mapping."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pytest
from PIL import Image

from castore import Store
from castore.adapters.datasets import CacheWarning, DatasetCache
from castore.adapters.datasets.dataset_entries import read_file
from castore.adapters.datasets.mapped_files import COPIES_FOLDER
from castore.adapters.datasets.stored_table import SMALL_BYTES
from castore.errors import InvalidValueError, NameConflictError, NotFoundError, SerializationError
from castore_fuse import mounted
from tests.clocks import pass_time
from tests.helpers import flip, in_processes, payload

Make = Callable[[datasets.Dataset], Any]


@pytest.fixture
def large(sources: dict[str, list[object]]) -> datasets.Dataset:
    """Large enough to be mapped."""
    data = datasets.Dataset.from_dict(sources)
    assert data._data.nbytes > 2 * SMALL_BYTES
    return data


def rows(dataset: datasets.Dataset) -> dict[str, list[Any]]:
    return dict(dataset.with_format(None)[:])


_SHAPES: dict[str, Make] = {
    "plain": lambda data: data,
    "selected": lambda data: data.select([5, 3, 3, 100]),
    "shuffled": lambda data: data.shuffle(seed=3),
    "filtered": lambda data: data.filter(lambda sample: sample["number"] % 3 == 0),
    "mapped": lambda data: data.map(lambda sample: {"size": len(sample["text"])}),
    "cut": lambda data: data.select(range(7, 90)),
    "of several": lambda data: datasets.concatenate_datasets([data, data.shuffle(seed=1)]),
    "side by side": lambda data: datasets.concatenate_datasets(
        [data, data.rename_columns({name: f"{name}2" for name in data.column_names})], axis=1
    ),
    "renamed": lambda data: data.rename_column("text", "body").remove_columns("number"),
    "empty": lambda data: data.select([]),
    "torch": lambda data: data.with_format("torch", columns=["number"], output_all_columns=True),
    "a split": lambda data: datasets.Dataset(data._data, split=datasets.Split.TEST),
}


@pytest.mark.parametrize("shape", _SHAPES)
def test_what_comes_back_is_what_was_put(shape: str, cache: DatasetCache, large: datasets.Dataset) -> None:
    if shape == "torch":
        pytest.importorskip("torch")
    put = _SHAPES[shape](large)
    cache.put("a/set", put)
    got = cache.get("a/set")
    assert type(got) is datasets.Dataset
    assert rows(got) == rows(put)
    assert (got.features, got.split, got.format, got._fingerprint) == (
        put.features, put.split, put.format, put._fingerprint,
    )  # fmt: skip
    assert len(got) == len(put)


def test_features_survive(cache: DatasetCache, tmp_path: Path) -> None:
    picture = tmp_path / "picture.png"
    Image.fromarray(np.arange(48, dtype="u1").reshape(4, 4, 3)).save(picture)
    features = datasets.Features({
        "label": datasets.ClassLabel(names=["no", "yes"]),
        "image": datasets.Image(),
        "ids": datasets.Sequence(datasets.Value("int16")),
        "matrix": datasets.Array2D((2, 2), "float32"),
        "nested": {"a": datasets.Value("string"), "b": [{"c": datasets.Value("bool")}]},
        "both": datasets.Translation(languages=["en", "fr"]),
    })  # fmt: skip
    row = {
        "label": "yes", "image": str(picture), "ids": [1, -2], "matrix": [[1, 2], [3, 4]],
        "nested": {"a": None, "b": [{"c": True}]}, "both": {"en": "yes", "fr": "oui"},
    }  # fmt: skip
    put = datasets.Dataset.from_list([row, row], features=features)
    put.info.description = "two rows"
    cache.put("features", put)
    picture.unlink()  # the store still has the bytes
    got = cache.get("features")
    assert got.features == features
    assert got.info.description == "two rows"
    assert got[1]["image"].getpixel((1, 0)) == (3, 4, 5)
    assert got[0]["label"] == 1
    assert got.features["label"].int2str(1) == "yes"
    assert got[0]["nested"] == row["nested"]


def test_a_dictionary_of_datasets_comes_back_as_one(cache: DatasetCache, large: datasets.Dataset) -> None:
    put = datasets.DatasetDict({"train": large, "test": large.select([2, 1])})
    cache.put("both", put)
    got = cache.get("both")
    assert type(got) is datasets.DatasetDict
    assert list(got) == ["train", "test"]
    assert rows(got["train"]) == rows(large)
    assert got["test"]["number"][:] == [2, 1]


def test_an_iterable_dataset_is_read_once_and_comes_back_iterable(cache: DatasetCache) -> None:
    runs = []

    def source() -> Any:
        runs.append(1)
        yield from ({"n": n, "text": f"row {n}"} for n in range(2500))

    put = datasets.IterableDataset.from_generator(source)
    cache.put("stream", put)
    at_put = len(runs)
    got = cache.get("stream")
    assert type(got) is datasets.IterableDataset
    assert list(got) == [{"n": n, "text": f"row {n}"} for n in range(2500)]
    assert list(got.take(2)) == [{"n": 0, "text": "row 0"}, {"n": 1, "text": "row 1"}]
    assert len(runs) == at_put
    assert got.features == datasets.Features({"n": datasets.Value("int64"), "text": datasets.Value("string")})


def test_a_stream_decompresses_only_what_is_read(cache: DatasetCache, large: datasets.Dataset) -> None:
    many = datasets.concatenate_datasets([large.shuffle(seed=seed) for seed in range(8)])
    cache.put("many", many)
    stream = cache.stream("many")
    assert next(iter(stream)) == many[0]
    assert [sample["number"] for sample in stream] == many["number"][:]
    assert not list(cache.store.entries(COPIES_FOLDER))


def test_a_stream_whose_name_was_put_anew_says_so_once_its_bytes_are_gone(cache: DatasetCache) -> None:
    cache.put("rows", datasets.Dataset.from_dict({"x": [1, 2]}))
    stream = cache.stream("rows")
    assert [row["x"] for row in stream] == [1, 2]
    cache.put("rows", datasets.Dataset.from_dict({"x": [3]}))
    cache.store.gc(grace=0)
    with pytest.raises(NotFoundError, match=r"a stream of 'rows' .* put anew or removed.* call stream again"):
        next(iter(stream))
    assert [row["x"] for row in cache.stream("rows")] == [3]


def test_a_stream_is_shared_among_the_workers_of_a_loader(
    cache: DatasetCache, large: datasets.Dataset
) -> None:
    pytest.importorskip("torch")
    from torch.utils.data import DataLoader

    cache.put("large", large)
    stream = cache.stream("large").select_columns(["number"])
    seen = [int(n) for batch in DataLoader(stream, batch_size=7, num_workers=2) for n in batch["number"]]
    assert sorted(seen) == large["number"][:]


# --- damage -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", ["data-00000-of-00001.arrow", "state.json", "dataset_info.json"])
def test_a_damaged_dataset_is_a_miss_and_says_so(
    file: str, cache: DatasetCache, large: datasets.Dataset
) -> None:
    cache.put("large", large)
    path, offset, length = payload(cache.store, f"large/{file}")
    flip(path, offset + length // 2)
    with pytest.warns(CacheWarning, match="'large'.* is damaged"):
        assert cache.get("large") is None
    assert not cache.contains("large")
    cache.put("large", large)
    assert rows(cache.get("large")) == rows(large)


def test_damage_is_found_before_it_is_mapped_through_a_mount(
    cache: DatasetCache, large: datasets.Dataset, tmp_path: Path
) -> None:
    """A mapped page that fails its check would end the process."""
    cache.put("large", large)
    path, offset, length = payload(cache.store, "large/data-00000-of-00001.arrow")
    flip(path, offset + length // 2)
    with mounted(cache.store, tmp_path / "mnt"), pytest.warns(CacheWarning, match="is damaged"):
        assert cache.get("large") is None


def test_a_dataset_of_which_gc_took_a_part_is_a_miss(cache: DatasetCache, large: datasets.Dataset) -> None:
    cache.put("large", large)
    cache.store.delete("large/data-00000-of-00001.arrow")
    assert cache.get("large") is None
    assert not list(cache.store.entries("large"))


# --- names --------------------------------------------------------------------------------------------------


def test_a_name_put_again_is_the_new_dataset_and_nothing_of_the_old(
    cache: DatasetCache, large: datasets.Dataset
) -> None:
    cache.put("x", datasets.DatasetDict({"train": large, "test": large}))
    cache.put("x", large.select([1]))
    assert cache.get("x")["number"][:] == [1]
    cache.put("x", datasets.DatasetDict({"train": large.select([2])}))
    assert cache.get("x")["train"]["number"][:] == [2]
    names = [entry.name for entry in cache.store.entries("x")]
    assert names == [
        "x/dataset_dict.json", "x/train/data-00000-of-00001.arrow", "x/train/dataset_info.json",
        "x/train/state.json",
    ]  # fmt: skip


def test_invalidating_one_or_all_leaves_what_is_no_dataset(
    cache: DatasetCache, large: datasets.Dataset
) -> None:
    cache.store.put("other/file", b"bytes")
    cache.store.put("a/notes.txt", b"bytes")
    for name in ("a", "b", "c/d"):
        cache.put(name, large.select([1]))
    assert cache.invalidate("a")
    assert not cache.invalidate("a")
    assert [cache.contains(name) for name in ("a", "b", "c/d")] == [False, True, True]
    assert cache.invalidate()
    assert [entry.name for entry in cache.store.entries()] == ["a/notes.txt", "other/file"]


def test_a_dataset_expires(tmp_path: Path, large: datasets.Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = DatasetCache(tmp_path / "store", ttl=1000)
    cache.put("brief", large.select([1]))
    assert cache.get("brief") is not None
    pass_time(monkeypatch, 2000)
    assert not cache.contains("brief")
    assert cache.get("brief") is None


def test_readers_see_one_dataset_whole_or_the_next(cache: DatasetCache, large: datasets.Dataset) -> None:
    versions = [
        large.select([number] * (number + 1)).map(lambda s: {"v": s["number"]}) for number in range(4)
    ]
    cache.put("moving", versions[0])

    def task(number: int) -> set[tuple[int, ...]]:
        mine = DatasetCache(Store(cache.store.path, memory=0))
        seen = set()
        for turn in range(12):
            if number:
                got = mine.get("moving")
                seen.add(tuple(got["v"]))
                assert len(got) == got["v"][0] + 1
            else:
                mine.put("moving", versions[turn % 4])
        return seen

    for seen in in_processes(3, task)[1:]:
        assert seen <= {(number,) * (number + 1) for number in range(4)}


def test_a_codec_is_what_is_stored(tmp_path: Path, large: datasets.Dataset) -> None:
    for codec in ("zstd", "lz4", "gzip", "none"):
        cache = DatasetCache(tmp_path / codec, codec=codec)
        cache.put("large", large)
        entry = cache.store.entry("large/data-00000-of-00001.arrow")
        assert entry is not None
        assert entry.codec == codec
        assert rows(cache.get("large")) == rows(large)


def test_bad_arguments_say_what_to_do(cache: DatasetCache, large: datasets.Dataset, tmp_path: Path) -> None:
    with pytest.raises(InvalidValueError, match="keeps datasets, not list"):
        cache.put("x", [1, 2])
    with pytest.raises(SerializationError, match=r"with_format\(None\)"):
        cache.put("x", large.with_transform(lambda batch: batch))
    with pytest.raises(InvalidValueError, match="zip"):
        DatasetCache(tmp_path / "other", codec="zip")
    with pytest.raises(InvalidValueError, match="has its own budget"):
        DatasetCache(cache.store, max_size="1GB")
    cache.store.put("file", b"")
    with pytest.raises(NameConflictError):
        cache.put("file", large)
    assert not list(cache.store.path.joinpath("tmp").iterdir())


def test_a_put_that_fails_leaves_the_dataset_before(cache: DatasetCache, large: datasets.Dataset) -> None:
    cache.put("x", large.select([1]))

    def broken() -> Any:
        yield {"n": 1}
        raise RuntimeError("the source broke")

    with pytest.raises(RuntimeError, match="the source broke"):
        cache.put("x", datasets.IterableDataset.from_generator(broken))
    assert cache.get("x")["number"][:] == [1]
    assert not list(cache.store.path.joinpath("tmp").iterdir())


def test_arrow_files_are_read_by_others(cache: DatasetCache, large: datasets.Dataset) -> None:
    cache.put("large", large)
    with warnings.catch_warnings(), cache.store.open("large/data-00000-of-00001.arrow") as file:
        table = pa.ipc.open_stream(file).read_all()
    assert table["number"].to_pylist() == large["number"][:]


def test_a_file_that_expires_while_it_is_read_is_missing_and_not_damaged(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put("file", b"1", ttl="1h")
    get = store.get

    def late(name: str) -> bytes | None:
        pass_time(monkeypatch, 7200)
        return get(name)

    assert read_file(store, "file") == b"1"
    monkeypatch.setattr(store, "get", late)
    with pytest.raises(NotFoundError):
        read_file(store, "file")


@pytest.mark.parametrize("split", ["", None, 1, b"train"])
@pytest.mark.parametrize("kind", [datasets.DatasetDict, datasets.IterableDatasetDict])
def test_splits_without_a_name_of_text_are_refused(cache: DatasetCache, kind: type, split: Any) -> None:
    data: Any = datasets.Dataset.from_dict({"a": [1]})
    if kind is datasets.IterableDatasetDict:
        data = data.to_iterable_dataset()
    with pytest.raises(InvalidValueError, match=r"cannot name a split; give the splits names"):
        cache.put("x", kind({"train": data, split: data}))
    assert cache.get("x") is None


def test_splits_may_be_named_as_datasets_names_them(cache: DatasetCache) -> None:
    data = datasets.Dataset.from_dict({"a": [1]})
    cache.put("x", datasets.DatasetDict({datasets.Split.TRAIN: data}))
    assert [*cache.get("x")] == ["train"]
    assert rows(cache.get("x")["train"]) == {"a": [1]}
