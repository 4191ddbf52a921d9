"""The processors of this machine that this process may use, and the threads that hash on them."""

from __future__ import annotations

import os

from blake3 import blake3

_hash_threads = blake3.AUTO


def usable_cores() -> int:
    """The number of processors this process may use. Unlike `os.cpu_count`, respects cpusets and taskset."""
    return len(os.sched_getaffinity(0))


def hash_threads() -> int:
    """The ``max_threads`` of BLAKE3 for much data: all cores, and 1 in a forked child.

    BLAKE3's pool of threads stays behind in the parent, and a child that hashed with it would wait for ever.
    """
    return _hash_threads


def _after_fork_in_child() -> None:
    global _hash_threads
    _hash_threads = 1


os.register_at_fork(after_in_child=_after_fork_in_child)
