"""Every loader reads the same through a mount as from the plain files, in default mode and in pinned mode."""

from __future__ import annotations

import gc
import mmap
import os
import random
import sqlite3
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.mount import shelf
from tests.mount.conftest import files, forget_pages
from tests.without_torch import is_installed

KINDS = [
    "raw/noise.bin", "raw/text.txt", "raw/mixed.bin", "raw/frame.bin", "raw/more.bin", "raw/small.txt",
    "raw/byte", "raw/empty", "tokens.npy", "rows.parquet", "rows.sqlite", *["weights.pt"] * is_installed(),
]  # fmt: skip


@pytest.mark.parametrize("name", KINDS)
def test_random_ranges_are_those_of_the_source(root: Path, plain: Path, name: str) -> None:
    data = (plain / name).read_bytes()
    size, chance = len(data), random.Random(name)
    offsets = [0, max(0, size - 1), size, size + 1, size + (1 << 20)]
    offsets += [chance.randrange(size + 1) for _ in range(64 - len(offsets))]
    with (root / name).open("rb", buffering=0) as file:
        assert os.fstat(file.fileno()).st_size == size
        for number, offset in enumerate(offsets):
            if number % 4 == 0:
                forget_pages(file.fileno())
            length = chance.choice([1, 4096, 70_000, 600_000])
            assert file.seek(offset) == offset
            assert file.read(length) == data[offset : offset + length], (offset, length)
        assert file.seek(0, os.SEEK_END) == size
        assert file.read(1) == b""
    assert (root / name).read_bytes() == data


def test_maps_hold_the_bytes_of_the_source(root: Path, plain: Path) -> None:
    for name in KINDS:
        with (plain / name).open("rb") as source, (root / name).open("rb") as file:
            if name == "raw/empty":
                continue
            forget_pages(file.fileno())
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
                assert mapped[-1:] == source.read()[-1:]
                source.seek(0)
                assert mapped[:] == source.read()


def test_numpy_maps_arrays(root: Path, plain: Path) -> None:
    for name in ("tokens.npy", "fortran.npy"):
        here, there = np.load(root / name, mmap_mode="r"), np.load(plain / name)
        assert isinstance(here, np.memmap)
        assert here.flags.f_contiguous == there.flags.f_contiguous
        assert np.array_equal(here, there)


def test_torch_load_maps_tensors(root: Path, plain: Path) -> None:
    torch = pytest.importorskip("torch")

    here = torch.load(root / "weights.pt", mmap=True, weights_only=True)
    there = torch.load(plain / "weights.pt", weights_only=True)
    assert here.keys() == there.keys()
    assert all(torch.equal(here[key], there[key]) and here[key].dtype == there[key].dtype for key in there)


def test_safetensors_opens_and_slices(root: Path, plain: Path) -> None:
    torch = pytest.importorskip("torch")
    from safetensors import safe_open
    from safetensors.torch import load_file

    there = load_file(plain / "weights.safetensors")
    with safe_open(root / "weights.safetensors", framework="pt") as here:
        assert set(here.keys()) == set(there)
        assert torch.equal(here.get_slice("embedding")[100:110], there["embedding"][100:110])
        assert all(torch.equal(here.get_tensor(key), there[key]) for key in there)


def test_pyarrow_maps_files_and_reads_parquet(root: Path, plain: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    with pa.memory_map(str(root / "rows.arrow")) as source:
        table = pa.ipc.open_file(source).read_all()
        assert table.to_pydict() == shelf.rows()
    assert pq.read_table(root / "rows.parquet").to_pydict() == shelf.rows()
    assert pq.read_table(root / "rows.parquet", memory_map=True, columns=["id"]).num_rows == 20_000


def test_datasets_loads_from_disk(root: Path, plain: Path, tmp_path: Path) -> None:
    import datasets

    here = datasets.load_from_disk(str(root / "dataset"))
    there = datasets.load_from_disk(str(plain / "dataset"))
    assert here._fingerprint == there._fingerprint
    assert here[:] == there[:] == shelf.rows()
    assert here.cache_files[0]["filename"].startswith(str(root))  # mapped in place, not copied


def test_tarfile_lists_and_extracts(root: Path, plain: Path) -> None:
    for path in files(plain / "shards"):
        with tarfile.open(path) as there, tarfile.open(root / "shards" / path.name) as here:
            assert here.getnames() == there.getnames()
            for member in there.getmembers():
                one, other = here.extractfile(member.name), there.extractfile(member.name)
                assert one is not None
                assert other is not None
                assert one.read() == other.read()


# webdataset leaves its last shard to the garbage collector.
@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
def test_webdataset_streams_shards(root: Path, plain: Path) -> None:
    import webdataset

    def samples(folder: Path) -> list[Any]:
        shards = str(folder / "shards" / "train-{00000..00001}.tar")
        return [
            (sample["__key__"], sample["bin"], sample["json"])
            for sample in webdataset.WebDataset(shards, shardshuffle=False)
        ]

    here = samples(root)
    assert len(here) == 80
    assert here == samples(plain)
    gc.collect()


def test_zarr_opens_a_folder_of_chunks(root: Path, plain: Path) -> None:
    zarr = pytest.importorskip("zarr", reason="zarr 3 has no release for Python 3.10")
    here = zarr.open_array(str(root / "array.zarr"), mode="r")
    there = zarr.open_array(str(plain / "array.zarr"), mode="r")
    assert here.chunks == there.chunks == (100, 100)
    assert np.array_equal(np.asarray(here[:]), np.asarray(there[:]))
    assert np.array_equal(np.asarray(here[150:160, 7]), np.asarray(there[150:160, 7]))


def test_h5py_opens_without_locking_trouble(root: Path, plain: Path) -> None:
    import h5py

    with h5py.File(root / "data.h5", "r") as here, h5py.File(plain / "data.h5", "r") as there:
        assert list(here) == list(there) == ["x", "y"]
        assert all(np.array_equal(here[key][:], there[key][:]) for key in there)
        assert np.array_equal(here["x"][17:33, 40:60], there["x"][17:33, 40:60])


@pytest.mark.parametrize("how", ["mode=ro", "mode=ro&immutable=1"])
def test_sqlite_opens_read_only(root: Path, how: str) -> None:
    db = sqlite3.connect(f"file:{root / 'rows.sqlite'}?{how}", uri=True)
    try:
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        rows = db.execute("SELECT id, label, score FROM rows ORDER BY id").fetchall()
        assert rows == list(zip(*shelf.rows().values(), strict=True))
    finally:
        db.close()


def test_pil_opens_a_folder_of_images(root: Path, plain: Path) -> None:
    from PIL import Image

    names = sorted(os.listdir(root / "images"))
    assert names == sorted(os.listdir(plain / "images"))
    for name in names:
        with Image.open(root / "images" / name) as here, Image.open(plain / "images" / name) as there:
            assert here.format == there.format
            assert here.tobytes() == there.tobytes()


def test_duckdb_and_polars_query_parquet(root: Path) -> None:
    import duckdb
    import polars

    path = root / "rows.parquet"
    rows = shelf.rows()
    want = sorted((label, rows["label"].count(label)) for label in set(rows["label"]))
    with duckdb.connect() as db:
        query = "SELECT label, count(*) FROM read_parquet(?) GROUP BY label ORDER BY label"
        assert db.execute(query, [str(path)]).fetchall() == want
    counted = polars.scan_parquet(path).group_by("label").len().sort("label").collect()
    assert counted.rows() == want
    assert polars.read_parquet(path).to_dict(as_series=False) == rows
