"""Pages: the immutable pieces of a tree, as bytes. A leaf has rows of names, an inner page has rows of pages.

A page is named by BLAKE3 of its bytes, which are checked before they are decompressed. Decoding trusts
nothing: names, digests, sizes, frames and metadata of each row are checked, so a row that `decode` returns is
sound, though not necessarily true. Nothing here depends on how rows are divided into pages.
"""

from __future__ import annotations

import json
import math
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
from castore.write.arguments import DEEPEST, is_deep

#: Bytes of a frame in `Place.frames`: stored length (u32) and BLAKE3 of the stored frame, cut to 128 bits.
FRAME = struct.Struct("<I16s")
#: Upper bound in bytes of a page, compressed or not. A page holds one row at least.
PAGE_LIMIT = 64 << 20
#: Blobs of at most this many stored bytes travel in packs, larger ones as objects of their own.
PACKED_LIMIT = 1 << 20

_MAGIC = b"castore page 1\r\n"
_LARGEST = 1 << 62
# The digest of no bytes. Nobody reads an empty file, so nothing else would compare it.
_EMPTY = blake3(b"").digest()
# Offsets that no pack reaches; and what a seek table takes at most, in all and for a frame.
_FARTHEST = 1 << 40
_TABLE_BYTES, _TABLE_ROW = 4096, 64
_CODEC_IDS = ("zstd", "lz4", "gzip", "none")  # a name's place is a number in pages
_LEAF = ("names", "digests", "sizes", "serializers", "metadata", "created", "expires")
_PLACES = ("objects", "which", "offsets", "stored", "codecs", "frames")
_TYPES: dict[str, set[type]] = {
    "serializers": {str},
    "metadata": {str, type(None)},
    "created": {float},
    "expires": {float, type(None)},
}
_INNER = ("firsts", "pages", "starts", "entries", "logical", "stored")
assert set(_CODEC_IDS) == set(CODECS)


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
    except (
        ValueError, TypeError, IndexError, OverflowError, RecursionError, struct.error, CastoreError,
    ) as error:  # fmt: skip
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
    names, frames = columns["names"], columns["frames"]
    _check_names(names)
    count = len(names)
    for key in ("sizes", "which", "offsets", "stored"):
        _check_numbers(columns[key], count)
    for key, types in _TYPES.items():
        _check_types(columns[key], count, types)
    for text in {*columns["metadata"]} - {None}:
        _check_metadata(text)
    digests, objects, codecs = columns["digests"], columns["objects"], columns["codecs"]
    _check_types([digests, objects, codecs, frames], 4, {bytes})
    if len(digests) != DIGEST_SIZE * count or len(codecs) != count or len(objects) % DIGEST_SIZE:
        raise ValueError("its columns differ in length")
    cut = [objects[start : start + DIGEST_SIZE] for start in range(0, len(objects), DIGEST_SIZE)]
    rows: list[Row] = []
    at = digest_at = 0
    for name, size, serializer, metadata, created, expires, which, offset, stored, codec in zip(
        names, columns["sizes"], columns["serializers"], columns["metadata"], columns["created"],
        columns["expires"], columns["which"], columns["offsets"], columns["stored"], codecs, strict=True,
    ):  # fmt: skip
        end = at + FRAME.size * frame_count(size)
        if end > len(frames):
            raise ValueError("frames are missing")
        place = Place(cut[which], offset, stored, _CODEC_IDS[codec], frames[at:end])
        _check_place(place)
        digest = digests[digest_at : digest_at + DIGEST_SIZE]
        if (size == 0) != (digest == _EMPTY):
            raise ValueError("a size is not that of its blob")
        rows.append(Row(name, digest, size, serializer, metadata, created, expires, place))
        at, digest_at = end, digest_at + DIGEST_SIZE
    if at != len(frames):
        raise ValueError("it has frames of no name")
    return rows


def _check_place(place: Place) -> None:
    frames = place.frames
    if len(frames) == FRAME.size:
        total = int.from_bytes(frames[:4], "little")
    else:
        total = sum(length for length, _ in FRAME.iter_unpack(frames))
    if place.offset and place.stored > PACKED_LIMIT:
        raise ValueError("a blob is too large for a pack")
    if place.offset > _FARTHEST:
        raise ValueError("a blob lies farther than any pack reaches")
    if total > place.stored:
        raise ValueError("frames are longer than their object")
    if place.stored - total > _TABLE_BYTES + _TABLE_ROW * (len(frames) // FRAME.size):
        raise ValueError("an object is longer than its frames and a seek table")


def _check_metadata(text: str) -> None:
    """Check that a reader can take the text, and `dump_metadata` what the text says."""
    value = _METADATA.decode(text)
    if type(value) is not dict:
        raise ValueError("metadata is no dict")
    if is_deep(value, text):
        raise ValueError(f"metadata has more than {DEEPEST} levels")
    if "\\u" in text:  # the only way to a surrogate, which is no UTF-8
        json.dumps(value, ensure_ascii=False).encode()


def _finite(text: str) -> float:
    if math.isfinite(number := float(text)):
        return number
    raise ValueError("metadata has a number that is not finite")


# With both hooks NaN, Infinity and 1e999 are errors.
_METADATA = json.JSONDecoder(parse_float=_finite, parse_constant=_finite)


def _children(columns: dict[str, Any]) -> list[Child]:
    firsts, pages, starts = columns["firsts"], columns["pages"], columns["starts"]
    _check_names(firsts)
    _check_types([pages, starts], 2, {bytes})
    if not firsts:
        raise ValueError("it has no page below it")
    if len(pages) != DIGEST_SIZE * len(firsts) or len(starts) != len(firsts):
        raise ValueError("its columns differ in length")
    numbers = [columns["entries"], columns["logical"], columns["stored"]]
    for column in numbers:
        _check_numbers(column, len(firsts))
    cut = (pages[start : start + DIGEST_SIZE] for start in range(0, len(pages), DIGEST_SIZE))
    return [
        Child(first, page, bool(is_start), *sums)
        for first, page, is_start, *sums in zip(firsts, cut, starts, *numbers, strict=True)
    ]


def _check_names(names: Any) -> None:
    _check_types([names], 1, {list})
    before = ""
    for name in names:
        check_name(name)
        if name <= before:
            raise ValueError("its names are not in order")
        before = name


def _check_numbers(column: Any, count: int) -> None:
    _check_types(column, count, {int})
    if column and not (min(column) >= 0 and max(column) < _LARGEST):
        raise ValueError("a number cannot be")


def _check_types(column: Any, count: int, types: set[type]) -> None:
    if type(column) is not list or len(column) != count:
        raise ValueError("its columns differ in length")
    if not set(map(type, column)) <= types:
        raise ValueError("a column has values of the wrong type")
