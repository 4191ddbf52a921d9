"""Packs: append-only files of small blobs, each record describing itself.

A process writes to a pack of its own, so appends need no lock between processes; any process reads any pack. A record
is a header (magic, header check, digest, sizes, codec, payload check) and the payload, an object like a loose one but
without a seek table when it is a single frame. Scanning a pack needs no index: a damaged record is stepped over by
looking for the next header that checks out, so damage costs the record it hit.

This module reads and writes pack files. Which blobs are live, and when a pack goes, the index and gc know.
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
from castore.objects.codecs import CODECS, FRAME_SIZE, Buffer
from castore.records import HEAD_SIZE, Blob
from castore.system.forks import reset_after_fork
from castore.system.io_errors import read_around
from castore.system.temporary import open_regular, open_with_mode

#: Blobs stored in at most this many bytes go into packs.
PACK_LIMIT = 16 * 1024
#: A pack that has grown past this is closed, and the next blob starts another.
PACK_SIZE = 64 * 1024 * 1024

#: Bytes that a scan reads at a time.
_WINDOW = 1024 * 1024
#: Seconds between two looks for packs that are open and unlinked.
_UNLINKED_SECONDS = 5.0
#: Seconds between two looks whether the pack that is written still has its name.
_LINKED_SECONDS = 1.0

FILE_HEAD = b"castore pack 1\r\n"
_MAGIC = b"\xc5\x7erB"
# magic, XXH3-32 of the rest of the header, digest, size, stored, codec, payload check
_HEAD = struct.Struct("<4sI32sQIIQ")
_CHECKED = struct.Struct("<32sQIIQ")
_CODEC_IDS = {name: index for index, name in enumerate(("none", "zstd", "lz4", "gzip"))}
_CODEC_NAMES = dict(enumerate(_CODEC_IDS))
_PACK = re.compile(r"([0-9a-f]{8})\.pack")
assert set(_CODEC_IDS) == set(CODECS)
assert _HEAD.size == HEAD_SIZE


def record(digest: bytes, size: int, codec: str, payload: Buffer) -> bytes:
    """The bytes of one record."""
    checked = _CHECKED.pack(digest, size, len(payload), _CODEC_IDS[codec], xxhash.xxh3_64_intdigest(payload))
    return b"".join(
        (_MAGIC, (xxhash.xxh3_64_intdigest(checked) & 0xFFFFFFFF).to_bytes(4, "little"), checked, payload)
    )


class PackRecord(NamedTuple):
    """A record found by scanning, and whether its payload matches its check."""

    blob: Blob
    intact: bool


class Damage(NamedTuple):
    """Bytes of a pack that are no record."""

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
    """Every record of a pack file in order, and every stretch that is none.

    Args:
        path: the pack file.
        pack: its id, for the blobs' `pack`.
        start: where to begin; a record must begin there.
        payloads: read each payload and compare its check; False trusts them (`intact` is then True).

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
    """The payload of ``blob``, its whole record checked: for moving it to another pack as it is.

    Raises:
        CorruptError: there is no such record at its place.
    """
    raw = read_around(fd, HEAD_SIZE + blob.stored, blob.offset - HEAD_SIZE)
    parsed = _parse_head(raw, 0, blob.pack, blob.offset) if len(raw) == HEAD_SIZE + blob.stored else None
    if parsed is None or parsed[0] != blob or xxhash.xxh3_64_intdigest(raw[HEAD_SIZE:]) != parsed[1]:
        raise CorruptError(
            f"pack {blob.pack} has no intact record of blob {blob.digest.hex()} at {blob.offset}"
        )
    return raw[HEAD_SIZE:]


class OpenPack:
    """A pack open for reading. It is closed when nobody refers to it any more, so who reads from it holds it."""

    __slots__ = ("fd",)

    def __init__(self, path: str) -> None:
        self.fd = -1
        self.fd = open_regular(path)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        if self.fd >= 0:
            close(self.fd)


class PackFolder:
    """The folder of packs: their paths, and a few of them kept open for reading.

    Thread-safe. What `open` returns stays readable while it is referred to, also if the pack is unlinked.
    """

    def __init__(self, folder: Path, *, keep_open: int = 256) -> None:
        self.folder = folder
        self._keep_open = keep_open
        self._open: dict[int, OpenPack] = {}  # the first opened comes first
        self._look_again = 0.0
        self._after_fork()
        reset_after_fork(self)

    def _after_fork(self) -> None:
        self._lock = threading.Lock()  # descriptors for reading with pread are safe to share with a parent

    def path(self, pack: int) -> Path:
        """Where pack ``pack`` is."""
        return self.folder / f"{pack:08x}.pack"

    def ids(self) -> list[int]:
        """The packs there are on disk."""
        files = (entry.name for entry in os.scandir(self.folder) if entry.is_file(follow_symlinks=False))
        found = map(_PACK.fullmatch, files)
        return sorted(int(match[1], 16) for match in found if match)

    def open(self, pack: int) -> OpenPack:
        """The pack, open for reading.

        Raises:
            FileNotFoundError: there is no such pack (any more).
        """
        # Without the lock, which every small read would pay for: one step of a dictionary is atomic under the GIL.
        opened = self._open.get(pack)
        if opened is not None and time.monotonic() < self._look_again:
            return opened
        with self._lock:
            self._drop_unlinked_if_due()
            opened = self._open.get(pack)
            if opened is None:
                opened = self._open[pack] = OpenPack(str(self.path(pack)))
                if len(self._open) > self._keep_open:
                    del self._open[next(iter(self._open))]
            return opened

    def drop_unlinked(self) -> None:
        """What `open` does every few seconds, for who opens nothing for long: let go of packs that gc has unlinked."""
        with self._lock:
            self._drop_unlinked_if_due()

    def _drop_unlinked_if_due(self) -> None:
        # A descriptor that nobody uses must not keep their bytes on the disk.
        if time.monotonic() < self._look_again:
            return
        self._look_again = time.monotonic() + _UNLINKED_SECONDS
        for pack, opened in list(self._open.items()):
            if os.fstat(opened.fd).st_nlink == 0:
                del self._open[pack]

    def forget(self, pack: int) -> None:
        """Keep an unlinked pack open no longer than its readers do: its bytes take room until then."""
        with self._lock:
            self._open.pop(pack, None)

    def close(self) -> None:
        """Close what nobody uses."""
        with self._lock:
            self._open.clear()


class PackWriter:
    """Appends records to the one pack this process writes.

    The id comes from the index, which has registered it before the file exists: a pack file nobody registered is a
    leftover. Calls must be serialised by the caller.
    """

    def __init__(self, path: Path, pack: int, mode: int) -> None:
        self._fd = open_with_mode(path, os.O_WRONLY | os.O_EXCL | os.O_APPEND, mode)
        self._path = path
        self.pack = pack
        self.size = 0
        self._look_again = 0.0
        self._append(FILE_HEAD)

    def _append(self, data: bytes) -> int:
        position = self.size
        try:
            written = os.write(self._fd, data)
            while written < len(data):
                written += os.write(self._fd, memoryview(data)[written:])
        except OSError as error:
            error.filename = str(self._path)
            os.ftruncate(self._fd, position)  # a full disk must not leave half a record in front of the next
            raise
        self.size += written
        return position

    def is_whole(self) -> bool:
        """Whether the file is where and as long as this writer left it: else what is appended could not be found.

        Whether it was unlinked is looked up once a second. Nobody but a user's own hand unlinks a registered pack; and
        fstat makes Linux (6.13 on) keep the time of the file's next change more finely, which made a put 3 µs slower.
        """
        if os.lseek(self._fd, 0, os.SEEK_END) != self.size:
            return False
        now = time.monotonic()
        if now >= self._look_again:
            self._look_again = now + _LINKED_SECONDS
            return os.fstat(self._fd).st_nlink > 0
        return True

    def add(self, records: bytes) -> int:
        """Append whole records; returns where they begin."""
        return self._append(records)

    def sync(self) -> None:
        """Have the records survive a power cut."""
        os.fsync(self._fd)

    def close(self) -> None:
        """Write no more."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
