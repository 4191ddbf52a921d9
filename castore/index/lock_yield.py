"""Long work under the write lock, in many transactions, leaves others a turn.

SQLite's lock knows no queue: who waits looks again after a while, at most a tenth of a second, and would hardly ever find
it free between two transactions of somebody who takes it again at once. So whoever has worked for a second
pauses for longer than that.
"""

from __future__ import annotations

import time

#: Seconds of work, and of the pause behind them: longer than SQLite's busy handler ever sleeps.
WORK, PAUSE = 1.0, 0.11


class Turns:
    """The pauses of one long work. Call `give` between its transactions."""

    def __init__(self) -> None:
        self._pause_at = time.monotonic() + WORK

    def give(self) -> None:
        """Pause if it is time to. The caller is in no transaction."""
        if time.monotonic() >= self._pause_at:
            time.sleep(PAUSE)
            self._pause_at = time.monotonic() + WORK
