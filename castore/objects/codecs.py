"""The codecs: each compresses one independent frame and decompresses it again.

A frame decodes without its neighbours. A frame carries its own length and, except with ``none``, a checksum
of its content. Stock tools read a frame, since its format has nothing of castore's. The caller passes the
exact size to expect; decoding never allocates more than that, whatever the frame's header claims.

Nothing here uses files, seek tables or the index. To add a codec, add a row to `CODECS`.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import lz4.frame
import zstandard

from castore.errors import CorruptError, InvalidValueError
from castore.objects import lz4blocks
from castore.records import Buffer
from castore.units import as_whole

#: Uncompressed bytes in every frame of a blob except its last. Part of the format: see docs/format.md.
FRAME_SIZE = 256 * 1024

#: Returns the decompressor for frames that need the dictionary of this number, or raises CorruptError.
WithDictionary = Callable[[int], zstandard.ZstdDecompressor]
# Content_Checksum_flag in a zstd frame's Frame_Header_Descriptor, which is the frame's fifth byte.
_ZSTD_CHECKED = 0x04
# lz4blocks.py is faster than the lz4 package's frame functions for LZ4 frames of more bytes than this.
_LZ4_BY_HAND = 4096


class Codec(NamedTuple):
    """How one frame is compressed and decompressed.

    Attributes:
        name: the name that users write: ``codec="zstd"``.
        suffix: suffix of a loose object's file name.
        levels: the smallest and largest level that `compress` takes.
        level: the default level.
        compress: ``compress(frame, level)`` returns the compressed frame.
        decompress: ``decompress(stored, size, with_dictionary)`` returns exactly ``size`` bytes or raises
            CorruptError.
        checked: whether a frame carries a checksum of its content; `decompress` compares it.
    """

    name: str
    suffix: str
    levels: tuple[int, int]
    level: int
    compress: Callable[[Buffer, int], bytes]
    decompress: Callable[[Buffer, int, WithDictionary], bytes]
    checked: bool


class _Contexts(threading.local):
    """Contexts of one thread. Creating a context costs more than compressing a small frame."""

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
    """Compress many frames without the GIL, to the same bytes as one by one.

    Args:
        frames: contiguous buffers, none of them empty. They must not change during the call.
        level: zstd level.
    """
    compressed: Any = _compressor(level).multi_compress_to_buffer(frames)
    return list(compressed)


def no_dictionary(number: int) -> zstandard.ZstdDecompressor:
    """A `WithDictionary` for frames that need no dictionary: always raises CorruptError."""
    raise CorruptError(f"a zstd frame needs dictionary {number:08x} where none can be")


def _zstd_decompress(stored: Buffer, size: int, with_dictionary: WithDictionary) -> bytes:
    # The decoder allocates the size that the header claims, so the claim is compared first.
    try:
        claimed = zstandard.frame_content_size(stored)
        if claimed != size:
            raise CorruptError(f"a zstd frame claims {claimed} bytes where {size} belong")
        decompressor = _contexts.decompressor
        # Dictionary_ID_flag: 0 means no dictionary. This test costs a tenth of `get_frame_parameters`.
        if stored[4] & 3 and (number := zstandard.get_frame_parameters(stored).dict_id):
            decompressor = with_dictionary(number)
        data: bytes = decompressor.decompress(stored, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise CorruptError(f"a zstd frame does not decode: {error}") from error
    return data


def zstd_decompress_into(stored: memoryview, view: memoryview) -> None:
    """Decode one zstd frame straight into ``view``, without comparing its checksum.

    For whole reads: these check the digest of all the bytes. Changes the header in ``stored``.

    Raises:
        CorruptError: the frame does not decode, carries no checksum, or does not fill ``view`` exactly.
    """
    try:
        claimed = zstandard.frame_content_size(stored)
        if claimed != len(view):
            raise CorruptError(f"a zstd frame claims {claimed} bytes where {len(view)} belong")
        if not stored[4] & _ZSTD_CHECKED:
            raise CorruptError("a zstd frame keeps no checksum")
        # Without the flag and the four checksum bytes the decoder does not hash the content.
        stored[4] &= ~_ZSTD_CHECKED
        with _contexts.decompressor.stream_reader(stored[:-4]) as reader:
            filled = reader.readinto(view)
    except zstandard.ZstdError as error:
        raise CorruptError(f"a zstd frame does not decode: {error}") from error
    if filled != len(view):
        raise CorruptError(f"a zstd frame holds {filled} bytes where {len(view)} belong")


def _lz4_compress(frame: Buffer, level: int) -> bytes:
    if len(frame) > _LZ4_BY_HAND and level <= 0:  # what a level above 0 means depends on LZ4's version
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
        # One byte beyond `size` is enough to detect an oversized frame. `lz4.frame.decompress` would expand a
        # decompression bomb in full first.
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
        # One byte beyond `size` is enough to detect an oversized member, and bounds a decompression bomb.
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

#: The codec that `auto` uses when compression pays.
AUTO_CODEC = "zstd"


def check_codec(name: str, level: int | None) -> tuple[str, int | None]:
    """Return ``(name, level)`` if ``name`` is a codec (or ``auto``) and has that level; None is its default.

    Raises:
        InvalidValueError: there is no such codec or level; the message lists the choices.

    >>> check_codec("zstd", 19)
    ('zstd', 19)
    """
    if name not in ("auto", *CODECS):  # no look-up in the dict, for a list cannot be hashed
        raise InvalidValueError(f"unknown codec {name!r}: choose auto, {', '.join(CODECS)}")
    if level is not None:
        low, high = CODECS[AUTO_CODEC if name == "auto" else name].levels
        number = as_whole(level)
        if number is None or not low <= number <= high:
            raise InvalidValueError(f"codec {name!r} has the levels {low} to {high}, not {level!r}")
    return name, level
