"""Decoded frames of large blobs in shared memory: one process decodes a frame, others on the node copy it.

There is one arena per store and user. Every process that opens the store with ``shared_memory`` attaches to
it. The hash of a frame's key gives its slot. All extents have the length of a frame. A record contains its
whole key, so a hash collision is a miss and never returns another frame's bytes. Readers take no lock.

A key consists of the digest, the frame's number, and the file that the frame was decoded from (inode and
modification time). So frames of a damaged object cannot be found any more once a good object has replaced it.

Once the tier is full, a frame is admitted when it has been missed three times since the last use of the frame
that it evicts. Epochs use every frame equally often: then nothing moves and a fixed part of the data stays,
which is optimal (castore/adapters/torch/policy.py has the same rule, with counts). A set of frames that
becomes hot is admitted soon.

Knows no store and no codec. Must never: keep bytes that were not checked. Callers of `offer` check them.
"""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import xxhash

from castore.errors import FullError, InvalidValueError, SegmentError, warn
from castore.records import Buffer
from castore.shm.arena import Arena, Layout, Table, round_up
from castore.shm.extents import Extents, Record
from castore.units import format_size

#: Adjacent slots that a frame may use. With _SPARSE slots per frame, one frame in a hundred finds none of
#: them free, and replaces the frame of one of them.
_PROBES = 4
_SPARSE = 4
#: Frames sampled to find one that was used long ago.
_CANDIDATES = 8
#: Bytes of a key, and of a record before its frame.
_KEY = 56
_HEAD = 64
# Each slot notes a recently missed frame: its hash, and the times of its last two misses in nanoseconds of
# the machine's monotonic clock.
_HASH, _BEFORE, _LAST, _MISSED = range(4)
_HITS, _MISSES, _COUNTS = range(3)


class SharedFrames:
    """The tier of one store. Thread-safe, and usable in a forked child.

    Args:
        store: folder of the store.
        size: bytes of shared memory that the tier may take, the same in all processes that use it.
        frame_size: bytes of the longest frame.

    Raises:
        FullError: ``/dev/shm`` or the machine's memory has not so much free; nothing was allocated.
        SegmentError: other processes use the store with another size.
        InvalidValueError: not even one frame would fit.
    """

    def __init__(self, store: Path, size: int, frame_size: int) -> None:
        self._extent = _HEAD + frame_size
        frames = _frames_in(size, self._extent)
        if frames < 1:
            raise InvalidValueError(
                f"shared_memory={size} is too small: "
                f"its tables and one frame take {_needed(1, self._extent)} bytes"
            )
        layout = _layout(frames)
        self._arena = Arena(
            segment_name(store),
            layout,
            frames * round_up(self._extent),
            {"kind": "frames", "shared_memory": size, "frame": frame_size},
            advice=f"give the same shared_memory to all that use {store}, or end those processes first",
        )
        self._tallies = self._arena.tallies()
        #: Time of each extent's last use, in nanoseconds of the machine's monotonic clock.
        self._used = self._arena.table("last uses")
        self._missed = self._arena.table("misses")
        self._hashed = _SPARSE * frames
        self._frames = Extents(self._arena)
        self._random = random.Random()  # noqa: S311 - no secret
        self._cannot_grow = False

    def __repr__(self) -> str:
        return f"SharedFrames({format_size(self.size)}, {self.hits} hits, {self.misses} misses)"

    @property
    def size(self) -> int:
        """Capacity for frames in bytes."""
        return self._frames.size

    @property
    def held(self) -> int:
        """Bytes that frames take now, for all processes together."""
        return self._frames.used

    @property
    def hits(self) -> int:
        """Number of frames read from the tier, by all processes since the first attached."""
        return self._tallies.total(_HITS)

    @property
    def misses(self) -> int:
        """Number of frames read that were not in the tier, by all processes since the first attached."""
        return self._tallies.total(_MISSES)

    def close(self) -> None:
        """Leave. The last process to leave frees the memory. Open readers go on, but add no frames."""
        self._arena.close()

    def of(self, digest: bytes, fd: int) -> ObjectFrames:
        """The frames of the object that is open as ``fd``."""
        status = os.fstat(fd)
        file = status.st_ino.to_bytes(8, "little") + status.st_mtime_ns.to_bytes(8, "little", signed=True)
        return ObjectFrames(self, digest + file)

    def read(self, key: bytes, begin: int, end: int) -> bytes | None:
        """Return a copy of a frame's bytes ``begin`` to ``end``; None if it is missing or being replaced."""
        record = self._find(key)
        if record is not None:
            piece = bytes(record.data[_HEAD + begin : _HEAD + end])
            if self._is_used(record):
                return piece
        self._count(_MISSES)
        return None

    def fill(self, key: bytes, target: memoryview) -> bool:
        """Copy a whole frame to ``target``, which must have its length. If False, ``target`` is undefined."""
        record = self._find(key)
        if record is not None and len(record.data) == _HEAD + len(target):
            target[:] = record.data[_HEAD:]
            if self._is_used(record):
                return True
        self._count(_MISSES)
        return False

    def _find(self, key: bytes) -> Record | None:
        place = xxhash.xxh3_64_intdigest(key) % self._hashed
        for slot in range(place, place + _PROBES):
            record = self._frames.view(slot)
            if record is not None and record.data[:_KEY] == key:
                return record
        return None

    def _is_used(self, record: Record) -> bool:
        if not self._frames.is_unchanged(record):
            return False
        self._used[record.extent] = time.monotonic_ns()
        self._count(_HITS)
        return True

    def _count(self, which: int) -> None:
        try:
            self._tallies.add(which)
        except SegmentError:
            return  # closed, or no row left for this process: the counts only inform

    def offer(self, key: bytes, frame: Buffer) -> None:
        """Copy a missed frame into the tier if there is room, or if another frame is due to be evicted.

        The caller must have checked the frame's bytes.
        """
        now = time.monotonic_ns()
        since = self._note_miss(xxhash.xxh3_64_intdigest(key), now)
        # Once the tier is full, most offers are refused here, without the lock.
        if not since and not self._has_space():
            return
        try:
            with self._arena.lock():
                number = self._enter(key, frame, since)
        except SegmentError:
            return  # the store was closed, but a reader opened before goes on
        if number is not None:
            self._used[number] = now

    def _note_miss(self, hashed: int, now: int) -> int:
        """Note a miss; return the time of the miss before the last one, or 0."""
        missed, first = self._missed, hashed % self._hashed * _MISSED
        rows = range(first, first + _PROBES * _MISSED, _MISSED)
        # Without the lock: a race only admits a frame later or earlier.
        row = next((row for row in rows if missed[row + _HASH] == hashed), None)
        if row is None:
            row = min(rows, key=lambda row: missed[row + _LAST])
            missed[row + _HASH] = hashed
            missed[row + _BEFORE] = missed[row + _LAST] = 0
        before = missed[row + _BEFORE]
        missed[row + _BEFORE], missed[row + _LAST] = missed[row + _LAST], now
        return before

    def _has_space(self) -> bool:
        return not self._cannot_grow and self._frames.fits(self._extent)

    def _enter(self, key: bytes, frame: Buffer, since: int) -> int | None:
        """Return the number of the extent that has the frame now, or None. The caller holds the lock."""
        frames = self._frames
        if self._find(key) is not None:
            return None  # another process decoded it at the same time, and was faster
        place = xxhash.xxh3_64_intdigest(key) % self._hashed
        around = range(place, place + _PROBES)
        slot = next((slot for slot in around if not frames.holds(slot)), None)
        parts, length = (key, bytes(_HEAD - _KEY), frame), _HEAD + len(frame)
        if slot is not None and self._has_space():
            try:
                if frames.append(slot, parts, length, capacity=self._extent):
                    return frames.count - 1
            except FullError as error:
                self._stop_growing(error)
        if slot is None:
            there = [record for slot in around if (record := frames.view(slot)) is not None]
            numbers = [record.extent for record in there]
        else:
            count = frames.count
            numbers = [int(self._random.random() * count) for _ in range(_CANDIDATES if count else 0)]
        if not numbers:
            return None
        number = min(numbers, key=self._last_use)
        if self._last_use(number) >= since:
            return None
        if slot is None:
            slot = next(record.slot for record in there if record.extent == number)
        frames.replace(number, slot, parts, length)
        return number

    def _last_use(self, number: int) -> int:
        # An extent is free if its frame was discarded, or its writer died. Use it first.
        return self._used[number] if self._frames.extent(number) is not None else -1

    def _stop_growing(self, error: FullError) -> None:
        # One warning per process: a cache that cannot grow is no reason to stop a training run.
        self._cannot_grow = True
        warn(f"no more frames are shared than {format_size(self.held)}: {error}", RuntimeWarning)

    def discard(self, key: bytes) -> None:
        """Remove a frame if it is there."""
        try:
            with self._arena.lock():
                record = self._find(key)
                if record is not None:
                    self._frames.remove(record.slot)
        except SegmentError:
            return  # closed: this process offers no frame any more


class ObjectFrames:
    """The frames of one object in the tier, by number. ``object_key`` is 48 bytes, unique per object."""

    __slots__ = ("_frames", "_object_key")

    def __init__(self, frames: SharedFrames, object_key: bytes) -> None:
        self._frames = frames
        self._object_key = object_key

    def read(self, index: int, begin: int, end: int) -> bytes | None:
        """See `SharedFrames.read`."""
        return self._frames.read(self._key(index), begin, end)

    def fill(self, index: int, target: memoryview) -> bool:
        """See `SharedFrames.fill`."""
        return self._frames.fill(self._key(index), target)

    def offer(self, index: int, frame: Buffer) -> None:
        """See `SharedFrames.offer`."""
        self._frames.offer(self._key(index), frame)

    def discard(self, count: int) -> None:
        """Remove frames 0 to ``count - 1``: if one frame is damaged, the others are in doubt too."""
        for index in range(count):
            self._frames.discard(self._key(index))

    def _key(self, index: int) -> bytes:
        return self._object_key + index.to_bytes(8, "little")


def segment_name(store: Path) -> str:
    """Name of a store's segment. It is the same for all paths that lead to the store."""
    # Not `hash()`, which differs between processes.
    return f"frames-{xxhash.xxh3_128_hexdigest(os.fsencode(os.path.realpath(store)))}"


def _frames_in(size: int, extent: int) -> int:
    """Number of frames that fit into ``size`` bytes together with their tables."""
    frames = size // round_up(extent)
    while frames and _needed(frames, extent) > size:
        frames -= 1
    return frames


def _needed(frames: int, extent: int) -> int:
    """Bytes of a segment for ``frames`` frames."""
    return _layout(frames).data_at + frames * round_up(extent)


def _layout(frames: int) -> Layout:
    slots = _SPARSE * frames + _PROBES
    tables = [Table("last uses", "Q", frames), Table("misses", "Q", _MISSED * slots)]
    return Layout(slots, extents=frames, counters=_COUNTS, tables=tables)
