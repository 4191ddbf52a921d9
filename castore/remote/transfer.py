"""The process that talks to a bucket: `main`, with a descriptor as its argument, started for one call.

Clients of object storage do not survive a fork, and a data loader forks. So no process that uses castore ever
opens a connection. A caller starts this process by exec, and writes the call to its standard input as a line
of JSON. The caller then reads lines of JSON from the pipe FD: progress, that the call waits for another one,
and in the end the result or the error. Standard input stays open for as long as the caller lives. At the end
of standard input the process stops.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from castore.errors import (
    CastoreError,
    CorruptError,
    InvalidValueError,
    RemoteDeniedError,
    RemoteError,
    RemoteMissingError,
)
from castore.parts import Parts
from castore.remote import commits, marker
from castore.remote.background_work import BackgroundWork
from castore.remote.base import Base
from castore.remote.bucket import Bucket
from castore.remote.error_values import describe
from castore.remote.fetcher_client import FetcherClient
from castore.remote.keys import FOLDERS
from castore.remote.metered_bucket import open_metered
from castore.remote.page_cache import PageCache
from castore.remote.process import look_less_for_cycles, open_parts
from castore.remote.pull import find_commit, pull
from castore.remote.remotes import Remotes
from castore.remote.retries import ENDED
from castore.remote.tree import Tree, difference
from castore.system.ballast import full_disk_error
from castore.system.single_flight import ComputeLocks

#: Requests under way at once.
_THREADS = 16
# Seconds between two reports of progress.
_REPORT_SECONDS = 0.1
# Seconds that an interrupted call has for its clean-up.
_PATIENCE = 10.0


class _Call:
    """One call, in an open store. Each imports what it needs, since the process is started for it alone."""

    def __init__(self, parts: Parts, bucket: Bucket, pool: ThreadPoolExecutor) -> None:
        mode = (parts.settings.folder_mode, parts.settings.file_mode)
        self.parts, self.bucket, self.pool = parts, bucket, pool
        self.remotes = Remotes(parts.path, parts.settings)
        self.pages = PageCache(parts.path, bucket, pool, mode, read_only=parts.read_only)

    @contextmanager
    def _alone(self, remote: str, ref: str) -> Iterator[None]:
        """One push or pull of a ref at a time: each begins with a base, and ends with the next one."""
        locks = ComputeLocks(self.parts.path / "locks" / "remotes", self.parts.settings.file_mode)
        key = f"{remote} {ref}"
        if (release := locks.claim(key)) is not None:
            try:
                yield
            finally:
                release()
            return
        _send({"waits": True})
        with locks.hold(key):
            yield

    def prepare(self, read_only: bool, single_writer: bool) -> list[str]:
        """Make the place a remote and try it out; returns what may surprise."""
        from castore.remote.probe import probe

        if not read_only:
            self._require_not_inside()
        marker.prepare(self.bucket, read_only=read_only)
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
                outer = open_metered("/".join(parts[:count]), self.parts.usage, None, None)
                with suppress(RemoteError):  # it is none, or nobody may look
                    marker.check(outer)
                    raise InvalidValueError(
                        f"{self.bucket.url} lies in a folder of the remote {outer.url}, whose `castore remote"
                        " gc` would delete it; choose another place"
                    )

    def push(self, remote: str, ref: str, bad: list[str], **options: Any) -> dict[str, Any]:
        from castore.remote.push import push

        distrusted = set(map(bytes.fromhex, bad))
        self.pages.restore(distrusted)
        with self._alone(remote, ref):
            return push(
                self.parts,
                self.bucket,
                self.pages,
                self.pool,
                remote=remote,
                ref=ref,
                base=Base(self.remotes, remote, ref),
                bad=distrusted,
                progress=_Progress(),
                **options,
            )._asdict()

    def gc(
        self, keep_commits: int | None, grace: float, unused: float | None, dry_run: bool
    ) -> dict[str, Any]:
        from castore.remote.collect import collect

        return collect(
            self.bucket,
            self.pages,
            keep_commits=keep_commits,
            grace=grace,
            unused=unused,
            dry_run=dry_run,
            progress=_Progress(),
        )._asdict()

    def check(self, remote: str, deep: bool, read_only: bool) -> dict[str, Any]:
        from castore.remote.check import check
        from castore.remote.probe import probe

        progress = _Progress()
        found = check(
            self.bucket, self.pages, self.pool, self.remotes.refs(remote), deep=deep, progress=progress
        )
        try:
            warnings = probe(self.bucket, writes=not read_only).sentences
        except (
            RemoteError
        ) as error:  # what was found counts, also if no more can be tried, on a full disk say
            warnings = (str(error),)
        return found._replace(warnings=warnings)._asdict()

    def pull(self, remote: str, ref: str, below: str, lazy: bool, **options: Any) -> dict[str, Any]:
        if lazy:  # somebody reads soon: the fetcher starts, and connects, meanwhile
            BackgroundWork().submit(partial(FetcherClient(self.parts.path).prepare, remote))
        is_remote = self.pool.submit(marker.check, self.bucket)
        with self._alone(remote, ref):
            return pull(
                self.parts,
                self.bucket,
                self.pages,
                self.pool,
                ref=ref,
                below=below,
                lazy=remote if lazy else None,
                base=Base(self.remotes, remote, ref, below),
                require_remote=is_remote.result,
                progress=_Progress(),
                **options,
            )._asdict()

    def forget(self, keys: list[str]) -> list[bool]:
        from castore.remote.keys import result_key

        there = [self.bucket.size(result_key(key)) is not None for key in keys]
        self.bucket.delete(map(result_key, keys))
        return there

    def results(self, prefix: str) -> list[Any]:
        from castore.remote.result_records import read_records

        progress, found = _Progress(), []
        for number, (listed, record) in enumerate(read_records(self.bucket)):
            progress(number + 1, number + 2)  # how many there are is not known before the end
            if record is not None and f"{record.row.name}/".startswith(f"{prefix}/" if prefix else ""):
                row = record.row
                fields = [row.name, row.size, row.place.stored, row.created, listed.modified, row.expires]
                found.append(fields)
        return sorted(found)

    def usage(self) -> list[int]:
        from castore.remote.keys import COMMITS, RESULTS, TREES

        counts = [len(commits.list_refs(self.bucket))]
        for folders in (("objects/", "packs/", "dicts/"), (TREES, COMMITS), (RESULTS,)):
            sizes = [one.size for folder in folders for one in self.bucket.listing(folder)]
            counts += [len(sizes), sum(sizes)]
        return counts

    def refs(self) -> list[str]:
        return commits.list_refs(self.bucket)

    def log(self, ref: str, start: str | None, limit: int) -> list[dict[str, Any]]:
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
            or change.old._replace(place=change.new.place) != change.new
        ]


class _Progress:
    """Reports bytes from time to time, and in any case the last of them. Ends the uploads of an interrupted
    call.
    """

    #: Whether the call was interrupted.
    is_over = False

    def __init__(self) -> None:
        self._next = 0.0
        self._lock = threading.Lock()

    def __call__(self, done: int, total: int) -> None:
        if self.is_over:
            raise KeyboardInterrupt
        now = time.monotonic()
        with self._lock:
            if now < self._next and done < total:
                return
            self._next = now + _REPORT_SECONDS
            _send({"progress": [done, total]})


def _send(message: dict[str, Any]) -> None:
    line = memoryview(json.dumps(message).encode() + b"\n")
    while line:
        line = line[os.write(int(sys.argv[1]), line) :]


def _end_with_caller() -> None:
    """Interrupt the call once the caller is gone, or has closed its end; end for good if that takes long."""
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os.kill(os.getpid(), signal.SIGUSR1)
    time.sleep(_PATIENCE)
    os._exit(1)


def _interrupt(*_: object) -> None:
    _Progress.is_over = True
    ENDED.set()
    raise KeyboardInterrupt


def main() -> int:
    """Read a call, do it, and write what comes of it."""
    try:
        return _serve()
    except (KeyboardInterrupt, BrokenPipeError):
        return 1


def _serve() -> int:
    # Ctrl-C reaches this process too: it is the caller who decides what is to end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, _interrupt)
    line = b""
    while not line.endswith(b"\n"):
        piece = os.read(sys.stdin.fileno(), 65_536)
        if not piece:
            return 1
        line += piece
    request = json.loads(line)
    look_less_for_cycles()
    threading.Thread(target=_end_with_caller, daemon=True).start()
    try:
        _send({"result": _do(request)})
    except BrokenPipeError:
        raise
    except CastoreError as error:
        _send({"error": describe(error)})
    except OSError as error:
        _send({"error": describe(full_disk_error(Path(request["store"]), error) or error)})
    return 0


def _bucket(parts: Parts, request: dict[str, Any]) -> Bucket:
    return open_metered(request["url"], parts.usage, request["requests"], request["rate"])


def _do(request: dict[str, Any]) -> Any:
    parts = open_parts(Path(request["store"]), **request["options"])
    with ThreadPoolExecutor(_THREADS) as pool:
        try:
            bucket = _bucket(parts, request)
            if request["call"] not in ("prepare", "pull"):  # these do it themselves
                marker.check(bucket)  # a file system that is not mounted must not look like an empty remote
            call: Callable[..., Any] = getattr(_Call(parts, bucket, pool), request["call"])
            return call(**request["arguments"])
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        finally:
            parts.close()
