"""The examples on these classes in EasyData's page on caching run unchanged, except for the import.

Names of the page are kept, odd ones too. A stub replaces what the page leaves undefined: a tokenizer to
download, a function of the user. The folders are the test's own.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from castore.adapters.tree import CacheMetadata, DiskCache, MemoryCache, TreeCacheManager
from tests.clocks import pass_time


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def tokenizer(text: str, max_length: int = 100, truncation: bool = False) -> dict[str, list[int]]:
    ids = [len(word) for word in text.split()][:max_length]
    return {"input_ids": ids, "attention_mask": [1] * len(ids)}


class Counted:
    """A function that counts its calls."""

    def __init__(self, result: Any) -> None:
        self.result = result
        self.calls = 0

    def __call__(self, *args: Any) -> Any:
        self.calls += 1
        return self.result


def test_tree_cache_manager(capsys: pytest.CaptureFixture[str]) -> None:
    cache = TreeCacheManager(cache_dir="./cache", memory_size=100, disk_expiry=86400, compression="zstd")
    cache.put("my_key", {"input_ids": [1, 2, 3]})
    result = cache.get("my_key")
    if result:
        data, metadata = result
        print(data)
    if cache.contains("my_key"):
        print("Cached!")
    assert capsys.readouterr().out == "{'input_ids': [1, 2, 3]}\nCached!\n"
    assert time.time() - metadata.created_at < 60
    cache.put("other", 1)
    cache.invalidate("my_key")
    assert not cache.contains("my_key")
    assert cache.get("my_key") is None
    assert cache.contains("other")
    cache.invalidate()
    assert not cache.contains("other")


def test_cache_on_compute() -> None:
    cache = TreeCacheManager("./cache")
    expensive_tokenization = Counted(tokenizer("Hello world")["input_ids"])
    for _ in range(2):
        result = cache.get_or_compute(
            key="text_123",
            compute_fn=lambda: expensive_tokenization("Hello world"),
            metadata=CacheMetadata(source_hash="abc123", tokenizer_hash="llama2"),
        )
        assert result == [5, 5]
    assert expensive_tokenization.calls == 1
    found = cache.get("text_123")
    assert found is not None
    assert found[1] == CacheMetadata(source_hash="abc123", tokenizer_hash="llama2")


def test_cache_keys() -> None:
    config = {"tokenizer": "meta-llama/Llama-2-7b", "max_length": 2048, "data_file": "data.jsonl"}
    key = TreeCacheManager.compute_key(config=config, prefix="tokenized")
    prefix, digits = key.split("_")
    assert prefix == "tokenized"
    assert len(bytes.fromhex(digits)) == 20
    assert key == TreeCacheManager.compute_key(config=dict(reversed(config.items())), prefix="tokenized")
    key = TreeCacheManager.compute_key(
        config={"tokenizer": "llama"}, prefix="example", include_content_hash=True, content="Hello world"
    )
    prefix, first, second = key.split("_")
    assert prefix == "example"
    assert len(bytes.fromhex(first)) == len(bytes.fromhex(second)) == 20
    other = TreeCacheManager.compute_key(
        config={"tokenizer": "llama"}, prefix="example", include_content_hash=True, content="Hello there"
    )
    assert other.startswith(f"example_{first}_")
    assert other != key


def test_cache_metadata(capsys: pytest.CaptureFixture[str]) -> None:
    metadata = CacheMetadata(
        version="1.0",
        source_hash="abc123",
        tokenizer_hash="llama2_7b",
        transform_hash="v2",
        num_examples=100000,
        config_hash="xyz789",
        extra={"custom": "data"},
    )
    if metadata.is_valid_for(config_hash="xyz789", source_hash="abc123"):
        print("Cache is valid")
    assert capsys.readouterr().out == "Cache is valid\n"
    assert not metadata.is_valid_for(config_hash="xyz789", source_hash="other")
    for cache in (MemoryCache(), DiskCache("./cache")):
        cache.put("key", 1, metadata)
        assert cache.get("key") == (1, metadata)


def test_memory_cache(capsys: pytest.CaptureFixture[str]) -> None:
    cache = MemoryCache(max_size=1000)
    cache.put("key1", {"data": "value"})
    result = cache.get("key1")
    assert result is not None
    assert result[0] == {"data": "value"}
    stats = cache.stats
    print(f"Hit rate: {stats['hit_rate']:.2%}")
    print(f"Size: {stats['size']}/{stats['max_size']}")
    assert capsys.readouterr().out == "Hit rate: 100.00%\nSize: 1/1000\n"


def test_disk_cache() -> None:
    cache = DiskCache(cache_dir="./disk_cache", compression="zstd", expiry_seconds=86400)
    large_data = {"text": ["a line of text"] * 10_000}
    cache.put("key", large_data)
    result = cache.get("key")
    assert result is not None
    assert result[0] == large_data
    assert cache.contains("key")
    assert cache.stats["bytes"] < 10_000


@pytest.mark.parametrize("compression", ["none", "gzip", "lz4", "zstd"])
@pytest.mark.parametrize("kind", [DiskCache, TreeCacheManager])
def test_compression_options(compression: str, kind: type[DiskCache] | type[TreeCacheManager]) -> None:
    data = {"text": [f"a line of text {n % 10}" for n in range(10_000)]}
    with kind("./cache", compression=compression) as cache:
        cache.put("key", data)
        entry = cache.store.entry("tree/key")
        assert entry is not None
        assert entry.codec == compression
        assert (entry.stored < entry.size / 2) == (compression != "none")
    with kind("./cache") as again:
        found = again.get("key")
        assert found is not None
        assert found[0] == data


def test_tokenization_cache() -> None:
    cache = TreeCacheManager("./tokenizer_cache")
    used = Counted(tokenizer("some text", max_length=2048, truncation=True))

    def tokenize_with_cache(text: str, text_id: str) -> Any:
        key = f"tokenized_{text_id}"
        result = cache.get(key)
        if result:
            return result[0]
        tokenized = used(text)
        cache.put(key, dict(tokenized), metadata=CacheMetadata(tokenizer_hash="llama2_7b", num_examples=1))
        return tokenized

    assert tokenize_with_cache("some text", "1") == tokenize_with_cache("some text", "1") == used.result
    assert used.calls == 1


def test_checkpoint_aware_caching() -> None:
    cache = TreeCacheManager("./training_cache")
    load_and_process_batch = Counted({"ids": [1, 2]})

    def get_cached_batch(step: int, shard: str, row: int) -> Any:
        key = f"batch_{shard}_{row}"
        result = cache.get(key)
        if result:
            return result[0]
        batch = load_and_process_batch(shard, row)
        cache.put(key, batch)
        return batch

    # A shard is often a path: any text is a key.
    for step in range(3):
        assert get_cached_batch(step, "../data/shard-0001.tar", 7) == {"ids": [1, 2]}
    assert load_and_process_batch.calls == 1


def test_automatic_invalidation() -> None:
    cache = TreeCacheManager("./cache")
    compute_data = Counted([1])

    def get_with_validation(key: str, expected_config_hash: str) -> Any:
        return cache.get_or_compute(
            key=key,
            compute_fn=lambda: compute_data(),  # noqa: PLW0108 - the page's
            metadata=CacheMetadata(config_hash=expected_config_hash),
            validate_fn=lambda meta: meta.config_hash == expected_config_hash,
        )

    get_with_validation("key", "one")
    get_with_validation("key", "one")
    assert compute_data.calls == 1
    get_with_validation("key", "two")
    get_with_validation("key", "two")
    assert compute_data.calls == 2


def test_manual_invalidation() -> None:
    cache = TreeCacheManager("./cache")
    cache.put("outdated_key", 1)
    cache.put("key2", 2)
    cache.put("key4", 4)
    cache.invalidate("outdated_key")
    for key in ["key1", "key2", "key3"]:
        if cache.contains(key):
            cache.invalidate(key)
    assert [key for key in ("outdated_key", "key2", "key4") if cache.contains(key)] == ["key4"]
    cache.invalidate()
    assert cache.stats["disk"]["size"] == cache.stats["memory"]["size"] == 0


def test_expiry_based_invalidation(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = DiskCache(cache_dir="./cache", expiry_seconds=3600)
    cache.put("key", 1)
    assert cache.contains("key")
    pass_time(monkeypatch, 3601)
    assert not cache.contains("key")
    assert cache.get("key") is None


def test_appropriate_locations(tmp_path: Path) -> None:
    for place in ("nvme/cache", "shared/cache"):
        cache = TreeCacheManager(tmp_path / place)
        cache.put("key", 1)
        assert (tmp_path / place).is_dir()
    ephemeral = MemoryCache(max_size=1000)
    ephemeral.put("key", 1)
    assert ephemeral.contains("key")


def test_version_in_keys() -> None:
    def key(version: str) -> str:
        return TreeCacheManager.compute_key(config={"tokenizer": "llama", "version": version})

    assert len(bytes.fromhex(key("v2"))) == 20
    assert key("v2") != key("v3")


def test_monitoring(capsys: pytest.CaptureFixture[str]) -> None:
    cache = TreeCacheManager("./cache")
    stats = cache.stats
    print(f"Memory: {stats['memory']}")
    print(f"Disk: {stats['disk']}")
    memory_hits = stats["memory"]["hit_rate"]
    if memory_hits < 0.5:
        print("Consider increasing memory cache size")
    assert capsys.readouterr().out.endswith("Consider increasing memory cache size\n")
    wanted = {"hits", "misses", "hit_rate", "size", "max_size", "bytes", "max_bytes", "evictions"}
    assert set(stats["memory"]) == set(stats["disk"]) == wanted


def cleanup_old_caches(cache_dir: str, max_age_days: int = 7) -> list[str]:
    import shutil

    cache_path = Path(cache_dir)
    now = time.time()
    max_age_seconds = max_age_days * 86400
    removed = []
    for item in cache_path.iterdir():
        if item.is_dir():
            age = now - item.stat().st_mtime
            if age > max_age_seconds:
                shutil.rmtree(item)
                removed.append(item.name)
    return sorted(removed)


def test_clean_up_of_old_caches() -> None:
    for place in ("caches/old", "caches/new"):
        with TreeCacheManager(place) as cache:
            cache.put("key", 1)
    week_ago = time.time() - 8 * 86400
    os.utime("caches/old", (week_ago, week_ago))
    assert cleanup_old_caches("caches") == ["old"]
    assert TreeCacheManager("caches/new").contains("key")
    assert not TreeCacheManager("caches/old").contains("key")


def test_cache_not_being_used(capsys: pytest.CaptureFixture[str]) -> None:
    cache = TreeCacheManager("./cache")
    config = {"tokenizer": "llama"}
    cache.put(TreeCacheManager.compute_key(config), 1, CacheMetadata(config_hash="abc"))
    key = TreeCacheManager.compute_key(config)
    print(f"Looking for key: {key}")
    print(f"Cache contains: {cache.contains(key)}")
    result = cache.get(key)
    if result:
        _, meta = result
        print(f"Cached metadata: {meta}")
    out = capsys.readouterr().out
    assert "Cache contains: True\nCached metadata: CacheMetadata(" in out
    assert "config_hash='abc'" in out


def test_disk_space_issues() -> None:
    cache = DiskCache(cache_dir="./cache", expiry_seconds=3600)
    assert cache.stats["max_bytes"] is None
    assert MemoryCache(max_size=100).stats["max_size"] == 100


@pytest.mark.parametrize("given", [True, False])
def test_stale_cache(given: bool) -> None:
    cache = TreeCacheManager("./cache")
    compute = Counted([1])
    metadata = CacheMetadata(config_hash="current", tokenizer_hash="llama")

    def ask(current_hash: str) -> Any:
        return cache.get_or_compute(
            key="key",
            compute_fn=compute,
            metadata=metadata if given else None,  # the page makes this value, and does not pass it
            validate_fn=lambda m: m.config_hash == current_hash,
        )

    ask("current")
    ask("current")
    assert compute.calls == (1 if given else 2)
