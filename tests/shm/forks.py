"""Children of the tests of shared memory."""

from __future__ import annotations

import os
from collections.abc import Callable


def forked(task: Callable[[], object]) -> int:
    """Run ``task`` in a forked child; returns its wait status."""
    pid = os.fork()
    if not pid:
        status = 1
        try:
            task()
            status = 0
        finally:
            os._exit(status)
    return os.waitpid(pid, 0)[1]
