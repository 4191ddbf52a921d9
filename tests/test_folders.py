"""Folders of names, second names for the same bytes, and names that are given away: what a file system needs
of a store.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from castore import Entry, InvalidNameError, InvalidValueError, NameConflictError, NotFoundError, Store
from tests.clocks import pass_time
from tests.helpers import agrees_with_disk, flip, mixed, noise, payload, recount


def children(store: Store, folder: str = "") -> list[str]:
    """Paths directly in a folder; those of folders end in a slash."""
    return [f"{child}/" if isinstance(child, str) else child.name for child in store.children(folder)]


def test_children_are_what_lies_directly_in_a_folder(store: Store) -> None:
    names = ["a/b/c", "a/b/d/e", "a/b-c", "a/b0", "a/x", "ab/c", "z", "\u00e9/\U0010ffff", "a/\U0010ffff/x"]
    store.put_many((name, name.encode()) for name in names)
    assert children(store) == ["a/", "ab/", "z", "\u00e9/"]
    assert children(store, "a") == children(store, "a/") == ["a/b-c", "a/b/", "a/b0", "a/x", "a/\U0010ffff/"]
    assert children(store, "a/b") == ["a/b/c", "a/b/d/"]
    assert children(store, "\u00e9") == ["\u00e9/\U0010ffff"]
    assert children(store, "no/such") == children(store, "z") == []


@pytest.mark.parametrize("count", [1, 7, 8, 9, 999, 1000, 1001, 2_500])
def test_children_are_all_there_however_many(store: Store, count: int) -> None:
    store.put_many((f"f/{number:05}", b"x") for number in range(count))
    store.put_many((f"g/{number:05}/x", b"x") for number in range(count))
    assert children(store, "f") == [f"f/{number:05}" for number in range(count)]
    assert children(store, "g") == [f"g/{number:05}/" for number in range(count)]


def test_children_that_are_missing_are_left_out_and_so_are_their_folders(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put("a/expired/x", b"x", ttl=60)
    store.put("a/damaged", mixed(3_000))
    path, offset, length = payload(store, "a/damaged")
    flip(path, offset + length // 2)
    store.verify()
    store.put("a/sound", b"x")
    pass_time(monkeypatch, 120)
    assert children(store, "a") == ["a/sound"]
    assert [entry.name for entry in store.entries("a")] == ["a/damaged", "a/sound"]
    assert [entry.name for entry in store.entries("a", damaged=False)] == ["a/sound"]
    assert list(store.entries("a/damaged", damaged=False)) == []


@pytest.mark.parametrize("size", [10, 300_000])
def test_a_copy_is_a_second_name_of_the_same_bytes(store: Store, size: int) -> None:
    old = store.save("a", "x" * size, ttl="1h", metadata={"k": 1}, pin=True)
    store.put("b", b"was something else")
    new = store.copy("a", "b")
    assert store.entry("b") == new
    assert new._replace(name="a", created=old.created, accessed=old.accessed, pinned=True) == old
    assert store.load("b") == store.load("a") == "x" * size
    assert len(store) == 2
    agrees_with_disk(store)


@pytest.mark.parametrize("size", [10, 300_000])
def test_a_renamed_entry_has_all_that_it_had(store: Store, size: int) -> None:
    old = store.save("a", "x" * size, ttl="1h", metadata={"k": 1}, pin=True)
    new = store.rename("a", "folder/b")
    assert new._replace(name="a", created=old.created, accessed=old.accessed) == old
    assert list(store) == ["folder/b"]
    assert store.rename("folder/b", "folder") == store.entry("folder")  # the folder goes with its only name
    assert store.rename("folder", "folder") == store.entry("folder")
    assert store.load("folder") == "x" * size
    agrees_with_disk(store)


@pytest.mark.parametrize("act", [Store.copy, Store.rename])
def test_what_cannot_be_given_a_name_is_said_and_stays(
    store: Store, act: Callable[[Store, str, str], Entry]
) -> None:
    store.put("a", b"x")
    store.put("f/b", b"y")
    with pytest.raises(NotFoundError, match="no entry 'no/such'"):
        act(store, "no/such", "c")
    with pytest.raises(InvalidNameError):
        act(store, "a", "../c")
    with pytest.raises(NameConflictError):
        act(store, "a", "f")
    with pytest.raises(NameConflictError):
        act(store, "a", "f/b/c")
    assert list(store) == ["a", "f/b"]
    recount(store)


def test_a_name_that_goes_round_among_threads_is_always_somewhere_once(store: Store, tmp_path: Path) -> None:
    data = noise(100_000)
    store.put("token/0", data)
    stop, problems = threading.Event(), []

    def turn(number: int) -> None:
        with Store(store.path, memory=0) as own:
            while not stop.is_set():
                try:
                    own.rename(f"token/{number}", f"token/{(number + 1) % 3}")
                except NotFoundError:
                    continue
                except BaseException as error:
                    problems.append(error)

    threads = [threading.Thread(target=turn, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(300):
        found = [child for child in store.children("token") if isinstance(child, Entry)]
        assert len(found) == 1
    stop.set()
    for thread in threads:
        thread.join()
    assert problems == []
    assert store.get(next(iter(store))) == data
    agrees_with_disk(store)


def test_what_is_created_as_new_is_new_at_its_end(store: Store) -> None:
    with store.create("a", replace=False) as file:
        file.write(b"first")
    with (
        pytest.raises(NameConflictError, match="there is an entry 'a' already"),
        store.create("a", replace=False) as file,
    ):
        file.write(b"second")
    store.delete("a")
    with store.create("a", replace=False) as file:
        file.write(b"third")
    assert store.get("a") == b"third"


def test_items_of_many_puts_have_one_shape(store: Store) -> None:
    items = [("a", b"1"), ("b", b"2", {"k": 1}), ("c", b"3", None), ["d", b"4"]]
    told = [("a", {}), ("b", {"k": 1}), ("c", {}), ("d", {})]
    assert [(entry.name, entry.metadata) for entry in store.put_many(items)] == told  # type: ignore[arg-type]
    put = store.put_if(("x", None), items)  # type: ignore[arg-type]
    assert put is not None
    assert [(entry.name, entry.metadata) for entry in put] == told
    wrongs: list[Any] = [("a",), ("a", b"1", {}, 4), "ab", 7]
    for wrong in wrongs:
        with pytest.raises(InvalidValueError, match="an item is \\(name, data\\) or"):
            store.put_many([wrong])
        with pytest.raises(InvalidValueError, match="an item is \\(name, data\\) or"):
            store.put_if(("x", None), [wrong])
