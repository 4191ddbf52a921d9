"""Raises the kernel's read-ahead of a mount while large files are read in order, and lowers it afterwards.

A FUSE file system is asked for 128 KiB at a time by default. With 4 MiB, files of lz4 are read half as fast
again. But of a memory map that is read at random, the kernel then brings in 4 MiB around each page that is
touched, up to the hundredth page. A file takes over the read-ahead of its file system when it is opened. So
the first files that are read in order gain nothing, those opened after them do, and maps that were opened
before any reading lose nothing.

Only root may set it. Somebody else's setting stays. Must never: fail a read.
"""

from __future__ import annotations

import logging
import threading
from pathlib import Path

log = logging.getLogger("castore.fuse")

#: KiB of read-ahead while files are read in order.
RAISED = 4096
#: Bytes that are read in order before the read-ahead is raised.
ENOUGH = 32 << 20
#: Bytes between the end of one read and the start of the next that are still in order: several threads answer
#: the requests of one reader, and not one after another.
NEAR = 16 << 20


class KernelReadAhead:
    """The read-ahead of one mount. Threads may share it.

    Args:
        file: where the kernel has it, in KiB.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._lock = threading.Lock()
        self._in_order = 0
        self._found = self._read()
        self._left = self._found  # as this process has left it

    @classmethod
    def of_device(cls, device: str) -> KernelReadAhead:
        """The read-ahead of a mounted file system with this device, such as ``0:57``."""
        return cls(Path("/sys/class/bdi") / device / "read_ahead_kb")

    def note(self, before: int, start: int, end: int) -> None:
        """Take note of a read of a large file.

        Args:
            before: the end of the last read of the file.
            start, end: the bytes that were read.
        """
        if start and not -NEAR < start - before < NEAR:
            self._in_order = 0
            if self._left != self._found:
                self._set(self._found)
            return
        self._in_order += end - start
        if self._in_order >= ENOUGH and self._left == self._found:
            self._set(RAISED)

    def _read(self) -> int:
        """The read-ahead; at least `RAISED` where it is not to be set."""
        try:
            return int(self._file.read_text())
        except (OSError, ValueError):
            return RAISED

    def _set(self, size: int) -> None:
        with self._lock:
            if self._left == size or self._found >= RAISED:
                return
            if self._read() != self._left:  # somebody else has set it
                self._found = self._left = RAISED
                return
            try:
                self._file.write_text(str(size))
            except OSError as error:  # an ordinary user's mount
                log.debug("the read-ahead of the mount stays as it is: %s", error.strerror)
                self._found = self._left = RAISED
                return
            self._left = size
