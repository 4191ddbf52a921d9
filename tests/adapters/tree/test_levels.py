"""RAM over disk: the disk decides, damage is a miss, the figures are right, and the disk does not fill by
itself.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from castore import CacheWarning, InvalidValueError, SerializationError, Store, StoreError, TooLargeError
from castore.adapters.tree import CacheMetadata, DiskCache, TreeCacheManager, level
from castore.gc import GRACE_SECONDS
from tests.clocks import pass_time
from tests.helpers import flip, noise, payload


@pytest.fixture
def cache(tmp_path: Path) -> TreeCacheManager:
    return TreeCacheManager(tmp_path / "cache")


def castore(cache: TreeCacheManager, *arguments: str) -> str:
    command = [sys.executable, "-m", "castore", "--store", str(cache.store.path), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.mark.parametrize("compression", ["brotli", "", "auto", "ZSTD", None])
def test_an_unknown_compression_is_an_error_before_any_folder_is_made(
    compression: Any, tmp_path: Path
) -> None:
    for kind in (DiskCache, TreeCacheManager):
        with pytest.raises(InvalidValueError, match="choose one of none, gzip, lz4, zstd"):
            kind(tmp_path / "cache", compression=compression)
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("package", ["lz4.frame", "zstandard"])
def test_a_codec_that_is_not_installed_is_an_error_and_never_raw_bytes(package: str, tmp_path: Path) -> None:
    program = (
        f"import sys; sys.modules[{package!r}] = None\n"
        "from castore.adapters.tree import DiskCache\n"
        "DiskCache('cache', compression='lz4')"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1
    assert f"ModuleNotFoundError: import of {package} halted" in done.stderr
    assert not (tmp_path / "cache").exists()


def test_a_folder_of_other_things_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(StoreError, match="no store"):
        TreeCacheManager(tmp_path)


def test_figures_tell_which_level_answered(cache: TreeCacheManager) -> None:
    cache.put("key", [1])
    cache.get("key")
    cache.get("no")
    with TreeCacheManager(cache.store.path) as other:
        other.get("key")
        other.get("key")
        other.contains("key")
        stats = other.stats
    assert {name: stats["memory"][name] for name in ("hits", "misses", "hit_rate")} == {
        "hits": 1,
        "misses": 1,
        "hit_rate": 0.5,
    }
    assert (stats["disk"]["hits"], stats["disk"]["misses"]) == (1, 0)
    stats = cache.stats
    assert (stats["memory"]["hits"], stats["memory"]["misses"]) == (1, 1)
    assert (stats["disk"]["hits"], stats["disk"]["misses"]) == (0, 1)
    assert stats["memory"]["size"] == stats["disk"]["size"] == 1
    assert stats["disk"]["bytes"] == cache.store.stat().stored > 0
    cache.close()
    whole = json.loads(castore(cache, "stat", "--json"))
    assert (whole["memory_hits"], whole["disk_hits"], whole["misses"]) == (2, 1, 1)


def test_a_computation_counts_as_one_miss(cache: TreeCacheManager) -> None:
    for _ in range(3):
        cache.get_or_compute("key", lambda: 1)
    cache.get_or_compute("key", lambda: 2, validate_fn=lambda _: False)
    stats = cache.stats
    assert (stats["memory"]["hits"], stats["memory"]["misses"]) == (2, 2)
    assert (stats["disk"]["hits"], stats["disk"]["misses"]) == (0, 2)


def test_the_command_line_shows_keys_and_metadata(cache: TreeCacheManager) -> None:
    cache.put("tokenized_42", [1], CacheMetadata(tokenizer_hash="llama2", extra={"n": 1}))
    assert castore(cache, "ls") == "tree/tokenized_42\n"
    shown = json.loads(castore(cache, "stat", "tree/tokenized_42", "--json"))
    assert shown["serializer"] == "msgpack"
    assert shown["metadata"]["tokenizer_hash"] == "llama2"
    assert shown["metadata"]["extra"] == {"n": 1}
    assert "source_hash" not in shown["metadata"]


def test_what_the_command_line_removes_is_gone_from_ram(cache: TreeCacheManager) -> None:
    cache.put("key", 1)
    castore(cache, "rm", "tree/key")
    assert cache.get("key") is None
    assert not cache.contains("key")


def test_clearing_leaves_what_others_keep_in_the_store(cache: TreeCacheManager) -> None:
    cache.store.put("imagenet/train.tar", b"precious")
    cache.put("imagenet", 1)
    assert cache.stats["disk"]["size"] == 1
    cache.invalidate()
    assert cache.store.get("imagenet/train.tar") == b"precious"
    assert not cache.contains("imagenet")


def test_clearing_gives_the_disk_back_at_once(cache: TreeCacheManager) -> None:
    cache.put("large", noise(300_000))
    cache.put("replaced", noise(300_000, 1))
    cache.put("replaced", 1)
    assert cache.stats["disk"]["bytes"] > 600_000
    cache.invalidate()
    assert cache.stats["disk"]["bytes"] == 0
    assert not list((cache.store.path / "objects").glob("??/*"))


def test_what_expired_or_was_replaced_goes_from_the_disk_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(level, "SWEEP_SECONDS", 0.0)
    cache = DiskCache(tmp_path / "cache", expiry_seconds=1000)
    cache.put("expires", noise(300_000))
    pass_time(monkeypatch, 2000)
    cache.put("replaced", noise(300_000, 1))
    assert cache.stats["bytes"] < 400_000
    cache.put("replaced", 1)
    pass_time(monkeypatch, GRACE_SECONDS + 1)
    cache.put("last", 1)
    assert cache.stats["bytes"] < 100_000


@pytest.mark.parametrize("memory", [0, 100])
def test_a_damaged_entry_is_a_miss_and_computed_again(memory: int, tmp_path: Path) -> None:
    with TreeCacheManager(tmp_path / "cache") as before:
        before.put("large", noise(300_000))
        before.put("small", [1, 2, 3])
        for name in ("tree/large", "tree/small"):
            path, offset, length = payload(before.store, name)
            flip(path, offset + length // 2)
    cache = TreeCacheManager(tmp_path / "cache", memory_size=memory)
    assert cache.get("large") is None
    assert not cache.contains("large")
    assert cache.get_or_compute("small", lambda: [4]) == [4]
    assert cache.stats["disk"]["misses"] == 2
    cache.put("large", noise(300_000))
    assert cache.contains("large")
    assert cache.store.stat().corrupt == 2


def test_bytes_that_are_no_object_are_a_miss_and_computed_again(cache: TreeCacheManager) -> None:
    cache.store.put("tree/key", b"\xc1 no msgpack", serializer="msgpack")
    assert cache.get("key") is None
    assert cache.get_or_compute("key", lambda: 1) == 1
    found = cache.get("key")
    assert found is not None
    assert found[0] == 1


def test_an_entry_that_was_put_some_other_way_is_read_as_far_as_it_goes(cache: TreeCacheManager) -> None:
    cache.store.put("tree/key", b"bytes", metadata={"config_hash": "a", "author": "me", "created_at": "noon"})
    found = cache.get("key")
    assert found is not None
    assert found[0] == b"bytes"
    assert found[1].config_hash == "a"
    assert found[1].extra == {"author": "me"}


def test_a_budget_evicts_from_both_levels(tmp_path: Path) -> None:
    cache = TreeCacheManager(tmp_path / "cache", max_size="1MB", compression="none")
    for n in range(20):
        cache.put(str(n), noise(100_000, n))
    stats = cache.stats
    assert stats["disk"]["bytes"] <= stats["disk"]["max_bytes"] == 1_000_000
    assert stats["disk"]["evictions"] == 20 - stats["disk"]["size"] > 0
    there = [n for n in range(20) if cache.contains(str(n))]
    assert there == [n for n in range(20) if cache.get(str(n)) is not None]
    assert len(there) == stats["disk"]["size"]
    assert 19 in there
    with pytest.raises(TooLargeError):
        cache.put("huge", noise(2_000_000))
    with pytest.warns(CacheWarning, match="'huge' was computed and is not kept"):
        assert cache.get_or_compute("huge", lambda: noise(2_000_000)) == noise(2_000_000)
    assert not cache.contains("huge")


def test_what_ram_answers_counts_as_used_for_the_budget(tmp_path: Path) -> None:
    cache = TreeCacheManager(tmp_path / "cache", max_size="1MB", compression="none")
    cache.put("hot", noise(100_000, 99))
    for n in range(30):
        cache.put(str(n), noise(100_000, n))
        assert cache.get("hot") is not None, n
        assert cache.stats["memory"]["misses"] == 0
        time.sleep(0.01)


def test_a_value_expires_in_ram_with_its_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with TreeCacheManager(tmp_path / "cache", disk_expiry=1000) as writer:
        writer.put("key", 1)
    # A value in RAM is looked up on disk every second; this test is about the expiry alone.
    monkeypatch.setattr("castore.adapters.tree.manager.TRUST_SECONDS", 10_000.0)
    cache = TreeCacheManager(tmp_path / "cache")
    assert cache.get("key") is not None
    pass_time(monkeypatch, 500)
    assert cache.get("key") is not None
    assert cache.stats["memory"]["hits"] == 1
    pass_time(monkeypatch, 501)
    assert cache.get("key") is None


def test_the_shorter_expiry_of_putting_and_reading_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("castore.adapters.tree.manager.TRUST_SECONDS", 10_000.0)
    forever, brief = (
        TreeCacheManager(tmp_path / "cache"),
        TreeCacheManager(tmp_path / "cache", disk_expiry=1000),
    )
    forever.put("key", 1)
    assert brief.contains("key")
    assert brief.get("key") is not None
    pass_time(monkeypatch, 2000)
    assert brief.get("key") is None
    assert not brief.contains("key")
    assert forever.contains("key")
    assert brief.get_or_compute("key", lambda: 2) == 2


def test_an_expiry_is_no_default_of_the_folder(tmp_path: Path) -> None:
    with TreeCacheManager(tmp_path / "cache", disk_expiry="1h") as brief:
        brief.put("brief", 1)
    with TreeCacheManager(tmp_path / "cache") as cache:
        cache.put("lasting", 1)
        entries = {entry.name: entry.expires for entry in cache.store.entries()}
    assert entries["tree/lasting"] is None
    assert entries["tree/brief"] == pytest.approx(time.time() + 3600, abs=60)


def test_a_failing_computation_keeps_nothing(cache: TreeCacheManager) -> None:
    with pytest.raises(ZeroDivisionError):
        cache.get_or_compute("key", lambda: 1 // 0)
    assert not cache.contains("key")
    with pytest.raises(SerializationError):
        cache.get_or_compute("key", object)
    assert not cache.contains("key")
    assert cache.get_or_compute("key", lambda: 1) == 1


def test_a_computation_may_use_the_cache_but_not_ask_for_itself(cache: TreeCacheManager) -> None:
    assert cache.get_or_compute("a", lambda: cache.get_or_compute("b", lambda: 1) + 1) == 2
    with pytest.raises(InvalidValueError, match="asks for its own result"):
        cache.get_or_compute("c", lambda: cache.get_or_compute("c", lambda: 1))


def test_validation_is_told_the_metadata_that_belongs_to_the_value(cache: TreeCacheManager) -> None:
    cache.put("key", 1, CacheMetadata(config_hash="a", num_examples=3, extra={"b": [1]}))
    for place in (cache, TreeCacheManager(cache.store.path)):
        seen: list[CacheMetadata] = []
        place.get_or_compute(
            "key",
            lambda: 2,
            validate_fn=lambda meta, seen=seen: not seen.append(meta),  # type: ignore[misc]
        )
        assert seen == [CacheMetadata(config_hash="a", num_examples=3, extra={"b": [1]})]


def test_the_cache_survives_the_loss_of_its_insides(tmp_path: Path) -> None:
    """The page's clean-up, run on the cache itself, removes old folders of the cache."""
    import shutil

    with TreeCacheManager(tmp_path / "cache") as cache:
        cache.put("key", noise(300_000))
        cache.put("small", 1)
    for item in sorted((tmp_path / "cache").iterdir()):
        if item.is_dir() and item.name != "locks":
            shutil.rmtree(item)
    with TreeCacheManager(tmp_path / "cache") as again:
        assert again.get("key") is None
        assert again.get("small") is None


def test_a_cache_is_opened_by_path_objects_and_relative_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    cache = TreeCacheManager("cache")
    cache.put("key", 1)
    os.chdir("/")
    assert cache.contains("key")
    assert TreeCacheManager(tmp_path / "cache").contains("key")
    assert Store(tmp_path / "cache").load("tree/key") == 1
