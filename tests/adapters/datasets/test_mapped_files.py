"""Mapping of stored datasets, from an object, a mount or a copy, shared between processes."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import random
import shutil
from pathlib import Path
from typing import Any

import datasets
import pytest

from castore import Store
from castore.adapters.datasets import CacheWarning, DatasetCache, cached_map, wait
from castore.adapters.datasets.dataset_fingerprint import dataset_fingerprint
from castore.adapters.datasets.file_digests import file_digest
from castore.adapters.datasets.lazy_table import HEAD_BYTES
from castore.adapters.datasets.mapped_files import COPIES_FOLDER, TAIL
from castore_fuse import mounted
from tests.helpers import flip, in_processes, payload


@pytest.fixture
def large(sources: dict[str, list[object]]) -> datasets.Dataset:
    """Large enough to be mapped when the last rows are read."""
    data = datasets.Dataset.from_dict(sources)
    data = datasets.concatenate_datasets([data] * (HEAD_BYTES // data._data.nbytes + 2))
    assert data._data.nbytes > 1.2 * HEAD_BYTES
    return data


def copies(store: Store) -> list[str]:
    """The materialised copies in a store."""
    return [entry.name for entry in store.entries(COPIES_FOLDER)]


def test_rows_are_mapped_from_one_file_that_all_processes_share(
    cache: DatasetCache, large: datasets.Dataset
) -> None:
    cache.put("large", large)

    def look(_: int) -> tuple[str, int]:
        got = DatasetCache(Store(cache.store.path, memory=0)).get("large")
        total = sum(got["number"][:])
        return os.path.realpath(got.cache_files[0]["filename"]), total

    answers = in_processes(3, look)
    assert len(set(answers)) == 1
    assert len(copies(cache.store)) == 1
    assert answers[0][0].startswith(str(cache.store.path))


def test_what_is_mapped_outlives_its_entry_and_gc(cache: DatasetCache, large: datasets.Dataset) -> None:
    cache.put("large", large)
    got = cache.get("large")
    assert cache.invalidate("large")
    cache.store.gc(max_size=0, grace=0)
    assert not os.path.exists(got.cache_files[0]["filename"])
    assert got[:] == large[:]


def test_what_gc_took_is_materialised_again(cache: DatasetCache, large: datasets.Dataset) -> None:
    cache.put("large", large)
    assert cache.get("large")["number"][:] == large["number"][:]
    assert cache.store.delete_many(copies(cache.store)) == 1
    cache.store.gc(grace=0)
    assert cache.get("large")["text"][:] == large["text"][:]


def test_the_budget_holds_for_what_is_materialised_too(tmp_path: Path, large: datasets.Dataset) -> None:
    size = large._data.nbytes
    cache = DatasetCache(tmp_path / "store", max_size=int(size * 1.6))
    for number in range(3):
        cache.put(f"set {number}", large.shuffle(seed=number))
        assert cache.get(f"set {number}")["text"][:] == large.shuffle(seed=number)["text"][:]
        assert cache.store.stat().stored <= size * 1.6


def test_what_does_not_fit_uncompressed_is_read_into_memory_and_said_so(
    tmp_path: Path, large: datasets.Dataset
) -> None:
    cache = DatasetCache(tmp_path / "store", max_size=int(large._data.nbytes * 0.6))
    cache.put("large", large)
    got = cache.get("large")
    with pytest.warns(CacheWarning, match="read into memory"):
        assert got["text"][:] == large["text"][:]
    assert got[:] == large[:]


def test_copies_do_not_evict_the_results_that_they_are_made_of(tmp_path: Path) -> None:
    """Regression: each copy of a file fitted by itself, and the copies evicted the files."""
    texts = [random.Random(number).randbytes(4000).hex() for number in range(1500)]
    data = datasets.Dataset.from_dict({"n": list(range(1500)), "text": texts})
    with Store(tmp_path / "store", max_size="14MB", memory=0) as store:
        made = cached_map(data, with_twice, store=store)
        wait()
        kept = [entry.name for entry in store.entries("steps")]
        with pytest.warns(CacheWarning, match="does not hold them and an uncompressed copy"):
            assert made["twice"][:] == [2 * number for number in range(1500)]
        assert made["text"][:] == texts
        assert made.shuffle(seed=1)[0]["text"] in texts
        assert [entry.name for entry in store.entries("steps")] == kept
        assert copies(store) == []


def with_twice(row: dict[str, Any]) -> dict[str, Any]:
    return {"twice": 2 * row["n"]}


def test_a_live_mount_serves_the_rows(cache: DatasetCache, large: datasets.Dataset, tmp_path: Path) -> None:
    cache.put("large", large)
    with mounted(cache.store, tmp_path / "mnt") as root:
        got = cache.get("large")
        assert got["number"][:] == large["number"][:]
        assert os.path.realpath(got.cache_files[0]["filename"]).startswith(str(root))
        assert got[:] == large[:]
        assert not copies(cache.store)
        del got
    assert cache.get("large")[:] == large[:]


def test_load_from_disk_reads_the_mount_unmodified(
    cache: DatasetCache, large: datasets.Dataset, tmp_path: Path
) -> None:
    cache.put("one", large.with_format("numpy"))
    cache.put("two/sets", datasets.DatasetDict({"a": large, "b": large.select([1])}))
    with mounted(cache.store, tmp_path / "mnt") as root:
        one = datasets.load_from_disk(str(root / "one"))
        assert one.with_format(None)[:] == large[:]
        assert one.format["type"] == "numpy"
        two = datasets.load_from_disk(str(root / "two" / "sets"))
        assert two["a"][:] == large[:]
        del one, two


def test_a_plain_map_keeps_its_cache_where_datasets_keeps_it(
    cache: DatasetCache, large: datasets.Dataset
) -> None:
    cache.put("large", large)
    before = {path for path in cache.store.path.rglob("*") if path.suffix == ".arrow"}
    mapped = cache.get("large").map(lambda sample: {"twice": 2 * sample["number"]})
    assert mapped["twice"][:] == [2 * n for n in large["number"]]
    place = Path(mapped.cache_files[0]["filename"])
    assert place.is_relative_to(datasets.config.HF_DATASETS_CACHE)
    assert {path for path in cache.store.path.rglob("*") if path.suffix == ".arrow"} == before


def test_it_pickles_as_a_path(cache: DatasetCache, large: datasets.Dataset) -> None:
    cache.put("large", large)
    packed = pickle.dumps(cache.get("large"))
    assert len(packed) < 20_000
    assert pickle.loads(packed)[:] == large[:]


def test_a_store_that_is_removed_takes_nothing_from_another_one(
    large: datasets.Dataset, tmp_path: Path
) -> None:
    """Both kept the same rows, and the second one mapped them last."""
    first, second = (DatasetCache(tmp_path / name, codec="none") for name in ("first", "second"))
    for cache in (first, second):
        cache.put("large", large)
    packed = pickle.dumps(first.get("large"))
    assert second.get("large")[:3] == large[:3]
    shutil.rmtree(second.store.path)
    assert pickle.loads(packed)[:] == large[:]


def test_a_spawned_worker_reads_what_it_is_given(cache: DatasetCache, large: datasets.Dataset) -> None:
    cache.put("large", large)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(len, (cache.get("large"),)) == len(large)


def test_a_damaged_copy_is_made_again_from_the_compressed_bytes(
    cache: DatasetCache, large: datasets.Dataset
) -> None:
    cache.put("large", large)
    assert cache.get("large")["number"][:] == large["number"][:]
    path, _, length = payload(cache.store, copies(cache.store)[0])
    flip(path, length // 2)
    assert cache.get("large")["text"][:] == large["text"][:]


def test_the_same_rows_have_one_key_wherever_they_are_mapped_from(
    cache: DatasetCache, large: datasets.Dataset, tmp_path: Path
) -> None:
    """A key that differed needlessly would make all later steps run again."""
    cache.put("large", large)

    def key(dataset: datasets.Dataset) -> str:
        return dataset_fingerprint(dataset, cache.store)

    unread = key(cache.get("large"))
    assert not copies(cache.store)
    with mounted(cache.store, tmp_path / "mnt") as root:
        assert key(datasets.load_from_disk(str(root / "large"))) == unread
    got = cache.get("large")
    assert got[-1] == large[-1]
    (copied,) = copies(cache.store)
    assert key(got) == unread
    path = payload(cache.store, copied)[0]
    assert key(datasets.Dataset.from_file(str(path), info=got.info, split=got.split)) == unread
    assert key(got.select(range(1, len(got)))) != unread
    assert key(datasets.concatenate_datasets([got, got])) != unread


def test_what_does_not_count_at_the_end_of_a_file_counts_elsewhere(tmp_path: Path, store: Store) -> None:
    """Holds for large files too, whose digests are remembered."""
    size = 5 * 1024 * 1024
    files = {"plain": b"x" * size, "longer": b"x" * size + TAIL, "inside": b"x" + TAIL + b"x" * size}
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    for _ in range(2):
        digests = [file_digest(str(tmp_path / name), store, without=TAIL) for name in files]
        assert digests[0] == digests[1] != digests[2]
        assert len({file_digest(str(tmp_path / name), store) for name in files}) == 3
