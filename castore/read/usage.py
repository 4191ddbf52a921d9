"""Counts hits, misses and last accesses in memory, and writes them to the index in batches.

Every process adds its own counts, so the figures add up over processes and runs. A killed process loses its
unwritten counts (a few seconds of them), never an entry. Must never: write to the index once per read.
"""

from __future__ import annotations

import sqlite3
import sys
import threading
import time

from castore.errors import FullError, StoreError
from castore.index.connections import BUSY_SECONDS
from castore.index.database import Index
from castore.system import log
from castore.system.forks import reset_after_fork

#: Counters of requests to remotes, their bytes, the errors and retries among them, results that were found in
#: remotes and offered to them, and the time of all requests.
REMOTE_COUNTERS = tuple(
    f"remote_{name}"
    for name in (
        "reads",
        "writes",
        "lists",
        "deletes",
        "received",
        "sent",
        "errors",
        "retries",
        "found",
        "offered",
        "left_alone",
        "microseconds",
    )
)
#: Seconds between two flushes of a busy reader.
FLUSH_SECONDS = 5.0
_COUNTERS = ("memory_hits", "disk_hits", "misses", "corrupt", *REMOTE_COUNTERS)
# Seconds that a flushing reader waits for writers, and names that it writes at once. A name takes about
# 20 µs in a large index, and a read must not wait long for the counts of earlier reads.
_FLUSH_TIMEOUT = 0.02
_MAX_NAMES = 100


class Usage:
    """The counts of one `Store` in one process.

    Attributes:
        counts: the counters that `Stat` shows, since the last flush. Readers change them directly: a method
            call would cost as much as a hit.
        touched: last read of each name, in seconds since the epoch.
        flushed, due: times of the last flush and of the next, in seconds since the epoch. Readers flush after
            ``due``, and also before ``flushed``, which happens when the clock was set back.
    """

    def __init__(self, index: Index) -> None:
        self._index = index
        self._after_fork()
        reset_after_fork(self)

    def _after_fork(self) -> None:
        self._lock = threading.Lock()
        self._reset()

    def _reset(self) -> None:
        self.touched: dict[str, float] = {}
        self.counts = dict.fromkeys(_COUNTERS, 0)  # a dict is faster than a Counter
        self.flushed = time.time()
        self.due = self.flushed + FLUSH_SECONDS

    def flush_if_due(self, read: int = 1) -> None:
        """Flush if due. After a read of many names write up to twice as many, or the counts would pile up."""
        for _ in range(max(1, 2 * read // _MAX_NAMES)):
            if not self._is_due():
                break
            self.flush_some()

    def flush_for(self, seconds: float) -> None:
        """Flush until nothing is left, for at most about ``seconds``. Call from a background thread."""
        until = time.monotonic() + seconds
        while self._is_due() and time.monotonic() < until:
            self.flush_some()

    def _is_due(self) -> bool:
        return not self.flushed <= time.time() < self.due

    def flush_some(self) -> None:
        """`flush_if_possible` for a limited number of names, so that a reader does not wait."""
        self.flush_if_possible(_MAX_NAMES)

    def flush_if_possible(self, limit: int = sys.maxsize) -> None:
        """Flush the counts and the last reads of at most ``limit`` names, if the index can be written now.

        If the index is busy or cannot be written, a later flush tries again. Counts must not make a read
        fail, for example on a disk that is full or remounted read-only.
        """
        try:
            self.flush(_FLUSH_TIMEOUT, limit)
        except FullError:
            pass
        except StoreError as error:
            log.warning("usage counts could not be written yet: %s", error)
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) and "busy" not in str(error):
                raise

    def flush(self, timeout: float = BUSY_SECONDS, limit: int = sys.maxsize) -> None:
        """Write the counts, and the last reads of at most ``limit`` names.

        Args:
            timeout: seconds to wait for other writers.
            limit: number of names.

        Raises:
            FullError, StoreError, sqlite3.OperationalError: the index could not be written. The counts are
                kept.
        """
        with self._lock:
            touched, counts = self.touched, self.counts
            self._reset()
            if len(touched) > limit:
                self.touched = touched
                touched = dict(touched.popitem() for _ in range(limit))
                self.due = self.flushed  # the rest is due at once
        counts = {name: count for name, count in counts.items() if count}
        if self._index.read_only or (not touched and not counts):
            return
        try:
            self._index.record_use(touched, counts, timeout)
        except (FullError, StoreError, sqlite3.OperationalError):
            with self._lock:
                self.touched = touched | self.touched
                for name, count in counts.items():
                    self.counts[name] += count
                self.due = self.flushed + FLUSH_SECONDS
            raise
