"""Shards are disjoint and complete, the same everywhere, and what an epoch has left survives any change of
the world.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from castore import CastoreError
from castore.adapters.torch.shard_plan import (
    Step,
    epoch_order,
    permutation,
    remaining,
    shard_sizes,
    slice_of,
)
from tests.warm import WarmPython

counts = st.integers(0, 400)
seeds = st.integers(0, 2**70)
rooms = st.lists(st.integers(0, 10**15), min_size=1, max_size=9).filter(lambda given: sum(given) > 0)


def visit(
    n: int, seed: int, epoch: int, history: Sequence[Step], sizes: Sequence[int], taken: int, shuffle: bool
) -> tuple[list[int], Step]:
    """The samples that all shards of one more step visit when each takes `taken` of them, and that step."""
    pool = remaining(n, seed, epoch, history, shuffle=shuffle)
    consumed = [min(taken, size) for size in sizes]
    seen: list[int] = []
    for shard, count in enumerate(consumed):
        members = pool[slice_of(sizes, shard)]
        order = epoch_order(members, shuffle=shuffle, seed=seed, epoch=epoch, step=len(history), shard=shard)
        seen += members[order][:count].tolist()
    return seen, Step(tuple(sizes), tuple(sizes), tuple(consumed))


@given(counts, seeds)
def test_permutation_holds_every_index_once(n: int, seed: int) -> None:
    order = permutation(n, seed)
    assert order.dtype == np.int64
    assert sorted(order.tolist()) == list(range(n))


def test_permutation_is_the_same_on_every_machine_and_in_every_version() -> None:
    # Written down once: if this ever changes, caches filled by one version are of no use to the next.
    assert permutation(12, 13).tolist() == [8, 10, 3, 2, 7, 0, 4, 11, 1, 9, 5, 6]
    assert permutation(6, 2**70, "epoch", 3, 0, 1).tolist() == [0, 1, 3, 4, 2, 5]


def test_permutation_is_the_same_in_another_process(warm_torch: WarmPython) -> None:
    code = (
        "from castore.adapters.torch.shard_plan import permutation; print(permutation(50, 13, 'x').tolist())"
    )
    found = warm_torch.output(["-c", code])
    assert found.strip() == str(permutation(50, 13, "x").tolist())


def test_a_numpy_seed_means_the_same_as_an_int() -> None:
    assert permutation(50, np.int64(13)).tolist() == permutation(50, 13).tolist()


def test_keys_that_look_alike_give_different_orders() -> None:
    keys: list[tuple[int | str, ...]] = [(13,), (13, 0), (1, 3), (13, 0, 0), (0, 13), (2**32 * 13,), (130,)]
    assert len({tuple(permutation(50, *key).tolist()) for key in keys}) == len(keys)


@given(counts, st.integers(1, 60))
def test_equal_shards_differ_by_at_most_one(n: int, shards: int) -> None:
    sizes = shard_sizes(n, [1] * shards)
    assert sum(sizes) == n
    assert max(sizes) - min(sizes) <= 1
    assert list(sizes) == sorted(sizes, reverse=True)


@given(counts, rooms)
def test_sizes_follow_the_room_to_within_one_sample(n: int, given_rooms: list[int]) -> None:
    sizes = shard_sizes(n, given_rooms)
    total = sum(given_rooms)
    assert sum(sizes) == n
    for size, room in zip(sizes, given_rooms, strict=True):
        assert n * room // total <= size <= -(-n * room // total)


@given(counts, rooms, st.integers(1, 10**6))
def test_sizes_do_not_depend_on_the_unit_of_the_room(n: int, given_rooms: list[int], unit: int) -> None:
    assert shard_sizes(n, given_rooms) == shard_sizes(n, [room * unit for room in given_rooms])


@pytest.mark.parametrize("bad", [[], [0, 0], [-1, 3]])
def test_rooms_that_hold_nothing_are_refused(bad: list[int]) -> None:
    with pytest.raises(CastoreError, match="give a positive room"):
        shard_sizes(10, bad)


@given(counts, seeds, rooms)
def test_shards_are_disjoint_and_complete(n: int, seed: int, given_rooms: list[int]) -> None:
    sizes = shard_sizes(n, given_rooms)
    pool = remaining(n, seed, 0, [])
    found = [index for shard in range(len(sizes)) for index in pool[slice_of(sizes, shard)].tolist()]
    assert sorted(found) == list(range(n))


def test_membership_hardly_changes_when_the_number_of_shards_does() -> None:
    # Slices of one base order: three of four samples of the first of 4 shards are in the first of 3.
    four = set(permutation(1200, 13)[slice_of(shard_sizes(1200, [1] * 4), 0)].tolist())
    three = set(permutation(1200, 13)[slice_of(shard_sizes(1200, [1] * 3), 0)].tolist())
    assert four < three


def test_an_unshuffled_epoch_rises() -> None:
    members = permutation(100, 13)[20:50]
    order = epoch_order(members, shuffle=False, seed=13, epoch=4, step=0, shard=0)
    assert members[order].tolist() == sorted(members.tolist())


def test_shuffled_epochs_visit_the_same_samples_in_other_orders() -> None:
    members = permutation(100, 13)[20:50]
    orders = [epoch_order(members, shuffle=True, seed=13, epoch=epoch, step=0, shard=0) for epoch in range(3)]
    assert len({tuple(order.tolist()) for order in orders}) == 3
    assert {tuple(sorted(order.tolist())) for order in orders} == {tuple(range(30))}


@given(
    st.integers(0, 120),
    seeds,
    st.integers(0, 5),
    st.booleans(),
    st.lists(st.tuples(st.integers(1, 6), st.integers(0, 30)), max_size=5),
    st.integers(1, 6),
)
def test_an_epoch_is_visited_once_however_often_it_is_resumed_in_other_worlds(
    n: int, seed: int, epoch: int, shuffle: bool, worlds: list[tuple[int, int]], last_world: int
) -> None:
    seen: list[int] = []
    history: list[Step] = []
    for world, taken in [*worlds, (last_world, n)]:
        left = n - len(seen)
        part, step = visit(n, seed, epoch, history, shard_sizes(left, [1] * world), taken, shuffle)
        seen += part
        history.append(step)
    assert sorted(seen) == list(range(n))
    assert len(remaining(n, seed, epoch, history, shuffle=shuffle)) == 0


def test_what_was_cut_away_does_not_come_back_in_the_same_epoch() -> None:
    pool = permutation(20, 13)
    left = remaining(20, 13, 0, [Step(sizes=(10, 10), kept=(6, 10), consumed=(2, 10))])
    assert set(left.tolist()) < set(pool[:6].tolist())
    assert len(left) == 4


def test_a_history_of_another_dataset_is_refused() -> None:
    with pytest.raises(CastoreError, match="cuts up 12 samples, where 10 are left"):
        remaining(10, 13, 0, [Step(sizes=(6, 6), kept=(6, 6), consumed=(0, 0))])


@pytest.mark.parametrize(
    "numbers",
    [((4,), (5,), (0,)), ((4,), (4,), (5,)), ((4,), (4,), (-1,)), ((4, 4), (4,), (0,)), ((), (), ())],
)
def test_steps_that_cannot_be_are_refused(
    numbers: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]],
) -> None:
    with pytest.raises(CastoreError):
        Step(*numbers)
