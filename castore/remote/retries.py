"""Requests that the storage did not answer are tried again, after pauses of chance, until a deadline.

The pause before the nth further try is any time up to a bound that doubles (full jitter), so that clients
which failed together do not come back together.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from castore.errors import RemoteError
from castore.remote.bucket import Patience

#: Set when this process ends: nobody waits for a network any more.
ENDED = threading.Event()
# Seconds: bounds of the first pause and of any.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 10.0


class Tries:
    """The tries of one request.

    Args:
        patience: how many, and for how long.
        retried: called before each further try.
    """

    def __init__(self, patience: Patience, retried: Callable[[], object]) -> None:
        self._patience = patience
        self._retried = retried
        self._until = time.monotonic() + patience.deadline
        self._left = patience.retries
        self._bound = _FIRST_PAUSE

    def wait(self) -> bool:
        """Wait for the time of the next try; False if there is to be none.

        Raises:
            RemoteError: this process ends.
        """
        import random  # a pull waits for each module, and few requests are tried again
        # The state of the program's own generator stays as it is.

        pause = random.SystemRandom().random() * self._bound
        if self._left == 0 or time.monotonic() + pause > self._until:
            return False
        if ENDED.wait(pause):
            raise RemoteError("the transfer was interrupted")
        self._left -= 1
        self._bound = min(2 * self._bound, _LONGEST_PAUSE)
        self._retried()
        return True
