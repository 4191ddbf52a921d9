"""The policy's promises, from the simulation that `make bench` draws its hit rates with, on small data."""

from __future__ import annotations

import functools
import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from castore.adapters.torch.policy import AGEING, MARGIN, Policy
from tools.bench.hitrates import (
    PARTS,
    POLICIES,
    SKEW,
    TRACES,
    Trace,
    fixed,
    hit_rate,
    lru,
    make_trace,
    optimum,
    ours,
    rate,
)

# Odd, so that no part and no ageing falls where an epoch ends by itself.
N = 101
EPOCHS = 30
parts = pytest.mark.parametrize("part", PARTS)


def hits_an_epoch(trace: Trace, part: float, first: int) -> list[int]:
    """Hits of castore's policy in each stretch of N reads from ``first`` on."""
    hits = ours(trace, N, round(part * N))
    return [sum(hits[start : start + N]) for start in range(first, len(trace) - N + 1, N)]


# --- epochs -------------------------------------------------------------------------------------------------


@parts
@pytest.mark.parametrize("order", ["shuffled epochs", "sequential epochs"])
def test_epochs_hit_exactly_what_fits(order: str, part: float) -> None:
    trace = make_trace(order, N, EPOCHS)
    assert set(hits_an_epoch(trace, part, N)) == {round(part * N)}


@parts
@pytest.mark.parametrize("offset", [1, N // 3, N // 2, N - 1])
def test_ageing_in_mid_epoch_moves_nothing(offset: int, part: float) -> None:
    # A few reads before training, as a sanity check makes, and no halving meets the end of an epoch again.
    trace = [*range(offset), *make_trace("shuffled epochs", N, EPOCHS)]
    assert set(hits_an_epoch(trace, part, offset + N)) == {round(part * N)}


def two_ranks(n: int) -> list[int]:
    """Shuffled epochs as DistributedSampler splits them, the ranks in step; of an odd length one sample is
    read twice.
    """
    rng = random.Random(7)
    trace: list[int] = []
    for _ in range(EPOCHS):
        order = rng.sample(range(n), n)
        order += order[: n % 2]
        trace += itertools.chain.from_iterable(zip(order[::2], order[1::2], strict=True))
    return trace


@parts
def test_two_ranks_hit_exactly_what_fits(part: float) -> None:
    places = round(part * (N + 1))
    assert ours(two_ranks(N + 1), N + 1, places) == fixed(two_ranks(N + 1), N + 1, places)


@parts
def test_samples_that_ranks_read_twice_to_be_even_change_next_to_nothing(part: float) -> None:
    places = round(part * N)
    assert rate(ours(two_ranks(N), N, places), N) == pytest.approx(
        rate(fixed(two_ranks(N), N, places), N), abs=0.01
    )


@parts
@pytest.mark.parametrize("share", [0.9, 0.5])
def test_epochs_that_end_early_hit_almost_what_fits(share: float, part: float) -> None:
    rng = random.Random(7)
    n = 1001
    trace = [index for _ in range(EPOCHS) for index in rng.sample(range(n), round(share * n))]
    expected = rate(fixed(trace, n, round(part * n)), 3 * n)
    assert rate(ours(trace, n, round(part * n)), 3 * n) > expected - 0.02


def test_lru_would_hit_far_less() -> None:
    trace = make_trace("shuffled epochs", 1001, 10)
    assert hit_rate(lru, trace, 1001, 0.5) == pytest.approx(0.15, abs=0.02)


# --- skew ---------------------------------------------------------------------------------------------------


@parts
@pytest.mark.parametrize("seed", range(3))
def test_skew_hits_at_least_as_often_as_lru(seed: int, part: float) -> None:
    trace = make_trace("Zipf", 1001, 10, seed)
    assert hit_rate(ours, trace, 1001, part) > hit_rate(lru, trace, 1001, part) - 0.005


@parts
def test_popularity_that_drifts_is_followed(part: float) -> None:
    trace = make_trace("Zipf, drifting", 1001, 20)
    mine = hit_rate(ours, trace, 1001, part)
    assert mine > hit_rate(lru, trace, 1001, part) - 0.04
    # Where almost all fits, there is nothing to follow.
    assert mine > hit_rate(fixed, trace, 1001, part) + (0.1 if part <= 0.5 else -0.001)


def test_popularity_that_turns_over_is_found_again() -> None:
    """All at once the samples that nobody wanted are those that everybody wants."""
    n, places = 500, 100
    weights = list(itertools.accumulate((rank + 1) ** -SKEW for rank in range(n)))
    rng = random.Random(7)
    before = rng.choices(range(n), cum_weights=weights, k=10 * n)
    after = [n - 1 - index for index in rng.choices(range(n), cum_weights=weights, k=10 * n)]
    hits = ours([*before, *after], n, places)
    settled, found_again = rate(hits[: 10 * n], 5 * n), rate(hits, 15 * n)
    assert found_again > settled - 0.06
    assert rate(fixed([*before, *after], n, places), 15 * n) < settled - 0.4


# --- victims and counts -------------------------------------------------------------------------------------


def make_policy(counts: bytes) -> tuple[Policy, memoryview]:
    held = memoryview(bytearray(counts))
    return Policy(held, memoryview(bytearray(8)).cast("Q")), held


@given(
    counts=st.binary(min_size=1, max_size=40),
    fits=st.lists(st.booleans(), min_size=40, max_size=40),
    index=st.integers(0, 39),
)
def test_a_victim_serves_and_is_used_less(counts: bytes, fits: list[bool], index: int) -> None:
    policy, _ = make_policy(counts)
    newcomer = index % len(counts)
    place = policy.victim(newcomer, len(counts), lambda place: place if fits[place] else None)
    if place is not None:
        assert fits[place]
        assert counts[place] <= counts[newcomer] - MARGIN


def test_no_victim_where_there_is_none() -> None:
    policy, _ = make_policy(bytes([255, 0, 0]))
    assert policy.victim(0, 0, lambda place: place) is None
    assert policy.victim(0, 2, lambda place: None) is None


def test_the_least_used_of_those_it_looks_at_gives_way() -> None:
    policy, _ = make_policy(bytes([9, 5, 1, 6]))
    places = [policy.victim(0, 4, lambda place: place) for _ in range(100)]
    # Now and then all looks miss it; never does a place give way that is as good.
    assert places.count(2) > 90
    assert 0 not in places


def test_counts_saturate() -> None:
    policy, counts = make_policy(bytes(1000))
    for _ in range(300):
        policy.use(7)
    assert counts[7] == 255
    assert sum(counts) == 255


def test_all_counts_are_halved_once_ageing_is_due() -> None:
    policy, counts = make_policy(bytes([8, 5, 1, 0]))
    for _ in range(4 * AGEING - 1):
        policy.use(3)
    assert counts.tolist() == [8, 5, 1, 4 * AGEING - 1]
    policy.use(3)
    assert counts.tolist() == [4, 2, 0, 2 * AGEING]


# --- the yardstick itself -----------------------------------------------------------------------------------


def best_possible(trace: tuple[int, ...], places: int) -> int:
    """Hits of the best of all ways to keep and to drop, by trying them all."""

    @functools.cache
    def best(time: int, kept: frozenset[int]) -> int:
        if time == len(trace):
            return 0
        index = trace[time]
        choices = {kept, *(kept - {gone} | {index} for gone in kept)}
        if len(kept) < places:
            choices.add(kept | {index})
        return (index in kept) + max(best(time + 1, choice) for choice in choices)

    return best(0, frozenset())


@given(st.lists(st.integers(0, 4), max_size=12).map(tuple), st.integers(1, 4))
def test_the_offline_optimum_is_one(trace: tuple[int, ...], places: int) -> None:
    assert sum(optimum(trace, 5, places)) == best_possible(trace, places)


@pytest.mark.parametrize("name", TRACES)
def test_no_policy_hits_more_often_than_the_optimum(name: str) -> None:
    trace = make_trace(name, 300, 6)
    for places in (30, 150, 270):
        hits = {policy: sum(simulate(trace, 300, places)) for policy, simulate in POLICIES.items()}
        assert max(hits.values()) == hits["offline optimum"]
