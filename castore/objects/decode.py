"""Reads a stored object: any range from the frames that it touches, or the whole on all cores.

All bytes are checked. A range read checks each frame that it uses: by the checksum inside the frame (zstd,
LZ4, gzip), by the checksum in the index (raw), or by the digest (blobs of one frame). A whole read checks the
digest over all the bytes. A reader holds an open file descriptor, which keeps the bytes readable after gc
unlinks the object.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING

import blake3
import xxhash

from castore.errors import CorruptError
from castore.objects.codec_threads import codec_threads
from castore.objects.codecs import CODECS, FRAME_SIZE, WithDictionary, no_dictionary, zstd_decompress_into
from castore.objects.frames import FrameTable, frame_count, frame_length, read_table
from castore.objects.packs import PackFile
from castore.records import Blob
from castore.system.cpus import usable_cores
from castore.system.forks import ForkSafeLock
from castore.system.io_errors import AT_FAULT
from castore.system.ram_cache import MemoryLRU

if TYPE_CHECKING:
    from concurrent.futures import Future

    from castore.shm.shared_frames import ObjectFrames, SharedFrames

# Frames that a worker decodes in a row, at most, for a reader that takes them in order.
_RUN = 8
# One lock for all readers; each holds it for less than a microsecond. A lock per reader would have to be
# replaced after a fork.
_holds_lock = ForkSafeLock()


class BlobReader:
    """Random access to one blob.

    Args:
        blob: the blob and its place in the file.
        fd: an open descriptor. The reader closes it unless ``pack`` is given.
        pack: the open pack that ``fd`` belongs to. The reader holds it until the reader is closed.
        checksums: XXH3-64 of each frame, packed; needed for a raw blob of several frames.
        cache: frames shared with other readers, or None to keep only the last frame used.
        where: the file's name in error messages.
        with_dictionary: returns decompressors for frames that were compressed with a dictionary.
    """

    def __init__(
        self,
        blob: Blob,
        fd: int,
        *,
        pack: PackFile | None = None,
        checksums: bytes | None = None,
        cache: MemoryLRU[bytes] | None = None,
        where: str = "",
        with_dictionary: WithDictionary = no_dictionary,
    ) -> None:
        self.blob = blob
        self._with_dictionary = with_dictionary
        self._fd = fd
        self._pack = pack
        self._cache = cache
        self._where = where
        self.frames = frame_count(blob.size)
        fits = checksums is not None and len(checksums) == 8 * self.frames
        self._checksums = memoryview(checksums).cast("Q") if checksums is not None and fits else None
        self._table: FrameTable | None = None
        self._codec = CODECS[blob.codec]
        self._digest_hex = blob.digest.hex()
        self._last: tuple[int, bytes] = (-1, b"")
        self._holds = 1
        self._shared: ObjectFrames | None = None

    def share(self, frames: SharedFrames | None) -> BlobReader:
        """Take frames from shared memory, and put decoded frames there. Returns this reader.

        Applies only to compressed objects of several frames: small objects decode quickly, and the kernel's
        page cache shares raw ones.
        """
        if frames is not None and self.frames > 1 and self.blob.codec != "none":
            self._shared = frames.of(self.blob.digest, self._fd)
        return self

    @property
    def is_sharing(self) -> bool:
        """Whether this reader searches shared memory for frames first."""
        return self._shared is not None

    def close(self) -> None:
        """Close the file as soon as no prefetch needs it. Reading afterwards is an error."""
        self.unhold()

    def hold(self) -> bool:
        """Keep the file open until `unhold`, even over a `close`; False if it is closed already."""
        with _holds_lock.lock:
            if self._holds == 0:
                return False
            self._holds += 1
            return True

    def unhold(self) -> None:
        """Undo `hold`, or the hold that a new reader starts with."""
        # Once a descriptor is closed, its number may become another file's: every thread that reads holds it
        # open.
        with _holds_lock.lock:
            self._holds -= 1
            if self._holds:
                return
        if self._pack is None:
            os.close(self._fd)
        self._pack = None

    def fileno(self) -> int:
        """The descriptor that the reader reads from. It is open as long as the reader is held."""
        return self._fd

    def file_length(self) -> int:
        """Length in bytes of the open file, even if its name now belongs to another file."""
        return os.fstat(self._fd).st_size

    def unlinked(self) -> bool:
        """Whether the file has been unlinked, so that its bytes last only as long as it is open."""
        return os.fstat(self._fd).st_nlink == 0

    # Finding frames

    def _read_at(self, offset: int, length: int) -> bytes:
        try:
            data = os.pread(self._fd, length, self.blob.offset + offset)
            if len(data) < length:  # the file ends there, or the second read fails on a bad sector
                data += os.pread(self._fd, length - len(data), self.blob.offset + offset + len(data))
        except OSError as error:
            if error.errno not in AT_FAULT:
                raise
            raise CorruptError(f"{self._where} cannot be read: {error.strerror}") from error
        if len(data) != length:
            raise CorruptError(f"{self._where} ends {length - len(data)} bytes early")
        return data

    def _read_into(self, target: memoryview, position: int) -> None:
        try:
            read = os.preadv(self._fd, [target], position)
            if read < len(target):
                read += os.preadv(self._fd, [target[read:]], position + read)
        except OSError as error:
            if error.errno not in AT_FAULT:
                raise
            raise CorruptError(f"{self._where} cannot be read: {error.strerror}") from error
        if read != len(target):
            raise CorruptError("the object ends early")

    def table(self) -> FrameTable:
        """Where the frames lie. The table is read once."""
        table = self._table
        if table is None:
            blob = self.blob
            # Compared before memory is allocated for the size that the row claims.
            if blob.offset + blob.stored > self.file_length():
                raise CorruptError(f"{self._where} ends before the {blob.stored} bytes of the object do")
            if self.frames == 1 and blob.pack > 0:  # a packed blob of one frame has no table
                table = FrameTable([0, blob.stored], None)
            else:
                table = read_table(blob.codec, blob.size, blob.stored, self._read_at)
            self._table = table
        return table

    def _stored_frame(self, index: int) -> bytes:
        table = self.table()
        stored = self._read_at(table.offsets[index], table.length(index))
        table.check(index, stored)
        return stored

    def _load(self, index: int) -> bytes:
        shared = self._shared
        frame = None if shared is None else shared.read(index, 0, frame_length(self.blob.size, index))
        return self._decode(index) if frame is None else frame

    def _decode(self, index: int) -> bytes:
        try:
            stored, length = self._stored_frame(index), frame_length(self.blob.size, index)
            frame = self._codec.decompress(stored, length, self._with_dictionary)
            if self.frames == 1:
                if blake3.blake3(frame).digest() != self.blob.digest:
                    raise CorruptError("the bytes do not have the digest they are stored under")
            elif not self._codec.checked:
                if self._checksums is None:
                    raise CorruptError("the index keeps no checksums for this raw object")
                if xxhash.xxh3_64_intdigest(frame) != self._checksums[index]:
                    raise CorruptError("the frame's bytes differ from the checksum the index keeps")
        except CorruptError as error:
            raise self._damaged(f"frame {index}: {error}") from error
        if self._shared is not None:
            self._shared.offer(index, frame)
        return frame

    def _damaged(self, why: str) -> CorruptError:
        if self._shared is not None:
            self._shared.discard(self.frames)
        return CorruptError(
            f"blob {self._digest_hex} is damaged in {self._where}: {why}",
            digest=self._digest_hex,
            where=self._where,
        )

    def frame(self, index: int) -> bytes:
        """Return frame ``index``, checked.

        Raises:
            CorruptError: the stored bytes differ from those that were put.
        """
        if self._cache is not None:
            return self._cache.get_or_load((self.blob.digest, index), lambda: self._load(index))
        last = self._last
        if last[0] != index:
            last = self._last = (index, self._load(index))
        return last[1]

    def prefetch(self, indices: range) -> None:
        """Have workers load those frames into ``cache``; frames beyond the blob's end are ignored.

        Does nothing without a cache, nor for frames that the cache holds.
        """
        if self._cache is None:
            return
        # Each worker takes a run of frames: handing one over costs a good part of the time to decode it.
        step = max(1, len(indices) // usable_cores())
        for start in range(indices.start, min(indices.stop, self.frames), step):
            if self.hold():
                run = range(start, min(start + step, indices.stop, self.frames))
                # The read that needs a damaged frame reports it; the prefetch, which only guesses, does not.
                codec_threads.pool().submit(self._load_run, run).add_done_callback(self._prefetched)

    def _load_run(self, indices: range) -> None:
        for index in indices:
            self.frame(index)

    def _prefetched(self, future: Future[None]) -> None:
        self.unhold()

    # Reading

    def view(self, offset: int, size: int) -> bytes | memoryview:
        """Like `read`, without a copy where one frame holds the range."""
        end = min(offset + size, self.blob.size)
        first = offset // FRAME_SIZE
        if offset < end and first == (end - 1) // FRAME_SIZE:
            begin = first * FRAME_SIZE
            return memoryview(self.frame(first))[offset - begin : end - begin]
        return self.read(offset, size)

    def read(self, offset: int, size: int) -> bytes:
        """Return ``size`` bytes from ``offset``; fewer only at the end of the blob.

        Raises:
            CorruptError: a frame in the range differs from what was put.
        """
        end = min(offset + size, self.blob.size)
        if offset >= end:
            return b""
        first, last = offset // FRAME_SIZE, (end - 1) // FRAME_SIZE
        begin = offset - first * FRAME_SIZE
        if first == last:
            return self._piece(first, begin, begin + end - offset)
        pieces = [self._piece(first, begin, FRAME_SIZE)]
        pieces += [self._piece(index, 0, FRAME_SIZE) for index in range(first + 1, last)]
        pieces.append(self._piece(last, 0, end - last * FRAME_SIZE))
        return b"".join(pieces)

    def _piece(self, index: int, begin: int, end: int) -> bytes:
        """Return part of a frame. From a frame in shared memory only that part is copied."""
        if self._shared is None or self._cache is not None or self._last[0] == index:
            return self.frame(index)[begin:end]  # a slice of the whole frame is no copy
        piece = self._shared.read(index, begin, end)
        if piece is None:
            frame = self._decode(index)
            self._last = (index, frame)
            piece = frame[begin:end]
        return piece

    def read_all(self) -> bytes:
        """Return the whole blob, decoded on all cores, with its digest checked.

        Raises:
            CorruptError: the bytes differ from those that were put.
        """
        if self.frames == 1:
            return self._load(0)
        try:
            # First: this compares the row with the file's length before `size` bytes are allocated.
            self.table()
            from castore.objects.writable_bytes import writable_bytes

            data, view = writable_bytes(self.blob.size)
            self._fill(view)
        except CorruptError as error:
            raise self._damaged(str(error)) from error
        return data

    def in_order(self, *, whole: bool = True) -> Generator[bytes]:
        """All frames in order, checked, decoded on all cores a few ahead of whoever takes them.

        Looks ahead the further the more was taken, so the first frames alone cost little more than
        themselves.

        Args:
            whole: compare the digest of all bytes at the end, behind the last frame.

        Raises:
            CorruptError: it is not what was put.
        """
        if not self.hold():  # until the end: the reader may be closed while frames are still decoded
            raise ValueError("the blob is closed")
        hasher = blake3.blake3() if whole and self.frames > 1 else None  # one frame is checked by its digest
        owner, taken = os.getpid(), 1
        pending: deque[tuple[range, Future[list[bytes]]]] = deque()
        try:
            if self.frames > 1:
                try:
                    self.table()
                except CorruptError as error:
                    raise self._damaged(str(error)) from error
            first_frame = self._load(0)  # in this thread: a reader of the first rows starts no others
            if hasher is not None:
                hasher.update(first_frame)
            yield first_frame
            for run in _runs(self.frames):
                pending.append((run, codec_threads.pool().submit(self._load_all, run)))
                while len(pending) > min(taken, 2 * usable_cores()) or (pending and run.stop == self.frames):
                    first, future = pending.popleft()
                    # In a forked child nobody works on what the parent asked for.
                    frames = future.result() if os.getpid() == owner else self._load_all(first)
                    taken += 1
                    for frame in frames:
                        if hasher is not None:
                            hasher.update(frame)
                        yield frame
        finally:
            for _, future in pending if os.getpid() == owner else ():
                future.cancel() or future.exception()  # nobody may read from the file once it is let go
            self.unhold()
        if hasher is not None and hasher.digest() != self.blob.digest:
            raise self._damaged("the bytes do not have the digest they are stored under")

    def _load_all(self, run: range) -> list[bytes]:
        return [self._load(index) for index in run]

    def _fill(self, view: memoryview) -> None:
        hasher = blake3.blake3()
        pool = codec_threads.pool()
        # Workers take frames in short runs, which share the queue's cost. This thread hashes the runs in
        # order, while the bytes are still in the CPU's cache.
        run = max(1, min(16, self.frames // (4 * usable_cores())))
        starts = range(0, self.frames, run)
        futures = [
            pool.submit(self._decode_run, view, start, min(start + run, self.frames)) for start in starts
        ]
        try:
            for start, future in zip(starts, futures, strict=True):
                future.result()
                hasher.update(view[start * FRAME_SIZE : (start + run) * FRAME_SIZE])
        finally:
            for future in futures:
                future.cancel()
            for future in futures:
                if not future.cancelled():
                    future.exception()  # wait: no worker may write to the view after this returns
        if hasher.digest() != self.blob.digest:
            raise CorruptError("the bytes do not have the digest they are stored under")

    def _decode_run(self, view: memoryview, start: int, stop: int) -> None:
        target = view[start * FRAME_SIZE : stop * FRAME_SIZE]
        if self.blob.codec == "none":
            self._read_into(target, self.blob.offset + start * FRAME_SIZE)
            return
        table = self.table()
        room = memoryview(bytearray(max(table.length(index) for index in range(start, stop))))
        for index in range(start, stop):
            frame, target = target[:FRAME_SIZE], target[FRAME_SIZE:]
            if self._shared is not None and self._shared.fill(index, frame):
                continue
            stored = room[: table.length(index)]
            self._read_into(stored, self.blob.offset + table.offsets[index])
            table.check(index, stored)
            if self.blob.codec == "zstd" and self._shared is None:
                zstd_decompress_into(stored, frame)
            else:  # other processes may read a shared frame before the digest is compared, so check it here
                frame[:] = self._codec.decompress(stored, len(frame), no_dictionary)
            if self._shared is not None:
                self._shared.offer(index, frame)


def _runs(frames: int) -> Iterator[range]:
    """Frames behind the first that are handed to a worker together: at first two, then more and more."""
    start, length = 1, 2
    while start < frames:
        yield range(start, min(start + length, frames))
        start, length = start + length, min(2 * length, _RUN)
