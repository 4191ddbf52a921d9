"""The threads that compress and decompress frames: one pool per process, one thread per core.

The codecs release the GIL, so threads are enough. The pool is created at first use, and again in a forked
child. Tasks must be short. A task must never wait for another task of the pool: all of them could wait for
each other.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from castore.system.cpus import usable_cores
from castore.system.forks import reset_after_fork
from castore.system.thread_pools import lasting_pool

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

T = TypeVar("T")


class CodecThreads:
    """The pool, created at first use."""

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
                self._pool = lasting_pool(usable_cores(), "castore-codec")
            return self._pool

    def begin(self, task: Callable[[], T]) -> Callable[[], T]:
        """Have a thread of the pool run ``task``. The returned callable waits for the result.

        While the interpreter shuts down, pools take no more work: then the returned callable runs the task
        itself.
        """
        try:
            return self.pool().submit(task).result
        except RuntimeError:
            return task


codec_threads = CodecThreads()
