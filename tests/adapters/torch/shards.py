"""Parts that the tests of lazy shards share: samples that contain their index, and the places in a job."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
from torch.utils.data import Dataset

from castore.adapters.torch.lazy import LazyShardDataset

# A sample of Numbers(n, 250) takes 1000 bytes and a header.
WIDE = 250

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


def indices_of(dataset: LazyShardDataset) -> list[int]:
    """The indices that the samples themselves contain."""
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
        "MASTER_PORT": os.getpid(),  # nobody listens there: it tells the jobs of two test runs apart
    }
    for name, value in told.items():
        monkeypatch.setenv(name, str(value))
