"""The names of a store as a `FileTree`, which a mount shows.

`castore_fuse` reads through such a tree alone, so it needs neither the index nor the object directory.
"""

from __future__ import annotations

import json

from castore.errors import CorruptError
from castore.index import name_ranges
from castore.index.database import Index
from castore.index.journal import JournalTail
from castore.objects.directory import ObjectDirectory
from castore.read.file_tree import HeldBlob
from castore.read.source import BlobSource
from castore.read.usage import Usage
from castore.records import AWAY, Blob, FileRow
from castore.system.ram_cache import MemoryLRU


class TreeReader:
    """The tree of one store. See `FileTree` for its methods.

    Args:
        index: names and rows.
        objects: bytes.
        source: opens blobs, and sets damaged ones aside.
        usage: counts of reads, to be flushed now and then.
    """

    def __init__(self, index: Index, objects: ObjectDirectory, source: BlobSource, usage: Usage) -> None:
        self._index = index
        self._objects = objects
        self._source = source
        self._usage = usage

    # Names

    def file(self, name: str, now: float) -> FileRow | None:
        """See `FileTree`."""
        return name_ranges.file(self._index, name, now)

    def files(self, low: str, high: str | None, now: float, limit: int) -> list[FileRow]:
        """See `FileTree`."""
        bound = name_ranges.AFTER_TEXT if high is None else high
        return name_ranges.files(self._index, low, bound, now, limit)

    def require_order(self, last: str, key: str) -> str:
        """See `FileTree`."""
        return name_ranges.require_order(self._index, last, key)

    def is_folder(self, path: str, now: float) -> bool:
        """See `FileTree`."""
        return name_ranges.is_folder(self._index, path, now)

    def find_digest(self, name: str) -> bytes | None:
        """See `FileTree`."""
        return self._index.find_digest(name)

    def follow(self) -> JournalTail:
        """See `FileTree`."""
        return JournalTail(self._index.journal, self._index.beacon)

    # Blobs

    def blob(self, digest: bytes) -> Blob | None:
        """See `FileTree`."""
        return self._index.blob(digest)

    def is_named(self, digest: bytes) -> bool:
        """See `FileTree`."""
        return self._index.is_named(digest)

    def open(self, name: str, digest: bytes, cache: MemoryLRU[bytes]) -> HeldBlob:
        """See `FileTree`."""
        blob = self._index.blob(digest)
        if blob is None:
            raise FileNotFoundError(f"blob {digest.hex()} is not in {self._index.path.parent}")
        return self._source.open(blob, cache)

    def read_small(self, name: str, digest: bytes) -> bytes | None:
        """See `FileTree`."""
        blob = self._index.blob(digest)
        return None if blob is None else self._source.read_small(blob)

    def count_use(self, name: str, digest: bytes) -> None:
        """See `FileTree`."""
        if name:
            self._source.count_use(name)

    def quarantine(self, held: HeldBlob, error: CorruptError) -> bool:
        """See `FileTree`."""
        return self._source.quarantine(held.blob, error)

    def attributes(self, name: str, digest: bytes) -> dict[str, str]:
        """See `FileTree`."""
        found = {"digest": digest.hex()}
        entry = self._index.entry(name) if name else None
        blob = self._index.blob(digest)
        if blob is not None:
            found |= {"size": str(blob.size), "codec": blob.codec, "stored": str(blob.stored)}
            if blob.pack == AWAY:
                found |= self._source.describe_away(digest)
        if entry is not None and entry.digest == found["digest"]:
            found |= {"serializer": entry.serializer, "pinned": str(int(entry.pinned))}
            if entry.expires is not None:
                found["expires"] = repr(entry.expires)
            if entry.metadata:
                found["metadata"] = json.dumps(entry.metadata, sort_keys=True, ensure_ascii=False)
        return found

    # Upkeep

    def maintain(self, seconds: float) -> None:
        """See `FileTree`."""
        self._usage.flush_for(seconds)
        self._objects.packs.drop_unlinked()

    def close(self) -> None:
        """See `FileTree`. The store is its owner's to close."""
