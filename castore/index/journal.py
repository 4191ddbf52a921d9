"""The names journal: a record of all names, kept beside the objects so that the index can be rebuilt.

Blobs describe themselves; names would be lost with the index. So each transaction appends its changes to
names (put, delete, pin) to the current segment of this journal, while it holds the index's write lock. The
order of the file is the order of the commits, and replaying it gives the last state of each name. The journal
is also the change feed that a mount follows.

Once the segments have grown well past the size of a snapshot, a new segment is started, and a snapshot of the
index replaces the segments before it. Replaying is idempotent, so a snapshot taken a little after the switch
does no harm: the segment behind it repeats, in order, the changes that the snapshot already contains.
"""

from __future__ import annotations

import json
import math
import os
import re
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgpack

from castore.errors import InvalidNameError
from castore.index.beacon import RETRACTED, SEGMENT, Beacon
from castore.names import check_known_name
from castore.system.forks import reset_after_fork
from castore.system.io_errors import read_around
from castore.system.temporary import open_regular, open_with_mode, sync_folder, write_whole

_HEAD = struct.Struct("<2sHII")  # magic, zero, length and CRC-32 of the payload
_MAGIC = b"\xc5N"
_FILE = re.compile(r"([0-9]{8})\.(names|snapshot)")
_MAX_PAYLOAD = 16 * 1024 * 1024
# One packer for all threads: it does not release the GIL while it packs plain values.
_pack: Callable[[object], bytes] = msgpack.Packer().pack


class NameRecord(NamedTuple):
    """The state of a name after a change; ``digest`` is None if the name was removed."""

    name: str
    digest: bytes | None
    serializer: str = "bytes"
    metadata: str | None = None
    created: float = 0.0
    expires: float | None = None
    pinned: int = 0


_REMOVED = NameRecord("", None)[1:]


def pack_record(record: tuple[str, bytes | None, str, str | None, float, float | None, int]) -> bytes:
    """The bytes of one journal record: a `NameRecord`, or a row of the same columns."""
    payload: bytes = _pack(record)
    return _HEAD.pack(_MAGIC, 0, len(payload), zlib.crc32(payload)) + payload


def pack_records(
    records: Iterable[tuple[str, bytes | None, str, str | None, float, float | None, int]],
) -> bytes:
    """`pack_record` for many, one behind the other."""
    pieces: list[bytes] = []
    for record in records:
        payload = _pack(record)
        pieces += (_HEAD.pack(_MAGIC, 0, len(payload), zlib.crc32(payload)), payload)
    return b"".join(pieces)


def pack_removals(names: Iterable[str]) -> bytes:
    """The records of names that were removed."""
    return pack_records((name, *_REMOVED) for name in names)


class Journal:
    """Appends to the current segment, and reads all of them.

    Args:
        folder: ``objects/names`` of the store.
        tmp: the folder in which snapshots are written before they are renamed into place.
        beacon: shares the current segment's number with all processes.
        mode: permission bits of new segments.
        read_only: the folder cannot be written to.
    """

    _fd = -1  # on the class, for a Ctrl-C may come before the first line of `__init__`

    def __init__(
        self, folder: Path, tmp: Path, beacon: Beacon, mode: int, *, read_only: bool = False
    ) -> None:
        self.read_only = read_only
        self.folder = folder
        self._tmp = tmp
        self._beacon = beacon
        self.mode = mode
        self._number = -1
        # After a power cut the beacon may hold no number, or one below the newest segment's; a damaged beacon
        # may hold a higher one. The word is read before the folder: a writer sets it only once the file is
        # there.
        word = beacon.segment
        newest = max([*self.segments(), *self.snapshots()], default=1)
        if word != newest:
            beacon.segment = newest
        reset_after_fork(self)

    def _after_fork(self) -> None:
        self._fd, self._number = -1, -1  # the parent's descriptor stays the parent's

    def path(self, number: int, suffix: str = ".names") -> Path:
        """The path of segment ``number``."""
        return self.folder / f"{number:08d}{suffix}"

    def segments(self) -> list[int]:
        """Numbers of the segments, oldest first."""
        return self._numbers("names")

    def _numbers(self, kind: str) -> list[int]:
        files = (entry.name for entry in os.scandir(self.folder) if entry.is_file(follow_symlinks=False))
        found = map(_FILE.fullmatch, files)
        return sorted(int(match[1]) for match in found if match and match[2] == kind)

    def append(self, records: bytes, *, durable: bool = False) -> None:
        """Append whole records. The caller holds the index's write lock."""
        number = self._beacon.words[SEGMENT]
        if number != self._number:
            self.close()
            self._fd = open_with_mode(self.path(number), os.O_RDWR | os.O_APPEND, self.mode)
            self._number = number
            if durable:
                sync_folder(self.folder)
        written = 0
        try:
            written = os.write(self._fd, records)
            while written < len(records):
                written += os.write(self._fd, memoryview(records)[written:])
            if durable:
                os.fsync(self._fd)
        except OSError as error:
            error.filename = str(self.path(number))
            os.ftruncate(self._fd, os.fstat(self._fd).st_size - written)
            raise

    def retract(self, records: bytes) -> None:
        """Remove an append whose transaction did not commit. Does nothing if others have appended since.

        The caller holds the write lock, whether without a break since the append or taken again.
        """
        if records and self._fd >= 0 and self._number == self._beacon.segment:
            start = os.fstat(self._fd).st_size - len(records)
            if start >= 0 and read_around(self._fd, len(records), start) == records:
                os.ftruncate(self._fd, start)
                # Behind the truncation: a tail that sees the new count finds nothing of the append any more.
                self._beacon.words[RETRACTED] = (self._beacon.words[RETRACTED] + 1) % 2**64

    def close(self) -> None:
        """Close the segment."""
        # In this order, for a Ctrl-C may come between any two of these steps.
        fd, self._number, self._fd = self._fd, -1, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # of a store that nobody closed
        if self._fd >= 0:
            close(self._fd)

    def size(self) -> int:
        """Bytes of all segments."""
        return sum(map(self._size, self.segments()))

    def snapshots(self) -> list[int]:
        """Numbers of the snapshots, oldest first. Each snapshot replaces all segments of lower numbers."""
        return self._numbers("snapshot")

    def snapshot_size(self) -> int:
        """Bytes of the newest snapshot."""
        return sum(self._size(number, ".snapshot") for number in self.snapshots()[-1:])

    def _size(self, number: int, suffix: str = ".names") -> int:
        try:
            return self.path(number, suffix).stat().st_size
        except FileNotFoundError:
            return 0  # another process has just replaced it by a snapshot

    def switch(self) -> int:
        """Start a new segment and return its number. The caller holds the write lock."""
        number = max(self._beacon.segment, *self.segments(), *self.snapshots(), 1) + 1
        os.close(open_with_mode(self.path(number), os.O_WRONLY, self.mode))
        self._beacon.segment = number
        return number

    def write_snapshot(self, number: int, records: Iterable[bytes]) -> None:
        """Write a snapshot that replaces all segments below ``number``, then unlink those.

        The caller has called `switch` and reads the records from the index afterwards. Two processes may do
        this at once: the later of them may write the lower number, and replaying starts at the highest.
        """
        write_whole(self.path(number, ".snapshot"), records, self._tmp, self.mode)
        newest = self.snapshots()[-1]
        for older in self.segments():
            if older < newest:
                self.path(older).unlink(missing_ok=True)
        for older in self.snapshots():
            if older < newest:
                self.path(older, ".snapshot").unlink(missing_ok=True)

    def replay(self) -> Iterator[NameRecord | None]:
        """Every record since the newest snapshot, oldest first; None for each damaged stretch."""
        with ExitStack() as stack:
            for file in self._files(stack):
                if file is None:
                    yield None
                else:
                    yield from records(file.fileno())

    def _files(self, stack: ExitStack) -> list[BinaryIO | None]:
        """The files to replay, open; None in place of a missing file."""
        while True:
            start = max(self.snapshots(), default=0)
            paths = [self.path(start, ".snapshot")] if start else []
            paths += [self.path(number) for number in self.segments() if number >= start]
            files = [_open_if_there(path, stack) for path in paths]
            # Another process may replace these files by a newer snapshot and unlink them, without the lock.
            # The list is complete if there is no newer snapshot.
            if max(self.snapshots(), default=0) == start:
                return files
            stack.close()


def _open_if_there(path: Path, stack: ExitStack) -> BinaryIO | None:
    try:
        return stack.enter_context(open(open_regular(path), "rb"))
    except FileNotFoundError:
        return None


def records(fd: int) -> Iterator[NameRecord | None]:
    """Records of a segment or snapshot. Skips each damaged stretch, and yields None for it."""
    position, end = 0, os.fstat(fd).st_size
    while position < end:
        record, position = _read_record(fd, position, end)
        yield record


def _read_record(fd: int, position: int, end: int) -> tuple[NameRecord | None, int]:
    head = read_around(fd, _HEAD.size, position)
    if len(head) == _HEAD.size:
        magic, zero, length, crc = _HEAD.unpack(head)
        if magic == _MAGIC and not zero and length <= min(_MAX_PAYLOAD, end - position - _HEAD.size):
            payload = read_around(fd, length, position + _HEAD.size)
            if zlib.crc32(payload) == crc:
                return _unpack(payload), position + _HEAD.size + length
    return None, _next_record(fd, position + 1, end)


def _unpack(payload: bytes) -> NameRecord | None:
    try:
        fields: Any = msgpack.unpackb(payload, max_array_len=7, max_map_len=0, max_ext_len=0)
        record = NameRecord(*fields)
        return record if len(fields) == len(record) and _is_sound(record) else None
    except (ValueError, TypeError, RecursionError, InvalidNameError, msgpack.UnpackException):
        return None


def _is_sound(record: NameRecord) -> bool:
    """Whether the index may take this record: the segment may be damaged, or not written by castore."""
    name, digest, serializer, metadata, created, expires, pinned = record
    check_known_name(name)
    if digest is not None and (type(digest) is not bytes or len(digest) != 32):
        return False
    if metadata is not None and (type(metadata) is not str or type(json.loads(metadata)) is not dict):
        return False
    times = [created] if expires is None else [created, expires]
    finite = all(type(when) in (float, int) and math.isfinite(when) for when in times)
    return type(serializer) is str and finite and pinned in (0, 1)


def _next_record(fd: int, position: int, end: int) -> int:
    """The next position of a whole record with a right checksum, or the end."""
    while position < end:
        chunk = read_around(fd, 1 << 20, position)
        found = chunk.find(_MAGIC)
        while found >= 0:
            head = read_around(fd, _HEAD.size, position + found)
            if len(head) == _HEAD.size:
                _, zero, length, crc = _HEAD.unpack(head)
                fits = not zero and length <= min(_MAX_PAYLOAD, end - position - found - _HEAD.size)
                if fits and zlib.crc32(read_around(fd, length, position + found + _HEAD.size)) == crc:
                    return position + found
            found = chunk.find(_MAGIC, found + 1)
        position += max(1, len(chunk) - 1)
    return end


class JournalTail:
    """Follows the journal from now on: the change feed of a mount.

    Records appear here when they are appended, a moment before their transaction commits. Some never commit.
    So callers query the index before they act on a record.
    """

    def __init__(self, journal: Journal, beacon: Beacon) -> None:
        self._journal = journal
        self._beacon = beacon
        self._number = beacon.segment
        self._retracted = beacon.words[RETRACTED]
        self._fd = self._open()
        self._position = os.fstat(self._fd).st_size

    def _open(self) -> int:
        path = self._journal.path(self._number)
        if not self._journal.read_only:
            return open_with_mode(path, os.O_RDONLY, self._journal.mode)
        try:
            return open_regular(path)
        except FileNotFoundError:  # nobody ever wrote to this segment
            return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def poll(self) -> list[NameRecord] | None:
        """Records appended since the last call; None if some were missed, so any name may have changed, also
        by a transaction that is about to commit.
        """
        # An append that was read may have been taken out since, and another one stand in its place.
        retracted = self._beacon.words[RETRACTED]
        is_whole, self._retracted = retracted == self._retracted, retracted
        records = self._read()
        number = self._beacon.segment
        if number == self._number:
            return records if is_whole else None
        # A new segment was started: read the rest of the old one and all of the new one. If two were started,
        # the middle one is missed.
        is_whole = is_whole and number == self._number + 1
        records += self._read()
        os.close(self._fd)
        self._number, self._position = number, 0
        self._fd = self._open()
        records += self._read()
        return records if is_whole else None

    def _read(self) -> list[NameRecord]:
        end = os.fstat(self._fd).st_size
        self._position = min(self._position, end)  # `retract` may have truncated the file
        records = []
        while self._position < end:
            record, following = _read_record(self._fd, self._position, end)
            if record is None and following == end:
                break  # the record is not complete yet
            if record is not None:
                records.append(record)
            self._position = following
        return records

    def close(self) -> None:
        """Stop following."""
        os.close(self._fd)
