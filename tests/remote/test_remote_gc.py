"""A remote's garbage goes after a grace period, and nothing else goes."""

from __future__ import annotations

import os
import shutil
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from castore import Store
from castore.errors import (
    CorruptError,
    InvalidValueError,
    RemoteDeniedError,
    RemoteError,
    RemoteMissingError,
)
from castore.records import Buffer
from castore.remote import collection_state
from castore.remote.bucket import Bucket, Versioned
from castore.remote.check import check
from castore.remote.collect import SHORTEST_GRACE, collect
from castore.remote.collection_state import (
    CONDEMNED,
    CUTS,
    DELETING,
    IDLE,
    STATE,
    Guard,
    cut_key,
    read_state,
    write_state,
)
from castore.remote.commits import history, read_commit, read_ref
from castore.remote.folder_bucket import FolderBucket
from castore.remote.keys import (
    COMMITS,
    TREES,
    claim_key,
    commit_key,
    dictionary_key,
    hint_key,
    is_own,
    object_key,
    page_key,
    result_key,
)
from castore.remote.outcomes import RemoteCollected
from castore.remote.page_cache import PageCache
from tests.helpers import flip, noise
from tests.mount.conftest import until
from tests.remote.conftest import MakeNode, Node
from tests.remote.servers import READER, READERS_SECRET, Place, environment

DAY = 86_400.0


def age(bucket: Path, seconds: float) -> None:
    """Make everything in a bucket older."""
    for path in bucket.rglob("*"):
        if path.is_file():
            before = path.stat().st_mtime - seconds
            os.utime(path, (before, before))


def clock(bucket: Bucket) -> float:
    """The storage's clock, which may have whole seconds."""
    bucket.put("probe/clock", b"")
    return next(one.modified for one in bucket.listing("probe/"))


def run(bucket: Bucket, store: Store, *, keep: int | None = 1, grace: float = DAY) -> RemoteCollected:
    if grace == 0:  # else what was written a moment ago could be younger than that
        began = time.time()
        until(lambda: clock(bucket) > began)
    with ThreadPoolExecutor(4) as pool:
        pages = PageCache(store.path, bucket, pool, (0o700, 0o600))
        return collect(bucket, pages, keep_commits=keep, grace=grace, dry_run=False)


def objects(bucket: Path) -> set[str]:
    return {
        path.name
        for folder in ("objects", "packs")
        for path in (bucket / folder).rglob("*")
        if path.is_file()
    }


@pytest.fixture
def shrunk(node: MakeNode, bucket: Bucket) -> Store:
    """A store whose last push removed most of what the push before it brought, two days ago."""
    bucket.put("castore-remote.json", b'{"format":1}')
    one = node("one")
    one.store.put("large", noise(2 << 20))
    one.store.put("small", b"1")
    one.push()
    one.store.delete("large")
    one.store.put("small", b"2")
    one.push(delete=True)
    return one.store


@pytest.mark.parametrize("kind", ["folder", "link", "pipe"])
def test_a_ref_whose_newest_version_is_no_file_is_not_taken_for_gone(
    shrunk: Store, bucket: Bucket, tmp_path: Path, kind: str
) -> None:
    """Regression: two collections deleted all that the remote had."""
    folder = tmp_path / "bucket"
    newest = max((folder / "refs" / "main~").iterdir())
    saved = newest.rename(tmp_path / "saved")
    if kind == "folder":
        newest.mkdir()
    elif kind == "link":
        newest.symlink_to(saved)
    else:
        os.mkfifo(newest)
    age(folder, 3 * DAY)
    before = objects(folder)
    for _ in range(2):
        with pytest.raises(RemoteError, match=r"refs/main .* is not a file; remove it"):
            run(bucket, shrunk)
        age(folder, 3 * DAY)
    with ThreadPoolExecutor(4) as pool:
        pages = PageCache(shrunk.path, bucket, pool, (0o700, 0o600))
        checked = check(bucket, pages, pool, ["main"], deep=False, progress=lambda *_: None)
    assert [(problem.ref, problem.key) for problem in checked.problems] == [("main", "refs/main")]
    assert checked.orphans is None
    assert objects(folder) == before


def test_all_that_castore_writes_into_folders_that_are_collected_is_its_own() -> None:
    digest = bytes(range(32))
    written = [
        object_key(digest, packed=True), object_key(digest, packed=False), page_key(digest),
        commit_key(digest), hint_key("a.b-c_1"), result_key("x"), claim_key("x"), dictionary_key(1),
    ]  # fmt: skip
    assert all(map(is_own, written))
    assert not any(is_own(f"packs/{key}") or is_own(f"{key}.old") for key in written if "hints" not in key)


@pytest.mark.parametrize("inside", ["packs", "objects", "objects/ab", "trees", "claims", "gc", "tmp", "keys"])
def test_a_remote_in_a_folder_of_another_one_is_no_garbage_of_that(
    shrunk: Store, bucket: Bucket, node: MakeNode, tmp_path: Path, inside: str
) -> None:
    """Regression: its objects were deleted, if it was there first."""
    inner = FolderBucket(tmp_path / "bucket" / inside)
    inner.put("castore-remote.json", b'{"format":1}')
    other = Node(tmp_path / "other", inner)
    other.store.put_many((f"file/{number}", noise(2000, number)) for number in range(20))
    other.store.put("large", noise(2 << 20))
    other.push()
    other.close()
    before = {path for path in inner.folder.rglob("*") if path.is_file()}
    for _ in range(2):
        age(tmp_path / "bucket", 3 * DAY)
        run(bucket, shrunk)
    left = {path for path in inner.folder.rglob("*") if path.is_file()}
    assert left >= {path for path in before if inner.folder / "gc" not in path.parents}
    reader = Node(tmp_path / "reader", inner)
    assert reader.pull().added == 21
    reader.close()


def test_garbage_is_condemned_first_and_deleted_a_grace_period_later(
    shrunk: Store, bucket: Bucket, tmp_path: Path
) -> None:
    folder = tmp_path / "bucket"
    before = objects(folder)
    assert run(bucket, shrunk) == (0, 0, 0, 0, None), "all of it is younger than a day"
    # The commits' times are in the commits, so only all of history's objects are garbage once nobody keeps
    # it.
    condemned = run(bucket, shrunk, grace=0.0)
    assert (condemned.deleted, condemned.condemned) == (0, 4)  # two objects, a page and a commit
    assert condemned.size > 2 << 20
    assert objects(folder) == before
    assert run(bucket, shrunk, grace=DAY).deleted == 0, "they have not been condemned for a day"
    done = run(bucket, shrunk, grace=0.0)
    assert (done.deleted, done.freed, done.condemned) == (4, condemned.size, 0)
    assert len(objects(folder)) == len(before) - 2
    assert read_state(bucket).phase == IDLE
    assert not any("condemned" in one.key for one in bucket.listing("gc/"))


class _Together(FolderBucket):
    """Answers requests for commits, and for pages, when four of a kind wait for one."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._waiting = {kind: threading.Barrier(4, timeout=60) for kind in (COMMITS, TREES)}

    def get(self, key: str) -> Versioned:
        for kind, waiting in self._waiting.items():
            if key.startswith(kind):
                waiting.wait()
        return super().get(key)


def test_commits_of_a_long_history_are_read_side_by_side(
    node: MakeNode, tmp_path: Path, bucket: Bucket
) -> None:
    """Each has the digest of the one before it, so each waited for the answer before."""
    bucket.put("castore-remote.json", b'{"format":1}')
    one = node("one")
    for number in range(12):
        one.store.put("name", b"%d" % number)
        one.push()
    together = _Together(tmp_path / "bucket")
    with ThreadPoolExecutor(4) as pool:
        for name in ("collector", "checker"):  # each has all to read
            (tmp_path / name / "tmp").mkdir(parents=True)
            pages = PageCache(tmp_path / name, together, pool, (0o700, 0o600))
            if name == "collector":
                found = collect(together, pages, keep_commits=None, grace=DAY, dry_run=True)
                assert (found.condemned, found.deleted) == (0, 0)
            else:
                checked = check(together, pages, pool, (), deep=False, progress=lambda *bytes_: None)
                assert (checked.problems, checked.orphans) == ([], 0)


def test_a_collector_that_deletes_old_commits_reads_each_of_them_once(
    node: MakeNode, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = node("one")
    for number in range(12):
        one.store.put("name", b"%d" % number)
        one.push()
    assert run(bucket, one.store, grace=0.0).condemned == 33  # eleven commits, with a page and an object each
    read: list[str] = []
    get = bucket.get

    def noted(key: str) -> Versioned:
        read.append(key)
        return get(key)

    monkeypatch.setattr(bucket, "get", noted)
    assert run(bucket, one.store, grace=0.0).deleted == 33
    found = [key for key in read if key.startswith(COMMITS)]
    assert len(found) == 12 + 1, "all for the end of an epoch, and those that are left for the next"


def push_again(one: Node, bucket: Bucket) -> bytes:
    """Push a third commit; its digest."""
    one.store.put("small", b"3")
    one.push()
    newest = read_ref(bucket, "main")
    assert newest is not None
    return newest.commit


def test_a_lost_commit_is_not_taken_for_the_end_of_a_history(
    shrunk: Store, bucket: Bucket, tmp_path: Path, node: MakeNode
) -> None:
    newest = push_again(node("one"), bucket)
    [_, (lost, _), _] = history(bucket, newest)
    (tmp_path / "bucket" / commit_key(lost)).unlink()
    before = objects(tmp_path / "bucket")
    for _ in range(2):
        with pytest.raises(RemoteMissingError, match=f"{lost.hex()}.* --keep-commits 1, once"):
            run(bucket, shrunk, keep=None, grace=0.0)
    assert objects(tmp_path / "bucket") == before
    assert read_state(bucket).phase == IDLE
    for _ in range(2):
        run(bucket, shrunk, keep=1, grace=0.0)
    assert objects(tmp_path / "bucket") < before
    assert [digest for digest, _ in history(bucket, newest)] == [newest]


def test_a_collector_that_cannot_read_all_refs_any_more_holds_up_no_push(
    shrunk: Store, bucket: Bucket, tmp_path: Path, node: MakeNode
) -> None:
    one = node("one")
    newest = push_again(one, bucket)
    run(bucket, shrunk, keep=2, grace=0.0)
    condemned = read_state(bucket)
    assert condemned.phase == CONDEMNED
    [_, (lost, _)] = list(history(bucket, newest))[:2]
    (tmp_path / "bucket" / commit_key(lost)).rename(kept := tmp_path / "kept")
    before = objects(tmp_path / "bucket")
    with pytest.raises(RemoteMissingError, match=lost.hex()):
        run(bucket, shrunk, keep=2, grace=0.0)
    assert objects(tmp_path / "bucket") == before
    assert read_state(bucket)._replace(version=None) == condemned._replace(
        version=None, collector=read_state(bucket).collector, beat=condemned.beat + 1
    )
    one.store.put("more", b"4")
    one.push()  # does not wait
    kept.rename(tmp_path / "bucket" / commit_key(lost))
    assert run(bucket, shrunk, keep=2, grace=0.0).deleted


class _Overtaken(FolderBucket):
    """The bucket of a reader that reads a commit just before a collector removes it and an older one."""

    removed: tuple[bytes, bytes]

    def get(self, key: str) -> Versioned:
        found = super().get(key)
        if key == commit_key(self.removed[0]):
            self.delete(map(commit_key, self.removed))
        return found


def test_a_reader_that_a_collector_overtakes_finds_no_commit_lost(
    shrunk: Store, bucket: Bucket, tmp_path: Path, node: MakeNode
) -> None:
    newest = push_again(node("one"), bucket)
    [_, (middle, _), (oldest, _)] = history(bucket, newest)
    bucket.put(cut_key(middle), newest.hex().encode())
    reader = _Overtaken(tmp_path / "bucket")
    reader.removed = middle, oldest
    assert [digest for digest, _ in history(reader, newest)] == [newest, middle]
    assert [digest for digest, _ in history(reader, newest)] == [newest]


def test_a_history_ends_with_a_note_that_goes_with_the_commit_before_which_it_ends(
    shrunk: Store, bucket: Bucket, tmp_path: Path, node: MakeNode
) -> None:
    one = node("one")

    def notes() -> list[str]:
        return [one.key for one in bucket.listing("gc/cut/")]

    for number in range(3):
        newest = read_ref(bucket, "main")
        assert newest is not None
        parent = read_commit(bucket, newest.commit).parent
        assert parent is not None
        for _ in range(2):
            run(bucket, shrunk, grace=0.0)
        assert [digest for digest, _ in history(bucket, newest.commit)] == [newest.commit]
        assert notes() == [cut_key(parent)]
        one.store.put("small", b"another %d" % number)
        one.push()
        age(tmp_path / "bucket", DAY)


class _Slow(FolderBucket):
    """The bucket of a collector that takes two days from its look at the clock to its next call."""

    def put(self, key: str, data: Buffer) -> None:
        super().put(key, data)
        if key.startswith("gc/clock-"):
            age(self.folder / "gc", 2 * DAY)


def test_the_grace_period_begins_when_pushes_can_know_what_is_condemned(
    shrunk: Store, bucket: Bucket, tmp_path: Path
) -> None:
    """However long a collector has looked for garbage: a push that has read the state before must be over."""
    orphan = object_key(bytes(32), packed=False)
    bucket.put(orphan, b"of an interrupted push")
    age(tmp_path / "bucket", 4 * DAY)
    condemned = run(_Slow(tmp_path / "bucket"), shrunk)
    assert condemned.condemned > 0
    assert condemned.until is not None
    assert condemned.until > time.time() + DAY / 2
    assert run(bucket, shrunk) == (0, 0, condemned.condemned, condemned.size, condemned.until)
    assert bucket.size(orphan) is not None
    age(tmp_path / "bucket", DAY)
    assert run(bucket, shrunk).deleted == condemned.condemned
    assert bucket.size(orphan) is None


def test_everything_stays_as_long_as_all_commits_are_kept(
    shrunk: Store, bucket: Bucket, tmp_path: Path
) -> None:
    before = objects(tmp_path / "bucket")
    for _ in range(2):
        assert run(bucket, shrunk, keep=None, grace=0.0) == (0, 0, 0, 0, None)
    assert objects(tmp_path / "bucket") == before


def test_objects_of_interrupted_pushes_go_and_unfinished_files_too(
    shrunk: Store, bucket: Bucket, tmp_path: Path
) -> None:
    bucket.put("packs/" + "0" * 64, b"nobody names it")
    (tmp_path / "bucket/tmp").mkdir(exist_ok=True)
    (tmp_path / "bucket/tmp" / ("a1" * 16)).write_bytes(b"half")
    age(tmp_path / "bucket", 2 * DAY)
    assert run(bucket, shrunk, keep=None).condemned == 1
    age(tmp_path / "bucket", 2 * DAY)
    assert run(bucket, shrunk, keep=None).deleted == 1
    assert list((tmp_path / "bucket/tmp").iterdir()) == []


def test_what_lies_beside_a_ref_goes_after_the_ref(node: MakeNode, bucket: Bucket, tmp_path: Path) -> None:
    one = node("one")
    one.store.put("a", b"x")
    for ref in ("main", "other"):
        one.push(ref=ref)
    hints = tmp_path / "bucket/hints"
    age(tmp_path / "bucket", 2 * DAY)
    assert run(bucket, one.store).condemned == 0
    shutil.rmtree(tmp_path / "bucket/refs/other~")
    assert run(bucket, one.store, keep=None).condemned == 2  # the commit is of its time
    age(tmp_path / "bucket", 2 * DAY)
    assert run(bucket, one.store, keep=None).deleted == 2
    assert [path.name for path in hints.iterdir()] == ["main"]


def test_unfinished_files_go_though_nothing_else_is_garbage(
    shrunk: Store, bucket: Bucket, tmp_path: Path
) -> None:
    left = tmp_path / "bucket/tmp" / ("a1" * 16)
    left.write_bytes(b"half")
    assert run(bucket, shrunk, keep=None) == (0, 0, 0, 0, None)
    assert left.exists(), "somebody may be writing it"
    age(tmp_path / "bucket", 2 * DAY)
    assert run(bucket, shrunk, keep=None) == (0, 0, 0, 0, None)
    assert not left.exists()


def test_what_killed_collectors_left_goes_with_the_end_of_an_epoch(
    shrunk: Store, bucket: Bucket, tmp_path: Path
) -> None:
    bucket.put("gc/clock-gone", b"")
    bucket.put("gc/condemned/gone/0", b"packs/" + b"0" * 64)
    assert run(bucket, shrunk, grace=0.0).condemned == 4
    bucket.put("gc/condemned/young/0", b"somebody may be about to publish it")
    age(tmp_path / "bucket", DAY)
    bucket.put("gc/condemned/young/0", b"somebody may be about to publish it")
    assert run(bucket, shrunk, grace=0.0).deleted == 4
    left = {one.key for one in bucket.listing("gc/") if not one.key.startswith(CUTS)}
    assert left == {STATE, "gc/condemned/young/0"}


def test_a_page_that_cannot_be_read_stops_the_collector(
    shrunk: Store, bucket: Bucket, tmp_path: Path
) -> None:
    for path in (shrunk.path / "pages").iterdir():
        path.unlink()
    for path in (tmp_path / "bucket/trees").iterdir():
        flip(path, path.stat().st_size // 2)
    before = objects(tmp_path / "bucket")
    with pytest.raises(CorruptError):
        run(bucket, shrunk, grace=0.0)
    assert objects(tmp_path / "bucket") == before
    assert read_state(bucket).phase == IDLE


def test_a_push_that_needs_what_is_condemned_brings_it_again(
    shrunk: Store, node: MakeNode, bucket: Bucket, tmp_path: Path
) -> None:
    assert run(bucket, shrunk, grace=0.0).condemned == 4
    other = node("other")
    other.store.put("large again", noise(2 << 20))
    other.push()
    assert run(bucket, shrunk, grace=0.0).deleted < 4
    third = node("third")
    third.pull()
    assert third.contents() == {"large again": noise(2 << 20), "small": b"2"}


def test_a_push_waits_for_a_deletion_of_what_it_needs(
    shrunk: Store, node: MakeNode, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(bucket, shrunk, grace=0.0).condemned == 4
    state = read_state(bucket)
    assert write_state(bucket, state._replace(phase=DELETING, collector="other"), state)
    waited: list[float] = []

    def end(seconds: float) -> None:
        waited.append(seconds)
        now = read_state(bucket)
        write_state(bucket, now._replace(phase=IDLE, lists=0), now)

    monkeypatch.setattr(collection_state, "time", SimpleNamespace(sleep=end))
    other = node("other")
    other.store.put("large again", noise(2 << 20))
    assert other.push().added == 1
    assert waited
    assert run(bucket, shrunk, grace=DAY).deleted == 0


def test_a_deletion_that_does_not_end_is_told(
    shrunk: Store, node: MakeNode, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(bucket, shrunk, grace=0.0)
    state = read_state(bucket)
    assert write_state(bucket, state._replace(phase=DELETING, collector="gone"), state)
    monkeypatch.setattr(collection_state, "time", SimpleNamespace(sleep=lambda seconds: None))
    other = node("other")
    other.store.put("unrelated", b"7")
    assert other.push().added == 1, "who needs nothing of it does not wait"
    other.store.put("large again", noise(2 << 20))
    with pytest.raises(RemoteError, match=r"does not end.*castore remote gc"):
        other.push()
    with pytest.raises(RemoteError, match="another collector"):
        run(bucket, shrunk, grace=0.0)


def test_what_a_killed_collector_left_another_one_finishes(
    shrunk: Store, node: MakeNode, bucket: Bucket, tmp_path: Path
) -> None:
    run(bucket, shrunk, grace=0.0)
    state = read_state(bucket)
    assert write_state(bucket, state._replace(phase=DELETING, collector="gone"), state)
    age(tmp_path / "bucket", DAY)
    assert run(bucket, shrunk, grace=0.0).deleted == 4
    assert read_state(bucket).phase == IDLE


def test_one_of_two_collectors_condemns(shrunk: Store, bucket: Bucket) -> None:
    state = read_state(bucket)
    run(bucket, shrunk, grace=0.0)
    assert not write_state(bucket, state._replace(epoch=7), state)


def test_a_state_that_is_no_state_is_told_and_nothing_is_pushed(
    shrunk: Store, node: MakeNode, bucket: Bucket
) -> None:
    bucket.create(STATE, b'{"format":1,"phase":"asleep"}')
    with pytest.raises(RemoteError, match="gc/state"):
        Guard(bucket)
    other = node("other")
    other.store.put("more", b"7")
    with pytest.raises(RemoteError, match="gc/state"):
        other.push()


def test_a_dry_run_needs_a_readers_key_only(seaweedfs: Place, tmp_path: Path) -> None:
    reader = {"AWS_ACCESS_KEY_ID": READER, "AWS_SECRET_ACCESS_KEY": READERS_SECRET}
    with Store(tmp_path / "one") as one:
        with environment(seaweedfs.environment):
            one.put("name", b"1")
            team = one.add_remote("team", f"{seaweedfs.url}/{uuid.uuid4().hex}")
            team.push()
        with environment({**seaweedfs.environment, **reader}):
            assert team.gc(dry_run=True) == (0, 0, 0, 0, None)
            assert one.add_remote("readable", team.url, read_only=True).gc(dry_run=True).condemned == 0
            with pytest.raises(RemoteDeniedError):
                team.gc()


def test_a_dry_run_writes_nothing_into_a_folder(shrunk: Store, bucket: Bucket, tmp_path: Path) -> None:
    bucket.put(object_key(bytes(32), packed=False), b"of an interrupted push")
    age(tmp_path / "bucket", 4 * DAY)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "bucket").rglob("*")}
    with ThreadPoolExecutor(4) as pool:
        pages = PageCache(shrunk.path, bucket, pool, (0o700, 0o600))
        found = collect(bucket, pages, keep_commits=1, grace=DAY, dry_run=True)
    assert found.condemned > 0
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "bucket").rglob("*")} == before


def test_gc_of_object_storage_by_the_door(seaweedfs: Place, tmp_path: Path) -> None:
    with Store(tmp_path / "one") as one, environment(seaweedfs.environment):
        one.put("large", noise(2 << 20))
        team = one.add_remote("team", f"{seaweedfs.url}/{uuid.uuid4().hex}")
        team.push()
        one.delete("large")
        one.put("small", b"1")
        team.push(delete=True)
        assert team.gc(keep_commits=1) == (0, 0, 0, 0, None)
        assert team.gc(keep_commits=1, dry_run=True).condemned == 0
        with pytest.raises(InvalidValueError, match="40 minutes"):
            team.gc(grace=SHORTEST_GRACE - 1)
        with pytest.raises(InvalidValueError, match="newest one"):
            team.gc(keep_commits=0)
        readable = one.add_remote("readable", team.url, read_only=True)
        with pytest.raises(RemoteDeniedError, match="--read-only"):
            readable.gc()
        bucket = seaweedfs.open(team.url.rpartition("/")[2])
        assert run(bucket, one, grace=0.0).condemned == 3
        assert run(bucket, one, grace=0.0).deleted == 3
        assert team.check(deep=True).problems == []
