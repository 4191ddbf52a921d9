"""A folder with one small file of every kind that loaders read. Its content is always the same.

The loaders' own writers make the files. Nothing here knows a store.
"""

from __future__ import annotations

import io
import json
import random
import sqlite3
import tarfile
from pathlib import Path
from typing import Any

import numpy as np

from castore.objects.codecs import FRAME_SIZE
from tests.helpers import mixed, noise, text


def fill(folder: Path) -> None:
    """Make the folder and everything in it."""
    folder.mkdir()
    _blobs(folder / "raw")
    _arrays(folder)
    _tensors(folder)
    _tables(folder)
    _shards(folder / "shards")
    _chunks(folder)
    _images(folder / "images")
    _tree(folder / "tree")


def _blobs(folder: Path) -> None:
    folder.mkdir()
    for name, data in {
        "noise.bin": noise(1_500_001),
        "text.txt": text(3_000_007),
        "mixed.bin": mixed(1_000_000),
        "frame.bin": mixed(FRAME_SIZE, 1),
        "more.bin": text(FRAME_SIZE + 1, 2),
        "small.txt": text(900, 3),
        "byte": b"x",
        "empty": b"",
    }.items():
        (folder / name).write_bytes(data)


def _arrays(folder: Path) -> None:
    chance = np.random.default_rng(0)
    np.save(folder / "tokens.npy", chance.integers(0, 50_000, 400_000, dtype=np.int32))
    np.save(folder / "fortran.npy", np.asfortranarray(chance.normal(size=(300, 200)).astype(np.float32)))


def _tensors(folder: Path) -> None:
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(0)
    tensors = {
        "embedding": torch.randn(500, 128, generator=generator),
        "bias": torch.randn(128, generator=generator).to(torch.bfloat16),
        "steps": torch.arange(10),
    }
    torch.save(tensors, folder / "weights.pt")
    save_file(tensors, folder / "weights.safetensors")


def rows() -> dict[str, list[Any]]:
    """The rows of the tables and of the database."""
    chance = random.Random(0)
    count = 20_000
    return {
        "id": list(range(count)),
        "label": [chance.choice(["cat", "dog", "bird"]) for _ in range(count)],
        "score": [chance.random() for _ in range(count)],
    }


def _tables(folder: Path) -> None:
    import datasets
    import pyarrow as pa
    import pyarrow.parquet

    table = pa.table(rows())
    pyarrow.parquet.write_table(table, folder / "rows.parquet", row_group_size=4000)
    with pa.OSFile(str(folder / "rows.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=4000)
    datasets.Dataset.from_dict(rows()).save_to_disk(folder / "dataset", num_shards=2)
    with sqlite3.connect(folder / "rows.sqlite") as db:
        db.execute("CREATE TABLE rows (id INTEGER PRIMARY KEY, label TEXT, score REAL)")
        db.executemany("INSERT INTO rows VALUES (?, ?, ?)", zip(*rows().values(), strict=True))
    db.close()


def _shards(folder: Path) -> None:
    folder.mkdir()
    for shard in range(2):
        with tarfile.open(folder / f"train-{shard:05d}.tar", "w") as tar:
            for sample in range(40):
                key = f"{shard:02d}{sample:04d}"
                label = json.dumps({"key": key, "label": sample % 10}).encode()
                for suffix, data in ("bin", noise(5000, sample)), ("json", label):
                    info = tarfile.TarInfo(f"{key}.{suffix}")
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))


def _chunks(folder: Path) -> None:
    import h5py
    import zarr

    data = np.arange(120_000, dtype=np.float32).reshape(400, 300)
    array = zarr.create_array(
        str(folder / "array.zarr"), shape=data.shape, chunks=(100, 100), dtype=data.dtype
    )
    array[:] = data
    with h5py.File(folder / "data.h5", "w") as file:
        file.create_dataset("x", data=data, chunks=(50, 50), compression="gzip")
        file.create_dataset("y", data=data[:, 0])


def _images(folder: Path) -> None:
    from PIL import Image

    folder.mkdir()
    chance = np.random.default_rng(1)
    for number in range(12):
        pixels = Image.fromarray(chance.integers(0, 255, (48, 64, 3), dtype=np.uint8))
        pixels.save(folder / f"{number:03d}.{'png' if number % 2 else 'jpg'}")


def _tree(folder: Path) -> None:
    for part in range(5):
        for leaf in range(30):
            path = folder / f"part-{part}" / f"leaf {leaf % 3}" / f"ünï-{leaf:03d}.txt"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text(200 + 37 * leaf, part * 100 + leaf) + b"\nneedle\n" * (leaf == 7))
