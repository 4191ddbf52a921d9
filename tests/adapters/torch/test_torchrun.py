"""Real runs of torchrun: every sample once an epoch, one fill a node, nothing left behind, also after a
kill.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections import Counter
from pathlib import Path
from subprocess import PIPE
from typing import Any, NamedTuple

import pytest

from castore.shm.free_space import SHM
from castore.shm.segments import is_alive, path_of
from tests.warm import Started, WarmPython

HERE = Path(__file__).parent
ROOT = HERE.parents[2]


# Ranks that torchrun forks have torch from it: each that it starts with a program imports it for a second.
_FORKED = ("--run-path", "--start-method=fork")
#: The program of the command `torchrun`.
_TORCHRUN = ["-m", "torch.distributed.run"]


def torchrun(
    warm_torch: WarmPython,
    folder: Path,
    *arguments: str,
    nproc: int = 2,
    launch: tuple[str, ...] = ("--standalone",),
    ranks: tuple[str, ...] = _FORKED,
    **variables: str,
) -> Started:
    """Starts it in a folder."""
    words = (*launch, *ranks, f"--nproc-per-node={nproc}", *arguments)
    # One thread a process: two cores are shared by all ranks and workers.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **variables}
    return warm_torch.start(
        [*_TORCHRUN, *words], cwd=folder, env=environment, stdout=PIPE, stderr=PIPE, text=True
    )


def run(process: Started) -> str:
    """Wait for a process, which must end well: its messages."""
    _, messages = process.communicate(timeout=300)
    assert process.returncode == 0, messages
    return str(messages)


class Job:
    """One run of lazy_job.py and what it wrote."""

    def __init__(self, folder: Path, **options: Any) -> None:
        folder.mkdir(parents=True)
        (folder / "reads").mkdir()
        self.out = folder
        defaults: dict[str, Any] = {
            "n": 101,
            "workers": 0,
            "mode": "rank",
            "memory": ["10MB"],
            "out": str(folder),
        }
        self.options = defaults | {"cache": str(folder.parent / "cache")} | options
        self.arguments = (str(HERE / "lazy_job.py"), json.dumps([self.options]))

    def epoch(self, number: int) -> list[int]:
        """The samples that all ranks visited."""
        return [i for path in self.out.glob(f"epoch{number}-*.json") for i in json.loads(path.read_text())]

    def reads(self) -> Counter[int]:
        """How often each sample was read from the source."""
        return Counter(
            int(line) for path in (self.out / "reads").iterdir() for line in path.read_text().split()
        )

    def pids(self) -> set[int]:
        """Its ranks, and the workers that have read."""
        return {int(path.name) for path in (self.out / "reads").iterdir()}

    def stats(self) -> list[dict[str, Any]]:
        return [json.loads(path.read_text()) for path in sorted(self.out.glob("stats-*.json"))]


def segments() -> set[str]:
    prefix = path_of("").name
    return {path.name.removeprefix(prefix) for path in SHM.glob(f"{prefix}*")}


def dead_segments(*jobs: Job) -> set[str]:
    """Segments that processes of these jobs have left. Other tests on the machine may leave others."""
    made = {str(pid) for job in jobs for pid in job.pids()}
    return {name for name in segments() if name.partition("-")[0] in made and not is_alive(name)}


def check_epochs(job: Job) -> None:
    for epoch in range(2):
        assert sorted(job.epoch(epoch)) == list(range(job.options["n"]))
    assert job.epoch(0) != job.epoch(1)


def check_one_fill(job: Job) -> None:
    """Of 101 samples in memory: each visited once an epoch, read once in all, and counted so on both
    ranks.
    """
    check_epochs(job)
    assert job.reads() == Counter(range(101))
    assert job.stats() == [{"reads": 101, "memory": [101, 101], "disk": [0, 101]}] * 2


_RANKS = [(0, True), (1, True), (1, False)]
_NODES = [("node", "10MB"), ("node", "150KB"), ("disk", "10MB")]


class Jobs(NamedTuple):
    """Records of jobs that the same two ranks ran, one after another: torch is imported once."""

    jobs: dict[tuple[object, object], Job]
    stderr: str
    dead: set[str]


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory, warm_torch: WarmPython) -> Jobs:
    folder = tmp_path_factory.mktemp("jobs")
    jobs: dict[tuple[object, object], Job] = {}
    for mode, memory in _NODES:
        jobs[mode, memory] = Job(folder / f"{mode}-{memory}" / "out", mode=mode, memory=[memory], n=100)
    for workers, group in sorted(_RANKS, key=lambda job: job[1]):  # those without a group first
        jobs[workers, group] = Job(folder / f"{workers}-{group}" / "out", workers=workers, group=group)
    options = json.dumps([job.options for job in jobs.values()])
    stderr = run(torchrun(warm_torch, folder, str(HERE / "lazy_job.py"), options, ranks=()))
    return Jobs(jobs, stderr, dead_segments(*jobs.values()))


@pytest.mark.parametrize(("workers", "group"), _RANKS)
def test_two_ranks_visit_every_sample_once_an_epoch_and_read_it_once_in_all(
    together: Jobs, workers: int, group: bool
) -> None:
    """With a process group of gloo's, as for training, and without one."""
    check_one_fill(together.jobs[workers, group])
    assert not together.dead
    assert "Warning" not in together.stderr


@pytest.mark.parametrize(("mode", "memory"), _NODES)
def test_ranks_of_a_node_fill_its_cache_once_together(together: Jobs, mode: str, memory: str) -> None:
    job = together.jobs[mode, memory]
    check_epochs(job)
    assert job.reads() == Counter(range(100))
    stats = job.stats()[0]
    assert stats["reads"] == 100
    hits = (stats["memory"][0] if stats["memory"] else 0) + stats["disk"][0]
    assert hits == 100
    assert sum(stats["memory"] or stats["disk"]) == 200
    assert stats["disk"][1] == 100
    assert (stats["memory"] is None) == (mode == "disk")
    if memory == "150KB":
        assert 20 < stats["memory"][0] < 80


def test_a_killed_rank_leaves_nothing_that_stops_the_next_run(tmp_path: Path, warm_torch: WarmPython) -> None:
    killed = Job(tmp_path / "killed", kill=[1, 1], workers=1, group=True)
    # Killed workers leave folders of sockets behind, whose paths would be too long below `tmp_path`.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as sockets:
        process = torchrun(warm_torch, tmp_path, *killed.arguments, TMPDIR=sockets)
        _, stderr = process.communicate(timeout=300)
    assert process.returncode == 1
    assert "Signal 9" in stderr or "SIGKILL" in stderr
    job = Job(tmp_path / "again", workers=1, group=True)
    run(torchrun(warm_torch, tmp_path, *job.arguments))
    check_one_fill(job)
    assert len(killed.pids()) >= 2 <= len(job.pids())
    assert not dead_segments(killed, job)


def test_nodes_tell_each_other_their_room(tmp_path: Path, warm_torch: WarmPython) -> None:
    # Two launchers on one machine are two nodes: each has a cache of its own.
    job = Job(tmp_path / "out", group=True, balance="room", memory=["10MB", "30MB"], n=100)
    port = str(20000 + os.getpid() % 10000)
    launch = ("--nnodes=2", "--master-addr=127.0.0.1", f"--master-port={port}")
    nodes = [
        torchrun(warm_torch, tmp_path, *job.arguments, nproc=1, launch=(*launch, f"--node-rank={node}"))
        for node in range(2)
    ]
    for node in nodes:
        run(node)
    check_epochs(job)
    # 10 MB on disk each, beside 10 and 30 MB in memory.
    shares = [len(json.loads((job.out / f"epoch0-{rank}.json").read_text())) for rank in range(2)]
    assert shares == [33, 67]


def test_the_example_for_one_process_is_faster_from_the_second_epoch_on(
    tmp_path: Path, warm_torch: WarmPython
) -> None:
    words = [ROOT / "docs/examples/single.py", "--cache", "cache"]
    outputs = []
    for _ in range(2):
        done = warm_torch.run(words, cwd=tmp_path, text=True)
        assert (done.returncode, done.stderr) == (0, "")
        outputs.append(done.stdout.splitlines())
    assert "0 samples from RAM, 0 from disk, 400 read" in outputs[0][0]
    assert all("0 read" in line for line in outputs[0][1:] + outputs[1])


def test_the_example_for_several_ranks_stops_and_goes_on(tmp_path: Path, warm_torch: WarmPython) -> None:
    example = (str(ROOT / "docs/examples/ddp.py"), "--cache", "cache", "--checkpoint", "run.pt")
    outputs = []
    for ranks, epochs in ((2, 2), (1, 3)):
        process = torchrun(warm_torch, tmp_path, *example, f"--epochs={epochs}", nproc=ranks)
        printed, messages = process.communicate(timeout=300)
        assert process.returncode == 0, messages
        outputs.append(printed)
    assert "epoch 0" in outputs[0]
    assert "epoch 1" in outputs[0]
    assert "; 0 samples read" in outputs[0].splitlines()[-1]
    # The epoch that was finished has nothing left; the next one finds on disk what both ranks read.
    assert "epoch 2" in outputs[1]
    assert "; 0 samples read" in outputs[1].splitlines()[-1]
