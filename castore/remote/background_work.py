"""Work in the background that saves time later: it is dropped if there is much of it, or if it fails.

The threads are daemons, so no process waits at its end for a network that hangs.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from castore.errors import CastoreError
from castore.system.forks import reset_after_fork

log = logging.getLogger("castore")

# Pieces of work under way.
_MOST = 16


class BackgroundWork:
    """Does a few pieces of work at once. Threads may share it."""

    def __init__(self) -> None:
        self._after_fork()
        reset_after_fork(self)

    def _after_fork(self) -> None:
        self._room = threading.Semaphore(_MOST)

    def submit(self, work: Callable[[], object]) -> None:
        """Do some work soon, or not at all."""
        if self._room.acquire(blocking=False):
            threading.Thread(target=self._run, args=(work,), name="castore-background", daemon=True).start()

    def _run(self, work: Callable[[], object]) -> None:
        try:
            work()
        except CastoreError as error:  # whoever needs it gets the error
            log.debug("not fetched ahead: %s", error)
        finally:
            self._room.release()
