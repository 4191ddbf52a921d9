"""Blobs come from a bucket, each checked before anybody can have it. Parts that readers have kept do not
travel again.

Nothing that comes from a remote is trusted. Stored bytes are compared with the frames of the tree's row
before they are decompressed, and the decompressed bytes with the blob's digest. For small blobs a caller may
leave the second comparison to the first reader: they go to a pack of received bytes then. Records of a pack
that lie near each other come in one request. The caller commits what is staged here under the names that it
chooses.
"""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from collections.abc import Callable, Container, Generator, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from contextlib import closing, nullcontext
from functools import partial
from itertools import accumulate, chain, repeat
from typing import NamedTuple

import xxhash
import zstandard

from castore.errors import CorruptError, RemoteError, RemoteMissingError
from castore.objects.codecs import FRAME_SIZE
from castore.objects.decode import BlobReader
from castore.objects.dictionaries import Dictionary, derive_number
from castore.objects.packs import PACK_LIMIT
from castore.parts import Parts
from castore.records import LOOSE, Blob
from castore.remote.bucket import Bucket
from castore.remote.kept_bytes import WHOLE_LIMIT, Division
from castore.remote.keys import dictionary_key, object_key
from castore.remote.pages import FRAME, Place, Row, frame_of
from castore.remote.retries import ENDED
from castore.system.temporary import abandon
from castore.write.incoming import write_all
from castore.write.staging import LargeBlob, SmallBlob, Staged

#: Bytes of a large object that come in one request.
REQUEST_BYTES = 8 << 20
# Bytes of neighbouring records of a pack that come in the first request, and in one at most: each request is
# longer than the one before. Those that begin together then end one after the other, and are decoded while
# others are on their way.
_FIRST_BYTES, _RECORDS_BYTES = 256 << 10, 2 << 20
# Bytes between two records that are fetched along; requests under way at once.
_GAP, _REQUESTS = 128 << 10, 8
# Bytes of a record, uncompressed, below which many threads that decode at the same time are slower than one:
# they mostly take the interpreter from each other. Two are as fast, and faster where a core is idle.
_SMALL_RECORD, _FEW = 40 << 10, 2
_decoding = threading.Semaphore(_FEW)
# Blobs of one piece are scattered if they lie in more stretches of packs, and if a stretch has fewer of them.
_FEW_STRETCHES, _NEIGHBOURS = 16, 8


def refuse_pickle(row: Row, bucket: Bucket) -> None:
    """Check that nobody runs code who loads a row's bytes.

    Raises:
        RemoteError: the row is a pickle, or of a serializer that this castore does not know.
    """
    if row.serializer == "bytes":
        return
    from castore.serialize.serializers import SERIALIZERS  # a tenth of the time that a pull takes to start

    if row.serializer not in SERIALIZERS or row.serializer == "pickle":
        raise RemoteError(
            f"{row.name!r} in {bucket.url} is a {row.serializer!r}, which runs code when it is"
            " loaded, or which this castore does not know; pull a prefix without it"
        )


class _Request(NamedTuple):
    """Records of one pack that lie near each other, or one object of its own."""

    object: bytes
    rows: list[Row]

    @property
    def start(self) -> int:
        return self.rows[0].place.offset

    @property
    def end(self) -> int:
        return max(row.place.offset + row.place.stored for row in self.rows)

    @property
    def has_small(self) -> bool:
        """Whether its records are small ones, by their mean."""
        return sum(row.size for row in self.rows) < _SMALL_RECORD * len(self.rows)


#: Called with a row whose bytes the bucket does not have: they are damaged, or gone.
OnLoss = Callable[[Row, CorruptError | RemoteMissingError], object]


# Makes the stored bytes of an object from a place on, in order.
_PiecesFrom = Callable[[int], Iterator[bytes | memoryview]]


def _raise(row: Row, error: CorruptError | RemoteMissingError) -> None:
    raise error


class BlobFetcher:
    """Fetches the blobs of rows.

    Args:
        parts: of the store that the blobs are for.
        bucket: has them.
        pool: fetches.
        on_loss: receives each row whose bytes are damaged or gone, and the others come all the same; by
            default the error is raised.

    Attributes:
        fetched: bytes that have come.
        in_parts: places of blobs of which the store had parts.
        are_scattered: whether few of the blobs that were wanted together last are neighbours in their packs.
            More of them at once are then fewer requests.
    """

    def __init__(
        self,
        parts: Parts,
        bucket: Bucket,
        pool: Executor,
        on_loss: OnLoss = _raise,
    ) -> None:
        self._parts = parts
        self._on_loss = on_loss
        self._bucket = bucket
        self._pool = pool
        self.fetched = 0
        self.in_parts: list[Place] = []
        self.are_scattered = False
        self._lost_dictionaries: dict[int, str] = {}

    @property
    def lacks_dictionary(self) -> bool:
        """Whether a dictionary that a blob needs is gone."""
        return bool(self._lost_dictionaries)

    def staged(
        self,
        wanted: Iterable[Mapping[bytes, Row]],
        *,
        left_to_readers: Container[bytes] = (),
        on_wait: Callable[[], object] | None = None,
    ) -> Generator[tuple[Row, Staged]]:
        """Blobs in the order in which they come; some requests are under way ahead.

        Args:
            wanted: blobs by their digests, in pieces. A piece is asked for when the requests of those before
                it are under way.
            left_to_readers: digests of blobs that are staged `as_received`.
            on_wait: called before a wait for bytes, in this thread, which has nothing else to do.

        Raises:
            CorruptError: the remote's bytes are not those of the rows.
            RemoteError: the remote cannot be used.
        """
        pending: set[Future[list[tuple[Row, Staged]]]] = set()
        requests, records = self._requests(wanted), partial(self._records, left_to_readers)
        try:
            while True:
                while len(pending) < _REQUESTS and (request := next(requests, None)) is not None:
                    work = records if request.rows[0].place.is_packed else self._object
                    pending.add(self._pool.submit(work, request))
                if not pending:
                    return
                if on_wait is not None and not any(future.done() for future in pending):
                    on_wait()
                done, pending = wait(pending, return_when=FIRST_COMPLETED)
                if any(map(_has_failed, done)):
                    # The requests under way end first: what they bring need not travel again.
                    started = {future for future in pending if not future.cancel()}
                    done, pending = done | wait(started).done, set()
                for future in sorted(done, key=_has_failed):
                    yield from future.result()
        finally:
            for future in pending:
                future.cancel()
            for future in wait(pending).done:
                if not future.cancelled() and future.exception() is None:
                    for _, item in future.result():
                        item.discard()

    def _requests(self, wanted: Iterable[Mapping[bytes, Row]]) -> Iterator[_Request]:
        limits = chain(range(_FIRST_BYTES, _RECORDS_BYTES, _FIRST_BYTES), repeat(_RECORDS_BYTES))
        for piece in wanted:
            requests, stretches = _requests_of(piece, limits)
            self.are_scattered = stretches > _FEW_STRETCHES and len(piece) < stretches * _NEIGHBOURS
            yield from requests

    def _records(self, left_to_readers: Container[bytes], request: _Request) -> list[tuple[Row, Staged]]:
        """The blobs of neighbouring records of a pack."""
        key, start = object_key(request.object, packed=True), request.start
        try:
            data = self._bucket.get_range(key, start, request.end)
        except RemoteMissingError as error:
            for row in request.rows:
                self._on_loss(row, error)
            return []
        self.fetched += len(data)
        with _decoding if request.has_small else nullcontext():
            return self._staged_records(request, memoryview(data), key, left_to_readers)

    def _staged_records(
        self, request: _Request, data: memoryview, key: str, left_to_readers: Container[bytes]
    ) -> list[tuple[Row, Staged]]:
        staged: list[tuple[Row, Staged]] = []
        try:
            for row in request.rows:
                at = row.place.offset - request.start
                try:
                    stored = data[at : at + row.place.stored]
                    item = self.stage(row, stored, key, as_received=row.digest in left_to_readers)
                except (CorruptError, RemoteMissingError) as error:
                    self._on_loss(row, error)
                else:
                    staged.append((row, item))
        except BaseException:
            for _, item in staged:
                item.discard()
            raise
        return staged

    def stage(self, row: Row, stored: memoryview, key: str, *, as_received: bool = False) -> Staged:
        """The blob of a row whose stored bytes have come, checked.

        Args:
            key: of the object that had the bytes, for messages.
            as_received: compare a blob for a pack with the tree alone, and have it in a pack of received
                bytes: whoever reads it compares its content with the digest.

        Raises:
            CorruptError: the bytes are not those of the row.
            RemoteMissingError: the dictionary that they need is gone.
            RemoteError: that dictionary cannot be had.
        """
        place = row.place
        if (
            len(place.frames) > FRAME.size
            or not place.stored <= PACK_LIMIT
            or int.from_bytes(place.frames[:4], "little") != place.stored
        ):
            return self._stage_file(row, key, lambda start: iter([stored[start:]]))
        if frame_of(stored) != place.frames:
            raise self._damaged(row, key, "they differ from what the tree says")
        payload = bytes(stored)
        dictionary = self.have_dictionary(row, payload)
        pack = self._parts.writer.received if as_received else self._parts.writer.pack
        if not as_received:
            try:
                self._parts.objects.check_content(self._blob_of(row), payload)
            except CorruptError as error:
                raise self._damaged(row, key, str(error)) from error
        return SmallBlob(pack, row.digest, row.size, place.codec, payload, dictionary)

    def _object(self, request: _Request) -> list[tuple[Row, Staged]]:
        """A blob that is an object of its own."""
        [row] = request.rows
        key = object_key(request.object, packed=False)
        try:
            return [(row, self._stage_file(row, key, partial(self._pieces, row.place, key)))]
        except (CorruptError, RemoteMissingError) as error:
            self._on_loss(row, error)
            return []

    def _pieces(self, place: Place, key: str, start: int) -> Iterator[bytes]:
        """The stored bytes of an object from ``start`` on: parts that the store has, and others, fetched."""
        spans = self._spans(place, start)
        has_parts = any(kept for _, _, kept in spans)
        if not start and not has_parts:
            for piece in self._bucket.stream(key):
                self.fetched += len(piece)
                yield piece
            return
        if has_parts:
            self.in_parts.append(place)
        for begin, end, kept in spans:
            data = self._parts.source.fetch(kept) if kept is not None else None
            if data is None or len(data) != end - begin:
                data = self._bucket.get_range(key, begin, end)
                self.fetched += len(data)
            yield data

    def _spans(self, place: Place, start: int) -> list[tuple[int, int, Blob | None]]:
        """Where the parts of an object lie, from ``start`` on, that the store has, and where the bytes
        between them do.
        """
        parts = Division(place).parts if place.stored > WHOLE_LIMIT else ()
        parts = [part for part in parts if part.start >= start]
        names = [part.name(place.object) for part in parts]
        found = self._parts.index.find_many(names) if names else {}
        spans: list[tuple[int, int, Blob | None]] = []

        def add_missing(end: int) -> None:
            at = spans[-1][1] if spans else start
            while at < end:
                stop = min(end, at + REQUEST_BYTES)
                spans.append((at, stop, None))
                at = stop

        for name, part in zip(names, parts, strict=True):
            if name in found and found[name].blob.is_here:
                add_missing(part.start)
                spans.append((part.start, part.end, found[name].blob))
        add_missing(place.stored)
        return spans

    def _stage_file(self, row: Row, key: str, pieces_from: _PiecesFrom) -> LargeBlob:
        """The blob of a row, in a file, checked.

        A file of a large blob whose transfer is interrupted stays, and the next one goes on with it.

        Args:
            key: of the object that has the bytes, for messages.
            pieces_from: makes the bytes from a place on, in order.
        """
        objects, place = self._parts.objects, row.place
        stays = place.stored > WHOLE_LIMIT
        fd, temporary = objects.loose.resume(place.object.hex()) if stays else objects.loose.create()
        try:
            with open(fd, "r+b", buffering=0) as file:
                length = _sound_bytes(fd, place)
                os.ftruncate(fd, length)
                os.lseek(fd, length, os.SEEK_SET)
                for piece in pieces_from(length):
                    if ENDED.is_set():
                        raise RemoteError("the transfer was interrupted")
                    length += len(piece)
                    if length > place.stored:
                        raise self._damaged(
                            row, key, f"it is longer than the {place.stored} bytes of the tree"
                        )
                    write_all(fd, piece, temporary)
                if length != place.stored:
                    raise self._damaged(row, key, f"it ends {place.stored - length} bytes early")
                kept = self._check_file(fd, row, key)
                objects.loose.seal(file.fileno(), durable=objects.durable)
        except BaseException as error:
            if stays and isinstance(error, RemoteError) and not isinstance(error, RemoteMissingError):
                abandon(temporary)
            else:
                temporary.unlink(missing_ok=True)
            raise
        return LargeBlob(objects, self._blob_of(row), temporary, kept)

    def _check_file(self, fd: int, row: Row, key: str) -> bytes | None:
        """Check a whole file; returns the checksums of raw frames, if the blob needs some."""
        place, start, checksums = row.place, 0, []
        for index, end in enumerate(_ends(place)):
            frame = os.pread(fd, end - start, start)
            if frame_of(frame) != _frame(place, index):
                raise self._damaged(row, key, f"frame {index} differs from what the tree says")
            if place.codec == "none":
                checksums.append(xxhash.xxh3_64_intdigest(frame).to_bytes(8, "little"))
            start = end
        kept = b"".join(checksums) if row.size > FRAME_SIZE and checksums else None
        try:
            with closing(BlobReader(self._blob_of(row), os.dup(fd), checksums=kept, where=key)) as reader:
                for _ in reader.in_order():
                    pass
        except CorruptError as error:
            raise self._damaged(row, key, str(error)) from error
        return kept

    @staticmethod
    def _blob_of(row: Row) -> Blob:
        return Blob(row.digest, row.size, row.place.stored, row.place.codec, LOOSE, 0)

    def have_dictionary(self, row: Row, frame: bytes) -> Dictionary | None:
        """The dictionary that a stored frame of a row needs, which is in the store then; None for none.

        Raises:
            CorruptError: the frame or the dictionary is damaged.
        """
        if row.place.codec != "zstd" or not row.size:
            return None
        try:
            number = zstandard.get_frame_parameters(frame).dict_id
        except zstandard.ZstdError as error:
            raise self._damaged(row, object_key(row.place.object, packed=True), str(error)) from error
        return self._dictionary(number) if number else None

    def _dictionary(self, number: int) -> Dictionary:
        """A dictionary, which is in the store then."""
        dictionaries = self._parts.objects.dictionaries
        if not dictionaries.has(number):
            if number in self._lost_dictionaries:  # many blobs need it, and one request is enough
                raise RemoteMissingError(self._lost_dictionaries[number])
            try:
                data = self._bucket.get(dictionary_key(number)).data
            except RemoteMissingError as error:
                self._lost_dictionaries[number] = str(error)
                raise
            if derive_number(data) != number:
                raise CorruptError(f"dictionary {number:08x} in {self._bucket.url} is damaged")
            with self._parts.index.write():  # under the write lock, as a trained one
                dictionaries.add(data)
        return dictionaries.load(number)

    def _damaged(self, row: Row, key: str, why: str) -> CorruptError:
        return CorruptError(
            f"the bytes of {row.name!r} in {self._bucket.url}/{key} are damaged: {why};"
            " `castore remote check --deep --repair` uploads them again from a store that has them",
            digest=row.digest.hex(),
            where=key,
        )


def _has_failed(future: Future[list[tuple[Row, Staged]]]) -> bool:
    return future.exception() is not None


def _ends(place: Place) -> list[int]:
    """Where each frame of an object ends."""
    return list(accumulate(length for length, _ in FRAME.iter_unpack(place.frames)))


def _frame(place: Place, index: int) -> bytes:
    return place.frames[FRAME.size * index :][: FRAME.size]


def _sound_bytes(fd: int, place: Place) -> int:
    """Length of the whole frames of an object with which a file begins."""
    size, start = os.fstat(fd).st_size, 0
    for index, end in enumerate(_ends(place)):
        if end > size or frame_of(os.pread(fd, end - start, start)) != _frame(place, index):
            break
        start = end
    return start


def _requests_of(wanted: Mapping[bytes, Row], limits: Iterator[int]) -> tuple[list[_Request], int]:
    """The requests for blobs: one an object, and one for records that lie near each other in a pack. And the
    number of stretches of packs that have the records.

    Args:
        limits: of the bytes of each request for records.
    """
    packs: dict[bytes, list[Row]] = defaultdict(list)
    requests: list[_Request] = []
    for row in wanted.values():
        if row.place.is_packed:
            packs[row.place.object].append(row)
        else:
            requests.append(_Request(row.place.object, [row]))
    stretches = 0
    for digest, rows in packs.items():
        rows.sort(key=lambda row: row.place.offset)
        stretches += 1
        limit = next(limits)
        near: list[Row] = []
        for row in rows:
            if near:
                end = near[-1].place.offset + near[-1].place.stored
                far = row.place.offset - end > _GAP
                if far or row.place.offset + row.place.stored - near[0].place.offset > limit:
                    requests.append(_Request(digest, near))
                    stretches, limit, near = stretches + far, next(limits), []
            near.append(row)
        requests.append(_Request(digest, near))
    return requests, stretches
