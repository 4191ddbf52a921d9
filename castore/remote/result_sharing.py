"""The fetcher's side of shared results: looks a computation's result up in a bucket, and offers one.

Nothing depends on a record. A result that is gone, damaged, expired or of a kind that runs code when it is
loaded counts as none, and the computation is done again. Must never: name a result whose bytes are not in the
bucket; replace a record that the caller has not refused.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import closing, suppress
from typing import NamedTuple

from castore.errors import CorruptError, RemoteError, RemoteMissingError, TooLargeError
from castore.gc.collect import remove_blobs
from castore.parts import Parts
from castore.records import Entry, EntrySpec, has_expired
from castore.remote.bucket import Bucket, Versioned
from castore.remote.collection_state import Guard
from castore.remote.fetch import BlobFetcher, refuse_pickle
from castore.remote.keys import dictionary_key, result_key
from castore.remote.pages import Place, Row, digest_of
from castore.remote.result_records import (
    INLINE_BYTES,
    RENEW_SECONDS,
    Record,
    decode_record,
    encode_record,
)
from castore.remote.send import Sender, read_small, row_of
from castore.units import format_size
from castore.write.open_pack import Vanished
from castore.write.staging import Staged

log = logging.getLogger("castore")

# Times that an offer begins again because a collection of the bucket began or ended meanwhile.
_ATTEMPTS = 20
#: Commits bytes and names.
Commit = Callable[[Sequence[tuple[EntrySpec, Staged]]], object]


class Answer(NamedTuple):
    """The answer of a bucket for a computation.

    Attributes:
        is_here: the result is in the store now, under the computation's key.
        row: of a good result whose bytes are still to be fetched; None for another answer.
        record: BLAKE3 of the record that was read; None if there was none.
    """

    is_here: bool
    row: Row | None
    record: bytes | None


class ResultSharing:
    """The shared results of one remote, for one store.

    Args:
        parts: of the store.
        bucket: of the remote.
        remote: the remote's name in this store.
        pool: fetches and uploads.
        commit: names what has come.
        renews: whether records that are used are written again after `RENEW_SECONDS`.
    """

    def __init__(
        self, parts: Parts, bucket: Bucket, remote: str, pool: Executor, commit: Commit, *, renews: bool
    ) -> None:
        self._parts = parts
        self._bucket = bucket
        self._remote = remote
        self._renews = renews
        self._pool = pool
        self._commit = commit

    def find(self, name: str, lifetime: float | None, known: bytes | None = None) -> Answer:
        """Look for the result of a computation; a small one is in the store then.

        Args:
            name: key of the computation.
            lifetime: seconds after its computation for which a result is good; None for ever.
            known: BLAKE3 of a record that is of no use to the caller, and counts as no result.

        Raises:
            RemoteError: the bucket cannot be used.
        """
        key = result_key(name)
        try:
            there = self._bucket.get(key)
        except RemoteMissingError:
            return Answer(False, None, None)
        data = there.data
        token = digest_of(data)
        if token == known:
            return Answer(False, None, token)
        try:
            row, payload = decode_record(data, key)
            refuse_pickle(row, self._bucket)
        except (CorruptError, RemoteError) as error:
            log.info("a shared result is passed over: %s", error)
            return Answer(False, None, token)
        row = _with_lifetime(row, lifetime)
        if has_expired(row.expires, time.time()):
            return Answer(False, None, token)
        if self._renews and there.modified < time.time() - RENEW_SECONDS:
            self._pool.submit(self._renew, key, there)
        if payload is None:
            return Answer(False, row, token)
        try:
            staged = BlobFetcher(self._parts, self._bucket, self._pool).stage(row, memoryview(payload), key)
        except CorruptError as error:
            log.info("a shared result is passed over: %s", error)
            return Answer(False, None, token)
        self._commit([(_spec(row), staged)])
        return Answer(True, None, token)

    def _renew(self, key: str, there: Versioned) -> None:
        try:
            self._bucket.renew(key, there)
        except RemoteError as error:  # another node that uses it renews it, or this one at its next use
            log.info("the use of a shared result is not noted: %s", error)

    def keep(self, row: Row) -> None:
        """Fetch the bytes of a result that `find` gave, and have it in the store.

        Raises:
            CorruptError: the bytes are damaged.
            RemoteMissingError: they are gone.
            RemoteError: the bucket cannot be used.
            TooLargeError, FullError: there is no room.
        """
        refuse_pickle(row, self._bucket)
        budget = self._parts.settings.max_size
        if budget is not None and row.place.stored > budget:
            raise TooLargeError(
                f"{row.name!r} takes {format_size(row.place.stored)}, more than the store may"
            )
        known = self._parts.writer.stage_known(row.digest)
        if known is not None:
            with suppress(Vanished):  # evicted meanwhile: the bytes are fetched
                self._commit([(_spec(row), known)])
                return
        blobs = BlobFetcher(self._parts, self._bucket, self._pool)
        with closing(blobs.staged([{row.digest: row}])) as coming:
            for _, staged in coming:
                self._commit([(_spec(row), staged)])

    def offer(self, name: str, refused: bytes | None, keep: bool = True) -> None:
        """Have a result of the store in the bucket, unless another one is there.

        Args:
            name: key of the computation.
            refused: the record in whose place the result comes, as in `Answer`.
            keep: whether the entry stays in the store. One that does not has a time to live, for the case
                that no offer comes to its end, which is none of the result's.

        Raises:
            CorruptError: the result is damaged.
            RemoteError: the bucket cannot be used, or refuses.
        """
        entry = self._parts.index.entry(name)
        if entry is None or entry.away or entry.serializer == "pickle":
            return  # evicted meanwhile, or nobody would take it
        if not keep:
            entry = entry._replace(expires=None)
        if entry.stored <= INLINE_BYTES:
            record = self._inline(entry)
        else:
            record = self._upload(entry, self._object_of(name, refused))
        if record is not None:
            self._write(encode_record(record), result_key(name), refused)
        if not keep:
            remove_entry(self._parts, entry)

    def _inline(self, entry: Entry) -> Record | None:
        blob = self._parts.index.blob(bytes.fromhex(entry.digest))
        if blob is None or not blob.is_here:
            return None
        try:
            payload, frames, dictionary = read_small(self._parts, blob)
        except FileNotFoundError:  # evicted meanwhile
            return None
        # No collection removes dictionaries, so this needs no guard.
        if dictionary and self._bucket.size(dictionary_key(dictionary)) is None:
            data = self._parts.objects.dictionaries.load(dictionary).data
            self._bucket.put(dictionary_key(dictionary), data)
        place = Place(digest_of(payload), 0, len(payload), blob.codec, b"".join(frames))
        return Record(row_of(entry, place), payload)

    def _object_of(self, name: str, refused: bytes | None) -> frozenset[bytes]:
        """The object of a refused record, which may be damaged: it is not counted on."""
        key = result_key(name)
        try:
            data = b"" if refused is None else self._bucket.get(key).data
            found = decode_record(data, key).row.place.object if digest_of(data) == refused else None
        except (CorruptError, RemoteMissingError):
            found = None
        return frozenset() if found is None else frozenset([found])

    def _upload(self, entry: Entry, bad: frozenset[bytes]) -> Record:
        for _ in range(_ATTEMPTS):
            guard = Guard(self._bucket)
            sender = Sender(
                self._parts, self._bucket, self._pool, bad, guard, self._remote, lambda done, of: None
            )
            [(_, row)] = sender.send([(entry.name, entry)], None)
            assert row is not None, "an entry has a row"
            if guard.is_current():
                return Record(row, None)
        raise RemoteError(f"collections of {self._bucket.url} do not let a result be offered")

    def _write(self, data: bytes, key: str, refused: bytes | None) -> None:
        if self._bucket.create(key, data):
            return
        try:
            there = self._bucket.get(key)
        except RemoteMissingError:  # collected meanwhile: nothing depends on this record either
            return
        if digest_of(there.data) == refused or not self._is_whole(there.data, key):
            self._bucket.replace(key, data, there.version)

    def _is_whole(self, data: bytes, key: str) -> bool:
        """Whether a record is sound, and its bytes are there."""
        try:
            record = decode_record(data, key)
        except CorruptError:
            return False
        return record.object_key is None or self._bucket.size(record.object_key) is not None


class Offers:
    """The offers of a process that are under way. Threads may share it."""

    def __init__(self, pool: Executor) -> None:
        self._pool = pool
        self._changed = threading.Condition()
        self._pending = 0
        self._failure: str | None = None

    def begin(self, work: Callable[[], object]) -> str | None:
        """Make an offer soon; returns why an earlier one failed, once for each failure."""
        with self._changed:
            self._pending += 1
            failure, self._failure = self._failure, None
        self._pool.submit(self._do, work)
        return failure

    def _do(self, work: Callable[[], object]) -> None:
        failure = None
        try:
            work()
        except Exception as error:  # noqa: BLE001 (who offered learns of it: nobody else is here)
            failure = f"{type(error).__name__}: {error}"
        with self._changed:
            self._pending -= 1
            self._failure = failure or self._failure
            self._changed.notify_all()

    def wait(self, seconds: float) -> tuple[int, str | None]:
        """Wait until none is under way; returns how many are, and why one failed."""
        with self._changed:
            self._changed.wait_for(lambda: not self._pending, seconds)
            failure, self._failure = self._failure, None
            return self._pending, failure

    @property
    def is_busy(self) -> bool:
        """Whether offers are under way."""
        return self._pending > 0


def remove_entry(parts: Parts, entry: Entry) -> None:
    """Remove an entry that was there to be uploaded alone, and its bytes."""
    digest = bytes.fromhex(entry.digest)
    with parts.index.write() as txn:
        txn.delete_unchanged(entry.name, digest, entry.metadata)
    remove_blobs(parts, [digest])


def _with_lifetime(row: Row, lifetime: float | None) -> Row:
    if lifetime is None:
        return row
    until = row.created + lifetime
    return row._replace(expires=until if row.expires is None else min(until, row.expires))


def _spec(row: Row) -> EntrySpec:
    return EntrySpec(row.name, row.serializer, row.metadata, row.expires, False)
