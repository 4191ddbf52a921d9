"""Data that has no fingerprint is cached for the run at hand: nothing of it is ever found by another one."""

from __future__ import annotations

import json
import os
import random
import signal
import warnings
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest
from torch.utils.data import DataLoader, Dataset

from castore import Store, UnhashableError
from castore.adapters.torch import BiLevelCachedDataset, CachedDataset, LazyShardDataset
from tests.helpers import LONG
from tests.warm import WarmPython


class Drawn(Dataset[int]):
    """Has a random generator, as MONAI's Compose and boto3's retries have, and counts its reads in a file."""

    def __init__(self, log: Path, offset: int = 0, length: int = 30) -> None:
        self.log = log
        self.offset = offset
        self.length = length
        self.deep = {"retries": [random.Random()]}

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        with open(self.log, "a") as file:
            file.write(f"{index}\n")
        return index + self.offset

    def reads(self) -> list[int]:
        return sorted(map(int, self.log.read_text().split())) if self.log.exists() else []


@pytest.fixture
def drawn(tmp_path: Path) -> Drawn:
    return Drawn(tmp_path / "log")


def levels(kind: str, data: Any, folder: Path, **options: Any) -> Any:
    """Either wrapper, with the warning that it must give, once."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if kind == "bilevel":
            cached: Any = BiLevelCachedDataset(data, "1MB", "10MB", folder, **options)
        else:
            cached = LazyShardDataset(
                data, memory_size="1MB", disk_size="10MB", disk_cache_path=folder, **options
            )
    (told,) = caught
    text = str(told.message)
    assert "for this run only" in text
    assert "dataset.deep['retries'][0]: is a random generator, random.Random" in text
    assert "key=..." in text
    assert told.filename == __file__
    return cached


@pytest.mark.parametrize("kind", ["bilevel", "lazy"])
def test_data_that_cannot_be_hashed_is_cached_for_this_run(kind: str, drawn: Drawn, tmp_path: Path) -> None:
    for run in (1, 2):  # the second run finds nothing of the first
        cached = levels(kind, drawn, tmp_path / "cache", write_through=True)
        for _ in range(2):
            assert sorted(cached) == list(range(30))
        assert drawn.reads() == sorted(list(range(30)) * run)
        cached.close()
        with Store(tmp_path / "cache") as store:
            assert list(store.entries()) == []


def test_workers_share_the_level_of_this_run(drawn: Drawn, tmp_path: Path) -> None:
    with levels("bilevel", drawn, tmp_path / "cache", write_through=True) as cached:
        # Each epoch has workers of its own. A spawned one imports torch for a second, and gets its dataset as
        # one of a fork server does.
        for start, workers in (("fork", 2), ("forkserver", 1), *[("spawn", 1)] * LONG):
            loader: DataLoader[Any] = DataLoader(
                cached, batch_size=5, num_workers=workers, multiprocessing_context=start
            )
            assert sorted(int(n) for batch in loader for n in batch) == list(range(30))
        assert drawn.reads() == list(range(30))


_RUN = """
import os, signal, sys, time, warnings, pathlib
warnings.simplefilter("ignore")
from tests.adapters.torch.test_unhashable import Drawn
from castore.adapters.torch import BiLevelCachedDataset, LazyShardDataset
folder, offset, way = pathlib.Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
data = Drawn(folder / f"log{offset}", offset)
def meet():
    (folder / f"rank-{offset}").touch()
    while len(list(folder.glob("rank-*"))) < 2:  # a job's ranks do not end before the others begin
        time.sleep(0.01)
if way == "rooms":
    sizes = {"memory_size": 0.001, "disk_size": 0.001, "overflow": 0.5}
    cached = LazyShardDataset(data, **sizes, disk_cache_path=folder / "cache")
    meet()
    print(cached.cache._capacity, sorted(cached))
else:
    name = None if way == "ranks" else "the-name-of-" + folder.name
    cached = BiLevelCachedDataset(data, "1MB", "10MB", folder / "cache", write_through=True, name=name)
    if way == "ranks":
        meet()
    for _ in range(2):
        found = list(cached)
    print(found)
    if way == "killed":
        sys.stdout.flush()
        os.kill(os.getpid(), signal.SIGKILL)
cached.close()
"""


def test_samples_of_a_killed_run_are_never_another_runs(tmp_path: Path, warm_torch: WarmPython) -> None:
    killed = warm_torch.run(["-c", _RUN, tmp_path, "1000", "killed"], cwd=tmp_path, text=True)
    assert json.loads(killed.stdout) == list(range(1000, 1030))
    assert killed.returncode == -signal.SIGKILL
    told = warm_torch.output(["-c", _RUN, tmp_path, "2000", "named"], cwd=tmp_path)
    assert json.loads(told) == list(range(2000, 2030))


def ranks_of_a_node(warm_torch: WarmPython, folder: Path, way: str) -> list[str]:
    job = {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(os.getpid()),
    }
    both = [
        warm_torch.start(
            ["-c", _RUN, folder, str(1000 * rank), way], cwd=folder, stdout=PIPE, stderr=PIPE, text=True,
            env=os.environ | job | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(2)
    ]  # fmt: skip
    ends = [rank.communicate(timeout=200) for rank in both]
    assert [rank.returncode for rank in both] == [0, 0], ends
    return [told for told, _ in ends]


def test_ranks_whose_data_may_differ_get_their_own_samples(tmp_path: Path, warm_torch: WarmPython) -> None:
    """Rank 1's dataset has other samples at the same places, and nothing can tell."""
    first, second = map(json.loads, ranks_of_a_node(warm_torch, tmp_path, "ranks"))
    assert first == list(range(30))
    assert second == list(range(1000, 1030))


def test_ranks_that_share_nothing_still_cut_their_shards_alike(
    tmp_path: Path, warm_torch: WarmPython
) -> None:
    told = [line.partition(" ") for line in ranks_of_a_node(warm_torch, tmp_path, "rooms")]
    assert told[0][0] == told[1][0]
    seen = [sample % 1000 for _, _, text in told for sample in json.loads(text)]
    assert sorted(seen) == list(range(30))


def test_cached_dataset_goes_on_asking_for_a_key(drawn: Drawn, tmp_path: Path) -> None:
    with pytest.raises(UnhashableError, match=r"retries.*is a random generator.*key="):
        CachedDataset(drawn, tmp_path / "cache")
    with CachedDataset(drawn, tmp_path / "cache", key="drawn") as cached:
        assert cached[3] == 3


def test_data_that_refuses_to_be_cached_is_no_matter_of_this_run(drawn: Drawn, tmp_path: Path) -> None:
    shard = levels("lazy", drawn, tmp_path / "cache")
    with pytest.raises(UnhashableError, match="change places every epoch"):
        BiLevelCachedDataset(shard, "1MB", "10MB", tmp_path / "other")
    shard.close()
