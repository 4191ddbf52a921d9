"""Threads that live as long as the process end with it, whenever Ctrl-C came."""

from __future__ import annotations

import inspect
import subprocess
import sys
import threading
from concurrent.futures import thread as threads_of_python
from pathlib import Path

from castore.system.thread_pools import lasting_pool

# Interrupts the first put as Ctrl-C would while Python's pool starts a thread, wherever that is in the main
# thread.
_INTERRUPTED = """
import sys, threading
from castore import Store

line = int(sys.argv[2])
seen = []

def trace(frame, event, argument):
    if frame.f_code.co_name != "_adjust_thread_count":
        return None
    if event == "line" and frame.f_lineno == line:
        seen.append(line)
        raise KeyboardInterrupt
    return trace

store = Store(sys.argv[1], memory=0)
sys.settrace(trace)
try:
    store.put("large", b"abcdefg" * 3_000_000)
except KeyboardInterrupt:
    print("interrupted")
sys.settrace(None)
assert any(thread.name.startswith("castore-codec") for thread in threading.enumerate()) or seen
print("ends")
"""


def _lines() -> list[int]:
    """The lines of Python's own pool in which a thread is started and registered."""
    source, first = inspect.getsourcelines(threads_of_python.ThreadPoolExecutor._adjust_thread_count)
    begin = next(number for number, line in enumerate(source) if "threading.Thread(" in line)
    return [first + number for number, line in enumerate(source) if number > begin and line.strip()]


def test_an_interrupt_while_a_thread_is_started_keeps_no_process_from_its_end(tmp_path: Path) -> None:
    lines = _lines()
    assert len(lines) > 3
    for line in lines:
        done = subprocess.run(
            [sys.executable, "-c", _INTERRUPTED, tmp_path / str(line), str(line)],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[-1] == "ends"


def test_one_thread_runs_from_the_start_and_others_when_they_are_needed() -> None:
    pool = lasting_pool(3, "of a test")
    try:
        assert sum(thread.name.startswith("of a test") for thread in threading.enumerate()) == 1
        barrier = threading.Barrier(3)
        assert sorted(each.result(60) for each in [pool.submit(barrier.wait) for _ in range(3)]) == [0, 1, 2]
    finally:
        pool.shutdown()


def test_a_pool_that_nobody_has_any_more_ends_its_threads() -> None:
    pool = lasting_pool(2, "of nobody")
    mine = [thread for thread in threading.enumerate() if thread.name.startswith("of nobody")]
    del pool
    for thread in mine:
        thread.join(60)
        assert not thread.is_alive()
