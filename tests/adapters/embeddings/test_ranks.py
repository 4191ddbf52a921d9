"""Ranks that torchrun starts share a fill, and a killed fill resumes where it ended."""

from __future__ import annotations

import os
import time
from pathlib import Path
from subprocess import PIPE

from tests.adapters.embeddings.job import ITEMS
from tests.warm import Started, WarmPython

HERE = Path(__file__).parent
JOB = str(HERE / "job.py")
# Ranks that torchrun forks have torch from it: each that it starts with a program imports it for a second.
TWO = (
    "-m", "torch.distributed.run", "--standalone", "--run-path", "--start-method=fork", "--nproc-per-node=2"
)  # fmt: skip


def start(warm_torch: WarmPython, folder: Path, *words: str) -> Started:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parents[1])}
    return warm_torch.start([*words], cwd=folder, env=environment, stderr=PIPE, text=True)


def run(warm_torch: WarmPython, folder: Path, *words: str) -> None:
    process = start(warm_torch, folder, *words)
    _, messages = process.communicate(timeout=300)
    assert process.returncode == 0, messages


def encoded(folder: Path) -> list[list[int]]:
    return [[int(line) for line in path.read_text().split()] for path in folder.glob("encoded-*")]


def seen(folder: Path) -> list[int]:
    return [int(line) for path in folder.glob("seen-*") for line in path.read_text().split()]


def test_two_ranks_encode_each_item_once_together_and_each_reads_its_share(
    tmp_path: Path, warm_torch: WarmPython
) -> None:
    run(warm_torch, tmp_path, *TWO, JOB, str(tmp_path), "0.002")
    parts = encoded(tmp_path)
    assert len(parts) == 2
    assert sorted(item for part in parts for item in part) == list(range(ITEMS))
    assert sorted(seen(tmp_path)) == list(range(ITEMS))
    run(warm_torch, tmp_path, JOB, str(tmp_path))
    assert sum(map(len, encoded(tmp_path))) == ITEMS


def test_a_killed_fill_leaves_what_it_put_and_the_next_run_does_the_rest(
    tmp_path: Path, warm_torch: WarmPython
) -> None:
    killed = start(warm_torch, tmp_path, JOB, str(tmp_path), "0.05")
    deadline = time.monotonic() + 240
    while not encoded(tmp_path) or len(encoded(tmp_path)[0]) < 40:
        assert time.monotonic() < deadline
        assert killed.poll() is None
        time.sleep(0.02)
    killed.kill()
    killed.communicate(timeout=60)
    before = encoded(tmp_path)[0]
    assert 40 <= len(before) < ITEMS
    run(warm_torch, tmp_path, JOB, str(tmp_path))
    assert sorted(seen(tmp_path)) == list(range(ITEMS))
    everything = [item for part in encoded(tmp_path) for item in part]
    assert set(everything) == set(range(ITEMS))
    assert len(everything) - ITEMS <= 16  # items that were encoded and not yet put
