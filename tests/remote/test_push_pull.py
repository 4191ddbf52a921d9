"""Names and bytes go from one store over a bucket to another, whole, checked, and each once."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from blake3 import blake3

from castore import NEVER, Store
from castore.errors import (
    ConflictError,
    CorruptError,
    FullError,
    InvalidValueError,
    NameConflictError,
    NotFoundError,
    RemoteError,
    RemoteMissingError,
    RemoteUnreachableError,
)
from castore.remote import commits
from castore.remote import pull as pulling
from castore.remote.bucket import Bucket
from castore.remote.folder_bucket import FolderBucket
from castore.remote.keys import object_key
from castore.remote.tree import Tree
from castore.watch.entry_sources import source_of
from tests.clocks import pass_time
from tests.helpers import agrees_with_disk, flip, mixed, noise, records, text
from tests.remote.conftest import MakeNode, Node
from tests.remote.nodes import forget_carried, put_tree

SIZES = (0, 1, 100, 5_000, 16_000, 20_000, 262_144, 262_145, 900_000, 3_000_000)
CODECS = ("auto", "zstd", "lz4", "gzip", "none")


def fill(store: Store) -> None:
    """Blobs of all sizes and codecs, two names of one blob, an object, metadata."""
    for codec in CODECS:
        for size in SIZES:
            store.put(f"sizes/{codec}/{size:08}", mixed(size, len(codec)), codec=codec)
            store.put(f"noise/{codec}/{size:08}", noise(size, len(codec)), codec=codec)
    store.put("again", mixed(3_000_000, len("zstd")), metadata={"epoch": 3, "ä": "ö"})
    store.save("object", {"a": [1, 2.5, None]})
    store.put("forever", b"x", ttl=NEVER)


@pytest.mark.parametrize("metadata", ["[" * 100_000, "{not json", '{"a":' + "9" * 5000 + "}"])
def test_a_ref_with_metadata_that_cannot_be_is_refused_and_names_nothing(
    node: MakeNode, bucket: Bucket, metadata: str
) -> None:
    one, two = node("one"), node("two")
    one.store.put("a", b"x", metadata={"a": 1})
    one.push()
    head = commits.read_ref(bucket, "main")
    assert head is not None
    [row] = Tree(commits.read_commit(bucket, head.commit).tree, one.pages.read).rows()
    put_tree(bucket, [row._replace(metadata=metadata)], "evil")
    for lazy in (None, "team"):
        with pytest.raises(CorruptError, match="none that castore wrote"):
            two.pull(ref="evil", lazy=lazy)
    assert list(two.store.entries()) == []
    two.pull(lazy="team")
    assert [entry.metadata for entry in two.store.entries()] == [{"a": 1}]


def test_what_one_store_pushes_another_pulls(node: MakeNode) -> None:
    one, two = node("one"), node("two")
    fill(one.store)
    pushed = one.push(note="the first")
    assert (pushed.added, pushed.changed, pushed.removed) == (2 * 50 + 3, 0, 0)
    pulled = two.pull()
    assert pulled.commit == pushed.commit
    assert (pulled.added, pulled.changed, pulled.unchanged) == (103, 0, 0)
    assert two.contents() == one.contents()
    assert two.store.load("object") == {"a": [1, 2.5, None]}
    for name in ("again", "object", "forever"):
        ours, theirs = one.store.entry(name), two.store.entry(name)
        assert ours is not None
        assert theirs is not None
        assert (ours.metadata, ours.serializer, ours.expires) == (
            theirs.metadata, theirs.serializer, theirs.expires,
        )  # fmt: skip
    agrees_with_disk(two.store)
    assert two.store.verify().bad == []


def test_progress_ends_at_all_bytes(node: MakeNode) -> None:
    one, two = node("one"), node("two")
    fill(one.store)
    one.push()
    two.pull()
    for seen in (one.seen, two.seen):
        done, total = seen[-1]
        assert done == total > 3_000_000
        assert sorted(seen) == seen


def test_what_the_remote_has_does_not_travel_again(node: MakeNode) -> None:
    one, two = node("one"), node("two")
    fill(one.store)
    first = one.push()
    again = one.push()
    assert (again.commit, again.sent, again.objects) == (first.commit, 0, 0)
    one.store.put("one more", b"a few bytes")
    one.store.put("sizes/same bytes", mixed(3_000_000, len("zstd")))
    more = one.push()
    assert (more.added, more.changed) == (2, 0)
    assert more.sent < first.sent / 20
    assert two.pull().fetched == pytest.approx(first.sent, rel=0.2)
    assert two.pull().fetched == 0
    one.store.put("third", noise(40_000))
    one.push()
    assert two.pull().fetched == pytest.approx(40_000, rel=0.01)


def test_small_blobs_travel_in_packs(node: MakeNode, bucket: Bucket) -> None:
    one, two = node("one"), node("two")
    one.store.put_many((f"n/{number:05}", noise(2_000, number)) for number in range(3_000))
    pushed = one.push()
    assert pushed.objects < 12
    assert len(list(bucket.listing("packs/"))) == 1
    two.pull()
    assert two.contents() == one.contents()


def test_blobs_that_need_a_dictionary_bring_it_along(node: MakeNode) -> None:
    one, two = node("one"), node("two")
    samples = records(600)
    one.store.put_many((f"r/{number:04}", data) for number, data in enumerate(samples[:300]))
    one.store.train_dictionary("r")
    one.store.put_many((f"r/{number:04}", data) for number, data in enumerate(samples[300:], 300))
    one.push()
    two.pull()
    assert two.contents() == one.contents()
    assert two.store.verify().bad == []


def test_a_part_of_a_store_is_pushed_and_a_part_of_a_ref_is_pulled(node: MakeNode) -> None:
    one, two = node("one"), node("two")
    for name in ("a/1", "a/2", "ab", "b/1", "b/c/1"):
        one.store.put(name, name.encode())
    one.push("a")
    two.pull()
    assert sorted(two.contents()) == ["a/1", "a/2"]
    one.push("b")
    two.pull("b/c", below="from/main")
    assert sorted(two.contents()) == ["a/1", "a/2", "from/main/b/c/1"]
    assert two.store.get("from/main/b/c/1") == b"b/c/1"


def test_an_older_commit_can_be_pulled_by_its_first_digits(node: MakeNode) -> None:
    one, two = node("one"), node("two")
    one.store.put("a", b"first")
    first = one.push()
    one.store.put("a", b"second")
    one.push()
    two.pull(start=first.commit[:8], below="old")
    two.pull()
    assert two.contents() == {"a": b"second", "old/a": b"first"}
    with pytest.raises(RemoteMissingError, match="no commit 000000000000"):
        two.pull(start="0" * 12)
    for start in ("not hex", ""):
        with pytest.raises(InvalidValueError, match="is no commit: give at least 6 of its hex digits"):
            two.pull(start=start)
    with pytest.raises(RemoteMissingError, match=r"no ref 'other'; its refs: main$"):
        two.pull(ref="other")


def test_a_name_that_only_one_store_changed_is_taken_from_it(node: MakeNode) -> None:
    one, two = node("one"), node("two")
    for name in "abc":
        one.store.put(name, b"old")
    one.push()
    two.pull()
    one.store.put("a", b"one's")
    one.store.put("of one", b"1")
    two.store.put("b", b"two's")
    two.store.put("of two", b"2")
    one.push()
    two.push()  # merges: one's changes stay
    one.pull()
    two.pull()
    assert one.contents() == two.contents() == {
        "a": b"one's", "b": b"two's", "c": b"old", "of one": b"1", "of two": b"2",
    }  # fmt: skip


def test_a_name_that_both_changed_is_a_conflict_that_changes_nothing(node: MakeNode) -> None:
    one, two = node("one"), node("two")
    one.store.put_many([("a", b"old"), ("b", b"old")])
    one.push()
    two.pull()
    one.store.put_many([("a", b"one's"), ("b", b"one's"), ("new", b"one's")])
    pushed = one.push()
    two.store.put_many([("a", b"two's"), ("new", b"two's"), ("other", b"two's")])
    before = two.contents()
    for conflict in (two.push, two.pull):
        with pytest.raises(
            ConflictError, match=r"^'a' and 1 more name changed both here and in ref"
        ) as caught:
            conflict()
        assert caught.value.names == ("a", "new")
    assert two.contents() == before
    assert one.push().commit == pushed.commit
    two.pull(replace=True)
    assert two.contents() == {"a": b"one's", "b": b"one's", "new": b"one's", "other": b"two's"}
    assert two.push().added == 1


def add(store: Store, folder: Path, prefix: str) -> None:
    """Put the files of a folder, each with the record of its file."""
    for path in sorted(folder.iterdir()):
        source = source_of(str(path), path.stat())
        store.put(f"{prefix}/{path.name}", path.read_bytes(), metadata={"source": source})


@pytest.mark.parametrize("is_same", [True, False])
def test_where_a_file_was_copied_from_is_no_change_of_its_name(
    node: MakeNode, tmp_path: Path, is_same: bool
) -> None:
    """Regression: nodes that added copies of the same files were in conflict over every name."""
    nodes = node("one"), node("two")
    for number, one in enumerate(nodes):
        folder = tmp_path / f"copy {number}"
        folder.mkdir()
        for name in ("a", "b"):
            (folder / name).write_text(name if is_same else f"{name} {number}")
            os.utime(folder / name, ns=(0, number * 10**9))
        add(one.store, folder, "set")
    pushed = nodes[0].push()
    if is_same:
        again = nodes[1].push()
        assert (again.commit, again.added, again.changed) == (pushed.commit, 0, 0)
        assert nodes[1].pull().changed == 0
    else:
        with pytest.raises(ConflictError, match="'set/a' and 1 more name changed both here and in ref"):
            nodes[1].push()
    # A file that was touched is not pushed again; one with another note is, and takes its new record along.
    os.utime(tmp_path / "copy 0" / "a", ns=(0, 5 * 10**9))
    add(nodes[0].store, tmp_path / "copy 0", "set")
    assert nodes[0].push().changed == 0
    entry = nodes[0].store.entry("set/a")
    assert entry is not None
    assert entry.metadata["source"]["mtime_ns"] == 5 * 10**9
    nodes[0].store.put("set/a", b"a" if is_same else b"a 0", metadata=entry.metadata | {"note": 1})
    assert nodes[0].push().changed == 1
    # The user's own `source` is metadata like any other, whatever keys it has.
    for note in ("unknown", "free"):
        source = {"path": "s3://crawl", "size": 3, "mtime_ns": 1, "license": note}
        nodes[0].store.put("crawled", b"abc", metadata={"source": source})
        pushed = nodes[0].push()
        assert pushed.added + pushed.changed == 1
    nodes[0].store.put("own", b"1", metadata={"source": "web"})
    nodes[0].push()
    nodes[0].store.put("own", b"1", metadata={"source": "paper"})
    assert nodes[0].push().changed == 1


@pytest.mark.parametrize("is_lazy", [False, True])
def test_a_store_that_goes_from_commit_to_commit_has_changed_nothing(node: MakeNode, is_lazy: bool) -> None:
    one, two = node("one"), node("two")
    states = [{"a": b"1", "b": b"1"}, {"a": b"2", "b": b"1", "c": b"2"}, {"a": b"3", "b": b"3", "c": b"2"}]
    found = []
    for state in states:
        one.store.put_many(state.items())
        found.append(one.push().commit)
    lazy = "team" if is_lazy else None

    def names_and_digests(store: Store) -> dict[str, str]:
        return {entry.name: entry.digest for entry in store.entries()}

    wanted = {"a": b"", "b": b"", "c": b""}
    for number in (0, 1, 0, 2, 1, None, 0, None):
        two.pull(start=None if number is None else found[number][:8], lazy=lazy)
        wanted |= states[-1 if number is None else number]
        have = {name: blake3(data).hexdigest() for name, data in wanted.items() if data}
        assert names_and_digests(two.store) == have
        pushed = two.push()
        assert (pushed.commit, pushed.added, pushed.changed) == (found[-1], 0, 0)
    two.pull(start=found[0][:8], lazy=lazy)
    two.store.put("b", b"edited")
    with pytest.raises(ConflictError) as caught:
        two.push()
    assert caught.value.names == ("b",)


@pytest.mark.parametrize(("first", "second"), [("f/x", "f"), ("f", "f/x"), ("a/f", "a/f/x/y")])
@pytest.mark.parametrize("prefix", ["", "second"])
def test_no_name_of_a_ref_lies_inside_a_file(node: MakeNode, first: str, second: str, prefix: str) -> None:
    one, two, three = node("one"), node("two"), node("three")
    one.store.put_many([(first, b"1"), (f"{first}-more", b"2"), ("g", b"3")])
    pushed = one.push()
    two.store.put_many([(second, b"4"), ("f.more", b"5")])
    with pytest.raises(
        NameConflictError, match=r"ref 'main' would have a file .* a name is a file or a folder"
    ):
        two.push(second if prefix else "")
    three.pull()
    assert three.contents() == one.contents()
    assert one.push().commit == pushed.commit
    two.store.delete(second)
    two.push()
    three.pull()
    assert three.contents() == one.contents() | two.contents()


def test_a_file_that_became_a_folder_here_replaces_it_in_the_ref_with_delete(node: MakeNode) -> None:
    one, two = node("one"), node("two")
    one.store.put("f", b"1")
    one.push()
    one.store.delete("f")
    one.store.put("f/x", b"2")
    with pytest.raises(NameConflictError, match="remove the ref's with --delete"):
        one.push()
    one.push(delete=True)
    two.pull()
    assert two.contents() == {"f/x": b"2"}


def test_an_expired_file_of_a_ref_is_in_no_names_way(node: MakeNode, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = node("one"), node("two")
    one.store.put("f", b"1", ttl=60)
    one.push()
    pass_time(monkeypatch, 120)
    one.store.put("f/x", b"2")
    one.push()
    two.pull()
    assert two.contents() == {"f/x": b"2"}


def test_a_lost_base_makes_conflicts_of_differences_and_loses_nothing(node: MakeNode) -> None:
    one, two = node("one"), node("two")
    one.store.put_many([("a", b"old"), ("b", b"old")])
    one.push()
    two.pull()
    two.store.put("c", b"two's")
    one.store.put("a", b"one's")
    one.push()
    two.push()  # two has not seen the new a, so its base is a tree of its own
    for path in (two.store.path / "pages").iterdir():
        path.unlink()
    with pytest.raises(ConflictError, match=r"^'a' changed both here"):
        two.pull()
    two.pull(replace=True)
    assert two.contents() == {"a": b"one's", "b": b"old", "c": b"two's"}


def test_what_a_store_evicted_stays_in_the_ref_until_it_is_deleted_there(node: MakeNode) -> None:
    one, two, three = node("one"), node("two"), node("three")
    one.store.put_many([("a/1", b"1"), ("a/2", b"2"), ("b", b"3")])
    one.push()
    two.pull()
    one.store.delete("a/1")
    one.store.put("a/3", b"new")
    one.push()
    three.pull()
    assert sorted(three.contents()) == ["a/1", "a/2", "a/3", "b"]
    assert one.push("a", delete=True).removed == 1
    assert two.push().added == 0  # two still has a/1, as it was, and does not bring it back
    fresh = node("fresh")
    fresh.pull()
    assert sorted(fresh.contents()) == ["a/2", "a/3", "b"]


def test_names_that_others_have_removed_come_back_with_restore(node: MakeNode) -> None:
    one, two = node("one"), node("two")
    one.store.put_many([("set/a", b"1"), ("set/b", b"2")])
    one.push()
    two.store.put("other", b"3")
    assert two.push(delete=True).removed == 2
    assert (one.push().added, one.push().gone) == (0, 2)
    assert one.push("set", restore=True).added == 2
    assert (one.push().added, one.push().gone) == (0, 0)
    two.pull()
    assert two.contents() == {"set/a": b"1", "set/b": b"2", "other": b"3"}


def test_an_empty_store_does_not_empty_a_ref(node: MakeNode) -> None:
    """Regression: a push with --delete and no prefix removed all names."""
    one, two = node("one"), node("two")
    one.store.put("set/a", b"1")
    one.push()
    with pytest.raises(
        NotFoundError, match="has no entries, so this push would remove all names of ref 'main'"
    ):
        two.push(delete=True)
    assert two.push("set", delete=True).removed == 1


def test_pushes_of_many_threads_to_one_ref_all_arrive(node: MakeNode) -> None:
    nodes = [node(f"node {number}") for number in range(6)]
    for number, one in enumerate(nodes):
        one.store.put_many((f"{number}/{name}", b"%d" % name) for name in range(20))
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(lambda one: one.push(), nodes))
    last = node("last")
    last.pull()
    assert len(last.contents()) == 120


def test_a_ref_larger_than_the_budget_is_refused_before_anything_comes(node: MakeNode) -> None:
    one, small = node("one"), node("small", max_size="1MB")
    one.store.put_many((f"part/{number}", noise(300_000, number)) for number in range(4))
    one.store.put("other", noise(300_000, 4))
    one.push()
    with pytest.raises(FullError, match=r"takes 1\.5 MB, and the budget of .* is 1 MB; pull a part"):
        small.pull()
    assert small.contents() == {}
    small.pull("other")
    assert small.contents() == {"other": noise(300_000, 4)}


def test_what_has_expired_meanwhile_is_not_pulled(node: MakeNode, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = node("one"), node("two")
    one.store.put("short", b"1", ttl="1h")
    one.store.put("long", b"2", ttl="1d")
    assert one.push().added == 2
    later = time.time() + 7200
    monkeypatch.setattr(pulling, "time", SimpleNamespace(time=lambda: later, monotonic=time.monotonic))
    pulled = two.pull()
    assert (pulled.added, pulled.expired) == (1, 1)
    with pytest.raises(RemoteMissingError, match="no name at or below 'short' that has not expired"):
        two.pull("short")
    assert two.contents() == {"long": b"2"}
    ours, theirs = one.store.entry("long"), two.store.entry("long")
    assert ours is not None
    assert theirs is not None
    assert ours.expires == theirs.expires


def test_a_name_that_has_expired_in_the_ref_and_lives_here_is_pushed_again(
    node: MakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the push said that the ref had it all, and nobody could pull it."""
    one, two = node("one"), node("two")
    one.store.put("short", b"1", ttl=100)
    one.push()
    pass_time(monkeypatch, 200)
    assert one.push().added == 0, "it has expired here, too"
    one.store.put("short", b"1", ttl=1000)
    assert one.push().added == 1
    assert one.push().added == 0
    assert two.pull().added == 1
    assert two.contents() == {"short": b"1"}


def test_an_object_that_is_larger_than_castore_writes_it_is_not_read_into_memory(
    node: MakeNode, tmp_path: Path
) -> None:
    one = node("one")
    one.store.put("a", b"a")
    one.push()
    [ref] = (tmp_path / "bucket" / "refs" / "main~").iterdir()
    os.truncate(ref, 1 << 40)  # a file with a hole
    with pytest.raises(RemoteError, match="is larger than castore writes it"):
        node("two").pull()


def test_a_pickle_is_neither_pushed_nor_pulled(node: MakeNode) -> None:
    one = node("one", allow_pickle=True)
    one.store.save("object", {1, "a", frozenset()}, serializer="pickle")
    one.store.put("b", b"b")
    with pytest.raises(InvalidValueError, match="'object' would have to be unpickled"):
        one.push()
    one.push("b")


def test_a_damaged_blob_does_not_travel(node: MakeNode) -> None:
    one = node("one")
    one.store.put("good", b"good")
    one.store.put("bad", noise(400_000))
    blob = one.store.blob(one.store.entry("bad").digest)  # type: ignore[union-attr]
    assert blob is not None
    path = one.store.path_of(blob)
    os.chmod(path, 0o600)
    with open(path, "r+b") as file:
        file.seek(300_000)
        file.write(b"flipped")
    with pytest.raises(CorruptError, match="damaged"):
        one.push()
    with pytest.raises(RemoteMissingError):
        node("two").pull()


def test_a_prefix_without_names_is_an_error(node: MakeNode) -> None:
    one = node("one")
    one.store.put("a", b"a")
    with pytest.raises(NotFoundError, match="no entry at or below 'nothing/here'"):
        one.push("nothing/here")
    one.push()
    with pytest.raises(RemoteMissingError, match="no name at or below 'nothing/here'"):
        node("two").pull("nothing/here")


def flip_object(bucket: FolderBucket, folder: str) -> None:
    """Change one byte in the middle of each object of a folder."""
    for listed in list(bucket.listing(folder)):
        path = bucket.folder / listed.key
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)


@pytest.mark.parametrize("folder", ["objects/", "packs/", "trees/", "commits/", "dicts/"])
def test_flipped_bits_in_a_bucket_are_errors_and_name_nothing(node: MakeNode, folder: str) -> None:
    one, two = node("one"), node("two")
    samples = records(400)
    one.store.put_many((f"r/{number:04}", data) for number, data in enumerate(samples[:200]))
    one.store.train_dictionary("r")
    one.store.put_many((f"r/{number:04}", data) for number, data in enumerate(samples[200:], 200))
    one.store.put("large", text(2_000_000), codec="none")
    one.push()
    assert isinstance(one.bucket, FolderBucket)
    flip_object(one.bucket, folder)
    forget_carried(one.bucket.folder)
    with pytest.raises((CorruptError, RemoteError), match=r"damaged|another digest"):
        two.pull()
    wrong = {name for name, data in two.contents().items() if data != one.store.get(name)}
    assert not wrong
    assert two.store.verify().bad == []


# A ref that goes back


def test_a_ref_that_goes_back_loses_no_change_of_the_store_that_made_it(node: MakeNode) -> None:
    """Regression: a pull took the older bytes for a change of the ref, and overwrote the newer ones."""
    one, two = node("one"), node("two")
    one.store.put("x", b"1")
    one.store.put("k", b"k")
    one.push()
    one.store.put("x", b"2")
    one.store.put("n", b"n")
    one.push()
    one.push(ref="other")  # a commit of the same tree, with another history
    two.pull()
    assert isinstance(one.bucket, FolderBucket)
    ref_file(one.bucket).unlink()
    for other in (one, two):
        pulled = other.pull()
        assert (pulled.added, pulled.changed) == (0, 0)
        assert other.contents() == {"x": b"2", "k": b"k", "n": b"n"}
    one.store.put("x", b"3")
    pushed = one.push()
    assert (pushed.added, pushed.changed, pushed.removed) == (1, 1, 0)
    three = node("three")
    three.pull()
    assert three.contents() == one.contents()
    with pytest.raises(ConflictError):  # its bytes of "x" are in no commit of the ref any more
        two.pull()


# Bytes that a ref carries


def ref_file(bucket: FolderBucket) -> Path:
    return max((bucket.folder / "refs" / "main~").iterdir())


@pytest.mark.parametrize("lazy", [None, "team"])
def test_a_ref_carries_its_commit_and_the_root_of_its_tree(node: MakeNode, lazy: str | None) -> None:
    one, two = node("one"), node("two")
    one.store.put("a", b"x")
    pushed = one.push(note="é")
    assert isinstance(one.bucket, FolderBucket)
    for folder in ("trees", "commits"):
        [path] = (one.bucket.folder / folder).iterdir()
        path.unlink()
    assert two.pull(lazy=lazy).commit == pushed.commit
    assert [entry.name for entry in two.store.entries()] == ["a"]


def test_a_ref_carries_no_long_note(node: MakeNode) -> None:
    one, two = node("one"), node("two")
    one.store.put("a", b"x")
    one.push(note="x" * 60_000)
    assert isinstance(one.bucket, FolderBucket)
    assert ref_file(one.bucket).stat().st_size < 1000
    assert two.pull().added == 1
    one.store.put("b", b"y")
    one.push()
    assert ref_file(one.bucket).stat().st_size > 500
    assert two.pull().added == 1


def test_what_a_ref_carries_counts_if_its_digests_are_right_alone(node: MakeNode, bucket: Bucket) -> None:
    one = node("one")
    one.store.put("a", b"x")
    one.push(ref="other")
    other = read_fields(bucket, "other")
    one.store.put("a", b"right")
    one.push()
    honest = read_fields(bucket, "main")
    assert isinstance(bucket, FolderBucket)
    path = ref_file(bucket)
    lies: list[dict[str, Any]] = [
        {"commit_bytes": other["commit_bytes"]},
        {"root_bytes": other["root_bytes"]},
        {"commit_bytes": other["commit_bytes"], "root_bytes": other["root_bytes"]},
        {"commit_bytes": "no base64 =", "root_bytes": "é"},
        {"commit_bytes": 1, "root_bytes": None},
        {"commit_bytes": [], "root_bytes": {}},
        {"commit_bytes": "", "root_bytes": ""},
    ]
    for number, lie in enumerate(lies):
        path.write_text(json.dumps(honest | lie))
        two = node(f"two-{number}")
        assert two.pull().added == 1, lie
        assert two.contents() == {"a": b"right"}, lie


# Pages beside a ref


def names_of_many_pages(seed: int) -> list[tuple[str, dict[str, str]]]:
    """Names whose metadata takes some 300 KB as stored."""
    return [(f"n/{number:03}", {"noise": noise(1100, 1000 * seed + number).hex()}) for number in range(250)]


def push_many_pages(node: Node, seed: int = 0, ref: str = "main") -> list[Path]:
    """Push names of several pages; returns the files of the pages."""
    for name, metadata in names_of_many_pages(seed):
        node.store.put(name, b"x", metadata=metadata)
    node.push(ref=ref)
    assert isinstance(node.bucket, FolderBucket)
    pages = sorted((node.bucket.folder / "trees").iterdir())
    assert len(pages) > 2
    return pages


@pytest.mark.parametrize("lazy", [None, "team"])
def test_a_first_pull_needs_no_page_but_those_beside_the_ref(node: MakeNode, lazy: str | None) -> None:
    one, two = node("one"), node("two")
    for page in push_many_pages(one):
        page.unlink()
    assert two.pull(lazy=lazy).added == 250
    assert [entry.metadata for entry in two.store.entries()] == [data for _, data in names_of_many_pages(0)]
    assert two.pull().unchanged == 250


def test_a_push_of_one_name_leaves_all_pages_beside_the_ref(node: MakeNode) -> None:
    one, two, three = node("one"), node("two"), node("three")
    push_many_pages(one)
    two.pull()
    two.store.put("n/100", b"y")
    two.push()
    assert isinstance(two.bucket, FolderBucket)
    for page in (two.bucket.folder / "trees").iterdir():
        page.unlink()
    assert three.pull().added == 250
    assert three.contents() == two.contents()


def test_what_lies_beside_a_ref_counts_if_its_digests_are_right_alone(
    node: MakeNode, bucket: FolderBucket
) -> None:
    one, other = node("one"), node("other")
    push_many_pages(one)
    push_many_pages(other, 1, "other")
    path = bucket.folder / "hints" / "main"
    honest = path.read_bytes()
    lies = {
        "gone": None, "nothing": b"", "cut": honest[:-1], "more": honest + b"x", "text": b"no such thing",
        "another ref's": (bucket.folder / "hints" / "other").read_bytes(), "a map": b"\x80",
        "numbers": b"\x92\x01\xc0", "deep": b"\x91" * 100_000, "long": honest + bytes(2 << 20),
        "flipped": honest[:1000] + bytes(byte ^ 1 for byte in honest[1000:1500]) + honest[1500:],
    }  # fmt: skip
    for what, lie in lies.items():
        if lie is None:
            path.unlink()
        else:
            path.write_bytes(lie)
        two = node(f"two {what}")
        assert two.pull().added == 250, what
        assert two.contents() == one.contents(), what
    kept = {page.name for page in (two.store.path / "pages").iterdir()}
    assert kept <= {
        file.name for folder in ("trees", "commits") for file in (bucket.folder / folder).iterdir()
    }


def test_beside_the_ref_of_a_large_tree_lie_no_pages(node: MakeNode, bucket: FolderBucket) -> None:
    one = node("one")
    push_many_pages(one)
    assert 290_000 < (bucket.folder / "hints" / "main").stat().st_size < 512 << 10
    for name, metadata in names_of_many_pages(1):
        one.store.put(name.replace("n", "m"), b"x", metadata=metadata)
    one.push()
    assert (bucket.folder / "hints" / "main").stat().st_size == 1
    two = node("two")
    assert two.pull().added == 500


def read_fields(bucket: Bucket, ref: str) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(bucket.get(f"refs/{ref}").data)
    return fields


@pytest.mark.parametrize("harm", ["truncated", "gone"])
@pytest.mark.parametrize("is_lazy_before", [False, True])
def test_bytes_that_are_damaged_or_gone_cost_their_own_names_alone(
    node: MakeNode, harm: str, is_lazy_before: bool
) -> None:
    """Regression: the first of them ended a pull, and names of which it had not asked yet did not come."""
    one, two = node("one"), node("two")
    contents = {f"large/{number:02}": noise(1_100_000, number) for number in range(18)}
    contents |= {f"small/{number:02}": noise(3000, number) for number in range(30)}
    one.store.put_many(contents.items())
    one.store.put("large/copy", contents["large/00"])
    one.push()
    assert isinstance(one.bucket, FolderBucket)
    if is_lazy_before:
        two.pull(lazy="team")
    packs = [listed.key for listed in one.bucket.listing("packs/")]
    hit = [
        *packs,
        object_key(blake3(contents["large/00"]).digest(), packed=False),
        object_key(blake3(contents["large/17"]).digest(), packed=False),
    ]
    before = {key: (one.bucket.folder / key).read_bytes() for key in hit}
    for key in hit:
        if harm == "truncated":
            os.truncate(one.bucket.folder / key, 60_000)
        else:
            (one.bucket.folder / key).unlink()
    with pytest.raises(CorruptError if harm == "truncated" else RemoteMissingError) as raised:
        two.pull()
    found = {name: data for name, data in two.contents().items() if data != b"a miss"}
    lost = {*contents, "large/copy"} - set(found)
    assert {"large/00", "large/copy", "large/17", "small/29"} <= lost
    assert {name for name in lost if name.startswith("large")} == {"large/00", "large/copy", "large/17"}
    assert ("small/00" in lost) == (harm == "gone")
    assert f"'large/00' and {len(lost) - 1} more names did not come, and all other" in str(raised.value)
    assert all(found[name] == contents[name] for name in found)
    for key, data in before.items():
        (one.bucket.folder / key).write_bytes(data)
    pulled = two.pull()
    assert pulled.added == (0 if is_lazy_before else len(lost))
    assert two.contents() == one.contents()
    agrees_with_disk(two.store)


@pytest.mark.parametrize("codec", ["none", "zstd"])
@pytest.mark.parametrize("harm", [None, "flipped", "another file", "a link"])
def test_a_large_object_that_was_cut_off_goes_on_behind_its_sound_frames(
    node: MakeNode, monkeypatch: pytest.MonkeyPatch, codec: str, harm: str | None
) -> None:
    one, two = node("one", codec=codec), node("two")
    data = mixed(20_000_000)
    one.store.put("large", data)
    stored = one.store.entry("large").stored  # type: ignore[union-attr]
    one.push()
    bucket, asked = two.bucket, two.bucket.stream

    def cut_off(key: str) -> Iterator[bytes]:
        yield next(asked(key))[:3_000_000]
        raise RemoteUnreachableError("the network is gone")

    monkeypatch.setattr(bucket, "stream", cut_off)
    with pytest.raises(RemoteUnreachableError):
        two.pull()
    monkeypatch.setattr(bucket, "stream", asked)
    [left] = (two.store.path / "tmp").iterdir()
    sound = 3_000_000
    if harm == "flipped":
        flip(left, 1_500_000)
        sound = 1_500_000
    elif harm is not None:
        outside = two.store.path.with_name("outside")
        left.rename(outside)
        os.link(outside, left) if harm == "another file" else left.symlink_to(outside)
        sound = 0
    pulled = two.pull()
    assert sound - 300_000 <= stored - pulled.fetched <= sound
    assert two.contents() == {"large": data}
    if harm in ("another file", "a link"):
        assert outside.stat().st_size == 3_000_000
        left.unlink()
    assert list((two.store.path / "tmp").iterdir()) == []
    agrees_with_disk(two.store)


def test_gc_removes_what_an_interrupted_pull_has_left(
    node: MakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = node("one"), node("two")
    one.store.put("large", noise(6_000_000))
    one.push()

    def cut_off(key: str) -> Iterator[bytes]:
        yield noise(6_000_000)[:3_000_000]
        raise RemoteUnreachableError("the network is gone")

    monkeypatch.setattr(two.bucket, "stream", cut_off)
    with pytest.raises(RemoteUnreachableError):
        two.pull()
    [left] = (two.store.path / "tmp").iterdir()
    assert two.store.gc().leftovers == [str(left)]
    assert list((two.store.path / "tmp").iterdir()) == []


def test_a_place_that_is_no_remote_any_more_is_not_taken_for_lost_bytes(
    node: MakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = node("one"), node("two")
    one.store.put_many((f"{number}", noise(1_100_000, number)) for number in range(5))
    one.push()
    assert isinstance(one.bucket, FolderBucket)
    place, asked = one.bucket, one.bucket.stream

    def unmount(key: str) -> object:
        with suppress(FileNotFoundError):  # another thread was faster
            place.folder.rename(place.folder.with_name("elsewhere"))
        return asked(key)

    monkeypatch.setattr(place, "stream", unmount)
    with pytest.raises(RemoteMissingError, match=r"is no remote: .* is its file system mounted"):
        two.pull()
