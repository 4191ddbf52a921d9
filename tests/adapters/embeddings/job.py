"""A training run for the tests of ranks and kills: python job.py FOLDER [SECONDS_AN_ITEM]. The run logs each
item that it encodes.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from castore.adapters.embeddings import CacheConfig, cache_embeddings, table_fill

ITEMS = 120


def wait_for_all(folder: Path) -> None:
    """A barrier of files: every rank has something to encode."""
    (folder / f"begun-{os.environ.get('RANK', '0')}").touch()
    deadline = time.monotonic() + 240
    while len(list(folder.glob("begun-*"))) < int(os.environ.get("WORLD_SIZE", "1")):
        if time.monotonic() > deadline:
            raise TimeoutError("some ranks got nothing to encode")
        time.sleep(0.01)


class Slow(nn.Module):
    """Encodes a number by its square, slowly."""

    def __init__(self, folder: str, seconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1), requires_grad=False)
        self._notes = (folder, seconds)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        folder, seconds = self._notes
        wait_for_all(Path(folder))
        time.sleep(seconds * len(x))
        with (Path(folder) / f"encoded-{os.getpid()}").open("a") as notes:
            notes.write("".join(f"{int(item)}\n" for item in x[:, 0]))
        return x * x * self.weight


def main(folder: str, seconds: str = "0") -> None:
    table_fill.PUT_SECONDS = 0.2  # a kill loses a small part of a short run
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    dataset = TensorDataset(torch.arange(ITEMS).float().unsqueeze(1), torch.arange(ITEMS))
    sampler: Any = DistributedSampler(dataset, world, rank, shuffle=True)
    model = nn.Sequential(Slow(folder, float(seconds)), nn.Linear(1, 1))
    config = CacheConfig(batch_size=8, save_dir=Path(folder) / "store", fingerprints={"0": "squares"})
    loader, _ = cache_embeddings(model, DataLoader(dataset, batch_size=10, sampler=sampler), config=config)
    seen = []
    for keys, labels in loader:
        assert torch.equal(model[0](keys).flatten(), labels.float() ** 2)
        seen += labels.tolist()
    (Path(folder) / f"seen-{rank}").write_text("\n".join(map(str, seen)))


if __name__ == "__main__":
    main(*sys.argv[1:])
