"""Steps whose processes are killed at any moment go on behind the blocks that were kept."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import PIPE
from typing import Any
from unittest import mock

import pytest

from castore import Store
from castore.adapters.datasets import block_maker, cached_map
from castore.adapters.datasets.block_entries import BLOCKS_FOLDER
from tests.adapters.datasets import blocks_job
from tests.adapters.datasets.blocks_job import COUNT, ROWS
from tests.adapters.datasets.small_blocks import small_blocks, told
from tests.helpers import LONG
from tests.warm import WarmPython

_KILLS = 50 if LONG else 6
#: Rows of a first block, from which a pipeline learns the types, and of any other, at most.
_FIRST, _MOST = 1000 + 4 * ROWS, 4 * ROWS


class Job:
    """A process that does jobs, one child for each, over one store."""

    def __init__(self, warm_datasets: WarmPython, folder: Path, number: int) -> None:
        self._files = {"store": folder / "store", "counter": folder / "ran", "out": folder / f"out {number}"}
        self.errors = folder / f"errors {number}"
        with self.errors.open("w") as errors:
            self._process = warm_datasets.start(
                ["-m", "tests.adapters.datasets.blocks_job"],
                stdin=PIPE,
                stdout=PIPE,
                stderr=errors,
                text=True,
            )

    def start(self, what: str, num_proc: int = 1, **more: Any) -> int:
        """Start a child; its process id."""
        job = {**{name: str(path) for name, path in self._files.items()}, **more}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({**job, "what": what, "num_proc": num_proc}) + "\n")
        self._process.stdin.flush()
        return self._line()

    def end(self) -> int:
        """Wait for the child: its exit code, or less than 0 for a signal."""
        return self._line()

    def _line(self) -> int:
        assert self._process.stdout is not None
        return int(self._process.stdout.readline())

    def result(self) -> Any:
        """The result of the last child, over all rows."""
        return json.loads(self._files["out"].read_text())

    def rows(self) -> int:
        """The rows that have run, in all children of all jobs."""
        return self._files["counter"].stat().st_size if self._files["counter"].exists() else 0

    def close(self) -> None:
        """End it."""
        self._process.communicate(timeout=60)


@pytest.fixture
def jobs(tmp_path: Path, warm_datasets: WarmPython) -> Iterator[Callable[[], Job]]:
    """A function that makes jobs, over one store."""
    made: list[Job] = []

    def make() -> Job:
        made.append(Job(warm_datasets, tmp_path, len(made)))
        return made[-1]

    yield make
    for job in made:
        job.close()


def wanted(what: str) -> Any:
    """The result of plain `datasets`."""
    blocks_job.Ran.file, before = os.open(os.devnull, os.O_WRONLY), blocks_job.Ran.file
    try:
        return json.loads(json.dumps(told(blocks_job.plainly(what))))
    finally:
        os.close(blocks_job.Ran.file)
        blocks_job.Ran.file = before


def until(happened: Callable[[], Any]) -> Any:
    """The first true value that a function returns."""
    while not (found := happened()):
        time.sleep(0.001)
    return found


def is_alive(pid: int) -> bool:
    """Whether a process is there, and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def children(pid: int) -> list[int]:
    """The processes that a process has forked."""
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        return [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except FileNotFoundError:
        return []


def kill_all(pid: int) -> None:
    """SIGKILL for a process; its workers have ended too on return."""
    with contextlib.suppress(ProcessLookupError):  # it has ended by itself
        os.kill(pid, signal.SIGSTOP)  # it forks no more
        workers = children(pid)
        os.kill(pid, signal.SIGKILL)
        until(lambda: not any(map(is_alive, workers)))


def is_waited_for(path: Path) -> bool:
    """Whether a process waits for a lock of a file, which must exist."""
    lines = Path("/proc/locks").read_text().splitlines()
    return any("->" in line and f":{path.stat().st_ino} " in line for line in lines)


def kept_rows(path: Path) -> int:
    """The rows of all blocks whose results are kept."""
    with Store(path, memory=0) as store:
        blocks = {entry.digest: entry for entry in store.entries(BLOCKS_FOLDER)}  # the first has two names
        return sum(entry.metadata["rows_in"] for entry in blocks.values())


@pytest.mark.torture
@pytest.mark.parametrize("num_proc", [pytest.param(1, marks=pytest.mark.matrix), 2])
def test_a_pipeline_that_is_killed_again_and_again_ends_as_plain_datasets_does(
    num_proc: int, jobs: Callable[[], Job], tmp_path: Path
) -> None:
    chance = random.Random(seed := random.randrange(10**9))
    plain, job = wanted("pipeline"), jobs()
    lost: list[int] = []
    while True:
        before, child = job.rows(), job.start("pipeline", num_proc)
        if len(lost) < _KILLS:
            there = before + chance.randrange(1, 5 * COUNT // _KILLS)
            until(lambda: job.rows() >= there or not is_alive(child))  # noqa: B023
            time.sleep(chance.random() * 0.02)
            kill_all(child)
        if (code := job.end()) == 0:
            break
        assert code == -signal.SIGKILL, f"seed {seed}: {job.errors.read_text()[-3000:]}"
        lost.append(job.rows() - kept_rows(tmp_path / "store") - sum(lost))
    rows = 3 * COUNT + plain["length"]
    assert len(lost) > 2, f"seed {seed}"
    assert max(lost) <= _FIRST + (num_proc + 2) * _MOST, f"seed {seed}"
    assert job.result() == plain, f"seed {seed}"
    assert kept_rows(tmp_path / "store") == rows
    ran = job.rows()  # rows of parts that were kept count as lost above
    assert rows <= ran <= rows + sum(lost), f"seed {seed}: a block that was kept ran again"
    job.start("pipeline")
    assert job.end() == 0
    assert job.result() == plain
    assert job.rows() == ran


def test_each_kill_costs_the_blocks_in_flight_and_no_others(jobs: Callable[[], Job]) -> None:
    job = jobs()
    for number in range(1, 4):
        child = job.start("one_step")
        before = number * COUNT // 4
        until(lambda: job.rows() >= before)  # noqa: B023
        kill_all(child)
        job.end()
    job.start("one_step")
    assert job.end() == 0
    assert COUNT <= job.rows() <= COUNT + 3 * 3 * _MOST
    assert job.result() == wanted("one_step")


@pytest.mark.parametrize("num_proc", [1, 2])
def test_a_second_kill_within_a_first_block_costs_a_part_of_it(
    num_proc: int, jobs: Callable[[], Job], tmp_path: Path
) -> None:
    job, upto = jobs(), 0
    for rows in (450, 900):
        upto += rows
        child = job.start("one_step", num_proc, stop=(upto, str(tmp_path / "never")))
        until(lambda: job.rows() >= upto)  # noqa: B023
        kill_all(child)
        job.end()
    job.start("one_step", num_proc)
    assert job.end() == 0
    # The first run loses all of its rows, the second one the part that it was at.
    assert COUNT <= job.rows() <= COUNT + 450 + num_proc * _MOST
    assert job.result() == wanted("one_step")


class Kept:
    """Notes how many blocks are kept when a row runs; does not count in keys."""

    store: Store
    seen: list[int]

    def __castore_key__(self) -> str:
        return "Kept"

    def __call__(self) -> None:
        Kept.seen.append(len({entry.digest for entry in Kept.store.entries(BLOCKS_FOLDER)}))


kept = Kept()


def _longer(row: dict[str, Any]) -> dict[str, Any]:
    kept()
    return {"text": row["text"] + "!"}


def test_early_on_behind_a_kill_each_block_is_kept_before_the_next_one_runs(
    jobs: Callable[[], Job], tmp_path: Path
) -> None:
    job = jobs()
    child = job.start("one_step", stop=(20, str(tmp_path / "never")))
    until(lambda: job.rows() >= 20)
    kill_all(child)
    job.end()
    with (
        mock.patch.object(block_maker, "_CAREFUL_SECONDS", 1e6),
        mock.patch.object(block_maker, "_KEEPING_SECONDS", 60.0),
        small_blocks(blocks_job.BYTES, ROWS),
        Store(tmp_path / "store", memory=0) as store,
    ):
        Kept.store, Kept.seen = store, []
        cached_map(blocks_job.texts(2000), _longer, store=store)
        blocks = {entry.digest: entry for entry in store.entries(BLOCKS_FOLDER)}.values()
        ordered = sorted(blocks, key=lambda entry: entry.created)
        ends = list(itertools.accumulate(entry.metadata["rows_in"] for entry in ordered))
        assert len(ends) > 5
        assert Kept.seen == [sum(end <= row for end in ends) for row in range(2000)]


def test_a_worker_that_is_killed_costs_its_blocks_and_the_step_goes_on(
    jobs: Callable[[], Job], tmp_path: Path
) -> None:
    job = jobs()
    child = job.start("one_step", 2, stop=[3 * COUNT // 4, str(tmp_path / "go on")])
    workers = until(lambda: job.rows() >= 3 * COUNT // 4 and children(child))
    os.kill(workers[0], signal.SIGKILL)
    (tmp_path / "go on").touch()
    assert job.end() == 0
    assert job.result() == wanted("one_step")
    assert COUNT <= job.rows() <= COUNT + 4 * _MOST


def test_workers_that_are_killed_while_they_draw_a_bar_keep_no_lock_of_their_parent(
    jobs: Callable[[], Job], tmp_path: Path
) -> None:
    """Regression: `datasets` takes the lock for each map, and one kill in fifty or so hit a worker there."""
    job = jobs()
    child = job.start("drawing", 2, stop=[COUNT // 2, str(tmp_path / "go on")])
    until(lambda: job.rows() >= COUNT // 2)
    for worker in children(child):
        with contextlib.suppress(ProcessLookupError):  # their parent ends the others once it misses the first
            os.kill(worker, signal.SIGKILL)
    (tmp_path / "go on").touch()
    assert job.end() == 0
    assert job.result() == wanted("drawing")


@pytest.mark.parametrize("num_proc", [1, 2])
def test_two_processes_at_once_share_the_blocks_and_run_each_once(
    num_proc: int, jobs: Callable[[], Job], tmp_path: Path
) -> None:
    first, second = jobs(), jobs()
    go = tmp_path / "second has run all other blocks"
    first.start("one_step", num_proc, stop=[COUNT // 2, str(go)])
    until(lambda: first.rows() >= COUNT // 2)
    second.start("one_step", num_proc)
    until(lambda: second.rows() >= COUNT - (num_proc + 2) * _MOST)
    go.touch()
    assert (first.end(), second.end()) == (0, 0)
    assert first.result() == second.result() == wanted("one_step")
    assert first.rows() == COUNT


def test_a_process_that_waits_for_one_that_is_killed_goes_on_behind_its_blocks(
    jobs: Callable[[], Job], tmp_path: Path
) -> None:
    first, second = jobs(), jobs()
    child = first.start("one_step", stop=[COUNT // 2, str(tmp_path / "never")])
    until(lambda: first.rows() >= COUNT // 2)
    second.start("one_step")
    until(lambda: second.rows() >= COUNT - 3 * _MOST)  # all but the block that the first one is at
    os.kill(child, signal.SIGKILL)
    assert first.end() == -signal.SIGKILL
    assert second.end() == 0
    assert second.result() == wanted("one_step")
    assert COUNT <= second.rows() <= COUNT + 3 * _MOST


def test_a_process_passes_over_the_first_block_of_another_and_makes_it_if_that_one_is_killed(
    jobs: Callable[[], Job], tmp_path: Path
) -> None:
    first, second = jobs(), jobs()
    child = first.start("one_step", stop=[10, str(tmp_path / "never")])
    until(lambda: first.rows() >= 10)
    second.start("one_step")
    until(lambda: is_waited_for(tmp_path / "store" / "locks" / "datasets"))
    os.kill(child, signal.SIGKILL)
    assert first.end() == -signal.SIGKILL
    assert second.end() == 0
    assert second.result() == wanted("one_step")
    assert second.rows() == COUNT + 10 + 16  # by sixteen rows it guesses the features of the result
