"""Fixtures of the tests of remotes: nodes with a store each, a bucket that they share, and servers, each of
which is started once, when the first test asks for it.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from castore import Store
from castore.remote import marker
from castore.remote.base import Base
from castore.remote.bucket import Bucket
from castore.remote.folder_bucket import FolderBucket
from castore.remote.keys import hint_key
from castore.remote.metered_bucket import MeteredBucket
from castore.remote.outcomes import Pulled, Pushed
from castore.remote.page_cache import PageCache
from castore.remote.pull import pull
from castore.remote.push import push
from castore.remote.remotes import Remotes, RemoteSettings
from tests.remote import nodes, servers
from tests.remote.servers import Place

#: Names and bytes of a store.
Contents = dict[str, bytes]


class Node:
    """A store and its view of one bucket; pushes and pulls run in this process."""

    def __init__(self, path: Path, bucket: Bucket, **options: Any) -> None:
        self.store = Store(path, memory=0, **options)
        self.bucket = bucket
        self.remotes = Remotes(self.store.path, self.store.settings)
        self.remotes.add(RemoteSettings("team", bucket.url))
        self._pool = ThreadPoolExecutor(8)
        self.seen: list[tuple[int, int]] = []

    @property
    def pages(self) -> PageCache:
        return PageCache(self.store.path, self.bucket, self._pool, (0o700, 0o600))

    def push(self, prefix: str = "", *, ref: str = "main", note: str = "", delete: bool = False,
        restore: bool = False,
    ) -> Pushed:  # fmt: skip
        return push(
            self.store.parts, self.bucket, self.pages, self._pool, ref=ref, prefix=prefix, note=note,
            delete=delete, restore=restore, base=Base(self.remotes, "team", ref), bad=set(), remote="team",
            progress=lambda *bytes_: self.seen.append(bytes_),
        )  # fmt: skip

    def pull(
        self, prefix: str = "", *, ref: str = "main", start: str | None = None, below: str = "",
        replace: bool = False, lazy: str | None = None, began: float | None = None,
    ) -> Pulled:  # fmt: skip
        return pull(
            self.store.parts, self.bucket, self.pages, self._pool, ref=ref, start=start,
            hint=None if start or ref in self.remotes.refs("team") else lambda: self._hint(ref),
            prefix=prefix, below=below, replace=replace, lazy=lazy,
            began=time.time() if began is None else began, base=Base(self.remotes, "team", ref, below),
            require_remote=lambda: None, progress=lambda *bytes_: self.seen.append(bytes_),
        )  # fmt: skip

    def _hint(self, ref: str) -> bytes | None:
        return MeteredBucket(self.bucket).get_within(hint_key(ref), 60)

    def contents(self) -> Contents:
        return {entry.name: self.store.get(entry.name) or b"a miss" for entry in self.store.entries()}

    def close(self) -> None:
        self._pool.shutdown()
        self.store.close()


@pytest.fixture
def bucket(tmp_path: Path) -> Bucket:
    place = FolderBucket(tmp_path / "bucket")
    marker.prepare(place)
    return place


MakeNode = Callable[..., Node]


@pytest.fixture
def node(tmp_path: Path, bucket: Bucket) -> Iterator[MakeNode]:
    """Makes nodes by name."""
    made: list[Node] = []

    def make(name: str, **options: Any) -> Node:
        made.append(Node(tmp_path / name, bucket, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture(scope="session")
def seaweedfs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """An object storage that people run."""
    with servers.seaweedfs(tmp_path_factory.mktemp("seaweedfs")) as place:
        yield place


@pytest.fixture(scope="session")
def moto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """S3 as AWS's libraries are tested with."""
    with servers.moto(tmp_path_factory.mktemp("moto")) as place:
        yield place


@pytest.fixture(scope="session")
def gcs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """The interface of Google Cloud Storage."""
    with servers.gcs(tmp_path_factory.mktemp("gcs")) as place:
        yield place


@pytest.fixture(scope="session")
def rclone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """A storage that is unfit."""
    with servers.rclone(tmp_path_factory.mktemp("rclone")) as place:
        yield place


@pytest.fixture(scope="session")
def azurite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """Azure's emulator, where it is installed."""
    with servers.azurite(tmp_path_factory.mktemp("azurite")) as place:
        yield place


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """A folder that stores share."""
    with servers.folder(tmp_path_factory.mktemp("folder")) as place:
        yield place


@pytest.fixture(scope="session")
def pushed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """A store whose names are in `main` of the remote `team`, a copied."""
    place = tmp_path_factory.mktemp("pushed")
    with Store(place / "one") as one:
        one.put_many(nodes.CONTENTS.items())
        one.add_remote("team", (place / "bucket").as_uri()).push()
        yield one


@pytest.fixture
def copied(pushed: Store, tmp_path: Path) -> Path:
    """A bucket of the test's own, with the same names."""
    shutil.copytree(pushed.path.with_name("bucket"), tmp_path / "bucket")
    return tmp_path / "bucket"


@pytest.fixture
def other(copied: Path, tmp_path: Path) -> Iterator[Store]:
    """A node that has nothing yet."""
    with nodes.node(tmp_path / "other", copied.as_uri()) as store:
        yield store
