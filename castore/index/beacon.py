"""Five 8-byte words that every process using a store maps: what a reader checks instead of asking the index.

``changed`` takes a new value just before each commit that re-points or removes a name, and ``settled`` takes the same
value after it. While both are equal no such commit is under way, so what the index says then may be remembered, and it
stays true for as long as ``changed`` stays what it was. ``segment`` is the number of the names journal's current
segment. ``epoch`` counts how often ``index.sqlite`` was replaced by another file: connections to an earlier one are not
used any more. ``prefixes`` counts how often it was changed which prefixes have which dictionaries.

The words only save work. A writer killed in between leaves ``changed`` and ``settled`` different, and nobody remembers anything until the next
one that takes the index's write lock says that it is over (`settle`): readers are slower then, never wrong.
"""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path

from castore.errors import StoreError
from castore.system.io_errors import AT_FAULT
from castore.system.temporary import open_regular, open_with_mode

_SIZE = 40
#: Places of the words.
CHANGED, SEGMENT, EPOCH, SETTLED, PREFIXES = 0, 1, 2, 3, 4


class Beacon:
    """The mapped words. Survives a fork: the mapping is shared with the child.

    Args:
        path: the file, made if it is missing.
        mode: permission bits of a new file.
        read_only: the file is not made, and what is written to the words stays in this process.
    """

    def __init__(self, path: Path, mode: int, *, read_only: bool = False) -> None:
        fd = open_regular(path) if read_only else open_with_mode(path, os.O_RDWR, mode)
        try:
            is_short = os.fstat(fd).st_size < _SIZE
            if is_short and not read_only:
                os.ftruncate(fd, _SIZE)
            os.pread(fd, _SIZE, 0)  # once it is mapped, a sector that cannot be read is a bus error
            if not read_only:
                self._map = mmap.mmap(fd, _SIZE)
            elif is_short:
                self._map = mmap.mmap(-1, _SIZE)
            else:
                self._map = mmap.mmap(fd, _SIZE, access=mmap.ACCESS_COPY)  # shows what others write
        except OSError as error:
            if error.errno not in AT_FAULT:
                raise
            raise StoreError(
                f"{path} cannot be read ({error.strerror}); delete it while nobody uses the store, and it is made anew"
            ) from error
        finally:
            os.close(fd)
        #: The words, by place. Public for callers in a hurry.
        self.words = memoryview(self._map).cast("Q")

    def announce(self) -> int:
        """Say that a name is about to change; returns what to `settle` when that is done, or has come to nothing.

        The caller holds the index's write lock. The monotonic clock gives a value no process has written before.
        """
        changed = self.words[CHANGED] = time.monotonic_ns()
        return changed

    def settle(self, changed: int) -> None:
        """Say that the change announced as ``changed`` is over."""
        self.words[SETTLED] = changed

    def settle_all(self) -> None:
        """Say that no change is under way. The caller holds the index's write lock, and so knows."""
        self.words[SETTLED] = self.words[CHANGED]

    def settled(self) -> int:
        """The value of ``changed`` under which answers may be remembered that the index gives from here on.

        -1, which ``changed`` never is, while a change is under way.
        """
        # In this order: `settled` is compared with what was announced before it was looked at.
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
