"""Pages of trees that this store has seen, in ``pages/``: a second push, pull or mount need not fetch them.

A cached page is worth no more than its digest, which every use checks: a damaged one is fetched again. Pages
that are wanted soon are fetched side by side. Commits that pushes and pulls have read lie there too: without
its commit a ref leads nowhere, and a store that has the bytes can upload them again.
"""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Executor, Future
from contextlib import suppress
from pathlib import Path

from castore import layout
from castore.errors import (
    CorruptError,
    RemoteDeniedError,
    RemoteError,
    RemoteMissingError,
    RemoteUnreachableError,
)
from castore.remote import commits
from castore.remote.bucket import Bucket
from castore.remote.commits import Commit, Ref
from castore.remote.hints import encode_hint, parse_hint
from castore.remote.keys import COMMITS, commit_key, page_key
from castore.remote.pages import digest_of
from castore.remote.tree import Tree
from castore.system.temporary import make_folder, write_whole

# Commits between two of which one is looked for before the other.
_LONGEST_WAY = 100
# Commits whose roots are fetched ahead.
_COMMITS_AHEAD = 8
_COMMIT = re.compile(f"{COMMITS}[0-9a-f]{{64}}")
_LOST = "`castore remote check --repair` in a store that has the page uploads it again"
_DAMAGED = "`castore remote check --deep --repair` in a store that has the page uploads it again"


def read_cached(store: Path, digest: bytes) -> bytes | None:
    """The bytes of a page in a store's cache, or None if it is missing or damaged."""
    try:
        data = (store / layout.PAGES / digest.hex()).read_bytes()
    except FileNotFoundError:
        return None
    return data if digest_of(data) == digest else None


def is_commit(data: bytes) -> bool:
    """Whether cached bytes are those of a commit, which are JSON, and no page."""
    return data.startswith(b"{")


class PageCache:
    """The pages of one bucket, and the cache of one store.

    Args:
        store: the store's folder.
        bucket: has the pages that the cache lacks.
        pool: fetches ahead.
        mode: permission bits of the cache's folder and of its files.
        read_only: write nothing.
    """

    def __init__(
        self, store: Path, bucket: Bucket, pool: Executor, mode: tuple[int, int], *, read_only: bool = False
    ) -> None:
        self._is_read_only = read_only
        self._folder = store / layout.PAGES
        self._tmp = store / "tmp"
        self._bucket = bucket
        self._pool = pool
        self._folder_mode, self._file_mode = mode
        self._coming: dict[bytes, Future[bytes]] = {}
        self._hinted: dict[bytes, bytes] = {}

    def read(self, digest: bytes) -> bytes:
        """The bytes of a page, from the cache or from the bucket.

        Raises:
            RemoteMissingError: the bucket has no such page.
            CorruptError: the bucket has other bytes.
        """
        coming = self._coming.pop(digest, None)
        return self.load(digest) if coming is None else coming.result()

    def expect(self, digests: Iterable[bytes]) -> None:
        """Fetch pages that will be read soon, and that the cache lacks."""
        for digest in digests:
            if digest not in self._coming and not os.path.exists(self._path(digest)):
                self._coming[digest] = self._pool.submit(self.load, digest)

    def has_tree(self, tree: Tree) -> bool:
        """Whether all pages of a tree can be read. Those that the cache lacks are fetched."""
        try:
            missing = [leaf.page for leaf in tree.leaves() if not os.path.exists(self._path(leaf.page))]
            self.expect(missing)
            for digest in missing:
                self.read(digest)
        except (RemoteMissingError, CorruptError):
            return False
        return True

    def keep(self, digest: bytes, data: bytes) -> None:
        """Put a page into the cache."""
        if self._is_read_only:
            return
        make_folder(self._folder, self._folder_mode)
        # Not synced: readers compare the digest.
        write_whole(self._path(digest), [data], self._tmp, self._file_mode, durable=False)

    def take(self, ref: Ref) -> None:
        """Put into the cache what a ref carries, if it is what the ref points at."""
        if ref.carried is None:
            return
        commit, root = ref.carried
        if digest_of(commit) != ref.commit:
            return
        tree = commits.parse_commit(commit, ref.commit, self._bucket).tree
        for digest, data in ((ref.commit, commit), (tree, root)):
            if digest_of(data) == digest and not os.path.exists(self._path(digest)):
                self.keep(digest, data)

    def take_hint(self, hint: bytes) -> None:
        """Have the pages of a hint at hand. Those are kept that somebody reads."""
        self._hinted |= parse_hint(hint)

    def hint_of(self, tree: Tree) -> bytes:
        """The hint for readers of a tree whose root its ref carries. The cache has all that it holds."""
        below = (digest for digest in tree.pages() if digest != tree.root)
        return encode_hint(read_cached(self._folder.parent, digest) for digest in below)

    def commit(self, digest: bytes) -> Commit:
        """A commit, from the cache or from the bucket.

        Raises:
            RemoteMissingError, CorruptError, RemoteError: as for `commits.read_commit`.
        """
        data = read_cached(self._folder.parent, digest)
        if data is None:
            data = commits.read_commit_bytes(self._bucket, digest)
            self.keep(digest, data)
        return commits.parse_commit(data, digest, self._bucket)

    def comes_before(self, digest: bytes, tree: bytes) -> bool:
        """Whether a commit comes before one of a tree, in its history, as far as the cache has any."""
        first = self.commit(digest)
        if first.tree == tree:
            return False
        later = [commit for commit in self._cached_commits() if commit.tree == tree]
        # By far most commits are later than those: others have pushed. Their history need not be read.
        return any(commit.time > first.time and self._has_before(commit, digest) for commit in later)

    def _cached_commits(self) -> Iterator[Commit]:
        for entry in os.scandir(self._folder) if self._folder.is_dir() else ():
            # A page of the cache may go at any time, and another castore may have written it.
            with suppress(FileNotFoundError, RemoteError), open(entry.path, "rb") as file:
                start = file.read(1)
                if is_commit(start):
                    data = start + file.read()
                    digest = digest_of(data)
                    if digest.hex() == entry.name:
                        yield commits.parse_commit(data, digest, self._bucket)

    def _has_before(self, commit: Commit, digest: bytes) -> bool:
        for _ in range(_LONGEST_WAY):
            if commit.parent is None or commit.parent == digest:
                return commit.parent == digest
            commit = self.commit(commit.parent)
        return False

    def whole_commits(self, keys: Iterable[str]) -> dict[bytes, Commit]:
        """The commits of some keys, read from the bucket side by side. Each names but the one before it, so
        the way along a history would wait for one answer after another.

        Lost and damaged ones are left out: the walk along a history meets them again, and reports them.
        """
        digests = [bytes.fromhex(key.removeprefix(COMMITS)) for key in keys if _COMMIT.fullmatch(key)]
        coming = [self._pool.submit(self._whole_commit, digest) for digest in digests]
        read = zip(digests, (one.result() for one in coming), strict=True)
        return {digest: commit for digest, commit in read if commit is not None}

    def _whole_commit(self, digest: bytes) -> Commit | None:
        try:
            return commits.read_commit(self._bucket, digest)
        except (RemoteUnreachableError, RemoteDeniedError):
            raise
        except (CorruptError, RemoteError):
            return None

    def ahead(self, history: Iterator[tuple[bytes, Commit]]) -> Iterator[tuple[bytes, Commit]]:
        """Pass a history on, and fetch the roots of the commits that come next meanwhile."""
        coming: deque[tuple[bytes, Commit]] = deque()
        for digest, commit in history:
            self.expect([commit.tree])
            coming.append((digest, commit))
            if len(coming) > _COMMITS_AHEAD:
                yield coming.popleft()
        yield from coming

    def size(self, digest: bytes) -> int | None:
        """Length of a page in the cache, or None if it is not there."""
        try:
            return os.stat(self._path(digest)).st_size
        except FileNotFoundError:
            return None

    def has(self, digest: bytes) -> bool:
        """Whether the cache has the bytes of that digest."""
        return read_cached(self._folder.parent, digest) is not None

    def restore(self, digests: Iterable[bytes]) -> None:
        """Upload those of some pages and commits that the cache has."""
        for digest in digests:
            data = read_cached(self._folder.parent, digest)
            if data is not None:
                self._bucket.put(commit_key(digest) if is_commit(data) else page_key(digest), data)

    def load(self, digest: bytes) -> bytes:
        """`read`, without regard to pages that are expected."""
        data = read_cached(self._folder.parent, digest)
        if data is not None:
            return data
        data = self._hinted.pop(digest, None)
        if data is not None:
            self.keep(digest, data)
            return data
        key = page_key(digest)
        try:
            data = self._bucket.get(key).data
        except RemoteMissingError as error:
            raise RemoteMissingError(f"{error}, a page of a tree; {_LOST}") from error
        if digest_of(data) != digest:
            raise CorruptError(
                f"{self._bucket.url}/{key}, a page of a tree, is damaged: its bytes have another digest;"
                f" {_DAMAGED}",
                where=key,
            )
        self.keep(digest, data)
        return data

    def _path(self, digest: bytes) -> Path:
        return self._folder / digest.hex()
