"""Pauses in long work that takes the write lock many times, so that other writers get the lock too.

SQLite's lock has no queue: a waiting process sleeps for at most a tenth of a second and tries again. A
waiting process would hardly ever find the lock free between two transactions of a process that retakes it at
once. So long work pauses after each second, for longer than the busy handler sleeps.
"""

from __future__ import annotations

import time

#: Seconds of work, and of the pause after them. The pause is longer than SQLite's busy handler ever sleeps.
WORK_SECONDS, PAUSE_SECONDS = 1.0, 0.11


class LockYield:
    """The pauses of one long job. Call `pause_if_due` between its transactions."""

    def __init__(self) -> None:
        self._pause_at = time.monotonic() + WORK_SECONDS

    def pause_if_due(self) -> None:
        """Pause if a second of work has passed. The caller is in no transaction."""
        if time.monotonic() >= self._pause_at:
            time.sleep(PAUSE_SECONDS)
            self._pause_at = time.monotonic() + WORK_SECONDS
