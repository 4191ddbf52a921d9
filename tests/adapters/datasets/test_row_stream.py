"""Iterable datasets in a DatasetCache: stored as `Dataset.from_generator` stores them, and returned as a
Dataset.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from castore import Store
from castore.adapters.datasets import DatasetCache, Pipeline, cached_filter, cached_map, wait
from castore.errors import InvalidValueError, SerializationError

Rows = list[dict[str, Any]]


def stream(rows: Rows, features: datasets.Features | None = None) -> datasets.IterableDataset:
    return datasets.IterableDataset.from_generator(lambda: iter(rows), features=features)


def from_generator(rows: Rows, folder: Path, features: datasets.Features | None = None) -> datasets.Dataset:
    return datasets.Dataset.from_generator(lambda: iter(rows), features=features, cache_dir=str(folder))


ONES: Rows = [{"a": 1, "b": "x"}] * 10
_UNEVEN: dict[str, Rows] = {
    "ints that become floats": [{"a": number} for number in range(10)] + [{"a": 1.5}],
    "nulls first": [*[{"a": None}] * 10, {"a": 1}],
    "empty lists first": [*[{"a": []}] * 10, {"a": ["x"]}],
    "another order of keys": [*ONES, {"b": "y", "a": 2}],
    "another order of keys, much later": [*ONES * 150, {"b": "y", "a": 2}],
    "token ids": [{"input_ids": [1, 2], "attention_mask": [1, 1]}] * 3,
    "nulls within": [{"a": {"b": None}}, {"a": {"b": [1.5]}}, {"a": None}],
}


@pytest.mark.parametrize("how", _UNEVEN)
def test_a_stream_without_features_is_kept_as_from_generator_takes_it(
    how: str, cache: DatasetCache, tmp_path: Path
) -> None:
    expected = from_generator(_UNEVEN[how], tmp_path)
    cache.put("rows", stream(_UNEVEN[how]))
    for got in (cache.get("rows"), cache.dataset("rows"), cache.stream("rows")):
        assert list(got) == list(expected)
        assert got.features == expected.features


_LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(2**40), 2**40)
    | st.floats(allow_nan=False)
    | st.text(max_size=3)
)
_VALUES = st.recursive(
    _LEAVES,
    lambda inner: st.lists(inner, max_size=2) | st.fixed_dictionaries({"p": inner, "q": inner}),
    max_leaves=4,
)
_ROWS = st.lists(st.tuples(_VALUES, _VALUES, st.booleans()), min_size=1, max_size=6).map(
    lambda rows: [{"b": b, "a": a} if turned else {"a": a, "b": b} for a, b, turned in rows]
)


def test_any_stream_that_from_generator_takes_is_kept_with_the_same_rows_and_features(tmp_path: Path) -> None:
    folders = (tmp_path / str(number) for number in range(10_000))
    cache = DatasetCache(tmp_path / "store")

    @settings(max_examples=40, suppress_health_check=list(HealthCheck))
    @given(rows=_ROWS)
    def check(rows: Rows) -> None:
        expected = None
        with contextlib.suppress(Exception):
            expected = from_generator(rows, next(folders))
        assume(expected is not None)
        assert expected is not None
        cache.put("rows", stream(rows))
        got = cache.dataset("rows")
        assert got.features == expected.features
        assert json.dumps(got[:]) == json.dumps(expected[:])

    check()


def test_a_stream_of_no_rows_is_an_empty_dataset(cache: DatasetCache) -> None:
    cache.put("none", stream([]))
    assert list(cache.get("none")) == []
    assert len(cache.dataset("none")) == 0
    declared = datasets.Features({"a": datasets.Value("int8")})
    cache.put("declared", stream([], declared))
    assert cache.dataset("declared").features == declared
    assert len(cache.dataset("declared")) == 0


def test_a_dataset_without_columns_is_kept(cache: DatasetCache) -> None:
    none = datasets.Dataset.from_dict({})
    cache.put("none", none)
    assert cache.get("none")[:] == none[:]
    assert cache.get("none").column_names == []
    bare = cached_map(datasets.Dataset.from_dict({"a": []}), dict, store=cache.store, remove_columns="a")
    assert bare.column_names == []
    wait()  # warns of puts that failed
    assert cached_map(none, dict, store=cache.store).column_names == []
    wait()


_TROUBLE: dict[str, tuple[Rows, str]] = {
    "a type that changes too late": ([{"a": 1}] * 1500 + [{"a": "x"}], r"up to number 1501 .*features="),
    "a column of nulls that gets a value too late": ([{"a": None}] * 1500 + [{"a": 1}], r"'a'.*features="),
    "a column that is missing": ([*ONES, {"a": 1}], r"row 10 .* no column 'b'"),
    "rows without columns": ([{}, {}], r"row 0 .* no columns.*yield rows with at least one column"),
    "a column that is new": ([*ONES, {"a": 1, "b": "x", "c": 1}], r"row 10 .* a column 'c'"),
}


@pytest.mark.parametrize("trouble", _TROUBLE)
def test_rows_that_cannot_be_kept_are_named_and_nothing_is_kept(trouble: str, cache: DatasetCache) -> None:
    rows, message = _TROUBLE[trouble]
    with pytest.raises(SerializationError, match=message):
        cache.put("rows", stream(rows))
    assert not cache.contains("rows")
    assert not list(cache.store.entries())


def test_an_error_of_the_streams_own_reaches_its_caller(cache: DatasetCache) -> None:
    def fails() -> Iterator[dict[str, Any]]:
        yield {"a": 1}
        raise ValueError("mine")

    with pytest.raises(ValueError, match=r"^mine$"):
        cache.put("rows", datasets.IterableDataset.from_generator(fails))
    assert not cache.contains("rows")


def test_a_stream_of_arrow_tables_keeps_their_types(cache: DatasetCache) -> None:
    table = pa.table({"a": pa.array([*[None] * 10, 1.5], pa.float32()), "n": pa.array(range(11), pa.int16())})
    tables = datasets.Dataset(datasets.table.InMemoryTable(table)).to_iterable_dataset().with_format("arrow")
    undeclared = tables.map(lambda part: part, batched=True)
    assert undeclared.features is None
    cache.put("rows", undeclared)
    got = cache.dataset("rows").with_format(None)
    assert got.features == datasets.Features({"a": datasets.Value("float32"), "n": datasets.Value("int16")})
    assert (got["a"][:], got["n"][:]) == ([*[None] * 10, 1.5], list(range(11)))


def test_the_way_that_an_error_names_ends_in_cached_steps(store: Store) -> None:
    cache, rows = DatasetCache(store), [{"n": number} for number in range(20)]
    with pytest.raises(
        InvalidValueError, match=r"DatasetCache\.put\(name, stream\).*DatasetCache\.dataset\(name\)"
    ):
        Pipeline([lambda row: row], store=store).run(stream(rows))
    runs: list[int] = []

    def half(row: dict[str, Any]) -> dict[str, Any]:
        runs.append(1)
        return {"half": row["n"] / 2}

    for _ in range(2):
        cache.put("rows", stream(rows))  # equal rows are the same input
        halves = cached_map(cache.dataset("rows"), half, store=store, fingerprint="half")
        assert halves["half"][:4] == [0.0, 0.5, 1.0, 1.5]
        wait()
    assert len(runs) == 20


def test_splits_of_streams_come_back_as_datasets(cache: DatasetCache) -> None:
    cache.put("both", datasets.IterableDatasetDict({"train": stream([{"a": 1}]), "test": stream([{"a": 2}])}))
    assert isinstance(cache.get("both"), datasets.IterableDatasetDict)
    both = cache.dataset("both")
    assert type(both) is datasets.DatasetDict
    assert both["test"]["a"][:] == [2]
    assert cache.dataset("nothing") is None


_BLOCK = [[[1, 2, 3], [4, 5, 6]]] * 2
_ARRAYS: dict[str, tuple[Any, Any]] = {
    "a list": (datasets.List(datasets.Array2D((2, 3), "int32")), _BLOCK),
    "a list of lists": (datasets.List(datasets.List(datasets.Array2D((2, 3), "int32"))), [_BLOCK]),
    "a struct": ({"block": datasets.Array2D((2, 3), "int32")}, {"block": _BLOCK[0]}),
    "of any height": (datasets.List(datasets.Array2D((None, 3), "int32")), _BLOCK),
    "missing": (datasets.List(datasets.Array2D((2, 3), "int32")), None),
}


@pytest.mark.parametrize("how", _ARRAYS)
def test_arrays_within_lists_and_structs_are_kept_from_memory_and_from_streams(
    how: str, store: Store
) -> None:
    feature, value = _ARRAYS[how]
    features = datasets.Features({"x": feature, "n": datasets.Value("int64")})
    data = datasets.Dataset.from_dict({"x": [value] * 3, "n": [0, 1, 2]}, features=features)
    cache = DatasetCache(store)

    def through(name: str, what: Any) -> Any:
        cache.put(name, what)
        return cache.dataset(name)

    def number(row: dict[str, Any]) -> dict[str, Any]:
        return {"m": row["n"]}

    def is_not_one(row: dict[str, Any]) -> bool:
        return bool(row["n"] != 1)

    ways: dict[str, Callable[[], Any]] = {
        "put": lambda: through("a", data),
        "a selection": lambda: through("b", data.select([2, 0])),
        "a stream": lambda: through("c", data.to_iterable_dataset()),
        "rows": lambda: through("d", stream([{"x": value, "n": 0}], features)),
        "map": lambda: cached_map(data, number, store=store),
        "filter": lambda: cached_filter(data, is_not_one, store=store),
        "chain": lambda: cached_filter(cached_map(data, number, store=store), is_not_one, store=store),
        "pipeline": lambda: Pipeline([number], store=store).run(data).dataset,
    }
    for way, make in ways.items():
        for _ in range(2):
            got = make()
            wait()
            assert next(iter(got))["x"] == value, way
            assert str(got.features["x"]) == str(features["x"]), way


def test_streams_of_different_columns_that_datasets_cannot_join_are_refused(cache: DatasetCache) -> None:
    parts = [datasets.Dataset.from_dict(rows).to_iterable_dataset() for rows in ({"a": [1]}, {"b": ["x"]})]
    joined = datasets.concatenate_datasets(parts)
    with pytest.raises(SerializationError, match=r"joins datasets of different columns.* keep stream\.map"):
        cache.put("x", joined)
    cache.put("x", joined.map(lambda row: row))  # as the error advises
    assert [*cache.get("x")] == [{"a": 1, "b": None}, {"a": None, "b": "x"}]
