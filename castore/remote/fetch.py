"""Blobs come from a bucket, each checked before anybody can have it. Parts that readers have kept do not
travel again.

Nothing that comes from a remote is trusted. Stored bytes are compared with the frames of the tree's row
before they are decompressed, and the decompressed bytes with the blob's digest. Records of a pack that lie
near each other come in one request. The caller commits what is staged here under the names that it chooses.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from contextlib import ExitStack, closing
from itertools import accumulate
from typing import NamedTuple

import xxhash
import zstandard
from blake3 import blake3

from castore.errors import CorruptError, RemoteError
from castore.objects.codecs import CODECS, FRAME_SIZE
from castore.objects.decode import BlobReader
from castore.objects.dictionaries import Dictionary, derive_number
from castore.objects.packs import PACK_LIMIT
from castore.parts import Parts
from castore.records import LOOSE, Blob
from castore.remote.bucket import Bucket
from castore.remote.kept_bytes import WHOLE_LIMIT, Division
from castore.remote.keys import dictionary_key, object_key
from castore.remote.pages import FRAME, Place, Row, frame_of
from castore.write.incoming import write_all
from castore.write.staging import LargeBlob, SmallBlob, Staged

#: Bytes of neighbouring records of a pack that come in one request.
REQUEST_BYTES = 8 << 20
# Bytes between two records that are fetched along, and requests under way at once.
_GAP, _REQUESTS = 128 << 10, 8


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


#: Called with a row whose bytes are damaged.
OnDamage = Callable[[Row, CorruptError], object]


def _raise(row: Row, error: CorruptError) -> None:
    raise error


class BlobFetcher:
    """Fetches the blobs of rows.

    Args:
        parts: of the store that the blobs are for.
        bucket: has them.
        pool: fetches.
        on_damage: receives each row whose bytes are damaged, and the others come all the same; by default
            the error is raised.
        request_bytes: bytes of neighbouring records that come in one request.

    Attributes:
        fetched: bytes that have come.
        in_parts: places of blobs of which the store had parts.
    """

    def __init__(
        self,
        parts: Parts,
        bucket: Bucket,
        pool: Executor,
        on_damage: OnDamage = _raise,
        request_bytes: int = REQUEST_BYTES,
    ) -> None:
        self._parts = parts
        self._request_bytes = request_bytes
        self._on_damage = on_damage
        self._bucket = bucket
        self._pool = pool
        self.fetched = 0
        self.in_parts: list[Place] = []

    def staged(self, wanted: Mapping[bytes, Row]) -> Generator[tuple[Row, Staged]]:
        """Blobs by their digests, in the order in which they come; some requests are under way ahead.

        Raises:
            CorruptError: the remote's bytes are not those of the rows.
            RemoteError: the remote cannot be used.
        """
        pending: set[Future[list[tuple[Row, Staged]]]] = set()
        requests = _requests(wanted, self._request_bytes)
        try:
            while True:
                while len(pending) < _REQUESTS and (request := next(requests, None)) is not None:
                    work = self._records if request.rows[0].place.is_packed else self._object
                    pending.add(self._pool.submit(work, request))
                if not pending:
                    return
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

    def _records(self, request: _Request) -> list[tuple[Row, Staged]]:
        """The blobs of neighbouring records of a pack."""
        key, start = object_key(request.object, packed=True), request.start
        data = self._bucket.get_range(key, start, request.end)
        self.fetched += len(data)
        view = memoryview(data)
        with ExitStack() as undo:
            staged: list[tuple[Row, Staged]] = []
            for row in request.rows:
                at = row.place.offset - start
                try:
                    item = self.stage(row, view[at : at + row.place.stored], key)
                except CorruptError as error:
                    self._on_damage(row, error)
                    continue
                staged.append((row, item))
                undo.callback(item.discard)
            undo.pop_all()
        return staged

    def stage(self, row: Row, stored: memoryview, key: str) -> Staged:
        """The blob of a row whose stored bytes have come, checked.

        Args:
            key: of the object that had the bytes, for messages.

        Raises:
            CorruptError: the bytes are not those of the row.
            RemoteError: the dictionary that they need cannot be had.
        """
        place = row.place
        if (
            len(place.frames) > FRAME.size
            or not place.stored <= PACK_LIMIT
            or _ends(place)[-1] != place.stored
        ):
            return self._stage_file(row, key, iter([stored]))
        if frame_of(stored) != place.frames:
            raise self._damaged(row, key, "its bytes differ from what the tree says")
        payload = bytes(stored)
        dictionary = self.have_dictionary(row, payload)
        dictionaries = self._parts.objects.dictionaries
        try:
            data = CODECS[place.codec].decompress(payload, row.size, dictionaries.decompressor)
        except CorruptError as error:
            raise self._damaged(row, key, str(error)) from error
        if blake3(data).digest() != row.digest:
            raise self._damaged(row, key, "it is another blob than the tree says")
        return SmallBlob(self._parts.writer.pack, row.digest, row.size, place.codec, payload, dictionary)

    def _object(self, request: _Request) -> list[tuple[Row, Staged]]:
        """A blob that is an object of its own."""
        [row] = request.rows
        key = object_key(request.object, packed=False)
        try:
            return [(row, self._stage_file(row, key, self._pieces(row.place, key)))]
        except CorruptError as error:
            self._on_damage(row, error)
            return []

    def _pieces(self, place: Place, key: str) -> Iterator[bytes]:
        """The stored bytes of an object, in order: parts that the store has, and the rest, fetched."""
        spans = self._spans(place)
        if not any(kept for _, _, kept in spans):
            for piece in self._bucket.stream(key):
                self.fetched += len(piece)
                yield piece
            return
        self.in_parts.append(place)
        for start, end, kept in spans:
            data = self._parts.source.fetch(kept) if kept is not None else None
            if data is None or len(data) != end - start:
                data = self._bucket.get_range(key, start, end)
                self.fetched += len(data)
            yield data

    def _spans(self, place: Place) -> list[tuple[int, int, Blob | None]]:
        """Where the parts of an object lie in it that the store has, and where the bytes between them do."""
        parts = Division(place).parts if place.stored > WHOLE_LIMIT else ()
        names = [part.name(place.object) for part in parts]
        found = self._parts.index.find_many(names) if names else {}
        spans: list[tuple[int, int, Blob | None]] = []

        def add_missing(end: int) -> None:
            at = spans[-1][1] if spans else 0
            while at < end:
                stop = min(end, at + self._request_bytes)
                spans.append((at, stop, None))
                at = stop

        for name, part in zip(names, parts, strict=True):
            if name in found and found[name].blob.is_here:
                add_missing(part.start)
                spans.append((part.start, part.end, found[name].blob))
        add_missing(place.stored)
        return spans

    def _stage_file(self, row: Row, key: str, pieces: Iterator[bytes | memoryview]) -> LargeBlob:
        objects, place = self._parts.objects, row.place
        blob = Blob(row.digest, row.size, place.stored, place.codec, LOOSE, 0)
        fd, temporary = objects.loose.create()
        try:
            with open(fd, "rb", buffering=0) as file:
                length = 0
                for piece in pieces:
                    length += len(piece)
                    if length > place.stored:
                        raise self._damaged(
                            row, key, f"it is longer than the {place.stored} bytes of the tree"
                        )
                    write_all(fd, piece, temporary)
                if length != place.stored:
                    raise self._damaged(row, key, f"it ends {place.stored - length} bytes early")
                start, checksums = 0, []
                for index, end in enumerate(_ends(place)):
                    frame = os.pread(fd, end - start, start)
                    if frame_of(frame) != place.frames[FRAME.size * index :][: FRAME.size]:
                        raise self._damaged(row, key, f"frame {index} differs from what the tree says")
                    if place.codec == "none":
                        checksums.append(xxhash.xxh3_64_intdigest(frame).to_bytes(8, "little"))
                    start = end
                kept = b"".join(checksums) if row.size > FRAME_SIZE and checksums else None
                try:
                    with closing(BlobReader(blob, os.dup(fd), checksums=kept, where=key)) as reader:
                        for _ in reader.in_order():
                            pass
                except CorruptError as error:
                    raise self._damaged(row, key, str(error)) from error
                objects.loose.seal(file.fileno(), durable=objects.durable)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        return LargeBlob(objects, blob, temporary, kept)

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
            data = self._bucket.get(dictionary_key(number)).data
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


def _requests(wanted: Mapping[bytes, Row], most: int) -> Iterator[_Request]:
    """The requests for blobs: one an object, and one for records that lie near each other in a pack."""
    packs: dict[bytes, list[Row]] = defaultdict(list)
    for row in wanted.values():
        if row.place.is_packed:
            packs[row.place.object].append(row)
        else:
            yield _Request(row.place.object, [row])
    for digest, rows in packs.items():
        rows.sort(key=lambda row: row.place.offset)
        near: list[Row] = []
        for row in rows:
            if near:
                end = near[-1].place.offset + near[-1].place.stored
                far = row.place.offset - end > _GAP
                if far or row.place.offset + row.place.stored - near[0].place.offset > most:
                    yield _Request(digest, near)
                    near = []
            near.append(row)
        yield _Request(digest, near)
