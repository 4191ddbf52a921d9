"""A blob of a remote, held open: frames come from the parts that the store keeps, or are fetched.

A frame is compared with its digest in the tree each time it is read from a part, so nobody has to trust what
is kept. A part that is damaged is set aside and fetched again. If the store has no room for a part, its
frames are served and not kept (unkept_frames.py). A reader that goes on in order has parts fetched ahead,
twice as many each time, as the kernel does it for files. A reader that jumps fetches only what it needs.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from blake3 import blake3

from castore.errors import CorruptError, RemoteError
from castore.objects.codec_threads import codec_threads
from castore.objects.codecs import CODECS, FRAME_SIZE, no_dictionary
from castore.objects.decode import BlobReader
from castore.objects.frames import frame_count, frame_length
from castore.parts import Parts
from castore.records import AWAY, Blob
from castore.remote.fetcher_client import FetcherClient
from castore.remote.kept_bytes import WHOLE_LIMIT, Division, Part
from castore.remote.pages import Row, frame_of
from castore.remote.unkept_frames import NOT_KEPT, RoomState, UnkeptFrames
from castore.system.forks import reset_after_fork
from castore.system.io_errors import AT_FAULT
from castore.system.ram_cache import MemoryLRU

if TYPE_CHECKING:
    from castore.shm.shared_frames import SharedFrames

#: Most parts that are fetched ahead of a reader.
PARTS_AHEAD = 16
# Parts of one blob that are kept open, and attempts to read what gc takes away or what is damaged.
_OPEN, _ATTEMPTS = 8, 8


class LazyReader:
    """Random access to a blob that is an object of its own. See `HeldBlob`.

    A small blob, which would be kept whole, is read so only if there is no room for it.

    Args:
        parts: of the store that keeps what is read.
        fetcher: brings what is missing.
        ahead: does work in the background, or drops it.
        remote: name of the remote.
        row: of the blob.
        cache: keeps decoded frames for all readers; None to keep only the last frame used.
        room: whether parts can be kept.
    """

    def __init__(
        self,
        parts: Parts,
        fetcher: FetcherClient,
        ahead: Callable[[Callable[[], object]], object],
        remote: str,
        row: Row,
        cache: MemoryLRU[bytes] | None,
        room: RoomState,
    ) -> None:
        self.blob = Blob(row.digest, row.size, 0, row.place.codec, AWAY, 0)
        self.frames = frame_count(row.size)
        self._parts = parts
        self._fetcher = fetcher
        self._ahead = ahead
        self._remote = remote
        self._object = row.place.object
        self._name = row.name
        self._division = Division(row.place)
        self._is_in_parts = row.place.stored > WHOLE_LIMIT
        self._unkept = UnkeptFrames(parts, fetcher, remote, row)
        self._room = room
        self._cache = cache
        self._last: tuple[int, bytes] = (-1, b"")
        self._after_fork()
        reset_after_fork(self)
        self._holds = 1
        self._opened: OrderedDict[int, BlobReader] = OrderedDict()
        # The part that a reader in order has come to, how many are fetched ahead of it, and up to which they
        # were asked for.
        self._at, self._window, self._asked = -1, 1, 0

    def _after_fork(self) -> None:
        self._lock = threading.Lock()

    # Holding

    def hold(self) -> bool:
        """See `HeldBlob`."""
        with self._lock:
            if self._holds == 0:
                return False
            self._holds += 1
            return True

    def unhold(self) -> None:
        """See `HeldBlob`."""
        with self._lock:
            self._holds -= 1
            if self._holds:
                return
            opened, self._opened = list(self._opened.values()), OrderedDict()
        for reader in opened:
            reader.close()

    def close(self) -> None:
        """See `HeldBlob`."""
        self.unhold()

    def unlinked(self) -> bool:
        """See `HeldBlob`."""
        with self._lock:
            return any(reader.unlinked() for reader in self._opened.values())

    # Reading

    def view(self, offset: int, size: int) -> bytes | memoryview:
        """See `HeldBlob`."""
        end = min(offset + size, self.blob.size)
        if offset >= end:
            return b""
        first, last = offset // FRAME_SIZE, (end - 1) // FRAME_SIZE
        pieces = [memoryview(self._frame(index)) for index in range(first, last + 1)]
        pieces[-1] = pieces[-1][: end - last * FRAME_SIZE]
        pieces[0] = pieces[0][offset - first * FRAME_SIZE :]
        return pieces[0] if first == last else b"".join(pieces)

    def read(self, offset: int, size: int) -> bytes:
        """See `BlobAccess`."""
        return bytes(self.view(offset, size))

    def read_all(self) -> bytes:
        """See `BlobAccess`."""
        return b"".join(self.in_order())

    def in_order(self, *, whole: bool = True) -> Generator[bytes]:
        """See `BlobAccess`."""
        hasher = blake3()
        for index in range(self.frames):
            frame = self._frame(index)
            if whole:
                hasher.update(frame)
            yield frame
        if whole:
            self._require_digest(hasher.digest())

    def _require_digest(self, digest: bytes) -> None:
        if digest != self.blob.digest:
            raise CorruptError(
                f"{self._name!r} in remote {self._remote!r} is another blob than its tree says",
                digest=self.blob.digest.hex(),
            )

    def share(self, frames: SharedFrames | None) -> LazyReader:
        """See `BlobAccess`. Frames that come over a network are not shared."""
        return self

    @property
    def is_sharing(self) -> bool:
        """See `BlobAccess`."""
        return False

    def prefetch(self, indices: range) -> None:
        """See `HeldBlob`. Passes over frames of parts that are not here: no decoder waits for a network."""
        if self._cache is None or not self._is_in_parts:
            return
        for index in range(indices.start, min(indices.stop, self.frames)):
            number = self._division.part_of(index)
            with self._lock:
                is_open = number in self._opened
            if (is_open or self._open_kept(number)) and self.hold():
                codec_threads.pool().submit(self._frame, index).add_done_callback(lambda _: self.unhold())

    def _frame(self, index: int) -> bytes:
        if self._cache is not None:
            return self._cache.get_or_load((self.blob.digest, index), lambda: self._load(index))
        last = self._last
        if last[0] != index:
            last = self._last = (index, self._load(index))
        return last[1]

    def _load(self, index: int) -> bytes:
        if self._is_in_parts:
            with suppress(*NOT_KEPT):
                return self._load_kept(index)
        frame = self._unkept.load(index)
        if self.frames == 1:
            self._require_digest(blake3(frame).digest())
        return frame

    def _load_kept(self, index: int) -> bytes:
        number = self._division.part_of(index)
        part = self._division.parts[number]
        self._fetch_ahead(number)
        length = frame_length(self.blob.size, index)
        for _ in range(_ATTEMPTS):
            reader = self._part(number)
            try:
                stored = _read(reader, *part.locate(index))
                if frame_of(stored) == part.frame(index):
                    return CODECS[self.blob.codec].decompress(stored, length, no_dictionary)
            finally:
                reader.unhold()
            with self._lock:
                damaged = self._opened.pop(number, None)
            if damaged is not None:
                damaged.close()
                where = self._parts.objects.where(damaged.blob)
                self._parts.source.quarantine(damaged.blob, CorruptError(f"{where} is damaged"))
        raise CorruptError(
            f"the bytes of {self._name!r} that this store keeps are damaged each time; is its disk well?",
            digest=self.blob.digest.hex(),
        )

    # Parts

    def _part(self, number: int) -> BlobReader:
        """The reader of a part, held; the part is fetched if it is not here."""
        part = self._division.parts[number]
        for _ in range(_ATTEMPTS):
            reader = self._held(number)
            if reader is not None:
                return reader
            if not self._open_kept(number):
                self._fetch([part], first=1)
        raise RemoteError(
            f"parts of {self._name!r} are dropped as fast as they are fetched: the store's budget is too"
            " small for what is read at once; raise it with `castore init --max-size`"
        )

    def _held(self, number: int) -> BlobReader | None:
        with self._lock:
            reader = self._opened.get(number)
            if reader is None or not reader.hold():
                return None
            self._opened.move_to_end(number)
            return reader

    def _open_kept(self, number: int) -> bool:
        """Open a part if it is here."""
        name = self._division.parts[number].name(self._object)
        found = self._parts.index.find(name)
        if found is None or not found.blob.is_here:
            return False
        try:
            reader = self._parts.source.open_here(found.blob)
        except FileNotFoundError:
            return False
        self._parts.source.count_use(name)
        with self._lock:
            closing = [self._opened.pop(number)] if number in self._opened else []
            if self._holds:
                self._opened[number] = reader
            else:
                closing.append(reader)
            while len(self._opened) > _OPEN:
                closing.append(self._opened.popitem(last=False)[1])
        for gone in closing:
            gone.close()
        return True

    def _fetch_ahead(self, number: int) -> None:
        """Have parts fetched that a reader in order will read next."""
        with self._lock:
            if number == self._at + 1:
                self._at, self._window = number, min(2 * self._window, PARTS_AHEAD)
            elif not self._at - 1 <= number <= self._at:
                self._at, self._window, self._asked = number, 1, number + 1
                return
            start = max(self._asked, number + 1)
            stop = min(number + 1 + self._window, len(self._division.parts))
            if stop - start < (self._window + 1) // 2 and stop < len(self._division.parts):
                return
            self._asked = max(self._asked, stop)
        if start < stop:
            # In the background: a network that hangs must not keep a reader from bytes that are here.
            self._ahead(partial(self._fetch_missing, self._division.parts[start:stop]))

    def _fetch_missing(self, parts: Sequence[Part]) -> None:
        named = {part.name(self._object): part for part in parts}
        found = self._parts.index.find_many(list(named))
        missing = [part for name, part in named.items() if name not in found or not found[name].blob.is_here]
        if missing:
            self._fetch(missing, first=0)

    def _fetch(self, parts: list[Part], first: int) -> None:
        self._room.require()
        try:
            self._fetcher.call("parts", remote=self._remote, digest=self._object, parts=parts, first=first)
        except NOT_KEPT as error:
            self._room.note(error)
            raise


def _read(reader: BlobReader, at: int, length: int) -> bytes:
    """Stored bytes of a part; fewer, or none, if the disk does not give them."""
    try:
        return os.pread(reader.fileno(), length, reader.blob.offset + at)
    except OSError as error:
        if error.errno not in AT_FAULT:
            raise
        return b""
