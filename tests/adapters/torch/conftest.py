"""Ways in which a DataLoader runs workers, as one parametrised fixture, and what must be true under each
of them.
"""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.utils.data import DataLoader, default_collate

from castore.adapters.torch.lazy import LazyShardDataset
from castore.shm.segments import is_alive
from tests.adapters.torch.shards import Make, Numbers


@dataclass(frozen=True)
class Cell:
    """One way of running workers."""

    start: str
    workers: int
    persistent: bool = False

    def __str__(self) -> str:
        kind = "persistent" if self.persistent else "fresh"
        return f"{self.start}-{self.workers}-{kind}" if self.workers else "0"

    def loader(self, dataset: Any, **options: Any) -> DataLoader[Any]:
        """A loader that runs workers this way."""
        if self.workers:
            options |= {"multiprocessing_context": self.start, "persistent_workers": self.persistent}
        return DataLoader(dataset, num_workers=self.workers, **options)


START_METHODS = ("fork", "forkserver", "spawn")
#: Without workers there is nothing to start, and nothing to persist.
CELLS = [
    Cell("fork", 0),
    *(
        Cell(start, workers, persistent)
        for start in START_METHODS
        for workers in (1, 4)
        for persistent in (False, True)
    ),
]


_SHM = Path("/dev/shm")
_PREFIX = f"castore-{os.getuid()}-"


def shared_files() -> set[str]:
    """castore's files in shared memory that this process or one of its children uses, or nobody does."""
    found = {path.name for path in _SHM.glob(f"{_PREFIX}*")}
    ours = {os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))}
    used = {name for pid in ours for name in _opened(pid)}
    return {name for name in found if name in used or not is_alive(name.removeprefix(_PREFIX))}


def _opened(pid: int) -> Iterator[str]:
    with contextlib.suppress(FileNotFoundError):  # it ended
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                yield Path(os.readlink(link)).name


@pytest.fixture
def no_leftovers() -> Iterator[None]:
    """Fails a test that leaves something in shared memory; workers get a moment to go."""
    before = shared_files()
    yield
    deadline = time.monotonic() + 240
    while shared_files() - before:
        assert time.monotonic() < deadline, f"left in /dev/shm: {shared_files() - before}"
        gc.collect()
        time.sleep(0.05)


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """No private segment of this process outlives the test."""
    yield
    mine = f"castore-{os.geteuid()}-{os.getpid()}-*"
    if list(Path("/dev/shm").glob(mine)):
        gc.collect()  # a caught exception holds its frames in a circle
    assert not list(Path("/dev/shm").glob(mine))


# torch warns where there are fewer cores than workers.
_FEW_CORES = pytest.mark.filterwarnings("ignore:This DataLoader will create")
# Each start method, number of workers and persistence is among these; all combinations are in `make torture`.
_QUICK_CELLS = ("0", "fork-4-persistent", "fork-1-fresh", "forkserver-4-fresh", "spawn-1-persistent")


def _cell(cell: Cell) -> Any:
    marks = [_FEW_CORES] if str(cell) in _QUICK_CELLS else [_FEW_CORES, pytest.mark.matrix]
    return pytest.param(cell, id=str(cell), marks=marks)


#: All of them, as parameters.
CELL_PARAMS = [*map(_cell, CELLS)]


@pytest.fixture(params=CELL_PARAMS)
def cell(request: pytest.FixtureRequest, no_leftovers: None) -> Cell:
    """Each way of running workers in turn."""
    found = request.param
    assert isinstance(found, Cell)
    return found


@pytest.fixture
def check_epochs(cell: Cell, capfd: pytest.CaptureFixture[str]) -> Callable[..., None]:
    """Runs epochs of a dataset under each way of running workers: right samples in order, and not a word
    on stderr.
    """

    def check(dataset: Any, expected: Sequence[Any], *, epochs: int = 2, batch_size: int = 4) -> None:
        loader = cell.loader(dataset, batch_size=batch_size, shuffle=False)
        for _ in range(epochs):
            batches = list(loader)
            starts = range(0, len(expected), batch_size)
            for batch, start in zip(batches, starts, strict=True):
                same_batch(batch, default_collate(list(expected[start : start + batch_size])))
        del loader
        assert capfd.readouterr().err == ""

    return check


def same_batch(first: Any, second: Any) -> None:
    """Assert that two collated batches hold the same."""
    assert type(first) is type(second)
    if isinstance(first, torch.Tensor):
        assert first.dtype == second.dtype
        assert torch.equal(first, second)
    elif isinstance(first, dict):
        assert list(first) == list(second)
        for name in first:
            same_batch(first[name], second[name])
    elif isinstance(first, list | tuple):
        assert len(first) == len(second)
        for one, other in zip(first, second, strict=True):
            same_batch(one, other)
    else:
        assert first == second


@pytest.fixture
def make_shard(tmp_path: Path) -> Iterator[Make]:
    """LazyShardDatasets with small caches in a folder of the test's, closed at its end."""
    made: list[LazyShardDataset] = []

    def make(data: Any = 40, **options: Any) -> LazyShardDataset:
        data = Numbers(data) if isinstance(data, int) else data
        small: dict[str, Any] = {
            "memory_size": "1MB", "disk_size": "1MB", "disk_cache_path": tmp_path / "cache",
        }  # fmt: skip
        made.append(LazyShardDataset(data, **small | options))
        return made[-1]

    yield make
    for dataset in made:
        dataset.close()
