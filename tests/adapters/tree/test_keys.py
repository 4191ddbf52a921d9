"""Any text is a key with a valid name of its own, and the key of a config identifies exactly that config."""

from __future__ import annotations

import re
from pathlib import Path

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from castore import InvalidValueError, UnhashableError
from castore.adapters.tree import DiskCache, MemoryCache, TreeCacheManager
from castore.adapters.tree.entry_names import name_of
from castore.names import check_name

ODD = [
    "",
    ".",
    "..",
    "a b/../c",
    "/etc/passwd",
    "a",
    "a/b",
    "a/b/",
    "a//b",
    ".castore",
    "nul\0inside",
    "line\nbreak",
    "%",
    "%2F",
    "/",
    "%~",
    "\udc80",
    "x" * 255,
    "x" * 256,
    "x" * 100_000,
    "x" * 100_000 + "y",
    "é" * 128,
    "键" * 100,
    "ключ",
    "tree",
]


@pytest.mark.parametrize("kind", ["memory", "disk", "tree"])
def test_any_text_is_a_key_of_its_own(kind: str, tmp_path: Path) -> None:
    cache: MemoryCache | DiskCache | TreeCacheManager
    if kind == "memory":
        cache = MemoryCache()
    else:
        cache = (DiskCache if kind == "disk" else TreeCacheManager)(tmp_path / "cache")
    for place, key in enumerate(ODD):
        assert not cache.contains(key)
        cache.put(key, place)
    for place, key in enumerate(ODD):
        found = cache.get(key)
        assert found is not None
        assert found[0] == place
    for key in ODD:
        assert cache.contains(key)
        cache.invalidate(key)
        assert not cache.contains(key)
        assert cache.get(key) is None


@given(st.lists(st.text(st.characters(), max_size=300) | st.text("%~./2EFx", max_size=8), unique=True))
def test_names_of_keys_are_valid_and_never_collide(keys: list[str]) -> None:
    names = [check_name(name_of(key)) for key in keys]
    assert len(set(names)) == len(keys)
    # None is the folder of another.
    assert all(re.fullmatch("tree/[^/]+", name) for name in names)


@pytest.mark.parametrize("key", ["my_key", "tokenized_a1b2c3", "with space", "v1.0-final", "ключ 键"])
def test_readable_keys_stay_readable(key: str) -> None:
    assert name_of(key) == f"tree/{key}"


def test_the_start_of_a_long_key_stays_readable() -> None:
    assert name_of("batch of a long path " * 100).startswith("tree/batch of a long path batch")


def test_a_numpy_text_is_the_same_key_as_a_plain_one(tmp_path: Path) -> None:
    cache = TreeCacheManager(tmp_path / "cache")
    cache.put(numpy.str_("key"), 1)
    assert cache.contains("key")


@pytest.mark.parametrize("key", [1, None, b"key", ("a", 1)])
def test_a_key_that_is_no_text_is_an_error_that_says_so(key: object, tmp_path: Path) -> None:
    for cache in (MemoryCache(), DiskCache(tmp_path / "cache"), TreeCacheManager(tmp_path / "cache")):
        with pytest.raises(InvalidValueError, match="a key must be a str"):
            cache.put(key, 1)  # type: ignore[arg-type]


def test_keys_of_configs_are_exact_in_type() -> None:
    key = TreeCacheManager.compute_key
    configs: list[object] = [{"n": 1}, {"n": 1.0}, {"n": "1"}, {"n": True}, {"n": (1,)}, {"n": [1]}]
    assert len({key(config) for config in configs}) == len(configs)
    with pytest.raises(UnhashableError, match=r"config\['model'\]"):
        key({"model": object()})


def test_the_content_counts_only_where_asked_for(tmp_path: Path) -> None:
    key = TreeCacheManager.compute_key
    assert key({}, content="a") == key({}, content="b") == key({})
    assert key({}, include_content_hash=True, content="a") != key({}, include_content_hash=True, content="b")
    (tmp_path / "file").write_text("a")
    assert key({}, include_content_hash=True, content=tmp_path / "file") == key(
        {}, include_content_hash=True, content=b"a"
    )
    with pytest.raises(InvalidValueError, match="pass content="):
        key({}, include_content_hash=True)


def test_any_text_is_a_prefix(tmp_path: Path) -> None:
    key = TreeCacheManager.compute_key({}, prefix="../a b/")
    assert key.startswith("../a b/_")
    assert "_" not in TreeCacheManager.compute_key({}, prefix="")
    cache = TreeCacheManager(tmp_path / "cache")
    cache.put(key, 1)
    assert cache.contains(key)
