"""Fixtures of the tests of remotes: nodes with a store each, and a bucket that they share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from castore import Store
from castore.remote.bucket import Bucket
from castore.remote.folder_bucket import FolderBucket
from castore.remote.outcomes import Pulled, Pushed
from castore.remote.page_cache import PageCache
from castore.remote.pull import pull
from castore.remote.push import push

#: Names and bytes of a store.
Contents = dict[str, bytes]


class Node:
    """A store and its view of one bucket; pushes and pulls run in this process."""

    def __init__(self, path: Path, bucket: Bucket, **options: Any) -> None:
        self.store = Store(path, memory=0, **options)
        self.bucket = bucket
        self.base: bytes | None = None
        self._pool = ThreadPoolExecutor(8)
        self.seen: list[tuple[int, int]] = []

    @property
    def pages(self) -> PageCache:
        return PageCache(self.store.path, self.bucket, self._pool, (0o700, 0o600))

    def push(self, prefix: str = "", *, ref: str = "main", note: str = "", delete: bool = False) -> Pushed:
        pushed, self.base = push(
            self.store.parts, self.bucket, self.pages, self._pool, ref=ref, prefix=prefix, note=note,
            delete=delete, base=self.base, bad=set(), progress=lambda *bytes_: self.seen.append(bytes_),
        )  # fmt: skip
        return pushed

    def pull(
        self, prefix: str = "", *, ref: str = "main", start: str | None = None, below: str = "",
        replace: bool = False,
    ) -> Pulled:  # fmt: skip
        pulled, base = pull(
            self.store.parts, self.bucket, self.pages, self._pool, ref=ref, start=start, prefix=prefix,
            below=below, replace=replace, base=None if below else self.base,
            progress=lambda *bytes_: self.seen.append(bytes_),
        )  # fmt: skip
        if not below:
            self.base = base
        return pulled

    def contents(self) -> Contents:
        return {entry.name: self.store.get(entry.name) or b"a miss" for entry in self.store.entries()}

    def close(self) -> None:
        self._pool.shutdown()
        self.store.close()


@pytest.fixture
def bucket(tmp_path: Path) -> Bucket:
    return FolderBucket(tmp_path / "bucket")


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
