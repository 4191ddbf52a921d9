"""A store that has nothing at the place of a pull plans it while bytes come, some names after the other."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from castore.errors import ConflictError, CorruptError, NameConflictError, RemoteError, RemoteMissingError
from castore.remote import commits, fetch, marker, pull
from castore.remote.bucket import Bucket
from castore.remote.folder_bucket import FolderBucket
from castore.remote.keys import TREES
from castore.remote.pages import Row
from castore.remote.tree import Tree
from tests.helpers import agrees_with_disk, flip, noise
from tests.remote.conftest import MakeNode, Node
from tests.remote.nodes import forget_carried, put_tree


@pytest.fixture(autouse=True)
def few_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plan three names, then six, then twelve each time; commit after four, or two."""
    monkeypatch.setattr(pull, "_FIRST_PLANNED", 3)
    monkeypatch.setattr(pull, "_PLANNED", 12)
    monkeypatch.setattr(pull, "_COMMIT", 4)
    monkeypatch.setattr(pull, "_COMMIT_MEANWHILE", 2)


class Counting(FolderBucket):
    """Notes the ranges that are asked for."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.ranges: list[str] = []

    def get_range(self, key: str, start: int, end: int) -> bytes:
        self.ranges.append(key)
        return super().get_range(key, start, end)


def rows_of(one: Node, bucket: Bucket) -> list[Row]:
    head = commits.read_ref(bucket, "main")
    assert head is not None
    return list(Tree(commits.read_commit(bucket, head.commit).tree, one.pages.read).rows())


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    contents=st.lists(st.tuples(st.integers(0, 25), st.booleans()), min_size=1, max_size=70),
    before=st.integers(0, 3),
    below=st.sampled_from(["", "their"]),
)
def test_names_that_share_bytes_come_whatever_is_planned_together(
    tmp_path_factory: pytest.TempPathFactory, contents: list[tuple[int, bool]], before: int, below: str
) -> None:
    folder = tmp_path_factory.mktemp("planning")
    bucket = FolderBucket(folder / "bucket")
    marker.prepare(bucket)
    one, two = Node(folder / "one", bucket), Node(folder / "two", bucket)
    try:
        living: dict[str, bytes] = {}
        for number, (content, expires) in enumerate(contents):
            data = noise(1 + 3000 * (content % 5), content)
            one.store.put(f"n/{number:03}", data, ttl=1000 if expires else None)
            living[f"{below}/n/{number:03}" if below else f"n/{number:03}"] = data
        one.push()
        for content in range(before):  # bytes that the store has under other names
            two.store.put(f"own/{content}", noise(1 + 3000 * (content % 5), content))
        pulled = two.pull(below=below)
        found = {name: data for name, data in two.contents().items() if not name.startswith("own/")}
        assert found == living
        assert (pulled.added, pulled.unchanged) == (len(living), 0)
        different = set(living.values())  # bytes between two that are wanted come along
        assert pulled.fetched <= sum(map(len, different)) * 1.1 + 200 * len(different)
        agrees_with_disk(two.store)
        assert two.store.verify().bad == []
        assert two.seen == [] or two.seen[-1][0] == two.seen[-1][1]
        assert two.pull(below=below).unchanged == len(living)
    finally:
        one.close()
        two.close()


def test_progress_never_falls_and_ends_at_all(node: MakeNode) -> None:
    one, two, three = node("one"), node("two"), node("three")
    one.store.put_many((f"{number:03}", noise(30_000, number)) for number in range(100))
    one.push()
    two.pull()
    three.pull(lazy="team")
    for seen in (two.seen, three.seen):
        assert sorted(done for done, _ in seen) == [done for done, _ in seen]
        assert len({total for _, total in seen}) == 1
        assert seen[-1][0] == seen[-1][1]
    assert len(three.seen) > 5


def test_names_that_expire_are_not_counted_in_progress(node: MakeNode) -> None:
    one, two = node("one"), node("two")
    one.store.put_many((f"{number:03}", noise(30_000, number)) for number in range(0, 40, 2))
    for number in range(1, 40, 2):
        one.store.put(f"{number:03}", noise(30_000, number), ttl=3600)
    one.push()
    ends = time.time() + 3601
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "time", lambda: ends)
        pulled = two.pull()
    assert (pulled.added, pulled.expired) == (20, 20)
    assert two.seen[-1][0] == two.seen[-1][1] < 21 * 30_000


def test_a_pickle_ends_a_pull_and_leaves_what_came_before_it(node: MakeNode, bucket: Bucket) -> None:
    one, two = node("one"), node("two")
    one.store.put_many((f"{number:03}", noise(3000, number)) for number in range(40))
    one.push()
    rows = rows_of(one, bucket)
    rows[30] = rows[30]._replace(serializer="pickle")
    put_tree(bucket, rows, "evil")
    for lazy in (None, "team"):
        with pytest.raises(RemoteError, match=r"'030' in .* is a 'pickle', which runs code"):
            two.pull(ref="evil", lazy=lazy)
        assert set(two.contents()) <= {row.name for row in rows[:30]}
    agrees_with_disk(two.store)
    came = len(list(two.store.entries()))
    assert two.pull().added == 40 - came
    assert two.contents() == one.contents()


def test_a_damaged_page_ends_a_pull_and_the_next_one_goes_on(node: MakeNode, tmp_path: Path) -> None:
    one, two = node("one"), node("two")
    one.store.put_many((f"{number:05}", noise(40, number)) for number in range(6000))
    one.push()
    forget_carried(tmp_path / "bucket")
    pages = sorted((tmp_path / "bucket" / TREES).rglob("*"), key=lambda path: path.stat().st_size)
    leaf = next(path for path in reversed(pages) if path.is_file())
    whole = leaf.read_bytes()
    flip(leaf, len(whole) // 2)
    with pytest.raises(CorruptError, match=r"page .* is damaged"):
        two.pull()
    agrees_with_disk(two.store)
    came = len(list(two.store.entries()))
    assert came < 6000
    leaf.write_bytes(whole)
    assert two.pull().added == 6000 - came
    assert two.contents() == one.contents()


def test_names_far_from_their_neighbours_in_the_packs_are_planned_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pull, "_FIRST_PLANNED", 50)
    bucket = Counting(tmp_path / "bucket")
    marker.prepare(bucket)
    one, two, three = (Node(tmp_path / name, bucket) for name in ("one", "two", "three"))
    try:
        for shift in range(20):  # each push has a pack of its own, and neighbours by name are in all of them
            one.store.put_many((f"{number:05}", noise(2000, number)) for number in range(shift, 2000, 20))
            one.push()
        pulled = two.pull()
        assert pulled.added == 2000
        assert two.contents() == one.contents()
        # Those of the first fifty names, and the rest of each pack.
        assert len(bucket.ranges) <= 20 + 20 + 5
        bucket.ranges.clear()
        monkeypatch.setattr(fetch, "_FEW_STRETCHES", 1000)
        assert three.pull().added == 2000
        assert len(bucket.ranges) > 1000
    finally:
        for each in (one, two, three):
            each.close()


def test_a_prefix_of_expired_names_alone_says_so(node: MakeNode) -> None:
    one, two = node("one"), node("two")
    one.store.put("old/a", b"1", ttl=3600)
    one.store.put("new", b"2")
    one.push()
    with pytest.MonkeyPatch.context() as patch:
        later = time.time() + 3601
        patch.setattr(time, "time", lambda: later)
        with pytest.raises(RemoteMissingError, match="no name at or below 'old' that has not expired"):
            two.pull("old")
    with pytest.raises(RemoteMissingError, match=r"no name at or below 'none'$"):
        two.pull("none")


def test_bytes_of_a_name_that_somebody_changes_meanwhile_come_for_the_others_that_have_them(
    node: MakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = node("one"), node("two")
    shared = {number: noise(3000, number) for number in range(10)}
    one.store.put_many((f"{number:03}", shared[number % 10]) for number in range(60))
    one.push()
    coming = pull._Naming.coming

    def change(naming: pull._Naming, rows: list[tuple[str, Row]]) -> None:
        coming(naming, rows)
        for name, _ in rows:
            if name < "010":  # each of these brings the bytes for five others, most of them planned later
                two.store.put(name, b"our own")

    monkeypatch.setattr(pull._Naming, "coming", change)
    with pytest.raises(
        ConflictError,
        match=r"changed here while .* was pulled.*: '000' and 9 more names; the others have come",
    ):
        two.pull()
    assert two.contents() == one.contents() | {f"{number:03}": b"our own" for number in range(10)}
    agrees_with_disk(two.store)


@pytest.mark.parametrize("lazy", [None, "team"], ids=["with bytes", "lazy"])
@pytest.mark.parametrize("before", [(), ("own",)], ids=["an empty store", "a store with another name"])
def test_folders_and_files_that_somebody_puts_in_the_way_meanwhile_leave_the_other_names_alone(
    node: MakeNode, monkeypatch: pytest.MonkeyPatch, lazy: str | None, before: tuple[str, ...]
) -> None:
    one, two = node("one"), node("two")
    for number in range(60):  # every second name has bytes that another one has, too
        one.store.put(f"{number // 10}/{number % 10}", noise(2000, number % 40))
    one.push()
    for name in before:
        two.store.put(name, b"before")
    coming, put = pull._Naming.coming, {"2/5/file": b"ours", "4": b"ours, too", "1/1": b"changed"}

    def get_in_the_way(naming: pull._Naming, rows: list[tuple[str, Row]]) -> None:
        coming(naming, rows)
        for name in [name for name in put if name not in two.store]:
            if any(f"{row_name}/".startswith(name[:3]) for row_name, _ in rows):
                two.store.put(name, put[name])

    monkeypatch.setattr(pull._Naming, "coming", get_in_the_way)
    with pytest.raises(ConflictError, match=r"'1/1' and \d+ more names; the others have come") as caught:
        two.pull(lazy=lazy)
    in_way = {"1/1", "2/5", *(f"4/{number}" for number in range(10))}
    there = {name for name in caught.value.names if name not in in_way}
    assert not there
    found = two.contents()
    theirs = {name: data for name, data in one.contents().items() if name not in in_way | {"4"}}
    if "4/0" in found:  # some had come before the file was put, which then was refused
        pytest.fail("the file came too late")
    assert set(found) == set(theirs) | set(put) | set(before)
    if lazy is None:
        assert found == theirs | put | dict.fromkeys(before, b"before")
        assert two.store.verify().bad == []
    agrees_with_disk(two.store)
    monkeypatch.undo()
    with pytest.raises((NameConflictError, ConflictError)):
        two.pull(lazy=lazy)
    two.pull(lazy=lazy, replace=True)
    assert {name for name in two.contents() if name not in before} == set(one.contents())
