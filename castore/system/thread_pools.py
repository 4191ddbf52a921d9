"""Pools of threads that live as long as the process.

Must not be used for pools that are shut down: `concurrent.futures` alone does for those.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor


def lasting_pool(threads: int, name: str) -> ThreadPoolExecutor:
    """A pool whose threads all run already, and which is never shut down.

    A Ctrl-C that comes while a pool starts a thread may leave a thread that the pool does not know. The
    interpreter would wait for that thread at its end, and nobody would tell the thread to end. Python
    interrupts the main thread alone, so another thread starts them here.

    Args:
        threads: their number.
        name: the beginning of their names.

    Raises:
        RuntimeError: the interpreter shuts down.
    """
    pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
    starter = threading.Thread(target=_start_all, args=(pool, threads), name=f"{name}-starter")
    starter.start()
    starter.join()
    return pool


def _start_all(pool: ThreadPoolExecutor, threads: int) -> None:
    # A pool starts a thread for a task if no thread is idle.
    all_run = threading.Barrier(threads + 1)
    try:
        for _ in range(threads):
            pool.submit(all_run.wait)
    except RuntimeError:  # no more threads can be started: the pool does with those that it has
        all_run.abort()
    else:
        all_run.wait()
