"""`Store.put_if`: several blobs with one commit, if a name still points where the caller saw it."""

from __future__ import annotations

import json
import time

import pytest

from castore import Entry, Store
from castore.errors import InvalidNameError, InvalidValueError, NameConflictError, SerializationError
from tests.helpers import flip, in_processes, noise, payload, recount


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
        store.put_if(("x", None), [("x", b"1", None), ("y", "text", None)])
    assert store.stat().entries == 0


def expired(store: Store, name: str, data: bytes) -> Entry:
    """An expired entry that no gc has removed yet."""
    entry = store.put(name, data, ttl=0.001)
    while store.entry(name) is not None:
        time.sleep(0.001)
    return entry


def test_an_expired_name_is_absent_for_a_put_as_it_is_for_a_get(store: Store) -> None:
    before = expired(store, "count", b"1")
    assert store.put_if(("count", before.digest), [("count", b"2", None)]) is None
    assert store.put_if(("count", None), [("count", b"1", None)]) is not None
    assert store.get("count") == b"1"
    recount(store)


def test_counting_up_goes_on_when_the_count_expires(store: Store) -> None:
    expired(store, "count", b"7")
    for step in range(3):
        for _ in range(3):  # otherwise it would repeat for ever
            seen = store.entry("count")
            value = 0 if seen is None else int(store.get("count") or b"")
            if store.put_if(("count", seen and seen.digest), [("count", b"%d" % (value + 1), None)]):
                break
        else:
            pytest.fail(f"step {step} never took place")
    assert store.get("count") == b"3"


def test_what_is_put_if_nothing_changed_loads_as_an_object(store: Store) -> None:
    assert store.put_if(("config", None), [("config", {"lr": (1, 2)}, None)], serializer="msgpack")
    assert store.load("config") == {"lr": (1, 2)}
    seen = store.entry("config")
    assert seen is not None
    assert seen.serializer == "msgpack"
    items = [("config", "grüße", None), ("other", "text", {"a": 1})]
    entries = store.put_if(("config", seen.digest), items, serializer="text")
    assert entries is not None
    assert [entry.serializer for entry in entries] == ["text", "text"]
    assert [store.load("config"), store.load("other")] == ["grüße", "text"]


def test_bytes_that_are_put_if_nothing_changed_load_as_bytes(store: Store) -> None:
    assert store.put_if(
        ("raw", None), [("raw", b"\x01", None), ("array", bytearray(b"x"), None)], serializer="msgpack"
    )
    assert store.load("raw") == b"\x01"
    assert store.load("array") == bytearray(b"x")
    for name in ("text", "npy", "safetensors", "arrow"):
        with pytest.raises(SerializationError, match=f"the serializer '{name}' cannot store"):
            store.put_if(("new", None), [("new", b"raw", None)], serializer=name)
    assert store.entry("new") is None


def test_a_serializer_that_cannot_be_is_refused_before_anything_is_done(store: Store) -> None:
    with pytest.raises(InvalidValueError, match="there is no serializer 'json'"):
        store.put_if(("x", None), [("x", b"1", None)], serializer="json")
    with pytest.raises(InvalidValueError, match="there is no serializer 'json'"):
        store.put("x", b"1", serializer="json")
    with pytest.raises(SerializationError, match="pickle runs code"):
        store.put_if(("x", None), [("x", {1}, None)], serializer="pickle")
    assert store.stat().entries == 0


def test_with_nothing_to_put_names_are_dropped_if_the_condition_holds(store: Store) -> None:
    digest = store.put("state", b"1").digest
    store.put("old", b"2")
    assert store.put_if(("state", "0" * 64), [], drop=["old"]) is None
    assert store.get("old") == b"2"
    assert store.put_if(("state", digest), [], drop=["old"]) == []
    assert (store.get("old"), store.get("state")) == (None, b"1")
    assert store.put_if(("state", digest), []) == []
    recount(store)


def test_what_a_put_depends_on_has_a_shape(store: Store) -> None:
    entry = store.put("n", b"x")
    for expected in (("n", "zz"), ("n", entry), ("n", b"x" * 32), "n", ("n",), None, ("n", "ab")):
        with pytest.raises(InvalidValueError, match=r"expected is \(name, digest\), with the 64 hex digits"):
            store.put_if(expected, [("n", b"y")])  # type: ignore[arg-type]
    assert store.get("n") == b"x"


@pytest.mark.parametrize("size", [100, 10**6])  # a record of a pack, and a file of its own
def test_a_name_that_readers_miss_counts_as_absent_for_writers(store: Store, size: int) -> None:
    def damage(name: str, seed: int) -> Entry:
        entry = store.put(name, noise(size, seed))
        flip(*payload(store, name)[:2])
        assert store.get(name) is None
        return entry

    damage("absent", 0)
    assert store.put_if(("absent", None), [("absent", b"new", None)]) is not None
    assert store.get("absent") == b"new"
    assert store.put_if(("absent", None), [("absent", b"newer", None)]) is None

    damage("created", 1)
    with store.create("created", replace=False) as file:
        file.write(b"new")
    assert store.get("created") == b"new"
    with pytest.raises(NameConflictError), store.create("created", replace=False) as file:
        file.write(b"newer")

    # `entry` still gives the digest of a damaged name, so nobody has changed the name since.
    seen = damage("seen", 2)
    assert store.put_if(("seen", store.put("other", b"1").digest), [("seen", b"new", None)]) is None
    assert store.put_if(("seen", seen.digest), [("seen", b"new", None)]) is not None
    assert store.get("seen") == b"new"
    recount(store)


def test_a_name_whose_row_is_damaged_counts_as_absent(store: Store) -> None:
    entry = store.put("a", b"1")
    with store.index.write() as txn:
        txn.db.execute("UPDATE entries SET checked = checked + 1 WHERE name = 'a'")
    assert store.get("a") is None
    assert store.put_if(("a", entry.digest), [("a", b"2", None)]) is None
    assert store.put_if(("a", None), [("a", b"2", None)]) is not None
    assert store.get("a") == b"2"
