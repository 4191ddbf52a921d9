"""The calls of a remote that a process of their own does (transfer.py): one method each.

A call opens the store, and asks the bucket that it is given. Its result is made of plain values, since it
travels to the caller. Must never: send the caller a message.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

from castore.errors import CorruptError, InvalidValueError, RemoteDeniedError, RemoteError, RemoteMissingError
from castore.parts import Parts
from castore.remote import commits, marker
from castore.remote.base import Base
from castore.remote.keys import FOLDERS, hint_key
from castore.remote.metered_bucket import MeteredBucket, open_metered
from castore.remote.outcomes import Progress
from castore.remote.page_cache import PageCache
from castore.remote.process import open_parts
from castore.remote.pull import find_commit, pull
from castore.remote.remotes import Remotes
from castore.remote.tree import Tree, difference

# Requests under way at once.
_THREADS = 16
# Seconds that a pull waits for the hint, once it has the ref: without it the pages come one by one.
_HINT_SECONDS = 5.0


def do(
    call: str,
    arguments: dict[str, Any],
    store: Path,
    options: dict[str, Any],
    bucket: MeteredBucket,
    progress: Progress,
) -> Any:
    """Do a call, and return its result.

    Args:
        call: the name of a method of `Calls`.
        arguments: of that method.
        store: the store's folder.
        options: of `open_parts`.
        bucket, progress: see `Calls`.
    """
    with closing(open_parts(store, **options)) as parts, ThreadPoolExecutor(_THREADS) as pool:
        try:
            bucket.report_to(parts.usage)
            if call not in ("prepare", "pull"):  # these do it themselves
                marker.check(bucket)  # a file system that is not mounted must not look like an empty remote
            return getattr(Calls(parts, bucket, pool, progress), call)(**arguments)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


class Calls:
    """The calls, in an open store. Each imports what it alone needs: a process is started for each call.

    Args:
        parts: of the store.
        bucket: of the remote.
        pool: for requests.
        progress: receives what is done, and what there is in all.
    """

    def __init__(
        self, parts: Parts, bucket: MeteredBucket, pool: ThreadPoolExecutor, progress: Progress
    ) -> None:
        mode = (parts.settings.folder_mode, parts.settings.file_mode)
        self.parts, self.bucket, self.pool, self.progress = parts, bucket, pool, progress
        self.remotes = Remotes(parts.path, parts.settings)
        self.pages = PageCache(parts.path, bucket, pool, mode, read_only=parts.read_only)

    def prepare(self, read_only: bool, single_writer: bool, create: bool) -> list[str]:
        """Make the place a remote and try it out; returns what may surprise."""
        from castore.remote.probe import probe

        if not read_only:
            self._require_not_inside()
        marker.prepare(self.bucket, create=create and not read_only)
        found = probe(self.bucket, writes=not read_only)
        if not found.fit_for_reading:
            raise RemoteError(f"{self.bucket.url} cannot be a remote: {'; '.join(found.sentences)}")
        if not (read_only or found.writes):
            raise RemoteDeniedError(
                f"nothing can be written to {self.bucket.url}: {'; '.join(found.sentences)}; add it with"
                " --read-only, or get the right to write"
            )
        if not (read_only or single_writer or found.fit_for_sharing):
            raise RemoteError(
                f"several stores cannot write to {self.bucket.url}: {'; '.join(found.sentences)};"
                " add it with --read-only, or with --single-writer if only one process pushes at a time"
            )
        return list(found.sentences)

    def _require_not_inside(self) -> None:
        """Check that the place is in none of the folders of a remote, which collects what it finds there."""
        parts = self.bucket.url.split("/")
        for count in range(3, len(parts)):
            if parts[count] in FOLDERS and "/".join(parts[:count]) != "file://":
                outer = open_metered("/".join(parts[:count]))
                outer.report_to(self.parts.usage)
                with suppress(RemoteError):  # it is none, or nobody may look
                    marker.check(outer)
                    raise InvalidValueError(
                        f"{self.bucket.url} lies in a folder of the remote {outer.url}, whose `castore remote"
                        " gc` would delete it; choose another place"
                    )

    def push(self, remote: str, ref: str, bad: list[str], **options: Any) -> dict[str, Any]:
        """See `Remote.push`. The digests in ``bad`` name objects of the remote that are damaged."""
        from castore.remote.push import push

        distrusted = set(map(bytes.fromhex, bad))
        self.pages.restore(distrusted)
        return push(
            self.parts,
            self.bucket,
            self.pages,
            self.pool,
            remote=remote,
            ref=ref,
            base=Base(self.remotes, remote, ref),
            bad=distrusted,
            progress=self.progress,
            **options,
        )._asdict()

    def gc(
        self, keep_commits: int | None, grace: float, unused: float | None, dry_run: bool
    ) -> dict[str, Any]:
        """See `Remote.gc`."""
        from castore.remote.collect import collect

        return collect(
            self.bucket,
            self.pages,
            keep_commits=keep_commits,
            grace=grace,
            unused=unused,
            dry_run=dry_run,
            progress=self.progress,
        )._asdict()

    def check(self, remote: str, deep: bool, read_only: bool) -> dict[str, Any]:
        """See `Remote.check`. Repairs nothing."""
        from castore.remote.check import check
        from castore.remote.probe import probe

        found = check(
            self.bucket, self.pages, self.pool, self.remotes.refs(remote), deep=deep, progress=self.progress
        )
        try:
            warnings = probe(self.bucket, writes=not read_only).sentences
        except (
            RemoteError
        ) as error:  # what was found counts, also if no more can be tried, on a full disk say
            warnings = (str(error),)
        return found._replace(warnings=warnings)._asdict()

    def pull(
        self, remote: str, ref: str, below: str, lazy: bool, is_first: bool, **options: Any
    ) -> dict[str, Any]:
        """See `Remote.pull`."""
        if lazy:  # somebody reads soon: the fetcher starts, and connects, meanwhile
            from castore.remote.background_work import BackgroundWork
            from castore.remote.fetcher_client import FetcherClient

            BackgroundWork().submit(partial(FetcherClient(self.parts.path).prepare, remote))
        is_remote = self.pool.submit(marker.check, self.bucket)
        return pull(
            self.parts,
            self.bucket,
            self.pages,
            self.pool,
            ref=ref,
            hint=partial(self.bucket.get_within, hint_key(ref), _HINT_SECONDS) if is_first else None,
            below=below,
            lazy=remote if lazy else None,
            base=Base(self.remotes, remote, ref, below),
            require_remote=is_remote.result,
            progress=self.progress,
            **options,
        )._asdict()

    def forget(self, keys: list[str]) -> list[bool]:
        """Delete the records of shared results, and return whether each was there."""
        from castore.remote.keys import result_key

        there = [self.bucket.size(result_key(key)) is not None for key in keys]
        self.bucket.delete(map(result_key, keys))
        return there

    def results(self, prefix: str) -> list[Any]:
        """The fields of a `RemoteResult` for each shared result at or below a prefix, sorted."""
        from castore.remote.result_records import read_records

        found = []
        for number, (listed, record) in enumerate(read_records(self.bucket)):
            self.progress(number + 1, number + 2)  # how many there are is not known before the end
            if record is not None and f"{record.row.name}/".startswith(f"{prefix}/" if prefix else ""):
                row = record.row
                fields = [row.name, row.size, row.place.stored, row.created, listed.modified, row.expires]
                found.append(fields)
        return sorted(found)

    def usage(self) -> list[int]:
        """The fields of a `RemoteUsage`."""
        from castore.remote.keys import COMMITS, DICTIONARIES, HINTS, RESULTS, TREES

        counts = [len(commits.list_refs(self.bucket))]
        for folders in (("objects/", "packs/", DICTIONARIES), (TREES, COMMITS, HINTS), (RESULTS,)):
            sizes = [one.size for folder in folders for one in self.bucket.listing(folder)]
            counts += [len(sizes), sum(sizes)]
        return counts

    def refs(self) -> list[str]:
        """All refs, sorted."""
        return commits.list_refs(self.bucket)

    def log(self, ref: str, start: str | None, limit: int) -> list[dict[str, Any]]:
        """See `Remote.log`."""
        found: list[dict[str, Any]] = []
        first = find_commit(self.bucket, ref, start, self.pages)
        try:
            for digest, commit in commits.history(self.bucket, first):
                fields = {
                    key: value for key, value in commit._asdict().items() if key not in ("tree", "parent")
                }
                found.append({"commit": digest.hex(), **fields})
                if len(found) == limit:
                    break
        except (CorruptError, RemoteMissingError):  # `check` names that commit; those after it are of use
            if not found:
                raise
        return found

    def diff(self, old: tuple[str, str | None], new: tuple[str, str | None], prefix: str) -> list[Any]:
        """The fields of a `RemoteChange` for each name that differs in more than its place and its time."""
        trees = [
            Tree(
                commits.read_commit(self.bucket, find_commit(self.bucket, *side, self.pages)).tree,
                self.pages.read,
                self.pages.expect,
            )
            for side in (old, new)
        ]
        return [
            [change.name, change.old and change.old.size, change.new and change.new.size]
            for change in difference(trees[0], trees[1], prefix)
            if change.old is None
            or change.new is None
            or change.old._replace(place=change.new.place, created=change.new.created) != change.new
        ]
