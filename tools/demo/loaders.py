"""The loaders of the demo, each as its own documentation shows it. None of them knows of castore.

Each loader takes the folder of the files, and returns the number of items and a digest of all items in order.
Plain files and mount must give the same.
"""

from __future__ import annotations

import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from blake3 import blake3

from tools.demo.sources import files_below

Seen = tuple[int, str]
WINDOW = 2048


def every_file(root: Path) -> Seen:
    """Map every file into memory and hash it."""
    digest, paths = blake3(), files_below(root)
    for path in paths:
        digest.update(path.relative_to(root).as_posix().encode()).update_mmap(path)
    return len(paths), digest.hexdigest()


def with_tarfile(root: Path) -> Seen:
    digest, count = blake3(), 0
    for shard in files_below(root / "shards"):
        with tarfile.open(shard) as tar:
            for member in tar:
                content = tar.extractfile(member)
                assert content is not None, f"{member.name} is a file"
                digest.update(member.name.encode()).update(content.read())
                count += 1
    return count, digest.hexdigest()


def with_webdataset(root: Path) -> Seen:
    import webdataset

    digest, count = blake3(), 0
    shards = [str(shard) for shard in files_below(root / "shards")]
    for sample in webdataset.WebDataset(shards, shardshuffle=False):
        digest.update(sample["__key__"].encode()).update(sample["py"]).update(sample["json"])
        count += 1
    return count, digest.hexdigest()


def with_pyarrow(root: Path) -> Seen:
    import pyarrow.parquet as pq

    digest, count = blake3(), 0
    with pq.ParquetFile(root / "stdlib.parquet", memory_map=True) as file:
        for batch in file.iter_batches(batch_size=256):
            for row in batch.to_pylist():
                digest.update(repr(sorted(row.items())).encode())
                count += 1
    return count, digest.hexdigest()


def with_numpy(root: Path) -> Seen:
    import numpy as np

    tokens = np.load(root / "tokens.npy", mmap_mode="r")
    windows = np.random.default_rng(7).permutation(len(tokens) // WINDOW)
    digest = blake3()
    for window in windows:
        digest.update(tokens[window * WINDOW : (window + 1) * WINDOW].tobytes())
    return len(windows), digest.hexdigest()


def with_datasets(root: Path) -> Seen:
    import datasets

    digest, count = blake3(), 0
    dataset = datasets.load_from_disk(str(root / "dataset")).with_format("numpy")
    for batch in dataset.iter(batch_size=64):
        for path, text, ids in zip(batch["path"], batch["text"], batch["input_ids"], strict=True):
            digest.update(str(path).encode()).update(str(text).encode()).update(ids.tobytes())
            count += 1
    return count, digest.hexdigest()


class _Files:
    """A map-style dataset over a folder, as in a training script."""

    def __init__(self, root: Path) -> None:
        self.paths = files_below(root)

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> bytes:
        return self.paths[index].read_bytes()


def with_torch(root: Path) -> Seen:
    from torch.utils.data import DataLoader

    digest, count = blake3(), 0
    loader: Any = DataLoader(
        _Files(root / "files"),  # type: ignore[arg-type]
        batch_size=32,
        num_workers=2,
        collate_fn=list,
    )
    for batch in loader:
        for data in batch:
            digest.update(data)
            count += 1
    return count, digest.hexdigest()


#: Name of the loader, what one item is, and the function.
LOADERS: list[tuple[str, str, Callable[[Path], Seen]]] = [
    ("mmap of every file", "files", every_file),
    ("tarfile", "members", with_tarfile),
    ("webdataset", "samples", with_webdataset),
    ("pyarrow Parquet, memory map", "rows", with_pyarrow),
    ("numpy.load(mmap_mode='r'), shuffled", "windows", with_numpy),
    ("datasets.load_from_disk", "rows", with_datasets),
    ("torch DataLoader, 2 workers", "files", with_torch),
]
