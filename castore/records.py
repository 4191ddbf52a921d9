"""The index's records of blobs, entries and mounts, as plain immutable values.

These values cross every boundary inside castore (index, object directory, store, view), so they carry no
handles: nothing here opens or reads anything.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple, TypeGuard

import xxhash

from castore.errors import InvalidValueError

Buffer = bytes | bytearray | memoryview
"""Bytes that a put takes."""
#: `Blob.pack` of a blob whose bytes are a file of their own.
LOOSE = 0
#: `Blob.pack` of a blob whose bytes were found damaged or missing: a miss until the same bytes are put again.
LOST = -1
#: `Blob.pack` of a blob whose bytes are only in a remote, and come when they are read (index/places.py).
AWAY = -2
#: Bytes of a record's head, which a blob takes in a pack besides its payload (objects/packs.py).
HEAD_SIZE = 64
#: Bytes of a digest.
DIGEST_SIZE = 32


def entry_check(name: str, digest: bytes) -> int:
    """The checksum in an entry's row: 32 bits of XXH3-64 over its name and digest.

    >>> entry_check("a", bytes(32)) == entry_check("b", bytes(32))
    False
    """
    try:
        return xxhash.xxh3_64_intdigest(name.encode() + digest) & 0xFFFFFFFF
    except TypeError:  # from a damaged row: equals no stored check
        return -1


def has_expired(expires: float | None, now: float) -> bool:
    """Whether an entry is a miss for its lifetime, though gc may not have removed it yet.

    >>> has_expired(None, 5.0), has_expired(5.0, 5.0), has_expired(6.0, 5.0)
    (False, True, False)
    """
    return expires is not None and expires <= now


def is_received(pack: int) -> bool:
    """Whether a pack has bytes that a pull has brought, by its id: even. Packs of puts have odd ones."""
    return pack > 0 and pack % 2 == 0


def parse_digest(digest: bytes | str) -> bytes:
    """A digest as raw bytes. One of another length than `DIGEST_SIZE` is no blob's.

    Args:
        digest: hex digits, as in `Entry.digest`, or raw bytes.

    Raises:
        InvalidValueError: it is neither.

    >>> parse_digest("zz")
    Traceback (most recent call last):
    castore.errors.InvalidValueError: a digest is 64 hex digits, as in `Entry.digest`, or 32 bytes, not 'zz'
    """
    try:
        return bytes.fromhex(digest) if isinstance(digest, str) else bytes(memoryview(digest))
    except (TypeError, ValueError):
        raise InvalidValueError(
            f"a digest is 64 hex digits, as in `Entry.digest`, or 32 bytes, not {digest!r:.100}"
        ) from None


class Blob(NamedTuple):
    """Immutable bytes, and where a store keeps them.

    Attributes:
        digest: BLAKE3-256 of the uncompressed bytes, 32 raw bytes.
        size: uncompressed length in bytes.
        stored: length in bytes as stored, seek table included, pack record header excluded; 0 if no bytes are
            here.
        codec: ``"zstd"``, ``"lz4"``, ``"gzip"`` or ``"none"``.
        pack: id of the pack file that holds the bytes; even for bytes that a pull has brought. 0: a file of
            their own holds the bytes. -1: the bytes were found damaged or missing, and every read is a miss
            until they are put again. -2: the bytes are only in a remote, and are fetched when they are read.
        offset: of the payload in the pack file, in bytes; 0 if no pack file holds the bytes.
    """

    digest: bytes
    size: int
    stored: int
    codec: str
    pack: int
    offset: int

    @property
    def is_here(self) -> bool:
        """Whether its bytes are in the store, as far as the index knows."""
        return self.pack >= LOOSE

    @property
    def is_own(self) -> bool:
        """Whether its bytes are here, and this store has made them or compared them with the digest.

        Bytes in a received pack (`is_received`) were compared with a remote's tree alone.

        >>> [Blob(bytes(32), 1, 1, "none", pack, 0).is_own for pack in (LOOSE, 1, 2, LOST)]
        [True, True, False, False]
        """
        return self.is_here and not is_received(self.pack)


class Entry(NamedTuple):
    """A name, its blob and its attributes, as `Store.put` returns it and `Store.entries` lists it.

    Attributes:
        name: relative POSIX path.
        digest: BLAKE3-256 of the bytes, 64 hex characters.
        size: uncompressed length in bytes.
        stored: bytes on disk of the blob (shared by all names of the same blob); 0 while they are only in a
            remote.
        codec: how the blob is compressed: ``"zstd"``, ``"lz4"``, ``"gzip"`` or ``"none"``.
        created: when the name was last pointed at a new blob, seconds since the epoch.
        expires: when the entry stops existing, seconds since the epoch, or None for never.
        accessed: last known read, seconds since the epoch (written in batches, so up to some seconds late).
        serializer: how `Store.load` turns the bytes into an object; ``"bytes"`` for plain puts.
        metadata: the user's JSON-like metadata.
        pinned: whether gc keeps the entry in any case.
        away: whether the bytes are only in a remote, or parts of them in the store at most.
    """

    name: str
    digest: str
    size: int
    stored: int
    codec: str
    created: float
    expires: float | None
    accessed: float
    serializer: str
    metadata: dict[str, Any]
    pinned: bool
    away: bool = False


def parse_metadata(text: Any) -> dict[str, Any]:
    """The metadata in a row's text. For a damaged row: the text itself, under the key ``damaged``."""
    try:
        found = json.loads(text) if text else {}
    except (TypeError, ValueError, RecursionError):
        found = None
    return found if isinstance(found, dict) else {"damaged": str(text)}


def is_file_record(value: object) -> TypeGuard[dict[str, Any]]:
    """Whether a value in metadata says of which file an entry is a copy: path, size and mtime.

    Users may have ``source`` and ``sources`` in metadata for purposes of their own.
    """
    return (
        isinstance(value, dict)
        and {"size", "mtime_ns"} <= value.keys()
        and isinstance(value.get("path"), str)
    )


class Found(NamedTuple):
    """The part of an entry that a read needs."""

    blob: Blob
    expires: float | None
    serializer: str


#: Name, digest, size, creation, expiry and check of an entry. A plain tuple, since a listing has millions of
#: them.
FileRow = tuple[str, bytes, int, float, float | None, int]


class Totals(NamedTuple):
    """Sums over all rows, in bytes except the counts ``entries`` and ``blobs``.

    ``logical`` counts a blob once for each of its names, ``unique`` counts it once. ``packed`` is the size of
    all live records in packs, heads included.
    """

    entries: int
    logical: int
    blobs: int
    unique: int
    stored: int
    packed: int


class EntrySpec(NamedTuple):
    """The specification of an entry: its name and attributes, without its bytes.

    Attributes:
        name: already checked.
        serializer: kept in the entry.
        metadata: as JSON text, or None.
        expires: seconds since the epoch, or None.
        pinned: pin the entry; False keeps an existing pin.
    """

    name: str
    serializer: str
    metadata: str | None
    expires: float | None
    pinned: bool


class Mount(NamedTuple):
    """A live mount of a store, as `Store.mounts` lists it.

    Attributes:
        mountpoint: its folder, as a path in the file system of the process that serves it.
        prefix: the mount shows only names at or below the prefix, with the prefix removed; "" shows all.
        pinned: whether gc keeps everything that the mount shows.
        since: when it was mounted, seconds since the epoch.
    """

    mountpoint: str
    prefix: str
    pinned: bool
    since: float

    def shows(self, prefix: str) -> bool:
        """Whether the mount shows all names at or below a prefix.

        >>> Mount("/mnt", "a", False, 0.0).shows("a/b")
        True
        >>> Mount("/mnt", "a", False, 0.0).shows("ab")
        False
        """
        return not self.prefix or prefix == self.prefix or prefix.startswith(f"{self.prefix}/")

    def path(self, name: str) -> str:
        """The path in the mount of a name that it shows.

        >>> Mount("/mnt", "a", False, 0.0).path("a/b")
        '/mnt/b'
        """
        shown = name[len(self.prefix) + 1 :] if self.prefix else name
        return f"{self.mountpoint.rstrip('/')}/{shown}"
