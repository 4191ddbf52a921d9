"""Six 8-byte words that every process using a store maps. Readers check them instead of querying the index.

``changed`` takes a new value just before each commit that re-points or removes a name, and ``settled`` takes
the same value after the commit. While both are equal, no such commit is under way. Answers that the index
gives then may be cached, and they stay true for as long as ``changed`` keeps its value. ``segment`` is the
number of the names journal's current segment. ``epoch`` counts how often another file replaced
``index.sqlite``: connections to an earlier file are no longer used. ``prefixes`` counts the changes to which
prefixes have which dictionaries, ``retracted`` the appends that were taken out of the journal.

The mapped file also shows whether the store at the path is still the one that was opened: a folder that was
removed and made again, or moved, has another file there, or none.

The words only save work. A writer killed around its commit leaves ``changed`` and ``settled`` different.
Nobody caches anything then, until the next process that takes the index's write lock calls `settle`: readers
are slower meanwhile, never wrong.
"""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path

from castore.errors import StoreError
from castore.system.io_errors import AT_FAULT
from castore.system.temporary import open_regular, open_with_mode

_SIZE = 48
#: Places of the words.
CHANGED, SEGMENT, EPOCH, SETTLED, PREFIXES, RETRACTED = 0, 1, 2, 3, 4, 5


class Beacon:
    """The mapped words. Survives a fork: parent and child share the mapping.

    Args:
        path: the file, made if it is missing.
        mode: permission bits of a new file.
        read_only: do not make the file; values written to the words stay in this process.
    """

    def __init__(self, path: Path, mode: int, *, read_only: bool = False) -> None:
        self._path = str(path)
        fd = open_regular(path) if read_only else open_with_mode(path, os.O_RDWR, mode)
        try:
            status = os.fstat(fd)
            is_short = status.st_size < _SIZE
            # No other file gets the number for as long as the mapping holds the file.
            self._inode = status.st_ino
            if is_short and not read_only:
                os.ftruncate(fd, _SIZE)
            os.pread(fd, _SIZE, 0)  # in a mapping, a sector that cannot be read raises SIGBUS
            if not read_only:
                self._map = mmap.mmap(fd, _SIZE)
            elif is_short:
                self._map = mmap.mmap(-1, _SIZE)
            else:
                self._map = mmap.mmap(fd, _SIZE, access=mmap.ACCESS_COPY)  # shows the writes of others
        except OSError as error:
            if error.errno not in AT_FAULT:
                raise
            raise StoreError(
                f"{path} cannot be read ({error.strerror});"
                " delete it while no process uses the store, and castore makes it again"
            ) from error
        finally:
            os.close(fd)
        #: The words, by place. Public for callers on a fast path.
        self.words = memoryview(self._map).cast("Q")

    def require_in_place(self) -> None:
        """Check that the file at the path is the one that is mapped. Takes a microsecond.

        Raises:
            StoreError: the store's folder was removed, moved or made anew since it was opened.
        """
        try:
            if os.stat(self._path).st_ino == self._inode:
                return
            is_there = True
        except (FileNotFoundError, NotADirectoryError):
            is_there = False
        folder = os.path.dirname(os.path.dirname(self._path))
        what, advice = "is gone", "open the store anew to make one"
        if is_there:
            what = "is another one than the one that was opened: it was removed and made again, or moved"
            advice = "open the store anew"
        elif os.path.isdir(folder):
            what, advice = f"has lost its file {os.path.relpath(self._path, folder)}", "open the store anew"
        raise StoreError(f"the folder of the store {folder} {what}; {advice}")

    def announce(self) -> int:
        """Announce that a name is about to change.

        The caller holds the index's write lock. The monotonic clock gives a value no process has written
        before.

        Returns:
            The value to pass to `settle` once the change is committed or rolled back.
        """
        changed = self.words[CHANGED] = time.monotonic_ns()
        return changed

    def settle(self, changed: int) -> None:
        """Mark the change announced as ``changed`` as over."""
        self.words[SETTLED] = changed

    def settle_all(self) -> None:
        """Mark every change as over. The caller holds the index's write lock, so no change is under way."""
        self.words[SETTLED] = self.words[CHANGED]

    def settled(self) -> int:
        """The value of ``changed`` under which later answers of the index may be cached.

        -1 while a change is under way: ``changed`` is never -1.
        """
        # In this order: `settled` is compared with a value that was announced before `settled` was read.
        changed = self.words[CHANGED]
        return changed if self.words[SETTLED] == changed else -1

    @property
    def segment(self) -> int:
        """Number of the journal's current segment. Stable while the index's write lock is held."""
        return self.words[SEGMENT]

    @segment.setter
    def segment(self, number: int) -> None:
        self.words[SEGMENT] = number

    def close(self) -> None:
        """Unmap."""
        self.words.release()
        self._map.close()
