"""Chores, each a process on a large store: `python -m tools.bench.chores CHORE STORE ENTRIES`.

Each chore prints one JSON object. `read` and `write` run until their standard input ends, and print the
longest time of one call. `scan` and `collect` print the most memory that their process had.
"""

from __future__ import annotations

import json
import os
import random
import select
import sys
import time
from collections.abc import Callable, Iterator
from itertools import count, cycle
from pathlib import Path

from castore import Store
from tools.bench.growing import probes

Figures = dict[str, float]


def scan(store: Store, entries: int) -> Figures:
    """Read some entries, call `stat`, list all names."""
    for name in probes(entries):
        store.get(name)
    store.stat()
    listed = sum(1 for _ in store.entries())
    return {"entries": listed, "memory": _peak_memory()}


def collect(store: Store, entries: int) -> Figures:
    """Garbage collection."""
    start = time.perf_counter()
    plan = store.gc()
    return {
        "seconds": time.perf_counter() - start,
        "expired": len(plan.expired),
        "memory": _peak_memory(),
    }


def read(store: Store, entries: int) -> Figures:
    """Read entries in random order."""
    names = probes(entries)
    random.Random(1).shuffle(names)
    return _measure_waits(lambda name: store.get(name) is not None, cycle(names))


def write(store: Store, entries: int) -> Figures:
    """Put small values, one at a time, a few hundred a second."""

    def put(name: str) -> bool:
        store.put(name, name.encode() * 20)
        return True

    def names() -> Iterator[str]:
        for number in count():
            time.sleep(0.002)
            yield f"written/{number // 1000}/{number}"

    return _measure_waits(put, names())


CHORES: dict[str, Callable[[Store, int], Figures]] = {
    "scan": scan, "collect": collect, "read": read, "write": write,
}  # fmt: skip


def _measure_waits(call: Callable[[str], bool], names: Iterator[str]) -> Figures:
    """Call until standard input ends. Returns the number of calls and the longest one, in seconds.

    ``blocked`` leaves out the time for which the process waited for a processor: a machine may have fewer
    processors than busy processes.
    """
    call(next(names))  # the first call opens files
    print("ready", flush=True)
    calls, longest, blocked = 0, 0.0, 0.0
    clock = time.perf_counter
    scheduled = os.open("/proc/self/schedstat", os.O_RDONLY)
    queued = _queued_seconds(scheduled)
    for name in names:
        start = clock()
        if not call(name):
            raise RuntimeError(f"{name} is not there")
        took, before = clock() - start, queued
        queued = _queued_seconds(scheduled)
        longest = max(longest, took)
        blocked = max(blocked, took - (queued - before))
        calls += 1
        if calls % 64 == 0 and select.select([sys.stdin], [], [], 0)[0]:
            break
    return {"calls": calls, "longest": longest, "blocked": blocked}


def _queued_seconds(scheduled: int) -> float:
    """Seconds for which this process was ready to run and did not run."""
    return int(os.pread(scheduled, 100, 0).split()[1]) / 1e9


def _peak_memory() -> int:
    # getrusage does not fit: its figure includes the memory that the process had before exec.
    status = Path("/proc/self/status").read_text()
    return 1024 * int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1])


def main(chore: str, path: str, entries: str) -> None:
    with Store(Path(path), memory=0) as store:
        print(json.dumps(CHORES[chore](store, int(entries))), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
