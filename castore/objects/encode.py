"""Turns bytes or a file into a stored object: frames compressed on all cores, then the seek table.

Frames are passed in order to a `write` callable. Only a few frames are in memory at a time, whatever the
blob's size. Nothing here decides where an object lies. The caller owns the file, and removes it after a
failure.
"""

from __future__ import annotations

import math
import os
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import blake3
import xxhash

from castore.objects.codec_threads import codec_threads
from castore.objects.codecs import AUTO_CODEC, CODECS, FRAME_SIZE, zstd_compress_many
from castore.objects.dictionaries import DICTIONARY_LIMIT, Dictionary
from castore.objects.frames import build_trailer
from castore.records import Buffer
from castore.system.cpus import hash_threads, usable_cores

if TYPE_CHECKING:
    from concurrent.futures import Future

#: `auto` keeps the compressed form if it saves at least this share; a smaller saving does not pay for
#: decoding.
AUTO_SAVING = 0.05
# Frames per task: handing over a task costs as much as hashing a frame. Runs grow, since each return from a
# codec, a hash or a read waits up to 5 ms for the GIL where another thread runs Python.
_RUN = 4
_LONGEST_RUN = 16
# Frames of all tasks at once, about.
_FRAMES_AHEAD = 64
_SAMPLE_BYTES = 32 * 1024
_SAMPLES = 4
# One core compresses this many bytes in about 0.3 ms; another thread takes 0.1 ms to start.
_SHARED_BYTES = 64 * 1024
# Bytes of small blobs that one task compresses.
_PIECE_BYTES = 256 * 1024


class Encoded(NamedTuple):
    """The result of encoding a blob.

    Attributes:
        stored: bytes written.
        checksums: XXH3-64 of each frame, packed, for raw objects, whose format holds no checksums; else None.
    """

    stored: int
    checksums: bytes | None


def slices(data: Buffer) -> Iterator[memoryview]:
    """Yield the frames of a blob in memory; one empty frame for an empty blob."""
    view = memoryview(data)
    for start in range(0, max(1, len(view)), FRAME_SIZE):
        yield view[start : start + FRAME_SIZE]


def encode_small(
    data: Buffer, codec: str, level: int | None, dictionary: Dictionary | None = None
) -> tuple[str, bytes]:
    """Compress a blob of one frame; returns ``(codec used, frame)``.

    ``auto`` compresses, and falls back to ``none`` if that saves less than `AUTO_SAVING`. The dictionary is
    used for blobs up to `DICTIONARY_LIMIT` if the codec is zstd or ``auto`` and the frame saves at least
    `AUTO_SAVING`.
    """
    if dictionary is not None and codec in ("auto", AUTO_CODEC) and len(data) <= DICTIONARY_LIMIT:
        frame = dictionary.compress(data, CODECS[AUTO_CODEC].level if level is None else level)
        if len(frame) <= len(data) * (1 - AUTO_SAVING):
            return AUTO_CODEC, frame
    chosen = CODECS[AUTO_CODEC if codec == "auto" else codec]
    frame = chosen.compress(data, chosen.level if level is None else level)
    if codec == "auto" and len(frame) > len(data) * (1 - AUTO_SAVING):
        return "none", bytes(data)
    return chosen.name, frame


def is_worth_threads(blobs: Sequence[Buffer]) -> bool:
    """Whether compressing these blobs takes longer than starting threads for it."""
    return sum(map(len, blobs)) >= _SHARED_BYTES


def begin_encoding(
    values: Sequence[tuple[Buffer, Dictionary | None]], codec: str, level: int | None
) -> Iterator[tuple[int, Callable[[], list[tuple[str, Buffer]]]]]:
    """`encode_small_many` in pieces, on all cores if `is_worth_threads`.

    All pieces are begun before the first is yielded, so the caller can store one piece while others are
    compressed.

    Yields:
        ``(number of values, function that waits for their frames)`` of each piece, in order.
    """
    if not is_worth_threads([data for data, _ in values]):
        yield len(values), partial(encode_small_many, values, codec, level)
        return
    step = max(1, len(values) * _PIECE_BYTES // sum(len(data) for data, _ in values))
    pieces = [values[at : at + step] for at in range(0, len(values), step)]
    begun = [codec_threads.begin(partial(encode_small_many, piece, codec, level)) for piece in pieces]
    yield from zip(map(len, pieces), begun, strict=True)


def encode_small_many(
    values: Sequence[tuple[Buffer, Dictionary | None]], codec: str, level: int | None
) -> list[tuple[str, Buffer]]:
    """`encode_small` for many blobs, none of them empty. zstd compresses them without the GIL."""
    chosen = CODECS[AUTO_CODEC if codec == "auto" else codec]
    if chosen.name != "zstd":
        return [encode_small(data, codec, level, dictionary) for data, dictionary in values]
    level = chosen.level if level is None else level
    encoded = _with_dictionaries(values, level)
    rest = [data for at, (data, _) in enumerate(values) if at not in encoded]
    frames = iter(zstd_compress_many(rest, level) if rest else [])
    least = 1 - AUTO_SAVING if codec == "auto" else math.inf
    for at, (data, _) in enumerate(values):
        if at not in encoded:
            frame = next(frames)
            encoded[at] = ("none", data) if len(frame) > len(data) * least else ("zstd", frame)
    return [encoded[at] for at in range(len(values))]


def _with_dictionaries(
    values: Sequence[tuple[Buffer, Dictionary | None]], level: int
) -> dict[int, tuple[str, Buffer]]:
    """Frames of the values for which the dictionary pays, by position in ``values``."""
    places: dict[Dictionary, list[int]] = {}
    for at, (data, dictionary) in enumerate(values):
        if dictionary is not None and len(data) <= DICTIONARY_LIMIT:
            places.setdefault(dictionary, []).append(at)
    encoded: dict[int, tuple[str, Buffer]] = {}
    for dictionary, positions in places.items():
        frames = dictionary.compress_many([values[at][0] for at in positions], level)
        for at, frame in zip(positions, frames, strict=True):
            if len(frame) <= len(values[at][0]) * (1 - AUTO_SAVING):
                encoded[at] = AUTO_CODEC, frame
    return encoded


def choose_codec(codec: str, size: int, read_at: Callable[[int, int], Buffer]) -> str:
    """Resolve ``auto`` for a blob of several frames, from samples spread over it. Other codecs stay.

    The samples are compressed at level 1: data that does not shrink at level 1 does not shrink at level 3
    either.
    """
    if codec != "auto":
        return codec
    step = (size - _SAMPLE_BYTES) // (_SAMPLES - 1)
    sample = b"".join(bytes(read_at(i * step, _SAMPLE_BYTES)) for i in range(_SAMPLES))
    shrunk = CODECS[AUTO_CODEC].compress(sample, 1)
    return AUTO_CODEC if len(shrunk) <= len(sample) * (1 - AUTO_SAVING) else "none"


def encode(
    frames: Iterable[Buffer], size: int, codec: str, level: int | None, write: Callable[[bytes], object]
) -> Encoded:
    """Compress ``frames`` on all cores and write them in order, followed by their seek table.

    Args:
        frames: the blob, cut at `FRAME_SIZE`. A buffer must stay unchanged until its frame has been written.
        size: size of the blob in bytes, for the table.
        codec: a name in `CODECS`, never ``auto``.
        level: level of the codec, or None for its default.
        write: called with each piece.
    """
    encoder = FrameEncoder(codec, level, write)
    try:
        for frame in frames:
            encoder.add(frame)
        return encoder.finish(size)
    finally:
        encoder.abandon()


class FrameEncoder:
    """Compresses frames on all cores, as they come, and writes them in order, with their seek table at the
    end.

    Args:
        codec: a row of `CODECS`, never ``auto``.
        level: of the codec, or None for its default.
        write: takes each piece.
    """

    def __init__(self, codec: str, level: int | None, write: Callable[[bytes], object]) -> None:
        chosen = CODECS[codec]
        self._codec = chosen
        self._level = chosen.level if level is None else level
        self._write = write
        self._lengths = array("I")
        self._tails: list[bytes] = []
        self._run: list[Buffer] = []
        self._run_length = _RUN
        self._longest = max(_RUN, min(_LONGEST_RUN, _FRAMES_AHEAD // usable_cores()))
        self._pending: deque[Future[list[Buffer]]] = deque()
        # Raw objects have no seek table: their checksums go into the index.
        self._checksums = array("Q")
        self._stored = 0

    def add(self, frame: Buffer) -> None:
        """Take the next frame, which must stay unchanged until the next few were taken."""
        if self._codec.name == "none":
            self._checksums.append(xxhash.xxh3_64_intdigest(frame))
            self._put(frame)
            return
        self._run.append(frame)
        if len(self._run) == self._run_length:
            self._submit()
            self._run_length = min(2 * self._run_length, self._longest)
            self._drain(usable_cores() + 1)

    def finish(self, size: int) -> Encoded:
        """Write what is left, and the seek table of a blob of so many bytes."""
        if self._codec.name == "none":
            return Encoded(self._stored, self._checksums.tobytes())
        if self._run:
            self._submit()
        self._drain(0)
        trailer = build_trailer(self._codec.name, size, self._lengths, self._tails)
        self._put(trailer)
        return Encoded(self._stored, None)

    def abandon(self) -> None:
        """Compress no frame that has not been begun."""
        while self._pending:
            self._pending.popleft().cancel()

    def _submit(self) -> None:
        run, self._run = self._run, []
        self._pending.append(codec_threads.pool().submit(self._compress, run))

    def _compress(self, run: list[Buffer]) -> list[Buffer]:
        if self._codec.name == "zstd" and len(run) > 1:
            return zstd_compress_many(run, self._level)
        return [self._codec.compress(frame, self._level) for frame in run]

    def _drain(self, keep: int) -> None:
        pending = self._pending
        while len(pending) > keep or (pending and pending[0].done()):
            frames = pending.popleft().result()
            for frame in frames:
                self._lengths.append(len(frame))
                self._tails.append(bytes(memoryview(frame)[-4:]))
            self._put(b"".join(frames))

    def _put(self, piece: Buffer) -> None:
        self._stored += len(piece)
        self._write(piece)  # type: ignore[arg-type]  # os.write takes any buffer


def encode_one(frame: bytes, size: int, codec: str, write: Callable[[bytes], object]) -> Encoded:
    """Write an object of one frame that is compressed already. A raw one is checked by its digest."""
    trailer = build_trailer(codec, size, [len(frame)], [frame[-4:]])
    write(frame + trailer)
    return Encoded(len(frame) + len(trailer), None)


def raw_checksums(frames: Iterable[Buffer]) -> bytes:
    """The checksums that `encode` returns for a raw object. For rebuilding the index from the object."""
    return encode(frames, 0, "none", None, len).checksums or b""


class HashingFrames:
    """The frames of an open file, hashed as they are read.

    After iteration, `digest` is the BLAKE3 of the bytes that were yielded, and `size` is their number. Both
    hold for exactly these bytes, even if the file is written to meanwhile.
    """

    def __init__(self, fd: int, progress: Callable[[int], object] | None = None) -> None:
        self._fd = fd
        self._progress = progress
        self._hash = blake3.blake3()
        self.size = 0

    def __iter__(self) -> Iterator[memoryview]:
        # Each read, and each hash, waits for the GIL where another thread runs Python: few large ones.
        # The first is what one task compresses, meanwhile.
        length = _RUN * FRAME_SIZE
        while True:
            data = _read_full(self._fd, length, self.size)
            if data or not self.size:
                self._hash.update(data)
                self.size += len(data)
                yield from slices(data)
                if self._progress is not None:
                    self._progress(len(data))
            if len(data) < length:
                return
            length = _LONGEST_RUN * FRAME_SIZE

    @property
    def digest(self) -> bytes:
        """BLAKE3-256 of the frames yielded so far."""
        return self._hash.digest()


def _read_full(fd: int, length: int, offset: int) -> bytes:
    data = os.pread(fd, length, offset)
    while data and len(data) < length:
        more = os.pread(fd, length - len(data), offset + len(data))
        if not more:
            break
        data += more
    return data


def hash_file(fd: int, limit: int | None = None) -> tuple[bytes, int]:
    """``(digest, size)`` of an open file, or of its first ``limit`` bytes. Constant memory, all cores."""
    hasher = blake3.blake3(max_threads=hash_threads())
    # Large enough to share between cores, small enough to stay in their caches.
    buffer = bytearray(2 * 1024 * 1024)
    view = memoryview(buffer)
    size = 0
    while read := os.preadv(fd, [view if limit is None else view[: limit - size]], size):
        hasher.update(view[:read])
        size += read
    return hasher.digest(), size
