"""Four 8-byte words that every process using a store maps: what a reader checks instead of asking the index.

``changed`` takes a new value after each commit that re-points or removes a name; a RAM tier whose remembered value
still matches may answer without touching SQLite. ``segment`` is the number of the names journal's current segment. ``epoch``
counts how often ``index.sqlite`` was replaced by another file: connections to an earlier one are not used any more.
``prefixes`` counts how often it was changed which prefixes have which dictionaries.

The words only save work. ``changed`` is written before the commit, for the next writer, and after it, for readers; a
writer killed in between leaves readers with the old row under the new word:
whoever trusts it must ask the index itself once in a while (`Store` does so every second).
"""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path

from castore.temporary import open_with_mode

_SIZE = 32
#: Places of the words.
CHANGED, SEGMENT, EPOCH, PREFIXES = 0, 1, 2, 3


class Beacon:
    """The mapped words. Survives a fork: the mapping is shared with the child.

    Args:
        path: the file, made if it is missing.
        mode: permission bits of a new file.
    """

    def __init__(self, path: Path, mode: int) -> None:
        fd = open_with_mode(path, os.O_RDWR, mode)
        try:
            if os.fstat(fd).st_size < _SIZE:
                os.ftruncate(fd, _SIZE)
            self._map = mmap.mmap(fd, _SIZE)
        finally:
            os.close(fd)
        #: The words, by place. Public for callers in a hurry.
        self.words = memoryview(self._map).cast("Q")

    def announce(self) -> None:
        """Say that a name changed. The monotonic clock gives a value no process has written before."""
        self.words[CHANGED] = time.monotonic_ns()

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
