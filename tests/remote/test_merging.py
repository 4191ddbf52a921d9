"""Nodes that edit, push and pull in any order: none overwrites a change it has not seen, and none is lost."""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from blake3 import blake3

from castore import Store
from castore.errors import ConflictError, NameConflictError, RemoteError, RemoteMissingError
from castore.remote import commits
from castore.remote import pull as pulling
from castore.remote.folder_bucket import FolderBucket
from castore.remote.keys import page_key
from castore.remote.remotes import BegunPull, Remotes
from castore.remote.tree import Tree
from castore.system.single_flight import ComputeLocks
from tests.helpers import noise
from tests.mount.conftest import until
from tests.remote.conftest import MakeNode, Node
from tests.remote.nodes import know
from tests.remote.simulation import Killed

NAMES = ["a", "b", "c/1"]
STEPS = ["write"] * 4 + ["push"] * 3 + ["pull"] * 3 + ["evict"]


class Forgetful(Remotes):
    """Of a push or a pull that dies before it keeps its base."""

    forgets = False

    def set_base(self, name: str, ref: str, below: str, base: bytes) -> None:
        if self.forgets:
            raise Killed
        super().set_base(name, ref, below, base)


class Team:
    """Three nodes over one bucket. Each write is a value of its own, so it has one writer and one time."""

    def __init__(self, folder: Path) -> None:
        self.nodes = [Node(folder / str(number), FolderBucket(folder / "bucket")) for number in range(3)]
        self.remotes = [Forgetful(node.store.path, node.store.settings) for node in self.nodes]
        for node, remotes in zip(self.nodes, self.remotes, strict=True):
            node.remotes = remotes
        self.written = 0
        self.ref: dict[str, bytes] = {}
        # Values that a node has had, by name; its edits that no push or pull has settled.
        self.seen: list[set[tuple[str, bytes]]] = [set(), set(), set()]
        self.edits: list[dict[str, bytes]] = [{}, {}, {}]
        # The values on which a node and the ref agreed last.
        self.agreed: list[dict[str, bytes]] = [{}, {}, {}]

    def step(self, chance: random.Random) -> None:
        number, name = chance.randrange(3), chance.choice(NAMES)
        prefix, rarely = chance.choice(["", "", "c"]), chance.random() < 0.2
        match chance.choice(STEPS):
            case "write":
                self.write(number, name)
            case "push":
                self.remotes[number].forgets = chance.random() < 0.3
                self.push(number, prefix, rarely)
                self.remotes[number].forgets = False
            case "pull":
                self.remotes[number].forgets = chance.random() < 0.3
                self.pull(number, prefix, rarely)
                self.remotes[number].forgets = False
            case _:
                self.evict(number, name)

    def write(self, number: int, name: str) -> None:
        self.written += 1
        value = b"%d" % self.written
        self.nodes[number].store.put(name, value)
        self.seen[number].add((name, value))
        self.edits[number][name] = value

    def evict(self, number: int, name: str) -> None:
        if name in self.nodes[number].contents():
            self.nodes[number].store.delete(name)
            self.edits[number].pop(name, None)

    def push(self, number: int, prefix: str, delete: bool) -> None:
        node = self.nodes[number]
        before, local = dict(self.ref), node.contents()
        if not any(name.startswith(prefix) for name in local) and (prefix or delete):
            return
        try:
            node.push(prefix, delete=delete)
        except ConflictError as error:
            in_conflict = error.names
        except Killed:  # by then the ref has moved, if there was anything to push
            in_conflict = ()
            if self.contents() == before:
                return
        else:
            in_conflict = ()
        if in_conflict:
            assert self.contents() == before
            assert all(local[name] != before[name] for name in in_conflict)
            self.check_conflicts(number, in_conflict)
            return
        self.ref = self.contents()
        self.agree(number, prefix, local)
        for name in sorted({*before, *self.ref}):
            was, now = before.get(name), self.ref.get(name)
            if was == now:
                continue
            assert name.startswith(prefix + "/") or not prefix
            if now is None:
                assert delete
                assert name not in local
            else:
                assert now == local[name]
                assert was is None or (name, was) in self.seen[number], "an unseen change was overwritten"
        for name, value in list(self.edits[number].items()):
            if name.startswith(prefix):
                # An edit arrives, unless somebody removed the name and the edit gave it the same bytes again.
                assert self.ref.get(name) == value
                del self.edits[number][name]

    def pull(self, number: int, prefix: str, replace: bool) -> None:
        node = self.nodes[number]
        before = node.contents()
        try:
            node.pull(prefix, replace=replace)
        except RemoteMissingError:
            assert not any(name.startswith(prefix) for name in self.ref) or not self.ref
            return
        except ConflictError as error:
            in_conflict = error.names
        except Killed:  # before any name came, or after the last
            in_conflict = ()
            if node.contents() == before:
                return
        else:
            in_conflict = ()
        if in_conflict:
            assert not replace
            assert node.contents() == before
            self.check_conflicts(number, in_conflict)
            return
        local = node.contents()
        self.agree(number, prefix, local)
        for name in sorted({*before, *local}):
            inside = name in self.ref and (name.startswith(prefix + "/") or not prefix)
            if not inside:
                assert local.get(name) == before.get(name)
            elif local[name] != self.ref[name]:
                assert local[name] == before[name] == self.edits[number][name]
            else:
                self.edits[number].pop(name, None)
            if name in local:
                self.seen[number].add((name, local[name]))

    def agree(self, number: int, prefix: str, local: dict[str, bytes]) -> None:
        for name in NAMES:
            if name.startswith(prefix):
                if name not in self.ref:
                    self.agreed[number].pop(name, None)
                elif local.get(name) == self.ref[name]:
                    self.agreed[number][name] = self.ref[name]

    def check_conflicts(self, number: int, names: tuple[str, ...]) -> None:
        for name in names:
            assert name in self.edits[number], "a conflict over a name not edited here"
            assert self.agreed[number].get(name) != self.ref[name], "a conflict over a name not changed there"

    def contents(self) -> dict[str, bytes]:
        """The names of the ref and their bytes, by their digests."""
        bucket = self.nodes[0].bucket
        seen = commits.read_ref(bucket, "main")
        if seen is None:
            return {}
        root = commits.read_commit(bucket, seen.commit).tree
        tree = Tree(root, lambda digest: bucket.get(page_key(digest)).data)
        written = {
            blake3(value).digest(): value for value in (b"%d" % one for one in range(self.written + 1))
        }
        return {row.name: written[row.digest] for row in tree.rows()}


@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.matrix) for seed in range(2, 40))]
)
def test_nobody_overwrites_what_he_has_not_seen_and_no_edit_is_lost(seed: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    for walk in range(8):
        team = Team(tmp_path / str(walk))
        try:
            for _ in range(60):
                team.step(chance)
        finally:
            for node in team.nodes:
                node.close()


class Hooked(Remotes):
    """Calls a function when a pull begins to bring names."""

    begins: Callable[[], object] = staticmethod(lambda: None)

    def begin_pull(self, name: str, ref: str, below: str, begun: BegunPull) -> None:
        super().begin_pull(name, ref, below, begun)
        self.begins()


def _hooked(node: Node) -> Hooked:
    hooked = Hooked(node.store.path, node.store.settings)
    node.remotes = hooked
    return hooked


@pytest.mark.parametrize("lazy", [None, "team"])
@pytest.mark.parametrize("replace", [False, True])
def test_what_is_changed_while_it_is_pulled_stays_and_is_told(
    node: MakeNode, lazy: str | None, replace: bool
) -> None:
    """Regression: a pull overwrote what was put after it had begun, and said nothing."""
    one, two = node("one"), node("two")
    one.store.put_many([("changed", b"1"), ("described", b"1"), ("removed", b"1"), ("other", b"1")])
    one.push()
    two.pull()
    one.store.put_many([("changed", b"2"), ("described", b"2"), ("removed", b"2"), ("other", b"2")])
    one.store.put_many([("new", b"2"), ("same", b"2"), ("same bytes", b"2")])
    one.push()

    def edit() -> None:
        two.store.put("changed", b"mine")
        two.store.put("described", b"1", metadata={"by": "me"})
        two.store.delete("removed")
        two.store.put_many([("new", b"mine"), ("same", b"2")])
        two.store.put("same bytes", b"2", metadata={"by": "me"})

    _hooked(two).begins = edit
    with pytest.raises(
        ConflictError, match=r"changed here while ref 'main' was .*: 'changed' and 3 more names"
    ) as told:
        two.pull(replace=replace, lazy=lazy)
    assert told.value.names == ("changed", "described", "new", "same bytes")
    mine = {"changed": b"mine", "described": b"1", "new": b"mine", "same bytes": b"2"}
    theirs = {"removed": b"2", "other": b"2", "same": b"2"}
    found = {name: two.store.get(name) for name in two.store if lazy is None or name in mine}
    assert found == (mine | theirs if lazy is None else mine)
    assert set(two.store) == set(mine | theirs)
    _hooked(two)
    with pytest.raises(ConflictError) as told:
        two.pull()
    assert told.value.names == ("changed", "described", "new", "same bytes")
    assert two.pull(replace=True).changed == 4


def test_what_was_put_between_the_call_and_the_first_look_at_the_store_stays(node: MakeNode) -> None:
    """Regression: a pull in the background replaced what was put before its process had read the names."""
    one, two = node("one"), node("two")
    one.store.put_many([("a", b"1"), ("b", b"1"), ("d/x", b"1"), ("e", b"1")])
    one.push()
    two.store.put_many([("b", b"older"), ("c", b"older")])
    began = time.time()
    two.store.put_many([("a", b"mine"), ("d", b"mine")])
    with pytest.raises(NameConflictError, match="'d/x' would lie inside 'd'"):
        two.pull(replace=True, began=began)
    two.store.delete("d")
    with pytest.raises(ConflictError, match="changed here while ref 'main' was pulled") as told:
        two.pull(replace=True, began=began)
    assert told.value.names == ("a",)
    assert two.contents() == {"a": b"mine", "b": b"1", "c": b"older", "d/x": b"1", "e": b"1"}
    assert two.pull(replace=True).changed == 1
    assert two.contents()["a"] == b"1"


def test_a_name_that_a_killed_pull_had_not_brought_yet_is_an_edit_when_it_is_put_back(node: MakeNode) -> None:
    """Regression: bytes that a killed pull of an older commit would have brought counted as brought by it."""
    one, two = node("one"), node("two")
    one.store.put_many([("a", b"old"), ("b", b"old")])
    old = one.push().commit
    one.store.put_many([("a", b"new"), ("b", b"new")])
    one.push()
    two.pull()

    def die() -> None:
        raise Killed

    _hooked(two).begins = die
    with pytest.raises(Killed):
        two.pull(start=old)
    _hooked(two)
    two.store.put("a", b"old")
    assert two.push().changed == 1
    assert two.pull().unchanged == 2
    assert two.contents() == {"a": b"old", "b": b"new"}


def test_an_edit_of_a_name_that_an_interrupted_pull_has_brought_is_no_conflict(node: MakeNode) -> None:
    one, two = node("one"), node("two")
    one.store.put("a", b"1")
    one.push()
    two.pull()
    one.store.put("a", b"2")
    one.push()
    forgetful = Forgetful(two.store.path, two.store.settings)
    forgetful.forgets = True
    two.remotes = forgetful
    with pytest.raises(Killed):
        two.pull()
    assert two.store.get("a") == b"2"
    forgetful.forgets = False
    two.store.put("a", b"3")
    assert two.push().changed == 1


@pytest.mark.parametrize("lazy", [None, "team"])
@pytest.mark.parametrize("below", ["", "in"])
def test_a_file_that_became_a_folder_in_the_ref_makes_way(
    node: MakeNode, lazy: str | None, below: str
) -> None:
    """Regression: a node that edits nothing could not pull any more, nor any of the other names."""
    one, two = node("one"), node("two")
    one.store.put_many([("a", b"file"), ("f/x", b"1"), ("f/y", b"2"), ("other", b"1")])
    one.push()
    two.pull(below=below, lazy=lazy)
    for name in ("a", "f/x", "f/y"):
        one.store.delete(name)
    one.store.put_many([("a/b", b"inside"), ("f", b"file"), ("other", b"2")])
    one.push(delete=True)
    start = f"{below}/" if below else ""
    assert two.pull(below=below, lazy=lazy).removed == 3
    assert set(two.store) == {f"{start}{name}" for name in ("a/b", "f", "other")}
    two.pull(below=below)
    assert two.contents() == {f"{start}a/b": b"inside", f"{start}f": b"file", f"{start}other": b"2"}
    for name in ("a/b", "f"):
        one.store.delete(name)
    one.store.put_many([("a", b"again"), ("f/x", b"3")])
    one.push(delete=True)
    two.pull(below=below)
    assert two.contents() == {f"{start}a": b"again", f"{start}f/x": b"3", f"{start}other": b"2"}


def test_a_name_of_ones_own_makes_no_way_for_a_folder(node: MakeNode) -> None:
    one, two = node("one"), node("two")
    one.store.put_many([("a/b", b"1"), ("other", b"1")])
    one.push()
    two.store.put("a", b"mine")
    for _ in range(2):
        with pytest.raises(
            NameConflictError, match=r"'a/b' would lie inside 'a'.* remove or rename 'a' here"
        ):
            two.pull()
        assert two.contents() == {"a": b"mine"}
    assert two.pull(replace=True).removed == 1
    assert two.contents() == {"a/b": b"1", "other": b"1"}


class Breaking(FolderBucket):
    """A storage that gives some objects, and then no more."""

    def __init__(self, path: Path, objects: int, error: BaseException) -> None:
        super().__init__(path)
        self._left, self._error = objects, error
        self._guard = threading.Lock()

    def stream(self, key: str) -> Iterator[bytes]:
        with self._guard:
            self._left -= 1
            if self._left < 0:
                raise self._error
        return super().stream(key)


@pytest.mark.parametrize("seconds", [0.0, 1000.0], ids=["killed", "without a network"])
def test_what_has_come_is_kept_when_the_pull_is_ended(
    node: MakeNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    monkeypatch.setattr(pulling, "_COMMIT_SECONDS", seconds)  # 0: as if each object took longer
    error = RemoteError("the network is gone") if seconds else Killed()
    one = node("one")
    one.store.put_many([(f"{number}", noise(1_500_000, number)) for number in range(8)])
    one.push()
    kept = 0
    for _ in range(8):
        two = Node(tmp_path / "two", Breaking(tmp_path / "bucket", 3, error))
        with contextlib.suppress(RemoteError, Killed):
            two.pull()
        assert len(two.store) > kept or kept == 8
        kept = len(two.store)
        two.close()
    assert kept == 8


def test_pulls_and_pushes_of_one_ref_wait_for_one_another(tmp_path: Path) -> None:
    """Regression: two pulls at once left names of an older commit, which a push then took for edits."""
    with Store(tmp_path / "one") as one, Store(tmp_path / "two") as two:
        one.put("a", b"1")
        know(one, "team", (tmp_path / "bucket").as_uri()).push()
        team = know(two, "team", (tmp_path / "bucket").as_uri())
        locks = ComputeLocks(two.path / "locks" / "remotes", two.settings.file_mode)
        with ThreadPoolExecutor(1) as pool:
            with locks.hold("team main"):
                pulling = pool.submit(team.pull)
                inode = os.stat(two.path / "locks" / "remotes").st_ino
                until(lambda: f":{inode} " in _waiting_locks())
                assert list(two) == []
            assert pulling.result().added == 1


def _waiting_locks() -> str:
    return "\n".join(line for line in Path("/proc/locks").read_text().splitlines() if "->" in line)
