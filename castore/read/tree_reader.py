"""The view that a mount reads of a store: names as a tree of files, blobs by digest, changes of names.

`castore_fuse` reads through this value alone, so it knows neither the index nor the object directory. Rows
leave this module as the index has them: a damaged row may hold anything.
"""

from __future__ import annotations

from castore.errors import CorruptError
from castore.index import name_ranges
from castore.index.database import Index
from castore.index.journal import JournalTail
from castore.objects.codecs import FRAME_SIZE
from castore.objects.decode import BlobReader
from castore.objects.directory import ObjectDirectory, check_row
from castore.read.source import BlobSource
from castore.read.usage import Usage
from castore.records import LOST, FileRow
from castore.system.ram_cache import MemoryLRU


class TreeReader:
    """The tree of one store. Threads may share it.

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
        """The row of a name, unless it has expired by ``now``."""
        return name_ranges.file(self._index, name, now)

    def files(self, low: str, high: str | None, now: float, limit: int) -> list[FileRow]:
        """The first rows from ``low`` on, in the order of names, that have not expired by ``now``.

        Args:
            low: the first name that may be among them.
            high: the first name behind them; None for no bound.
            now: seconds since the epoch.
            limit: number of rows.
        """
        bound = name_ranges.AFTER_TEXT if high is None else high
        return name_ranges.files(self._index, low, bound, now, limit)

    def require_order(self, last: str, key: str) -> str:
        """Return ``key``, the ``low`` of the next `files`, after checking that it sorts behind ``last``.

        Raises:
            StoreError: it does not: the index is damaged, and the listing might never end.
        """
        return name_ranges.require_order(self._index, last, key)

    def is_folder(self, path: str, now: float) -> bool:
        """Whether a name that has not expired by ``now`` lies inside ``path``."""
        return name_ranges.is_folder(self._index, path, now)

    def find_digest(self, name: str) -> bytes | None:
        """The digest that a name points to, expired or not, or None."""
        return self._index.find_digest(name)

    def follow(self) -> JournalTail:
        """The changes of names from now on. The caller closes it."""
        return JournalTail(self._index.journal, self._index.beacon)

    # Blobs

    def is_named(self, digest: bytes) -> bool:
        """Whether an entry names a blob, so that gc keeps it."""
        return self._index.is_named(digest)

    def open(self, digest: bytes, cache: MemoryLRU[bytes]) -> BlobReader:
        """A reader that holds a blob's bytes until it is closed, whatever gc does.

        Args:
            digest: of the blob.
            cache: keeps decoded frames for all readers.

        Raises:
            FileNotFoundError: the bytes are gone.
        """
        blob = self._index.blob(digest)
        if blob is None:
            raise FileNotFoundError(f"blob {digest.hex()} is not in {self._index.path.parent}")
        return self._source.open(blob, cache)

    def read_small(self, digest: bytes) -> bytes | None:
        """All bytes of a blob of one frame, checked. None for a larger blob, and for unreadable bytes.

        `open` gives the error then.
        """
        blob = self._index.blob(digest)
        try:
            if blob is None or blob.pack == LOST or blob.size > FRAME_SIZE:
                return None
            check_row(blob)
            return self._objects.read_small(blob)
        except (FileNotFoundError, CorruptError, TypeError):
            return None

    def quarantine(self, reader: BlobReader, error: CorruptError) -> None:
        """Set a blob aside whose bytes failed their check while they were read."""
        self._source.quarantine(reader.blob, error)

    # Upkeep

    def maintain(self, seconds: float) -> None:
        """Flush usage for at most about ``seconds``, and close packs that gc has unlinked.

        Call it every few moments from a background thread.
        """
        self._usage.flush_for(seconds)
        self._objects.packs.drop_unlinked()
