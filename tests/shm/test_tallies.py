"""Tallies: counters that add up over processes and threads, also those that have ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

from castore.shm.segments import Segment
from castore.shm.tallies import Tallies
from tests.shm.forks import forked


def test_tallies_add_up_over_processes_also_of_the_dead() -> None:
    segment = Segment(None, Tallies.needed(2), {})
    tallies = Tallies(segment, 0, 2)
    hits, misses = tallies.tally(0), tallies.tally(1)
    hits.add()

    def count() -> None:
        for _ in range(100):
            hits.add()
        misses.add(7)
        os.kill(os.getpid(), signal.SIGKILL)

    for _ in range(5):
        assert os.WTERMSIG(forked(count)) == signal.SIGKILL
    assert (hits.value, misses.value) == (501, 35)
    segment.close()


def test_tallies_of_more_processes_than_there_are_rows() -> None:
    # In a small process of its own: forking this one, which has torch, takes several times as long.
    script = """
import os
from castore.shm.segments import Segment
from castore.shm import tallies
from castore.shm.tallies import Tallies
tallies._ROWS = 64  # as few rows as show it: there are 1,024
tallies = Tallies(Segment(None, Tallies.needed(1), {}), 0, 1)
for _ in range(140):
    if not os.fork():
        tallies.add(0)
        os._exit(0)
    os.wait()
print(tallies.total(0))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert (done.stdout, done.stderr) == ("140\n", "")


def test_tallies_add_up_over_threads() -> None:
    segment = Segment(None, Tallies.needed(1), {})
    tallies = Tallies(segment, 0, 1)

    def count() -> None:
        for _ in range(5000):
            tallies.add(0)

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert tallies.total(0) == 20_000
    segment.close()
