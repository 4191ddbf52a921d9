"""Nodes that share results over a remote encode each item once, and have the same embeddings."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from castore import Store
from castore.adapters.embeddings import (
    CacheConfig,
    EmbeddingCache,
    cache_embeddings,
    shared_blocks,
    table_fill,
)
from castore.remote.folder_bucket import FolderBucket
from tests.helpers import in_processes
from tests.mount.conftest import until
from tests.remote.nodes import several_nodes

ITEMS = 1000
#: Outputs of every kind, for a list of numbers.
OUTPUTS: dict[str, Callable[[list[int]], Any]] = {
    "tensor": lambda items: torch.tensor(items).float()[:, None].repeat(1, 3),
    "bfloat16": lambda items: torch.tensor(items).bfloat16()[:, None],
    "array": lambda items: torch.tensor(items)[:, None].numpy(),
    "ragged": lambda items: [torch.full((item % 4, 2), item) for item in items],
    "text": lambda items: [f"item {item}" * (item % 3) for item in items],
    "numbers": lambda items: [item / 2 for item in items],
    "dict": lambda items: {"a": torch.tensor(items), "b": (torch.ones(len(items), 2), None)},
}


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Has the stores `node0` to `node3` of four nodes, and the remote."""
    with several_nodes(tmp_path):
        yield tmp_path


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return type(one) is type(other) and bool((one == other).all() if hasattr(one, "all") else one == other)


def travelling(store: Store) -> list[str]:
    """Names of blocks that have not arrived yet, or were not removed when they had."""
    return [entry.name for entry in store.entries(shared_blocks.BLOCKS_FOLDER)]


def refuse(items: list[Any]) -> Any:
    raise AssertionError(f"{len(items)} items are encoded again")


# --- a cache by itself ----------------------------------------------------------------------------


def test_a_cold_node_has_outputs_of_every_kind_and_encodes_none(folder: Path) -> None:
    with Store(folder / "node0", remote="team") as store:
        for kind, encode in OUTPUTS.items():
            assert EmbeddingCache(kind, store).fill(range(ITEMS), range(ITEMS), encode) == ITEMS
    assert travelling(store) == []
    with Store(folder / "node1", remote="team") as store:
        for kind, encode in OUTPUTS.items():
            cache = EmbeddingCache(kind, store)
            assert cache.fill(range(ITEMS), range(ITEMS), refuse) == 0, kind
            assert len(cache) == ITEMS
            for start in range(0, ITEMS, 50):
                asked = list(range(start, start + 50))
                assert same(cache.get(asked), encode(asked)), kind
        assert travelling(store) == []


def test_keys_of_every_kind_and_twice_in_a_block_are_shared(folder: Path) -> None:
    keys = [
        key for number in range(300) for key in (number, f"{number}", b"%d" % number, (number, "a"), number)
    ]
    encode = OUTPUTS["tensor"]
    with Store(folder / "node0", remote="team") as store:
        assert EmbeddingCache("items", store).fill(keys, range(len(keys)), encode) == 1200
    with Store(folder / "node1", remote="team") as store:
        cache = EmbeddingCache("items", store)
        assert cache.fill(keys, range(len(keys)), refuse) == 0
        with Store(folder / "node0") as first:
            assert same(cache.get(keys), EmbeddingCache("items", first).get(keys))


def test_a_node_that_knows_some_items_encodes_the_others_for_all(folder: Path) -> None:
    encode = OUTPUTS["ragged"]
    with Store(folder / "node0") as store:
        EmbeddingCache("items", store).fill(range(0, ITEMS, 3), range(0, ITEMS, 3), encode)
    with Store(folder / "node0", remote="team") as store:
        count = EmbeddingCache("items", store).fill(range(ITEMS), range(ITEMS), encode)
        assert count == ITEMS - len(range(0, ITEMS, 3))
    with Store(folder / "node1") as store:
        EmbeddingCache("items", store).fill(range(0, ITEMS, 5), range(0, ITEMS, 5), encode)
    with Store(folder / "node1", remote="team") as store:
        cache = EmbeddingCache("items", store)
        assert cache.fill(range(ITEMS), range(ITEMS), refuse) == 0
        assert len(cache) == ITEMS
        assert same(cache.get(range(ITEMS)), encode(list(range(ITEMS))))


def test_caches_of_another_dtype_or_name_share_nothing(folder: Path) -> None:
    encode = OUTPUTS["tensor"]
    with Store(folder / "node0", remote="team") as store:
        EmbeddingCache("items", store).fill(range(100), range(100), encode)
    with Store(folder / "node1", remote="team") as store:
        narrow = EmbeddingCache("items", store, dtype=torch.float16)
        assert narrow.fill(range(100), range(100), encode) == 100
        assert EmbeddingCache("others", store).fill(range(100), range(100), encode) == 100


def test_more_keys_than_items_are_refused_as_without_a_remote(folder: Path) -> None:
    with Store(folder / "node0", remote="team") as store:
        cache = EmbeddingCache("items", store)
        with pytest.raises(ValueError, match="as many items as keys"):
            cache.fill(range(100), range(99), OUTPUTS["tensor"])


def spoil_keys(packed: dict[str, Any]) -> dict[str, Any]:
    return packed | {"keys": packed["keys"].float()}


def spoil_rows(packed: dict[str, Any]) -> dict[str, Any]:
    [[values, lengths]] = packed["leaves"]
    return packed | {"leaves": [[values[1:], lengths]]}


def spoil_shape(packed: dict[str, Any]) -> dict[str, Any]:
    return packed | {"schema": packed["schema"].replace("[3]", "[4]")}


def spoil_schema(packed: dict[str, Any]) -> dict[str, Any]:
    return packed | {"schema": "{}"}


def spoil_types(packed: dict[str, Any]) -> dict[str, Any]:
    return packed | {"keys": [1, 2, 3]}


def leave_out_rows(packed: dict[str, Any]) -> dict[str, Any]:
    [[values, lengths]] = packed["leaves"]
    return packed | {"keys": packed["keys"][1:], "leaves": [[values[1:], lengths]]}


_SPOIL = (spoil_keys, spoil_rows, spoil_shape, spoil_schema, spoil_types, leave_out_rows)


def test_a_block_that_is_none_is_encoded_again_and_replaced(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack, encode = shared_blocks._pack, OUTPUTS["tensor"]
    with monkeypatch.context() as patch, Store(folder / "node0", remote="team") as store:
        for spoil in _SPOIL:
            patch.setattr(shared_blocks, "_pack", lambda rows, spoil=spoil: spoil(pack(rows)))
            EmbeddingCache(spoil.__name__, store).fill(range(10), range(10), encode)
    for node in ("node1", "node2"):
        with Store(folder / node, remote="team") as store:
            for spoil in _SPOIL:
                cache = EmbeddingCache(spoil.__name__, store)
                encoded = cache.fill(range(10), range(10), encode if node == "node1" else refuse)
                assert (encoded > 0) == (node == "node1"), spoil
                assert same(cache.get(range(10)), encode(list(range(10)))), spoil


@pytest.mark.parametrize("node", ["node0", "node1"])
def test_a_table_takes_no_more_space_than_without_a_remote(
    folder: Path, node: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_fill, "PUT_SECONDS", math.inf)  # shards are put for their size alone

    def encode(items: list[int]) -> torch.Tensor:  # a page has a part of a row, so a shard begins with a gap
        return torch.tensor(items)[:, None].repeat(1, 300).float()

    with Store(folder / "node0", remote="team") as store:
        EmbeddingCache("items", store).fill(range(ITEMS), range(ITEMS), encode)
    with Store(folder / node, remote="team") as store:
        EmbeddingCache("items", store).fill(range(ITEMS), range(ITEMS), encode)
        shards = [entry.size for entry in store.entries("embeddings/items/output")]
    with Store(folder / "node3") as store:
        EmbeddingCache("items", store).fill(range(ITEMS), range(ITEMS), encode)
        assert [entry.size for entry in store.entries("embeddings/items/output")] == shards


def test_a_remote_that_is_gone_ends_no_fill(folder: Path) -> None:
    (folder / "bucket").rename(folder / "elsewhere")
    with Store(folder / "node0", remote="team") as store:
        cache = EmbeddingCache("items", store)
        assert cache.fill(range(ITEMS), range(ITEMS), OUTPUTS["tensor"]) == ITEMS
        assert len(cache) == ITEMS
        assert travelling(store) == []


def test_a_remote_that_is_only_read_gets_nothing(folder: Path) -> None:
    with Store(folder / "node0") as store:
        store.remove_remote("team")
        store.add_remote("team", (folder / "bucket").as_uri(), read_only=True)
    with Store(folder / "node0", remote="team") as store:
        assert EmbeddingCache("items", store).fill(range(100), range(100), OUTPUTS["tensor"]) == 100
        assert travelling(store) == []
    with Store(folder / "node1", remote="team") as store:
        assert EmbeddingCache("items", store).fill(range(100), range(100), OUTPUTS["tensor"]) == 100
    with Store(folder / "node2") as store:
        store.remove_remote("team")
        store.add_remote("team", (folder / "bucket").as_uri(), read_only=True)
    with Store(folder / "node2", remote="team") as store:
        assert EmbeddingCache("items", store).fill(range(100), range(100), refuse) == 0
        assert travelling(store) == []


def test_a_store_without_room_for_blocks_shares_none_and_keeps_its_rows(folder: Path) -> None:
    def encode(items: list[int]) -> torch.Tensor:
        return torch.rand(len(items), 500, generator=torch.Generator().manual_seed(items[0]))

    with Store(folder / "node0", remote="team", max_size="3MB") as store:
        cache = EmbeddingCache("items", store)
        assert cache.fill(range(ITEMS), range(ITEMS), encode) == ITEMS
        assert len(cache) == ITEMS
        assert cache.fill(range(ITEMS), range(ITEMS), refuse) == 0


# --- a model's encoders ---------------------------------------------------------------------------


class Encoder(nn.Module):
    """Counts its items in a file, if it is told one."""

    seconds = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if log := os.environ.get("CASTORE_TEST_LOG"):
            import time

            with open(log, "a") as file:
                file.write("".join(f"{int(row[0])}\n" for row in x))
            time.sleep(len(x) * float(os.environ["CASTORE_TEST_SECONDS"]))
        return torch.tanh(self.layer(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = Encoder().requires_grad_(False)
        self.head = nn.Linear(8, 2)

    def forward(self, x: Any) -> Any:
        return self.head(self.encoder(x))


def samples() -> TensorDataset:
    x = torch.arange(ITEMS).float()[:, None].repeat(1, 4)
    return TensorDataset(x, torch.arange(ITEMS) % 7)


def cache_all(store: Store, dataset: Dataset[Any] | None = None, **options: Any) -> list[Any]:
    """The outputs of the head, and the labels, of one pass over the cached loader."""
    model = Model()
    loader = DataLoader(samples() if dataset is None else dataset, batch_size=50)
    cached, _ = cache_embeddings(model, loader, config=CacheConfig(**options), store=store, progress=False)
    return [(model(x), labels) for x, labels in cached]


@pytest.fixture
def log(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[int]]:
    monkeypatch.setenv("CASTORE_TEST_LOG", str(folder / "log"))
    monkeypatch.setenv("CASTORE_TEST_SECONDS", "0")
    (folder / "log").touch()
    return lambda: [int(line) for line in (folder / "log").read_text().split()]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_cold_node_encodes_no_sample_and_reads_none_twice(
    folder: Path, log: Callable[[], list[int]], num_workers: int
) -> None:
    with Store(folder / "node0", remote="team") as store:
        first = cache_all(store, num_workers=num_workers)
    count = len(log())  # a few samples are tried first, to learn how outputs look
    assert sorted(set(log())) == list(range(ITEMS))
    assert count < ITEMS * 1.2
    with Store(folder / "node1", remote="team") as store:
        assert same(cache_all(store, num_workers=num_workers), first)
    with Store(folder / "node2") as store:
        assert same(cache_all(store), first)


def by_value(sample: Any) -> str:
    return f"{int(sample[0])}"


def test_extracted_keys_and_labels_are_shared(folder: Path, log: Callable[[], list[int]]) -> None:
    x = (torch.arange(ITEMS) % 300).float()[:, None].repeat(1, 4)
    dataset = TensorDataset(x, torch.arange(ITEMS))
    with Store(folder / "node0", remote="team") as store:
        first = cache_all(store, dataset, key_extractors=by_value)
    assert len(set(log())) == 300
    assert len(log()) < 400
    before = len(log())
    with Store(folder / "node1", remote="team") as store:
        assert same(cache_all(store, dataset, key_extractors=by_value), first)
    assert len(log()) == before


def test_nodes_that_fill_at_once_divide_the_items(
    folder: Path, log: Callable[[], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CASTORE_TEST_SECONDS", "0.004")

    def run(number: int) -> list[Any]:
        os.environ |= {"RANK": str(number), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
        with Store(folder / f"node{number}", remote="team") as store:
            return [(y.tolist(), labels.tolist()) for y, labels in cache_all(store)]

    first, second = in_processes(2, run, timeout=300)
    assert first == second
    assert set(log()) == set(range(ITEMS))
    # A block may be encoded by both where a claim comes a moment too late.
    assert len(log()) < ITEMS * 1.4


def test_the_blocks_of_a_killed_node_are_encoded_by_another(
    folder: Path, log: Callable[[], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CASTORE_TEST_SECONDS", "0.004")
    child = os.fork()
    if not child:
        with Store(folder / "node0", remote="team") as store:
            cache_all(store)
        os._exit(0)
    until(lambda: len(log()) > ITEMS / 2)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with Store(folder / "node1", remote="team") as store:
        found = cache_all(store)
    assert len(log()) < ITEMS * 1.4
    with Store(folder / "node2") as store:
        assert same(cache_all(store), found)
    until(lambda: not list(FolderBucket(folder / "bucket").listing("claims/")))
