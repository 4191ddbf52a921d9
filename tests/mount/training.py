"""A program that trains on a folder: `python -m tests.mount.training FOLDER CASE`, in a process of its own.

It needs one because a DataLoader forks: in the test's process it would fork the threads of other loaders too.
The program prints `good` when every sample that the workers read is the expected one.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import sys
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset


class Folder(Dataset[tuple[int, str]]):
    """Every file below some folders: its number and the digest of its bytes. Pickles as a path."""

    def __init__(self, *folders: Path) -> None:
        self.paths = [path for folder in folders for path in sorted(folder.rglob("*")) if path.is_file()]

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[int, str]:
        return index, hashlib.sha256(self.paths[index].read_bytes()).hexdigest()


class Tokens(Dataset[torch.Tensor]):
    """Windows of a memory-mapped array, which every worker maps for itself."""

    def __init__(self, path: Path, window: int) -> None:
        self.path, self.window = path, window
        self._count = len(np.load(path, mmap_mode="r")) // window
        self._tokens: np.ndarray | None = None

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> torch.Tensor:
        if self._tokens is None:
            self._tokens = np.load(self.path, mmap_mode="r")
        part = self._tokens[index * self.window : (index + 1) * self.window]
        return torch.from_numpy(np.array(part, dtype=np.int64))


def methods(folder: Path) -> None:
    """Every sample arrives whole with no worker, and with two under each start method but spawn.

    A spawned worker imports torch itself, so there is one.
    """
    multiprocessing.set_forkserver_preload(["torch.utils.data"])
    plain, mounted = folder, [*map(Path, sys.argv[3:])]
    source = Folder(plain)
    digests_of_one = [source[index][1] for index in range(len(source))]
    want = [*enumerate(digests_of_one * len(mounted))]
    assert want
    for method in (None, "fork", "forkserver", "spawn"):
        loader: DataLoader[tuple[int, str]] = DataLoader(
            Folder(*mounted),
            batch_size=16,
            num_workers={None: 0, "spawn": 1}.get(method, 2),
            multiprocessing_context=multiprocessing.get_context(method) if method else None,
        )
        numbers, digests = [], []
        for index, digest in loader:
            numbers += index.tolist()
            digests += digest
        assert list(zip(numbers, digests, strict=True)) == want, method


def epochs(path: Path) -> None:
    """Epochs of two workers that keep their map.

    One epoch prints `ready` in its middle and waits for a line.
    """
    loader = DataLoader(
        Tokens(path, 1000), batch_size=8, num_workers=2, shuffle=True, persistent_workers=True
    )
    sums = []
    for epoch in range(3):
        total = 0
        for number, batch in enumerate(loader):
            total += int(batch.sum())
            if (epoch, number) == (1, 5):
                print("ready", flush=True)
                assert sys.stdin.readline() == "go on\n"
        sums.append(total)
    assert len(set(sums)) == 1, sums
    print(sums[0], flush=True)


if __name__ == "__main__":
    {"methods": methods, "epochs": epochs}[sys.argv[2]](Path(sys.argv[1]))
    print("good", flush=True)
