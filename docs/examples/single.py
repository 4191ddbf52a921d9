"""One process: pictures that are slow to read are cached in RAM and on disk, and the second epoch is fast.

    python docs/examples/single.py --cache /nvme/pictures

Run it twice: the second run finds on disk what the first one kept.
"""

from __future__ import annotations

import argparse
import time

import torch
from torch.utils.data import DataLoader, Dataset

from castore.adapters.torch import BiLevelCachedDataset


class Pictures(Dataset[tuple[torch.Tensor, int]]):
    """Stands for files on a far file system: every sample takes 2 ms, wherever it is read."""

    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        time.sleep(0.002)
        generator = torch.Generator().manual_seed(index)
        return torch.randint(256, (3, 32, 32), dtype=torch.uint8, generator=generator), index % 10


class Flipped(Dataset[tuple[torch.Tensor, int]]):
    """What differs from epoch to epoch comes after the cache."""

    def __init__(self, cached: BiLevelCachedDataset) -> None:
        self.cached = cached

    def __len__(self) -> int:
        return len(self.cached)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        picture, label = self.cached[index]
        return picture.flip(-1) if torch.rand(()) < 0.5 else picture, label


def main() -> None:
    """Three epochs, with what was found where."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cache", default="./castore-pictures", help="a folder on a local disk")
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    # Half of the pictures fit into RAM, the others go to disk; write_through keeps all for the next run.
    cached = BiLevelCachedDataset(Pictures(), "650KB", "100MB", args.cache, write_through=True)
    loader = DataLoader(
        Flipped(cached),
        batch_size=32,
        shuffle=True,
        num_workers=args.workers,
        persistent_workers=args.workers > 0,
    )
    for epoch in range(3):
        before, start = cached.stats(), time.perf_counter()
        for _pictures, _labels in loader:
            pass  # a step of training
        after = cached.stats()
        print(
            f"epoch {epoch}: {time.perf_counter() - start:.2f} s;",
            f"{after.memory.hits - before.memory.hits} samples from RAM,",
            f"{after.disk.hits - before.disk.hits} from disk, {after.reads - before.reads} read",
        )


# The loader may start its workers by importing this file.
if __name__ == "__main__":
    main()
