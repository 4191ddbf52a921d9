"""Seek tables: where each frame of an object lies. The table follows the frames, and stock tools skip it.

zstd and LZ4 objects end in the seek table of the Zstandard Seekable Format (a skippable frame, which both
formats have). gzip objects end in empty members whose extra field holds the table. Raw objects have no table:
the position of a frame follows from its index. All frames of a blob except the last hold FRAME_SIZE bytes.

Parsing trusts nothing: a table that does not add up to the object's length raises CorruptError. Reading a
table takes memory in proportion to the bytes that exist.
"""

from __future__ import annotations

import struct
import zlib
from array import array
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

from castore.errors import CorruptError
from castore.objects.codecs import FRAME_SIZE
from castore.records import Buffer

ReadAt = Callable[[int, int], bytes]

_SKIPPABLE = struct.Struct("<II")
_SKIPPABLE_MAGIC = 0x184D2A5E
_FOOTER = struct.Struct("<IBI")
_FOOTER_MAGIC = 0x8F92EAB1
_WITH_CHECKSUMS = 0x80

# An empty gzip member: header with FEXTRA, one subfield, an empty deflate block, CRC and length of nothing.
_GZIP_HEAD = struct.Struct("<4sIBBHccH")
_GZIP_EMPTY = b"\x03\x00" + bytes(8)
_GZIP_CHUNK = 16_000  # frames per member: an extra field holds at most 65,535 bytes
_GZIP_END = struct.Struct("<QQQI")  # offset of the table, frames, size of the blob, CRC-32 of the table


class FrameTable(NamedTuple):
    """Frame ``i`` lies at bytes ``offsets[i]`` to ``offsets[i + 1]`` of the object.

    Attributes:
        offsets: one more entry than there are frames.
        checksums: low 32 bits of XXH64 of each frame's content if the format keeps them (zstd), else None.
    """

    offsets: Sequence[int]
    checksums: Sequence[int] | None

    def length(self, index: int) -> int:
        """Stored bytes of frame ``index``."""
        return self.offsets[index + 1] - self.offsets[index]

    def check(self, index: int, stored: Buffer) -> None:
        """Compare the checksum at the end of a stored frame with the table's, if the table has checksums.

        Raises:
            CorruptError: the two differ.
        """
        if self.checksums is not None and stored[-4:] != self.checksums[index].to_bytes(4, "little"):
            raise CorruptError("a frame's checksum differs from the seek table's")


def frame_count(size: int) -> int:
    """Number of frames of a blob of ``size`` bytes; an empty blob has one empty frame."""
    return max(1, -(-size // FRAME_SIZE))


def frame_length(size: int, index: int) -> int:
    """Uncompressed length in bytes of frame ``index`` of a blob of ``size`` bytes."""
    return min(FRAME_SIZE, size - index * FRAME_SIZE)


def raw_table(size: int) -> FrameTable:
    """The table of an uncompressed object."""
    return FrameTable([*range(0, size, FRAME_SIZE), size] if size else [0, 0], None)


def build_trailer(codec: str, size: int, lengths: Sequence[int], tails: Sequence[Buffer]) -> bytes:
    """Return the bytes that follow the frames.

    Args:
        codec: codec of the object.
        size: uncompressed size of the blob in bytes.
        lengths: compressed length of each frame in bytes.
        tails: last four bytes of each compressed frame; in zstd frames they are the content's checksum.
    """
    if codec == "none":
        return b""
    if codec == "gzip":
        return _gzip_trailer(size, lengths)
    checked = codec == "zstd"
    columns: list[Sequence[int]] = [lengths, [frame_length(size, i) for i in range(len(lengths))]]
    if checked:
        columns.append([int.from_bytes(tail, "little") for tail in tails])
    cells = [cell for row in zip(*columns, strict=True) for cell in row]
    body = struct.pack(f"<{len(cells)}I", *cells)
    footer = _FOOTER.pack(len(lengths), _WITH_CHECKSUMS if checked else 0, _FOOTER_MAGIC)
    return _SKIPPABLE.pack(_SKIPPABLE_MAGIC, len(body) + len(footer)) + body + footer


def read_table(codec: str, size: int, stored: int, read_at: ReadAt) -> FrameTable:
    """Parse and check the table of a stored object.

    Args:
        codec: codec of the object.
        size: uncompressed size of the blob in bytes.
        stored: length of the whole object in bytes.
        read_at: ``read_at(offset, length)`` returns bytes of the object.

    Raises:
        CorruptError: there is no table, or it does not fit the object.
    """
    if codec == "none":
        if stored != size:
            raise CorruptError(f"a raw object of {size} bytes is {stored} bytes long")
        return raw_table(size)
    table = (
        _read_gzip(size, stored, read_at) if codec == "gzip" else _read_seekable(codec, size, stored, read_at)
    )
    if any(start >= end for start, end in zip(table.offsets, table.offsets[1:], strict=False)):
        raise CorruptError("the seek table lists an empty frame")
    return table


def probe_size(codec: str, stored: int, read_at: ReadAt) -> int:
    """Uncompressed size of the blob in a stored object, from the trailer alone. For rebuilding the index.

    Raises:
        CorruptError: the object ends in no trailer. A false size is detected when the table is read.
    """
    if codec == "none":
        return stored
    if codec == "gzip":
        length = _GZIP_END.size + len(_GZIP_EMPTY)
        size = _GZIP_END.unpack(_tail(stored, length, read_at)[: _GZIP_END.size])[2]
    else:
        # The table ends in the last frame's size, its checksum (zstd only) and the footer.
        length = _FOOTER.size + (8 if codec == "zstd" else 4)
        tail = _tail(stored, length, read_at)
        count = _FOOTER.unpack(tail[-_FOOTER.size :])[0]
        size = (count - 1) * FRAME_SIZE + int.from_bytes(tail[:4], "little")
    if not 0 <= size < 1 << 62 or frame_count(size) > stored:
        raise CorruptError(f"the object ends in no seek table, or claims {size} bytes")
    return int(size)


def _tail(stored: int, length: int, read_at: ReadAt) -> bytes:
    tail = read_at(stored - length, length) if stored >= length else b""
    if len(tail) != length:
        raise CorruptError("the object is too short for a seek table")
    return tail


def _read_seekable(codec: str, size: int, stored: int, read_at: ReadAt) -> FrameTable:
    count = frame_count(size)
    checked = codec == "zstd"
    cells = 3 if checked else 2
    length = _SKIPPABLE.size + count * cells * 4 + _FOOTER.size
    if stored < length:
        raise CorruptError(f"an object of {stored} bytes is too short for its seek table of {count} frames")
    raw = read_at(stored - length, length)
    if len(raw) != length:
        raise CorruptError("the seek table is cut off")
    expected_head = _SKIPPABLE.pack(_SKIPPABLE_MAGIC, length - _SKIPPABLE.size)
    expected_foot = _FOOTER.pack(count, _WITH_CHECKSUMS if checked else 0, _FOOTER_MAGIC)
    if raw[: _SKIPPABLE.size] != expected_head or raw[-_FOOTER.size :] != expected_foot:
        raise CorruptError(f"no seek table of {count} frames at the end of the object")
    table = array("I", raw[_SKIPPABLE.size : -_FOOTER.size])
    sizes = table[1::cells]
    if any(s != FRAME_SIZE for s in sizes[:-1]) or sizes[-1] != frame_length(size, count - 1):
        raise CorruptError(f"the seek table's frames do not add up to {size} bytes")
    offsets = array("Q", accumulate(table[0::cells], initial=0))
    if offsets[-1] != stored - length:
        raise CorruptError("the seek table's frames do not fill the object")
    return FrameTable(offsets, table[2::cells] if checked else None)


def _gzip_member(kind: bytes, body: bytes) -> bytes:
    head = _GZIP_HEAD.pack(b"\x1f\x8b\x08\x04", 0, 0, 255, len(body) + 4, b"C", kind, len(body))
    return head + body + _GZIP_EMPTY


def _gzip_trailer(size: int, lengths: Sequence[int]) -> bytes:
    parts = []
    for start in range(0, len(lengths), _GZIP_CHUNK):
        chunk = lengths[start : start + _GZIP_CHUNK]
        parts.append(_gzip_member(b"T", struct.pack(f"<{len(chunk)}I", *chunk)))
    # The last member states where the table begins and holds a CRC of the table, which gzip itself does not
    # have.
    table = b"".join(parts)
    end = _GZIP_END.pack(sum(lengths), len(lengths), size, zlib.crc32(table))
    return table + _gzip_member(b"E", end)


def _read_gzip(size: int, stored: int, read_at: ReadAt) -> FrameTable:
    count = frame_count(size)
    end_length = len(_gzip_member(b"E", bytes(_GZIP_END.size)))
    members = -(-count // _GZIP_CHUNK)
    length = count * 4 + members * len(_gzip_member(b"T", b"")) + end_length
    if stored < length:
        raise CorruptError(f"an object of {stored} bytes is too short for its seek table of {count} frames")
    raw = read_at(stored - length, length)
    # A comparison with a trailer built from the listed lengths checks every byte.
    lengths = array("I")
    position = _GZIP_HEAD.size
    while len(lengths) < count:
        here = min(_GZIP_CHUNK, count - len(lengths))
        lengths.frombytes(raw[position : position + here * 4])
        position += here * 4 + len(_GZIP_EMPTY) + _GZIP_HEAD.size
    if raw != _gzip_trailer(size, lengths):
        raise CorruptError(f"no seek table of {count} frames at the end of the object")
    offsets = array("Q", accumulate(lengths, initial=0))
    if offsets[-1] != stored - length:
        raise CorruptError("the seek table's frames do not fill the object")
    return FrameTable(offsets, None)
