"""Libraries that use fsspec read and write a store by ``castore://``, without knowing castore."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import duckdb
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.dataset
import pyarrow.fs
import pyarrow.parquet as pq
import pytest
from upath import UPath

from castore.adapters.filesystem import CastoreFileSystem
from castore.adapters.filesystem.paths import CastorePath
from tests.helpers import agrees_with_disk


@pytest.fixture
def fs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[CastoreFileSystem]:
    """The store of the environment, as a file system."""
    monkeypatch.setenv("CASTORE_DIR", str(tmp_path / "store"))
    yield CastoreFileSystem()
    CastoreFileSystem.clear_instance_cache()


@pytest.fixture
def frame() -> pd.DataFrame:
    return pd.DataFrame({"number": range(10_000), "text": [f"row {n}" for n in range(10_000)]})


def test_pandas_reads_and_writes_csv_parquet_and_json(fs: CastoreFileSystem, frame: pd.DataFrame) -> None:
    frame.to_csv("castore://t/a.csv", index=False)
    frame.to_csv("castore://t/a.csv.gz", index=False)
    frame.to_parquet("castore://t/a.parquet")
    frame.to_json("castore://t/a.jsonl", orient="records", lines=True)
    for read in (
        pd.read_csv("castore://t/a.csv"),
        pd.read_csv("castore://t/a.csv.gz"),
        pd.read_parquet("castore://t/a.parquet"),
        pd.read_json("castore://t/a.jsonl", orient="records", lines=True),
    ):
        assert read.equals(frame)
    assert pd.read_parquet("castore://t/a.parquet", columns=["text"]).columns.to_list() == ["text"]
    agrees_with_disk(fs.store)


def test_pandas_takes_the_store_and_what_a_put_takes_as_storage_options(
    tmp_path: Path, frame: pd.DataFrame
) -> None:
    options = {"store": str(tmp_path / "other"), "ttl": "1d", "metadata": {"made": "by pandas"}}
    frame.to_parquet("castore://a.parquet", storage_options=options)
    assert pd.read_parquet("castore://a.parquet", storage_options=options).equals(frame)
    info = CastoreFileSystem(tmp_path / "other").info("a.parquet")
    assert info["metadata"] == {"made": "by pandas"}
    assert info["expires"] is not None


def test_pandas_keeps_nothing_of_a_table_that_cannot_be_written(fs: CastoreFileSystem) -> None:
    class Unwritable:
        def __str__(self) -> str:
            raise RuntimeError("no text")

    with pytest.raises(RuntimeError, match="no text"):
        pd.DataFrame({"a": [*range(100_000), Unwritable()]}, dtype=object).to_csv("castore://a.csv")
    assert fs.ls("") == []


def test_pyarrow_reads_and_writes_tables_and_datasets(fs: CastoreFileSystem, frame: pd.DataFrame) -> None:
    arrow = pa.fs.PyFileSystem(pa.fs.FSSpecHandler(fs))
    table = pa.Table.from_pandas(frame)
    pq.write_table(table, "t/a.parquet", filesystem=arrow)
    assert pq.read_table("t/a.parquet", filesystem=arrow).equals(table)
    assert pq.read_table("t/a.parquet", filesystem=arrow, columns=["number"]).num_columns == 1
    parts = table.append_column("part", pa.array(n % 3 for n in range(len(table))))
    pa.dataset.write_dataset(
        parts,
        "t/parts",
        filesystem=arrow,
        format="parquet",
        partitioning=["part"],
        partitioning_flavor="hive",
    )
    assert fs.glob("t/parts/*") == [f"t/parts/part={n}" for n in range(3)]
    read = pa.dataset.dataset("t/parts", filesystem=arrow, partitioning="hive")
    assert read.count_rows(filter=pa.dataset.field("part") == 1) == 3_333
    assert pa.dataset.dataset("t/parts", filesystem=fs, partitioning="hive").count_rows() == 10_000
    assert pq.read_table("fsspec+castore://t/a.parquet").equals(table)
    with arrow.open_output_stream("t/stream") as stream:
        stream.write(b"bytes")
    with arrow.open_input_file("t/stream") as file:
        assert file.read_at(3, 1) == b"yte"
    assert arrow.get_file_info("t/stream").size == 5
    arrow.create_dir("t/made/empty")
    assert arrow.get_file_info("t/made/empty").type == pa.fs.FileType.Directory
    arrow.move("t/stream", "t/moved")
    arrow.delete_dir("t")
    assert fs.find("") == []


def test_duckdb_queries_what_is_in_a_store(fs: CastoreFileSystem, frame: pd.DataFrame) -> None:
    for part in range(3):
        frame.assign(part=part).to_parquet(f"castore://parts/{part}.parquet")
    frame.to_csv("castore://a.csv", index=False)
    with duckdb.connect() as database:
        database.register_filesystem(fs)
        total = database.sql("SELECT sum(number), count(DISTINCT part) FROM 'castore://parts/*.parquet'")
        assert total.fetchall() == [(3 * sum(range(10_000)), 3)]
        assert database.sql("SELECT count(*) FROM read_csv('castore://a.csv')").fetchall() == [(10_000,)]
        database.sql("COPY (SELECT 42 AS answer) TO 'castore://out/answer.parquet' (FORMAT parquet)")
        database.sql(
            "COPY (SELECT range AS a, range % 3 AS part FROM range(9)) TO 'castore://new/parts'"
            " (FORMAT parquet, PARTITION_BY (part))"
        )
    assert pd.read_parquet("castore://out/answer.parquet")["answer"].to_list() == [42]
    assert fs.ls("new/parts", detail=False) == [f"new/parts/part={n}" for n in range(3)]


def test_polars_reads_through_a_file(fs: CastoreFileSystem, frame: pd.DataFrame) -> None:
    frame.to_parquet("castore://a.parquet")
    with fs.open("a.parquet") as file:
        assert pl.read_parquet(file)["number"].sum() == sum(range(10_000))


def test_zarr_keeps_arrays_and_groups(fs: CastoreFileSystem) -> None:
    zarr = pytest.importorskip("zarr", reason="zarr 3 has no release for Python 3.10")
    fsspec_store = zarr.storage.FsspecStore
    data = np.arange(10_000, dtype="f4").reshape(100, 100)
    store = fsspec_store.from_url("castore://z/array.zarr")
    zarr.create_array(store=store, shape=data.shape, chunks=(10, 10), dtype="f4")[:] = data
    store = fsspec_store.from_url("castore://z/array.zarr", read_only=True)
    read = zarr.open_array(store=store, mode="r")
    assert np.array_equal(np.asarray(read[:]), data)
    assert np.array_equal(np.asarray(read[13:27, 5:95]), data[13:27, 5:95])
    assert len(fs.find("z/array.zarr/c")) == 100
    group = zarr.open_group("castore://z/group.zarr", mode="w", storage_options={"store": str(fs.store.path)})
    group.create_array("inner", shape=(4,), dtype="i4")[:] = 3
    assert sorted(zarr.open_group("castore://z/group.zarr", mode="r").array_keys()) == ["inner"]
    del group["inner"]
    assert fs.find("z/group.zarr") == ["z/group.zarr/zarr.json"]


def test_universal_pathlib_has_paths_of_a_store(fs: CastoreFileSystem, tmp_path: Path) -> None:
    folder = UPath("castore://run")
    assert isinstance(folder, CastorePath)
    path = folder / "notes" / "a.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    assert path.write_text("hello") == 5
    assert (path.read_text(), path.exists(), path.stat().st_size, folder.is_dir()) == ("hello", True, 5, True)
    assert [str(one) for one in folder.rglob("*.txt")] == ["castore://run/notes/a.txt"]
    path.rename("castore://run/b.txt")
    assert sorted(str(one) for one in folder.iterdir()) == ["castore://run/b.txt", "castore://run/notes"]
    (folder / "b.txt").unlink()
    (folder / "notes").rmdir()
    folder.rmdir()
    assert not folder.exists()
    other = UPath("castore://x", store=tmp_path / "other")
    other.write_bytes(b"x")
    assert CastoreFileSystem(tmp_path / "other").cat("x") == b"x"


@pytest.mark.parametrize("streaming", [False, True])
def test_datasets_loads_files_of_a_store(
    fs: CastoreFileSystem,
    frame: pd.DataFrame,
    tmp_path: Path,
    streaming: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Offline, `datasets` takes every file system except the local one to be out of reach.
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    for part in range(3):
        frame.assign(part=part).to_parquet(f"castore://parts/{part}.parquet")
    frame.to_csv("castore://a.csv", index=False)

    def load(kind: str, files: str, **options: Any) -> list[int]:
        data = datasets.load_dataset(
            kind,
            data_files=files,
            split="train",
            streaming=streaming,
            cache_dir=str(tmp_path / "hf"),
            **options,
        )
        return [row["number"] for row in data]

    assert load("csv", "castore://a.csv") == list(range(10_000))
    assert load("parquet", "castore://parts/*.parquet") == 3 * list(range(10_000))
    frame.head(7).to_csv("castore://a.csv", index=False)
    # `datasets` caches a download by its URL alone, whatever the file system reports about the file.
    again = {} if streaming else {"download_mode": "force_redownload"}
    options = {"store": str(fs.store.path)}
    assert load("csv", "castore://a.csv", storage_options=options, **again) == list(range(7))


@pytest.mark.parametrize("streaming", [False, True])
def test_datasets_reads_lines_and_compressed_files(
    fs: CastoreFileSystem, tmp_path: Path, streaming: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For these kinds `datasets` passes on options of other file systems."""
    monkeypatch.setattr(
        datasets.config, "HF_HUB_OFFLINE", False
    )  # `datasets` takes every protocol for that of a hub
    with fs.open("a.jsonl.gz", "wt", compression="gzip") as file:
        file.write('{"a": 1}\n{"a": 2}\n')
    fs.pipe("a.txt", b"one\ntwo\n")
    for kind, name, rows in (
        ("json", "a.jsonl.gz", [{"a": 1}, {"a": 2}]),
        ("text", "a.txt", [{"text": "one"}, {"text": "two"}]),
    ):
        data = datasets.load_dataset(
            kind,
            data_files=f"castore://{name}",
            split="train",
            streaming=streaming,
            cache_dir=str(tmp_path / "hf"),
        )
        assert list(data) == rows


def test_datasets_saves_to_a_store_and_loads_from_it(fs: CastoreFileSystem, frame: pd.DataFrame) -> None:
    data = datasets.Dataset.from_pandas(frame)
    data.save_to_disk("castore://saved", num_shards=2)
    assert datasets.load_from_disk("castore://saved")[9_999]["text"] == "row 9999"
    data.to_parquet("castore://exported.parquet")
    assert pd.read_parquet("castore://exported.parquet").equals(frame)


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # where there are few cores
@pytest.mark.parametrize(
    ("method", "workers"), [("fork", 2), pytest.param("spawn", 1, marks=pytest.mark.matrix)]
)
def test_loader_workers_read_a_streamed_dataset(
    fs: CastoreFileSystem, frame: pd.DataFrame, method: str, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under fork and spawn, the file system goes to each worker with the dataset."""
    loaders = pytest.importorskip("torch").utils.data
    for part in range(2):
        frame.head(50).assign(part=part).to_parquet(f"castore://parts/{part}.parquet")
    options = {"store": str(fs.store.path)}
    monkeypatch.delenv("CASTORE_DIR")
    CastoreFileSystem.clear_instance_cache()
    data = datasets.load_dataset(
        "parquet", data_files="castore://parts/*.parquet", split="train", streaming=True,
        storage_options=options,
    )  # fmt: skip
    loader = loaders.DataLoader(data, batch_size=10, num_workers=workers, multiprocessing_context=method)
    assert sum(len(batch["number"]) for batch in loader) == 100
