"""Streams with kept calls in workers of a DataLoader, and in processes that are killed."""

from __future__ import annotations

import multiprocessing
import pickle
import time
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from castore import Store
from castore.adapters.datasets import cached_filter, cached_map, call_blocks
from castore.adapters.datasets.call_blocks import CALLS_FOLDER
from tests.adapters.datasets.stream_job import Doubles, Halves, Notes

# Plain `datasets` makes tensors of tensors.
pytestmark = [
    pytest.mark.filterwarnings("ignore:To copy construct from a tensor"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),  # torchdata calls it
]
ROWS, SHARDS = 300, 6
BLOCK = 8


@pytest.fixture
def notes(tmp_path: Path) -> Notes:
    """Counts the rows of all processes."""
    return Notes(tmp_path / "ran")


@pytest.fixture
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_blocks, "TARGET_CALLS", BLOCK)
    monkeypatch.setattr(call_blocks, "TARGET_BYTES", BLOCK * 200)
    # A block is kept at once, however long the function's fingerprint takes on a busy machine.
    monkeypatch.setattr(call_blocks, "_BETWEEN_FINGERPRINTS", 0)


def source() -> datasets.IterableDataset:
    """The rows."""
    rows = datasets.Dataset.from_dict({"number": list(range(ROWS))})
    return rows.to_iterable_dataset(num_shards=SHARDS).with_format("torch")


def kept(store: Store, notes: Notes) -> Any:
    """A filter behind a map."""
    return cached_filter(cached_map(source(), Doubles(notes), store=store), Halves(notes), store=store)


def told(loader: Any) -> list[Any]:
    """The rows of a loader's batches."""
    return [batch["number"].tolist() for batch in loader]


@pytest.mark.usefixtures("_small_blocks")
@pytest.mark.parametrize("workers", [0, 2, *(pytest.param(n, marks=pytest.mark.matrix) for n in (1, 3))])
def test_workers_give_the_rows_of_plain_datasets_and_run_them_once(
    store: Store, notes: Notes, tmp_path: Path, workers: int
) -> None:
    loader: dict[str, Any] = {"batch_size": 7, "num_workers": workers}
    uncounted = Notes(tmp_path / "plain")
    plain = source().map(Doubles(uncounted)).filter(Halves(uncounted))
    expected = told(DataLoader(plain, **loader))
    assert sum(map(len, expected)) == ROWS / 2
    assert told(DataLoader(kept(store, notes), **loader)) == expected
    assert notes.rows() == 2 * ROWS
    dataset = kept(store, notes)
    for epoch in (0, 1):
        dataset.set_epoch(epoch)
        plain.set_epoch(epoch)
        assert told(DataLoader(dataset, **loader)) == told(DataLoader(plain, **loader))
    assert notes.rows() == 2 * ROWS
    other = {**loader, "num_workers": (workers + 2) % 4}
    assert told(DataLoader(dataset, **other)) == told(DataLoader(plain, **other))
    assert notes.rows() == 2 * ROWS, "shards are found whichever worker reads them"


def test_a_spawned_worker_finds_the_rows_and_the_stream_pickles_small(store: Store, notes: Notes) -> None:
    dataset = kept(store, notes)
    expected = told(DataLoader(dataset, batch_size=7))
    assert len(pickle.dumps(dataset._ex_iterable._kept)) < 1000
    loader: Any = DataLoader(dataset, batch_size=7, num_workers=1, multiprocessing_context="spawn")
    assert told(loader) == expected
    assert notes.rows() == 2 * ROWS


@pytest.mark.usefixtures("_small_blocks")
@pytest.mark.parametrize("workers", [0, 2])
def test_a_stateful_loader_goes_on_where_it_stopped(store: Store, notes: Notes, workers: int) -> None:
    def loader() -> Any:
        return StatefulDataLoader(kept(store, notes), batch_size=4, num_workers=workers)

    begun = loader()
    batches = iter(begun)
    taken = [next(batches)["number"].tolist() for _ in range(5)]
    state = begun.state_dict()
    del batches, begun
    going_on = loader()
    going_on.load_state_dict(state)
    rest = told(going_on)
    # Where a worker goes on inside a block, it runs the rows up to the next place where blocks end.
    assert notes.rows() <= 2 * (ROWS + max(1, workers) * 4 * BLOCK)
    assert taken + rest == told(loader())


@pytest.mark.usefixtures("_small_blocks")
def test_workers_of_a_loader_that_is_broken_off_leave_their_rows(store: Store, notes: Notes) -> None:
    for _batch in DataLoader(kept(store, notes), batch_size=7, num_workers=2):
        break
    before = notes.rows()
    assert 0 < before < 2 * ROWS
    told(DataLoader(kept(store, notes), batch_size=7, num_workers=2))
    assert notes.rows() == 2 * ROWS


@pytest.mark.usefixtures("_small_blocks")
def test_a_killed_worker_loses_a_block_at_most(store: Store, notes: Notes) -> None:
    notes.kill = 401
    # In a process of its own: PyTorch raises the error once more at each later signal of a child's end,
    # anywhere.
    loader = DataLoader(kept(store, notes), batch_size=7, num_workers=2)
    child = multiprocessing.get_context("fork").Process(target=told, args=(loader,))
    child.start()
    child.join()
    assert child.exitcode == 1
    assert notes.file.with_suffix(".killed").exists()
    notes.kill = None
    told(DataLoader(kept(store, notes), batch_size=7, num_workers=2))
    # The other worker is terminated too: each loses a block of both steps.
    assert 2 * ROWS < notes.rows() <= 2 * ROWS + 2 * 2 * 4 * BLOCK


@pytest.mark.usefixtures("_small_blocks")
def test_a_killed_process_loses_a_block_at_most(store: Store, notes: Notes) -> None:
    expected = told(DataLoader(kept(store, Notes(notes.file.with_name("plain"))), batch_size=7))
    store.delete_many([entry.name for entry in store.entries(CALLS_FOLDER)])
    kills = 5
    for kill in range(1, kills + 1):
        notes.stop = kill * 2 * ROWS // (kills + 1)
        child = multiprocessing.get_context("fork").Process(target=told, args=(kept(store, notes),))
        child.start()
        while notes.rows() < notes.stop:
            assert child.is_alive()
            time.sleep(0.005)
        child.kill()
        child.join()
    notes.stop = None
    assert told(DataLoader(kept(store, notes), batch_size=7)) == expected
    assert 2 * ROWS < notes.rows() <= 2 * (ROWS + kills * 4 * BLOCK)


def test_tensors_are_those_of_plain_datasets(store: Store, notes: Notes) -> None:
    [one, other] = (list(dataset) for dataset in (kept(store, notes), kept(store, notes)))
    plain = list(source().map(Doubles(notes)).filter(Halves(notes)))
    for rows in (one, other):
        assert all(isinstance(row["number"], torch.Tensor) for row in rows)
        assert [(row["number"].dtype, row["number"].item()) for row in rows] == [
            (row["number"].dtype, row["number"].item()) for row in plain
        ]
