"""Rows from a store are decoded at first use, and a lazy table behaves like any other table."""

from __future__ import annotations

import copy
import json
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest

from castore import Store
from castore.adapters.datasets import (
    CacheWarning,
    DatasetCache,
    Pipeline,
    cached_filter,
    cached_map,
    lazy_table,
    wait,
)
from castore.adapters.datasets.lazy_table import LazyTable
from castore.adapters.datasets.mapped_files import COPIES_FOLDER
from castore.errors import CorruptError
from castore.recipes import export
from tests.helpers import flip, payload
from tests.warm import WarmPython

# More than what is read without mapping, which is a fifth of what it is elsewhere.
ROWS, WIDTH = 1500, 1300
_HEAD_BYTES = lazy_table.HEAD_BYTES


@pytest.fixture(autouse=True)
def _small_head(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lazy_table, "HEAD_BYTES", _HEAD_BYTES // 5)


@pytest.fixture(scope="module")
def plain() -> datasets.Dataset:
    """2 MB that compress well."""
    rng = np.random.default_rng(1)
    text = [bytes(rng.integers(97, 105, WIDTH, dtype=np.uint8)).decode() for _ in range(ROWS)]
    return datasets.Dataset.from_dict({"text": text, "number": range(ROWS)})


@pytest.fixture
def cache(store: Store, plain: datasets.Dataset) -> DatasetCache:
    cache = DatasetCache(store)
    cache.put("plain", plain)
    return cache


@pytest.fixture
def lazy(cache: DatasetCache) -> datasets.Dataset:
    got = cache.get("plain")
    assert isinstance(got._data, LazyTable)
    return got


def copies(store: Store) -> int:
    """The number of materialised blobs in a store."""
    return len(list(store.entries(COPIES_FOLDER)))


def is_mapped(dataset: datasets.Dataset) -> bool:
    table = dataset._data
    assert isinstance(table, LazyTable)
    return table._whole is not None


def test_what_nobody_looks_at_is_not_decoded(
    lazy: datasets.Dataset, plain: datasets.Dataset, store: Store
) -> None:
    assert (len(lazy), lazy.features, lazy.column_names, lazy.shape) == (
        ROWS,
        plain.features,
        ["text", "number"],
        (ROWS, 2),
    )
    assert repr(lazy) == repr(plain)
    assert Path(lazy.cache_files[0]["filename"]).is_relative_to(datasets.config.HF_DATASETS_CACHE)
    assert not is_mapped(lazy)
    assert copies(store) == 0


@pytest.mark.parametrize(
    "key", [0, 5, slice(0, 32), slice(3, 700), slice(0, 0), [4, 0, 4], range(2, 20, 3)], ids=str
)
def test_rows_near_the_start_need_no_copy(key: Any, lazy: datasets.Dataset, plain: datasets.Dataset) -> None:
    assert lazy[key] == plain[key]
    assert not is_mapped(lazy)


@pytest.mark.parametrize("key", [-1, ROWS - 1, slice(10, 1400), slice(None), [0, ROWS - 1], []], ids=str)
def test_rows_anywhere_else_are_mapped(key: Any, lazy: datasets.Dataset, plain: datasets.Dataset) -> None:
    assert lazy[0] == plain[0]
    assert lazy[key] == plain[key]
    assert is_mapped(lazy)
    assert lazy[0] == plain[0]


@pytest.mark.parametrize(
    "use",
    [
        lambda d: d.remove_columns("text")[:50],
        lambda d: d.select_columns(["number"]).remove_columns([])[:50],
        lambda d: d.rename_column("number", "n")[40],
        lambda d: d.remove_columns("text").rename_columns({"number": "n"}).with_format("numpy")[40],
        lambda d: d["number"][7],
        lambda d: list(d["number"]),
        lambda d: list(d.select_columns("number")),
        lambda d: d.select(range(20, 60)).to_dict(),
        lambda d: d.take(5).rename_column("number", "n").to_list(),
        lambda d: d.remove_columns("text").select(range(3, 9)).take(2).to_list(),
    ],
)  # fmt: skip
def test_columns_and_the_first_rows_of_a_lazy_table_need_no_copy(
    use: Callable[[Any], Any], lazy: datasets.Dataset, plain: datasets.Dataset, store: Store
) -> None:
    assert use(lazy) == use(plain)
    assert copies(store) == 0


def test_the_second_pass_over_a_column_maps_it(lazy: datasets.Dataset, store: Store) -> None:
    assert list(lazy["number"]) == list(range(ROWS))
    assert copies(store) == 0
    assert list(lazy["number"]) == list(range(ROWS))
    assert copies(store) == 1


def test_a_row_that_is_not_there_is_an_error(lazy: datasets.Dataset) -> None:
    with pytest.raises(IndexError):
        lazy[ROWS]


@pytest.mark.parametrize("batch", [1, 32, 1000, 5000])
def test_one_pass_over_all_rows_needs_no_copy_and_the_next_one_maps(
    batch: int, lazy: datasets.Dataset, plain: datasets.Dataset, store: Store
) -> None:
    assert list(lazy.iter(batch)) == list(plain.iter(batch))
    assert copies(store) == 0
    assert list(lazy.iter(batch)) == list(plain.iter(batch))
    assert copies(store) == 1


def test_looking_at_the_first_rows_again_and_again_maps_nothing(
    lazy: datasets.Dataset, plain: datasets.Dataset
) -> None:
    for _ in range(5):
        assert next(iter(lazy)) == plain[0]
    assert not is_mapped(lazy)


def test_a_chain_that_hits_decodes_only_what_is_looked_at(store: Store, plain: datasets.Dataset) -> None:
    def chain() -> datasets.Dataset:
        marked = cached_map(plain, lambda sample: {"mark": sample["number"] % 3}, store=store)
        some = cached_filter(marked, lambda sample: sample["mark"] > 0, store=store)
        return cached_map(some, lambda sample: {"text": sample["text"][::-1]}, store=store)

    expected = chain()[:20]
    wait()
    assert chain()[:20] == expected
    assert copies(store) == 0


def test_what_a_step_reads_in_order_is_not_copied(store: Store, plain: datasets.Dataset) -> None:
    def doubled(sample: dict[str, Any]) -> dict[str, Any]:
        return {"twice": 2 * sample["number"]}

    cached_map(plain, doubled, store=store)
    wait()
    again = cached_map(plain, doubled, store=store)
    assert cached_map(again, lambda sample: {"more": sample["twice"] + 1}, store=store)["more"][7] == 15
    assert not is_mapped(again)


def test_a_step_behind_a_hit_and_the_export_of_a_hit_need_no_copy(
    store: Store, plain: datasets.Dataset, tmp_path: Path
) -> None:
    def marked(sample: dict[str, Any]) -> dict[str, Any]:
        return {"__dj__mark": sample["number"] % 3}

    def longer(sample: dict[str, Any]) -> dict[str, Any]:
        return {"text": sample["text"] + "!"}

    Pipeline([marked], store=store).run(plain)
    result = Pipeline([marked, longer], store=store).run(plain)
    assert result.hits == 1
    again = Pipeline([marked, longer], store=store).run(plain)
    assert again.hits == 2
    export.export(again.dataset, tmp_path / "out.jsonl")
    lines = (tmp_path / "out.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == list(plain.map(longer))
    assert copies(store) == 0


@pytest.mark.parametrize(
    "use",
    [
        lambda d: d.map(lambda sample: {"number": sample["number"] + 1}),
        lambda d: d.map(lambda sample: {"number": sample["number"] + 1}, num_proc=2),
        lambda d: d.filter(lambda sample: sample["number"] % 7 == 0),
        lambda d: d.select([2, 0]),
        lambda d: d.select(range(3, 9)),
        lambda d: d.shuffle(seed=1),
        lambda d: d.sort("number", reverse=True),
        lambda d: d.shard(2, 0),
        lambda d: d.take(3),
        lambda d: d.with_format("numpy"),
        lambda d: d.with_format("arrow").with_format(None),
        lambda d: d.remove_columns(["number"]),
        lambda d: d.rename_column("number", "n"),
        lambda d: d.cast_column("number", datasets.Value("int32")),
        lambda d: d.add_column("more", range(ROWS)),
        lambda d: d.flatten(),
        lambda d: d.train_test_split(0.5, seed=1)["test"],
        lambda d: datasets.concatenate_datasets([d, d]),
        lambda d: pickle.loads(pickle.dumps(datasets.concatenate_datasets([d, d]))),
        lambda d: pickle.loads(pickle.dumps(d.remove_columns("text").cast_column("number",
            datasets.Value("int16")))),
        lambda d: datasets.concatenate_datasets([d, d.rename_columns({"text": "t", "number": "n"})], axis=1),
        lambda d: d.remove_columns("text").map(lambda sample: {"more": sample["number"] + 1}, num_proc=2),
        lambda d: datasets.interleave_datasets([d, d]),
        lambda d: datasets.Dataset.from_list([*d.to_iterable_dataset().take(60)]),
        copy.copy,
        copy.deepcopy,
        lambda d: pickle.loads(pickle.dumps(d)),
    ],
)  # fmt: skip
def test_it_is_used_like_any_other(
    use: Callable[[Any], Any], lazy: datasets.Dataset, plain: datasets.Dataset
) -> None:
    used, expected = use(lazy), use(plain)
    assert used.features == expected.features
    assert used.to_list()[:50] == expected.to_list()[:50]
    assert len(used) == len(expected)


def test_it_is_saved_and_put_again(
    lazy: datasets.Dataset, plain: datasets.Dataset, cache: DatasetCache, tmp_path: Path
) -> None:
    lazy.save_to_disk(tmp_path / "saved")
    assert datasets.load_from_disk(tmp_path / "saved").to_dict() == plain.to_dict()
    cache.put("again", cache.get("plain"))
    assert cache.get("again").to_dict() == plain.to_dict()
    cache.put("twice", datasets.concatenate_datasets([lazy, cache.get("again")]))
    assert cache.get("twice")["number"][:] == [*range(ROWS)] * 2


def test_datasets_of_several_files_are_lazy_too(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new file begins after 128 MiB, and 8 MiB are read without mapping."""
    monkeypatch.setattr(lazy_table, "HEAD_BYTES", _HEAD_BYTES)
    block = datasets.Dataset.from_dict({"text": ["a" * 1_000_000] * 70, "number": range(70)})
    large = datasets.concatenate_datasets([block, block])
    cache = DatasetCache(store)
    cache.put("large", large)
    got = cache.get("large")
    assert len(got.cache_files) == 1
    assert [sample["number"] for sample in got] == [*range(70)] * 2
    assert cache.get("large")[:8]["number"] == [*range(8)]
    assert copies(store) == 0
    both = datasets.concatenate_datasets([got, got.select([1])])
    assert pickle.loads(pickle.dumps(both))["number"] == [*range(70)] * 2 + [1]
    assert copies(store) == 2


def test_it_outlives_its_entry_and_gc_and_the_store_that_was_closed(
    plain: datasets.Dataset, tmp_path: Path
) -> None:
    with Store(tmp_path / "store") as store:
        cache = DatasetCache(store)
        cache.put("plain", plain)
        first, second, third = (cache.get("plain") for _ in range(3))
        assert cache.invalidate("plain")
        store.gc(max_size=0, grace=0)
    assert first[:32] == plain[:32]
    assert list(second) == list(plain)
    assert third[ROWS - 1] == plain[ROWS - 1]


def test_reading_it_makes_no_store_in_the_place_of_one_that_was_removed(
    cache: DatasetCache, plain: datasets.Dataset
) -> None:
    lazy = cache.get("plain")
    shutil.rmtree(cache.store.path)
    with pytest.warns(CacheWarning, match="read into memory, since the store .* is gone"):
        assert lazy[ROWS - 1] == plain[ROWS - 1]
    assert lazy["text"][:] == plain["text"][:]
    assert not cache.store.path.exists()


def test_descriptors_are_let_go_with_the_dataset(cache: DatasetCache) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        assert cache.get("plain")[0]["number"] == 0
    assert len(os.listdir("/proc/self/fd")) <= before + 1


def test_a_copy_that_is_there_is_mapped_at_once(cache: DatasetCache, plain: datasets.Dataset) -> None:
    assert cache.get("plain")[ROWS - 1] == plain[ROWS - 1]
    again = cache.get("plain")
    assert again[0] == plain[0]
    assert is_mapped(again)


def test_a_copy_that_gc_took_meanwhile_is_not_missed(cache: DatasetCache, plain: datasets.Dataset) -> None:
    assert cache.get("plain")[ROWS - 1] == plain[ROWS - 1]
    again = cache.get("plain")
    cache.store.delete_many(entry.name for entry in list(cache.store.entries(COPIES_FOLDER)))
    cache.store.gc(grace=0)
    assert again[:3] == plain[:3]
    assert again[ROWS - 1] == plain[ROWS - 1]


def test_a_forked_child_goes_on_where_its_parent_was(lazy: datasets.Dataset) -> None:
    """The threads that decode ahead do not exist in the child."""
    passing: Iterator[dict[str, Any]] = iter(lazy)
    assert [next(passing)["number"] for _ in range(900)] == [*range(900)]
    if (child := os.fork()) == 0:
        good = False
        try:
            good = [sample["number"] for sample in passing] == [*range(900, ROWS)] and lazy[ROWS - 1][
                "number"
            ] == ROWS - 1
        finally:
            os._exit(0 if good else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert sum(1 for _ in passing) == ROWS - 900


def test_damage_that_comes_after_it_was_opened_is_an_error_and_the_next_look_a_miss(
    lazy: datasets.Dataset, cache: DatasetCache
) -> None:
    path, offset, length = payload(cache.store, "plain/data-00000-of-00001.arrow")
    flip(path, offset + length // 2)
    with pytest.raises(CorruptError, match="is damaged"):
        list(lazy)
    with pytest.warns(CacheWarning, match="'plain'.* is damaged"):
        assert cache.get("plain") is None


def test_a_pickled_one_opens_though_gc_took_the_copy_since(
    cache: DatasetCache, lazy: datasets.Dataset, plain: datasets.Dataset, store: Store
) -> None:
    part = lazy.select(range(3, ROWS)).remove_columns("text")
    cast = lazy.cast_column("number", datasets.Value("float64"))
    sent = pickle.dumps(
        [
            lazy,
            lazy.select(range(3, ROWS, 2)),
            lazy.with_format("numpy"),
            part,
            cast.add_column("more", range(ROWS)),
        ]
    )
    assert copies(store) == 1
    assert len(sent) < 200_000
    store.delete_many([entry.name for entry in store.entries(COPIES_FOLDER)])
    store.gc(grace=0)
    whole, some, formatted, part, cast = pickle.loads(sent)
    assert part["number"][:] == plain["number"][3:]
    assert cast[ROWS - 1] == {**plain[ROWS - 1], "number": ROWS - 1.0, "more": ROWS - 1}
    assert whole[:] == plain[:]
    assert some["number"][:] == plain["number"][3::2]
    assert formatted[ROWS - 1]["number"] == ROWS - 1
    assert copies(store) == 1


def test_a_pickled_one_opens_though_its_entry_was_dropped_since(
    cache: DatasetCache, lazy: datasets.Dataset, plain: datasets.Dataset, store: Store
) -> None:
    sent = pickle.dumps(lazy)
    store.delete_many([entry.name for entry in store.entries("plain")])
    store.gc(grace=0)
    assert pickle.loads(sent)[:] == plain[:]


def test_columns_of_extension_types_in_lists_are_lazy_too(cache: DatasetCache) -> None:
    # pyarrow cannot make an empty table of these types.
    features = datasets.Features(
        {"grids": datasets.List(datasets.Array2D((64, 64), "int32")), "n": datasets.Value("int32")}
    )
    grids = np.zeros((100, 1, 64, 64), dtype=np.int32)
    plain = datasets.Dataset.from_dict({"grids": grids, "n": range(100)}, features=features)
    cache.put("grids", plain)
    lazy = cache.get("grids")
    assert isinstance(lazy._data, LazyTable)
    assert lazy.remove_columns("n")[:2] == plain.remove_columns("n")[:2]
    assert lazy[1] == plain[1]
    cache.put("none", plain.select([]))
    assert cache.get("none").features == features


_FEW_FILES = """
import json, os, resource, sys
import datasets
from castore import Store
from castore.adapters.datasets import cached_map
from tests.adapters.datasets.small_blocks import small_blocks
soft, hard = map(int, sys.argv[2:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
texts = datasets.Dataset.from_dict({"text": [f"{n} " + "word " * 200 for n in range(2000)]})
store = Store(sys.argv[1])
with small_blocks(1 << 17, 10_000):
    result = cached_map(texts, lambda row: {"size": len(row["text"])}, store=store)
    right = [row["size"] for row in result] == [len(text) for text in texts["text"][:]]
blocks = len(list(store.entries(".datasets/blocks")))
print(json.dumps([type(result._data).__name__, right, blocks, *resource.getrlimit(resource.RLIMIT_NOFILE)]))
"""


@pytest.mark.parametrize(
    ("soft", "hard", "is_lazy"), [(100, 1000, True), (100, 101, False)], ids=["raised", "cannot be raised"]
)
def test_a_step_of_more_blocks_than_files_may_be_open_is_read_all_the_same(
    tmp_path: Path, soft: int, hard: int, is_lazy: bool, warm_datasets: WarmPython
) -> None:
    done = warm_datasets.run(["-c", _FEW_FILES, tmp_path / "store", str(soft), str(hard)], text=True)
    assert done.returncode == 0, done.stderr
    kind, right, blocks, limit, _ = json.loads(done.stdout)
    assert right
    assert blocks > 1
    assert (kind == "LazyTable") == is_lazy
    assert (limit > soft) == is_lazy
