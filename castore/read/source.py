"""Turns a name into checked bytes, or a miss: from remembered rows, or the index, then the object.

The index's answer for a name stays valid until the beacon shows that a name changed. Until then a value in
RAM, or a small blob on disk, is read without a query. An object that fails its check on disk is moved to the
quarantine, counted, and from then on a miss: the caller computes the value again, and putting it heals the
blob. Bytes that fail their check are never returned.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import Enum
from functools import cached_property, partial
from typing import TYPE_CHECKING, NamedTuple

from castore.errors import (
    CorruptError,
    FullError,
    RemoteError,
    RemoteMissingError,
    StoreError,
    TooLargeError,
)
from castore.index import places
from castore.index.beacon import CHANGED, Beacon
from castore.index.database import Index
from castore.names import check_name
from castore.objects.codecs import FRAME_SIZE
from castore.objects.decode import BlobReader
from castore.objects.directory import ObjectDirectory, Seal, check_row
from castore.read.origin import BlobAccess, Origin
from castore.read.usage import Usage
from castore.records import AWAY, LOST, Blob, Found
from castore.system import log
from castore.system.ram_cache import MemoryLRU, Slot

if TYPE_CHECKING:
    from castore.shm.shared_frames import SharedFrames

# Names that are looked up together to be fetched ahead.
_PREFETCHED = 10_000
#: Attempts of a reader to find bytes that were moved since it read their row.
ATTEMPTS = 8
#: Names remembered at most when there is no RAM tier: about 6 MB.
MAX_REMEMBERED = 10_000
#: Bytes of a `_Remembered` with its name, digest and dictionary entry, measured with tracemalloc.
_REMEMBERED_BYTES = 400
_NEVER = float("inf")
_EMPTY_SLOT: Slot[bytes] = Slot(b"", 0)
_EMPTY_SLOT.value = None

#: The index's answer for a name: slot of the bytes in RAM (perhaps emptied since), the beacon's ``changed``
#: at that time, expiry in seconds since the epoch, the blob and its seal if RAM has no slot for it, and the
#: serializer. A plain tuple, because it unpacks fastest.
_Remembered = tuple[Slot[bytes], int, float, Blob | None, Seal | None, str]


class Fault(Enum):
    """The cause of a blob that could not be read.

    NONE: another thread or process has mended it. ROW: the index was wrong, and is corrected. OBJECT: the
    bytes are damaged. AWAY: the bytes are damaged, and a remote has them, so they are fetched again.
    """

    NONE, ROW, OBJECT, AWAY = range(4)


class Read(NamedTuple):
    """The bytes and the serializer that a name had at one moment."""

    data: bytes
    serializer: str


def _needs_checksums(blob: Blob) -> bool:
    return blob.codec == "none" and blob.size > FRAME_SIZE


def _measure(data: bytes) -> int:
    """Bytes that a blob in the RAM tier occupies, with the `_Remembered` of one name: most blobs have one."""
    return sys.getsizeof(data) + _REMEMBERED_BYTES


class BlobSource:
    """Reads blobs by name or digest.

    Args:
        index: finds rows.
        objects: reads bytes.
        beacon: shows when a name changed.
        usage: counts hits and misses.
        memory: upper bound of the RAM tier in bytes; 0 for none.
        find_origin: makes the origin of blobs that are away. It is called once, when the first is read.
    """

    def __init__(
        self,
        index: Index,
        objects: ObjectDirectory,
        beacon: Beacon,
        usage: Usage,
        memory: int,
        find_origin: Callable[[], Origin],
    ) -> None:
        self._index = index
        self._objects = objects
        self._beacon = beacon
        self._words = beacon.words
        self._usage = usage
        self._find_origin = find_origin
        self.memory: MemoryLRU[bytes] = MemoryLRU(memory, _measure)
        #: Frames shared between processes, if the store was opened with them.
        self.shared: SharedFrames | None = None
        self._remembered: dict[str, _Remembered] = {}

    @cached_property
    def _origin(self) -> Origin:
        return self._find_origin()

    def get(self, name: str) -> bytes | None:
        """The bytes of a name, or None for a miss."""
        remembered = self._remembered.get(name)
        if remembered is not None:
            slot, changed, until, _, _, _ = remembered
            data = slot.value
            now = time.time()
            # `_recall` for bytes in RAM, inlined: the call would add half of the time that this takes.
            if data is not None and now < until and self._words[CHANGED] == changed:
                slot.used = True
                usage = self._usage
                usage.counts["memory_hits"] += 1
                usage.touched[name] = now
                if not usage.flushed <= now < usage.due:
                    self._beacon.require_in_place()  # else a store that is gone would answer for ever
                    usage.flush_some()
                return data
            data = self._recall(name, remembered)
            if data is not None:
                return data
        read = self._look_up(name)
        return None if read is None else read.data

    def read(self, name: str) -> Read | None:
        """The bytes of a name with the serializer that they were put with, or None for a miss."""
        remembered = self._remembered.get(name)
        data = None if remembered is None else self._recall(name, remembered)
        return self._look_up(name) if remembered is None or data is None else Read(data, remembered[5])

    def _recall(self, name: str, remembered: _Remembered) -> bytes | None:
        """The bytes of a name if ``remembered`` is valid and leads to them. If None, query the index."""
        slot, changed, until, blob, seal, _ = remembered
        now = time.time()
        if now >= until or self._words[CHANGED] != changed:
            return None
        usage = self._usage
        data = slot.value
        if data is not None:
            slot.used = True
            usage.counts["memory_hits"] += 1
        elif blob is not None:
            try:
                data = self._objects.read_small(blob, seal)
            except (FileNotFoundError, CorruptError):
                return None  # moved or damaged: `_look_up` finds out
            usage.counts["disk_hits"] += 1
        else:
            return None
        usage.touched[name] = now
        if not usage.flushed <= now < usage.due:
            self._beacon.require_in_place()
            usage.flush_some()
        return data

    def _look_up(self, name: str) -> Read | None:
        check_name(name)
        # Read before the query: after a change in between, the answer counts as stale, never as fresh.
        changed = self._beacon.settled()
        now = time.time()
        found = self._index.find(name)
        read = None if found is None else self._read_found(name, found, changed, now)
        usage = self._usage
        if read is None:
            usage.counts["misses"] += 1
        if not usage.flushed <= now < usage.due:
            usage.flush_some()
        return read

    def _read_found(self, name: str, found: Found, changed: int, now: float) -> Read | None:
        """Read the blob that the index reports for a name; count the use and remember the row."""
        blob, expires, serializer = found
        if expires is not None and expires <= now:
            return None
        memory, row = self.memory, None
        slot = memory.slot(blob.digest)
        data = None if slot is None else slot.value
        tier = "disk_hits" if data is None else "memory_hits"
        if data is None:
            data = self.read_small(blob)
            if data is not None:
                slot = memory.put(blob.digest, data)
                # Remember a row only from a name's second read on: it would slow a single read by a tenth.
                row = blob if slot is None and name in self._usage.touched else None
            else:
                (blob, expires, serializer), data = self._fetch_named(name, found)
                slot = memory.slot(blob.digest)
        if data is None:
            return None
        if slot is not None or row is not None:
            self._remember(name, slot or _EMPTY_SLOT, changed, expires, row, serializer)
        self._usage.touched[name] = now
        self._usage.counts[tier] += 1
        return Read(data, serializer)

    def _remember(
        self,
        name: str,
        slot: Slot[bytes],
        changed: int,
        expires: float | None,
        row: Blob | None,
        serializer: str,
    ) -> None:
        if len(self._remembered) > (len(self.memory) + 256 if self.memory.max_bytes else MAX_REMEMBERED):
            self._remembered.clear()
        until = _NEVER if expires is None else expires
        self._remembered[name] = slot, changed, until, row, None if row is None else Seal(), serializer

    def count_use(self, name: str) -> None:
        """Count a read that bypassed `get`: gc removes the least recently used entries first."""
        self._usage.touched[name] = time.time()
        self._usage.counts["disk_hits"] += 1

    def get_many(self, names: list[str]) -> list[bytes | None]:
        """`get` for many names, with one query for all names that are not remembered.

        The names are those of one moment: of a batch that is written meanwhile, all are new or none.
        """
        began = self._words[CHANGED]
        results: list[bytes | None] = []
        unknown: list[str] = []
        for name in names:
            remembered = self._remembered.get(name)
            data = None if remembered is None else self._recall(name, remembered)
            results.append(data)
            if data is None:
                unknown.append(check_name(name))
        changed = self._beacon.settled()
        found = self._index.find_many(unknown) if unknown else {}
        # A change is announced before its commit, so without one, the names that were remembered are of the
        # query's moment.
        if self._words[CHANGED] != began and len(unknown) < len(names):
            unknown, results = [*map(check_name, names)], [None] * len(names)
            changed = self._beacon.settled()
            found = self._index.find_many(unknown)
        if unknown:
            self._read_many(names, found, changed, results)
        return results

    def _read_many(
        self, names: list[str], found: dict[str, Found], changed: int, results: list[bytes | None]
    ) -> None:
        now = time.time()
        found = self._with_bytes(found, now)
        for place, name in enumerate(names):
            if results[place] is None:
                row = found.get(name)
                read = None if row is None else self._read_found(name, row, changed, now)
                if read is None:
                    self._usage.counts["misses"] += 1
                else:
                    results[place] = read.data
        self._usage.flush_if_due(len(names))

    def bring(self, digests: Sequence[bytes]) -> None:
        """Have the bytes of blobs that are away in the store.

        Raises:
            FileNotFoundError: a remote has lost some of them.
            RemoteError: a remote cannot be used.
            FullError, TooLargeError: the store has no room for them.
        """
        self._origin.bring(digests, large=True)

    def prefetch(self, names: Sequence[str]) -> None:
        """Begin to bring the bytes of names that are away, in the order of the names."""
        for start in range(0, len(names), _PREFETCHED):
            if digests := places.away_digests(self._index, names[start : start + _PREFETCHED]):
                self._origin.prefetch(digests)

    def describe_away(self, digest: bytes) -> dict[str, str]:
        """Facts about a blob that is away, for people."""
        return self._origin.describe(digest)

    def partly_here(self) -> set[bytes]:
        """The digests of blobs that are away but for some parts."""
        return self._origin.partly_here()

    def _with_bytes(self, found: dict[str, Found], now: float) -> dict[str, Found]:
        """The rows of names, once the bytes of those that are away have come together."""
        away = {
            row.blob.digest: name
            for name, row in found.items()
            if row.blob.pack == AWAY
            and (row.expires is None or row.expires > now)
            and self.memory.get(row.blob.digest) is None
        }
        if len(away) < 2:
            return found
        # One of them, or no room for all: each is asked for by itself then.
        with suppress(FileNotFoundError, FullError, TooLargeError):
            self._origin.bring(list(away), large=False)
        return found | self._index.find_many([name for name, row in found.items() if row.blob.digest in away])

    def _fetch_named(self, name: str, found: Found) -> tuple[Found, bytes | None]:
        """All bytes of a name's blob; if they are gone, those of the blob that the name points to by now."""
        data = self.fetch(found.blob)
        for _ in range(ATTEMPTS):
            if data is not None or (now := self._index.find(name)) is None or not now.blob.is_here:
                break
            found, data = now, self.fetch(now.blob)
        return found, data

    def read_small(self, blob: Blob) -> bytes | None:
        """All bytes of a blob of one frame, checked, past the RAM tier; None for others and unreadable ones.

        If None, `open` finds moved bytes, or handles the damage.
        """
        try:
            if blob.size <= FRAME_SIZE and blob.is_here:
                check_row(blob)
                # Not through `get_or_load`: waiting for another thread costs about as much as decoding a few
                # KB.
                return self._objects.read_small(blob)
        except (FileNotFoundError, CorruptError, TypeError):
            pass
        return None

    def fetch(self, blob: Blob) -> bytes | None:
        """All bytes of a blob, through the RAM tier; None if they are lost, which the index then records."""
        if blob.pack == LOST:
            return None
        data = self.memory.get(blob.digest)
        if data is None and (data := self.read_small(blob)) is not None:
            self.memory.put(blob.digest, data)
        if data is not None:
            return data
        try:
            return self.memory.get_or_load(blob.digest, lambda: self._load(blob))
        except FileNotFoundError:
            return None

    def _load(self, blob: Blob, *, again: bool = True) -> bytes:
        reader = self.open(blob).share(self.shared)
        try:
            return reader.read_all()
        except RemoteMissingError as error:
            log.warning("bytes that are only in a remote cannot be had: %s", error)
            raise FileNotFoundError(str(error)) from error
        except CorruptError as error:
            if not self.quarantine(reader.blob, error) or not again:
                raise FileNotFoundError(str(error)) from error
        finally:
            reader.close()
        return self._load(self._index.blob(blob.digest) or blob, again=False)

    def open(self, blob: Blob, cache: MemoryLRU[bytes] | None = None) -> BlobAccess:
        """Return a reader that keeps the blob's bytes readable, or fetches them as they are read.

        Raises:
            FileNotFoundError: the bytes are lost. The index then records the loss.
            RemoteError: the bytes are away, and the remote cannot be used.
        """
        for _ in range(ATTEMPTS):
            if blob.pack == AWAY:
                if (opened := self._origin.open(blob, cache)) is not None:
                    return opened
                blob = self._index.blob(blob.digest) or blob
            try:
                return self.open_here(blob, cache)
            except FileNotFoundError:
                current = self._index.blob(blob.digest)
                if current is None or current.pack != AWAY:
                    raise
                blob = current
        raise self._dropped()

    def _dropped(self) -> RemoteError:
        return RemoteError(
            "bytes of a remote are dropped as fast as they are fetched: the budget of"
            f" {self._index.path.parent} is too small for what is read at once;"
            " raise it with `castore init --max-size`"
        )

    def open_here(self, blob: Blob, cache: MemoryLRU[bytes] | None = None) -> BlobReader:
        """Return a reader of bytes that are in the store. Finds them if compaction has moved them.

        Raises:
            FileNotFoundError: the bytes are lost, which the index then records, or away.
        """
        for _ in range(ATTEMPTS):
            try:
                check_row(blob)
                checksums = self._index.checksums(blob.digest) if _needs_checksums(blob) else None
                if checksums is None and _needs_checksums(blob):
                    raise FileNotFoundError("the row was removed between two queries")
                return self._objects.open(blob, checksums=checksums, cache=cache)
            except CorruptError as error:  # the row itself is not sound
                if not self.quarantine(blob, error):
                    raise FileNotFoundError(str(error)) from error
                blob = self._index.blob(blob.digest) or blob
            except FileNotFoundError:
                current = self._index.blob(blob.digest)
                if current is None or not current.is_here:
                    raise
                if current == blob:
                    if self._record_loss(blob, partial(self._is_in_place, blob)) is Fault.OBJECT:
                        raise
                    current = self._index.blob(blob.digest) or blob
                blob = current
        raise FileNotFoundError(
            f"blob {blob.digest.hex()} was moved during each of {ATTEMPTS} attempts to open it"
        )

    def quarantine(self, blob: Blob, error: CorruptError) -> bool:
        """Move a damaged object to the quarantine and record its blob as lost.

        On a disk that takes no writes (full, or remounted read-only) nothing is recorded; the next reader
        tries again.

        Returns:
            True if it is worth another look at the row: only the row was at fault, and is corrected now, a
            remote has the bytes, or somebody else has seen to it.
        """
        self.memory.discard(blob.digest)
        if blob.pack == AWAY:
            return False  # the parts of it that are here were set aside when they were read
        return self._record_loss(blob, is_in_place=lambda: False) is not Fault.OBJECT

    def _record_loss(self, blob: Blob, is_in_place: Callable[[], bool]) -> Fault:
        # The objects of a store that was moved are missing at their paths, and are not damaged.
        self._beacon.require_in_place()
        # A damaged index must not cost intact objects. `intact` reads the whole object, so it runs before the
        # lock.
        found = self._objects.find_intact(blob.digest)
        try:
            with self._index.write() as txn:
                if txn.blob(blob.digest) != blob or is_in_place():
                    return Fault.NONE  # another thread or process has handled it, or put the bytes again
                if found is not None:
                    txn.move_blob(*found)
                    return Fault.ROW
                self._objects.quarantine(blob)
                txn.mark_lost(blob)
                now = txn.blob(blob.digest)
        except (StoreError, OSError) as error:
            log.warning("blob %s is damaged, and the index could not record it: %s", blob.digest.hex(), error)
            return Fault.OBJECT
        self._usage.counts["corrupt"] += 1
        return Fault.AWAY if now is not None and now.pack == AWAY else Fault.OBJECT

    def _is_in_place(self, blob: Blob) -> bool:
        if _needs_checksums(blob) and self._index.checksums(blob.digest) is None:
            return False
        try:
            self._objects.open(blob).close()
        except FileNotFoundError:
            return False
        return True
