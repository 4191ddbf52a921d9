"""The objects that a mount has open: those it read last, and those that a process may still read.

The kernel reports no open and no close (see `operations`), so a file that is merely open holds nothing.
Before gc removes bytes it asks the mount (castore/gc/mount_barrier.py). Knows no nodes and no FUSE.
"""

from __future__ import annotations

import threading
from collections import OrderedDict

from castore.objects.codecs import FRAME_SIZE
from castore.read.file_tree import HeldBlob
from castore.system.cpus import usable_cores
from castore_fuse.view import File, View

#: Most objects kept open because they were read.
READERS = 256


class ReadAhead:
    """Distinguishes sequential from random reading, and chooses the frames to decode ahead.

    Args:
        limit: most frames to decode ahead of the reader.
    """

    __slots__ = ("_limit", "_next", "_started", "_window")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._next = self._started = 0
        self._window = 1

    def next_frames(self, first: int, last: int) -> range:
        """The frames to start decoding, now that ``first`` to ``last`` were read; each is returned once."""
        if first > self._next or last < self._next - 1:
            # after a jump, decode nothing until the next read is sequential
            self._next = self._started = last + 1
            self._window = 0
            return range(0)
        if last >= self._next:
            self._next = last + 1
            self._window = min(self._window * 2 or 1, self._limit)
        start, stop = max(self._started, self._next), self._next + self._window
        if stop - start < (self._window + 1) // 2:
            return range(0)  # wait until several frames can be started together
        self._started = stop
        return range(start, stop)


class Handle:
    """An open object: its reader, and how far a sequential reader has come."""

    __slots__ = ("end", "read_ahead", "reader")

    def __init__(self, reader: HeldBlob, read_ahead: int) -> None:
        self.reader = reader
        self.read_ahead = ReadAhead(read_ahead)
        self.end = 0  # of the last read

    def close(self) -> None:
        """Close the object, once no read of it is under way."""
        self.reader.close()


class Handles:
    """The objects that were read last, by digest. Threads may share it."""

    def __init__(self, view: View) -> None:
        self._view = view
        self._lock = threading.Lock()
        self._recent: OrderedDict[bytes, Handle] = OrderedDict()
        # Frames decoded ahead must still be in the cache when they are read, also while several files are
        # read.
        self._ahead = min(4 * usable_cores(), view.cache.max_bytes // (4 * FRAME_SIZE))

    def open(self, file: File) -> Handle:
        """A new handle, which the caller closes.

        Raises:
            FileNotFoundError: the bytes are gone.
        """
        return Handle(self._view.open(file), self._ahead)

    def borrow(self, file: File) -> Handle:
        """A shared handle, whose reader the caller gives back with `unhold`.

        The least recently used handles are closed.

        Raises:
            FileNotFoundError: the bytes are gone.
        """
        with self._lock:
            handle = self._recent.get(file.digest)
            if handle is not None and handle.reader.hold():
                self._recent.move_to_end(file.digest)
                return handle
        handle = self.open(file)
        self._view.count_use(file)
        if handle.reader.frames == 1:
            return handle  # the kernel caches the whole file with this read, so no second read comes
        handle.reader.hold()
        with self._lock:
            old = self._recent.pop(file.digest, None)
            self._recent[file.digest] = handle
            closing = [old] if old is not None else []
            while len(self._recent) > READERS:
                closing.append(self._recent.popitem(last=False)[1])
        for gone in closing:
            gone.close()
        return handle

    def forget(self, handle: Handle) -> None:
        """Keep that object open no longer."""
        digest = handle.reader.blob.digest
        with self._lock:
            if self._recent.get(digest) is not handle:
                return
            del self._recent[digest]
        handle.close()

    def drop_unlinked(self) -> None:
        """Close objects that were unlinked since. Nodes hold those that are still read."""
        for handle in list(self._recent.values()):
            if handle.reader.hold():
                try:
                    unlinked = handle.reader.unlinked()
                finally:
                    handle.reader.unhold()
                if unlinked:
                    self.forget(handle)
