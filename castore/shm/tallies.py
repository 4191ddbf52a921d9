"""Tallies: counters in shared memory that add up over processes.

Each process counts in a row of its own, so no process waits for another. A total is the sum over all rows.

A row belongs to one process. The row of a dead process is added to the first row, which belongs to no
process, and used again. So the counts of workers outlive them.
"""

from __future__ import annotations

import os
import threading

from castore.errors import SegmentError
from castore.shm.segments import Segment
from castore.system.forks import reset_after_fork
from castore.system.temporary import is_running, pid_namespace, process_started

_ROWS = 1024
# The owner of a row: process id, start time of the process, PID namespace. All zero: no owner.
_PID, _STARTED, _NAMESPACE = range(3)
_OWNER = 3


class Tally:
    """One counter of the tallies."""

    def __init__(self, tallies: Tallies, which: int) -> None:
        self._tallies = tallies
        self._which = which

    def add(self, amount: int = 1) -> None:
        """Add to the counter. A negative amount takes back earlier counts of this process."""
        self._tallies.add(self._which, amount)

    @property
    def value(self) -> int:
        """Total of all processes, including those that have ended."""
        return self._tallies.total(self._which)

    def __repr__(self) -> str:
        return f"Tally({self.value})"


class Tallies:
    """``count`` counters in a part of a segment.

    Args:
        segment: the segment; the pages of this part must be reserved.
        start: offset of the part in bytes, a multiple of 8.
        count: number of counters.
    """

    def __init__(self, segment: Segment, start: int, count: int) -> None:
        self._segment = segment
        self._count = count
        self._width = _OWNER + count
        self._words = segment.buffer[start : start + self.needed(count)].cast("Q")
        self._after_fork()
        reset_after_fork(self)

    def _after_fork(self) -> None:
        self._own: memoryview | None = None
        self._threads = threading.Lock()

    @staticmethod
    def needed(count: int) -> int:
        """Bytes that ``count`` counters take."""
        return _ROWS * (_OWNER + count) * 8

    def add(self, which: int, amount: int = 1) -> None:
        """Add to counter ``which``.

        Raises:
            SegmentError: the segment is closed, or has no row left for this process.
        """
        # Threads of a process share its row, and += on shared words is not atomic.
        with self._threads:
            row = self._own
            if row is None:
                row = self._own = self._claim()
            row[which] += amount

    def total(self, which: int) -> int:
        """Total of counter ``which`` over all processes, including those that have ended."""
        return sum(self._words[_OWNER + which :: self._width])

    def tally(self, which: int) -> Tally:
        """Counter ``which`` as an object."""
        return Tally(self, which)

    def _claim(self) -> memoryview:
        pid, namespace = os.getpid(), pid_namespace()
        started = process_started(pid) or 0
        with self._segment.lock():
            for number in range(1, _ROWS):
                row = self._words[number * self._width : (number + 1) * self._width]
                if not row[_PID] or self._is_over(row, namespace):
                    self._fold(row)
                    row[_PID], row[_STARTED], row[_NAMESPACE] = pid, started, namespace
                    return row[_OWNER:]
        raise SegmentError(f"more than {_ROWS - 1} processes use {self._segment} at once; use fewer workers")

    @staticmethod
    def _is_over(row: memoryview, namespace: int) -> bool:
        # Processes of another container are not visible here, so their rows are left alone.
        return row[_NAMESPACE] == namespace and not is_running(row[_PID], row[_STARTED])

    def _fold(self, row: memoryview) -> None:
        for which in range(_OWNER, self._width):
            # A kill between these two lines counts one number twice, and loses none. The counters only
            # inform.
            self._words[which] += row[which]
            row[which] = 0
