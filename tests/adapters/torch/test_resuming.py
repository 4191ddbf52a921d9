"""Resumed epochs: no sample twice and none missed, however often, and in whatever world, they go on."""

from __future__ import annotations

import json
import pickle
from itertools import chain, islice
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from castore import CastoreError, InvalidValueError
from castore.adapters.torch.lazy import LazyShardDataset
from tests.adapters.torch.shards import (
    WIDE,
    Make,
    Numbers,
    indices_of,
    of_node,
)


def through_json(state: dict[str, Any]) -> dict[str, Any]:
    """As a checkpoint in any format would bring it back."""
    loaded: dict[str, Any] = json.loads(json.dumps(state))
    return loaded


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_state_survives_two_resumes(make_shard: Make, shuffle: bool) -> None:
    first = make_shard(40, shuffle=shuffle)
    first.set_epoch(3)
    whole = indices_of(first)
    second = make_shard(40, shuffle=shuffle)
    second.load_state_dict(through_json(first.state_dict(consumed=7)))
    assert indices_of(second) == whole[7:]
    third = make_shard(40, shuffle=shuffle)
    third.load_state_dict(through_json(second.state_dict(consumed=5)))
    assert indices_of(third) == whole[12:]
    assert third.epoch == 3
    third.set_epoch(3)
    assert indices_of(third) == whole[12:]
    third.set_epoch(4)
    assert len(third) == 40


@settings(
    max_examples=8,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    worlds=st.lists(st.tuples(st.integers(1, 4), st.integers(0, 12)), min_size=1, max_size=3),
    shuffle=st.booleans(),
)
def test_an_epoch_is_visited_once_across_worlds(
    make_shard: Make, worlds: list[tuple[int, int]], shuffle: bool
) -> None:
    seen: list[int] = []
    state = make_shard(50, shuffle=shuffle).state_dict()
    for world, taken in [*worlds, (2, 50)]:
        shards = [make_shard(50, shuffle=shuffle, rank=rank, num_replicas=world) for rank in range(world)]
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


def test_the_next_epoch_in_another_world_is_whole(make_shard: Make) -> None:
    state = make_shard(50, shuffle=True).state_dict(consumed=20)
    shards = [make_shard(50, shuffle=True, rank=rank, num_replicas=3) for rank in range(3)]
    for shard in shards:
        shard.load_state_dict(state)
    assert sum(map(len, shards)) == 30
    for shard in shards:
        shard.set_epoch(1)
    assert sorted(chain.from_iterable(map(indices_of, shards))) == list(range(50))


def test_ranks_that_do_not_step_together_say_what_each_shard_took(make_shard: Make) -> None:
    shards = [make_shard(50, shuffle=True, rank=rank, num_replicas=2) for rank in range(2)]
    seen = shards[0].indices[:3].tolist() + shards[1].indices[:10].tolist()
    alone = make_shard(50, shuffle=True)
    alone.load_state_dict(shards[1].state_dict(consumed=[3, 10]))
    assert sorted(seen + indices_of(alone)) == list(range(50))


def test_in_node_mode_consumed_is_what_each_rank_took(
    make_shard: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_node(monkeypatch, 0)
    dataset = make_shard(40, mode="node", shuffle=True)
    taken = list(dataset.indices[:6])
    dataset.load_state_dict(dataset.state_dict(consumed=3))
    assert len(dataset) == 14
    assert not set(taken) & set(dataset.indices)


def test_a_shard_that_was_cut_stays_cut_when_resumed(make_shard: Make) -> None:
    options = {"memory_size": 0, "disk_size": 80_000, "overflow": 0.0, "shuffle": True}
    with pytest.warns(UserWarning, match="left out"):
        first = make_shard(Numbers(200, WIDE), **options)
    whole = first.indices.tolist()
    # Meanwhile there is more room: this epoch goes on as it began, and the next makes use of it.
    with pytest.warns(UserWarning, match="left out"):
        second = make_shard(Numbers(200, WIDE), **options | {"disk_size": 120_000})
    second.load_state_dict(first.state_dict(consumed=10))
    assert second.indices.tolist() == whole[10:]
    second.set_epoch(1)
    assert len(second) > len(whole)
    # In another world too nothing comes that the epoch had left out.
    alone = make_shard(Numbers(200, WIDE), shuffle=True)
    alone.load_state_dict(first.state_dict(consumed=10))
    assert sorted(alone.indices.tolist()) == sorted(whole[10:])


def test_an_epoch_that_was_finished_has_nothing_left(make_shard: Make) -> None:
    dataset = make_shard(40)
    dataset.load_state_dict(dataset.state_dict(consumed=40))
    assert len(dataset) == 0
    assert list(DataLoader(dataset)) == []


@pytest.mark.parametrize("taken", [41, [20, 21], [1], [-1, 0], -1])
def test_more_cannot_be_consumed_than_there_is(make_shard: Make, taken: Any) -> None:
    with pytest.raises(CastoreError):
        make_shard(40, rank=0, num_replicas=2).state_dict(consumed=taken)


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
def test_states_of_something_else_are_refused(make_shard: Make, change: dict[str, Any], said: str) -> None:
    dataset = make_shard(40)
    with pytest.raises(CastoreError, match=said):
        dataset.load_state_dict(dataset.state_dict() | change)
    with pytest.raises(CastoreError, match="no state of a LazyShardDataset"):
        dataset.load_state_dict({})
    assert len(dataset) == 40


# torchdata calls something of torch that newer versions of it warn about.
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("shuffle", [False, True])
def test_torchdatas_stateful_loader_goes_on_where_it_was(
    make_shard: Make, workers: int, shuffle: bool
) -> None:
    def start() -> tuple[LazyShardDataset, StatefulDataLoader[Any]]:
        dataset = make_shard(40, shuffle=True)
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


@pytest.mark.parametrize("consumed", [1.5, True, "3", -1, [1, 2.5]])
def test_what_is_no_number_of_samples_is_refused(make_shard: Make, consumed: Any) -> None:
    with pytest.raises(InvalidValueError, match="consumed is a number of samples, or a list of such, not"):
        make_shard(50).state_dict(consumed=consumed)
