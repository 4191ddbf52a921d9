"""How large shards are: equal, by the room of their nodes, and within what caches hold; never unequal in
silence.
"""

from __future__ import annotations

import warnings
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from castore import CastoreError
from tests.adapters.torch.shards import (
    WIDE,
    Make,
    Numbers,
    indices_of,
    of_node,
)


def test_without_overflow_shards_are_whole_however_small_the_cache(make_shard: Make) -> None:
    dataset = make_shard(Numbers(100, WIDE), memory_size=110_000, disk_size=20_000)
    assert sorted(indices_of(dataset)) == list(range(100))


def test_overflow_cuts_shards_to_what_the_cache_holds_and_says_so_once(make_shard: Make) -> None:
    with pytest.warns(UserWarning, match=r"of 200 samples are left out.*shard 0 keeps \d+ of 100") as told:
        dataset = make_shard(
            Numbers(200, WIDE), memory_size=0, disk_size=80_000, overflow=0.0, rank=0, num_replicas=2,
            rooms=[80_000, 80_000],
        )  # fmt: skip
    assert len(told) == 1
    assert 80_000 // 1400 <= len(dataset) <= 80_000 // 1000
    first = dataset.indices.tolist()
    dataset.set_epoch(1)
    assert sorted(dataset.indices.tolist()) == sorted(first)
    with pytest.warns(UserWarning, match="left out"):
        more = make_shard(Numbers(200, WIDE), memory_size=0, disk_size=80_000, overflow=0.25)
    assert len(more) == pytest.approx(1.25 * len(dataset), abs=2)


def test_overflow_is_silent_where_everything_fits(make_shard: Make) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(make_shard(40, overflow=0.0)) == 40


def test_ranks_of_a_node_have_their_part_of_its_cache(
    make_shard: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_node(monkeypatch, 0, nodes=1)
    with pytest.warns(UserWarning, match="left out"):
        dataset = make_shard(Numbers(200, WIDE), memory_size=0, disk_size=80_000, overflow=0.0)
    assert 40_000 // 1400 <= len(dataset) <= 40_000 // 1000


def test_equal_shards_stay_equal_where_caches_are_not(make_shard: Make) -> None:
    for rank in range(2):
        with pytest.warns(UserWarning, match="left out"):
            dataset = make_shard(
                Numbers(200, WIDE), overflow=0.0, rank=rank, num_replicas=2, rooms=["40KB", "1MB"]
            )
        assert len(dataset) < 40


def test_min_elements_that_cannot_be_met_is_an_error_with_the_reason(make_shard: Make) -> None:
    assert len(make_shard(40, min_elements=20, rank=0, num_replicas=2)) == 20
    with pytest.raises(CastoreError, match="min_elements is 21, but 40 samples in 2 shards leave 20"):
        make_shard(40, min_elements=21, rank=0, num_replicas=2)
    with (
        pytest.raises(CastoreError, match=r"min_elements is 150, but shard 0 can keep \d+ of its 200.*80 KB"),
        pytest.warns(UserWarning, match="left out"),
    ):
        make_shard(Numbers(200, WIDE), memory_size=0, disk_size=80_000, overflow=0.0, min_elements=150)


def test_shards_are_sized_by_the_room_of_their_nodes(make_shard: Make) -> None:
    shards = [
        indices_of(make_shard(40, balance="room", rooms=["1MB", "3MB"], rank=rank, num_replicas=2))
        for rank in range(2)
    ]
    assert list(map(len, shards)) == [10, 30]
    assert sorted(chain.from_iterable(shards)) == list(range(40))


def test_nodes_that_cannot_tell_each_other_their_room_are_an_error_that_says_both_ways(
    make_shard: Make,
) -> None:
    with pytest.raises(CastoreError, match=r"init_process_group.*rooms=\[\.\.\.\]"):
        make_shard(40, balance="room", rank=0, num_replicas=2)
    with pytest.raises(CastoreError, match=r"init_process_group.*rooms=\[\.\.\.\]"):
        make_shard(40, overflow=0.0, memory_size=0.001, rank=0, num_replicas=2)
    # Sizes in bytes are the same on all nodes.
    assert len(make_shard(40, overflow=0.0, rank=0, num_replicas=2)) == 20


def test_a_process_group_of_another_job_is_an_error(make_shard: Make, tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        with pytest.raises(
            CastoreError, match=r"the process group has 1 ranks on nodes \[0\], but this rank"
        ):
            make_shard(40, balance="room", rank=0, num_replicas=2)
    finally:
        torch.distributed.destroy_process_group()


def test_nodes_of_unequal_size_need_to_be_asked(make_shard: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    of_node(monkeypatch, 0)
    monkeypatch.setenv("WORLD_SIZE", "3")  # two ranks here, one on the other node
    dataset = make_shard(40, mode="node")
    assert len(dataset) == 20
    with pytest.raises(CastoreError, match=r"not all alike.*give a list"):
        dataset.state_dict(consumed=3)
    assert dataset.state_dict(consumed=[6, 3])["history"][0]["consumed"] == [6, 3]
    with pytest.raises(CastoreError, match="not all alike"):
        make_shard(40, mode="rank", balance="room", rooms=["1MB", "1MB"])


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
def test_arguments_that_make_no_sense_are_errors(
    make_shard: Make, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(CastoreError, match=said):
        make_shard(40, **{"rank": 0, "num_replicas": 2, **options})


@pytest.mark.parametrize("wrong", [-1, 1.0, True, "1"])
def test_an_epoch_is_a_whole_number(make_shard: Make, wrong: Any) -> None:
    with pytest.raises(CastoreError, match="the epoch is"):
        make_shard(4).set_epoch(wrong)
