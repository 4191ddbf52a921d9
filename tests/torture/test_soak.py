"""Readers, writers, gc and kills of the daemon: nothing leaks, and readers notice only the kills."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import castore_fuse
from castore import Store
from castore.system.temporary import process_started
from castore_fuse.daemon import DaemonRecord
from tests.helpers import agrees_with_disk, in_processes
from tests.mount.conftest import until
from tests.torture import soak
from tests.torture.soak import NAMES, VERSIONS, Board, Gauges, Worked, gauges, value

READERS, WRITERS = 8, 4
_CACHE = 8 << 20
#: Descriptors of a daemon's threads that may not have had a request yet: the index and its WAL.
_THREADS = 3 * 16
#: Bytes that a process may grow beyond its warm size: memory that allocators keep.
_SLACK = 48 << 20


def daemon_of(path: Path) -> int:
    (record,) = (DaemonRecord.read(record) for record in (path / "locks").glob("mount-*.json"))
    assert record is not None
    return record.pid


def kill_and_mount_again(path: Path, mountpoint: Path) -> tuple[float, float]:
    """From when to when a reader could notice the kill."""
    began, pid = time.monotonic(), daemon_of(path)
    os.kill(pid, signal.SIGKILL)
    until(
        lambda: process_started(pid) is None
    )  # the mount itself is not accessed: it may hang until it is mounted again
    castore_fuse.mount(path, mountpoint, cache_size=_CACHE)
    return began, time.monotonic()


def assert_no_leak(began: Gauges, ended: Gauges, who: str) -> None:
    assert ended.others <= began.others, f"{who} leaks descriptors: {began}, {ended}"
    assert ended.objects <= began.objects, f"{who} keeps objects open: {began}, {ended}"
    assert ended.resident <= began.resident + _SLACK, f"{who} leaks memory: {began}, {ended}"


def served_each_once(path: Path, mountpoint: Path) -> Gauges:
    """The gauges of a new daemon, once it has served every file and all are closed."""
    castore_fuse.umount(mountpoint)
    castore_fuse.mount(path, mountpoint, cache_size=_CACHE)
    for number in range(NAMES):
        assert (mountpoint / f"n/{number}").read_bytes() in [
            value(number, version) for version in range(VERSIONS)
        ]
    return at_rest(path)


def at_rest(path: Path) -> Gauges:
    """The gauges of the daemon when no file is open.

    It keeps recently read objects open, as long as they exist.
    """
    until(lambda: gauges(daemon_of(path)).removed == 0)
    until(lambda: gauges(daemon_of(path)).packs <= len(list((path / "objects/packs").iterdir())))
    return gauges(daemon_of(path))


def loose_files(path: Path) -> int:
    """The number of loose objects."""
    return sum(1 for file in (path / "objects").glob("[0-9a-f][0-9a-f]/*"))


def all_at_once(
    path: Path, mountpoint: Path, seconds: float, between: float
) -> tuple[list[Worked], list[tuple[float, float]]]:
    """Run readers, gc and writers, started in this order, and kill the daemon repeatedly.

    All are at work before the first kill, two kills are felt, and all go on after the last, however long that
    takes.

    Returns the work of each process, and the times of the kills.
    """
    processes = READERS + 1 + WRITERS
    board = Board(processes)

    def act(process: int) -> Worked:
        if process < READERS:
            return soak.read(mountpoint, process, board)
        return (soak.collect if process == READERS else soak.write)(path, process, board)

    def have_done(before: list[int], more: int) -> bool:
        assert not crowd.done(), crowd.result()
        # A gc takes a second, and what it does depends on nobody.
        return all(
            now >= then + (1 if process == READERS else more)
            for process, (then, now) in enumerate(zip(before, board.done(), strict=True))
        )

    def is_felt(before: int) -> bool:
        # Readers of what the kernel has cached need not feel a kill; some are to feel the first two.
        return len(kills) > 2 or board.retries() > before

    kills: list[tuple[float, float]] = []
    with ThreadPoolExecutor(1) as pool:
        crowd = pool.submit(in_processes, processes, act, timeout=seconds + 300)
        try:
            end = time.monotonic() + seconds
            while time.monotonic() + between < end or len(kills) < 2:
                before, felt = board.done(), board.retries()
                until(partial(have_done, before, 25), 200)
                kills.append(kill_and_mount_again(path, mountpoint))
                until(partial(is_felt, felt), 200)
                time.sleep(min(between, max(0.0, end - time.monotonic())))
            until(partial(have_done, board.done(), 25), 200)
        finally:
            board.end()
        return crowd.result(), kills


def retries_of(readers: list[Worked], kills: list[tuple[float, float]]) -> int:
    """The number of retries; readers never retry without a kill."""
    retries = [retry for reader in readers for retry in reader.retries]
    for retry in retries:
        felt = [killed <= retry.failed and retry.asked <= mounted for killed, mounted in kills]
        last = max((mounted for _, mounted in kills if mounted <= retry.asked), default=retry.asked)
        assert any(felt), f"{retry.error}, without a kill: {retry.asked - last:.3f} s after the last mount"
    return len(retries)


def test_only_a_kill_of_the_daemon_is_felt_and_nothing_leaks(
    tmp_path: Path,
    mountpoint: Path,
    scale: Callable[[float, float], float],
    figure: Callable[[str], None],
) -> None:
    seconds, path = scale(1.0, 1200.0), tmp_path / "store"
    with Store(path, memory=0) as store:
        for version in range(VERSIONS):
            store.put_many((f"n/{number}", value(number, version)) for number in range(NAMES))
    # The store is closed before all forks, so that each process has only descriptors of its own.
    castore_fuse.mount(path, mountpoint, cache_size=_CACHE)
    worked, kills = all_at_once(path, mountpoint, seconds, between=scale(0.5, 60.0))
    readers, collector, writers = worked[:READERS], worked[READERS], worked[READERS + 1 :]
    retries = retries_of(readers, kills)
    assert retries, "no reader felt a kill: nothing was tested"
    assert min(reader.done for reader in readers) > 20
    for one in worked:
        assert_no_leak(one.began, one.ended, "a reader, a writer or gc")
    soaked = at_rest(path)
    figures = json.loads((mountpoint / ".castore/stat.json").read_text())
    assert figures["memory_bytes"] <= figures["memory_max"] == _CACHE
    # Each recently read object is open once, and only existing ones: also those without a name until the next
    # gc.
    assert soaked.objects <= loose_files(path), "the daemon keeps objects open more than once"
    soaked = soaked._replace(objects=0)
    fresh = served_each_once(path, mountpoint)
    # the number of its threads that had a request is random
    fresh = fresh._replace(others=fresh.others + _THREADS)
    assert_no_leak(fresh, soaked, "the daemon")
    castore_fuse.umount(mountpoint)
    with Store(path, memory=0) as store:
        agrees_with_disk(store)
    figure(
        f"{seconds:.0f} s: {sum(one.done for one in readers):,} reads by {READERS} readers, "
        f"{sum(one.done for one in writers):,} puts by {WRITERS} writers, {collector.done} gc runs; "
        f"{len(kills)} kills of the daemon, mounted again within "
        f"{max(over - start for start, over in kills):.1f} s; {retries} retries, none without a kill; "
        "descriptors, open objects and memory where they began"
    )
