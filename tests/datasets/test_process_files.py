"""What a recipe reads and writes: every kind of file, found, told apart, read late, and written whole or not at all."""

from __future__ import annotations

import copy
import datetime as dt
import gzip
import json
import os
import pickle
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest

from castore import Store
from castore.adapters.datasets import background, exporting, processing, sources
from castore.adapters.datasets.config import Recipe
from castore.adapters.datasets.processing import open_source, process
from castore.adapters.datasets.reports import CacheWarning
from castore.adapters.datasets.unread import LateDataset
from castore.errors import CastoreError, FullError, InvalidValueError, NotFoundError
from tests.helpers import flip, payload

ROWS: list[dict[str, Any]] = [{"text": "größe\n2", "n": 1}, {"text": "", "n": None}, {"text": "c", "n": 3}]


def write_jsonl(path: Path) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))


def write_folder(path: Path) -> None:
    datasets.Dataset.from_list(ROWS).save_to_disk(path)


WRITERS: dict[str, Callable[[Path], object]] = {
    "a.jsonl": write_jsonl,
    "a.ndjson": write_jsonl,
    "a.json": lambda path: path.write_text(json.dumps(ROWS)),
    "a.jsonl.gz": lambda path: path.write_bytes(
        gzip.compress("".join(json.dumps(r) + "\n" for r in ROWS).encode())
    ),
    "a.parquet": lambda path: datasets.Dataset.from_list(ROWS).to_parquet(path),
    "a.csv": lambda path: path.write_text('text,n\n"größe\n2",1\n"",\nc,3\n'),
    "a.tsv": lambda path: path.write_text('text\tn\n"größe\n2"\t1\n""\t\nc\t3\n'),
    "saved": write_folder,
}


@pytest.mark.parametrize("name", WRITERS)
def test_every_kind_of_file_is_read(tmp_path: Path, name: str) -> None:
    WRITERS[name](tmp_path / name)
    dataset = sources.read(sources.find(tmp_path / name), tmp_path / "work")
    empty = None if name.endswith(("csv", "tsv")) else ""
    assert [row["text"] for row in dataset.to_list()] == ["größe\n2", empty, "c"]
    assert [row["n"] for row in dataset.to_list()] == [1, None, 3]


def test_a_text_file_is_a_document(tmp_path: Path) -> None:
    for name, text in (("b.txt", "two\nlines\n"), ("a.txt", "one"), ("c.txt", "")):
        (tmp_path / name).write_text(text)
    dataset = sources.read(sources.find(tmp_path), tmp_path / "work")
    assert dataset["text"][:] == ["one", "two\nlines\n", ""]


def test_folders_are_walked_in_order_and_past_what_is_hidden_or_no_data(tmp_path: Path) -> None:
    for name in (
        "b/2.jsonl",
        "b/1.jsonl",
        "a/9.jsonl",
        ".git/x.jsonl",
        "b/.tmp.jsonl",
        "README.md",
        "z.json",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write_jsonl(tmp_path / name)
    found = [os.path.relpath(file, tmp_path) for file in sources.find(tmp_path).files]
    assert found == ["z.json", "a/9.jsonl", "b/1.jsonl", "b/2.jsonl"]
    pattern = str(tmp_path / "**" / "[0-5].jsonl")
    assert [os.path.basename(file) for file in sources.find(pattern).files] == ["1.jsonl", "2.jsonl"]


def test_several_paths_are_one_source(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "b.jsonl")
    write_jsonl(tmp_path / "a.jsonl")
    found = sources.find_all([str(tmp_path / "b.jsonl"), str(tmp_path / "a*.jsonl")])
    assert [os.path.basename(file) for file in found.files] == ["b.jsonl", "a.jsonl"]


@pytest.mark.parametrize(
    ("path", "kind", "words"),
    [
        ("a.jsonk", NotFoundError, "there is no data at dataset_path '.*a.jsonk'; did you mean 'a.jsonl'"),
        ("nowhere/a.jsonl", NotFoundError, "there is no data"),
        ("empty", NotFoundError, "holds no data"),
        ("*.parquet", NotFoundError, "holds no data"),
        (
            "mixed",
            InvalidValueError,
            "several kinds, such as .*; choose with a pattern, like '.*mixed/\\*.jsonl'",
        ),
        ("notes.md", InvalidValueError, "is of no kind that can be read"),
        ("splits", InvalidValueError, "several splits; choose one, like '.*splits/test'"),
    ],
)
def test_what_cannot_be_found_is_said(
    tmp_path: Path, path: str, kind: type[CastoreError], words: str
) -> None:
    write_jsonl(tmp_path / "a.jsonl")
    (tmp_path / "notes.md").write_text("x")
    (tmp_path / "empty").mkdir()
    (tmp_path / "mixed").mkdir()
    write_jsonl(tmp_path / "mixed" / "a.jsonl")
    WRITERS["a.csv"](tmp_path / "mixed" / "b.csv")
    datasets.DatasetDict({name: datasets.Dataset.from_list(ROWS) for name in ("train", "test")}).save_to_disk(
        tmp_path / "splits"
    )
    with pytest.raises(kind, match=words):
        sources.find(tmp_path / path)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", b'{"text": "a"}\n{"text": \n'),
        ("a.jsonl", b"\xff\xfe\x00\x01"),
        ("a.jsonl.gz", b"no gzip"),
        ("a.parquet", b"PAR1 but not really"),
        ("a.csv", b'a,b\n1,2,3\n"'),
        ("a.txt", b"\xff\xfe"),
        ("a.jsonl", b""),
        ("a.csv", b""),
    ],
)
def test_a_damaged_file_is_an_error_of_one_line(
    tmp_path: Path, name: str, content: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InvalidValueError, match="cannot read dataset_path") as caught:
        sources.read(sources.find(tmp_path / name), tmp_path / "work")
    assert "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")


# Telling sources apart


def test_content_tells_files_apart_and_their_place_does_not(tmp_path: Path, store: Store) -> None:
    for name in ("a/x.jsonl", "b/y.jsonl"):
        (tmp_path / name).parent.mkdir()
        write_jsonl(tmp_path / name)
    one, other = (sources.find(tmp_path / name) for name in ("a", "b"))
    assert sources.identify(one, store) == sources.identify(other, None)
    before = sources.identify(one, store)
    (tmp_path / "a/x.jsonl").write_text('{"text": "new", "n": 1}\n')
    assert sources.identify(one, store) != before


def test_the_same_bytes_under_another_ending_are_another_source(tmp_path: Path) -> None:
    for name in ("a.csv", "a.tsv", "a.txt"):
        (tmp_path / name).write_text("a,b\n")
    assert len({sources.identify(sources.find(tmp_path / n), None) for n in ("a.csv", "a.tsv", "a.txt")}) == 3


def test_paths_and_times_tell_files_apart_where_that_is_asked_for(tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.jsonl"):
        write_jsonl(tmp_path / name)
        os.utime(tmp_path / name, (1, 1))
    one, other = (sources.find(tmp_path / name) for name in ("a.jsonl", "b.jsonl"))
    for telling in ("path", "combined"):
        before = sources.identify(one, None, telling)
        assert before == sources.identify(one, None, telling)
        assert before != sources.identify(other, None, telling)
    by_path, by_both = (sources.identify(one, None, telling) for telling in ("path", "combined"))
    (tmp_path / "a.jsonl").write_text((tmp_path / "a.jsonl").read_text().replace("c", "d"))
    os.utime(tmp_path / "a.jsonl", (1, 1))
    assert sources.identify(one, None, "path") == by_path
    assert sources.identify(one, None, "combined") != by_both


# Reading late


@pytest.fixture
def opened(tmp_path: Path, store: Store) -> Iterator[Callable[[], Any]]:
    write_jsonl(tmp_path / "a.jsonl")
    found = sources.find(tmp_path / "a.jsonl")
    yield lambda: open_source(found, store, cached=True, codec="zstd")
    background.wait()


def test_the_second_time_the_source_is_not_read_before_it_is_looked_at(opened: Callable[[], Any]) -> None:
    first = opened()
    background.wait()
    second = opened()
    assert isinstance(second, LateDataset)
    assert (len(second), second.features, second._fingerprint) == (3, first.features, first._fingerprint)
    assert not second.is_read
    assert second.to_list() == first.to_list()
    assert second.is_read


@pytest.mark.parametrize(
    "use",
    [
        lambda d: d.map(lambda row: {"text": row["text"] + "!"}),
        lambda d: d.filter(lambda row: row["n"] == 1),
        lambda d: d.select([2, 0]),
        lambda d: d.shuffle(seed=1),
        lambda d: d.with_format("arrow").with_format(None),
        lambda d: d.remove_columns(["n"]),
        lambda d: d.shard(2, 0),
        copy.deepcopy,
        lambda d: pickle.loads(pickle.dumps(d)),
        lambda d: datasets.concatenate_datasets([d, d]),
    ],
)
def test_a_late_dataset_is_used_like_any_other(opened: Callable[[], Any], use: Callable[[Any], Any]) -> None:
    plain = opened()
    background.wait()
    late = opened()
    assert isinstance(late, LateDataset)
    assert use(late).to_list() == use(plain).to_list()


def test_a_run_that_goes_on_behind_its_checkpoint_does_not_read_its_source(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_files: list[str] = []

    def noting(source: sources.Source, folder: Any) -> datasets.Dataset:
        read_files.append(source.path)
        return sources.read(source, folder)

    monkeypatch.setattr(processing, "read", noting)
    broken = tmp_path / "broken"

    def fails(sample: dict[str, Any]) -> dict[str, Any]:
        if broken.exists():
            raise RuntimeError("broken")
        return sample

    write_jsonl(tmp_path / "a.jsonl")
    recipe = Recipe(
        str(tmp_path / "a.jsonl"),
        str(tmp_path / "out.jsonl"),
        ["clean_links_mapper", fails],
        use_checkpoint=True,
    )
    broken.touch()
    for reads in (1, 1):  # the second time it fails behind the checkpoint
        with pytest.raises(RuntimeError):
            process(recipe, store=store)
        assert len(read_files) == reads
    broken.unlink()
    outcome = process(recipe, store=store)
    assert [step.hit for step in outcome.steps] == [True, False]
    assert (outcome.rows_in, outcome.rows_out, len(read_files)) == (3, 3, 1)
    assert process(recipe, store=store).rows_in == 3
    assert len(read_files) == 1
    with (tmp_path / "a.jsonl").open("a") as file:
        file.write(json.dumps({"text": "more", "n": 9}) + "\n")
    with pytest.warns(CacheWarning, match="the input is another one"):
        assert process(recipe, store=store).rows_in == 4
    assert len(read_files) == 2


def test_a_damaged_source_in_the_store_is_read_again_and_said_so(
    opened: Callable[[], Any], store: Store
) -> None:
    expected = opened().to_list()
    background.wait()
    name = next(entry.name for entry in store.entries("steps") if entry.name.endswith(".arrow"))
    path, offset, length = payload(store, name)
    flip(path, offset + length // 2)
    late = opened()
    with pytest.warns(CacheWarning, match="is damaged and runs again"):
        assert late.to_list() == expected


def test_a_saved_folder_is_mapped_where_it_is(tmp_path: Path, store: Store) -> None:
    write_folder(tmp_path / "saved")
    before = list(store.entries())
    dataset = open_source(sources.find(tmp_path / "saved"), store, cached=True, codec="zstd")
    assert dataset.cache_files[0]["filename"].startswith(str(tmp_path / "saved"))
    assert list(store.entries()) == before
    assert dataset._fingerprint.startswith("castore")


# Writing


@pytest.mark.parametrize("name", ["o.jsonl", "o.json", "o.parquet", "o", "deep/er/o.jsonl"])
def test_what_is_written_reads_back(tmp_path: Path, name: str) -> None:
    dataset = datasets.Dataset.from_list(ROWS)
    written: list[int] = []
    size = exporting.export(dataset, tmp_path / name, written.append)
    assert sum(written) == 3
    assert size > 0
    back = sources.read(sources.find(tmp_path / name), tmp_path / "work")
    assert back.to_list() == ROWS
    exporting.export(dataset.select([0]), tmp_path / name)
    assert len(sources.read(sources.find(tmp_path / name), tmp_path / "work")) == 1


def test_csv_is_what_others_read(tmp_path: Path) -> None:
    exporting.export(datasets.Dataset.from_list(ROWS), tmp_path / "o.csv")
    assert sources.read(sources.find(tmp_path / "o.csv"), tmp_path / "work")["n"][:] == [1, None, 3]


def test_jsonl_says_what_was_in_the_rows(tmp_path: Path) -> None:
    dataset = datasets.Dataset.from_list(
        [
            {"n": 1, "big": 2**62, "f": 0.1, "when": dt.date(2026, 1, 2), "deep": {"a": [1, None]}},
            {"n": None},
        ]
    )
    exporting.export(dataset, tmp_path / "o.jsonl")
    first, second = map(json.loads, (tmp_path / "o.jsonl").read_text().splitlines())
    assert first == {"n": 1, "big": 2**62, "f": 0.1, "when": "2026-01-02", "deep": {"a": [1, None]}}
    assert second["n"] is None


def test_values_without_one_type_come_back_as_they_were(tmp_path: Path) -> None:
    lines = '{"text": "a", "meta": {"x": 1}}\n{"text": "b", "meta": [1, 2]}\n{"text": "c", "meta": "[1]"}\n'
    (tmp_path / "a.jsonl").write_text(lines)
    dataset = sources.read(sources.find(tmp_path / "a.jsonl"), tmp_path / "work")
    exporting.export(dataset, tmp_path / "o.jsonl")
    assert [json.loads(line)["meta"] for line in (tmp_path / "o.jsonl").read_text().splitlines()] == dataset[
        "meta"
    ][:]


def test_statistics_and_hashes_stay_out(tmp_path: Path) -> None:
    dataset = datasets.Dataset.from_dict(
        {"text": ["a"], "__dj__stats__": [{"x": 1}], "__dj__hash_minhash": [b"x"]}
    )
    exporting.export(dataset, tmp_path / "o.jsonl")
    assert (tmp_path / "o.jsonl").read_text() == '{"text": "a"}\n'


@pytest.mark.parametrize("name", ["o.jsonl", "o.json", "o.csv", "o.parquet", "o"])
def test_a_dataset_without_rows_is_written(tmp_path: Path, name: str) -> None:
    exporting.export(datasets.Dataset.from_list(ROWS).select([]), tmp_path / name)
    if name == "o.json":
        assert json.loads((tmp_path / name).read_text()) == []
    assert (tmp_path / name).exists()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("o.xlsx", "ends in '.xlsx'; write to .jsonl, .json, .csv, .parquet, or to a folder"),
        ("photos", "exists and is no folder of save_to_disk"),
        ("file", "exists and is no folder of save_to_disk"),
        ("folder.jsonl", "is a folder; remove it"),
    ],
)
def test_nothing_of_others_is_overwritten(tmp_path: Path, name: str, words: str) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_text("x")
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder.jsonl").mkdir()
    with pytest.raises(InvalidValueError, match=words):
        exporting.export(datasets.Dataset.from_list(ROWS), tmp_path / name)
    assert (tmp_path / "photos" / "cat.jpg").read_text() == "x"


def test_what_has_no_json_is_said_and_nothing_is_left(tmp_path: Path) -> None:
    (tmp_path / "o.jsonl").write_text("old")
    with pytest.raises(InvalidValueError, match="bytes has no JSON; export to"):
        exporting.export(datasets.Dataset.from_dict({"image": [b"\xff"]}), tmp_path / "o.jsonl")
    assert [path.name for path in tmp_path.iterdir()] == ["o.jsonl"]
    assert (tmp_path / "o.jsonl").read_text() == "old"


@pytest.mark.parametrize("name", ["o.jsonl", "o.parquet", "o.csv", "o"])
def test_a_full_disk_leaves_the_old_export(tmp_path: Path, name: str) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", disk]).returncode:
        pytest.skip("no tmpfs can be mounted here")
    try:
        exporting.export(datasets.Dataset.from_list(ROWS), disk / name)
        before = sorted(disk.iterdir())
        large = datasets.Dataset.from_dict({"text": [os.urandom(500).hex() for _ in range(2000)]})
        with pytest.raises(FullError, match=f"the disk of .*{name} is full"):
            exporting.export(large, disk / name)
        assert sorted(disk.iterdir()) == before
    finally:
        subprocess.run(["umount", disk], check=True)
