"""Nodes that edit, push and pull in any order: none overwrites a change it has not seen, and none is lost."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from blake3 import blake3

from castore.errors import ConflictError, RemoteMissingError
from castore.remote import commits
from castore.remote.folder_bucket import FolderBucket
from castore.remote.keys import page_key
from castore.remote.remotes import Remotes
from castore.remote.tree import Tree
from tests.remote.conftest import Node
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
        # All that the ref had below a prefix, for each pull that was killed since then.
        self.brought: list[list[dict[str, bytes]]] = [[], [], []]

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
            self.check_conflicts(number, in_conflict, local)
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
        except Killed:  # by then the names are here
            in_conflict = ()
            self.brought[number].append(
                {name: self.ref[name] for name in self.ref if name.startswith(prefix)}
            )
        else:
            in_conflict = ()
        if in_conflict:
            assert not replace
            assert node.contents() == before
            self.check_conflicts(number, in_conflict, before)
            return
        local = node.contents()
        if not self.remotes[number].forgets:
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
        self.agreed[number], self.brought[number] = self.settled(number, local), []
        for name in NAMES:
            if name.startswith(prefix):
                if name not in self.ref:
                    self.agreed[number].pop(name, None)
                elif local.get(name) == self.ref[name]:
                    self.agreed[number][name] = self.ref[name]

    def settled(self, number: int, local: dict[str, bytes]) -> dict[str, bytes]:
        """The values on which a node and the ref agreed, and those of killed pulls that nobody has edited."""
        agreed = dict(self.agreed[number])
        for brought in self.brought[number]:
            agreed |= brought.items() & local.items()
        return agreed

    def check_conflicts(self, number: int, names: tuple[str, ...], local: dict[str, bytes]) -> None:
        agreed = self.settled(number, local)
        for name in names:
            assert name in self.edits[number], "a conflict over a name not edited here"
            assert agreed.get(name) != self.ref[name], "a conflict over a name not changed there"

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
