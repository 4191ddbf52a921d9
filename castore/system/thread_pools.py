"""Pools of threads that live as long as the process.

Must not be used for pools that are shut down: `concurrent.futures` alone does for those.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor


def lasting_pool(threads: int, name: str) -> ThreadPoolExecutor:
    """A pool that is never shut down, with one thread that runs already.

    A Ctrl-C that comes while a pool starts a thread may leave a thread that Python does not know as one of a
    pool. At its end the interpreter wakes the known threads, each of these threads wakes the next one and
    ends, and the interpreter waits for all. So a pool without any known thread would keep the process from
    its end. Python interrupts the main thread alone, so another thread starts the pool's first one here.

    Args:
        threads: the most threads that it has.
        name: the beginning of their names.

    Raises:
        RuntimeError: the interpreter shuts down, or the machine has no more threads.
    """
    from concurrent.futures import ThreadPoolExecutor  # here: most processes need no pool

    pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
    starter = threading.Thread(target=_start_one, args=(pool,), name=f"{name}-starter")
    starter.start()
    starter.join()
    return pool


def _start_one(pool: ThreadPoolExecutor) -> None:
    with contextlib.suppress(RuntimeError):  # the pool raises it for the caller's own tasks too
        pool.submit(int).result()
