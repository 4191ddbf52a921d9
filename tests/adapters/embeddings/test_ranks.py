"""Ranks that torchrun starts share a fill, and a killed fill resumes where it ended."""

from __future__ import annotations

import os
import time
from pathlib import Path

from tests.adapters import programs
from tests.adapters.embeddings.job import ITEMS

HERE = Path(__file__).parent
JOB = str(HERE / "job.py")
PLAIN = "import runpy, sys\nrunpy.run_path(sys.argv[1])['main'](*sys.argv[2:])"
TORCHRUN = "from torch.distributed.run import main\nmain()"
# Ranks that torchrun forks have torch from it: each that it starts with a program imports it for a second.
TWO = ("--standalone", "--run-path", "--start-method=fork", "--nproc-per-node=2")


def start(source: str, folder: Path, *arguments: str) -> programs.Program:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parents[1])}
    return programs.Program(source, *arguments, notes=folder, folder=folder, environment=environment)


def run(source: str, folder: Path, *arguments: str) -> None:
    code, _, err = start(source, folder, *arguments).end(100)
    assert code == 0, err


def encoded(folder: Path) -> list[list[int]]:
    return [[int(line) for line in path.read_text().split()] for path in folder.glob("encoded-*")]


def seen(folder: Path) -> list[int]:
    return [int(line) for path in folder.glob("seen-*") for line in path.read_text().split()]


def test_two_ranks_encode_each_item_once_together_and_each_reads_its_share(tmp_path: Path) -> None:
    run(TORCHRUN, tmp_path, *TWO, JOB, str(tmp_path), "0.002")
    parts = encoded(tmp_path)
    assert len(parts) == 2
    assert sorted(item for part in parts for item in part) == list(range(ITEMS))
    assert sorted(seen(tmp_path)) == list(range(ITEMS))
    run(PLAIN, tmp_path, JOB, str(tmp_path))
    assert sum(map(len, encoded(tmp_path))) == ITEMS


def test_a_killed_fill_leaves_what_it_put_and_the_next_run_does_the_rest(tmp_path: Path) -> None:
    killed = start(PLAIN, tmp_path, JOB, str(tmp_path), "0.05").process
    deadline = time.monotonic() + 60
    while not encoded(tmp_path) or len(encoded(tmp_path)[0]) < 40:
        assert time.monotonic() < deadline
        assert killed.exitcode is None
        time.sleep(0.02)
    killed.kill()
    killed.join()
    before = encoded(tmp_path)[0]
    assert 40 <= len(before) < ITEMS
    run(PLAIN, tmp_path, JOB, str(tmp_path))
    assert sorted(seen(tmp_path)) == list(range(ITEMS))
    everything = [item for part in encoded(tmp_path) for item in part]
    assert set(everything) == set(range(ITEMS))
    assert len(everything) - ITEMS <= 16  # items that were encoded and not yet put
