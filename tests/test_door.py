"""Questions that the store answers, so that no room above it asks the index."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from castore import InvalidNameError, Store
from tests.helpers import noise

ROOT = Path(__file__).parents[1]
ABOVE = ("castore/adapters", "castore/cli", "castore/recipes", "castore/watch", "fuse/castore_fuse")
#: Attributes of a store that are not public, and some that begin with an underscore.
PRIVATE = {"parts", "index", "objects", "source", "writer", "prefixes", "_putter", "_usage", "_ballast"}


def reaches(source: str) -> Iterator[str]:
    """Uses of a store's attributes that are not public."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr in PRIVATE:
            of = node.value.attr if isinstance(node.value, ast.Attribute) else ast.unparse(node.value)
            if of.endswith("store"):
                yield f"{of}.{node.attr}"


def test_files_that_go_past_the_door_are_on_its_page() -> None:
    page = (ROOT / "docs" / "decisions" / "one-door.md").read_text()
    # A page names a module by its file, alone or below its room, or a room as a whole.
    _, _, listed = page.partition("Some work stays past the door")
    named = re.findall(r"`((?:\w+/)*\w+(?:\.py)?)`", listed.partition("## Figures")[0])
    found = {
        path.relative_to(ROOT).as_posix(): list(reaches(path.read_text()))
        for above in ABOVE
        for path in (ROOT / above).rglob("*.py")
    }
    past = {path: uses for path, uses in found.items() if uses}
    unlisted = [
        path
        for path in past
        if not any(path.endswith(f"/{name}") or f"/{name}/" in f"/{path}" for name in named)
    ]
    assert unlisted == []
    [counted] = re.findall(r"Today (\d+) in (\d+) files", page)
    assert (sum(map(len, past.values())), len(past)) == tuple(map(int, counted))


@pytest.mark.parametrize("source", ["store.index.x()", "self._store.parts", "a.store.writer", "store._usage"])
def test_a_reach_past_the_door_is_seen_however_it_is_written(source: str) -> None:
    assert list(reaches(source))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store(tmp_path / "store") as opened:
        yield opened


def test_many_blobs_are_pinned_with_their_put(store: Store) -> None:
    entries = store.put_many([("a", b"1"), ("b", b"2", {"run": 7})], pin=True)
    assert [entry.pinned for entry in entries] == [True, True]
    store.gc(0, grace=0)
    assert [(entry.name, entry.pinned, entry.metadata) for entry in store.entries()] == [
        ("a", True, {}),
        ("b", True, {"run": 7}),
    ]


def test_an_entry_is_deleted_only_as_it_was_read(store: Store) -> None:
    seen = store.put("name", b"first", metadata={"run": 1})
    store.put("name", b"second", metadata={"run": 1})
    assert not store.delete_unchanged(seen)
    store.put("name", b"first", metadata={"run": 2})
    assert not store.delete_unchanged(seen)
    store.put("name", b"first", metadata={"run": 1})
    assert store.delete_unchanged(seen)
    assert not store.delete_unchanged(seen)


def test_entries_with_a_key_are_found_below_a_prefix_also_when_they_have_expired(store: Store) -> None:
    store.put("in/a", b"1", metadata={"link": "x"}, ttl=0)
    store.put("in/b", b"2", metadata={"deep": {"link": 1}})
    store.put("in/c", b"3", metadata={"links": 1})
    store.put("other", b"4", metadata={"link": "y"})
    assert [entry.name for entry in store.entries_with_key("link", "in")] == ["in/a", "in/b"]
    assert [entry.name for entry in store.entries_with_key("link")] == ["in/a", "in/b", "other"]
    with pytest.raises(InvalidNameError):
        store.entries_with_key("link", "../out")


def test_a_blob_is_found_by_the_first_digits_of_its_digest_and_leads_to_its_names(store: Store) -> None:
    entry = store.put("one", noise(100))
    store.copy("one", "two")
    others = {store.put(f"n/{number}", noise(100, number + 1)).digest for number in range(300)}
    found = store.blobs_starting_with(entry.digest[:10])
    assert [blob.digest.hex() for blob in found] == [entry.digest]
    assert sorted(store.names_of(found[0].digest)) == sorted(store.names_of(entry.digest)) == ["one", "two"]
    shared = next(digest[:1] for digest in others if sum(one[:1] == digest[:1] for one in others) > 2)
    assert len(store.blobs_starting_with(shared)) == 2
    assert len(store.blobs_starting_with(shared, limit=3)) == 3


def test_a_name_has_a_dictionary_if_a_prefix_of_it_has_one(store: Store) -> None:
    samples = [
        (f'{{"id": {number}, "text": "{noise(8, number).hex()}"}}' * 6).encode() for number in range(400)
    ]
    assert not store.has_dictionary("records")
    store.train_dictionary("records", samples)
    assert store.has_dictionary("records")
    assert store.has_dictionary("records/new")
    assert not store.has_dictionary("other")


def test_counters_add_up_over_stores_of_one_folder(store: Store) -> None:
    store.put("name", b"bytes")
    with Store(store.path) as other:
        for reader in (store, other):
            assert reader.get("name") is not None
            assert reader.get("missing") is None
            reader.flush()
    counted = store.counters()
    assert counted["misses"] == 2
    assert sum(counted.values()) == 4


def test_a_flush_of_some_seconds_writes_what_is_due_and_nothing_else(store: Store) -> None:
    store.put("name", b"bytes")
    store.get("name")
    store.flush(seconds=10)
    assert "disk_hits" not in store.counters()  # not due yet
    store._usage.due = 0.0
    store.flush(seconds=10)
    assert sum(store.counters().values()) == 1
