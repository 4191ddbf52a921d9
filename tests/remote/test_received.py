"""Bytes of a remote are compared with the tree when they come, and with their digest when they are read."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
from blake3 import blake3

import castore_fuse
from castore import Store
from castore.errors import CorruptError
from castore.gc.compaction import compact
from castore.records import Blob
from castore.remote import commits
from castore.remote.bucket import Bucket
from castore.remote.pages import Row
from castore.remote.tree import Tree
from castore.repair import doctor
from tests.helpers import agrees_with_disk, flip, noise, text
from tests.mount.conftest import until
from tests.remote.conftest import MakeNode, Node
from tests.remote.nodes import node as node_of
from tests.remote.nodes import put_tree

RIGHT, OTHER = text(3000, 1), text(3000, 2)


@pytest.fixture
def lied_to(node: MakeNode, bucket: Bucket) -> Node:
    """A node that has pulled `a` and `b`, where the tree gives the bytes of `b` the digest of RIGHT."""
    one, two = node("one"), node("two")
    one.store.put("a", text(3000, 3))
    one.store.put("b", OTHER)
    one.push()
    head = commits.read_ref(bucket, "main")
    assert head is not None
    honest, liar = Tree(commits.read_commit(bucket, head.commit).tree, one.pages.read).rows()
    put_tree(bucket, [honest, _with_digest(liar, RIGHT)], "evil")
    assert two.pull(ref="evil").added == 2
    return two


def _with_digest(row: Row, data: bytes) -> Row:
    return row._replace(digest=blake3(data).digest())


def blob_of(store: Store, name: str) -> Blob:
    found = store.index.find(name)
    assert found is not None
    return found.blob


def test_a_tree_that_lies_about_a_digest_gives_nobody_other_bytes(lied_to: Node) -> None:
    store = lied_to.store
    assert not blob_of(store, "b").is_own
    assert store.get("b") is None
    assert store.get("a") == text(3000, 3)
    assert "b" not in store
    with pytest.raises(CorruptError, match=r"the bytes of 'b' in .* are damaged: the bytes do not have the"):
        lied_to.pull(ref="evil")
    assert store.get("b") is None


def test_a_range_of_such_bytes_is_not_served_either(lied_to: Node) -> None:
    blob = blob_of(lied_to.store, "b")
    with (
        closing(lied_to.store.objects.open(blob)) as reader,
        pytest.raises(CorruptError, match="do not have the"),
    ):
        reader.read(10, 10)


@pytest.mark.parametrize("ways", ["put", "put_many", "batch", "put_file", "put of the name"])
def test_a_put_takes_no_bytes_for_its_own_that_nobody_has_read(
    lied_to: Node, tmp_path: Path, ways: str
) -> None:
    store = lied_to.store
    if ways == "put":
        store.put("new", RIGHT)
    elif ways == "put_many":
        store.put_many([("new", RIGHT), ("newer", RIGHT), ("c", b"c")])
    elif ways == "batch":
        with store.batch() as batch:
            batch.put("new", RIGHT)
    elif ways == "put_file":
        path = tmp_path / "right"
        path.write_bytes(RIGHT)
        store.put_file("new", path)
    else:
        store.put("b", RIGHT)
        store.put("new", RIGHT)
    assert store.get("new") == RIGHT
    assert store.get("b") == RIGHT
    assert blob_of(store, "b").is_own
    assert store.verify().bad == []


@pytest.mark.parametrize("size", [100, 3000, 15_000, 200_000])
def test_a_put_of_what_has_come_leaves_one_blob(node: MakeNode, size: int) -> None:
    one, two = node("one"), node("two")
    data = text(size, 5)
    one.store.put("a", data)
    one.push()
    two.pull()
    store = two.store
    came_in_pack = blob_of(store, "a").pack > 0
    assert blob_of(store, "a").is_own is not came_in_pack
    store.put("mine", data)
    assert blob_of(store, "a") == blob_of(store, "mine")
    assert blob_of(store, "a").is_own
    assert store.stat().blobs == 1
    agrees_with_disk(store)
    assert two.pull().unchanged == 1
    assert blob_of(store, "a").is_own


def test_compaction_takes_over_what_has_its_digest_alone(lied_to: Node) -> None:
    store = lied_to.store
    pack = blob_of(store, "b").pack
    assert compact(store.parts, pack)
    assert blob_of(store, "a").is_own
    assert store.get("a") == text(3000, 3)
    assert store.get("b") is None
    assert not store.objects.packs.path(pack).exists()


def test_a_rebuilt_index_prefers_the_stores_own_bytes(lied_to: Node) -> None:
    store = lied_to.store
    store.put("new", RIGHT)
    path = store.path
    store.close()
    (path / "index.sqlite").unlink()
    doctor.rebuild_index(path)
    with Store(path) as again:
        assert again.get("new") == RIGHT
        assert again.get("b") == RIGHT


def test_bytes_that_nobody_has_read_travel_on_only_if_they_are_right(
    lied_to: Node, node: MakeNode, bucket: Bucket
) -> None:
    with pytest.raises(CorruptError, match=r"is damaged in .* `castore verify --repair` sets it aside"):
        lied_to.push("b", ref="onwards")
    lied_to.push("a", ref="onwards")
    three = node("three")
    three.pull(ref="onwards")
    assert three.contents() == {"a": text(3000, 3)}


def test_verify_finds_what_lies(lied_to: Node) -> None:
    [bad] = lied_to.store.verify().bad
    assert bad.names == ["b"]
    assert lied_to.store.verify(repair=True).dropped == ["b"]


def test_a_lazy_read_of_a_lie_is_a_miss_and_the_next_one_too(
    lied_to: Node, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with node_of(tmp_path / "three", lied_to.bucket.url, memory=0) as three:
        three.pull("evil", remote="team", lazy=True)
        assert three.get("a") == text(3000, 3)
        assert not blob_of(three, "a").is_own
        for _ in range(3):
            assert three.get("b") is None
        assert "the bytes do not have the" in caplog.text
        three.prefetch(["b"])
        assert three.get_many(["a", "b"]) == [text(3000, 3), None]
        three.put("new", RIGHT)
        assert three.get("b") == RIGHT


def test_what_came_for_a_reader_and_was_damaged_is_compared_when_it_comes_again(
    node: MakeNode, tmp_path: Path
) -> None:
    one = node("one")
    one.store.put_many((f"{number}", text(3000, number)) for number in range(3))
    one.push()
    with node_of(tmp_path / "three", one.bucket.url, memory=0) as three:
        three.pull("main", remote="team", lazy=True)
        three.prefetch(["0", "1", "2"])
        until(lambda: three.stat().away.blobs == 0)
        received = blob_of(three, "0")
        assert not received.is_own
        flip(three.objects.packs.path(received.pack), received.offset + 10)
        assert three.get("0") == text(3000, 0)
        assert blob_of(three, "0").is_own
        agrees_with_disk(three)


def test_a_mount_serves_no_lie(lied_to: Node, tmp_path: Path) -> None:
    with (
        node_of(tmp_path / "three", lied_to.bucket.url) as three,
        castore_fuse.mounted(three.path, tmp_path / "mnt", remote="team", ref="evil") as root,
    ):
        assert (root / "a").read_bytes() == text(3000, 3)
        for _ in range(2):
            with pytest.raises(OSError, match="Input/output error"):
                (root / "b").read_bytes()
        three.put("new", RIGHT)
        assert three.get("new") == RIGHT


# Trees that lie about sizes and places


def _lying(node: MakeNode, bucket: Bucket, change: Callable[[Row], Row]) -> None:
    """Push `x`, whose content is RIGHT, as `main`; and a changed row of it as `evil`."""
    one = node("one")
    one.store.put("x", RIGHT)
    one.store.put("y", OTHER)
    one.push()
    head = commits.read_ref(bucket, "main")
    assert head is not None
    honest, other = Tree(commits.read_commit(bucket, head.commit).tree, one.pages.read).rows()
    put_tree(bucket, [change(honest), other], "evil")


def test_a_size_that_lies_is_no_bodys_size(node: MakeNode, bucket: Bucket, tmp_path: Path) -> None:
    _lying(node, bucket, lambda row: row._replace(size=50))
    with node_of(tmp_path / "three", bucket.url, memory=0) as three:
        three.pull("evil", remote="team", lazy=True)
        assert three.get("x") is None
        three.pull("main", remote="team", lazy=True, below="good")
        assert three.get("good/x") == RIGHT
        three.pull("main", remote="team", below="better")
        with castore_fuse.mounted(three.path, tmp_path / "mnt") as root:
            for name in ("x", "good/x", "better/x"):
                entry = three.entry(name)
                assert entry is not None
                assert entry.size == len(RIGHT)
                assert (root / name).read_bytes() == RIGHT
        agrees_with_disk(three)


def test_a_pull_after_a_size_that_lied_mends_it(node: MakeNode, bucket: Bucket, tmp_path: Path) -> None:
    _lying(node, bucket, lambda row: row._replace(size=50))
    with node_of(tmp_path / "three", bucket.url, memory=0) as three:
        three.pull("evil", remote="team")
        three.pull("main", remote="team", below="good")
        assert three.get("good/x") == RIGHT
        assert three.get("x") == RIGHT
        for name in ("x", "good/x"):
            entry = three.entry(name)
            assert entry is not None
            assert entry.size == len(RIGHT)
        agrees_with_disk(three)


def test_a_mount_cuts_no_file_off_because_its_tree_says_so(
    node: MakeNode, bucket: Bucket, tmp_path: Path
) -> None:
    _lying(node, bucket, lambda row: row._replace(size=50))
    with node_of(tmp_path / "three", bucket.url) as three:
        three.put("mine", RIGHT)
        with castore_fuse.mounted(three.path, tmp_path / "mnt", remote="team", ref="evil") as root:
            with pytest.raises(OSError, match="Input/output error"):
                (root / "x").read_bytes()
            assert (root / "y").read_bytes() == OTHER


def test_what_no_room_is_for_is_compared_with_its_digest_too(
    node: MakeNode, bucket: Bucket, tmp_path: Path
) -> None:
    _lying(node, bucket, lambda row: _with_digest(row, text(3000, 9)))
    with node_of(tmp_path / "three", bucket.url, memory=0, max_size=100_000) as three:
        three.put("pinned", noise(99_900))
        three.pin("pinned")
        three.pull("evil", remote="team", lazy=True)
        assert three.get("y") == OTHER
        assert three.get("x") is None
        with castore_fuse.mounted(three.path, tmp_path / "mnt") as root:
            assert (root / "y").read_bytes() == OTHER
            with pytest.raises(OSError, match="Input/output error"):
                (root / "x").read_bytes()


@pytest.mark.parametrize(
    "change",
    [
        lambda row: row._replace(place=row.place._replace(offset=0, stored=1 << 61)),
        lambda row: row._replace(place=row.place._replace(offset=1 << 61)),
        lambda row: row._replace(size=0),
        lambda row: row._replace(digest=blake3(b"").digest()),
    ],
    ids=["stored", "offset", "size of nothing", "digest of nothing"],
)
def test_a_row_that_cannot_be_is_refused(
    node: MakeNode, bucket: Bucket, tmp_path: Path, change: Callable[[Row], Row]
) -> None:
    _lying(node, bucket, change)
    with (
        node_of(tmp_path / "three", bucket.url) as three,
        pytest.raises(CorruptError, match="is none that castore wrote"),
    ):
        three.pull("evil", remote="team", lazy=True)


def test_a_row_that_takes_a_pack_for_an_object_hurts_nobody_else(
    node: MakeNode, bucket: Bucket, tmp_path: Path
) -> None:
    _lying(node, bucket, lambda row: row._replace(place=row.place._replace(offset=0)))
    with node_of(tmp_path / "three", bucket.url, memory=0) as three:
        three.pull("evil", remote="team", lazy=True)
        assert three.get("x") is None
        assert three.get("y") == OTHER


def test_readers_that_find_damage_at_once_all_have_the_bytes(node: MakeNode, tmp_path: Path) -> None:
    one = node("one")
    one.store.put_many((f"{number:02}", text(3000, number)) for number in range(20))
    one.push()
    with node_of(tmp_path / "three", one.bucket.url, memory=0) as three, ThreadPoolExecutor(4) as threads:
        three.pull("main", remote="team", lazy=True)
        for _ in range(3):
            three.prefetch(three)
            until(lambda: three.stat().away.blobs == 0)
            for name in three:
                blob = blob_of(three, name)
                flip(three.objects.packs.path(blob.pack), blob.offset + 10)
            for name in sorted(three):
                assert list(threads.map(three.get, [name] * 4)) == [text(3000, int(name))] * 4


def test_a_push_of_own_bytes_counts_on_no_tree(lied_to: Node, node: MakeNode) -> None:
    four, five = node("four"), node("five")
    four.pull(ref="evil", lazy="team")
    four.store.put("mine", RIGHT)
    four.push("mine", ref="new")
    five.pull(ref="new")
    assert five.contents() == {"mine": RIGHT}


def test_a_push_counts_on_no_row_of_another_size(node: MakeNode, bucket: Bucket) -> None:
    _lying(node, bucket, lambda row: row._replace(size=50))
    four, five = node("four"), node("five")
    four.store.put("mine", RIGHT)
    four.push(ref="evil")
    five.pull("mine", ref="evil")
    assert five.contents() == {"mine": RIGHT}


def test_a_pull_of_the_truth_does_not_take_unread_lies_for_it(lied_to: Node, node: MakeNode) -> None:
    four = node("four")
    four.store.put("good", RIGHT)
    four.push(ref="good")
    lied_to.pull(ref="good")
    assert lied_to.store.get("good") == RIGHT
    assert lied_to.store.get("b") == RIGHT
    agrees_with_disk(lied_to.store)


def test_bytes_that_are_here_stay_whatever_a_later_tree_says(
    node: MakeNode, bucket: Bucket, tmp_path: Path
) -> None:
    _lying(node, bucket, lambda row: row._replace(size=50))
    with node_of(tmp_path / "three", bucket.url, memory=0) as three:
        three.pull("main", remote="team")
        three.pull("evil", remote="team", lazy=True, below="evil")
        assert three.get("x") == RIGHT
        assert three.get("evil/x") == RIGHT
        assert {entry.size for entry in three.entries()} == {len(RIGHT)}
        agrees_with_disk(three)
