"""RAM is bounded, in values and in bytes, and its clock is not the date."""

from __future__ import annotations

import threading
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from castore import InvalidValueError
from castore.adapters.tree import MemoryCache, TreeCacheManager
from tests.clocks import pass_time


def test_the_least_recently_used_value_goes_first() -> None:
    cache = MemoryCache(max_size=3)
    for key in "abc":
        cache.put(key, key)
    cache.get("a")
    cache.put("d", "d")
    assert [key for key in "abcd" if cache.contains(key)] == ["a", "c", "d"]
    assert cache.stats["evictions"] == 1
    assert cache.stats["size"] == cache.stats["max_size"] == 3


@pytest.mark.parametrize("options", [{"max_size": "100KB"}, {"max_size": 10**6, "max_bytes": 100_000}])
def test_bytes_are_bounded_by_what_values_really_occupy(options: dict[str, Any]) -> None:
    cache = MemoryCache(**options)
    tracemalloc.start()
    try:
        for n in range(3000):
            cache.put(f"key {n}", [n])
        occupied = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    stats = cache.stats
    assert 90_000 < stats["bytes"] <= stats["max_bytes"] == 100_000
    assert occupied < 120_000
    assert stats["size"] + stats["evictions"] == 3000


def test_a_value_larger_than_the_room_replaces_nothing_but_its_own_key() -> None:
    cache = MemoryCache("10KB")
    cache.put("small", 1)
    cache.put("large", 1)
    cache.put("large", b"x" * 20_000)
    assert not cache.contains("large")
    assert cache.contains("small")


def test_no_room_keeps_nothing(tmp_path: Path) -> None:
    for cache in (MemoryCache(0), MemoryCache("0")):
        cache.put("key", 1)
        assert cache.get("key") is None
        assert cache.stats["bytes"] == 0
    manager = TreeCacheManager(tmp_path / "cache", memory_size=0)
    manager.put("key", 1)
    assert manager.get("key") is not None
    assert manager.stats["memory"]["size"] == manager.stats["memory"]["hits"] == 0
    assert manager.stats["disk"]["hits"] == 1


def test_the_manager_bounds_its_ram_in_values_and_in_bytes(tmp_path: Path) -> None:
    in_values = TreeCacheManager(tmp_path / "cache", memory_size=3)
    in_bytes = TreeCacheManager(tmp_path / "cache", memory_size="100KB")
    in_both = TreeCacheManager(tmp_path / "cache", memory_size=100, memory_bytes="50KB")
    assert in_values.stats["memory"]["max_bytes"] == 128_000_000
    for cache in (in_values, in_bytes, in_both):
        for n in range(30):
            cache.put(str(n), b"%5d" % n * 2000)
    assert [cache.stats["memory"]["size"] for cache in (in_values, in_bytes, in_both)] == [3, 9, 4]
    assert in_bytes.stats["memory"]["max_size"] is None
    assert all(cache.stats["disk"]["size"] == 30 for cache in (in_values, in_bytes, in_both))


@pytest.mark.parametrize("size", [-1, True, None, 1.5, "much", "-1"])
def test_a_size_that_makes_no_sense_is_an_error_before_any_folder_is_made(size: Any, tmp_path: Path) -> None:
    with pytest.raises(InvalidValueError):
        MemoryCache(size)
    with pytest.raises(InvalidValueError):
        TreeCacheManager(tmp_path / "cache", memory_size=size)
    with pytest.raises(InvalidValueError, match="both bound bytes"):
        TreeCacheManager(tmp_path / "cache", memory_size="1GB", memory_bytes="1GB")
    assert not (tmp_path / "cache").exists()


def test_a_change_of_the_date_neither_ends_nor_prolongs_a_value_in_ram(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache = MemoryCache(expiry_seconds=1000)
    cache.put("key", 1)
    pass_time(monkeypatch, 10**6, "time")
    assert cache.contains("key")
    pass_time(monkeypatch, -2 * 10**6, "time")
    pass_time(monkeypatch, 2000, "monotonic")
    assert not cache.contains("key")


def test_threads_share_a_memory_cache() -> None:
    cache = MemoryCache(max_size=50)
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for n in range(500):
                cache.put(f"{n % 80}", {"n": n % 80})
                found = cache.get(f"{(n * 7 + number) % 80}")
                assert found is None or found[0] == {"n": (n * 7 + number) % 80}
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    stats = cache.stats
    assert stats["hits"] + stats["misses"] == 2000
    assert stats["size"] == 50
