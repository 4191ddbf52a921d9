"""Lazy shards: every sample once an epoch, the same samples every epoch, and no sample twice however often resumed."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset
from torchdata.stateful_dataloader import StatefulDataLoader

from castore import CastoreError
from castore.adapters.torch.identity import dataset_key
from castore.adapters.torch.lazy import LazyShardDataset
from tests.torch.conftest import Cell

Make = Callable[..., LazyShardDataset]


class Numbers(Dataset[tuple[torch.Tensor, int]]):
    """Samples of a known size that tell their index."""

    def __init__(self, n: int, width: int = 8) -> None:
        self.n = n
        self.width = width

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((self.width,), float(index)), index


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
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


def indices_of(dataset: LazyShardDataset) -> list[int]:
    """What the samples themselves say."""
    return [index for _, index in dataset]


def of_node(monkeypatch: pytest.MonkeyPatch, node: int, *, nodes: int = 2, local: int = 2) -> None:
    """Be the first rank of a node, as torchrun would say it."""
    told = {
        "RANK": node * local,
        "WORLD_SIZE": nodes * local,
        "LOCAL_RANK": 0,
        "LOCAL_WORLD_SIZE": local,
        "GROUP_RANK": node,
        "GROUP_WORLD_SIZE": nodes,
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": 29500,
    }
    for name, value in told.items():
        monkeypatch.setenv(name, str(value))


# Shards -------------------------------------------------------------------------------------------------------------


def test_alone_it_is_the_whole_dataset_in_order(make: Make) -> None:
    dataset = make(10)
    assert len(dataset) == 10
    assert indices_of(dataset) == list(range(10))


@pytest.mark.parametrize("shuffle", [False, True])
def test_ranks_share_every_index_out_once(make: Make, shuffle: bool) -> None:
    shards = [indices_of(make(41, shuffle=shuffle, rank=rank, num_replicas=4)) for rank in range(4)]
    assert sorted(chain.from_iterable(shards)) == list(range(41))
    assert sorted(map(len, shards)) == [10, 10, 10, 11]
    assert all((shard == sorted(shard)) is not shuffle for shard in shards)


def test_epochs_change_the_order_and_never_the_samples(make: Make) -> None:
    dataset = make(40, shuffle=True, rank=1, num_replicas=2)
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


def test_the_seed_decides_who_has_what(make: Make) -> None:
    assert indices_of(make(40, rank=0, num_replicas=2)) == indices_of(
        make(40, rank=0, num_replicas=2, seed=13)
    )
    assert indices_of(make(40, rank=0, num_replicas=2)) != indices_of(
        make(40, rank=0, num_replicas=2, seed=14)
    )


@pytest.mark.parametrize("mode", ["node", "disk"])
def test_ranks_of_a_node_share_its_shard(make: Make, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    seen: list[int] = []
    for node in range(2):
        of_node(monkeypatch, node)
        dataset = make(40, mode=mode, shuffle=True)
        assert len(dataset) == 20
        for rank in range(2):
            sampler: DistributedSampler[Any] = DistributedSampler(
                dataset, num_replicas=2, rank=rank, shuffle=False
            )
            seen += [dataset[place][1] for place in sampler]
        assert (dataset.memory_cache is None) == (mode == "disk")
    assert sorted(seen) == list(range(40))


def test_a_node_has_one_cache_for_all_its_ranks(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    of_node(monkeypatch, 0, nodes=1)
    first, second = make(40), make(40, rank=1, num_replicas=2)
    indices_of(first)
    indices_of(second)
    assert first.stats() == second.stats()
    assert first.stats().reads == 40


@pytest.mark.parametrize("kind", ["list", "numpy", "rows", "zarr"])
def test_anything_with_integer_indices_can_be_sharded(make: Make, tmp_path: Path, kind: str) -> None:
    rows = np.arange(60, dtype=np.int16).reshape(20, 3)
    data: Any = {"list": [f"text {i}" for i in range(20)], "numpy": rows[:, 0], "rows": rows}.get(kind)
    if kind == "zarr":
        data = zarr.create_array(tmp_path / "rows.zarr", data=rows, chunks=(4, 3))
    dataset = make(data, rank=0, num_replicas=2)
    for _ in range(2):
        for sample, index in zip((dataset[i] for i in range(10)), dataset.indices.tolist(), strict=True):
            np.testing.assert_array_equal(sample, data[index])
            assert type(sample) is (
                str if kind == "list" else type(rows[index] if kind != "numpy" else rows[0, 0])
            )
    assert dataset.stats().reads == 10


def test_batches_keep_order_and_duplicates(make: Make) -> None:
    dataset = make(40, shuffle=True, rank=0, num_replicas=2)
    order = dataset.indices.tolist()
    assert [dataset[place][1] for place in range(20)] == order == indices_of(dataset)
    batch = dataset.__getitems__([3, 1, 3, -1])
    assert [index for _, index in batch] == [order[3], order[1], order[3], order[-1]]


def test_indices_outside_the_shard_are_errors(make: Make) -> None:
    dataset = make(40, rank=0, num_replicas=2)
    for wrong in (20, -21):
        with pytest.raises(IndexError, match="20"):
            dataset[wrong]
        with pytest.raises(CastoreError):
            dataset.__getitems__([0, wrong])


def test_a_subset_of_a_shard_follows_its_order(make: Make) -> None:
    dataset = make(40, shuffle=True, rank=0, num_replicas=2)
    subset = Subset(dataset, [5, 2])
    assert [index for _, index in (subset[0], subset[1])] == [dataset.indices[5], dataset.indices[2]]


def test_fill_and_prefetch_read_this_shard_and_no_other(make: Make) -> None:
    dataset = make(40, rank=0, num_replicas=2)
    assert dataset.prefetch([0, 1, 1]) == 2
    assert dataset.fill(num_workers=1, progress=False) == 18
    indices_of(dataset)
    memory = dataset.stats().memory
    assert memory is not None
    # Filling is no use of a sample: nothing missed.
    assert (memory.samples, memory.hits, dataset.stats().reads) == (20, 20, 0)


def test_a_cache_around_a_shard_is_refused(make: Make) -> None:
    with pytest.raises(CastoreError, match="change places every epoch"):
        dataset_key(make(40))


# Workers ------------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings(
    "ignore:This DataLoader will create 4 worker processes"
)  # on machines with fewer cores
def test_every_kind_of_worker_follows_the_epochs(
    cell: Cell, make: Make, capfd: pytest.CaptureFixture[str]
) -> None:
    dataset = make(24, shuffle=True, rank=0, num_replicas=2)
    loader = cell.loader(dataset, batch_size=3)
    # Workers of their own for a second epoch, each importing torch anew, would show nothing new.
    for epoch in (0, 1) if cell.persistent or cell.start == "fork" else (1,):
        dataset.set_epoch(epoch)
        batches = list(loader)
        assert torch.cat([labels for _, labels in batches]).tolist() == dataset.indices.tolist()
        assert all((values == labels[:, None]).all() for values, labels in batches)
    assert dataset.stats().reads == 12
    del loader
    assert capfd.readouterr().err == ""


def test_an_epoch_reaches_persistent_workers(make: Make) -> None:
    dataset = make(40, shuffle=True)
    loader = DataLoader(dataset, batch_size=4, num_workers=2, persistent_workers=True)
    orders = []
    for epoch in range(3):
        dataset.set_epoch(epoch)
        orders.append(torch.cat([labels for _, labels in loader]).tolist())
        assert orders[-1] == dataset.indices.tolist()
    assert len(set(map(tuple, orders))) == 3
    assert dataset.stats().reads == 40


def test_a_resumed_epoch_reaches_persistent_workers(make: Make) -> None:
    dataset = make(40, shuffle=True)
    loader = DataLoader(dataset, batch_size=4, num_workers=2, persistent_workers=True)
    whole = torch.cat([labels for _, labels in loader]).tolist()
    dataset.load_state_dict(dataset.state_dict(consumed=12))
    assert len(loader) == 7
    assert torch.cat([labels for _, labels in loader]).tolist() == whole[12:]


def test_it_pickles_small_and_without_indices(make: Make) -> None:
    dataset = make(100_000, memory_size=0)
    assert len(pickle.dumps(dataset)) < 4000
    assert (pickle.loads(pickle.dumps(dataset)).indices == dataset.indices).all()


# Room ---------------------------------------------------------------------------------------------------------------

# A sample of Numbers(n, 250) takes 1000 bytes and a header.
WIDE = 250


def test_without_overflow_shards_are_whole_however_small_the_cache(make: Make) -> None:
    dataset = make(Numbers(100, WIDE), memory_size=110_000, disk_size=20_000)
    assert sorted(indices_of(dataset)) == list(range(100))


def test_overflow_cuts_shards_to_what_the_cache_holds_and_says_so_once(make: Make) -> None:
    with pytest.warns(UserWarning, match=r"of 200 samples are left out.*shard 0 keeps \d+ of 100") as told:
        dataset = make(
            Numbers(200, WIDE), memory_size=0, disk_size=80_000, overflow=0.0, rank=0, num_replicas=2,
            rooms=[80_000, 80_000],
        )  # fmt: skip
    assert len(told) == 1
    assert 80_000 // 1400 <= len(dataset) <= 80_000 // 1000
    first = dataset.indices.tolist()
    dataset.set_epoch(1)
    assert sorted(dataset.indices.tolist()) == sorted(first)
    with pytest.warns(UserWarning, match="left out"):
        more = make(Numbers(200, WIDE), memory_size=0, disk_size=80_000, overflow=0.25)
    assert len(more) == pytest.approx(1.25 * len(dataset), abs=2)


def test_overflow_is_silent_where_everything_fits(make: Make) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(make(40, overflow=0.0)) == 40


def test_ranks_of_a_node_have_their_part_of_its_cache(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    of_node(monkeypatch, 0, nodes=1)
    with pytest.warns(UserWarning, match="left out"):
        dataset = make(Numbers(200, WIDE), memory_size=0, disk_size=80_000, overflow=0.0)
    assert 40_000 // 1400 <= len(dataset) <= 40_000 // 1000


def test_equal_shards_stay_equal_where_caches_are_not(make: Make) -> None:
    for rank in range(2):
        with pytest.warns(UserWarning, match="left out"):
            dataset = make(Numbers(200, WIDE), overflow=0.0, rank=rank, num_replicas=2, rooms=["40KB", "1MB"])
        assert len(dataset) < 40


def test_min_elements_that_cannot_be_met_is_an_error_with_the_reason(make: Make) -> None:
    assert len(make(40, min_elements=20, rank=0, num_replicas=2)) == 20
    with pytest.raises(CastoreError, match="min_elements is 21, but 40 samples in 2 shards leave 20"):
        make(40, min_elements=21, rank=0, num_replicas=2)
    with (
        pytest.raises(CastoreError, match=r"min_elements is 150, but shard 0 can keep \d+ of its 200.*80 KB"),
        pytest.warns(UserWarning, match="left out"),
    ):
        make(Numbers(200, WIDE), memory_size=0, disk_size=80_000, overflow=0.0, min_elements=150)


def test_shards_are_sized_by_the_room_of_their_nodes(make: Make) -> None:
    shards = [
        indices_of(make(40, balance="room", rooms=["1MB", "3MB"], rank=rank, num_replicas=2))
        for rank in range(2)
    ]
    assert list(map(len, shards)) == [10, 30]
    assert sorted(chain.from_iterable(shards)) == list(range(40))


def test_nodes_that_cannot_tell_each_other_their_room_are_an_error_that_says_both_ways(make: Make) -> None:
    with pytest.raises(CastoreError, match=r"init_process_group.*rooms=\[\.\.\.\]"):
        make(40, balance="room", rank=0, num_replicas=2)
    with pytest.raises(CastoreError, match=r"init_process_group.*rooms=\[\.\.\.\]"):
        make(40, overflow=0.0, memory_size=0.001, rank=0, num_replicas=2)
    # Sizes in bytes are the same on all nodes.
    assert len(make(40, overflow=0.0, rank=0, num_replicas=2)) == 20


def test_a_process_group_of_another_job_is_an_error(make: Make, tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        with pytest.raises(CastoreError, match="the process group has 1 ranks on nodes .0., but this rank"):
            make(40, balance="room", rank=0, num_replicas=2)
    finally:
        torch.distributed.destroy_process_group()


def test_nodes_of_unequal_size_need_to_be_asked(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    of_node(monkeypatch, 0)
    monkeypatch.setenv("WORLD_SIZE", "3")  # two ranks here, one on the other node
    dataset = make(40, mode="node")
    assert len(dataset) == 20
    with pytest.raises(CastoreError, match="not all alike.*give a list"):
        dataset.state_dict(consumed=3)
    assert dataset.state_dict(consumed=[6, 3])["history"][0]["consumed"] == [6, 3]
    with pytest.raises(CastoreError, match="not all alike"):
        make(40, mode="rank", balance="room", rooms=["1MB", "1MB"])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"rooms": ["1MB", "1MB", "1MB"], "balance": "room"}, "rooms has 3 sizes for 2 nodes"),
        ({"rooms": ["1MB", "1MB"]}, "rooms decide nothing"),
        ({"rooms": [0, 0], "balance": "room"}, "give a positive room"),
        ({"mode": "gpu"}, "mode is 'gpu'; take one of 'rank', 'node', 'disk'"),
        ({"balance": "fair"}, "balance is 'fair'"),
        ({"overflow": -0.5}, "overflow is -0.5"),
        ({"overflow": float("nan")}, "overflow is nan"),
        ({"seed": 1.5}, "the seed is 1.5"),
        ({"rank": 2}, "rank is 2, but num_replicas is 2"),
    ],
)
def test_arguments_that_make_no_sense_are_errors(make: Make, options: dict[str, Any], said: str) -> None:
    with pytest.raises(CastoreError, match=said):
        make(40, **{"rank": 0, "num_replicas": 2, **options})


@pytest.mark.parametrize("wrong", [-1, 1.0, True, "1"])
def test_an_epoch_is_a_whole_number(make: Make, wrong: Any) -> None:
    with pytest.raises(CastoreError, match="the epoch is"):
        make(4).set_epoch(wrong)


# Resuming -----------------------------------------------------------------------------------------------------------


def through_json(state: dict[str, Any]) -> dict[str, Any]:
    """As a checkpoint in any format would bring it back."""
    loaded: dict[str, Any] = json.loads(json.dumps(state))
    return loaded


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_state_survives_two_resumes(make: Make, shuffle: bool) -> None:
    first = make(40, shuffle=shuffle)
    first.set_epoch(3)
    whole = indices_of(first)
    second = make(40, shuffle=shuffle)
    second.load_state_dict(through_json(first.state_dict(consumed=7)))
    assert indices_of(second) == whole[7:]
    third = make(40, shuffle=shuffle)
    third.load_state_dict(through_json(second.state_dict(consumed=5)))
    assert indices_of(third) == whole[12:]
    assert third.epoch == 3
    third.set_epoch(3)
    assert indices_of(third) == whole[12:]
    third.set_epoch(4)
    assert len(third) == 40


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    worlds=st.lists(st.tuples(st.integers(1, 4), st.integers(0, 12)), min_size=1, max_size=3),
    shuffle=st.booleans(),
)
def test_an_epoch_is_visited_once_across_worlds(
    make: Make, worlds: list[tuple[int, int]], shuffle: bool
) -> None:
    seen: list[int] = []
    state = make(50, shuffle=shuffle).state_dict()
    for world, taken in [*worlds, (2, 50)]:
        shards = [make(50, shuffle=shuffle, rank=rank, num_replicas=world) for rank in range(world)]
        for shard in shards:
            shard.load_state_dict(state)
            seen += shard.indices[:taken].tolist()
        consumed = min(taken, max(map(len, shards)))
        states = [through_json(shard.state_dict(consumed=consumed)) for shard in shards]
        # Any rank's state serves all.
        assert all(other == states[0] for other in states)
        state = states[-1]
        for shard in shards:
            shard.close()
    assert sorted(seen) == list(range(50))


def test_the_next_epoch_in_another_world_is_whole(make: Make) -> None:
    state = make(50, shuffle=True).state_dict(consumed=20)
    shards = [make(50, shuffle=True, rank=rank, num_replicas=3) for rank in range(3)]
    for shard in shards:
        shard.load_state_dict(state)
    assert sum(map(len, shards)) == 30
    for shard in shards:
        shard.set_epoch(1)
    assert sorted(chain.from_iterable(map(indices_of, shards))) == list(range(50))


def test_ranks_that_do_not_step_together_say_what_each_shard_took(make: Make) -> None:
    shards = [make(50, shuffle=True, rank=rank, num_replicas=2) for rank in range(2)]
    seen = shards[0].indices[:3].tolist() + shards[1].indices[:10].tolist()
    alone = make(50, shuffle=True)
    alone.load_state_dict(shards[1].state_dict(consumed=[3, 10]))
    assert sorted(seen + indices_of(alone)) == list(range(50))


def test_in_node_mode_consumed_is_what_each_rank_took(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    of_node(monkeypatch, 0)
    dataset = make(40, mode="node", shuffle=True)
    taken = list(dataset.indices[:6])
    dataset.load_state_dict(dataset.state_dict(consumed=3))
    assert len(dataset) == 14
    assert not set(taken) & set(dataset.indices)


def test_a_shard_that_was_cut_stays_cut_when_resumed(make: Make) -> None:
    options = {"memory_size": 0, "disk_size": 80_000, "overflow": 0.0, "shuffle": True}
    with pytest.warns(UserWarning, match="left out"):
        first = make(Numbers(200, WIDE), **options)
    whole = first.indices.tolist()
    # Meanwhile there is more room: this epoch goes on as it began, and the next makes use of it.
    with pytest.warns(UserWarning, match="left out"):
        second = make(Numbers(200, WIDE), **options | {"disk_size": 120_000})
    second.load_state_dict(first.state_dict(consumed=10))
    assert second.indices.tolist() == whole[10:]
    second.set_epoch(1)
    assert len(second) > len(whole)
    # In another world too nothing comes that the epoch had left out.
    alone = make(Numbers(200, WIDE), shuffle=True)
    alone.load_state_dict(first.state_dict(consumed=10))
    assert sorted(alone.indices.tolist()) == sorted(whole[10:])


def test_an_epoch_that_was_finished_has_nothing_left(make: Make) -> None:
    dataset = make(40)
    dataset.load_state_dict(dataset.state_dict(consumed=40))
    assert len(dataset) == 0
    assert list(DataLoader(dataset)) == []


@pytest.mark.parametrize("taken", [41, [20, 21], [1], [-1, 0], -1])
def test_more_cannot_be_consumed_than_there_is(make: Make, taken: Any) -> None:
    with pytest.raises(CastoreError):
        make(40, rank=0, num_replicas=2).state_dict(consumed=taken)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"n": 41}, "n=41, and here it is 40"),
        ({"seed": 14}, "seed=14, and here it is 13"),
        ({"shuffle": True}, "shuffle=True, and here it is False"),
        ({"version": 2}, "version=2"),
        (
            {"history": [{"sizes": [50], "kept": [50], "consumed": [0]}]},
            "cuts up 50 samples, where 40 are left",
        ),
        ({"history": [{"sizes": [40], "kept": [40], "consumed": [41]}]}, "no number may exceed"),
        ({"history": [{"sizes": [40]}]}, "no state of a LazyShardDataset"),
        ({"history": 3}, "no state of a LazyShardDataset"),
        ({"epoch": None}, "no state of a LazyShardDataset"),
    ],
)
def test_states_of_something_else_are_refused(make: Make, change: dict[str, Any], said: str) -> None:
    dataset = make(40)
    with pytest.raises(CastoreError, match=said):
        dataset.load_state_dict(dataset.state_dict() | change)
    with pytest.raises(CastoreError, match="no state of a LazyShardDataset"):
        dataset.load_state_dict({})
    assert len(dataset) == 40


# torchdata calls something of torch that newer versions of it warn about.
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("shuffle", [False, True])
def test_torchdatas_stateful_loader_goes_on_where_it_was(make: Make, workers: int, shuffle: bool) -> None:
    def start() -> tuple[LazyShardDataset, StatefulDataLoader[Any]]:
        dataset = make(40, shuffle=True)
        loader: StatefulDataLoader[Any] = StatefulDataLoader(
            dataset, batch_size=4, num_workers=workers, shuffle=shuffle
        )
        return dataset, loader

    dataset, loader = start()
    dataset.set_epoch(2)
    seen: list[int] = []
    for stop in (3, 2):
        for _, labels in islice(loader, stop):
            seen += labels.tolist()
        state = pickle.loads(pickle.dumps(loader.state_dict()))
        dataset, loader = start()
        loader.load_state_dict(state)
    seen += [label for _, labels in loader for label in labels.tolist()]
    assert sorted(seen) == list(range(40))
    assert dataset.epoch == 2
    dataset.set_epoch(3)
    assert sorted(label for _, labels in loader for label in labels.tolist()) == list(range(40))


# The example of the library whose users know the class ----------------------------------------------------------------

EXAMPLE = """
import os
import shutil
import sys

import torch
from torch.utils.data import DataLoader
from castore.adapters.torch import LazyShardDataset

sys.path.insert(0, os.environ["HELPERS"])
from pictures import Pictures

torch.distributed.init_process_group("gloo", init_method="file://" + os.path.abspath("rendezvous"), rank=0, world_size=1)

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

    print(len([cached_dataset.memory_cache._values_cache.get(i) for i in range(8) if cached_dataset.memory_cache._values_cache.get(i) is not None]))

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


def test_bilevelcaches_example_runs_with_only_the_import_changed(tmp_path: Path) -> None:
    (tmp_path / "pictures.py").write_text(PICTURES)
    (tmp_path / "example.py").write_text(EXAMPLE)
    environ = {"RANK": "0", "WORLD_SIZE": "1", "HELPERS": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "example.py"], cwd=tmp_path, env={**os.environ, **environ},
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout.strip() == "8"
    hits, misses = (line for line in (tmp_path / "out.txt").read_text().splitlines() if line)
    assert hits.startswith("0 hit[")
    assert misses.startswith("0 miss[")
    assert not (tmp_path / "bicache").exists()
