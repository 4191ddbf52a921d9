"""EasyData's settings: the page's examples, every option, and the effect of each on the one pipeline."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest

from castore import Store
from castore.adapters.datasets import CacheStageConfig, DatasetConfig, Pipeline, PipelineConfig, background
from castore.errors import InvalidValueError, NotFoundError
from tests.adapters.datasets import noting
from tests.adapters.datasets.noting import Adds
from tests.clocks import pass_time


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    noting.calls.clear()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CASTORE_DIR", str(tmp_path / "default"))
    (tmp_path / "data").mkdir()
    for number in range(2):
        write(tmp_path / f"data/{number}.jsonl", f"row {number}")
    yield tmp_path
    background.wait()


def write(path: Path, text: str) -> None:
    path.write_text(json.dumps({"text": text}) + "\n")


def texts(config: PipelineConfig, *operators: Any) -> list[list[str]]:
    return [result.dataset["text"][:] for result in config.run(operators)]


def test_the_pages_examples_run(place: Path) -> None:
    dataset = DatasetConfig(
        data_files="data/*.jsonl",
        cache_path="./cache/my_dataset",
        cache_enabled=True,
    )
    config = PipelineConfig(
        datasets=[dataset],
        cache=CacheStageConfig(
            enabled=True,
            cache_type="hierarchical",
            cache_dir=".cache/easydel_pipeline",
            memory_cache_size=100,
            disk_cache_expiry=86400,
            compression="lz4",
            hash_fn="combined",
        ),
    )
    assert texts(config, Adds("!")) == [["row 0!", "row 1!"]]
    assert texts(config, Adds("!")) == [["row 0!", "row 1!"]]
    assert noting.calls == ["!"] * 2
    with Store("./cache/my_dataset") as store:
        data = next(entry for entry in store.entries("steps") if entry.name.endswith("state.json"))
        assert data.expires is not None
        assert data.expires - data.created == pytest.approx(86400, abs=5)
    assert not (place / ".cache").exists()


@pytest.mark.parametrize(("kind", "on_disk"), [("memory", False), ("disk", True), ("hierarchical", True)])
def test_every_kind_of_cache_runs_an_operator_once(place: Path, kind: Any, on_disk: bool) -> None:
    config = PipelineConfig(["data"], CacheStageConfig(cache_type=kind, cache_dir="cache"))
    operators = Adds("a"), {"text_length_filter": {"min_len": 3}}, "document_deduplicator"
    expected = [["row 0a", "row 1a"]]
    assert texts(config, *operators) == expected
    (result,) = config.run(operators)
    assert result.dataset["text"][:] == expected[0]
    assert [step.hit for step in result.steps] == [True] * 4
    assert noting.calls == ["a"] * 2
    # Results of later steps stay where an earlier step changes.
    (result,) = config.run([Adds("a"), Adds("b")])
    assert [step.hit for step in result.steps] == [True, False]
    background.wait()
    with Store("cache") as store:
        assert any(store.entries("steps")) == on_disk
    # A new config stands for another process: only the disk has the results.
    again = PipelineConfig(["data"], CacheStageConfig(cache_type=kind, cache_dir="cache"))
    assert texts(again, *operators) == expected
    assert noting.calls.count("a") == (2 if on_disk else 4)


def test_ram_keeps_as_many_results_as_it_may(place: Path) -> None:
    config = PipelineConfig(
        ["data"], CacheStageConfig(cache_type="memory", memory_cache_size=2, cache_dir="cache")
    )
    for what in "aba":
        config.run([Adds(what)])
    assert noting.calls == ["a"] * 2 + ["b"] * 2
    for what in "cba":  # c evicts a, and then a evicts c
        config.run([Adds(what)])
    assert noting.calls[4:] == ["c"] * 2 + ["b"] * 2 + ["a"] * 2
    assert len(config._results) == 2


def test_hierarchical_results_come_from_ram_when_the_disk_forgets(place: Path) -> None:
    config = PipelineConfig(["data"], CacheStageConfig(cache_dir="cache"))
    config.run([Adds("a")])
    background.wait()
    with Store("cache") as store:
        store.delete_many([entry.name for entry in store.entries("steps") if "source" not in entry.name])
    assert texts(config, Adds("a")) == [["row 0a", "row 1a"]]
    assert noting.calls == ["a"] * 2


def test_what_is_not_enabled_runs_each_time(place: Path) -> None:
    off = PipelineConfig(["data"], CacheStageConfig(enabled=False, cache_dir="cache"))
    for _ in range(2):
        off.run([Adds("a")])
    part = PipelineConfig(
        [DatasetConfig("data/0.jsonl", cache_enabled=False), DatasetConfig("data/1.jsonl")],
        CacheStageConfig(cache_dir="cache"),
    )
    for _ in range(2):
        part.run([Adds("b")])
    assert (noting.calls.count("a"), noting.calls.count("b")) == (4, 3)


@pytest.mark.parametrize("compression", ["none", "gzip", "lz4", "zstd"])
def test_every_compression_is_the_stores(place: Path, compression: Any) -> None:
    config = PipelineConfig(
        ["data"],
        CacheStageConfig(compression=compression, cache_dir=place / "cache"),  # type: ignore[arg-type]
    )
    write(place / "data/0.jsonl", "long " * 10_000)
    config.run([Adds("a")])
    background.wait()
    with Store("cache") as store:
        assert {entry.codec for entry in store.entries("steps") if entry.name.endswith(".arrow")} == {
            compression
        }


def test_what_has_expired_is_made_anew(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = PipelineConfig(
        ["data"], CacheStageConfig(cache_type="disk", disk_cache_expiry="1h", cache_dir="cache")
    )
    config.run([Adds("a")])
    background.wait()
    pass_time(monkeypatch, 7200)
    config.run([Adds("a")])
    assert noting.calls == ["a"] * 4


@pytest.mark.parametrize(
    ("how", "moved", "changed"), [("content", True, False), ("path", False, True), ("combined", False, False)]
)
def test_files_are_told_apart_as_hash_fn_says(place: Path, how: Any, moved: bool, changed: bool) -> None:
    def run(path: str) -> int:
        before = len(noting.calls)
        config = PipelineConfig([path], CacheStageConfig(cache_type="disk", hash_fn=how, cache_dir="cache"))
        config.run([Adds("a")])
        background.wait()
        return len(noting.calls) - before

    os.utime("data/0.jsonl", (1, 1))
    assert [run("data/0.jsonl") for _ in range(2)] == [1, 0]
    # The same content at another path.
    write(place / "moved.jsonl", "row 0")
    assert (run("moved.jsonl") == 0) == moved
    # Other content of the same size, with the clock turned back: only reading the content shows the change.
    write(place / "data/0.jsonl", "row X")
    os.utime("data/0.jsonl", (1, 1))
    assert (run("data/0.jsonl") == 0) == changed


def test_datasets_are_files_lists_paths_and_what_is_loaded(place: Path) -> None:
    loaded = datasets.Dataset.from_dict({"text": ["here"]})
    config = PipelineConfig(
        [DatasetConfig(["data/1.jsonl", "data/0.jsonl"]), Path("data/0.jsonl"), "data/*.jsonl", loaded],
        CacheStageConfig(cache_dir="cache"),
    )
    assert texts(config, Adds("!")) == [["row 1!", "row 0!"], ["row 0!"], ["row 0!", "row 1!"], ["here!"]]
    with pytest.raises(NotFoundError, match=r"did you mean '0\.jsonl'"):
        PipelineConfig(["data/0.json"], CacheStageConfig(cache_dir="cache")).run([Adds("!")])


def test_a_pipeline_can_be_had_by_itself(place: Path) -> None:
    config = PipelineConfig([], CacheStageConfig(cache_type="disk", cache_dir="cache", compression="lz4"))
    pipeline = config.pipeline(["clean_links_mapper"])
    assert type(pipeline) is Pipeline
    assert (pipeline.codec, pipeline.use_cache, pipeline.store.path) == ("lz4", True, place / "cache")


def test_progress_counts_over_all_operators(place: Path) -> None:
    config = PipelineConfig(["data"], CacheStageConfig(cache_dir="cache"))
    operators = [Adds("a"), "text_length_filter", Adds("b")]
    for hit in (False, True):
        report: list[Any] = []
        config.run(operators, progress=report.append)
        ends = [progress for progress in report if progress.report is not None]
        assert [(end.step, end.steps, end.report.hit) for end in ends] == [(n, 4, hit) for n in range(4)]


# Type checkers would refuse the values of this test.
stage: Any = CacheStageConfig
one: Any = DatasetConfig
all_: Any = PipelineConfig


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: stage(enabled="yes"), "enabled of CacheStageConfig must be true or false, not 'yes'"),
        (lambda: stage(cache_type="ram"), "cache_type of .* must be 'memory' or 'disk' or 'hierarchical'"),
        (lambda: stage(cache_dir=5), "cache_dir of CacheStageConfig must be text or null, not 5"),
        (lambda: stage(memory_cache_size=0), "memory_cache_size of .* at least 1, not 0"),
        (lambda: stage(memory_cache_size="1GB"), "memory_cache_size of .* must be a whole number"),
        (lambda: stage(disk_cache_expiry=-1), "disk_cache_expiry of CacheStageConfig: -1 is not a duration"),
        (lambda: stage(disk_cache_expiry="soon"), "disk_cache_expiry of .*: 'soon' is not a duration"),
        (lambda: stage(compression="brotli"),
         "compression of .* must be 'none' or 'gzip' or 'lz4' or 'zstd'"),
        (lambda: stage(hash_fn="md5"), "hash_fn of .* must be 'content' or 'path' or 'combined', not 'md5'"),
        (lambda: one([]), "data_files of DatasetConfig is empty"),
        (lambda: one(None), "data_files of DatasetConfig must be text or a list"),
        (lambda: one("x", cache_path=1), "cache_path of DatasetConfig must be text or null"),
        (lambda: one("x", cache_enabled=None), "cache_enabled of DatasetConfig must be true or false"),
        (lambda: all_("data"), "datasets of PipelineConfig must be a list, not 'data'"),
        (lambda: all_([5]), "an item of datasets of PipelineConfig must be a DatasetConfig, a path or a"),
        (lambda: all_([], cache={"enabled": True}), "cache of PipelineConfig must be a CacheStageConfig"),
    ],
)  # fmt: skip
def test_every_field_is_checked_when_it_is_made(make: Any, words: str) -> None:
    with pytest.raises(InvalidValueError, match=words):
        make()
