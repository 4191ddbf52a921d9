"""`Remote.check` finds what is missing or damaged in a bucket; `repair` uploads it from a store with it."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from castore import (
    CorruptError,
    InvalidValueError,
    Remote,
    RemoteDeniedError,
    RemoteError,
    RemoteMissingError,
    Store,
)
from castore.remote.urls import open_bucket
from tests.helpers import flip, noise
from tests.remote.nodes import forget_carried, know, move
from tests.remote.servers import READER, READERS_SECRET, Place, environment
from tests.remote.test_transfer import ENVIRONMENT

pytestmark = pytest.mark.usefixtures("forked_processes")


@pytest.fixture
def bucket(tmp_path: Path) -> Path:
    return tmp_path / "bucket"


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store and a remote with two refs: many small blobs, some large ones, and a former state."""
    folder = tmp_path_factory.mktemp("checked")
    with pytest.MonkeyPatch.context() as patch, Store(folder / "store", memory=0) as store:
        patch.setenv("PYTHONPATH", ENVIRONMENT["PYTHONPATH"])
        store.put_many((f"small/{number}", noise(500, number)) for number in range(50))
        store.put("large", noise(2_000_000))
        remote = store.add_remote("team", (folder / "bucket").as_uri())
        remote.push()
        store.put("other", noise(1_500_000, 1))
        remote.push(ref="second")
    return folder


@pytest.fixture
def store(template: Path, bucket: Path, tmp_path: Path) -> Iterator[Store]:
    """A copy of the store, which knows the copy of the remote."""
    shutil.copytree(template / "store", tmp_path / "store")
    shutil.copytree(template / "bucket", bucket)
    with Store(tmp_path / "store", memory=0) as copied:
        move(copied, "team", bucket.as_uri())
        yield copied


@pytest.fixture
def remote(store: Store, monkeypatch: pytest.MonkeyPatch) -> Remote:
    monkeypatch.setenv("PYTHONPATH", ENVIRONMENT["PYTHONPATH"])
    return store.remote("team")


def files(bucket: Path, folder: str) -> list[Path]:
    return sorted(path for path in (bucket / folder).rglob("*") if path.is_file())


def test_a_whole_bucket_has_no_problem_and_what_no_ref_means_is_counted(
    store: Store, remote: Remote, bucket: Path
) -> None:
    checked = remote.check(deep=True)
    assert (checked.refs, checked.problems, checked.orphans, checked.orphaned) == (
        ["main", "second"],
        [],
        0,
        0,
    )
    assert checked.objects == sum(len(files(bucket, one)) for one in ("objects", "packs", "trees", "commits"))
    seen: list[tuple[int, int]] = []
    remote.check(deep=True, progress=lambda done, total: seen.append((done, total)))
    whole = [path for one in ("objects", "packs", "trees") for path in files(bucket, one)]
    assert seen[-1] == (sum(path.stat().st_size for path in whole),) * 2
    (bucket / "objects" / "ab").mkdir(exist_ok=True)
    (bucket / "objects" / "ab" / ("ab" * 32)).write_bytes(b"of a push that was killed")
    assert remote.check()[3:] == (1, 25, [], ())
    (bucket / "hints" / "gone").write_bytes(b"of a ref that is gone")
    assert remote.check()[3:5] == (2, 25 + 21)


@pytest.mark.parametrize(
    ("folder", "how"),
    [("objects", "gone"), ("objects", "flipped"), ("packs", "cut"), ("trees", "gone"), ("trees", "cut")],
)
def test_what_is_missing_or_damaged_is_found_and_repaired_from_a_store_that_has_it(
    store: Store, remote: Remote, bucket: Path, tmp_path: Path, folder: str, how: str
) -> None:
    for path in files(bucket, folder):
        data = bytearray(path.read_bytes())
        if how == "gone":
            path.unlink()
        elif how == "cut":
            path.write_bytes(data[: len(data) // 2])
        else:
            data[len(data) // 2] ^= 1
            path.write_bytes(data)
    checked = remote.check(deep=how == "flipped")
    assert checked.problems
    assert all(problem.key and problem.key.startswith(folder) for problem in checked.problems)
    names = {name for problem in checked.problems for name in problem.names}
    assert bool(names) == (folder != "trees")
    with (
        Store(tmp_path / "reader", memory=0) as reader,
        pytest.raises(RemoteDeniedError, match="--read-only"),
    ):
        know(reader, "team", remote.url, read_only=True).repair(checked)
    assert [one.ref for one in remote.repair(checked)] == ["main", "second"]
    assert remote.check(deep=True).problems == []
    with Store(tmp_path / "other", memory=0) as other:
        know(other, "team", remote.url).pull("second")
        assert {entry.name: entry.digest for entry in other.entries()} == {
            entry.name: entry.digest for entry in store.entries()
        }


@pytest.mark.parametrize("how", ["gone", "flipped", "cut"])
def test_a_store_without_the_lost_pages_names_them_and_counts_no_orphans(
    store: Store, remote: Remote, bucket: Path, tmp_path: Path, how: str
) -> None:
    """Regression: "history" stood in the place of the page, and all that the ref means was of no ref."""
    for path in files(bucket, "trees"):
        if how == "gone":
            path.unlink()
        elif how == "cut":
            os.truncate(path, path.stat().st_size // 2)
        else:
            flip(path, path.stat().st_size // 2)
    forget_carried(bucket)
    with Store(tmp_path / "other", memory=0) as other:
        team = know(other, "team", remote.url)
        checked = team.check()
        assert {problem.key.partition("/")[0] for problem in checked.problems} == {"trees"}
        assert {problem.ref for problem in checked.problems} <= {"main", "second"}
        assert (checked.orphans, checked.orphaned, checked.history) == (None, None, [])
        assert team.repair(checked) == [], "it has nothing to give"
        error, deep = (RemoteMissingError, "") if how == "gone" else (CorruptError, "--deep ")
        with pytest.raises(
            error, match=rf"trees/.* a page of a tree.*remote check {deep}--repair` in a store"
        ):
            team.pull()
    remote.repair(remote.check(deep=True))
    assert remote.check(deep=True).problems == []


@pytest.mark.parametrize("how", ["gone", "damaged"])
def test_the_newest_commit_comes_back_from_a_store_that_has_read_it(
    store: Store, remote: Remote, bucket: Path, tmp_path: Path, how: str
) -> None:
    with Store(tmp_path / "other", memory=0) as other:
        team = know(other, "team", remote.url)
        team.pull()
        [newest] = team.log()
        path = bucket / "commits" / newest.commit
        path.unlink() if how == "gone" else path.write_bytes(b"{}")
        forget_carried(bucket)
        stranger = know(Store(tmp_path / "stranger", memory=0), "team", remote.url)
        with pytest.raises((CorruptError, RemoteMissingError), match=newest.commit):
            stranger.pull()
        assert [problem.key for problem in stranger.check().problems] == [f"commits/{newest.commit}"]
        assert [one.ref for one in stranger.repair(stranger.check())] == ["second"]  # it has nothing to give
        checked = team.check()
        assert [(problem.ref, problem.key) for problem in checked.problems] == [
            ("main", f"commits/{newest.commit}")
        ]
        assert [one.changed for one in team.repair(checked)] == [0, 0]
        assert team.check(deep=True).problems == []
        assert team.log() == [newest]
        assert stranger.pull().commit == newest.commit


def test_a_repair_brings_no_name_of_the_store_into_a_ref_and_needs_no_name(
    remote: Remote, bucket: Path, tmp_path: Path
) -> None:
    for path in files(bucket, "packs"):
        path.unlink()
    with Store(tmp_path / "other", memory=0, allow_pickle=True) as other:
        team = know(other, "team", remote.url)
        # The same bytes under other names, other bytes under the same name, and what no remote takes.
        other.put_many((f"mine/{number}", noise(500, number)) for number in range(40))
        other.put("small/45", b"other bytes")
        other.put("private/secret", b"secret")
        other.save("private/pickle", {1, "a"}, serializer="pickle")
        checked = team.check()
        assert [one.changed for one in team.repair(checked)] == [40, 40]
        left = team.check()
        assert {name for problem in left.problems for name in problem.names} <= {
            f"small/{number}" for number in range(40, 50)
        }
        for ref in ("main", "second"):
            [repaired, *_] = team.log(ref)
            assert repaired.note == "repair"
            assert all(change.old == change.new for change in team.diff((ref, None), (ref, None)))
    with Store(tmp_path / "reader", memory=0) as reader:
        know(reader, "team", remote.url).pull(lazy=True)
        assert set(reader) == {*(f"small/{number}" for number in range(50)), "large"}
        assert [reader.get(f"small/{number}") for number in range(40)] == [
            noise(500, number) for number in range(40)
        ]


def test_a_store_that_repaired_a_ref_deletes_none_of_its_names_later(
    remote: Remote, bucket: Path, tmp_path: Path
) -> None:
    for path in files(bucket, "packs"):
        path.unlink()
    with Store(tmp_path / "other", memory=0) as other:
        team = know(other, "team", remote.url)
        other.put_many((f"small/{number}", noise(500, number)) for number in range(50))
        team.repair(team.check())
        other.delete("small/1")
        team.push()
        assert team.diff(("main", team.log()[-1].commit), ("main", None)) == []


def test_objects_that_only_older_commits_need_are_listed_apart(
    store: Store, remote: Remote, bucket: Path
) -> None:
    [lost] = [path for path in files(bucket, "objects") if path.stat().st_size > 1_900_000]
    store.put("large", noise(2_000_000, 9))
    for ref in ("main", "second"):
        remote.push(ref=ref)
    former = remote.log()[-1].commit
    lost.unlink()
    checked = remote.check()
    assert checked.problems == []
    [problem] = checked.history
    assert (problem.key or "").endswith(lost.name)
    assert problem.names == ("large",)
    assert former[:12] in problem.why
    assert remote.repair(checked) == []
    assert remote.check().history == [problem]


@pytest.mark.parametrize("how", ["gone", "damaged"])
def test_a_lost_commit_between_others_is_a_problem_and_stops_the_collector(
    store: Store, remote: Remote, bucket: Path, tmp_path: Path, how: str
) -> None:
    for number in range(2):
        store.put("large", noise(2_000_000, 20 + number))
        remote.push()
    newest, lost, oldest = remote.log()
    error: type[Exception]
    if how == "gone":
        (bucket / "commits" / lost.commit).unlink()
        error, why = RemoteMissingError, "it is missing, and only through it can older commits be found"
    else:
        flip(bucket / "commits" / lost.commit, 40)
        error, why = CorruptError, "its bytes have another digest"
    with Store(tmp_path / "other", memory=0) as other:
        team = know(other, "team", remote.url)
        team.pull()
        [problem] = team.check().problems
        assert (problem.ref, problem.key) == ("main", f"commits/{lost.commit}")
        assert why in problem.why
        assert team.log() == [newest]
        assert team.pull(commit=newest.commit[:8]).commit == newest.commit
        with pytest.raises(error, match=lost.commit):
            team.pull(commit=oldest.commit[:8])
        with pytest.raises(error, match=r"history of ref 'main' .* --keep-commits 1, once"):
            team.gc(dry_run=True)
        assert team.repair(team.check()) != []
        assert team.check().problems == [problem], "it has nothing to give"
    remote.repair(remote.check())
    assert remote.check(deep=True).problems == []
    assert remote.log() == [newest, lost, oldest]


def test_files_of_others_beside_the_refs_are_passed_over(remote: Remote, bucket: Path) -> None:
    (bucket / "refs" / ".DS_Store").write_bytes(b"of a file manager")
    checked = remote.check()
    assert (checked.refs, checked.problems) == (["main", "second"], [])
    assert remote.refs() == ["main", "second"]
    assert remote.gc(dry_run=True).condemned == 0


@pytest.mark.parametrize(
    "note", ["n" * 65_537, "\ud800", None, b"bytes"], ids=["long", "half", "none", "bytes"]
)
def test_a_note_that_no_commit_can_have_is_refused(remote: Remote, note: Any) -> None:
    with pytest.raises(InvalidValueError, match="a note is text"):
        remote.push(note=note)
    remote.push(ref="noted", note="é" * 32_768)
    assert remote.log("noted")[0].note == "é" * 32_768


def test_a_key_that_may_not_write_is_a_warning_and_no_problem(seaweedfs: Place, tmp_path: Path) -> None:
    reader = {"AWS_ACCESS_KEY_ID": READER, "AWS_SECRET_ACCESS_KEY": READERS_SECRET}
    with Store(tmp_path / "one", memory=0) as one:
        with environment(seaweedfs.environment):
            one.put("name", b"1")
            team = one.add_remote("team", f"{seaweedfs.url}/{uuid.uuid4().hex}")
            team.push()
            assert team.check().warnings == ()
        with environment({**seaweedfs.environment, **reader}):
            checked = team.check()
            assert checked.problems == []
            [warning] = checked.warnings
            assert "AccessDenied" in warning
            assert one.add_remote("readable", team.url, read_only=True).check().warnings == ()


def test_a_repair_that_may_not_write_is_an_error_also_where_a_commit_is_lost(
    seaweedfs: Place, tmp_path: Path
) -> None:
    reader = {"AWS_ACCESS_KEY_ID": READER, "AWS_SECRET_ACCESS_KEY": READERS_SECRET}
    with Store(tmp_path / "one", memory=0) as one:
        with environment(seaweedfs.environment):
            one.put("name", b"1")
            team = one.add_remote("team", f"{seaweedfs.url}/{uuid.uuid4().hex}")
            key = f"commits/{team.push().commit}"
            open_bucket(team.url).delete([key])
            checked = team.check()
            assert [problem.key for problem in checked.problems] == [key]
        with environment({**seaweedfs.environment, **reader}), pytest.raises(RemoteDeniedError):
            team.repair(checked)
        with environment(seaweedfs.environment):
            team.repair(checked)
            assert team.check().problems == []


def test_a_place_that_is_no_remote_is_an_error(remote: Remote, bucket: Path) -> None:
    (bucket / "castore-remote.json").unlink()
    with pytest.raises(RemoteError, match="is no remote"):
        remote.check()


def test_a_lost_ref_is_a_problem_and_a_push_makes_it_again(
    remote: Remote, store: Store, bucket: Path
) -> None:
    """Regression: the check saw nothing, and the push took the names for such as others had removed."""
    shutil.rmtree(bucket / "refs" / "main~")
    [problem] = remote.check().problems
    assert (problem.ref, problem.key) == ("main", "refs/main")
    assert "this store has seen it; a push makes it again" in problem.why
    pushed = remote.push()
    assert (pushed.added, pushed.gone) == (52, 0)
    assert remote.check(deep=True).problems == []


def test_a_damaged_ref_is_one_problem_and_hides_no_other(remote: Remote, bucket: Path) -> None:
    """Regression: the check ended there, in a parser's words."""
    damaged = max((bucket / "refs" / "main~").iterdir())
    flip(damaged, 2, bit=7)
    [lost] = [path for path in files(bucket, "objects") if path.stat().st_size > 1_900_000]
    lost.unlink()
    checked = remote.check()
    of_ref, of_object = sorted(checked.problems, key=lambda problem: problem.ref)
    assert (of_ref.ref, of_ref.key) == ("main", "refs/main")
    assert "is damaged (" in of_ref.why
    assert "bring back an older version of refs/main" in of_ref.why
    assert of_object.ref == "second"
    [repaired] = remote.repair(checked)
    assert (repaired.ref, lost.exists()) == ("second", True)
    with pytest.raises(RemoteError, match=r"^ref 'main' in .* is damaged \(it is no JSON of castore's\);"):
        remote.pull()
    damaged.unlink()
    with pytest.raises(RemoteError, match=r"ref"):
        remote.pull()  # it had no other version


def test_each_ref_that_is_not_repaired_says_why(remote: Remote, bucket: Path) -> None:
    [lost] = [path for path in files(bucket, "objects") if path.stat().st_size > 1_900_000]
    lost.unlink()
    lost.mkdir()
    why = r"cannot use objects/\S+ in \S+: a folder lies where a file should be; remove it"
    told = f"^2 refs are not repaired as a whole: ref 'main': {why}; ref 'second': {why}$"
    with pytest.raises(RemoteError, match=told):
        remote.repair(remote.check())
    lost.rmdir()
    remote.repair(remote.check())
    assert remote.check(deep=True).problems == []


def test_a_damaged_marker_says_how_it_is_made_again(store: Store, remote: Remote, bucket: Path) -> None:
    marker = bucket / "castore-remote.json"
    marker.write_bytes(b"{")
    with pytest.raises(RemoteError, match=r"is damaged \(.*\); remove this one object, and `castore"):
        remote.pull()
    marker.unlink()
    store.remove_remote("team")
    store.add_remote("team", bucket.as_uri()).pull()
