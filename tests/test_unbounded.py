"""A store with a lifetime and a budget of its own still keeps what is put for good, and collects without a
bound if told so.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import castore
from castore import Entry, Store
from castore.adapters.tree import DiskCache, MemoryCache
from tests.clocks import pass_time
from tests.helpers import noise


@pytest.fixture
def short(tmp_path: Path) -> Iterator[Store]:
    """A store whose entries live for an hour and that keeps 1 MB."""
    with Store(tmp_path / "short", ttl="1h", max_size="1MB", memory=0) as opened:
        yield opened


def _cached(store: Store, ttl: Any) -> None:
    @store.cached(ttl=ttl, prefix="n")
    def answer() -> bytes:
        return b"x"

    answer()


def _file(store: Store, ttl: Any) -> None:
    path = store.path.parent / "file"
    path.write_bytes(b"x")
    store.put_file("n", path, ttl=ttl)


PUTS: dict[str, Callable[[Store, Any], object]] = {
    "put": lambda store, ttl: store.put("n", b"x", ttl=ttl),
    "put_file": _file,
    "put_many": lambda store, ttl: store.put_many([("n", b"x")], ttl=ttl),
    "put_if": lambda store, ttl: store.put_if(("n", None), [("n", b"x", None)], ttl=ttl),
    "save": lambda store, ttl: store.save("n", {"x": 1}, ttl=ttl),
    "get_or_compute": lambda store, ttl: store.get_or_compute("n", lambda: 1, ttl=ttl),
    "cached": _cached,
}


def _only_entry(store: Store) -> Entry:
    [entry] = store.entries()
    return entry


@pytest.mark.parametrize("never", [castore.NEVER, "never"], ids=["constant", "word"])
@pytest.mark.parametrize("put", PUTS.values(), ids=PUTS)
def test_every_put_can_say_never_where_the_store_has_a_lifetime(
    short: Store, put: Callable[[Store, Any], object], never: Any
) -> None:
    put(short, never)
    assert _only_entry(short).expires is None


@pytest.mark.parametrize("put", PUTS.values(), ids=PUTS)
def test_a_put_that_says_nothing_takes_the_lifetime_of_the_store(
    short: Store, put: Callable[[Store, Any], object]
) -> None:
    put(short, None)
    entry = _only_entry(short)
    assert entry.expires is not None
    assert entry.expires - entry.created == pytest.approx(3600, abs=60)


def test_what_is_pinned_for_good_is_there_when_the_lifetime_of_the_store_is_over(
    short: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    short.put("for good", b"kept", ttl=castore.NEVER, pin=True)
    short.put("for an hour", b"gone", pin=True)
    pass_time(monkeypatch, 7200)
    assert short.get_many(["for good", "for an hour"]) == [b"kept", None]


def test_a_store_is_opened_without_the_bounds_that_it_was_made_with(short: Store) -> None:
    with Store(short.path, ttl=castore.NEVER, max_size=castore.UNLIMITED, memory=0) as free:
        assert (free.settings.ttl, free.settings.max_size) == (None, None)
        assert free.put("n", b"x").expires is None
        free.put("large", noise(2_000_000))
        again = pickle.loads(pickle.dumps(free))
        assert (again.settings.ttl, again.settings.max_size) == (None, None)
        again.close()
    assert (short.settings.ttl, short.settings.max_size) == (3600.0, 1_000_000)


def test_a_gc_without_a_bound_leaves_what_passes_the_budget(short: Store) -> None:
    with Store(short.path, max_size=castore.UNLIMITED, memory=0) as free:
        free.put_many((f"n{i}", noise(400_000, i)) for i in range(5))
    for unlimited in (castore.UNLIMITED, "unlimited"):
        assert short.gc(max_size=unlimited).evicted == []
    assert short.gc().evicted != []


def test_settings_may_say_it_in_words(tmp_path: Path) -> None:
    Store(tmp_path / "s").close()
    file = tmp_path / "s" / "castore.json"
    file.write_text(json.dumps({"format": 1, "ttl": "never", "max_size": "unlimited"}))
    with Store(tmp_path / "s") as opened:
        assert (opened.settings.ttl, opened.settings.max_size) == (None, None)


@pytest.mark.parametrize("never", [castore.NEVER, "never"], ids=["constant", "word"])
def test_caches_of_the_tree_take_never(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, never: Any) -> None:
    Store(tmp_path / "tree", ttl="1h").close()
    memory = MemoryCache(expiry_seconds=never)
    with DiskCache(tmp_path / "tree", expiry_seconds=never) as disk:
        for cache in (disk, memory):
            cache.put("a", 1)
        pass_time(monkeypatch, 7200)
        for cache in (disk, memory):
            found = cache.get("a")
            assert found is not None
            assert found[0] == 1
