"""The fetcher: `python -m castore.remote.fetcher STORE`, the one process of a store that fetches for readers.

Readers ask the fetcher over a socket in the store and wait (fetcher_client.py). So nobody else opens a
connection, and bytes that many processes want come once. The fetcher keeps pages, blobs and parts of objects
in the store, where the readers find them. The first request starts the fetcher by exec. The fetcher ends some
seconds after the last request, and may be killed at any time: the next reader starts another, and asks again.

The fetcher trusts its readers as little as the remote: bytes are kept under the digest that they were checked
against, and small ones that come for the first time in received packs, which vouch for no digest. The fetcher
writes to a remote in one case: the results of computations that a reader offers (result_sharing.py). Must
never: move a ref, or fork once it serves.
"""

from __future__ import annotations

import fcntl
import logging
import os
import socket
import sqlite3
import sys
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from castore.errors import (
    CastoreError,
    CorruptError,
    FullError,
    RemoteDeniedError,
    RemoteError,
    RemoteMissingError,
    RemoteUnreachableError,
    TooLargeError,
)
from castore.index import places
from castore.index.places import RemotePlace
from castore.parts import Parts
from castore.records import AWAY, DIGEST_SIZE, EntrySpec
from castore.remote import marker, page_trim
from castore.remote.bucket import Patience
from castore.remote.claims import Claim, Claims
from castore.remote.error_values import describe
from castore.remote.fetch import BlobFetcher
from castore.remote.fetcher_client import storage_timeout
from castore.remote.kept_bytes import LARGEST_PART, Part, blob_name
from castore.remote.keys import SETTINGS, object_key
from castore.remote.messages import LOCK, SOCKET, receive, send
from castore.remote.metered_bucket import open_metered
from castore.remote.nearby import Nearby, row_of
from castore.remote.page_cache import PageCache
from castore.remote.pages import FRAME, Place, Row, frame_of
from castore.remote.process import look_less_for_cycles, open_parts
from castore.remote.pull import find_commit
from castore.remote.remotes import Remotes, RemoteSettings
from castore.remote.result_sharing import Answer, Offers, ResultSharing
from castore.remote.shared_results import SILENT_SECONDS, lookup_timeout
from castore.remote.unkept_frames import check_frames, frame_span
from castore.system.ballast import full_disk_error
from castore.system.local_sockets import address
from castore.system.temporary import give_to_owner, open_with_mode
from castore.write.open_pack import Vanished
from castore.write.staging import Staged

log = logging.getLogger("castore")

_K = TypeVar("_K", bound=Hashable)
_T = TypeVar("_T")

#: Seconds without a request after which it ends, and the same after a reader's request `done`.
IDLE_SECONDS, DONE_SECONDS = 10.0, 0.5
# Requests to storage under way at once, and pieces of work that wait for them.
_CONNECTIONS, _WORKERS = 16, 32
# Connections that are opened before they are needed.
_CONNECTIONS_AHEAD = 7
# Results that are offered at once.
_OFFERS = 4
# Bytes of neighbouring parts that come in one request.
_REQUEST_BYTES = 2 << 20
# Blobs that are committed together at first, for a reader waits, and later; and their bytes at most.
_FIRST_BATCH, _BATCH, _BATCH_BYTES = 256, 1000, 8 << 20
# Blobs that are fetched ahead together, and how many such groups are under way.
_AHEAD_BLOBS, _AHEAD = 1000, 3
# Bytes, and part of the budget, that are kept between two collections of the store.
_TIDY_BYTES, _TIDY_SHARE = 32 << 20, 0.25
# Seconds for which a remote that gave no answer is not asked again.
_DOWN_SECONDS = 5.0
_BACKLOG = 128
# The methods of `Fetcher` that readers may ask for.
_CALLS = frozenset(
    (
        "connect",
        "ref",
        "pages",
        "blobs",
        "near_blobs",
        "prefetch",
        "parts",
        "frames",
        "find_result",
        "keep_result",
        "claim_result",
        "offer_result",
        "find_results",
        "keep_results",
        "offer_results",
        "finish_offers",
    )
)
# Seconds for which a new fetcher waits for the end of the one before it.
_HANDOVER_SECONDS = 1.0


class _Source:
    """A remote, and how it does.

    Args:
        parts: of the store.
        settings: of the remote.
        pool: for requests.
        timeout: seconds after which a request without an answer is an error.
        down_seconds: for which a remote that gave no answer is not asked again.
    """

    def __init__(
        self,
        parts: Parts,
        settings: RemoteSettings,
        pool: ThreadPoolExecutor,
        timeout: float,
        down_seconds: float,
    ) -> None:
        mode = (parts.settings.folder_mode, parts.settings.file_mode)
        self.settings = settings
        patience = Patience.within(timeout)
        self.bucket = open_metered(
            settings.url, requests=settings.requests, rate=settings.rate, patience=patience
        )
        self.bucket.report_to(parts.usage)
        self._down_seconds = down_seconds
        self.pages = PageCache(parts.path, self.bucket, pool, mode)
        self._down: tuple[float, str] = (0.0, "")
        self._answered = 0.0
        self._lock = threading.Lock()
        #: Whether the place is known to be a remote.
        self.is_checked = False
        self.claims = Claims(self.bucket)

    def check(self) -> None:
        """Check that the place is a remote, once."""
        with self._lock:
            if not self.is_checked:
                self.require(marker.check, self.bucket)
                self.is_checked = True

    def require(self, work: Callable[..., _T], *arguments: Any) -> _T:
        """Do some work with the bucket.

        If it could not be reached, and nobody else has had an answer meanwhile, all work fails at once for
        some seconds.

        Raises:
            RemoteUnreachableError: it gives no answer, or gave none a moment ago, or is no remote any more.
        """
        until, why = self._down
        if time.monotonic() < until:
            raise RemoteUnreachableError(why)
        began = time.monotonic()
        try:
            done = work(*arguments)
        except RemoteMissingError as error:
            self.require_remote(error)
            raise
        except RemoteUnreachableError as error:
            if self._answered < began:
                self._down = time.monotonic() + self._down_seconds, str(error)
            raise
        self._answered = time.monotonic()
        return done

    def require_remote(self, error: RemoteMissingError) -> None:
        """Check that an object is missing, and not all of them: a file system may not be mounted.

        Raises:
            RemoteUnreachableError: the place is no remote any more.
        """
        try:
            marker.check(self.bucket)
        except RemoteMissingError as none:
            raise RemoteUnreachableError(str(none)) from error


class _Wanted(NamedTuple):
    """A blob that is to be fetched.

    Attributes:
        row: of the tree, or made of the blob's place.
        is_away: names of the store wait for its bytes. Otherwise somebody reads a mount of the remote.
        has_come: its bytes have been here before, so somebody may have found them to be damaged.
    """

    row: Row
    is_away: bool
    has_come: bool

    @classmethod
    def at(cls, place: RemotePlace) -> _Wanted:
        """A blob that is away."""
        return cls(row_of(place), is_away=True, has_come=place.fetched > 0)


class _Coming:
    """The fetches under way, by key. Each thing is fetched once, however many readers ask for it.

    There may be thousands of keys, and only those that a reader waits for have a future.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._futures: dict[Hashable, Future[None] | None] = {}

    def claim(self, keys: Iterable[_K], waited: Iterable[_K]) -> tuple[list[Future[None]], _Claimed[_K]]:
        """The futures of those keys that are waited for, and the keys that the caller must see to: nobody
        else does.
        """
        with self._lock:
            mine = [key for key in keys if key not in self._futures]
            self._futures.update(dict.fromkeys(mine))
            found: list[Future[None]] = []
            for key in waited:
                if key in self._futures:
                    future = self._futures[key] or Future()
                    self._futures[key] = future
                    found.append(future)
        return found, _Claimed(self, mine)

    def has(self, key: Hashable) -> bool:
        """Whether the key's fetch is under way."""
        with self._lock:
            return key in self._futures

    def end(self, keys: Iterable[Hashable], error: BaseException | None = None) -> None:
        """Complete the futures of the keys: with None, or with the error why the keys are not there."""
        with self._lock:
            futures = [self._futures.pop(key, None) for key in keys]
        for future in filter(None, futures):
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)


class _Claimed(Generic[_K]):
    """Keys whose fetches one caller has begun. Each ends once: somebody may claim it again behind that.

    Attributes:
        keys: all of them, also those that have ended.
    """

    def __init__(self, coming: _Coming, keys: list[_K]) -> None:
        self._coming = coming
        self.keys = keys
        self._lock = threading.Lock()
        self._left = set(keys)

    def end(self, keys: Iterable[_K], error: BaseException | None = None) -> None:
        """Complete the futures of some of them that have not ended."""
        with self._lock:
            ended = self._left.intersection(keys)
            self._left -= ended
        self._coming.end(ended, error)


class Fetcher:
    """Answers the requests of readers. Its public methods are the requests, and are called from any thread.

    Args:
        parts: of the store.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._remotes = Remotes(parts.path, parts.settings)
        self._nearby = Nearby(parts)
        self._looking = threading.Lock()
        self._network = ThreadPoolExecutor(_CONNECTIONS, "network")
        self._work = ThreadPoolExecutor(_WORKERS, "work")
        self._ahead = ThreadPoolExecutor(_AHEAD, "ahead")
        self._groups_ahead = 0
        self._offering = ThreadPoolExecutor(_OFFERS, "offers")
        self._offers = Offers(self._offering)
        self._lock = threading.Lock()
        self._commit_lock = threading.Lock()
        self._kept = 0
        self._sources: dict[tuple[str, bool], _Source] = {}
        #: Distinguishes this fetcher from the one before.
        self.id = uuid.uuid4().hex
        self._coming = _Coming()

    def _source(self, name: str, *, hurries: bool = False, is_checked: bool = True) -> _Source:
        """A remote by its name.

        Args:
            name: of the remote.
            hurries: give up soon, and for long: the work could be done without.
            is_checked: check that the place is a remote.
        """
        settings = self._remotes.get(name)
        with self._lock:
            source = self._sources.get((name, hurries))
            if source is None or source.settings != settings:
                patience = (
                    (lookup_timeout(), SILENT_SECONDS) if hurries else (storage_timeout(), _DOWN_SECONDS)
                )
                source = _Source(self._parts, settings, self._network, *patience)
                self._sources[name, hurries] = source
        if is_checked:
            source.check()
        return source

    def connect(self, remote: str) -> None:
        """Be ready for requests that are about to come."""
        source = self._source(remote, is_checked=False)
        source.bucket.connect(_CONNECTIONS_AHEAD, SETTINGS)
        source.check()

    def ref(self, remote: str, ref: str, start: str | None) -> tuple[bytes, bytes, float]:
        """The commit that ``REF`` or ``REF@COMMIT`` means: its digest, its tree, and its time."""
        source = self._source(remote, is_checked=False)
        # Meanwhile, unless it was done: all connections may be busy for long.
        is_remote = None if source.is_checked else self._network.submit(source.check)
        try:
            digest = source.require(find_commit, source.bucket, ref, start, source.pages)
        finally:
            if is_remote is not None:
                is_remote.result()
        commit = source.require(source.pages.commit, digest)
        return digest, commit.tree, commit.time

    def pages(self, remote: str, pages: list[bytes], first: int) -> None:
        """Have pages in the store's cache. The answer comes when the first ones are there."""
        source = self._source(remote)

        def begin(mine: _Claimed[bytes]) -> None:
            for digest in mine.keys:
                self._network.submit(self._end, mine, [digest], partial(self._fetch_page, source, digest))

        _wait(self._begin(pages, pages[:first], begin))

    def blobs(self, remote: str, rows: list[list[Any]], first: int) -> None:
        """Have the blobs of rows in the store, whole. The answer comes when the first ones are there.

        Args:
            remote: its name.
            rows: fields of `Row`.
            first: how many are waited for.
        """
        source = self._source(remote)
        known = self._parts.index.blobs_of([row[1] for row in rows])
        wanted = {
            row[1]: _Wanted(_row(row), row[1] in known and known[row[1]].pack == AWAY, row[1] in known)
            for row in rows
            if row[1] not in known or not known[row[1]].is_here
        }
        _wait(self._begin_blobs(source, wanted, [row[1] for row in rows[:first]]))

    def near_blobs(self, remote: str, digests: list[bytes]) -> None:
        """Have blobs in the store that the index has places of, and begin to fetch those near them.

        Args:
            remote: its name.
            digests: up to a thousand.
        """
        source = self._source(remote)
        with self._looking:  # else all workers of a loader look for what lies near at the same time
            found = places.of_away_blobs(self._parts.index, digests)
            away = [place for place in found.values() if place.remote == remote]
            # Those near the others are under way, too.
            near = self._nearby.of([place for place in away if not self._coming.has(place.digest)])
            wanted = {place.digest: _Wanted.at(place) for place in (*away, *near)}
            futures = self._begin_blobs(source, wanted, [place.digest for place in away])
        _wait(futures)

    def prefetch(self, digests: list[bytes]) -> None:
        """Begin to fetch blobs that are away, in that order. The answer comes at once."""
        groups = range(0, len(digests), _AHEAD_BLOBS)
        with self._lock:
            self._groups_ahead += len(groups)
        for start in groups:
            self._ahead.submit(self._fetch_ahead, digests[start : start + _AHEAD_BLOBS])

    def _fetch_ahead(self, digests: list[bytes]) -> None:
        try:
            by_remote: dict[str, dict[bytes, _Wanted]] = defaultdict(dict)
            for digest, place in places.of_away_blobs(self._parts.index, digests).items():
                by_remote[place.remote][digest] = _Wanted.at(place)
            for remote, wanted in by_remote.items():
                _, mine = self._coming.claim(wanted, ())
                # Readers of one get its error.
                self._end(mine, mine.keys, partial(self._fetch_from, remote, wanted, mine))
        finally:
            with self._lock:
                self._groups_ahead -= 1

    def _fetch_from(self, remote: str, wanted: dict[bytes, _Wanted], mine: _Claimed[bytes]) -> None:
        source = self._source(remote)
        source.require(self._fetch_blobs, source, wanted, mine)

    def _begin_blobs(
        self, source: _Source, wanted: dict[bytes, _Wanted], waited: list[bytes]
    ) -> list[Future[None]]:
        def begin(mine: _Claimed[bytes]) -> None:
            fetch = partial(source.require, self._fetch_blobs, source, wanted, mine)
            self._work.submit(self._end, mine, mine.keys, fetch)

        return self._begin(wanted, waited, begin)

    def parts(self, remote: str, digest: bytes, parts: list[list[Any]], first: int) -> None:
        """Have parts of an object in the store. The answer comes when the first ones are there.

        Args:
            remote: its name.
            digest: of the object.
            parts: fields of `Part`.
            first: how many are waited for.
        """
        source = self._source(remote)
        wanted = [Part(*fields) for fields in parts]
        if len(digest) != DIGEST_SIZE or not all(part.is_sound for part in wanted):
            raise CorruptError(f"a tree of {source.bucket.url} has frames that cannot be, of {digest.hex()}")
        named = {part.name(digest): part for part in wanted}
        found = self._parts.index.find_many(list(named))
        missing = [name for name in named if name not in found or not found[name].blob.is_here]

        def begin(mine: _Claimed[str]) -> None:
            # Nobody waits longer because of parts that are fetched ahead.
            for names in (waited.intersection(mine.keys), {*mine.keys} - waited):
                for near in _neighbours([named[name] for name in names]):
                    keys = [part.name(digest) for part in near]
                    fetch = partial(self._fetch_parts, source, digest, near, mine)
                    self._network.submit(self._end, mine, keys, fetch)

        waited = set(list(named)[:first])
        _wait(self._begin(missing, waited, begin))

    def frames(self, remote: str, row: list[Any], first: int) -> bytes:
        """Stored bytes of a blob, from one of its frames on, that are kept nowhere. Their dictionary is.

        Args:
            remote: its name.
            row: fields of `Row`.
            first: number of the frame.
        """
        source, wanted = self._source(remote), _row(row)
        place = wanted.place
        stop, start, end = frame_span(wanted, first)
        if end - start > LARGEST_PART:
            raise CorruptError(f"a tree of {source.bucket.url} has frames that cannot be, of {wanted.name!r}")
        key = object_key(place.object, packed=place.is_packed)
        stored = source.require(source.bucket.get_range, key, place.offset + start, place.offset + end)
        frames = check_frames(stored, wanted, first, stop, f"{source.bucket.url}/{key}")
        if place.is_packed:
            blobs = BlobFetcher(self._parts, source.bucket, self._network)
            source.require(blobs.have_dictionary, wanted, frames[0])
        return stored

    def find_result(self, remote: str, name: str, lifetime: float | None, known: bytes | None) -> Answer:
        """See `ResultSharing.find`."""
        source = self._source(remote, hurries=True)
        answer = source.require(self._results(source).find, name, lifetime, known)
        source.bucket.count(found=int(answer.is_here))
        return answer

    def keep_result(self, remote: str, row: list[Any]) -> None:
        """See `ResultSharing.keep`."""
        source = self._source(remote)
        source.require(self._results(source).keep, _row(row))
        source.bucket.count(found=1)

    def claim_result(self, remote: str, name: str) -> Claim | None:
        """Claim a computation; see `Claims.take`."""
        source = self._source(remote, hurries=True)
        # Else claims might fill a folder on which nothing is mounted.
        source.require(marker.check, source.bucket)
        return source.require(source.claims.take, name)

    def offer_result(
        self, remote: str, name: str, refused: bytes | None, keep: bool, claim: Claim | None = None
    ) -> tuple[str, str | None]:
        """Begin `ResultSharing.offer`, and then release the claim; returns this fetcher's id, and why an
        earlier one failed, or None.
        """
        source = self._source(remote)

        def offer() -> None:
            try:
                source.require(marker.check, source.bucket)
                source.require(self._results(source).offer, name, refused, keep)
                source.bucket.count(offered=1)
            finally:
                if claim is not None:
                    claim.release()

        return self.id, self._offers.begin(offer)

    def find_results(self, remote: str, names: list[str], lifetime: float | None) -> list[Row]:
        """See `ResultSharing.find`, of several names; returns those whose bytes are still to be fetched."""
        source = self._source(remote, hurries=True)
        find = partial(self._results(source).find, lifetime=lifetime)
        answers = source.require(lambda: list(self._network.map(find, names)))
        source.bucket.count(found=sum(answer.is_here for answer in answers))
        return [answer.row for answer in answers if answer.row is not None]

    def keep_results(self, remote: str, rows: list[list[Any]]) -> None:
        """See `ResultSharing.keep`. Results that are damaged or gone, or have no room, are left out."""
        source = self._source(remote)
        keep = self._results(source).keep

        def try_to_keep(row: Row) -> int:
            try:
                source.require(keep, row)
            except (CorruptError, RemoteMissingError, FullError, TooLargeError) as error:
                log.info("a shared result is passed over: %s", error)
                return 0
            return 1

        source.bucket.count(found=sum(self._work.map(try_to_keep, map(_row, rows))))

    def offer_results(self, remote: str, names: list[str]) -> tuple[str, str | None]:
        """`offer_result` for several that nobody has claimed, and that stay in the store."""
        source = self._source(remote)

        def offer() -> None:
            source.require(marker.check, source.bucket)
            damaged: CorruptError | None = None
            for name in names:
                try:
                    source.require(self._results(source).offer, name, None)
                except CorruptError as error:  # that one alone
                    damaged = error
                else:
                    source.bucket.count(offered=1)
            if damaged is not None:
                raise damaged

        return self.id, self._offers.begin(offer)

    def finish_offers(self, seconds: float) -> tuple[str, int, str | None]:
        """Wait for offers; returns this fetcher's id, and the rest as `Offers.wait`."""
        left, failure = self._offers.wait(seconds)
        if not left:  # a program is about to end, after which somebody may look at the counts
            self._parts.usage.flush_some()
        return self.id, left, failure

    @property
    def is_busy(self) -> bool:
        """Whether work is under way for which nobody waits."""
        return self._groups_ahead > 0 or self._offers.is_busy

    def _results(self, source: _Source) -> ResultSharing:
        return ResultSharing(
            self._parts,
            source.bucket,
            source.settings.name,
            self._network,
            self._commit,
            renews=not (source.settings.read_only or source.settings.single_writer),
        )

    def _begin(
        self, keys: Iterable[_K], waited: Iterable[_K], begin: Callable[[_Claimed[_K]], None]
    ) -> list[Future[None]]:
        """Begin what nobody else has begun; returns the futures of some of it."""
        futures, mine = self._coming.claim(keys, waited)
        if mine.keys:
            begin(mine)
        return futures

    def _end(self, mine: _Claimed[_K], keys: Sequence[_K], work: Callable[[], object]) -> None:
        """Do some work, and complete the futures of those keys that have not ended meanwhile."""
        try:
            work()
        except BaseException as error:  # noqa: BLE001 (those who wait raise it)
            mine.end(keys, error)
        else:
            mine.end(keys)

    def _fetch_page(self, source: _Source, digest: bytes) -> None:
        source.require(source.pages.load, digest)

    def _fetch_blobs(self, source: _Source, wanted: dict[bytes, _Wanted], mine: _Claimed[bytes]) -> None:
        batch: list[tuple[_Wanted, Staged]] = []
        size, limit = 0, _FIRST_BATCH
        is_there = False

        def tell_of_loss(row: Row, error: CorruptError | RemoteMissingError) -> None:
            """A blob that is damaged or gone is no reason to refuse its neighbours, if not all is gone."""
            nonlocal is_there
            if isinstance(error, RemoteMissingError) and not is_there:
                source.require_remote(error)
                is_there = True  # a lost pack has a thousand blobs
            mine.end([row.digest], error)

        blobs = BlobFetcher(self._parts, source.bucket, self._network, tell_of_loss)
        rows = {digest: wanted[digest].row for digest in mine.keys}
        unread = {digest for digest in mine.keys if not wanted[digest].has_come}
        try:
            with closing(blobs.staged([rows], left_to_readers=unread)) as coming:
                for row, staged in coming:
                    batch.append((wanted[row.digest], staged))
                    size += row.place.stored
                    if len(batch) >= limit or size >= _BATCH_BYTES:
                        ready, batch, size, limit = batch, [], 0, _BATCH
                        self._keep(ready)
                        mine.end([staged.digest for _, staged in ready])
            self._keep(batch)
        except BaseException:
            for _, staged in batch:
                staged.discard()
            raise

    def _keep(self, batch: Sequence[tuple[_Wanted, Staged]]) -> None:
        named = [
            (_nameless(blob_name(staged.digest)), staged) for wanted, staged in batch if not wanted.is_away
        ]
        self._commit(named, [staged for wanted, staged in batch if wanted.is_away])

    def _fetch_parts(self, source: _Source, digest: bytes, parts: list[Part], mine: _Claimed[str]) -> None:
        key, start, end = object_key(digest, packed=False), parts[0].start, parts[-1].end
        data = source.require(source.bucket.get_range, key, start, end)
        view = memoryview(data)
        coming: list[tuple[str, memoryview]] = []
        for part in parts:
            stored, name = view[part.start - start : part.end - start], part.name(digest)
            try:
                _check_frames(stored, part, f"{source.bucket.url}/{key}")
            except CorruptError as error:  # of this part alone
                mine.end([name], error)
                continue
            coming.append((name, stored))
        stage = partial(self._parts.writer.stage, codec="none", level=None)
        try:
            self._commit([(_nameless(name), stage(stored)) for name, stored in coming])
        except Vanished:  # equal bytes that the store had were evicted in order to make room
            self._commit([(_nameless(name), stage(stored, reuse=False)) for name, stored in coming])

    def _commit(self, specs: Sequence[tuple[EntrySpec, Staged]], restored: Sequence[Staged] = ()) -> None:
        with self._commit_lock:  # else all threads would find the same room within the budget
            self._parts.writer.restore(restored)
            if specs:
                self._parts.writer.name(specs)
            self._kept += sum(staged.stored for staged in (*restored, *(staged for _, staged in specs)))
            budget = self._parts.settings.max_size
            is_due = budget is not None and self._kept > max(_TIDY_BYTES, budget * _TIDY_SHARE)
            self._kept = 0 if is_due else self._kept
        if is_due:
            self._work.submit(self._tidy)

    def _tidy(self) -> None:
        """Free the disk space of evicted bytes in packs, and of the journal's old records."""
        from castore.gc import GRACE_SECONDS, collect  # not before it is needed: readers wait for the start

        with suppress(CastoreError, OSError):  # no reader's business; the next time tries again
            collect.run(self._parts, self._parts.settings.max_size, GRACE_SECONDS)
            page_trim.trim(self._parts)

    def flush(self) -> None:
        """Write the counts of requests from time to time."""
        self._parts.usage.flush_if_due()

    def close(self) -> None:
        """End what is under way, and close the store."""
        for pool in (self._ahead, self._work, self._offering, self._network):
            pool.shutdown(wait=False, cancel_futures=True)
        self._parts.close()


def _wait(futures: Sequence[Future[None]]) -> None:
    """Wait for all, and raise the first error: a caller that asked for many finds all others there then."""
    wait(futures)
    for future in futures:
        future.result()


def _nameless(name: str) -> EntrySpec:
    """The entry of bytes that readers of a remote keep, under a name that no listing shows."""
    return EntrySpec(name, "bytes", None, None, False)


def _row(fields: list[Any]) -> Row:
    return Row._make([*fields[:-1], Place(*fields[-1])])


def _neighbours(parts: list[Part]) -> Iterator[list[Part]]:
    """Parts that lie next to each other, in requests of some megabytes."""
    near: list[Part] = []
    for part in sorted(parts):
        if near and (part.start != near[-1].end or part.end - near[0].start > _REQUEST_BYTES):
            yield near
            near = []
        near.append(part)
    if near:
        yield near


def _check_frames(stored: memoryview, part: Part, where: str) -> None:
    at = 0
    for number, (length, _) in enumerate(FRAME.iter_unpack(part.frames), part.first):
        if frame_of(stored[at : at + length]) != part.frame(number):
            raise CorruptError(
                f"frame {number} of {where} differs from what the tree says;"
                " `castore remote check --deep` tells more",
                where=where,
            )
        at += length


class _Server:
    """The socket, and the life of the process."""

    def __init__(self, store: Path, fetcher: Fetcher, mode: int) -> None:
        path = store / SOCKET
        self._store, self._path = store, path
        self._fetcher = fetcher
        self._lock = threading.Lock()
        self._active = 0
        self._until = time.monotonic() + IDLE_SECONDS
        self._is_closing = False  # after a denial: it ends as soon as the reader has the answer
        self._is_refused = threading.Event()
        path.unlink(missing_ok=True)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with address(path) as short:
            self._socket.bind(short)
        give_to_owner(path, path.parent)
        path.chmod(mode)
        self._inode = path.stat().st_ino
        self._socket.listen(_BACKLOG)
        self._socket.settimeout(0.1)

    def serve(self) -> None:
        """Serve until nobody asks any more, or the store is gone."""
        while True:
            try:
                connection, _ = self._socket.accept()
            except TimeoutError:
                if self._is_over():
                    break
                with suppress(sqlite3.Error):  # the next reader learns of it
                    self._fetcher.flush()  # what came since the last answer: `castore stat` has it soon
                continue
            except OSError:  # nobody listens any more: see `_stop_listening`
                self._is_refused.wait()
                break
            connection.settimeout(None)
            with self._lock:
                self._active += 1
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()
        # A reader that still connects finds the connection closed without an answer, and asks another.
        self._path.unlink(missing_ok=True)
        self._socket.close()

    def _stop_listening(self) -> None:
        """Have nobody connect any more: whoever asks next may have other credentials in the environment."""
        self._is_closing = True
        self._path.unlink(missing_ok=True)
        self._socket.shutdown(socket.SHUT_RDWR)

    def _is_over(self) -> bool:
        if self._is_closing:  # newer kernels give a timeout for a socket that was shut down
            return self._is_refused.is_set()
        with suppress(OSError):
            if self._path.stat().st_ino == self._inode:
                with self._lock:
                    is_idle = not self._active and time.monotonic() > self._until
                return is_idle and not self._fetcher.is_busy
        return True

    def _answer(self, connection: socket.socket) -> None:
        idle, is_refused = IDLE_SECONDS, False
        try:
            with connection:
                request = receive(connection)
                if request is None:
                    return
                if request == {"do": "done"}:
                    idle = DONE_SECONDS
                    return
                answer = self._do(request)
                is_refused = "error" in answer and answer["error"]["kind"] == RemoteDeniedError.__name__
                if is_refused:
                    self._stop_listening()
                claim = answer.get("result")
                if isinstance(claim, Claim):
                    self._hold(claim, connection)
                else:
                    with suppress(BrokenPipeError, ConnectionResetError):  # the reader is gone
                        send(connection, answer)
            with suppress(sqlite3.Error):  # the next reader learns of it
                self._fetcher.flush()
        finally:
            if is_refused:
                self._is_refused.set()
            with self._lock:
                self._active -= 1
                self._until = time.monotonic() + idle

    def _hold(self, claim: Claim, connection: socket.socket) -> None:
        """Keep a claim for as long as the reader computes: until its result is offered, or it is gone."""
        threading.Thread(target=claim.keep, daemon=True).start()
        is_offered = False
        try:
            with suppress(BrokenPipeError, ConnectionResetError):
                send(connection, {"result": True})
                request = receive(connection)
                if request is not None:
                    answer = self._do(request | {"claim": claim})
                    is_offered = "result" in answer
                    send(connection, answer)
        finally:
            if not is_offered:
                claim.release()

    def _do(self, request: dict[str, Any]) -> dict[str, Any]:
        call = request.pop("do", None)
        if call not in _CALLS:
            return {"error": describe(RemoteError(f"the fetcher knows no {call!r}; end it, and read again"))}
        try:
            return {"result": getattr(self._fetcher, call)(**request)}
        except CastoreError as error:
            return {"error": describe(error)}
        except Vanished:
            return {"error": describe(RemoteError("gc removed bytes while they were kept; read again"))}
        except OSError as error:
            return {"error": describe(full_disk_error(self._store, error) or error)}
        except Exception as error:  # noqa: BLE001 (the reader must learn of it: nobody else is here)
            return {"error": describe(RemoteError(f"the fetcher failed: {type(error).__name__}: {error}"))}


def _lock(lock: int, path: Path) -> bool:
    """Take the lock; False if a fetcher has it that listens, or that neither begins nor ends."""
    until = time.monotonic() + _HANDOVER_SECONDS
    while True:
        with suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        if path.exists() or time.monotonic() > until:
            return False
        time.sleep(0.005)


def main() -> int:
    """Serve, unless the store has a fetcher already. The first process ends as soon as the second runs."""
    store = Path(sys.argv[1])
    if os.fork():
        os._exit(0)
    os.setsid()
    look_less_for_cycles()
    parts = open_parts(store, max_size=None, durable=False)
    try:
        lock = open_with_mode(store / LOCK, os.O_RDWR, parts.settings.file_mode)
        if not _lock(lock, store / SOCKET):
            return 0
        fetcher = Fetcher(parts)
        try:
            _Server(store, fetcher, parts.settings.file_mode).serve()
        finally:
            fetcher.close()
    finally:
        parts.close()
    return 0


if __name__ == "__main__":
    # A thread that waits for a storage would keep the process, and its lock from the next one.
    os._exit(main())
