"""Tallies: numbers that each process counts up in a row of its own, so that nobody waits, and that add up over all.

A row belongs to one process; that of a dead one is added to the first row, which belongs to nobody, and used again. So
what workers counted outlives them.
"""

from __future__ import annotations

import os
import threading

from castore.errors import SegmentError
from castore.shm.segments import Segment
from castore.system.forks import reset_after_fork
from castore.system.temporary import is_running, pid_namespace, process_started

_ROWS = 1024
# Who has the row: its process, when that started, the PID namespace it counts in. Zero: nobody.
_PID, _STARTED, _NAMESPACE = range(3)
_OWNER = 3


class Tally:
    """One number of the tallies."""

    def __init__(self, tallies: Tallies, which: int) -> None:
        self._tallies = tallies
        self._which = which

    def add(self, amount: int = 1) -> None:
        """Count it up; a negative amount takes back what this process has counted."""
        self._tallies.add(self._which, amount)

    @property
    def value(self) -> int:
        """What all processes counted, those that are gone too."""
        return self._tallies.total(self._which)

    def __repr__(self) -> str:
        return f"Tally({self.value})"


class Tallies:
    """``count`` numbers in a part of a segment.

    Args:
        segment: where they lie; its pages must be reserved.
        start: the place of their first byte, a multiple of 8.
        count: how many numbers.
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
        """Bytes that ``count`` numbers take."""
        return _ROWS * (_OWNER + count) * 8

    def add(self, which: int, amount: int = 1) -> None:
        """Count the number ``which`` up."""
        # Threads of a process share its row; += on shared words is no single step.
        with self._threads:
            row = self._own
            if row is None:
                row = self._own = self._claim()
            row[which] += amount

    def total(self, which: int) -> int:
        """The number ``which`` over all processes, those that are gone too."""
        return sum(self._words[_OWNER + which :: self._width])

    def tally(self, which: int) -> Tally:
        """The number ``which``, by itself."""
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
        # Of another container's processes nothing is known here: their rows are left alone.
        return row[_NAMESPACE] == namespace and not is_running(row[_PID], row[_STARTED])

    def _fold(self, row: memoryview) -> None:
        for which in range(_OWNER, self._width):
            # Killed in between, we count once too often at most once: never lose, since these only inform.
            self._words[which] += row[which]
            row[which] = 0
