"""Read rates of a folder: cold (the kernel's caches dropped) and warm."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from tools.demo.sources import files_below

ROUNDS = 3
LARGE = 2**20


def can_drop_caches() -> bool:
    return os.geteuid() == 0 and os.access("/proc/sys/vm/drop_caches", os.W_OK)


def drop_caches() -> None:
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3")


def small_files(root: Path) -> Callable[[], float]:
    """Files a second over the folder of samples."""
    paths = files_below(root / "files")

    def run() -> float:
        for path in paths:
            with path.open("rb") as file:
                file.read()
        return float(len(paths))

    return run


def large_files(root: Path) -> Callable[[], float]:
    """Gigabytes a second over all files of a megabyte or more."""
    paths = [path for path in files_below(root) if path.stat().st_size >= LARGE]

    def run() -> float:
        buffer, total = bytearray(2**20), 0
        for path in paths:
            with path.open("rb", buffering=0) as file:
                while got := file.readinto(buffer):
                    total += got
        return total / 1e9

    return run


def rates(contestants: list[tuple[Callable[[], float], Callable[[], None]]], *, cold: bool) -> list[float]:
    """Median rate of each contestant over three rounds, run in turn.

    Args:
        contestants: For each, a job that returns the amount it did, and a function to call before a cold run.
        cold: Drop the kernel's caches before each run; otherwise every job runs once untimed first.
    """
    found: list[list[float]] = [[] for _ in contestants]
    if not cold:
        for job, _ in contestants:
            job()
    for _ in range(ROUNDS):
        for (job, renew), figures in zip(contestants, found, strict=True):
            if cold:
                renew()
                drop_caches()
            start = time.perf_counter()
            amount = job()
            figures.append(amount / (time.perf_counter() - start))
    return [statistics.median(figures) for figures in found]
