"""Threads and processes on one folder: one computation, and the same value for all."""

from __future__ import annotations

import multiprocessing
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from castore.adapters.tree import CacheMetadata, TreeCacheManager
from tests.helpers import in_processes


def compute_slowly(log: Path, value: Any) -> Any:
    with log.open("a") as file:
        file.write("x")
    time.sleep(0.3)
    return value


def spawned(cache: TreeCacheManager, log: Path) -> Any:
    return cache.get_or_compute("key", lambda: compute_slowly(log, [1, 2]))


def test_threads_and_processes_compute_once(tmp_path: Path) -> None:
    log = tmp_path / "log"
    inherited = TreeCacheManager(tmp_path / "cache")

    def ask(number: int) -> list[Any]:
        cache = inherited if number % 2 else TreeCacheManager(tmp_path / "cache")
        results: list[Any] = []
        threads = [
            threading.Thread(
                target=lambda: results.append(
                    cache.get_or_compute(
                        "key",
                        lambda: compute_slowly(log, [1, 2]),
                        CacheMetadata(config_hash="a"),
                        validate_fn=lambda meta: meta.config_hash == "a",
                    )
                )
            )
            for _ in range(3)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results

    assert in_processes(4, ask) == [[[1, 2]] * 3] * 4
    assert log.read_text() == "x"


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_cache_goes_to_workers_of_any_start_method(method: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    cache = TreeCacheManager(tmp_path / "cache")
    with multiprocessing.get_context(method).Pool(2) as pool:
        assert pool.starmap(spawned, [(cache, log)] * 4) == [[1, 2]] * 4
    assert log.read_text() == "x"


def test_what_one_process_changes_another_sees_though_it_has_it_in_ram(tmp_path: Path) -> None:
    here, there = TreeCacheManager(tmp_path / "cache"), TreeCacheManager(tmp_path / "cache")

    def elsewhere(change: Any) -> None:
        in_processes(1, lambda _: change(there))

    def both_levels_warm() -> None:
        here.put("key", "old")
        for _ in range(2):
            found = here.get("key")
            assert found is not None
            assert found[0] == "old"

    both_levels_warm()
    elsewhere(lambda cache: cache.put("key", "new", CacheMetadata(config_hash="b")))
    assert here.get("key") == ("new", CacheMetadata(config_hash="b"))
    elsewhere(lambda cache: cache.put("key", "new", CacheMetadata(config_hash="c")))
    assert here.get("key") == ("new", CacheMetadata(config_hash="c"))
    both_levels_warm()
    elsewhere(lambda cache: cache.invalidate("key"))
    assert here.get("key") is None
    both_levels_warm()
    elsewhere(lambda cache: cache.invalidate())
    assert not here.contains("key")
    assert here.get("key") is None
    elsewhere(lambda cache: cache.put("key", "again"))
    assert here.contains("key")


def test_a_crowd_on_one_folder_never_sees_a_wrong_value(tmp_path: Path) -> None:
    def work(number: int) -> int:
        cache = TreeCacheManager(tmp_path / "cache", memory_size=5)
        hits = 0
        for n in range(120):
            key = f"key {(n * (number + 1)) % 10}"
            found = cache.get(key)
            if found is not None:
                data, metadata = found
                assert data["key"] == key
                # The value and the metadata belong to one put.
                assert metadata.extra == {"by": data["by"]}
                hits += 1
            if n % 17 == 0:
                cache.invalidate(key)
            elif n % 3 == 0:
                cache.put(key, {"key": key, "by": [number, n]}, CacheMetadata(extra={"by": [number, n]}))
            if n == 60 and number == 0:
                cache.invalidate()
        return hits

    assert sum(in_processes(6, work)) > 100


def test_a_forked_child_goes_on_with_what_is_in_ram(tmp_path: Path) -> None:
    cache = TreeCacheManager(tmp_path / "cache")
    cache.put("key", [1])

    def child(number: int) -> tuple[Any, int]:
        found = cache.get("key")
        assert found is not None
        cache.put(f"child {number}", number)
        return found[0], cache.stats["memory"]["hits"]

    assert in_processes(3, child) == [([1], 1)] * 3
    assert all(cache.contains(f"child {number}") for number in range(3))
