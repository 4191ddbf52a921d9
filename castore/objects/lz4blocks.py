"""Fast encoder and decoder for LZ4 frames of one block. All LZ4 frames that castore writes have this shape.

The frame functions of the lz4 package hash slowly and copy twice into new memory. The package's block
functions with xxhash take a quarter of the time to decode and three quarters to encode. Frames of any other
shape are left to the frame functions: this module never calls a frame damaged only because its shape is
unknown.
"""

from __future__ import annotations

import struct

import lz4.block
import xxhash

from castore.errors import CorruptError

# Magic number, FLG byte, BD byte (largest block), content size, header checksum (the second byte of the XXH32
# of FLG, BD and content size), block size.
_HEAD = struct.Struct("<IBBQcI")
_MAGIC = 0x184D2204
# Version 1, with content size and content checksum; no block checksums, no dictionary.
_FLAGS = 0b0100_1100
_INDEPENDENT = 0b0010_0000  # block independence; without meaning in a frame of one block
# Largest block size in bytes by BD byte: 64 KiB where that is enough.
_GREATEST = {0x40: 64 * 1024, 0x50: 256 * 1024}
_RAW = 1 << 31
# EndMark (a block size of 0), then the XXH32 of the content.
_END = struct.Struct("<II")


def compress(frame: bytes | bytearray | memoryview, level: int) -> bytes:
    """Compress 1 byte to 256 KiB into one frame with content size and checksum.

    Args:
        frame: the content.
        level: 0, or less for more speed.
    """
    block = lz4.block.compress(frame, store_size=False, acceleration=1 - level)
    length = len(block)
    if length >= len(frame):
        block, length = frame, len(frame) | _RAW
    greatest = min(byte for byte, most in _GREATEST.items() if len(frame) <= most)
    head = _HEAD.pack(_MAGIC, _FLAGS | _INDEPENDENT, greatest, len(frame), b"\0", length)
    return b"".join(
        (head[:14], _header_check(head), head[15:], block, _END.pack(0, xxhash.xxh32_intdigest(frame)))
    )


def _header_check(head: bytes | memoryview) -> bytes:
    return bytes([xxhash.xxh32_intdigest(head[4:14]) >> 8 & 0xFF])


def decompress(stored: bytes | bytearray | memoryview, size: int) -> bytes | None:
    """Return the ``size`` bytes of a frame, checksum compared; None if the frame has another shape.

    Allocates ``size`` bytes, whatever the frame claims.

    Raises:
        CorruptError: the frame has the shape, but not ``size`` bytes with its checksum.
    """
    view = memoryview(stored)
    length = len(view) - _HEAD.size - _END.size
    if length <= 0:
        return None
    magic, flags, greatest, content, check, block = _HEAD.unpack_from(view)
    end, checksum = _END.unpack_from(view, _HEAD.size + length)
    if (
        (magic, flags & ~_INDEPENDENT, content) != (_MAGIC, _FLAGS, size)
        or size > _GREATEST.get(greatest, 0)
        or check != _header_check(view)
        or block & ~_RAW != length
        or end
    ):
        return None
    payload = view[_HEAD.size : _HEAD.size + length]
    try:
        data = bytes(payload) if block & _RAW else lz4.block.decompress(payload, uncompressed_size=size)
    except lz4.block.LZ4BlockError as error:
        raise CorruptError(f"an LZ4 frame does not decode: {error}") from error
    if len(data) != size:
        raise CorruptError(f"an LZ4 frame holds {len(data)} bytes where {size} belong")
    if xxhash.xxh32_intdigest(data) != checksum:
        raise CorruptError("an LZ4 frame's bytes do not have its checksum")
    return data
