"""The processors of this machine that this process may use."""

from __future__ import annotations

import os


def usable_cores() -> int:
    """The number of processors this process may use. Unlike `os.cpu_count`, respects cpusets and taskset."""
    return len(os.sched_getaffinity(0))
