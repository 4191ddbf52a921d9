"""Packs: append-only files of small blobs, in records that describe themselves.

Each process writes to a pack of its own, so appends need no lock between processes. Any process reads any
pack. A record is a header (magic, header check, digest, sizes, codec, payload check) and a payload. The
payload is an object like a loose one, but without a seek table when it is a single frame. A scan of a pack
needs no index: it skips a damaged record by searching for the next valid header, so damage costs only the
records that it hit.

This module reads and writes pack files. The index records which blobs are live, and gc decides when a pack is
removed.
"""

from __future__ import annotations

import os
import re
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import xxhash

from castore.errors import CorruptError
from castore.objects.codecs import CODECS, FRAME_SIZE
from castore.records import HEAD_SIZE, Blob, Buffer
from castore.system.forks import reset_after_fork
from castore.system.io_errors import read_around
from castore.system.temporary import open_regular, open_with_mode

#: Blobs of at most this many stored bytes go into packs.
PACK_LIMIT = 16 * 1024
#: A pack that has grown past this many bytes is closed, and the next blob starts another.
PACK_SIZE = 64 * 1024 * 1024

#: Bytes that a scan reads at a time.
_WINDOW = 1024 * 1024
#: Seconds between two checks for open packs that were unlinked.
_UNLINKED_SECONDS = 5.0
#: Seconds between two checks that the pack being written still has its name.
_LINKED_SECONDS = 1.0

FILE_HEAD = b"castore pack 1\r\n"
_MAGIC = b"\xc5\x7erB"
# magic, XXH3-32 of the rest of the header, digest, size, stored, codec, payload check
_HEAD = struct.Struct("<4sI32sQIIQ")
_CHECKED = struct.Struct("<32sQIIQ")
_CODEC_IDS = {name: index for index, name in enumerate(("none", "zstd", "lz4", "gzip"))}
_CODEC_NAMES = dict(enumerate(_CODEC_IDS))
_PACK_NAME = re.compile(r"([0-9a-f]{8})\.pack")
assert set(_CODEC_IDS) == set(CODECS)
assert _HEAD.size == HEAD_SIZE


def build_record(digest: bytes, size: int, codec: str, payload: Buffer) -> bytes:
    """The bytes of one record."""
    checked = _CHECKED.pack(digest, size, len(payload), _CODEC_IDS[codec], xxhash.xxh3_64_intdigest(payload))
    return b"".join(
        (_MAGIC, (xxhash.xxh3_64_intdigest(checked) & 0xFFFFFFFF).to_bytes(4, "little"), checked, payload)
    )


class PackRecord(NamedTuple):
    """A record found by a scan, and whether its payload matches its checksum."""

    blob: Blob
    intact: bool


class Damage(NamedTuple):
    """A stretch of a pack that holds no record, in bytes."""

    offset: int
    length: int


def _parse_head(raw: bytes, at: int, pack: int, payload_at: int) -> tuple[Blob, int] | None:
    magic, check, digest, size, stored, codec, payload_check = _HEAD.unpack_from(raw, at)
    if magic != _MAGIC or codec not in _CODEC_NAMES or size > FRAME_SIZE or stored > PACK_LIMIT:
        return None
    if xxhash.xxh3_64_intdigest(raw[at + 8 : at + HEAD_SIZE]) & 0xFFFFFFFF != check:
        return None
    return Blob(digest, size, stored, _CODEC_NAMES[codec], pack, payload_at), payload_check


def scan(path: Path, pack: int, *, start: int = 0, payloads: bool = True) -> Iterator[PackRecord | Damage]:
    """Yield the records of a pack file in order, and the stretches between them that hold no record.

    Args:
        path: path of the pack file.
        pack: id of the pack, for the blobs' `pack`.
        start: offset in bytes of the first record to yield; 0 for all.
        payloads: whether to compare each payload with its checksum; if not, `intact` is always True.

    Raises:
        FileNotFoundError: there is no such file (any more).
    """
    with open(open_regular(path), "rb") as file:
        end = os.fstat(file.fileno()).st_size
        fd = file.fileno()
        position = start or (len(FILE_HEAD) if read_around(fd, len(FILE_HEAD), 0) == FILE_HEAD else 0)
        window, begin = b"", position
        while position < end:
            at = position - begin
            if len(window) - at < HEAD_SIZE + PACK_LIMIT and begin + len(window) < end:
                window, begin, at = read_around(fd, _WINDOW, position), position, 0
            whole = len(window) - at >= HEAD_SIZE
            parsed = _parse_head(window, at, pack, position + HEAD_SIZE) if whole else None
            if parsed is None or parsed[0].offset + parsed[0].stored > end:
                following = _next_head(fd, position + 1, end, pack)
                yield Damage(position, following - position)
                position = following
                continue
            blob, check = parsed
            intact = True
            if payloads:
                payload = memoryview(window)[blob.offset - begin :][: blob.stored]
                intact = xxhash.xxh3_64_intdigest(payload) == check
            yield PackRecord(blob, intact)
            position = blob.offset + blob.stored


def _next_head(fd: int, position: int, end: int, pack: int) -> int:
    while position < end:
        chunk = read_around(fd, _WINDOW + HEAD_SIZE, position)
        found = chunk.find(_MAGIC)
        while 0 <= found <= len(chunk) - HEAD_SIZE:
            if _parse_head(chunk, found, pack, 0) is not None:
                return position + found
            found = chunk.find(_MAGIC, found + 1)
        position += _WINDOW
    return end


def read_record(fd: int, blob: Blob) -> bytes:
    """Return the payload of ``blob`` with its whole record checked. For copying it to another pack.

    Raises:
        CorruptError: there is no intact record of ``blob`` at its offset.
    """
    raw = read_around(fd, HEAD_SIZE + blob.stored, blob.offset - HEAD_SIZE)
    parsed = _parse_head(raw, 0, blob.pack, blob.offset) if len(raw) == HEAD_SIZE + blob.stored else None
    if parsed is None or parsed[0] != blob or xxhash.xxh3_64_intdigest(raw[HEAD_SIZE:]) != parsed[1]:
        raise CorruptError(
            f"pack {blob.pack} has no intact record of blob {blob.digest.hex()} at {blob.offset}"
        )
    return raw[HEAD_SIZE:]


class PackFile:
    """A pack open for reading. It is closed with its last reference, so a reader must hold a reference."""

    __slots__ = ("fd",)

    def __init__(self, path: str) -> None:
        self.fd = open_regular(path)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        if hasattr(self, "fd"):
            close(self.fd)


class PackFolder:
    """The folder of packs: their paths, and some packs kept open for reading.

    Thread-safe. A pack that `open` returned stays readable while it is referred to, even if it is unlinked.

    Args:
        folder: ``objects/packs``.
        keep_open: number of packs kept open at most.
    """

    def __init__(self, folder: Path, *, keep_open: int = 256) -> None:
        self.folder = folder
        self._keep_open = keep_open
        self._open: dict[int, PackFile] = {}  # in order of opening
        self._next_check = 0.0
        self._after_fork()
        reset_after_fork(self)

    def _after_fork(self) -> None:
        self._lock = threading.Lock()  # the open descriptors stay: pread on them is safe beside a parent's

    def path(self, pack: int) -> Path:
        """Path of pack ``pack``."""
        return self.folder / f"{pack:08x}.pack"

    def ids(self) -> list[int]:
        """Ids of the packs on disk, in ascending order."""
        files = (entry.name for entry in os.scandir(self.folder) if entry.is_file(follow_symlinks=False))
        found = map(_PACK_NAME.fullmatch, files)
        return sorted(int(match[1], 16) for match in found if match)

    def open(self, pack: int) -> PackFile:
        """Return the pack, open for reading.

        Raises:
            FileNotFoundError: there is no such pack (any more).
        """
        # No lock here: it would slow every small read, and a single `dict.get` is atomic under the GIL.
        opened = self._open.get(pack)
        if opened is not None and time.monotonic() < self._next_check:
            return opened
        with self._lock:
            self._drop_unlinked_if_due()
            opened = self._open.get(pack)
            if opened is None:
                opened = self._open[pack] = PackFile(str(self.path(pack)))
                if len(self._open) > self._keep_open:
                    del self._open[next(iter(self._open))]
            return opened

    def drop_unlinked(self) -> None:
        """Drop packs that gc has unlinked, at most every few seconds. `open` does so too.

        Call this from a process that may open nothing for a long time.
        """
        with self._lock:
            self._drop_unlinked_if_due()

    def _drop_unlinked_if_due(self) -> None:
        # An unused descriptor must not keep an unlinked pack's bytes on the disk.
        if time.monotonic() < self._next_check:
            return
        self._next_check = time.monotonic() + _UNLINKED_SECONDS
        for pack, opened in list(self._open.items()):
            if os.fstat(opened.fd).st_nlink == 0:
                del self._open[pack]

    def forget(self, pack: int) -> None:
        """Drop an unlinked pack, so that it is closed with its last reader and its disk space is freed."""
        with self._lock:
            self._open.pop(pack, None)

    def close(self) -> None:
        """Close the packs that no reader uses; the others are closed with their last reader."""
        with self._lock:
            self._open.clear()


class PackWriter:
    """Appends records to the one pack that this process writes.

    The index registers the id before the file exists, so a pack file without a registered id is a leftover.
    The caller must serialise calls.
    """

    _fd = -1  # on the class, for a Ctrl-C may come before the first line of `__init__`

    def __init__(self, path: Path, pack: int, mode: int) -> None:
        self._fd = open_with_mode(path, os.O_WRONLY | os.O_EXCL | os.O_APPEND, mode)
        self._path = path
        self.pack = pack
        self.size = 0
        self._next_check = 0.0
        self._append(FILE_HEAD)

    def _append(self, data: bytes) -> int:
        position = self.size
        try:
            written = os.write(self._fd, data)
            while written < len(data):
                written += os.write(self._fd, memoryview(data)[written:])
        except OSError as error:
            error.filename = str(self._path)
            os.ftruncate(self._fd, position)  # a full disk must not leave half a record before the next one
            raise
        self.size += written
        return position

    def is_whole(self) -> bool:
        """Whether the file still has its name and the length that this writer left.

        If not, appended records could not be found. The name is checked once a second only: nothing but a
        user unlinks a registered pack, and fstat makes Linux (from 6.13) record the file's next change with a
        fine-grained timestamp, which made a put 3 µs slower.
        """
        if os.lseek(self._fd, 0, os.SEEK_END) != self.size:
            return False
        now = time.monotonic()
        if now >= self._next_check:
            self._next_check = now + _LINKED_SECONDS
            return os.fstat(self._fd).st_nlink > 0
        return True

    def add(self, records: bytes) -> int:
        """Append whole records; returns the offset where they begin."""
        return self._append(records)

    def sync(self) -> None:
        """Sync the records to disk, so that they survive a power cut."""
        os.fsync(self._fd)

    def close(self) -> None:
        """Close the file. Nothing may be written afterwards."""
        fd, self._fd = self._fd, -1  # first, for a Ctrl-C may come right behind the close
        if fd >= 0:
            os.close(fd)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # of a store that nobody closed
        if self._fd >= 0:
            close(self._fd)
