"""Nodes that share a remote read each sample from its source once."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from castore import Store
from castore.adapters.torch import (
    BiLevelCachedDataset,
    CachedDataset,
    CachedIterableDataset,
    LazyShardDataset,
)
from castore.remote.folder_bucket import FolderBucket
from castore.remote.keys import result_key
from tests.mount.conftest import until
from tests.remote.nodes import several_nodes

SAMPLES = 100


class Source(Dataset[Any]):
    """Notes each sample that is read from it."""

    def __init__(self, log: Path, size: int = 3) -> None:
        self.log, self.size = str(log), size

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        with open(self.log, "a") as file:
            file.write(f"{index}\n")
        return {"x": torch.full((self.size,), index), "name": f"sample {index}"}

    def __castore_key__(self) -> object:
        return ["source", self.size]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Has the stores `node0` to `node2` of three nodes, and the remote."""
    with several_nodes(tmp_path, 3):
        yield tmp_path


def read(folder: Path) -> list[int]:
    log = folder / "log"
    return [int(line) for line in log.read_text().split()] if log.exists() else []


def simple(folder: Path, node: str, source: Source) -> CachedDataset:
    return CachedDataset(source, Store(folder / node, remote="team"))


def two_levels(folder: Path, node: str, source: Source) -> BiLevelCachedDataset:
    return BiLevelCachedDataset(source, "4MB", "100MB", folder / node, remote="team")


def on_disk(folder: Path, node: str, source: Source) -> BiLevelCachedDataset:
    return BiLevelCachedDataset(source, 0, "100MB", folder / node, remote="team")


KINDS = [simple, two_levels, pytest.param(on_disk, marks=pytest.mark.matrix)]
Make = Callable[[Path, str, Source], Any]


def close(cached: Any) -> None:
    """Wait until all that was read is offered."""
    if isinstance(cached, CachedDataset):
        cached.store.close()
    cached.close()


@pytest.mark.parametrize("size", [3, 30_000], ids=["small", "large"])
@pytest.mark.parametrize("make", KINDS)
def test_a_cold_node_reads_no_sample_from_its_source(folder: Path, make: Make, size: int) -> None:
    source = Source(folder / "log", size)
    count = 20 if size > 1000 else SAMPLES
    first = make(folder, "node0", source)
    assert [first[index]["name"] for index in range(count)] == [f"sample {index}" for index in range(count)]
    close(first)
    assert sorted(read(folder)) == list(range(count))
    second = make(folder, "node1", source)
    found = [second[0], *second.__getitems__(list(range(1, count)))]
    for index, sample in enumerate(found):
        assert torch.equal(sample["x"], torch.full((size,), index))
        assert sample["name"] == f"sample {index}"
    assert (second.hits, second.misses) == (count, 0)
    assert second.__getitems__([3, 3, 4])[1]["name"] == "sample 3"
    assert len(read(folder)) == count
    close(second)


@pytest.mark.parametrize("make", KINDS)
def test_workers_and_fill_ask_the_remote_first(folder: Path, make: Make) -> None:
    source = Source(folder / "log")
    first = make(folder, "node0", source)
    assert first.fill(num_workers=2, progress=False) == SAMPLES
    close(first)
    # The workers have ended with offers under way: the fetcher goes on with them.
    bucket = FolderBucket(folder / "bucket")
    name_of = first.name_of if isinstance(first, CachedDataset) else first._levels.name_of
    until(lambda: all(bucket.size(result_key(name_of(index))) is not None for index in range(SAMPLES)))
    second, third = make(folder, "node1", source), make(folder, "node2", source)
    assert second.fill(num_workers=2, progress=False) == SAMPLES
    loader = DataLoader(third, batch_size=16, shuffle=True, num_workers=2)
    assert sorted(name for batch in loader for name in batch["name"]) == sorted(
        f"sample {index}" for index in range(SAMPLES)
    )
    assert third.misses == 0
    assert sorted(read(folder)) == list(range(SAMPLES))
    close(second)
    close(third)


@pytest.mark.parametrize("mode", ["node", "disk", "rank"])
def test_shards_of_several_nodes_read_each_sample_once(
    folder: Path, mode: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Source(folder / "log")
    for seed in (1, 2):  # another seed gives the nodes other shards
        seen: list[str] = []
        for node in range(2):
            place = {"RANK": f"{node}", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
            for name, value in place.items():
                monkeypatch.setenv(name, value)
            shard = LazyShardDataset(
                source,
                disk_size="100MB",
                memory_size="4MB",
                mode=mode,
                disk_cache_path=folder / f"node{node}",
                seed=seed,
                remote="team",
            )
            sampler: DistributedSampler[Any] = DistributedSampler(shard, 1, 0, shuffle=False)
            seen += [name for batch in DataLoader(shard, 8, sampler=sampler) for name in batch["name"]]
            shard.close()
        assert sorted(seen) == sorted(f"sample {index}" for index in range(SAMPLES))
        assert sorted(read(folder)) == list(range(SAMPLES))


@pytest.mark.parametrize("make", KINDS)
def test_damaged_records_are_read_from_the_source(folder: Path, make: Make) -> None:
    source = Source(folder / "log")
    first = make(folder, "node0", source)
    first.__getitems__([0, 1, 2])
    close(first)
    keys = sorted(path for path in (folder / "bucket" / "keys").rglob("*") if path.is_file())
    data = bytearray(keys[0].read_bytes())
    data[-1] ^= 1
    keys[0].write_bytes(data)
    second = make(folder, "node1", source)
    assert [sample["name"] for sample in second.__getitems__([0, 1, 2])] == [
        "sample 0",
        "sample 1",
        "sample 2",
    ]
    assert len(read(folder)) == 4
    close(second)


@pytest.mark.parametrize("make", KINDS)
def test_a_remote_that_is_gone_costs_no_sample(folder: Path, make: Make) -> None:
    (folder / "bucket").rename(folder / "elsewhere")
    source = Source(folder / "log")
    cached = make(folder, "node0", source)
    assert len(cached.__getitems__(list(range(SAMPLES)))) == SAMPLES
    assert sorted(read(folder)) == list(range(SAMPLES))
    close(cached)


def test_items_of_a_stream_are_transformed_once(folder: Path) -> None:
    def note(item: int) -> dict[str, Any]:
        with open(folder / "log", "a") as file:
            file.write(f"{item}\n")
        return {"square": item**2}

    for node in ("node0", "node1"):
        with Store(folder / node, remote="team") as store:
            cached = CachedIterableDataset(range(50), note, store, key="squares")
            assert [sample["square"] for sample in cached] == [number**2 for number in range(50)]
    assert sorted(read(folder)) == list(range(50))


def test_samples_of_one_run_are_not_shared(folder: Path) -> None:
    source = Source(folder / "log")
    for node in ("node0", "node1"):
        with BiLevelCachedDataset(source, "4MB", "9MB", folder / node, remote="team", keep=False) as cached:
            cached.__getitems__([1, 2])
    assert sorted(read(folder)) == [1, 1, 2, 2]
    assert not os.path.exists(folder / "bucket" / "keys")
