"""WindowSampler: every sample once an epoch, neighbours together, and no index before its name has come."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch.distributed
from hypothesis import given, settings
from hypothesis import strategies as st

from castore import Store
from castore.adapters.torch import WindowSampler
from castore.errors import ConflictError, InvalidNameError, InvalidValueError, RemoteMissingError
from castore.remote.outcomes import BackgroundPull, Pulled
from tests.mount.conftest import until


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with Store(tmp_path_factory.mktemp("windows") / "store", memory=0) as store:
        yield store


def some_names(count: int) -> list[str]:
    return [f"samples/{number:05}" for number in range(count)]


@settings(max_examples=200)
@given(
    size=st.integers(1, 7),
    more=st.integers(0, 150),
    window=st.integers(1, 40),
    seed=st.integers(0, 2**63 - 1),
    epoch=st.integers(0, 3),
    shuffle=st.booleans(),
)
def test_ranks_share_all_samples_evenly(
    empty: Store, size: int, more: int, window: int, seed: int, epoch: int, shuffle: bool
) -> None:
    count = size + more
    seen: list[list[int]] = []
    for rank in range(size):
        sampler = WindowSampler(
            empty, some_names(count), window=window, seed=seed, shuffle=shuffle, rank=rank, num_replicas=size
        )
        sampler.set_epoch(epoch)
        indices = list(sampler)
        assert len(indices) == len(sampler)
        assert len(set(indices)) == len(indices)
        assert indices == list(sampler)
        seen.append(indices)
    assert len({len(indices) for indices in seen}) == 1
    counted = Counter(index for indices in seen for index in indices)
    assert set(counted) == set(range(count))
    # Only the last group of windows may overlap, by fewer samples than there are ranks.
    assert sum(counted.values()) - count < size
    if not shuffle:
        assert all(indices == sorted(indices) for indices in seen)


@given(count=st.integers(1, 200), window=st.integers(1, 50), seed=st.integers(0, 100))
def test_windows_hold_neighbours_by_name(empty: Store, count: int, window: int, seed: int) -> None:
    names = some_names(count)
    mixed = [names[at] for at in np.random.default_rng(seed).permutation(count)]
    read = [names.index(mixed[index]) for index in WindowSampler(empty, mixed, window=window, seed=seed)]
    left = read
    while left:
        group = min(left[0] // window * window, count)
        length = min(window, count - group)
        assert sorted(left[:length]) == list(range(group, group + length))
        left = left[length:]
    assert sorted(read) == list(range(count))


def test_epochs_and_seeds_differ_and_a_rank_reads_other_windows_in_other_epochs(empty: Store) -> None:
    def order(seed: int, epoch: int, rank: int = 0) -> list[int]:
        names = some_names(400)
        sampler = WindowSampler(empty, names, window=10, seed=seed, rank=rank, num_replicas=4)
        sampler.set_epoch(epoch)
        return list(sampler)

    assert len({tuple(order(seed, epoch)) for seed in (0, 100) for epoch in range(4)}) == 8
    assert {index for epoch in range(30) for index in order(1, epoch)} == set(range(400))


def test_torchruns_ranks_count(empty: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert list(WindowSampler(empty, some_names(8), window=2, shuffle=False)) == [2, 3, 6, 7]


def test_ranks_of_a_process_group_count(empty: Store) -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    try:
        assert list(WindowSampler(empty, some_names(8), window=2, shuffle=False)) == [2, 3, 6, 7]
        read = WindowSampler(empty, some_names(8), window=2, shuffle=False, rank=0, num_replicas=1)
        assert list(read) == list(range(8))
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.filterwarnings("always::castore.errors.CacheWarning")
def test_an_index_comes_when_the_names_of_its_window_are_there(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    names, pull = some_names(30), BackgroundPull(is_first=True)
    pull.set_running_or_notify_cancel()
    with Store(tmp_path, memory=0) as store:
        store.put_many((name, b"1") for name in names[:19])
        sampler = WindowSampler(store, names, window=10, pull=pull, seed=1)
        indices = iter(sampler)
        assert sorted(next(indices) for _ in range(10)) == list(range(10))
        rest: list[int] = []
        thread = threading.Thread(target=lambda: rest.extend(indices))
        thread.start()
        store.put("samples/00025", b"1")
        assert not rest
        store.put("samples/00019", b"1")
        until(lambda: sorted(rest) == list(range(10, 20)))
        pull.set_result(Pulled("main", "0", 21, 0, 0, 0, 0))  # the others have been left out
        thread.join(30)
        assert sorted(rest) == list(range(10, 30))
        sampler.set_epoch(1)
        assert sorted(sampler) == list(range(30))
    [told] = recwarn
    assert str(told.message).startswith("'samples/00020' and perhaps other names are not in")


class AskedPull(BackgroundPull):
    """Tells that it was asked whether it has ended."""

    def __init__(self) -> None:
        super().__init__(is_first=False)
        self.asked = threading.Event()

    def done(self) -> bool:
        self.asked.set()
        return super().done()


def test_names_that_were_there_before_a_pull_wait_for_its_end(tmp_path: Path) -> None:
    names, pull = some_names(3), AskedPull()
    pull.set_running_or_notify_cancel()
    with Store(tmp_path, memory=0) as store:
        store.put_many((name, b"of before") for name in names)
        read: list[int] = []
        thread = threading.Thread(target=lambda: read.extend(WindowSampler(store, names, pull=pull)))
        thread.start()
        store.put_many((name, b"of the ref") for name in names)
        for _ in range(2):  # the second look follows what the first one has led to
            pull.asked.clear()
            assert pull.asked.wait(30)
        assert not read
        pull.set_result(Pulled("main", "0", 0, 3, 0, 0))
        thread.join(30)
        assert sorted(read) == [0, 1, 2]


def test_an_epoch_ends_with_the_error_of_its_pull(tmp_path: Path) -> None:
    pull = BackgroundPull(is_first=True)
    pull.set_running_or_notify_cancel()
    with Store(tmp_path, memory=0) as store:
        store.put("a", b"put by somebody else")
        indices = iter(WindowSampler(store, ["a"], pull=pull))
        assert next(indices) == 0
        pull.set_exception(ConflictError("'a' changed here", names=("a",)))
        with pytest.raises(ConflictError, match="changed here"):
            next(indices)


def test_a_pull_that_fails_is_the_epochs_error(empty: Store) -> None:
    pull = BackgroundPull(is_first=True)
    pull.set_exception(RemoteMissingError("there is no such ref"))
    with pytest.raises(RemoteMissingError, match="no such ref"):
        next(iter(WindowSampler(empty, some_names(3), pull=pull)))


@pytest.mark.filterwarnings("ignore:'samples/00000' and perhaps:castore.errors.CacheWarning")
def test_a_pull_in_the_background_gives_names_in_order_in_epoch_0_alone(empty: Store) -> None:
    pull = BackgroundPull(is_first=True)
    pull.set_result(Pulled("main", "0", 0, 0, 0, 0, 0))
    sampler = WindowSampler(empty, some_names(1000), window=10, pull=pull, ahead=0)
    assert [index // 10 for index in sampler][::10] == list(range(100))
    sampler.set_epoch(1)
    assert [index // 10 for index in sampler][::10] != list(range(100))


def test_what_makes_no_sense_is_an_error(empty: Store) -> None:
    for options in (
        {"window": 0},
        {"window": 2.5},
        {"ahead": -1},
        {"seed": -1},
        {"seed": "a"},
        {"window": True},
    ):
        [name] = options
        with pytest.raises(InvalidValueError, match=f"{name} is a whole number of at least"):
            WindowSampler(empty, some_names(3), **options)
    with pytest.raises(InvalidValueError, match="2 names are too few for 3 ranks"):
        WindowSampler(empty, some_names(2), rank=0, num_replicas=3)
    with pytest.raises(InvalidValueError, match="0 names are too few"):
        WindowSampler(empty, [])
    with pytest.raises(InvalidNameError):
        WindowSampler(empty, ["../a"])
    for names in ({"a", "b"}, pd.DataFrame({"a": ["b"]})):
        with pytest.raises(InvalidValueError, match="names are in the order of the indices"):
            WindowSampler(empty, names)  # type: ignore[arg-type]
    with pytest.raises(InvalidValueError, match=r"pull is what Remote\.begin_pull returns, not a Pulled"):
        WindowSampler(empty, ["a"], pull=Pulled("main", "0", 0, 0, 0, 0))  # type: ignore[arg-type]
    for alone in ({"rank": 0}, {"num_replicas": 2}):
        with pytest.raises(InvalidValueError, match="both rank and num_replicas"):
            WindowSampler(empty, ["a"], **alone)  # type: ignore[arg-type]
    with pytest.raises(InvalidValueError, match="epoch is a whole number"):
        WindowSampler(empty, ["a"]).set_epoch(1.0)  # type: ignore[arg-type]
    with pytest.raises(InvalidValueError, match="WindowSampler takes several names"):
        WindowSampler(empty, "abc")
