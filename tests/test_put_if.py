"""`Store.put_if`: several blobs with one commit, if a name still points where the caller saw it."""

from __future__ import annotations

import json

import pytest

from castore import Store
from castore.errors import InvalidNameError, SerializationError
from tests.helpers import in_processes, noise, recount


def test_a_put_that_is_worked_out_from_something_older_does_nothing(store: Store) -> None:
    first = store.put("state", b"1")
    assert (
        store.put_if(("state", first.digest), [("state", b"2", None), ("more", noise(10**6), {"a": 1})])
        is not None
    )
    entry = store.entry("more")
    assert entry is not None
    assert entry.metadata == {"a": 1}
    before = store.stat().entries
    assert (
        store.put_if(("state", first.digest), [("state", b"3", None), ("x", b"3", None)], drop=["more"])
        is None
    )
    assert (store.get("state"), store.get("x"), store.stat().entries) == (b"2", None, before)
    assert store.get("more") == noise(10**6)
    recount(store)


def test_names_are_put_and_dropped_together(store: Store) -> None:
    store.put("old", noise(100_000))
    assert store.put_if(("state", None), [("state", b"1", None)], drop=["old", "never"]) is not None
    assert (store.get("old"), store.get("state")) == (None, b"1")
    assert store.put_if(("state", None), [("state", b"2", None)]) is None
    recount(store)


def test_a_name_is_dropped_and_put_again_in_one_go(store: Store) -> None:
    store.put("a", b"file")
    assert (
        store.put_if(("a", store.put("a", b"file").digest), [("a/b", b"below", None)], drop=["a"]) is not None
    )
    assert (store.get("a"), store.get("a/b")) == (None, b"below")


def test_counting_up_in_many_processes_loses_nothing(store: Store) -> None:
    store.put("count", b"0")

    def task(number: int) -> None:
        for step in range(20):
            while True:
                entry = store.entry("count")
                assert entry is not None
                value = int(store.get_many(["count"])[0] or b"")
                seen = store.entry("count")
                if seen is None or seen.digest != entry.digest:
                    continue
                new = json.dumps(value + 1).encode()
                if store.put_if(
                    ("count", entry.digest), [("count", new, None), (f"{number}/{step}", new, None)]
                ):
                    break

    in_processes(4, task)
    assert store.get("count") == b"80"
    assert store.stat().entries == 81
    recount(store)


def test_what_cannot_be_put_is_refused_before_anything_is_done(store: Store) -> None:
    with pytest.raises(InvalidNameError):
        store.put_if(("../x", None), [])
    with pytest.raises(InvalidNameError):
        store.put_if(("x", None), [], drop=["a/../b"])
    with pytest.raises(SerializationError, match="put takes bytes"):
        store.put_if(("x", None), [("x", b"1", None), ("y", "text", None)])  # type: ignore[list-item]
    assert store.stat().entries == 0
