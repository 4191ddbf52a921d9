"""Lazy shards: every sample once an epoch, the same samples every epoch, in every kind of worker."""

from __future__ import annotations

import os
import pickle
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, Subset

from castore import CastoreError
from castore.adapters.torch.dataset_identity import dataset_key
from tests.adapters.torch.conftest import Cell
from tests.adapters.torch.shards import Make, indices_of, of_node
from tests.warm import WarmPython


def test_alone_it_is_the_whole_dataset_in_order(make_shard: Make) -> None:
    dataset = make_shard(10)
    assert len(dataset) == 10
    assert indices_of(dataset) == list(range(10))


@pytest.mark.parametrize("shuffle", [False, True])
def test_ranks_share_every_index_out_once(make_shard: Make, shuffle: bool) -> None:
    shards = [indices_of(make_shard(41, shuffle=shuffle, rank=rank, num_replicas=4)) for rank in range(4)]
    assert sorted(chain.from_iterable(shards)) == list(range(41))
    assert sorted(map(len, shards)) == [10, 10, 10, 11]
    assert all((shard == sorted(shard)) is not shuffle for shard in shards)


def test_epochs_change_the_order_and_never_the_samples(make_shard: Make) -> None:
    dataset = make_shard(40, shuffle=True, rank=1, num_replicas=2)
    orders = []
    for epoch in range(3):
        dataset.set_epoch(epoch)
        orders.append(indices_of(dataset))
    assert len(set(map(tuple, orders))) == 3
    assert len({tuple(sorted(order)) for order in orders}) == 1
    dataset.set_epoch(1)
    assert indices_of(dataset) == orders[1]
    # The samples of epoch 1 came from the cache.
    assert dataset.stats().reads == 20


def test_the_seed_decides_who_has_what(make_shard: Make) -> None:
    assert indices_of(make_shard(40, rank=0, num_replicas=2)) == indices_of(
        make_shard(40, rank=0, num_replicas=2, seed=13)
    )
    assert indices_of(make_shard(40, rank=0, num_replicas=2)) != indices_of(
        make_shard(40, rank=0, num_replicas=2, seed=14)
    )


@pytest.mark.parametrize("mode", ["node", "disk"])
def test_ranks_of_a_node_share_its_shard(
    make_shard: Make, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    seen: list[int] = []
    for node in range(2):
        of_node(monkeypatch, node)
        dataset = make_shard(40, mode=mode, shuffle=True)
        assert len(dataset) == 20
        for rank in range(2):
            sampler: DistributedSampler[Any] = DistributedSampler(
                dataset, num_replicas=2, rank=rank, shuffle=False
            )
            seen += [dataset[place][1] for place in sampler]
        assert (dataset.memory_cache is None) == (mode == "disk")
    assert sorted(seen) == list(range(40))


def test_a_node_has_one_cache_for_all_its_ranks(make_shard: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    of_node(monkeypatch, 0, nodes=1)
    first, second = make_shard(40), make_shard(40, rank=1, num_replicas=2)
    indices_of(first)
    indices_of(second)
    assert first.stats() == second.stats()
    assert first.stats().reads == 40


@pytest.mark.parametrize("kind", ["list", "numpy", "rows", "zarr"])
def test_anything_with_integer_indices_can_be_sharded(make_shard: Make, tmp_path: Path, kind: str) -> None:
    rows = np.arange(60, dtype=np.int16).reshape(20, 3)
    data: Any = {"list": [f"text {i}" for i in range(20)], "numpy": rows[:, 0], "rows": rows}.get(kind)
    if kind == "zarr":
        zarr = pytest.importorskip("zarr", reason="zarr 3 has no release for Python 3.10")
        data = zarr.create_array(tmp_path / "rows.zarr", data=rows, chunks=(4, 3))
    dataset = make_shard(data, rank=0, num_replicas=2)
    for _ in range(2):
        for sample, index in zip((dataset[i] for i in range(10)), dataset.indices.tolist(), strict=True):
            np.testing.assert_array_equal(sample, data[index])
            assert type(sample) is (
                str if kind == "list" else type(rows[index] if kind != "numpy" else rows[0, 0])
            )
    assert dataset.stats().reads == 10


def test_batches_keep_order_and_duplicates(make_shard: Make) -> None:
    dataset = make_shard(40, shuffle=True, rank=0, num_replicas=2)
    order = dataset.indices.tolist()
    assert [dataset[place][1] for place in range(20)] == order == indices_of(dataset)
    batch = dataset.__getitems__([3, 1, 3, -1])
    assert [index for _, index in batch] == [order[3], order[1], order[3], order[-1]]


def test_indices_outside_the_shard_are_errors(make_shard: Make) -> None:
    dataset = make_shard(40, rank=0, num_replicas=2)
    for wrong in (20, -21):
        with pytest.raises(IndexError, match="20"):
            dataset[wrong]
        with pytest.raises(CastoreError):
            dataset.__getitems__([0, wrong])


def test_a_subset_of_a_shard_follows_its_order(make_shard: Make) -> None:
    dataset = make_shard(40, shuffle=True, rank=0, num_replicas=2)
    subset = Subset(dataset, [5, 2])
    assert [index for _, index in (subset[0], subset[1])] == [dataset.indices[5], dataset.indices[2]]


def test_fill_and_prefetch_read_this_shard_and_no_other(make_shard: Make) -> None:
    dataset = make_shard(40, rank=0, num_replicas=2)
    assert dataset.prefetch([0, 1, 1]) == 2
    assert dataset.fill(num_workers=1, progress=False) == 18
    indices_of(dataset)
    memory = dataset.stats().memory
    assert memory is not None
    # Filling is no use of a sample: nothing missed.
    assert (memory.samples, memory.hits, dataset.stats().reads) == (20, 20, 0)


def test_a_cache_around_a_shard_is_refused(make_shard: Make) -> None:
    with pytest.raises(CastoreError, match="change places every epoch"):
        dataset_key(make_shard(40))


# Workers ----------------------------------------------------------------------------------------------------


# A spawned worker imports torch for a second, so one has to do.
_PERSISTENT = [
    Cell("fork", 2, True),
    pytest.param(Cell("forkserver", 2, True), marks=pytest.mark.matrix),
    pytest.param(Cell("spawn", 1, True), marks=pytest.mark.matrix),
]


@pytest.mark.parametrize("cell", _PERSISTENT, ids=str, indirect=True)
def test_an_epoch_reaches_persistent_workers(
    cell: Cell, make_shard: Make, capfd: pytest.CaptureFixture[str]
) -> None:
    dataset = make_shard(24, shuffle=True, rank=0, num_replicas=2)
    loader = cell.loader(dataset, batch_size=3)
    orders = []
    for epoch in range(3):
        dataset.set_epoch(epoch)
        orders.append(torch.cat([labels for _, labels in loader]).tolist())
        assert orders[-1] == dataset.indices.tolist()
    assert len(set(map(tuple, orders))) == 3
    assert dataset.stats().reads == 12
    del loader
    assert capfd.readouterr().err == ""


def test_a_resumed_epoch_reaches_persistent_workers(make_shard: Make) -> None:
    dataset = make_shard(40, shuffle=True)
    loader = DataLoader(dataset, batch_size=4, num_workers=2, persistent_workers=True)
    whole = torch.cat([labels for _, labels in loader]).tolist()
    dataset.load_state_dict(dataset.state_dict(consumed=12))
    assert len(loader) == 7
    assert torch.cat([labels for _, labels in loader]).tolist() == whole[12:]


def test_it_pickles_small_and_without_indices(make_shard: Make) -> None:
    dataset = make_shard(100_000, memory_size=0)
    assert len(pickle.dumps(dataset)) < 4000
    assert (pickle.loads(pickle.dumps(dataset)).indices == dataset.indices).all()


# The example of the library whose users know the class ------------------------------------------------------

EXAMPLE = """
import os
import shutil
import sys

import torch
from torch.utils.data import DataLoader
from castore.adapters.torch import LazyShardDataset

sys.path.insert(0, os.environ["PICTURES"])
from pictures import Pictures

method = "file://" + os.path.abspath("rendezvous")
torch.distributed.init_process_group("gloo", init_method=method, rank=0, world_size=1)

rank, world_size = int(os.environ['RANK']), int(os.environ['WORLD_SIZE'])
data = Pictures(48)

cached_dataset = LazyShardDataset(
                                data,
                                shuffle=True,
                                disk_size=0.95,
                                memory_size=0.5,
                                overflow=0.0,
                                min_elements=len(data) // world_size,
                                rank=rank,
                                num_replicas=world_size,
                                seed=13,
                                mode='rank',
                                disk_cache_path='./bicache'
                                )

loader_kwargs = {'batch_size': 4,
                    'num_workers': 8,
                    'pin_memory': True,
                    'shuffle': True}

if __name__ == "__main__":
    loader = DataLoader(cached_dataset, **loader_kwargs)

    memory_hits = []
    memory_miss = []

    for _ in range(2):
        for i in loader:
            memory_miss.append(cached_dataset.memory_cache.misses.value - max(memory_miss + [0]))
            memory_hits.append(cached_dataset.memory_cache.hits.value - max(memory_hits + [0]))

    values = cached_dataset.memory_cache._values_cache
    print(len([values.get(i) for i in range(8) if values.get(i) is not None]))

    with open('out.txt', 'a') as fp:
        fp.writelines(f'\\n{rank} hit' + str(memory_hits) + '\\n')
        fp.writelines(f'\\n{rank} miss' + str(memory_miss))

    torch.distributed.barrier()

    shutil.rmtree('./bicache')
"""

PICTURES = """
import torch

class Pictures(torch.utils.data.Dataset):
    def __init__(self, n):
        self.n = n
    def __len__(self):
        return self.n
    def __getitem__(self, index):
        return torch.full((3, 8, 8), index, dtype=torch.uint8), index % 10
"""


def test_bilevelcaches_example_runs_with_only_the_import_changed(
    tmp_path: Path, warm_torch: WarmPython
) -> None:
    (tmp_path / "pictures.py").write_text(PICTURES)
    environ = {"RANK": "0", "WORLD_SIZE": "1", "PICTURES": str(tmp_path)}
    done = warm_torch.run(["-c", EXAMPLE], cwd=tmp_path, env=os.environ | environ, text=True)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout.strip() == "8"
    hits, misses = (line for line in (tmp_path / "out.txt").read_text().splitlines() if line)
    assert hits.startswith("0 hit[")
    assert misses.startswith("0 miss[")
    assert not (tmp_path / "bicache").exists()
