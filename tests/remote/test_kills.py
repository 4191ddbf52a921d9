"""SIGKILL before and after each call of a push or pull: no ref names missing bytes; the next run goes on."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from castore.remote import commits
from castore.remote import pull as pulling
from castore.remote.bucket import Bucket
from castore.remote.folder_bucket import FolderBucket
from castore.remote.keys import object_key, page_key
from castore.remote.pages import digest_of
from castore.remote.tree import Tree
from castore.write.writer import BlobWriter
from tests.helpers import LONG, agrees_with_disk, in_small_process, noise, text
from tests.remote.conftest import Node
from tests.shm.forks import forked


class Deadly:
    """A bucket that ends the process at one of its calls: before the call, or after it."""

    def __init__(self, bucket: Bucket, call: int, *, after: bool) -> None:
        self._bucket = bucket
        self._left = itertools.count(-call)
        self._after = after

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._bucket, name)
        if not callable(value):
            return value

        return lambda *arguments: self.count(lambda: value(*arguments))

    def count(self, call: Callable[[], Any]) -> Any:
        """Make a call that counts."""
        is_last = next(self._left) == 0
        if is_last and not self._after:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            return call()
        finally:
            if is_last:
                os.kill(os.getpid(), signal.SIGKILL)


def dies(task: Callable[[], object]) -> bool:
    """Run ``task`` in a forked child; whether it was killed."""
    status = forked(task)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert status == 0
    return False


def check_refs(bucket: Bucket) -> dict[str, bytes]:
    """Check that all that a ref means is there and whole; returns the main ref's names, and their digests."""
    found: dict[str, bytes] = {}
    for ref in commits.list_refs(bucket):
        seen = commits.read_ref(bucket, ref)
        assert seen is not None
        for _, commit in commits.history(bucket, seen.commit):
            for row in Tree(commit.tree, lambda digest: bucket.get(page_key(digest)).data).rows():
                key = object_key(row.place.object, packed=row.place.is_packed)
                assert digest_of(bucket.get(key).data) == row.place.object
                found.setdefault(row.name, row.digest)
    return found


def fill(node: Node, generation: int) -> None:
    for number in range(4):
        node.store.put(f"small/{number}", text(300, 10 * generation + number))
    node.store.put("medium", noise(50_000, generation))
    node.store.put("large", noise(1_400_000, generation), codec="none")
    node.store.put(f"of {generation}", b"%d" % generation)


def digests(node: Node) -> dict[str, bytes]:
    return {entry.name: bytes.fromhex(entry.digest) for entry in node.store.entries()}


@pytest.mark.torture
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_push_killed_at_any_call_names_nothing_that_is_missing_and_the_next_one_goes_on(
    after: bool, tmp_path: Path
) -> None:
    in_small_process(_kill_pushes, tmp_path, after)


def _kill_pushes(folder: Path, after: bool) -> None:
    # The quick form kills before every other call, and after those between.
    for call in itertools.count(after, 1 if LONG else 2):
        place = folder / str(call)
        bucket = FolderBucket(place / "bucket")
        one = Node(place / "one", bucket)
        fill(one, 0)
        one.push()
        before = check_refs(bucket)
        fill(one, 1)
        wanted = digests(one)
        one.close()

        def push(place: Path = place, call: int = call) -> None:
            Node(place / "one", Deadly(FolderBucket(place / "bucket"), call, after=after)).push()

        killed = dies(push)
        found = check_refs(bucket)
        assert found in (before, wanted)
        again = Node(place / "one", bucket)
        # An edit of names that the killed push may have brought is no conflict with that push.
        again.store.put("medium", b"%d" % call)
        pushed = again.push()
        assert pushed.changed == 1 or found == before
        wanted = digests(again)
        assert check_refs(bucket) == wanted
        agrees_with_disk(again.store)
        again.close()
        other = Node(place / "other", bucket)
        other.pull()
        assert digests(other) == wanted
        other.close()
        if not killed:
            assert call > 8, "hardly any call: this tests nothing"
            return


@pytest.mark.torture
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_pull_killed_at_any_call_or_commit_leaves_a_sound_store_and_the_next_one_goes_on(
    after: bool, tmp_path: Path
) -> None:
    in_small_process(_kill_pulls, tmp_path, after)


def _kill_pulls(folder: Path, after: bool) -> None:
    bucket = FolderBucket(folder / "bucket")
    one = Node(folder / "one", bucket)
    fill(one, 0)
    one.push()
    wanted = one.contents()
    left_something = 0
    for call in itertools.count(after, 1 if LONG else 2):
        place = folder / str(call)

        def pull(place: Path = place, call: int = call) -> None:
            deadly = Deadly(bucket, call, after=after)
            commit = BlobWriter.commit
            pulling._COMMIT = 2
            # The commits are windows, too: the calls of the bucket and of the writer count together.
            BlobWriter.commit = deadly_commit(deadly, commit)  # type: ignore[method-assign]
            Node(place, deadly).pull()

        killed = dies(pull)
        node = Node(place, bucket)
        agrees_with_disk(node.store)
        found = node.contents()
        assert found.items() <= wanted.items()
        left_something += bool(found)
        # Names that the killed pull has brought, and that change in the ref, are no conflict with that pull.
        fill(one, call + 1)
        one.push()
        wanted = one.contents()
        node.pull()
        assert node.contents() == wanted
        assert node.store.verify().bad == []
        node.store.gc(grace=0)
        assert not node.store.gc(grace=0, dry_run=True).leftovers
        node.close()
        if not killed:
            assert call > 6, "hardly any call: this tests nothing"
            assert left_something
            one.close()
            return


def deadly_commit(deadly: Deadly, commit: Callable[..., Any]) -> Callable[..., Any]:
    """``commit``, whose calls count among those of the bucket."""

    def committing(*arguments: Any) -> Any:
        return deadly.count(lambda: commit(*arguments))

    return committing
