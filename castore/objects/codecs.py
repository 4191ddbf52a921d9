"""The codecs: one independent frame of bytes in, one compressed frame out, and back.

A frame is whole and stands alone: it decodes without its neighbours, carries its own length and (but for ``none``)
its own checksum of the content, and is an ordinary frame of its format, so that stock tools read it. Decoding is
told the exact size to expect and never allocates more than that, whatever the frame's header claims.

Nothing here knows files, seek tables or the index. Adding a codec is adding a row to `CODECS`.
"""

from __future__ import annotations

import operator
import threading
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import lz4.frame
import zstandard

from castore.errors import CorruptError, InvalidValueError
from castore.objects import lz4blocks

#: Uncompressed bytes in every frame of a blob but its last. Part of the format: see docs/format.md.
FRAME_SIZE = 256 * 1024

Buffer = bytes | bytearray | memoryview
#: Gives the decompressor for frames that need the dictionary of this number, or raises CorruptError.
WithDictionary = Callable[[int], zstandard.ZstdDecompressor]
# The flag of a zstd frame's descriptor, its fifth byte, that says whether a checksum follows the content.
_ZSTD_CHECKED = 0x04
# LZ4 frames of more bytes than this are quicker put together and taken apart by hand (lz4blocks.py).
_LZ4_BY_HAND = 4096


class Codec(NamedTuple):
    """How one frame is compressed and decompressed.

    Attributes:
        name: what users write: ``codec="zstd"``.
        suffix: of the loose object's file name.
        levels: the smallest and largest level that `compress` takes.
        level: the default level.
        compress: ``compress(frame, level)`` to bytes.
        decompress: ``decompress(stored, size, with_dictionary)`` to exactly ``size`` bytes, or CorruptError.
        checked: whether a frame carries a checksum of its content, which `decompress` has then compared.
    """

    name: str
    suffix: str
    levels: tuple[int, int]
    level: int
    compress: Callable[[Buffer, int], bytes]
    decompress: Callable[[Buffer, int, WithDictionary], bytes]
    checked: bool


class _Contexts(threading.local):
    """Contexts cost more to make than a small frame to compress, and belong to one thread at a time."""

    def __init__(self) -> None:
        self.compressors: dict[int, zstandard.ZstdCompressor] = {}
        self.decompressor = zstandard.ZstdDecompressor()
        self.lz4 = lz4.frame.create_decompression_context()


_contexts = _Contexts()


def _compressor(level: int) -> zstandard.ZstdCompressor:
    if level not in _contexts.compressors:
        made = zstandard.ZstdCompressor(level=level, write_checksum=True, write_content_size=True)
        _contexts.compressors[level] = made
    return _contexts.compressors[level]


def _zstd_compress(frame: Buffer, level: int) -> bytes:
    compressor = _contexts.compressors.get(level) or _compressor(level)
    compressed: bytes = compressor.compress(frame)
    return compressed


def zstd_compress_many(frames: list[Buffer], level: int) -> list[Buffer]:
    """Compress many frames, none of them empty, to the same bytes as one by one, without the GIL.

    Args:
        frames: contiguous, and left alone meanwhile.
        level: of zstd.
    """
    compressed: Any = _compressor(level).multi_compress_to_buffer(frames)
    return list(compressed)


def no_dictionary(number: int) -> zstandard.ZstdDecompressor:
    """For frames that stand alone."""
    raise CorruptError(f"a zstd frame needs dictionary {number:08x} where none can be")


def _zstd_decompress(stored: Buffer, size: int, with_dictionary: WithDictionary) -> bytes:
    # The decoder allocates what the header claims, so the claim is compared first.
    try:
        claimed = zstandard.frame_content_size(stored)
        if claimed != size:
            raise CorruptError(f"a zstd frame claims {claimed} bytes where {size} belong")
        decompressor = _contexts.decompressor
        # The two bits that say how long the number of its dictionary is: asking zstandard costs ten times as much.
        if stored[4] & 3 and (number := zstandard.get_frame_parameters(stored).dict_id):
            decompressor = with_dictionary(number)
        data: bytes = decompressor.decompress(stored, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise CorruptError(f"a zstd frame does not decode: {error}") from error
    return data


def zstd_decompress_into(stored: memoryview, view: memoryview) -> None:
    """Decode one zstd frame straight into ``view``, which it must fill exactly. Its checksum is not compared.

    For whole reads, which check the digest of all the bytes. Writes to the head of ``stored``.
    """
    try:
        claimed = zstandard.frame_content_size(stored)
        if claimed != len(view):
            raise CorruptError(f"a zstd frame claims {claimed} bytes where {len(view)} belong")
        if not stored[4] & _ZSTD_CHECKED:
            raise CorruptError("a zstd frame keeps no checksum")
        # A frame that says it has no checksum, and has none, is not hashed.
        stored[4] &= ~_ZSTD_CHECKED
        with _contexts.decompressor.stream_reader(stored[:-4]) as reader:
            filled = reader.readinto(view)
    except zstandard.ZstdError as error:
        raise CorruptError(f"a zstd frame does not decode: {error}") from error
    if filled != len(view):
        raise CorruptError(f"a zstd frame holds {filled} bytes where {len(view)} belong")


def _lz4_compress(frame: Buffer, level: int) -> bytes:
    if len(frame) > _LZ4_BY_HAND and level <= 0:  # above, levels mean other methods in other versions of LZ4
        return lz4blocks.compress(frame, level)
    compressed: bytes = lz4.frame.compress(
        frame,
        compression_level=level,
        block_size=lz4.frame.BLOCKSIZE_MAX256KB,
        content_checksum=True,
        store_size=True,
    )
    return compressed


def _lz4_decompress(stored: Buffer, size: int, with_dictionary: WithDictionary) -> bytes:
    data: bytes | None = lz4blocks.decompress(stored, size) if size > _LZ4_BY_HAND else None
    if data is not None:
        return data
    context = _contexts.lz4
    try:
        # One byte more than belongs is enough to see a lie; `lz4.frame.decompress` unfolds a bomb before it sees one.
        data, consumed, ended = lz4.frame.decompress_chunk(context, stored, size + 1)
    except RuntimeError as error:
        lz4.frame.reset_decompression_context(context)
        raise CorruptError(f"an LZ4 frame does not decode: {error}") from error
    if len(data) != size or not ended or consumed != len(stored):
        lz4.frame.reset_decompression_context(context)
        raise CorruptError(f"an LZ4 frame does not hold exactly the {size} bytes that belong in it")
    return data


def _gzip_compress(frame: Buffer, level: int) -> bytes:
    compressor = zlib.compressobj(level, zlib.DEFLATED, wbits=31)
    return compressor.compress(frame) + compressor.flush()


def _gzip_decompress(stored: Buffer, size: int, with_dictionary: WithDictionary) -> bytes:
    decompressor = zlib.decompressobj(wbits=31)
    try:
        # One byte more than belongs is enough to see a lie, and bounds what a bomb can unfold.
        data = decompressor.decompress(stored, size + 1)
    except zlib.error as error:
        raise CorruptError(f"a gzip member does not decode: {error}") from error
    if len(data) != size or not decompressor.eof or decompressor.unused_data:
        raise CorruptError(f"a gzip member does not hold exactly the {size} bytes that belong in it")
    return data


def _none_compress(frame: Buffer, level: int) -> bytes:
    return bytes(frame)


def _none_decompress(stored: Buffer, size: int, with_dictionary: WithDictionary) -> bytes:
    if len(stored) != size:
        raise CorruptError(f"a raw frame holds {len(stored)} bytes where {size} belong")
    return bytes(stored)


CODECS: dict[str, Codec] = {
    codec.name: codec
    for codec in (
        Codec("zstd", ".zst", (-50, 22), 3, _zstd_compress, _zstd_decompress, True),
        Codec("lz4", ".lz4", (-50, 16), 0, _lz4_compress, _lz4_decompress, True),
        Codec("gzip", ".gz", (1, 9), 6, _gzip_compress, _gzip_decompress, True),
        Codec("none", "", (0, 0), 0, _none_compress, _none_decompress, False),
    )
}

#: What `auto` compresses with, when compressing pays.
AUTO_CODEC = "zstd"


def check_codec(name: str, level: int | None) -> tuple[str, int | None]:
    """Return ``(name, level)`` if it names a codec (or ``auto``) and a level that codec has.

    Raises:
        InvalidValueError: it does not; the message lists what there is.

    >>> check_codec("zstd", 19)
    ('zstd', 19)
    """
    if name != "auto" and name not in CODECS:
        raise InvalidValueError(f"unknown codec {name!r}: choose auto, {', '.join(CODECS)}")
    if level is not None:
        low, high = CODECS[AUTO_CODEC if name == "auto" else name].levels
        if not low <= operator.index(level) <= high:
            raise InvalidValueError(f"codec {name!r} has levels {low} to {high}, not {level!r}")
    return name, level
