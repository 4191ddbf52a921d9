"""The threads that compress and decompress frames: one pool a process, one thread a core.

The codecs release the GIL, so threads are enough. The pool is made at first use and made anew in a forked child.
Tasks must be short and must never wait for another task of the pool, or they could all wait for each other.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from castore.system.forks import reset_after_fork


def cores() -> int:
    """How many processors this process may use: cgroup masks and taskset count, unlike `os.cpu_count`."""
    return len(os.sched_getaffinity(0))


T = TypeVar("T")


class Workers:
    """The lazily made pool."""

    def __init__(self) -> None:
        self._after_fork()
        reset_after_fork(self)

    def _after_fork(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()

    def pool(self) -> ThreadPoolExecutor:
        """The pool of this process."""
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(cores(), thread_name_prefix="castore-codec")
            return self._pool

    def begin(self, task: Callable[[], T]) -> Callable[[], T]:
        """Have a thread of the pool run ``task``; what is returned waits for its result.

        While the interpreter ends pools take no more work: then it is run where it is waited for.
        """
        try:
            return self.pool().submit(task).result
        except RuntimeError:
            return task


workers = Workers()
