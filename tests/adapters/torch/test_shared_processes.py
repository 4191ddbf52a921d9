"""SharedCache between processes: loaders of every kind, writers that race or die, ranks that share, memory
kept once.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from castore.adapters.torch import SharedCache
from castore.shm.segments import path_of
from castore.shm.slots import SlotState
from tests.adapters.torch.conftest import START_METHODS, Cell
from tests.helpers import LONG
from tests.warm import Started, WarmPython

ROOT = Path(__file__).parents[3]
FORK: Any = multiprocessing.get_context("fork")
N, C, H, W = 12, 3, 4, 4

pytestmark = pytest.mark.usefixtures("no_leftovers")


def picture(index: int) -> torch.Tensor:
    return torch.arange(C * H * W, dtype=torch.uint8).view(C, H, W) + index


class MyDataset(Dataset[torch.Tensor]):
    """The example of stocaching's README, with data that are made from the index; notes what it loads."""

    def __init__(self, log: Path) -> None:
        super().__init__()

        self.log = str(log)

        dataset_len = N  # number of samples in the full dataset
        data_dims = (C, H, W)  # data dims (not including batch)

        # initialize the cache
        self.cache = SharedCache(
            size_limit_gib=1,
            dataset_len=dataset_len,
            data_dims=data_dims,
            dtype=torch.uint8,
        )

    def __len__(self) -> int:
        return N

    def __getitem__(self, idx: int) -> torch.Tensor:
        # retrieve data from cache if it's there
        x: torch.Tensor | None = self.cache.get_slot(idx)
        # x will be None if the cache slot was empty or OOB
        if x is None:
            x = self.load(idx)  # load data to uint8 tensor from disk
            self.cache.set_slot(idx, x)  # try to cache x
        return x

    def load(self, idx: int) -> torch.Tensor:
        with open(self.log, "a") as file:
            file.write(f"{idx}\n")
        return picture(idx)

    @property
    def loads(self) -> list[int]:
        return sorted(map(int, Path(self.log).read_text().split()))


class Batched(MyDataset):
    """The same in batches, as the page on PyTorch shows it."""

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        samples = self.cache.get_slots(indices)
        missing = [place for place, sample in enumerate(samples) if sample is None]
        for place in missing:
            samples[place] = self.load(indices[place])
        self.cache.set_slots([indices[place] for place in missing], [samples[place] for place in missing])
        return samples


class Molecules(Dataset[dict[str, torch.Tensor]]):
    """Samples that differ in length, one a batch."""

    def __init__(self) -> None:
        self.cache = SharedCache("1MB", N, {"atoms": (None, 3), "energy": ()}, torch.float32)

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        sample: dict[str, torch.Tensor] | None = self.cache.get_slot(index)
        if sample is None:
            sample = molecule(index)
            self.cache.set_slot(index, sample)
        return sample


def molecule(index: int) -> dict[str, torch.Tensor]:
    return {"atoms": torch.full((index, 3), index + 0.5), "energy": torch.tensor(float(index))}


# --- loaders ------------------------------------------------------------------------------------------------


# A spawned worker gets pickled arguments, as one of a fork server does, which need not import torch.
_CELLS = [Cell("fork", 0), Cell("fork", 2), Cell("forkserver", 1, True)]
_SPAWN = Cell("spawn", 1, True)
FEW_CORES = pytest.mark.filterwarnings("ignore:This DataLoader will create")


@FEW_CORES
@pytest.mark.parametrize(
    ("kind", "cell"),
    [
        *((MyDataset, cell) for cell in _CELLS[:2]),
        *((Batched, cell) for cell in [*_CELLS, _SPAWN]),
        *(pytest.param(MyDataset, cell, marks=pytest.mark.matrix) for cell in (_CELLS[2], _SPAWN)),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
    indirect=["cell"],
)
def test_stocachings_example_runs_with_only_the_import_changed_and_in_batches(
    tmp_path: Path, kind: type[MyDataset], check_epochs: Callable[..., None]
) -> None:
    dataset = kind(tmp_path / "log")
    check_epochs(dataset, [picture(index) for index in range(N)])
    assert dataset.loads == list(range(N)), "each sample is loaded once, by whichever process"


@FEW_CORES
@pytest.mark.parametrize(
    "cell", [*_CELLS, pytest.param(_SPAWN, marks=pytest.mark.matrix)], ids=str, indirect=True
)
def test_ragged_samples_reach_the_loader_from_every_worker(check_epochs: Callable[..., None]) -> None:
    dataset = Molecules()
    check_epochs(dataset, [molecule(index) for index in range(N)], batch_size=1)
    assert dataset.cache.aux_array.tolist() == [1] * N


# --- writers that race --------------------------------------------------------------------------------------


def _start(function: Callable[..., None], *arguments: Any) -> Any:
    """A forked child that runs torch on one thread, as a loader's workers do: OpenMP's do not survive a
    fork.
    """
    child = FORK.Process(target=_on_one_thread, args=(function, *arguments), daemon=True)
    child.start()
    return child


def _on_one_thread(function: Callable[..., None], *arguments: Any) -> None:
    torch.set_num_threads(1)
    function(*arguments)


def _set_at_once(cache: SharedCache, barrier: Any, value: int, pipe: Connection) -> None:
    try:
        for index in range(len(cache)):
            barrier.wait(120)
            cache.set_slot(index, torch.full((1000,), value))
        pipe.send(None)
    except Exception as error:
        pipe.send(repr(error))


@pytest.mark.parametrize("dims", [(1000,), None], ids=["columns", "ragged"])
def test_workers_that_set_one_slot_at_once_raise_nothing_and_the_first_stays(dims: Any) -> None:
    cache = SharedCache("10MB", 100, dims, torch.int64)
    barrier = FORK.Barrier(3)
    pipes = []
    for value in range(3):
        here, there = FORK.Pipe()
        _start(_set_at_once, cache, barrier, value, there)
        there.close()
        pipes.append(here)
    assert [pipe.recv() for pipe in pipes] == [None] * 3
    for child in multiprocessing.active_children():
        child.join(120)
    assert all(len(set(cache[index].tolist())) == 1 for index in range(100))


def _hammer(cache: SharedCache, value: int, ragged: bool) -> None:
    mine = torch.full((1000 * value if ragged else 30_000,), value, dtype=torch.int16)
    while True:
        cache.set_slot(0, mine, allow_overwrite=True)


def _clear(cache: SharedCache) -> None:
    while True:
        time.sleep(0.001)
        cache.clear()


@pytest.mark.parametrize("ragged", [False, True], ids=["columns", "ragged"])
def test_readers_see_one_writers_sample_whole_however_many_overwrite_and_clear(ragged: bool) -> None:
    cache = SharedCache("10MB", 4, None if ragged else (30_000,), torch.int16)
    writers = [_start(_hammer, cache, value, ragged) for value in (20, 25, 30)]
    writers.append(_start(_clear, cache))
    seen: dict[int, int] = {}
    try:
        begun = time.monotonic()
        while time.monotonic() < begun + (1 if LONG else 0.4) or len(seen) < 3:
            assert time.monotonic() < begun + 240, f"only the writers of {set(seen)} were seen at work"
            for sample in (cache.get_slot(0), *cache.get_slots([0, 0])):
                if sample is not None:
                    value = int(sample[0])
                    assert bool((sample == value).all()), "two writers' samples in one"
                    assert len(sample) == (1000 * value if ragged else 30_000)
                    seen[value] = seen.get(value, 0) + 1
    finally:
        for writer in writers:
            writer.kill()
            writer.join(120)
    assert set(seen) == {20, 25, 30}, "the test must have seen all writers at work"


# --- processes that die -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dims", [(50_000_000,), None], ids=["columns", "ragged"])
def test_a_writer_killed_in_the_middle_leaves_a_slot_that_is_empty_and_can_be_set(dims: Any) -> None:
    cache = SharedCache("60MB", 1, dims)
    for _ in range(50):
        writer = _start(_hammer_large, cache)
        while cache._arena.slots.state(0) is not SlotState.WRITING:
            pass
        os.kill(writer.pid, signal.SIGKILL)
        writer.join(120)
        if cache._arena.slots.state(0) is SlotState.WRITING:
            break
    assert cache._arena.slots.state(0) is SlotState.WRITING, "no attempt hit the middle of a write"
    assert cache.get_slot(0) is None
    assert cache.get_slots([0]) == [None]
    assert cache.aux_array.tolist() == [0]
    with pytest.raises(RuntimeError, match="slot 0 is empty"):
        cache[0]
    cache.set_slot(0, torch.full((50_000_000,), 2, dtype=torch.uint8))
    assert bool((cache[0] == 2).all())


def _hammer_large(cache: SharedCache) -> None:
    value = torch.ones(50_000_000, dtype=torch.uint8)
    while True:
        cache.set_slot(0, value, allow_overwrite=True)


def test_a_killed_loader_leaves_nothing_once_its_workers_are_gone(warm_torch: WarmPython) -> None:
    name = f"test-killed-loader-{os.getpid()}"
    script = (
        "import os, signal, torch; from castore.adapters.torch import SharedCache\n"
        "from torch.utils.data import DataLoader\n"
        # A worker asks so often whether its parent lives; every 5 seconds by default.
        "from torch.utils.data._utils import worker\nworker.MP_STATUS_CHECK_INTERVAL = 0.1\n"
        f"cache = SharedCache('10MB', 100, (1000,), name={name!r})\n"
        # Not at once: a worker that has not begun when its parent dies would never notice.
        "for number in DataLoader(range(100), num_workers=2):\n"
        "    if number == 50: os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert warm_torch.start(["-c", script], cwd=ROOT).wait(300) == -signal.SIGKILL
    path = path_of(name)
    deadline = time.monotonic() + 120
    while True:  # its workers notice within seconds that it is gone; whoever makes a cache next clears up
        SharedCache("1MB", 1, (1,))
        if not path.exists():
            break
        assert time.monotonic() < deadline
        time.sleep(0.2)


@pytest.fixture(scope="module")
def scripts(warm_torch: WarmPython) -> Iterator[dict[str, Started]]:
    """A script for each start method. All run at once: each waits for seconds until its worker has gone."""
    script = (
        "import torch; from castore.adapters.torch import SharedCache\nfrom torch.utils.data import "
        "DataLoader\nfrom tests.adapters.torch.drawn import Holder\nif __name__ == "
        "'__main__':\n    holder = Holder(SharedCache('1MB', 10, (10,)))\n    loader = DataLoader(holder, "
        "num_workers=1, persistent_workers=True, multiprocessing_context='{start}')\n    assert "
        "len(list(loader)) == 10\n    print(holder.cache._arena.name)\n"
    )
    started = {
        start: warm_torch.start(
            ["-c", script.format(start=start)],
            cwd=ROOT,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for start in START_METHODS
    }
    yield started
    for one in started.values():  # not all of them have been waited for where only some tests run
        one.kill()
        one.communicate()


@pytest.mark.parametrize("start", START_METHODS)
def test_a_script_that_ends_with_the_workers_of_a_persistent_loader_alive_leaves_nothing(
    start: str, scripts: dict[str, Started]
) -> None:
    out, err = scripts[start].communicate(timeout=120)
    assert (scripts[start].returncode, err) == (0, "")
    assert not path_of(out.strip()).exists()


# --- ranks --------------------------------------------------------------------------------------------------


def _rank(pipe: Connection, environment: dict[str, str], limit: str, turn: Any) -> None:
    os.environ.update(environment)
    train, valid = SharedCache(limit, 10, (4,)), SharedCache(limit, 10, (4,))
    turn.wait(300)
    if environment["LOCAL_RANK"] == "0":
        train.set_slot(1, torch.full((4,), 1, dtype=torch.uint8))
        valid.set_slot(2, torch.full((4,), 2, dtype=torch.uint8))
    turn.wait(300)
    pipe.send(
        [[index for index in range(10) if cache.get_slot(index) is not None] for cache in (train, valid)]
    )
    turn.wait(300)


def _ranks(environments: list[dict[str, str]], limits: list[str]) -> list[Any]:
    turn = FORK.Barrier(len(environments))
    pipes = []
    for environment, limit in zip(environments, limits, strict=True):
        here, there = FORK.Pipe()
        _start(_rank, there, environment, limit, turn)
        there.close()
        pipes.append(here)
    found = [pipe.recv() if pipe.poll(300) else None for pipe in pipes]
    for child in multiprocessing.active_children():
        child.join(120)
    return found


def _environment(rank: int, job: int) -> dict[str, str]:
    # Nobody listens there: it tells the jobs of two test runs apart.
    here = {"MASTER_ADDR": f"job{job}", "MASTER_PORT": str(os.getpid()), "TORCHELASTIC_RUN_ID": "none"}
    return here | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}


def test_ranks_of_a_job_share_the_caches_that_they_make_in_the_same_order() -> None:
    assert _ranks([_environment(0, 1), _environment(1, 1)], ["1MB"] * 2) == [[[1], [2]]] * 2


def test_ranks_of_another_job_and_caches_of_another_size_share_nothing() -> None:
    assert _ranks([_environment(0, 2), _environment(1, 3)], ["1MB"] * 2) == [[[1], [2]], [[], []]]
    assert _ranks([_environment(0, 4), _environment(1, 4)], ["1MB", "20"]) == [[[1], [2]], [[], []]]


# --- memory -------------------------------------------------------------------------------------------------


def _read_all(cache: SharedCache, turn: Any) -> None:
    for index in range(len(cache)):
        cache.get_slot(index)
    turn.wait(300)
    turn.wait(300)


def _proportional_bytes(cache: SharedCache, workers: int) -> int:
    """PSS of this process and of workers that have read the whole cache.

    Pages of files are left out: those of torch's libraries weigh more as soon as another process of the
    machine that has them mapped ends.
    """
    turn = FORK.Barrier(workers + 1)
    children = [_start(_read_all, cache, turn) for _ in range(workers)]
    turn.wait(300)
    try:
        return sum(_own_bytes(child.pid) for child in (*children, _Self))
    finally:
        turn.wait(300)
        for child in children:
            child.join(120)


def _own_bytes(pid: int | None) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:")))


class _Self:
    pid = os.getpid()


def print_proportional_bytes() -> None:
    """Print the figures for the test below, in a process of their own: with one worker, and with four."""
    cache = SharedCache("1GB", 1000, (1_000_000,))
    sample = torch.ones(1_000_000, dtype=torch.uint8)
    for index in range(1000):
        cache.set_slot(index, sample)
    print(*(_proportional_bytes(cache, workers) for workers in (1, 4)))


def test_four_workers_need_less_than_five_percent_more_memory_than_one(warm_torch: WarmPython) -> None:
    # Not forked from here: after hundreds of tests this process is large, and children write to copies of its
    # pages.
    script = "from tests.adapters.torch.test_shared_processes import print_proportional_bytes as p; p()"
    one, four = map(int, warm_torch.output(["-c", script], cwd=ROOT, timeout=300).split())
    assert one > 1e9, "the cache itself must be in the figure"
    assert four < 1.05 * one
