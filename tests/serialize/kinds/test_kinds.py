"""Values of every kind come back as they were: from records, from serializers, through every adapter."""

from __future__ import annotations

import enum
import itertools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from blake3 import blake3
from hypothesis import HealthCheck, given, settings
from torch.utils.data import DataLoader

from castore import SerializationError, Store
from castore.adapters.torch import BiLevelCachedDataset, CachedDataset, LazyShardDataset
from castore.adapters.torch.samples import pack, unpack
from castore.adapters.tree import TreeCacheManager
from castore.serialize.serializers import dump, load
from tests.serialize.kinds.values import (
    VALUES,
    Checked,
    Numbered,
    nested,
    same,
)

RoundTrip = Callable[[list[Any]], list[Any]]


def saved(value: Any) -> Any:
    name, data = dump(value)
    return load(data, name)


# Without the values' text: that of a set differs by process, and xdist's workers compare the names of tests.
@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_a_value_of_every_kind_comes_back_in_type_and_value(value: Any) -> None:
    assert same(unpack(pack({"x": value}))["x"], value)
    assert same(unpack(pack(value)), value)
    assert same(saved(value), value)
    assert same(saved([value, 1]), [value, 1])


@settings(max_examples=200, deadline=None)
@given(nested())
def test_any_nesting_comes_back_and_equal_values_give_equal_bytes(value: Any) -> None:
    record = pack(value)
    assert same(unpack(record), value)
    assert pack(unpack(record)) == record
    name, data = dump(value)
    assert same(load(data, name), value)
    assert dump(load(data, name)) == (name, data)


_NEST = """
import resource
from castore.serialize.serializers import dump, load

resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
value = frozenset({"innermost"})
for level in range(50):
    value = frozenset({value, str(level)})
name, data = dump(value)
assert load(data, name) == value
assert dump(load(data, name)) == (name, data)
"""


def test_sets_in_sets_take_bounded_memory_at_any_depth() -> None:
    subprocess.run([sys.executable, "-c", _NEST], check=True, timeout=300)


def _twice(dataset: Any, values: list[Any]) -> list[Any]:
    """The dataset's answers once all samples are in its cache."""
    assert all(map(same, [dataset[place] for place in range(len(values))], values))
    with dataset:
        before = dataset.misses
        found = [dataset[place] for place in range(len(values))]
        assert dataset.misses == before
    return found


def _adapters(folder: Path) -> dict[str, RoundTrip]:
    number = itertools.count()
    store = Store(folder / "store", memory=0)
    tree = TreeCacheManager(folder / "tree")

    def fresh() -> str:
        # A list of values may lack a fingerprint, which these tests are not about.
        return f"values-{next(number)}"

    def in_store(values: list[Any]) -> list[Any]:
        name = fresh()
        store.save(name, values)
        return store.load(name)  # type: ignore[no-any-return]

    def in_tree(values: list[Any]) -> list[Any]:
        name = fresh()
        tree.put(name, values)
        found = tree.get(name)
        assert found is not None
        return found[0]  # type: ignore[no-any-return]

    def sharded(values: list[Any]) -> list[Any]:
        shard = LazyShardDataset(values, memory_size="4MB", disk_size=0, key=fresh(), shuffle=False)
        try:
            return [[shard[place] for place in range(len(values))] for _ in range(2)][1]
        finally:
            shard.close()

    return {
        "CachedDataset": lambda values: _twice(CachedDataset(values, store, key=fresh()), values),
        "in RAM": lambda values: _twice(BiLevelCachedDataset(values, "4MB", key=fresh()), values),
        "on disk": lambda values: _twice(
            BiLevelCachedDataset(values, 0, "64MB", folder / "levels", key=fresh()), values
        ),
        "LazyShardDataset": sharded,
        "Store.save": in_store,
        "TreeCacheManager": in_tree,
    }


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RoundTrip]:
    return _adapters(tmp_path_factory.mktemp("adapters"))


NAMES = ["CachedDataset", "in RAM", "on disk", "LazyShardDataset", "Store.save", "TreeCacheManager"]


@pytest.mark.parametrize("name", NAMES)
def test_every_adapter_gives_back_what_it_was_given(adapters: dict[str, RoundTrip], name: str) -> None:
    assert all(map(same, adapters[name](VALUES), VALUES))


@pytest.mark.parametrize("name", NAMES)
@settings(
    max_examples=10,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(value=nested())
def test_every_adapter_gives_back_any_nesting(adapters: dict[str, RoundTrip], name: str, value: Any) -> None:
    assert same(adapters[name]([value, 1]), [value, 1])


# A worker of a fork server finds classes by their modules, as a spawned one does, which imports torch.
@pytest.mark.parametrize(
    "starts",
    [
        ("forkserver", "fork"),
        *(
            pytest.param(starts, marks=pytest.mark.matrix)
            for starts in (("spawn", "fork"), ("fork", "spawn"))
        ),
    ],
    ids="-".join,
)
def test_workers_find_values_of_every_kind(tmp_path: Path, starts: tuple[str, str]) -> None:
    with CachedDataset(Numbered(), tmp_path, key="values") as cached:
        for start in starts:
            loader = DataLoader(Checked(cached), batch_size=64, num_workers=1, multiprocessing_context=start)
            assert all(bool(batch.all()) for batch in loader)
        assert cached.hits == cached.misses == len(VALUES)


PLAIN = {
    "image": torch.arange(12, dtype=torch.uint8).view(3, 4),
    "label": 7,
    "boxes": [torch.ones(4), (1, 2.5)],
    "name": "x",
    0: None,
    "when": [True, b"y", 1 + 2j],
}


def test_records_of_plain_samples_are_byte_for_byte_those_of_before() -> None:
    record = pack(PLAIN)
    assert (len(record), blake3(record).hexdigest()[:16]) == (1023, "8a960242f48cc8e5")


class Rights(enum.Flag):
    READ = 1
    WRITE = 2
    RUN = 4


def test_a_flag_comes_back_by_the_names_of_its_members(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = dump(Rights.READ | Rights.RUN)[1]
    numbers = enum.Flag("Rights", {"READ": 1, "WRITE": 4, "RUN": 2}, module=__name__)  # type: ignore[misc]
    monkeypatch.setattr(sys.modules[__name__], "Rights", numbers)
    assert load(kept, "msgpack") == numbers.READ | numbers.RUN
    fewer = enum.Flag("Rights", {"READ": 1, "WRITE": 4}, module=__name__)  # type: ignore[misc]
    monkeypatch.setattr(sys.modules[__name__], "Rights", fewer)
    with pytest.raises(SerializationError, match=r"member 'RUN' .* does not have now; delete the entry"):
        load(kept, "msgpack")
    monkeypatch.setattr(sys.modules[__name__], "Rights", NamedTuple("Rights", [("read", bool)]))
    with pytest.raises(SerializationError, match="of the kind enum, which the class is not now; delete"):
        load(kept, "msgpack")


def test_a_result_with_a_graph_is_refused_where_it_would_train_less_on_a_hit(store: Store) -> None:
    weight = torch.ones(2, requires_grad=True)
    computed: list[Any] = [weight * 2, {"a": torch.ones(1), "b": weight * 2}]
    while computed:
        with pytest.raises(SerializationError, match=r"is a tensor with a graph.*detach\(\)"):
            store.get_or_compute("made", computed.pop)
    assert store.get_or_compute("leaf", lambda: weight).requires_grad
    assert store.save("made", weight * 2).serializer == "safetensors"  # as torch.save does
