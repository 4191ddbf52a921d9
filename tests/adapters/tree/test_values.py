"""Values come back equal, each as an object of the caller's own, with their metadata; other values are
refused.
"""

from __future__ import annotations

import datetime as dt
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pyarrow
import pytest

from castore import InvalidValueError, SerializationError
from castore.adapters.tree import CacheMetadata, DiskCache, MemoryCache, TreeCacheManager
from tests.clocks import pass_time

Cache = MemoryCache | DiskCache | TreeCacheManager
Make = Callable[..., Cache]


@pytest.fixture(params=["memory", "disk", "tree", "tree without RAM"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    """Makes the cache of each kind, on one folder."""
    folder = tmp_path / "cache"

    def build(**options: Any) -> Cache:
        if request.param == "memory":
            return MemoryCache(**options)
        if request.param == "disk":
            return DiskCache(folder, **options)
        size = 0 if request.param == "tree without RAM" else 100
        return TreeCacheManager(folder, memory_size=size, **options)

    return build


def got(cache: Cache, key: str) -> tuple[Any, CacheMetadata]:
    found = cache.get(key)
    assert found is not None
    return found


@pytest.mark.parametrize(
    "value",
    [
        None,
        False,
        0,
        "",
        b"",
        [],
        {},
        "text",
        b"bytes",
        10**40,
        {"ids": [1, 2, 3], "pair": (1, (2.5, None)), 7: "int key"},
        [dt.datetime(2026, 1, 2, tzinfo=dt.timezone.utc)],
    ],
    ids=repr,
)
def test_a_value_comes_back_as_it_is(make: Make, value: Any) -> None:
    cache = make()
    cache.put("key", value)
    back, _ = got(cache, "key")
    assert back == value
    assert type(back) is type(value)


def test_arrays_tensors_and_tables_come_back(make: Make) -> None:
    torch = pytest.importorskip("torch")
    cache = make()
    array, tensor = numpy.arange(6, dtype="uint16").reshape(2, 3), torch.arange(4, dtype=torch.bfloat16)
    table = pyarrow.table({"text": ["a", "b"], "n": [1, None]})
    for key, value in {"array": array, "tensor": tensor, "table": table, "all": [array, tensor]}.items():
        cache.put(key, value)
    back = got(cache, "array")[0]
    assert back.dtype == array.dtype
    assert (back == array).all()
    assert torch.equal(got(cache, "tensor")[0], tensor)
    assert got(cache, "table")[0].equals(table)
    first, second = got(cache, "all")[0]
    assert (first == array).all()
    assert torch.equal(second, tensor)


def test_what_comes_out_is_no_door_into_the_cache(make: Make) -> None:
    torch = pytest.importorskip("torch")
    cache = make()
    given = {"ids": [1, 2], "array": numpy.zeros(3), "tensor": torch.zeros(3), "tensors": [torch.zeros(1)]}
    extra = {"list": [1]}
    cache.put("key", given, CacheMetadata(extra=extra))
    given["ids"].append(3)
    extra["list"].append(2)
    for _ in range(3):
        data, metadata = got(cache, "key")
        assert data["ids"] == [1, 2]
        assert data["array"].sum() == data["tensor"].sum() == data["tensors"][0].sum() == 0
        assert metadata == CacheMetadata(extra={"list": [1]})
        data["ids"].append(9)
        data["array"][:] = data["tensor"][:] = data["tensors"][0][:] = 9
        metadata.extra["list"].append(9)
        metadata.version = "changed"


def test_a_bare_tensor_or_array_is_no_door_either(make: Make) -> None:
    torch = pytest.importorskip("torch")
    cache = make()
    for key, value in {
        "tensor": torch.zeros(3),
        "dict": {"a": torch.zeros(3)},
        "array": numpy.zeros(3),
    }.items():
        cache.put(key, value)
        for _ in range(2):
            data, _ = got(cache, key)
            part = data["a"] if key == "dict" else data
            assert part.sum() == 0
            part[:] = 1


def test_what_no_serializer_takes_is_refused_at_put_and_changes_nothing(make: Make) -> None:
    cache = make()
    cache.put("key", "before")
    with pytest.raises(SerializationError, match=r"value\['part'\]\[0\]: <class 'object'> has no serializer"):
        cache.put("key", {"part": [object()]})
    assert got(cache, "key")[0] == "before"


def test_pickle_works_only_where_both_sides_allow_it(make: Make) -> None:
    cache = make(allow_pickle=True)
    cache.put("key", {"part": print})
    assert got(cache, "key")[0] == {"part": print}
    if isinstance(cache, MemoryCache):
        return
    with pytest.raises(SerializationError, match="pickle"):
        make().get("key")


def test_a_put_replaces_value_and_metadata(make: Make) -> None:
    cache = make()
    cache.put("key", 1, CacheMetadata(config_hash="one"))
    cache.put("key", 2, CacheMetadata(config_hash="two"))
    assert got(cache, "key") == (2, CacheMetadata(config_hash="two"))
    cache.put("key", 2, CacheMetadata(config_hash="three"))  # both puts have the same bytes
    assert got(cache, "key") == (2, CacheMetadata(config_hash="three"))
    cache.put("key", 2)
    assert got(cache, "key") == (2, CacheMetadata())


def test_the_same_bytes_of_another_type_are_told_apart(make: Make) -> None:
    cache = make()
    for value in (b"abc", "abc", b"abc"):
        cache.put("key", value)
        assert got(cache, "key")[0] == value


def test_put_sets_the_time(make: Make) -> None:
    cache = make()
    old = CacheMetadata(created_at=1.0)
    for metadata in (None, old):
        before = time.time()
        cache.put("key", 1, metadata)
        assert before <= got(cache, "key")[1].created_at <= time.time()
    assert old.created_at == 1.0


@pytest.mark.parametrize("extra", [{"n": {1}}, {"pair": (1, 2)}, {"nested": {1: "a"}}, {"x": float("nan")}])
def test_metadata_that_json_would_change_is_refused(make: Make, extra: dict[str, Any]) -> None:
    cache = make()
    with pytest.raises(SerializationError, match=r"metadata\.extra"):
        cache.put("key", 1, CacheMetadata(extra=extra))
    assert not cache.contains("key")


def test_metadata_of_another_kind_is_refused(make: Make) -> None:
    with pytest.raises(InvalidValueError, match="CacheMetadata"):
        make().put("key", 1, {"config_hash": "a"})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "field", ["version", "source_hash", "tokenizer_hash", "transform_hash", "config_hash"]
)
def test_every_given_hash_counts_for_validity(field: str) -> None:
    message: dict[str, Any] = {field: "a"}
    metadata = CacheMetadata(**message)
    assert metadata.is_valid_for(**{field: "a"})
    assert not metadata.is_valid_for(**{field: "b"})
    assert metadata.is_valid_for()
    assert not CacheMetadata().is_valid_for(**{field: "a"})


def test_an_expired_value_is_a_miss_and_counted(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    probe = make()
    if isinstance(probe, TreeCacheManager):
        cache: Cache = make(disk_expiry=1000)
    else:
        cache = make(expiry_seconds=1000)
    cache.put("key", 1)
    assert cache.contains("key")
    assert cache.get("key") is not None
    pass_time(monkeypatch, 2000)
    assert not cache.contains("key")
    assert cache.get("key") is None
    stats = cache.stats if "hits" in cache.stats else cache.stats["disk"]
    assert stats["misses"] == 1
    assert stats["size"] == 0
    cache.put("key", 2)
    assert got(cache, "key")[0] == 2


def test_a_cache_pickles_as_its_options(make: Make) -> None:
    cache = make(allow_pickle=True)
    cache.put("key", {1, 2})
    again = pickle.loads(pickle.dumps(cache))
    if isinstance(cache, MemoryCache):
        assert again.get("key") is None
        again.put("key", {1, 2})
    assert got(again, "key")[0] == {1, 2}
