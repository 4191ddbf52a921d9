"""`Remote.check` finds what is missing or damaged in a bucket; `repair` uploads it from a store with it."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from castore import Remote, RemoteDeniedError, RemoteError, Store
from tests.helpers import noise
from tests.remote.nodes import know, move
from tests.remote.servers import READER, READERS_SECRET, Place, environment
from tests.remote.test_transfer import ENVIRONMENT


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
    assert remote.check()[3:] == (1, 25, ())


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
    checked = remote.check(deep=how != "gone")
    assert checked.problems
    assert all(problem.key and problem.key.startswith(folder) for problem in checked.problems)
    names = {name for problem in checked.problems for name in problem.names}
    assert bool(names) == (folder != "trees")
    with (
        Store(tmp_path / "reader", memory=0) as reader,
        pytest.raises(RemoteDeniedError, match="--read-only"),
    ):
        know(reader, "team", remote.url, read_only=True).repair(checked)
    assert [one.ref for one in remote.repair(checked)] == sorted({one.ref for one in checked.problems})
    assert remote.check(deep=True).problems == []
    with Store(tmp_path / "other", memory=0) as other:
        know(other, "team", remote.url).pull("second")
        assert {entry.name: entry.digest for entry in other.entries()} == {
            entry.name: entry.digest for entry in store.entries()
        }


def test_a_commit_that_is_gone_is_a_problem_that_names_it(remote: Remote, bucket: Path) -> None:
    [*_, path] = files(bucket, "commits")
    path.write_bytes(b"{}")
    [problem] = remote.check().problems
    assert path.name in problem.why
    assert remote.repair(remote.check()) == []


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


def test_a_place_that_is_no_remote_is_an_error(remote: Remote, bucket: Path) -> None:
    (bucket / "castore-remote.json").unlink()
    with pytest.raises(RemoteError, match="is no remote"):
        remote.check()
