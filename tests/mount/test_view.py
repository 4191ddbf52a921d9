"""The view by itself: a folder's names, their order, and the item of each. No FUSE in here."""

from __future__ import annotations

import itertools
import json
import random

import pytest

from castore import Store
from castore_fuse.view import File, Folder, View
from tests.clocks import pass_time


@pytest.fixture
def view(store: Store) -> View:
    return View(store)


def names(view: View, folder: str = "") -> list[str]:
    return [part for part, _ in view.listing(folder)]


def tree(view: View, folder: str = "") -> dict[str, File]:
    """Every file that a walk over the listings finds, by path."""
    found = {}
    for part, item in view.listing(folder):
        path = f"{folder}/{part}" if folder else part
        if isinstance(item, File):
            found[path] = item
        else:
            assert item == Folder(path)
            found |= tree(view, path)
    return found


def looked_up(view: View, path: str) -> File | Folder | None:
    folder, _, part = path.rpartition("/")
    return view.lookup(folder, part)


def put(store: Store, *names: str) -> None:
    store.put_many((name, name.encode()) for name in names)


# --- the tree --------------------------------------------------------------------------------------


def test_empty_store_is_an_empty_folder(view: View) -> None:
    assert names(view) == []
    assert view.lookup("", "anything") is None


def test_lookup_distinguishes_files_from_folders(store: Store, view: View) -> None:
    entry = store.put("a/b/c.txt", b"content", ttl=1000)
    assert view.lookup("", "a") == Folder("a")
    assert view.lookup("a", "b") == Folder("a/b")
    file = view.lookup("a/b", "c.txt")
    assert file == File("a/b/c.txt", bytes.fromhex(entry.digest), 7, entry.created, entry.expires)
    for folder, part in [
        ("", "b"),
        ("a", "b.txt"),
        ("a/b", "c"),
        ("a/b/c.txt", "d"),
        ("", "a/"),
        ("a/b", "c.tx"),
    ]:
        assert view.lookup(folder, part) is None


def test_neighbours_of_the_slash_are_no_children(store: Store, view: View) -> None:
    # In the order of bytes: space - . / 0
    put(store, "a b", "a-b", "a.b", "a/b", "a/b-c", "a/b0", "a0", "a01", "b/x-1", "b/x/1", "b/x0")
    assert names(view) == ["a b", "a-b", "a.b", "a", "a0", "a01", "b"]
    assert names(view, "a") == ["b", "b-c", "b0"]
    assert names(view, "b") == ["x-1", "x", "x0"]
    assert names(view, "b/x") == ["1"]


def test_prefix_of_a_name_is_no_folder(store: Store, view: View) -> None:
    put(store, "data-1/x", "data.1/x", "data01/x")
    assert view.lookup("", "data") is None
    assert names(view) == ["data-1", "data.1", "data01"]


def test_listing_walks_exactly_the_names_of_the_store(store: Store, view: View) -> None:
    chance = random.Random(0)
    parts = ["a", "a-", "a0", "a.b", "ü", "日本", "z z", "\U0010ffff", "~"]
    wanted: set[str] = set()
    for _ in range(400):
        name = "/".join(chance.choices(parts, k=chance.randint(1, 4)))
        clash = any(old.startswith(name + "/") or name.startswith(old + "/") for old in wanted)
        if not clash:
            wanted.add(name)
    put(store, *wanted)
    assert set(tree(view)) == wanted
    for path, file in tree(view).items():
        assert looked_up(view, path) == file


@pytest.mark.parametrize("files", [999, 1000, 1001, 2500])
def test_listing_longer_than_a_page_is_whole_and_in_order(store: Store, view: View, files: int) -> None:
    put(store, *(f"many/{number:05d}" for number in range(files)), "many0", "manx")
    assert names(view, "many") == [f"{number:05d}" for number in range(files)]
    assert names(view) == ["manx", "many", "many0"]


def test_many_large_folders_are_listed_once_each(store: Store, view: View) -> None:
    store.put_many((f"class-{folder:03d}/{leaf:04d}", b"") for folder in range(120) for leaf in range(30))
    put(store, *(f"class-{folder:03d}.txt" for folder in range(0, 120, 7)))
    expected = {f"class-{folder:03d}" for folder in range(120)}
    expected |= {f"class-{folder:03d}.txt" for folder in range(0, 120, 7)}
    listed = names(view)
    assert len(listed) == len(expected)
    assert set(listed) == expected
    assert all(len(names(view, f"class-{folder:03d}")) == 30 for folder in (0, 63, 119))


def test_listing_goes_on_while_names_come_and_go(store: Store, view: View) -> None:
    put(store, *(f"n/{number:04d}" for number in range(0, 3000, 2)))
    listing = view.listing("n")
    first = [part for part, _ in itertools.islice(listing, 10)]
    store.delete_many([f"n/{number:04d}" for number in range(0, 3000, 4)])
    put(store, *(f"n/{number:04d}" for number in range(1, 3000, 2)))
    rest = [part for part, _ in listing]
    assert len(set(first + rest)) == len(first + rest)
    throughout = {f"{number:04d}" for number in range(2, 3000, 4)}
    assert set(first + rest) >= throughout


# --- prefix ----------------------------------------------------------------------------------------


def test_prefix_shows_what_is_below_it_and_nothing_else(store: Store) -> None:
    put(store, "data/train/1", "data/train/x/2", "data/train-old/3", "data/train0", "other/train/4")
    view = View(store, "data/train")
    assert names(view) == ["1", "x"]
    assert sorted(tree(view)) == ["1", "x/2"]
    assert view.lookup("x", "2") == File(
        "data/train/x/2",
        *looked_up(View(store), "data/train/x/2")[1:],  # type: ignore[index]
    )
    assert view.lookup("", "train0") is None
    assert view.lookup("", "..") is None


def test_prefix_without_names_is_an_empty_folder(store: Store) -> None:
    put(store, "data/1")
    assert names(View(store, "nothing")) == []
    assert View(store, "nothing").lookup("", "1") is None


# --- what time does --------------------------------------------------------------------------------


def test_expired_names_are_not_there(store: Store, view: View, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put("short/lived", b"x", ttl=1000)
    store.put("stays", b"x", ttl=1e6)
    assert names(view) == ["short", "stays"]
    pass_time(monkeypatch, 2000)
    assert names(view) == ["stays"]
    assert names(view, "short") == []
    assert view.lookup("", "short") is None
    assert view.lookup("short", "lived") is None


def test_file_stays_what_it_was_when_its_name_moves_on(store: Store, view: View) -> None:
    store.put("name", b"first")
    old = view.lookup("", "name")
    store.put("name", b"second one")
    new = view.lookup("", "name")
    assert isinstance(old, File)
    assert isinstance(new, File)
    assert (old.size, new.size) == (5, 10)
    assert old.inode != new.inode
    reader = view.open(old)
    assert bytes(reader.view(0, 100)) == b"first"
    reader.close()


# --- inodes ----------------------------------------------------------------------------------------


def test_inodes_come_from_the_digest_and_from_the_path(store: Store) -> None:
    put(store, "one/a", "two/b")
    store.put("copy/of/a", b"one/a")
    first = {path: file.inode for path, file in tree(View(store)).items()}
    with Store(store.path, memory=0) as again:
        assert {path: file.inode for path, file in tree(View(again)).items()} == first
    assert first["one/a"] == first["copy/of/a"] != first["two/b"]
    folders = [Folder(path).inode for path in ("", "one", "two", "copy", "copy/of")]
    assert folders[0] == 1
    assert len(set(folders)) == 5
    assert all(1 <= inode < 1 << 63 for inode in [*folders, *first.values()])


# --- .castore --------------------------------------------------------------------------------------


def test_blobs_are_reached_by_digest_and_only_so(store: Store, view: View) -> None:
    digest = store.put("name", b"bytes").digest
    assert ".castore" not in names(view)
    for path in (".castore", ".castore/objects", f".castore/objects/{digest[:2]}"):
        assert looked_up(view, path) == Folder(path)
        assert names(view, path) == []
    file = looked_up(view, f".castore/objects/{digest[:2]}/{digest}")
    assert isinstance(file, File)
    assert (file.name, file.digest.hex(), file.size) == ("", digest, 5)
    other = "0" if digest[0] != "0" else "1"
    for part in (digest.upper(), digest[:-1], digest[:-1] + "g", other + digest[1:], "..", digest + "0"):
        assert looked_up(view, f".castore/objects/{digest[:2]}/{part}") is None
    for path in (
        ".castore/other",
        ".castore/objects/xyz",
        f".castore/objects/00/{digest}",
        ".castore/objects/..",
    ):
        assert looked_up(view, path) is None


def test_a_prefixed_view_reaches_every_blob_by_digest(store: Store) -> None:
    view = View(store, "data")
    for name in ("data/name", "elsewhere"):
        digest = store.put(name, name.encode()).digest
        assert isinstance(looked_up(view, f".castore/objects/{digest[:2]}/{digest}"), File)


def test_stat_file_has_the_figures_of_the_store(store: Store, view: View) -> None:
    put(store, "a", "b")
    file = view.lookup(".castore", "stat.json")
    assert isinstance(file, File)
    assert file.content is not None
    assert len(file.content) == file.size
    told = json.loads(file.content)
    assert (told["entries"], told["logical"]) == (2, 2)


def test_attributes_tell_of_entry_and_blob(store: Store, view: View) -> None:
    entry = store.put("x", b"text " * 100, codec="zstd", ttl=1000, metadata={"ü": 1}, pin=True)
    file = view.lookup("", "x")
    assert isinstance(file, File)
    assert view.attributes(file) == {
        "digest": entry.digest,
        "size": "500",
        "codec": "zstd",
        "stored": str(entry.stored),
        "serializer": "bytes",
        "pinned": "1",
        "expires": repr(entry.expires),
        "metadata": '{"ü": 1}',
    }
    store.put("x", b"other")
    # The attributes are those of the blob at look-up, not those of the name's present entry.
    assert "metadata" not in view.attributes(file)


def test_space_is_the_budget_where_there_is_one(store: Store) -> None:
    put(store, "a", "b")
    with Store(store.path, max_size="10MB", memory=0) as bounded:
        space = View(bounded).space()
        assert (space.total, space.files) == (10_000_000, 2)
        assert space.free == 10_000_000 - bounded.index.totals().stored
    assert View(store).space().total > 10_000_000
