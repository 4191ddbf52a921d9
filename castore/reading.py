"""How a name becomes bytes again: RAM, then the index, then the object, checked; or a miss.

The RAM tier answers without asking the index as long as the beacon says that no name changed since, and for at most a
second at a time. What fails its check on disk is set aside, counted and from then on a miss: the caller computes it
again, and putting it heals the blob. Bytes that fail their check are never returned.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from castore.beacon import CHANGED, Beacon
from castore.errors import CorruptError, FullError
from castore.index import Found, Index
from castore.memory import MemoryLRU
from castore.names import check_name
from castore.objects.codecs import FRAME_SIZE
from castore.objects.decode import BlobReader
from castore.objects.directory import ObjectDirectory, check_row
from castore.records import LOST, Blob
from castore.usage import Usage

if TYPE_CHECKING:
    from castore.shared_frames import SharedFrames

#: Longest time the RAM tier answers for a name without asking the index.
TRUST_SECONDS = 1.0
#: How often a reader looks again for bytes that were there a moment ago.
ATTEMPTS = 8
#: A `_Binding` with its name, digest and place in the dictionary, as measured with tracemalloc.
_BINDING_BYTES = 400


class _Binding(NamedTuple):
    """What a name pointed to, and how long that may be taken for true."""

    digest: bytes
    changed: int
    since: float
    until: float


class Fault(Enum):
    """Where the fault was, when a blob could not be read."""

    NONE, ROW, OBJECT = range(3)


class Read(NamedTuple):
    """What a name pointed to at one moment."""

    data: bytes
    serializer: str


def _needs_checksums(blob: Blob) -> bool:
    return blob.codec == "none" and blob.size > FRAME_SIZE


def _held(data: bytes) -> int:
    """What a blob in the RAM tier occupies, with the binding of the one name that most blobs have."""
    return sys.getsizeof(data) + _BINDING_BYTES


class BlobSource:
    """Reads blobs by name or digest.

    Args:
        index: rows.
        objects: bytes.
        beacon: tells when names change.
        usage: counts hits and misses.
        memory: bound on the RAM tier in bytes; 0 for none.
    """

    def __init__(
        self, index: Index, objects: ObjectDirectory, beacon: Beacon, usage: Usage, memory: int
    ) -> None:
        self._index = index
        self._objects = objects
        self._words = beacon.words
        self._usage = usage
        self.memory: MemoryLRU[bytes] = MemoryLRU(memory, _held)
        #: Frames that processes share, if the store was opened so.
        self.shared: SharedFrames | None = None
        self._bindings: dict[str, _Binding] = {}

    def get(self, name: str) -> bytes | None:
        """The bytes of a name, or None."""
        binding = self._bindings.get(name)
        if binding is not None:
            now = time.time()
            digest, changed, since, until = binding
            # Before `since` it is by a clock that was set back meanwhile, which would trust this for as long.
            if since <= now < until and self._words[CHANGED] == changed:
                data = self.memory.get(digest)
                if data is not None:
                    usage = self._usage
                    usage.counts["memory_hits"] += 1
                    usage.touched[name] = now
                    return data
        read = self.read(name)
        return None if read is None else read.data

    def read(self, name: str) -> Read | None:
        """The bytes of a name and how they turn into an object, as they belong together, or None."""
        check_name(name)
        # The word is read before the index: a change in between makes the binding stale, never fresh.
        changed = self._words[CHANGED]
        now = time.time()
        found = self._index.find(name)
        if found is None or (found.expires is not None and found.expires <= now):
            self._miss()
            return None
        memory, data, tier = self.memory, None, "memory_hits"
        if memory.max_bytes:
            data = memory.get(found.blob.digest)
        if data is None:
            (found, data), tier = self._fetch_named(name, found), "disk_hits"
        if data is None:
            self._miss()
            return None
        if memory.max_bytes:
            self._bind(name, found, changed, now)
        usage = self._usage
        usage.touched[name] = now
        usage.counts[tier] += 1
        if time.monotonic() >= usage.due:
            usage.flush_if_possible()
        return Read(data, found.serializer)

    def _miss(self) -> None:
        self._usage.counts["misses"] += 1
        self._usage.flush_if_due()

    def _bind(self, name: str, found: Found, changed: int, now: float) -> None:
        if len(self._bindings) > len(self.memory) + 256:
            self._bindings.clear()
        until = now + TRUST_SECONDS
        if found.expires is not None:
            until = min(until, found.expires)
        self._bindings[name] = _Binding(found.blob.digest, changed, now, until)

    def count_use(self, name: str) -> None:
        """Count a read that went past `get`: gc takes the least recently used first."""
        self._usage.touched[name] = time.time()
        self._usage.counts["disk_hits"] += 1

    def get_many(self, names: list[str]) -> list[bytes | None]:
        """`get` for many names with one question to the index."""
        now = time.time()
        for name in names:
            check_name(name)
        found = self._index.find_many(names)
        results: list[bytes | None] = []
        for name in names:
            row = found.get(name)
            data = None
            if row is not None and (row.expires is None or row.expires > now):
                _, data = self._fetch_named(name, row)
            results.append(data)
            if data is not None:
                self._usage.touched[name] = now
        hits = sum(data is not None for data in results)
        self._usage.counts["disk_hits"] += hits
        self._usage.counts["misses"] += len(names) - hits
        self._usage.flush_if_due()
        return results

    def _fetch_named(self, name: str, found: Found) -> tuple[Found, bytes | None]:
        """All bytes of a name's blob; if gc was quicker, those of the blob that the name points to by now."""
        data = self.fetch(found.blob)
        for _ in range(ATTEMPTS):
            if data is not None or (now := self._index.find(name)) is None or now.blob.pack == LOST:
                break
            found, data = now, self.fetch(now.blob)
        return found, data

    def fetch(self, blob: Blob) -> bytes | None:
        """All bytes of a blob, through the RAM tier; None if they are lost, which is then on record."""
        if blob.pack == LOST:
            return None
        try:
            if blob.pack > 0 and blob.size <= FRAME_SIZE:
                # Decoding costs less than agreeing on who decodes.
                data = self._objects.read_packed(blob)
                if self.memory.max_bytes:
                    self.memory.put(blob.digest, data)
                return data
        except (FileNotFoundError, CorruptError, TypeError):
            pass  # the long way says what it is, and finds bytes that were moved meanwhile
        try:
            return self.memory.get_or_load(blob.digest, lambda: self._load(blob))
        except FileNotFoundError:
            return None

    def _load(self, blob: Blob, *, again: bool = True) -> bytes:
        reader = self.open(blob).share(self.shared)
        try:
            return reader.read_all()
        except CorruptError as error:
            if not self.quarantine(reader.blob, error) or not again:
                raise FileNotFoundError(str(error)) from error
        finally:
            reader.close()
        return self._load(self._index.blob(blob.digest) or blob, again=False)

    def open(self, blob: Blob, cache: MemoryLRU[bytes] | None = None) -> BlobReader:
        """A reader that holds the blob's bytes; compaction may have moved them since `blob` was read.

        Raises:
            FileNotFoundError: the bytes are lost, which is then on record.
        """
        for _ in range(ATTEMPTS):
            try:
                check_row(blob)
                checksums = self._index.checksums(blob.digest) if _needs_checksums(blob) else None
                if checksums is None and _needs_checksums(blob):
                    raise FileNotFoundError("the row went between two questions")
                return self._objects.open(blob, checksums=checksums, cache=cache)
            except CorruptError as error:  # the row itself cannot be
                if not self.quarantine(blob, error):
                    raise FileNotFoundError(str(error)) from error
                blob = self._index.blob(blob.digest) or blob
            except FileNotFoundError:
                current = self._index.blob(blob.digest)
                if current is None or current.pack == LOST:
                    raise
                if current == blob:
                    if self._lose(blob, partial(self._in_place, blob)) is Fault.OBJECT:
                        raise
                    current = self._index.blob(blob.digest) or blob
                blob = current
        raise FileNotFoundError(f"blob {blob.digest.hex()} kept moving")

    def quarantine(self, blob: Blob, error: CorruptError) -> bool:
        """Set a damaged object aside and put it on record as lost; True if the row was at fault, and is mended now.

        On a full disk nothing is recorded: whoever finds it next does.
        """
        self.memory.discard(blob.digest)
        return self._lose(blob, in_place=lambda: False) is Fault.ROW

    def _lose(self, blob: Blob, in_place: Callable[[], bool]) -> Fault:
        # Damage to the index must not cost intact objects. The whole object is read for that, before the lock is taken.
        found = self._objects.intact(blob.digest)
        try:
            with self._index.write() as txn:
                if txn.blob(blob.digest) != blob or in_place():
                    return Fault.NONE  # somebody else dealt with it, or put it again
                if found is not None:
                    txn.move_blob(*found)
                    return Fault.ROW
                self._objects.quarantine(blob)
                txn.lose_blob(blob)
        except FullError:
            return Fault.OBJECT
        self._usage.counts["corrupt"] += 1
        return Fault.OBJECT

    def _in_place(self, blob: Blob) -> bool:
        if _needs_checksums(blob) and self._index.checksums(blob.digest) is None:
            return False
        try:
            self._objects.open(blob).close()
        except FileNotFoundError:
            return False
        return True
