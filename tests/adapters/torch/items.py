"""An iterable dataset of numbers, sharded by worker, with a state and an order for each epoch; and a slow
function of its items. Apart from the tests: spawned workers import this.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info


class Items(IterableDataset[dict[str, Any]]):
    """Numbers, each worker its own."""

    name = "items"

    def __init__(self, count: int) -> None:
        self.count = count
        self.epoch = 0
        self.done = 0
        self.begin = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the order."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[dict[str, Any]]:
        numbers = list(range(self.count))
        random.Random(self.epoch).shuffle(numbers)
        worker = get_worker_info()
        own = numbers if worker is None else numbers[worker.id :: worker.num_workers]
        self.done, self.begin = self.begin, 0
        for number in own[self.done :]:
            self.done += 1
            yield {"number": number, "text": f"item {number}"}

    def state_dict(self) -> dict[str, int]:
        """Items that this worker has given out."""
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on there."""
        self.begin = state["done"]


class Plain(IterableDataset[int]):
    """Numbers, without a state."""

    def __iter__(self) -> Iterator[int]:
        yield from range(5)


class Makes:
    """Makes a sample, and notes that in a file."""

    def __init__(self, log: Path) -> None:
        self.log = str(log)

    def __castore_key__(self) -> object:
        return "Makes"  # the log changes

    def __call__(self, item: dict[str, Any]) -> dict[str, Any]:
        with open(self.log, "a") as file:
            file.write(f"{item['number']}\n")
        return {"x": torch.full((3,), item["number"], dtype=torch.int16), "text": item["text"]}

    @property
    def made(self) -> list[int]:
        """Items whose samples were made so far."""
        return sorted(map(int, Path(self.log).read_text().split())) if Path(self.log).exists() else []
