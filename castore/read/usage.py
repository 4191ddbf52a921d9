"""Hits, misses and last accesses, counted in memory and written to the index in batches: never a write per read.

Every process adds what it counted, so the figures add up over processes and runs. What a killed process had not yet
written is lost: a few seconds of counts, never an entry.
"""

from __future__ import annotations

import logging
import sqlite3
import sys
import threading
import time

from castore.errors import FullError, StoreError
from castore.index.connections import BUSY_SECONDS
from castore.index.database import Index
from castore.system.forks import reset_after_fork

log = logging.getLogger("castore")

#: Seconds between two writes of a busy reader.
FLUSH_SECONDS = 5.0
_COUNTERS = ("memory_hits", "disk_hits", "misses", "corrupt")
# How long a reader that flushes waits for writers, and how many names it writes at once: each takes some 20 µs in a large
# index, and nobody is to wait for his bytes because of many that were read before.
_PATIENCE = 0.02
_SLICE = 100


class Usage:
    """The counts of one `Store` in one process.

    Attributes:
        counts: what `Stat` shows, since the last flush. Readers add by themselves: a call would cost as much as a hit.
        touched: names to when they were last read, in seconds since the epoch.
        flushed, due: the last flush and the next one, in seconds since the epoch. Readers flush when they are past it, or
            before the last one, by a clock that was set back.
    """

    def __init__(self, index: Index) -> None:
        self._index = index
        self._after_fork()
        reset_after_fork(self)

    def _after_fork(self) -> None:
        self._lock = threading.Lock()
        self._restart()

    def _restart(self) -> None:
        self.touched: dict[str, float] = {}
        self.counts = dict.fromkeys(_COUNTERS, 0)  # a dict is quicker than a Counter
        self.flushed = time.time()
        self.due = self.flushed + FLUSH_SECONDS

    def flush_if_due(self, read: int = 1) -> None:
        """Flush every few seconds of use. Who has just read many names writes twice as many, or they would pile up."""
        for _ in range(max(1, 2 * read // _SLICE)):
            if not self._is_due():
                break
            self.flush_some()

    def flush_for(self, seconds: float) -> None:
        """`flush_if_due` until nothing is left, or for that long: for who does it beside readers, and keeps none waiting."""
        until = time.monotonic() + seconds
        while self._is_due() and time.monotonic() < until:
            self.flush_some()

    def _is_due(self) -> bool:
        return not self.flushed <= time.time() < self.due

    def flush_some(self) -> None:
        """`flush_if_possible`, a part only: for readers, who do not wait."""
        self.flush_if_possible(_SLICE)

    def flush_if_possible(self, most: int = sys.maxsize) -> None:
        """Flush, or try again next time if the index is busy or cannot be written to: counts can wait.

        No reader is to fail for them, on a disk that is full, say, or that has turned read-only.
        """
        try:
            self.flush(_PATIENCE, most)
        except FullError:
            pass
        except StoreError as error:
            log.warning("what was read last is not on record yet: %s", error)
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) and "busy" not in str(error):
                raise

    def flush(self, patience: float = BUSY_SECONDS, most: int = sys.maxsize) -> None:
        """Write what has been counted, of ``most`` names; waits at most ``patience`` seconds for other writers."""
        with self._lock:
            touched, counts = self.touched, self.counts
            self._restart()
            if len(touched) > most:
                self.touched = touched
                touched = dict(touched.popitem() for _ in range(most))
                self.due = self.flushed  # the rest as soon as may be
        counts = {name: count for name, count in counts.items() if count}
        if self._index.read_only or (not touched and not counts):
            return
        try:
            self._index.record_use(touched, counts, patience)
        except (FullError, StoreError, sqlite3.OperationalError):
            with self._lock:
                self.touched = touched | self.touched
                for name, count in counts.items():
                    self.counts[name] += count
                self.due = self.flushed + FLUSH_SECONDS
            raise
