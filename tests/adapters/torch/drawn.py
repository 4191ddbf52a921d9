"""Datasets that tell how often they were read. Apart from the tests: spawned workers import this, and
little else.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from castore.adapters.torch import SharedCache


class Drawn(Dataset[dict[str, Any]]):
    """Samples made from their index, each read noted in a file that all processes append to."""

    classes = ("even", "odd")

    def __init__(self, length: int, log: Path) -> None:
        self.length = length
        self.log = str(log)

    def __castore_key__(self) -> object:
        return self.length  # the log changes

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < self.length:
            raise IndexError(index)
        with open(self.log, "a") as file:
            file.write(f"{index}\n")
        return {"x": torch.full((2, 3), index, dtype=torch.int16), "y": index, "name": f"sample {index}"}

    @property
    def reads(self) -> list[int]:
        """Which samples were read so far."""
        return sorted(map(int, Path(self.log).read_text().split())) if Path(self.log).exists() else []


class Batched(Drawn):
    """Notes each batch too."""

    def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
        with open(f"{self.log}.batches", "a") as file:
            file.write(f"{indices}\n")
        return [self[index] for index in indices]


class Shared(Dataset[dict[str, Any]]):
    """The same samples through a SharedCache of their tensors, as its page shows it."""

    def __init__(self, data: Drawn) -> None:
        self.data = data
        self.cache = SharedCache("1MB", len(data), (2, 3), torch.int16)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> dict[str, Any]:
        tensor = self.cache.get_slot(index)
        if tensor is None:
            tensor = self.data[index]["x"]
            self.cache.set_slot(index, tensor)
        return {"x": tensor, "y": index, "name": f"sample {index}"}

    def close(self) -> None:
        self.cache.close()


class Holder(Dataset[int]):
    """A dataset that has a cache."""

    def __init__(self, cache: SharedCache) -> None:
        self.cache = cache

    def __len__(self) -> int:
        return len(self.cache)

    def __getitem__(self, index: int) -> int:
        return index
