"""Pages: the immutable pieces of a tree, as bytes. A leaf has rows of names, an inner page has rows of pages.

A page is named by BLAKE3 of its bytes, which are checked before they are decompressed. Decoding trusts
nothing: names, digests, sizes and frames of each row are checked, so a row that `decode` returns is sound,
though not necessarily true. Nothing here knows how rows are divided into pages.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgpack
import zstandard
from blake3 import blake3

from castore.errors import CastoreError, CorruptError
from castore.names import check_name
from castore.objects.codecs import CODECS
from castore.objects.frames import frame_count
from castore.records import DIGEST_SIZE

#: Bytes of a frame in `Place.frames`: stored length (u32) and BLAKE3 of the stored frame, cut to 128 bits.
FRAME = struct.Struct("<I16s")
#: Upper bound in bytes of a page, compressed or not. A page holds one row at least.
PAGE_LIMIT = 64 << 20
#: Blobs of at most this many stored bytes travel in packs, larger ones as objects of their own.
PACKED_LIMIT = 1 << 20

_MAGIC = b"castore page 1\r\n"
_LARGEST = 1 << 62
_CODEC_IDS = tuple(CODECS)
_LEAF = ("names", "digests", "sizes", "serializers", "metadata", "created", "expires")
_PLACES = ("objects", "which", "offsets", "stored", "codecs", "frames")
_INNER = ("firsts", "pages", "starts", "entries", "logical", "stored")


class Place(NamedTuple):
    """Where a blob lies in a remote.

    Attributes:
        object: BLAKE3 of all bytes of the object, 32 raw bytes.
        offset: of the blob's first frame in a pack; 0 if the object is the blob's own.
        stored: length in bytes as stored, seek table included.
        codec: ``"zstd"``, ``"lz4"``, ``"gzip"`` or ``"none"``.
        frames: a `FRAME` for each frame, in order.
    """

    object: bytes
    offset: int
    stored: int
    codec: str
    frames: bytes

    @property
    def is_packed(self) -> bool:
        """Whether the object is a pack."""
        return self.offset > 0


class Row(NamedTuple):
    """A name in a tree: an entry and its blob's place. The attributes are those of `castore.Entry`, with
    ``digest`` as raw bytes and ``metadata`` as JSON text or None.
    """

    name: str
    digest: bytes
    size: int
    serializer: str
    metadata: str | None
    created: float
    expires: float | None
    place: Place


class Child(NamedTuple):
    """A page below an inner page.

    Attributes:
        first: the smallest name below it.
        page: its digest.
        is_start: whether its first row begins a page by itself, however the rows before it change.
        entries: names below it.
        logical: sum of their sizes in bytes.
        stored: the same, as stored.
    """

    first: str
    page: bytes
    is_start: bool
    entries: int
    logical: int
    stored: int


class Page(NamedTuple):
    """A decoded page: ``rows`` of a leaf (level 0), or ``children`` of an inner page."""

    level: int
    rows: Sequence[Row]
    children: Sequence[Child]


def digest_of(data: bytes) -> bytes:
    """The name of a page, a commit or an object: BLAKE3-256 of its bytes."""
    return blake3(data).digest()


def frame_of(stored: bytes | memoryview) -> bytes:
    """The `FRAME` of a stored frame."""
    return FRAME.pack(len(stored), blake3(stored).digest(length=16))


def encode_leaf(rows: Sequence[Row]) -> bytes:
    """The bytes of a leaf; ``rows`` are sorted by name."""
    objects = {row.place.object: None for row in rows}
    numbers = {digest: number for number, digest in enumerate(objects)}
    return _encode(
        0,
        {
            "names": [row.name for row in rows],
            "digests": b"".join(row.digest for row in rows),
            "sizes": [row.size for row in rows],
            "serializers": [row.serializer for row in rows],
            "metadata": [row.metadata for row in rows],
            "created": [row.created for row in rows],
            "expires": [row.expires for row in rows],
            "objects": b"".join(objects),
            "which": [numbers[row.place.object] for row in rows],
            "offsets": [row.place.offset for row in rows],
            "stored": [row.place.stored for row in rows],
            "codecs": bytes(_CODEC_IDS.index(row.place.codec) for row in rows),
            "frames": b"".join(row.place.frames for row in rows),
        },
    )


def encode_inner(level: int, children: Sequence[Child]) -> bytes:
    """The bytes of an inner page of a level above 0."""
    return _encode(
        level,
        {
            "firsts": [child.first for child in children],
            "pages": b"".join(child.page for child in children),
            "starts": bytes(child.is_start for child in children),
            "entries": [child.entries for child in children],
            "logical": [child.logical for child in children],
            "stored": [child.stored for child in children],
        },
    )


def _encode(level: int, columns: dict[str, Any]) -> bytes:
    body = msgpack.packb([level, *columns.values()], use_single_float=False)
    return _MAGIC + zstandard.ZstdCompressor(level=3, write_checksum=False).compress(body)


def decode(data: bytes, digest: bytes) -> Page:
    """The rows of a page.

    Args:
        data: all bytes of the page.
        digest: its name.

    Raises:
        CorruptError: the bytes are not those of the digest, or no castore wrote them.
    """
    if digest_of(data) != digest:
        raise CorruptError(f"page {digest.hex()} is damaged: its bytes have another digest")
    try:
        level, *columns = _unpack(data)
        if type(level) is not int or not 0 <= level < 20:
            raise ValueError("its level cannot be")
        if level:
            return Page(level, (), _children(dict(zip(_INNER, columns, strict=True))))
        return Page(0, _rows(dict(zip(_LEAF + _PLACES, columns, strict=True))), ())
    except (ValueError, TypeError, IndexError, OverflowError, struct.error, CastoreError) as error:
        raise CorruptError(f"page {digest.hex()} is none that castore wrote: {error}") from error


def _unpack(data: bytes) -> list[Any]:
    if not data.startswith(_MAGIC):
        raise ValueError("it does not begin as a page does")
    compressed = memoryview(data)[len(_MAGIC) :]
    try:
        size = zstandard.frame_content_size(compressed)
        if not 0 <= size <= PAGE_LIMIT:
            raise ValueError(f"it claims {size} bytes")
        body = zstandard.ZstdDecompressor().decompress(compressed, max_output_size=size)
    except zstandard.ZstdError as error:
        raise ValueError(str(error)) from error
    # A list costs at most a byte an element, so the body bounds the memory.
    unpacked = msgpack.unpackb(body, strict_map_key=True, max_map_len=0, max_ext_len=0)
    if type(unpacked) is not list:
        raise ValueError("it is no list")
    return unpacked


def _rows(columns: dict[str, Any]) -> list[Row]:
    names = columns["names"]
    digests, objects, codecs = columns["digests"], columns["objects"], columns["codecs"]
    lists = [columns[key] for key in ("sizes", "serializers", "metadata", "created", "expires", "which")]
    lists += [columns["offsets"], columns["stored"], codecs]
    if len(digests) != DIGEST_SIZE * len(names) or any(len(column) != len(names) for column in lists):
        raise ValueError("its columns differ in length")
    if len(objects) % DIGEST_SIZE:
        raise ValueError("its objects have half a digest")
    _check_names(names)
    rows: list[Row] = []
    at = 0
    frames = columns["frames"]
    for number, name in enumerate(names):
        size, serializer, metadata, created, expires, which, offset, stored, codec = (
            column[number] for column in lists
        )
        _check_numbers(size, which, offset, stored)
        _check_type(serializer, str)
        _check_type(metadata, str, type(None))
        _check_type(created, float)
        _check_type(expires, float, type(None))
        end = at + FRAME.size * frame_count(size)
        own = frames[at:end]
        if end > len(frames):
            raise ValueError("frames are missing")
        at = end
        place = Place(objects[DIGEST_SIZE * which :][:DIGEST_SIZE], offset, stored, _CODEC_IDS[codec], own)
        if len(place.object) != DIGEST_SIZE:
            raise ValueError("an object has no digest")
        _check_place(place)
        digest = digests[DIGEST_SIZE * number :][:DIGEST_SIZE]
        rows.append(Row(name, digest, size, serializer, metadata, created, expires, place))
    if at != len(frames):
        raise ValueError("it has frames of no name")
    return rows


def _check_place(place: Place) -> None:
    total = sum(length for length, _ in FRAME.iter_unpack(place.frames))
    if place.is_packed and place.stored > PACKED_LIMIT:
        raise ValueError("a blob is too large for a pack")
    if total > place.stored:
        raise ValueError("frames are longer than their object")


def _children(columns: dict[str, Any]) -> list[Child]:
    firsts, pages, starts = columns["firsts"], columns["pages"], columns["starts"]
    lists = [columns["entries"], columns["logical"], columns["stored"], starts]
    if len(pages) != DIGEST_SIZE * len(firsts) or any(len(column) != len(firsts) for column in lists):
        raise ValueError("its columns differ in length")
    if not firsts:
        raise ValueError("it has no page below it")
    _check_names(firsts)
    children = []
    for number, first in enumerate(firsts):
        entries, logical, stored, is_start = (column[number] for column in lists)
        _check_numbers(entries, logical, stored)
        page = pages[DIGEST_SIZE * number :][:DIGEST_SIZE]
        children.append(Child(first, page, bool(is_start), entries, logical, stored))
    return children


def _check_names(names: Any) -> None:
    _check_type(names, list)
    before = ""
    for name in names:
        check_name(name)
        if name <= before:
            raise ValueError("its names are not in order")
        before = name


def _check_numbers(*values: Any) -> None:
    if any(type(value) is not int or not 0 <= value < _LARGEST for value in values):
        raise ValueError("a number cannot be")


def _check_type(value: Any, *types: type) -> None:
    if type(value) not in types:
        raise ValueError(f"{value!r:.50} is of the wrong type")
