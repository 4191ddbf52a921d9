"""The names of a commit of a remote as a `FileTree`: there at once, with bytes that come when they are read.

Names come from the tree's pages, which are fetched when they are needed and stay in the store's page cache.
Bytes come through the fetcher, and stay in the store as far as its budget lets them. A tree that follows its
ref takes each new commit as a whole, so a reader sees one commit or the next.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice, takewhile
from typing import NamedTuple

from castore import layout
from castore.errors import (
    CastoreError,
    CorruptError,
    FullError,
    InvalidValueError,
    RemoteError,
    RemoteMissingError,
    RemoteUnreachableError,
    StoreError,
)
from castore.names import below
from castore.parts import Parts
from castore.read.file_tree import HeldBlob
from castore.records import Blob, FileRow, entry_check, has_expired
from castore.remote.background_work import BackgroundWork
from castore.remote.fetcher_client import FetcherClient
from castore.remote.kept_bytes import WHOLE_LIMIT, blob_name, bytes_here
from castore.remote.keys import check_ref
from castore.remote.lazy_reader import LazyReader
from castore.remote.outcomes import Prefetch, Progress, Warmed
from castore.remote.pack_window import PackWindow
from castore.remote.page_cache import read_cached
from castore.remote.pages import Page, Row
from castore.remote.remotes import Remotes, SeenCommit
from castore.remote.tree import Tree, difference
from castore.remote.unkept_frames import NOT_KEPT, RoomState
from castore.remote.warm import fetch_ahead, rows_of_shard
from castore.system.ram_cache import MemoryLRU
from castore.units import format_size

log = logging.getLogger("castore")

#: Seconds between two polls whether the ref has moved.
FOLLOW_SECONDS = 2.0
#: Changed names that are listed one by one; with more, a mount forgets all it knows.
MOST_CHANGES = 100_000
# Bytes of decoded pages that are kept, and of a decoded row, measured with tracemalloc.
_PAGE_BYTES, _ROW_BYTES = 64 << 20, 900
_ATTEMPTS = 8
# Trees of earlier commits that are kept for open files.
_OLDER = 64


class NameChange(NamedTuple):
    """A name that points to another digest in a newer commit, or to none."""

    name: str
    digest: bytes | None


class RemoteTree:
    """The names of a commit. See `FileTree` for its methods.

    Args:
        parts: of the store that keeps what is read.
        remote: name of the remote.
        ref: name of the ref.
        commit: first digits of a commit in its history; None for the newest.
        is_following: take new commits of the ref as they come.
        prefetch: ``"open"`` fetches the rest of a file that somebody reads, ``"all"`` everything.

    Raises:
        InvalidValueError: a commit cannot follow its ref.
        RemoteMissingError: there is no such ref or commit.
        RemoteError: the remote cannot be used.
        StoreError: the store cannot be written to, so it can keep nothing.
    """

    def __init__(
        self,
        parts: Parts,
        remote: str,
        ref: str,
        commit: str | None,
        *,
        is_following: bool = False,
        prefetch: Prefetch = "none",
    ) -> None:
        parts.index.require_writable()
        check_ref(ref)
        if is_following and commit is not None:
            raise InvalidValueError(f"commit {commit} never changes: leave it out to follow ref {ref!r}")
        self._parts = parts
        self._remote = remote
        self._ref = ref
        self._is_following = is_following
        self._fetcher = FetcherClient(parts.path)
        self._decoded: MemoryLRU[Page] = MemoryLRU(_PAGE_BYTES, _measure)
        self._windows = PackWindow(parts)
        self._known = Remotes(parts.path, parts.settings)
        found = self._find(commit)
        self.time = found.time
        #: The commit's digest.
        self.commit = found.commit
        # The newest first. An open file may be of an earlier one.
        self._trees = [self._tree(found.tree)]
        self._prefetch = prefetch
        # All at and below it is fetched ahead; None for nothing.
        self._ahead: str | None = None
        self._ended = threading.Event()
        self._prefetcher = ThreadPoolExecutor(1, "castore-ahead")
        self._background = BackgroundWork()
        self._room = RoomState()

    def _find(self, commit: str | None) -> SeenCommit:
        """The commit to show. Without a network, the newest that this store knows."""
        try:
            found = self._ask(commit)
        except RemoteUnreachableError as error:
            seen = self._known.seen(self._remote, self._ref)
            if seen is None or not seen.commit.hex().startswith(commit or ""):
                raise
            log.warning(
                "%s; showing commit %s of ref %r, the newest that this store knows",
                error,
                seen.commit.hex()[:12],
                self._ref,
            )
            return seen
        if commit is None:
            self._known.set_seen(self._remote, self._ref, found)
        return found

    def _ask(self, commit: str | None) -> SeenCommit:
        answer = self._fetcher.call("ref", remote=self._remote, ref=self._ref, start=commit)
        return SeenCommit(*answer)

    def _tree(self, root: bytes) -> Tree:
        return Tree(root, self._read_page, self._expect_pages, self._decoded)

    def _read_page(self, digest: bytes) -> bytes:
        for _ in range(_ATTEMPTS):
            data = read_cached(self._parts.path, digest)
            if data is not None:
                return data
            self._fetcher.call("pages", remote=self._remote, pages=[digest], first=1)
        raise RemoteError(
            f"page {digest.hex()} of remote {self._remote!r} cannot be kept in {self._parts.path}"
        )

    def _expect_pages(self, digests: Iterable[bytes]) -> None:
        folder = self._parts.path / layout.PAGES
        missing = [
            digest
            for digest in digests
            if self._decoded.get(digest) is None and not os.path.exists(folder / digest.hex())
        ]
        if missing:
            self._background.submit(
                partial(self._fetcher.call, "pages", remote=self._remote, pages=missing, first=0)
            )

    # Names

    def file(self, name: str, now: float) -> FileRow | None:
        """See `FileTree`."""
        row = self._trees[0].find(name)
        return None if row is None or has_expired(row.expires, now) else _file_row(row)

    def files(self, low: str, high: str | None, now: float, limit: int) -> list[FileRow]:
        """See `FileTree`."""
        found: list[FileRow] = []
        for row in takewhile(lambda row: high is None or row.name < high, self._trees[0].rows_from(low)):
            if not has_expired(row.expires, now):
                found.append(_file_row(row))
                if len(found) == limit:
                    break
        return found

    def require_order(self, last: str, key: str) -> str:
        """See `FileTree`."""
        if not key > last:
            raise StoreError(f"a page of remote {self._remote!r} lists its names out of order")
        return key

    def is_folder(self, path: str, now: float) -> bool:
        """See `FileTree`."""
        return bool(self.files(*below(path), now, 1)) if path else True

    def find_digest(self, name: str) -> bytes | None:
        """See `FileTree`."""
        row = self._trees[0].find(name)
        return None if row is None else row.digest

    def follow(self) -> CommitChanges:
        """See `FileTree`."""
        return CommitChanges(self, is_following=self._is_following)

    def advance(self) -> list[NameChange] | None:
        """Take the ref's newest commit; returns the names that changed, or None if they are too many to list.

        Raises:
            RemoteError: the remote cannot be used.
        """
        found = self._ask(None)
        if found.commit == self.commit:
            return []
        older, newer = self._trees[0], self._tree(found.tree)
        changes = [
            NameChange(change.name, None if change.new is None else change.new.digest)
            for change in islice(difference(older, newer), MOST_CHANGES)
        ]
        self.commit, self.time, self._trees = found.commit, found.time, [newer, *self._trees[: _OLDER - 1]]
        self._known.set_seen(self._remote, self._ref, found)
        if self._ahead is not None:
            self._prefetcher.submit(self._fetch_ahead, partial(_new_rows, older, newer, self._ahead))
        return changes if len(changes) < MOST_CHANGES else None

    # Blobs

    def blob(self, digest: bytes) -> Blob | None:
        """See `FileTree`. Trees are sorted by name: nothing in them is found by its digest."""
        return None

    def is_named(self, digest: bytes) -> bool:
        """See `FileTree`."""
        return True

    def open(self, name: str, digest: bytes, cache: MemoryLRU[bytes]) -> HeldBlob:
        """See `FileTree`."""
        parts = self._parts
        row: Row | None = None
        for _ in range(_ATTEMPTS):
            blob = parts.index.blob(digest)
            if blob is not None and blob.is_here:
                try:
                    return parts.source.open_here(blob, cache)
                except FileNotFoundError:
                    continue
            row = row or self._row(name, digest)
            if row.place.stored > WHOLE_LIMIT:
                if self._prefetch == "open":
                    self._prefetcher.submit(self._fetch_ahead, partial(iter, (row,)))
                return self._lazy(row, cache)
            if not self._fetch(row):
                return self._lazy(row, cache)
        raise RemoteError(
            f"{name!r} is dropped as fast as it is fetched: the budget of {parts.path} is too small for what"
            " is read at once; raise it with `castore init --max-size`"
        )

    def _lazy(self, row: Row, cache: MemoryLRU[bytes] | None) -> LazyReader:
        ahead = self._background.submit
        return LazyReader(self._parts, self._fetcher, ahead, self._remote, row, cache, self._room)

    def read_small(self, name: str, digest: bytes) -> bytes | None:
        """See `FileTree`."""
        data = self._read_kept(digest)
        if data is None:
            row = self._row(name, digest)
            data = self._read_kept(digest) if self._fetch(row) else self._lazy(row, None).read_all()
        return data

    def _read_kept(self, digest: bytes) -> bytes | None:
        blob = self._parts.index.blob(digest)
        return None if blob is None else self._parts.source.read_small(blob)

    def _row(self, name: str, digest: bytes) -> Row:
        for tree in self._trees:
            row = tree.find(name)
            if row is not None and row.digest == digest:
                return row
        raise FileNotFoundError(f"no commit of {self._ref!r} that is mounted has {name!r} with these bytes")

    def _fetch(self, row: Row) -> bool:
        """Have a blob in the store, and some of those near it in its pack; False if there is no room."""
        rows = [row]
        if row.place.is_packed:
            start, end = self._windows.around(row.place.object, row.place.offset)
            # Names that are neighbours in the tree are neighbours in a pack: they were pushed together.
            rows += [
                other
                for other in self._trees[0].leaf_of(row.name)
                if other.place.object == row.place.object
                and start <= other.place.offset < end
                and other.digest != row.digest
            ]
        try:
            self._room.require()
            self._fetcher.call("blobs", remote=self._remote, rows=rows, first=1)
        except NOT_KEPT as error:
            self._room.note(error)
            return False
        return True

    def count_use(self, name: str, digest: bytes) -> None:
        """See `FileTree`."""
        self._parts.source.count_use(blob_name(digest))

    def quarantine(self, held: HeldBlob, error: CorruptError) -> bool:
        """See `FileTree`. The remote still has the bytes."""
        if isinstance(held, LazyReader):  # has set the damaged part aside by itself
            return False
        self._parts.source.quarantine(held.blob, error)
        return True

    def attributes(self, name: str, digest: bytes) -> dict[str, str]:
        """See `FileTree`."""
        try:
            row = self._row(name, digest)
        except FileNotFoundError:
            return {}
        found = {
            "digest": digest.hex(),
            "size": str(row.size),
            "codec": row.place.codec,
            "stored": str(row.place.stored),
            "serializer": row.serializer,
            "remote": self._remote,
            "commit": self.commit.hex(),
            "here": str(self._bytes_here(row)),
        }
        if row.expires is not None:
            found["expires"] = repr(row.expires)
        if row.metadata:
            found["metadata"] = json.dumps(json.loads(row.metadata), sort_keys=True, ensure_ascii=False)
        return found

    def _bytes_here(self, row: Row) -> int:
        """Stored bytes of a blob that the store keeps."""
        blob = self._parts.index.blob(row.digest)
        if blob is not None and blob.is_here:
            return row.place.stored
        return bytes_here(self._parts.index, row.place)

    # Upkeep

    def maintain(self, seconds: float) -> None:
        """See `FileTree`."""
        self._parts.usage.flush_for(seconds)
        self._parts.objects.packs.drop_unlinked()

    def begin(self, prefix: str) -> None:
        """Start to fetch all at and below a prefix, of this commit and of those that follow, if that is asked
        for. Call once threads may start.
        """
        if self._prefetch == "all":
            self._ahead = prefix
            self._prefetcher.submit(self._fetch_ahead, partial(self._trees[0].rows, prefix))

    def _fetch_ahead(self, find_rows: Callable[[], Iterable[Row]]) -> None:
        try:
            fetch_ahead(self._fetcher, self._remote, find_rows(), ended=self._ended)
        except CastoreError as error:
            log.warning("not all is fetched ahead: %s", error)
        except Exception:  # nobody asks for the result of this work
            log.exception("fetching ahead has failed")

    def warm(self, prefix: str, shard: tuple[int, int], progress: Progress) -> Warmed:
        """See `Remote.warm`."""
        index, shards = shard
        rows = rows_of_shard(self._trees[0].rows(prefix), index, shards)
        if prefix and not rows and next(self._trees[0].rows(prefix), None) is None:
            raise RemoteMissingError(f"ref {self._ref!r} has no name at or below {prefix!r}")
        total = sum({row.digest: row.place.stored for row in rows}.values())
        budget = self._parts.settings.max_size
        if budget is not None and total > budget:
            raise FullError(
                f"that is {format_size(total)}, and the budget of {self._parts.path} is"
                f" {format_size(budget)}; warm a part of it, or raise it with `castore init --max-size`"
            )
        done = 0

        def count(size: int) -> None:
            nonlocal done
            done += size
            progress(done, total)

        fetch_ahead(self._fetcher, self._remote, {row.digest: row for row in rows}.values(), count)
        return Warmed(self._ref, self.commit.hex(), len(rows), total)

    def close(self) -> None:
        """See `FileTree`."""
        self._ended.set()
        self._prefetcher.shutdown(wait=False, cancel_futures=True)
        self._fetcher.done()


class CommitChanges:
    """The names that change as a tree follows its ref: none if it does not. See `Changes`.

    A thread of its own asks the ref, so that nobody waits for a network that is down.

    Args:
        tree: takes the new commits.
        is_following: whether it does.
    """

    def __init__(self, tree: RemoteTree, *, is_following: bool) -> None:
        self._tree = tree
        self._lock = threading.Lock()
        self._changes: list[NameChange] | None = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="castore-ref", daemon=True)
        if is_following:
            self._thread.start()

    def poll(self) -> list[NameChange] | None:
        """See `Changes`."""
        with self._lock:
            changes, self._changes = self._changes, []
        return changes

    def close(self) -> None:
        """See `Changes`."""
        self._ended.set()

    def _run(self) -> None:
        last_error = ""
        while not self._ended.wait(FOLLOW_SECONDS):
            try:
                changes = self._tree.advance()
                last_error = ""
            except CastoreError as error:
                if str(error) != last_error:
                    log.warning("%s; the mount goes on with commit %s", error, self._tree.commit.hex()[:12])
                last_error = str(error)
                continue
            with self._lock:
                self._changes = None if changes is None or self._changes is None else self._changes + changes


def _new_rows(older: Tree, newer: Tree, prefix: str) -> Iterator[Row]:
    return (change.new for change in difference(older, newer, prefix) if change.new is not None)


def _file_row(row: Row) -> FileRow:
    return row.name, row.digest, row.size, row.created, row.expires, entry_check(row.name, row.digest)


def _measure(page: Page) -> int:
    return _ROW_BYTES * (len(page.rows) + len(page.children))
