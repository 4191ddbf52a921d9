"""Tree caches of several nodes share what they compute over a remote."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from castore import Store
from castore.adapters.tree import CacheMetadata, TreeCacheManager
from castore.errors import NotFoundError
from tests.remote.nodes import end_fetcher, know

Open = Callable[..., TreeCacheManager]


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Open]:
    """Opens the cache of a node, by its name."""
    with ExitStack() as stack:

        def open_cache(name: str, **options: Any) -> TreeCacheManager:
            with Store(tmp_path / name) as store:
                know(store, "team", (tmp_path / "bucket").as_uri())
            cache = TreeCacheManager(tmp_path / name, **({"remote": "team"} | options))
            stack.callback(end_fetcher, cache.store)
            stack.callback(cache.close)
            return cache

        yield open_cache


def refuse() -> Any:
    raise AssertionError("it is computed again")


@pytest.mark.parametrize("key", ["plain", "with/slash", "", "..", "é" * 300])
def test_a_value_is_computed_once_for_all_nodes(node: Open, key: str) -> None:
    first, second = node("one"), node("two")
    about = CacheMetadata(extra={"step": 3})
    assert first.get_or_compute(key, lambda: {"words": ["a", b"b"]}, about) == {"words": ["a", b"b"]}
    first.close()  # waits until it is offered
    assert second.get_or_compute(key, refuse) == {"words": ["a", b"b"]}
    found = second.get(key)
    assert found is not None
    assert found[1].extra == {"step": 3}
    assert second.stats["memory"]["hits"] == 1
    assert first.get_or_compute(key, refuse) == {"words": ["a", b"b"]}


def test_a_value_that_is_refused_is_computed_and_replaced(node: Open) -> None:
    def is_new(about: CacheMetadata) -> bool:
        return bool(about.extra["version"] == 2)

    old, new = (CacheMetadata(extra={"version": version}) for version in (1, 2))
    first, second, third = node("one"), node("two"), node("three")
    first.get_or_compute("key", lambda: "old", old)
    first.close()
    assert second.get_or_compute("key", lambda: "new", new, is_new) == "new"
    second.close()
    assert third.get_or_compute("key", refuse, new, is_new) == "new"


def test_a_value_is_as_old_as_its_computation(node: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = node("one"), node("two", disk_expiry=1e-3)
    first.get_or_compute("key", lambda: "first")
    first.close()
    assert second.get_or_compute("key", lambda: "second") == "second"


def test_pickles_stay_where_they_are(node: Open) -> None:
    first, second = node("one", allow_pickle=True), node("two", allow_pickle=True)
    value = first.get_or_compute("key", lambda: {1, "a", refuse})
    first.close()
    called = []

    def compute() -> Any:
        called.append(1)
        return value

    assert second.get_or_compute("key", compute) == value
    assert called == [1]


def test_only_a_remote_that_is_named_is_asked(
    node: Open, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CASTORE_REMOTE", "team")
    first, second = node("one", remote=""), node("two", remote="")
    first.get_or_compute("train", lambda: 1)
    first.close()
    assert second.get_or_compute("train", lambda: 2) == 2
    with pytest.raises(NotFoundError, match="'elsewhere'"):
        TreeCacheManager(tmp_path / "one", remote="elsewhere")
