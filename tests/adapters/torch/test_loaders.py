"""Each of the datasets in each of the loaders that `torch.utils.data` and torchdata have: the matrix, a
test a column.
"""

from __future__ import annotations

import os
import pickle
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from castore import Store
from castore.adapters.torch import BiLevelCachedDataset, CachedDataset, LazyShardDataset
from tests.adapters.torch.conftest import CELL_PARAMS, Cell
from tests.adapters.torch.drawn import Drawn, Shared
from tests.helpers import LONG

N = 10

DATASETS: dict[str, Callable[[Drawn, Path], Any]] = {
    "SharedCache": lambda data, _: Shared(data),
    "BiLevelCachedDataset": lambda data, folder: BiLevelCachedDataset(data, "1MB", "1MB", folder),
    "LazyShardDataset": lambda data, folder: LazyShardDataset(
        data, memory_size="1MB", disk_size="1MB", disk_cache_path=folder
    ),
    "CachedDataset": CachedDataset,
}
Make: TypeAlias = Callable[[], Any]

#: Each dataset with or without workers: a LazyShardDataset is read as a BiLevelCachedDataset is, and
#: SharedCache's dataset is the user's. All combinations are in `make torture`.
_QUICK = {"SharedCache": [0], "BiLevelCachedDataset": [0], "LazyShardDataset": [2], "CachedDataset": [0, 2]}
WORKERS = pytest.mark.parametrize(
    ("make", "workers"),
    [
        pytest.param(name, workers, marks=[pytest.mark.matrix] * (workers not in _QUICK[name]))
        for name in DATASETS
        for workers in (0, 2)
    ],
    indirect=["make"],
)


@pytest.fixture
def drawn(tmp_path: Path) -> Drawn:
    return Drawn(N, tmp_path / "log")


@pytest.fixture(params=DATASETS)
def make(request: pytest.FixtureRequest, drawn: Drawn, tmp_path: Path, no_leftovers: None) -> Iterator[Make]:
    """Makes the dataset anew, as a resumed run would, over the folder of the one before."""
    made = []

    def make() -> Any:
        made.append(DATASETS[request.param](drawn, tmp_path / "cache"))
        return made[-1]

    yield make
    for dataset in made:
        dataset.close()


#: The dataset whose workers start in this way here.
_ANEW = {"spawn": "CachedDataset", "forkserver": "BiLevelCachedDataset"}


def _ways() -> Iterator[Any]:
    """Each way of running workers for each dataset. A worker that is not forked from the dataset's process
    imports for seconds, so one dataset for each way has to do here, and `make torture` has the others.
    Workers of SharedCache's are in test_shared_processes.py.
    """
    for cell in CELL_PARAMS:
        for name in DATASETS:
            start = cell.values[0].start
            left_out = start != "fork" and name != _ANEW[start]
            marks = [*cell.marks, *[pytest.mark.matrix] * left_out]
            yield pytest.param(*cell.values, name, id=f"{cell.id}-{name}", marks=marks)


def counts(dataset: Any) -> Any:
    """The object that has ``hits`` and ``misses``."""
    return dataset.cache if isinstance(dataset, LazyShardDataset) else dataset


def numbers(batches: Any) -> list[int]:
    """The samples of some batches, all of whose parts must tell the same."""
    seen = []
    for batch in batches:
        assert torch.equal(batch["x"], batch["y"].to(torch.int16)[:, None, None].expand(-1, 2, 3))
        assert batch["name"] == [f"sample {index}" for index in batch["y"]]
        seen += batch["y"].tolist()
    return seen


@pytest.mark.parametrize(("cell", "make"), _ways(), indirect=True)
def test_every_kind_of_worker_gets_right_samples_and_each_is_read_once(
    drawn: Drawn, cell: Cell, make: Make, check_epochs: Callable[..., None]
) -> None:
    expected = [drawn[index] for index in range(N)]
    Path(drawn.log).unlink()
    dataset = make()
    # Workers that are started anew for a second epoch cost seconds each; what they kept is looked at from
    # here.
    epochs = 2 if cell.persistent or not cell.workers else 1
    check_epochs(dataset, expected, epochs=epochs)
    assert [dataset[index]["y"] for index in range(N)] == list(range(N))
    assert drawn.reads == list(range(N)), "one cache for all workers, so one read of each"
    if not isinstance(dataset, Shared):  # which counts nothing
        counted = counts(dataset)
        assert (counted.hits, counted.misses) == (epochs * N, N)


def test_threads_that_read_at_once_get_right_samples(make: Make) -> None:
    dataset = make()
    with ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(lambda _: [dataset[index]["y"] for index in range(N)], range(4)))
    assert answers == [list(range(N))] * 4
    if not isinstance(dataset, Shared):
        counted = counts(dataset)
        assert counted.hits + counted.misses == 4 * N


@WORKERS
def test_subsets_keep_order_and_duplicates(make: Make, workers: int) -> None:
    part = Subset(make(), [7, 1, 7, 0])
    for _ in range(2):
        assert numbers(DataLoader(part, batch_size=3, num_workers=workers)) == [7, 1, 7, 0]
    assert numbers(DataLoader(Subset(part, [2, 1]), batch_size=2)) == [7, 1]


@WORKERS
def test_distributed_samplers_share_every_epoch_out(drawn: Drawn, make: Make, workers: int) -> None:
    dataset = make()
    orders: list[list[int]] = [[], []]
    for rank in range(2):
        sampler: DistributedSampler[Any] = DistributedSampler(dataset, num_replicas=2, rank=rank, seed=1)
        loader = DataLoader(
            dataset, batch_size=2, sampler=sampler, num_workers=workers, persistent_workers=workers > 0
        )
        for epoch in range(2):
            sampler.set_epoch(epoch)
            orders[epoch] += numbers(loader)
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(N))
    assert orders[0] != orders[1]
    assert drawn.reads == list(range(N))


@WORKERS
# torchdata calls something of torch that newer versions of it warn about.
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_a_stateful_loader_that_is_resumed_twice_ends_the_epoch_as_if_it_had_not_stopped(
    make: Make, workers: int
) -> None:
    def start() -> StatefulDataLoader[Any]:
        generator = torch.Generator().manual_seed(1)
        return StatefulDataLoader(
            make(), batch_size=2, shuffle=True, generator=generator, num_workers=workers
        )

    whole = numbers(start())
    loader = start()
    seen = []
    for stop in (2, 1):
        seen += numbers(islice(loader, stop))
        state = pickle.loads(pickle.dumps(loader.state_dict()))
        loader = start()
        loader.load_state_dict(state)
    assert len(seen) == 6
    assert seen + numbers(loader) == whole
    assert sorted(numbers(loader)) == list(range(N)), "the next epoch is a whole one"


@WORKERS
@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but no accelerator")
def test_pinned_memory_is_had_where_torch_has_it(make: Make, workers: int) -> None:
    loader = DataLoader(
        make(), batch_size=5, num_workers=workers, pin_memory=True, persistent_workers=workers > 0
    )
    for _ in range(2):
        batches = list(loader)
        assert numbers(batches) == list(range(N))
        assert [batch["x"].is_pinned() for batch in batches] == [torch.cuda.is_available()] * 2


@WORKERS
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
def test_pinned_batches_reach_the_gpu_while_the_program_goes_on(make: Make, workers: int) -> None:
    loader = DataLoader(make(), batch_size=5, num_workers=workers, pin_memory=True)
    moved = [batch | {"x": batch["x"].to("cuda", non_blocking=True)} for batch in loader]
    torch.cuda.synchronize()
    assert all(batch["x"].is_cuda for batch in moved)
    assert numbers(batch | {"x": batch["x"].cpu()} for batch in moved) == list(range(N))


def test_workers_are_forked_beside_threads_that_read_the_store(tmp_path: Path) -> None:
    """Their first look into the index waited for ever for what a thread of the parent's held when they
    were born.
    """
    data, rounds = torch.arange(32.0), 8 if LONG else 4
    stop = threading.Event()

    def read() -> None:
        while not stop.is_set():
            with store.open("large") as file:
                file.read(100)
            store.entry("large")

    with Store(tmp_path / "store", memory=0) as store:
        store.put("large", os.urandom(100_000))
        cached = CachedDataset(TensorDataset(data), store, key="numbers")
        readers = [threading.Thread(target=read) for _ in range(3)]
        for reader in readers:
            reader.start()
        try:
            for _ in range(rounds):
                # The time that a batch may take is a bound for workers that hang.
                loader = DataLoader(
                    cached, batch_size=4, num_workers=2, timeout=60, multiprocessing_context="fork"
                )
                assert torch.cat([batch for (batch,) in loader]).tolist() == data.tolist()
        finally:
            stop.set()
            for reader in readers:
                reader.join()
        assert (cached.hits, cached.misses) == ((rounds - 1) * 32, 32)
