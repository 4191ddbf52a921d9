"""Uploads of blobs: what a remote lacks travels, small blobs in packs and large ones as objects of their own.

Every blob is decoded and compared with its digest on its way out, so a damaged blob does not travel. Nothing
here writes a reference: the caller names what was uploaded, after it is there.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Set
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from contextlib import closing
from pathlib import Path

import zstandard
from blake3 import blake3

from castore.errors import CorruptError, RemoteError, RemoteMissingError
from castore.index import places
from castore.index.places import RemotePlace
from castore.objects.packs import FILE_HEAD, build_record, read_record
from castore.parts import Parts
from castore.records import AWAY, HEAD_SIZE, Blob, Entry
from castore.remote.bucket import Bucket
from castore.remote.collection_state import Guard
from castore.remote.keys import dictionary_key, object_key, page_key
from castore.remote.outcomes import Progress
from castore.remote.page_cache import PageCache
from castore.remote.pages import PACKED_LIMIT, Place, Row, digest_of, frame_of
from castore.remote.tree import Tree
from castore.write.arguments import dump_metadata

#: Bytes at which a pack is uploaded and another begun.
PACK_BYTES = 16 << 20
# Objects of at most this many uploads are in memory, or open, at once.
_UPLOADS = 6
_DIGESTS = 500
# Bytes of the number that names a dictionary.
_NUMBER = 4


class Sender:
    """Uploads what the remote lacks, and knows where each blob lies.

    Args:
        parts: of the store that has the blobs.
        bucket: of the remote.
        pool: uploads.
        bad: digests of objects, and numbers of dictionaries, that are missing or damaged and are not
            counted on.
        guard: of this push. Once it is current no more, the caller calls `forget` and begins again.
        remote: the remote's name in this store, which may know where blobs lie there.
        progress: called with the bytes that are there, and those of all that is sent.

    Attributes:
        sent: bytes that were uploaded.
        objects: objects that were uploaded.
    """

    def __init__(
        self,
        parts: Parts,
        bucket: Bucket,
        pool: Executor,
        bad: Set[bytes],
        guard: Guard,
        remote: str,
        progress: Progress,
    ) -> None:
        self._parts = parts
        self._bucket = bucket
        self._pool = pool
        self._bad = bad
        self._guard = guard
        self._remote = remote
        self._progress = progress
        self._places: dict[bytes, Place] = {}
        self._pending: set[Future[None]] = set()
        self._dictionaries: set[int] = set()
        self._lock = threading.Lock()
        self._done = self._total = 0
        self.sent = self.objects = 0

    def forget(self) -> None:
        """Count on nothing that was in the remote before."""
        self._places.clear()

    def _lacks(self, digest: bytes, key: str, size: int) -> bool:
        """Whether an object has to be uploaded."""
        return bool(self._guard.must_upload([key])) or digest in self._bad or self._bucket.size(key) != size

    def put(self, key: str, data: bytes) -> None:
        """Upload an object of this push."""
        self._guard.must_upload([key])
        self._bucket.put(key, data)
        self._count(len(data), 0, objects=1)

    def _count(self, sent: int, done: int, objects: int = 0) -> None:
        with self._lock:
            self.sent += sent
            self.objects += objects
            self._done += done
        self._progress(self._done, self._total)

    def send(
        self, entries: list[tuple[str, Entry | None]], head: Tree | None
    ) -> list[tuple[str, Row | None]]:
        """Upload the blobs of entries that the remote lacks; returns the rows of all of them."""
        wanted = {bytes.fromhex(entry.digest): entry.stored for _, entry in entries if entry}
        sizes = {bytes.fromhex(entry.digest): entry.size for _, entry in entries if entry}
        for digest in self._places:
            wanted.pop(digest, None)
        if head is not None and wanted:
            for row in head.rows():  # another name may have the same bytes
                is_sound = row.place.object not in self._bad and row.size == sizes.get(row.digest)
                if row.digest in wanted and is_sound:
                    self._places[row.digest] = row.place
                    del wanted[row.digest]
        self._find_known(wanted)
        self._total += sum(wanted.values())
        try:
            self._send_blobs(wanted)
            self._wait(0)
        except FileNotFoundError as error:
            if isinstance(error.__cause__, RemoteMissingError | CorruptError):  # another remote's bytes
                raise RemoteError(f"this push needs bytes that are gone: {error}") from error
            raise RemoteError(
                f"bytes of {self._parts.path} were gone when this push read them ({error}): push again; if"
                " that recurs, the store's budget is too small to bring from one remote what another lacks"
            ) from error
        finally:
            for future in self._pending:
                future.cancel()
            wait(self._pending)
            self._pending.clear()
        return [
            (name, None if entry is None else row_of(entry, self._places[bytes.fromhex(entry.digest)]))
            for name, entry in entries
        ]

    def _find_known(self, wanted: dict[bytes, int]) -> None:
        """Count on objects of this remote that a lazy pull has recorded, if they are there still.

        A store that has its own bytes does not count on what a tree once said of their digest.
        """
        known: dict[tuple[bytes, bool], list[RemotePlace]] = defaultdict(list)
        digests = list(wanted)
        for start in range(0, len(digests), _DIGESTS):
            found = places.of_blobs(self._parts.index, digests[start : start + _DIGESTS])
            blobs = self._parts.index.blobs_of(list(found)) if found else {}
            for digest, blob in blobs.items():
                place = found[digest]
                if place.remote == self._remote and place.object not in self._bad and not blob.is_own:
                    known[place.object, place.offset > 0].append(place)
        for (digest, is_packed), members in known.items():
            key = object_key(digest, packed=is_packed)
            if self._guard.must_upload([key]) or self._bucket.size(key) is None:
                continue
            for place in members:
                self._places[place.digest] = Place(
                    place.object, place.offset, place.stored, place.codec, place.frames
                )
                del wanted[place.digest]

    def _send_blobs(self, digests: Iterable[bytes]) -> None:
        pack = _Pack()
        for blob in self._blobs(digests):
            if blob.stored > PACKED_LIMIT:
                self._begin(self._send_large, blob)
                continue
            pack.add(blob, *self._small(blob))
            if pack.size >= PACK_BYTES:
                self._begin(self._send_pack, pack)
                pack = _Pack()
        if pack.members:
            self._begin(self._send_pack, pack)

    def _blobs(self, digests: Iterable[bytes]) -> Iterator[Blob]:
        left = list(digests)
        for start in range(0, len(left), _DIGESTS):
            part = left[start : start + _DIGESTS]
            found = self._parts.index.blobs_of(part)
            if away := [digest for digest, blob in found.items() if blob.pack == AWAY]:
                self._parts.source.bring(away)
                found |= self._parts.index.blobs_of(away)
            for digest in part:
                blob = found.get(digest)
                if blob is None or not blob.is_here:
                    raise RemoteError(
                        f"blob {digest.hex()} was removed from {self._parts.path} while this push read it;"
                        " push again"
                    )
                yield blob

    def _begin(self, work: Callable[..., None], what: object) -> None:
        self._wait(_UPLOADS - 1)
        self._pending.add(self._pool.submit(work, what))

    def _wait(self, most: int) -> None:
        while len(self._pending) > most:
            done, self._pending = wait(self._pending, return_when=FIRST_COMPLETED)
            for future in done:
                future.result()

    def _small(self, blob: Blob) -> tuple[bytes, list[bytes]]:
        payload, frames, dictionary = read_small(self._parts, blob)
        self._send_dictionary(dictionary)
        return payload, frames

    def _send_dictionary(self, number: int) -> None:
        if not number or number in self._dictionaries:
            return
        key = dictionary_key(number)
        if self._bucket.size(key) is None:
            self.put(key, self._parts.objects.dictionaries.load(number).data)
        self._dictionaries.add(number)

    def restore_dictionaries(self) -> None:
        """Upload those dictionaries again that are bad and that the store has."""
        known = self._parts.objects.dictionaries
        for number in (int.from_bytes(bad, "big") for bad in self._bad if len(bad) == _NUMBER):
            if known.has(number):
                self.put(dictionary_key(number), known.load(number).data)

    def _send_pack(self, pack: _Pack) -> None:
        data = pack.data()
        digest = digest_of(data)
        key = object_key(digest, packed=True)
        is_new = self._lacks(digest, key, len(data))
        if is_new:
            self._bucket.put(key, data)
        for blob, offset, frames in pack.members:
            self._places[blob.digest] = Place(digest, offset, blob.stored, blob.codec, frames)
        stored = sum(blob.stored for blob, _, _ in pack.members)
        self._count(len(data) if is_new else 0, stored, objects=int(is_new))

    def _send_large(self, blob: Blob) -> None:
        objects = self._parts.objects
        with closing(objects.open(blob, checksums=self._parts.index.checksums(blob.digest))) as reader:
            for _ in reader.in_order():
                pass
            offsets = reader.table().offsets
            hasher, frames = blake3(), []
            for start, end in itertools.pairwise(offsets):
                stored = os.pread(reader.fileno(), end - start, start)
                hasher.update(stored)
                frames.append(frame_of(stored))
            hasher.update(os.pread(reader.fileno(), blob.stored - offsets[-1], offsets[-1]))
            key = object_key(hasher.digest(), packed=False)
            is_new = self._lacks(hasher.digest(), key, blob.stored)
            if is_new:
                # The descriptor keeps the bytes, even if gc unlinks the object meanwhile.
                path = Path(f"/proc/self/fd/{reader.fileno()}")
                self._bucket.upload(key, path, lambda read: self._count(read, read))
        self._places[blob.digest] = Place(hasher.digest(), 0, blob.stored, blob.codec, b"".join(frames))
        self._count(0, 0 if is_new else blob.stored, objects=int(is_new))

    def send_pages(self, made: dict[bytes, bytes], pages: PageCache) -> None:
        """Upload the pages of a tree, and keep them."""
        for _ in self._pool.map(lambda page: self.put(page_key(page[0]), page[1]), made.items()):
            pass
        for digest, data in made.items():
            pages.keep(digest, data)


def row_of(entry: Entry, place: Place) -> Row:
    """An entry's row, for a blob that lies there."""
    return Row(
        entry.name, bytes.fromhex(entry.digest), entry.size, entry.serializer, dump_metadata(entry.metadata),
        entry.created, entry.expires, place,
    )  # fmt: skip


def read_small(parts: Parts, blob: Blob) -> tuple[bytes, list[bytes], int]:
    """The stored bytes of a blob of at most `PACKED_LIMIT` of them, checked.

    Returns:
        The bytes, the `FRAME` of each of their frames, and the number of the dictionary that they need; 0 for
        none.

    Raises:
        CorruptError: they are damaged.
        FileNotFoundError: they are gone.
    """
    objects = parts.objects
    if blob.pack > 0:
        payload = read_record(objects.packs.open(blob.pack).fd, blob)
        try:
            objects.check_content(blob, payload)
        except CorruptError as error:
            raise _damaged(blob, objects.where(blob)) from error
        with_dictionary = blob.codec == "zstd" and blob.size
        number = zstandard.get_frame_parameters(payload).dict_id if with_dictionary else 0
        return payload, [frame_of(payload)], number
    with closing(objects.open(blob, checksums=parts.index.checksums(blob.digest))) as reader:
        for _ in reader.in_order():
            pass
        payload = os.pread(reader.fileno(), blob.stored, 0)
        offsets = reader.table().offsets
        return payload, [frame_of(payload[start:end]) for start, end in itertools.pairwise(offsets)], 0


class _Pack:
    """Records of blobs that travel together, and where each lies."""

    def __init__(self) -> None:
        self._pieces = [FILE_HEAD]
        self.size = len(FILE_HEAD)
        self.members: list[tuple[Blob, int, bytes]] = []

    def add(self, blob: Blob, payload: bytes, frames: list[bytes]) -> None:
        self.members.append((blob, self.size + HEAD_SIZE, b"".join(frames)))
        self._pieces.append(build_record(blob.digest, blob.size, blob.codec, payload))
        self.size += HEAD_SIZE + len(payload)

    def data(self) -> bytes:
        return b"".join(self._pieces)


def _damaged(blob: Blob, where: str) -> CorruptError:
    return CorruptError(
        f"blob {blob.digest.hex()} is damaged in {where}; `castore verify --repair` sets it aside",
        digest=blob.digest.hex(),
        where=where,
    )
