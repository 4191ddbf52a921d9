"""Stores on two nodes share a bucket of object storage, each through a process of its own."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from castore import Store
from castore.errors import RemoteDeniedError, RemoteError, RemoteUnreachableError
from castore.remote.folder_bucket import FolderBucket
from castore.remote.metered_bucket import open_metered
from tests.helpers import noise, text
from tests.remote.proxy import Fault, Proxy, answer, proxy, stall
from tests.remote.servers import Place, environment, free_ports


def test_what_one_node_pushes_to_object_storage_another_pulls(seaweedfs: Place, tmp_path: Path) -> None:
    url = f"{seaweedfs.url}/{uuid.uuid4().hex}"
    contents = {f"small/{number}": text(3000, number) for number in range(50)} | {"large": noise(20 << 20)}
    with Store(tmp_path / "one") as one, Store(tmp_path / "two") as two, environment(seaweedfs.environment):
        one.put_many(contents.items())
        one.add_remote("team", url)
        assert one.push(to="team").added == len(contents)
        two.add_remote("team", url, read_only=True)
        assert two.pull(remote="team").added == len(contents)
        assert {name: two.get(name) for name in contents} == contents


@contextmanager
def many_pages_on_a_link(seaweedfs: Place, folder: Path) -> Iterator[tuple[Store, Store, Store, Proxy]]:
    """A store that has pushed a tree of several pages, two that have not pulled it, and the way to it."""
    url = f"{seaweedfs.url}/{uuid.uuid4().hex}"
    with (
        environment(seaweedfs.environment),
        Store(folder / "one") as one,
        Store(folder / "two") as two,
        Store(folder / "three") as three,
        proxy(seaweedfs.port) as link,
    ):
        one.put_many((f"n/{number:04}", b"%d" % number) for number in range(3000))
        one.add_remote("team", url).push()
        for store in (two, three):
            store.add_remote("team", url, read_only=True)
        with environment({**seaweedfs.environment, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{link.port}"}):
            yield one, two, three, link


def test_a_first_pull_asks_for_the_pages_beside_the_ref_and_a_later_one_does_not(
    seaweedfs: Place, tmp_path: Path
) -> None:
    """A pull of an older commit has no use for those of the newest, either."""
    with many_pages_on_a_link(seaweedfs, tmp_path) as (one, two, three, link):

        def folders(store: Store, commit: str | None = None) -> list[str]:
            """The folders in which a pull reads objects."""
            link.seen.clear()
            store.pull(remote="team", commit=commit)
            return [one.path.split("/")[-2] for one in link.seen if one.method == "GET"]

        [first] = one.remote("team").log()
        assert folders(three, first.commit).count("hints") == 0
        found = folders(two)
        assert (found.count("hints"), found.count("trees")) == (1, 0)
        one.put("n/0000", b"another")
        one.push(to="team")
        found = folders(two)
        assert found.count("hints") == 0
        assert found.count("trees") > 0
        assert two.get("n/0000") == b"another"


@pytest.mark.parametrize("fault", [stall(0), answer(403)], ids=str)
def test_a_hint_that_cannot_be_had_holds_up_no_first_pull(
    seaweedfs: Place, tmp_path: Path, fault: Fault
) -> None:
    """Regression: a storage that gave no answer for this one object held it up for two minutes."""
    with many_pages_on_a_link(seaweedfs, tmp_path) as (_, two, _, link):
        link.inject(fault, 100, path="/hints/")
        began = time.monotonic()
        assert two.pull(remote="team").added == 3000
        assert time.monotonic() - began < 60  # a request that stalls is given up after as long


def test_an_error_of_object_storage_comes_through_the_process(seaweedfs: Place, tmp_path: Path) -> None:
    nobody = f"http://127.0.0.1:{free_ports(1)[0]}"
    with Store(tmp_path / "one") as store:
        store.put("a", b"1")
        with environment(seaweedfs.environment):
            store.add_remote("team", f"{seaweedfs.url}/{uuid.uuid4().hex}")
        with (
            environment({**seaweedfs.environment, "AWS_SECRET_ACCESS_KEY": "wrong"}),
            pytest.raises(RemoteDeniedError, match="SignatureDoesNotMatch"),
        ):
            store.push(to="team")
        with (
            environment({**seaweedfs.environment, "AWS_ENDPOINT_URL": nobody}),
            pytest.raises(RemoteUnreachableError, match="connection refused"),
        ):
            store.push(to="team")


def test_a_remote_that_other_tools_have_copied_into_a_folder_can_be_pushed_to(
    moto: Place, tmp_path: Path
) -> None:
    """Regression: it could be read, and each push said that others had moved the ref."""
    url = f"{moto.url}/{uuid.uuid4().hex}"
    with environment(moto.environment), Store(tmp_path / "one") as one, Store(tmp_path / "two") as two:
        one.put("a", b"1")
        one.add_remote("team", url).push()
        bucket, copy = open_metered(url), FolderBucket(tmp_path / "copy")
        for listed in bucket.listing(""):
            copy.put(listed.key, b"".join(bucket.stream(listed.key)))
        copied = two.add_remote("disk", (tmp_path / "copy").as_uri())
        assert copied.pull().added == 1
        for number in range(3):
            two.put("b", b"%d" % number)
            copied.push()
        assert copied.refs() == ["main"]
        assert copied.check().problems == []
        three = Store(tmp_path / "three")
        three.add_remote("disk", (tmp_path / "copy").as_uri()).pull()
        assert {name: three.get(name) for name in three} == {"a": b"1", "b": b"2"}
        three.close()


def test_a_folder_that_other_tools_have_copied_into_object_storage_is_told(
    moto: Place, tmp_path: Path
) -> None:
    """Regression: it looked empty, a push began a second history, and gc took all the rest for garbage."""
    url = f"{moto.url}/{uuid.uuid4().hex}"
    with environment(moto.environment), Store(tmp_path / "one") as one, Store(tmp_path / "two") as two:
        one.put("a", b"1")
        one.add_remote("disk", (tmp_path / "folder").as_uri()).push()
        copy = open_metered(url)
        for path in (tmp_path / "folder").rglob("*"):
            if path.is_file():
                copy.put(path.relative_to(tmp_path / "folder").as_posix(), path.read_bytes())
        copied = two.add_remote("team", url)
        two.put("b", b"2")
        for use in (copied.pull, copied.push, copied.check, copied.gc):
            with pytest.raises(RemoteError, match=r"copied it from one: .* refs/main~/0.* to refs/main"):
                use()
        [newest] = [listed.key for listed in copy.listing("refs/")]
        copy.put("refs/main", copy.get(newest).data)
        assert copied.pull().added == 1
        assert copied.push().added == 1
        assert copied.check().problems == []
