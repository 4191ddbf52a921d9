"""The disk space of a run: the seed's formula, measured sizes, and warnings before the run starts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import datasets
import pytest

from castore import Store
from castore.adapters.datasets import CacheWarning, Pipeline, disk_space
from castore.adapters.datasets.block_runner import bytes_at_once
from castore.adapters.datasets.disk_space import KnownSize
from castore.recipes import registry
from castore.settings import Settings
from tests.clocks import pass_time

GB = 10**9


def estimate(steps: list[KnownSize], tmp_path: Path, **given: Any) -> disk_space.Estimate:
    options: dict[str, Any] = {"ratio": 0.2, "mode": "cache", "store": tmp_path, "settings": Settings()}
    return disk_space.estimate_space(given.pop("size", 10 * GB), steps, **(options | given))


def test_the_seeds_example_needs_what_the_seed_says(tmp_path: Path) -> None:
    steps = (
        [KnownSize("map")] * 3 + [KnownSize("stats"), KnownSize("filter")] * 4 + [KnownSize("deduplicate")]
    )
    found = estimate(steps, tmp_path)
    assert found.formula == 100 * GB
    assert (found.mappers, found.filters, found.deduplicators) == (3, 4, 1)
    assert estimate(steps, tmp_path, mode="checkpoint").formula == 30 * GB
    assert estimate(steps, tmp_path, mode="none").formula == 20 * GB


@pytest.mark.parametrize(
    ("mappers", "filters", "deduplicators", "times"), [(0, 0, 0, 1), (1, 0, 0, 2), (0, 1, 0, 3), (2, 2, 2, 8)]
)
def test_the_first_filter_costs_a_copy_more(
    mappers: int, filters: int, deduplicators: int, times: int
) -> None:
    assert disk_space.estimate_by_formula(7, mappers, filters, deduplicators) == 7 * times


def test_measured_sizes_take_the_place_of_guesses(tmp_path: Path) -> None:
    steps = [KnownSize("map", 4 * GB, GB, kept=True), KnownSize("map"), KnownSize("map")]
    found = estimate(steps, tmp_path)
    # The second and the third step are assumed to return as much as they get: 4 GB.
    assert found.store_needs == round(2 * 4 * GB * 0.2)
    assert found.work_needs == 8 * GB
    assert found.measured == 1
    assert found.peak == GB + found.store_needs + found.work_needs


def test_steps_in_blocks_have_a_few_blocks_uncompressed_at_a_time_and_no_whole_copies(tmp_path: Path) -> None:
    blocks = KnownSize("map", at_once=100_000_000)
    assert estimate([blocks, blocks], tmp_path).work_needs == 100_000_000
    assert estimate([blocks, KnownSize("deduplicate")], tmp_path).work_needs == 20 * GB
    assert estimate([blocks], tmp_path, size=1000).work_needs == 2000


def test_the_estimate_of_a_pipeline_over_a_large_input_counts_blocks(tmp_path: Path) -> None:
    part = datasets.Dataset.from_dict({"text": [str(number) * 4000 for number in range(1000, 2000)]})
    data = datasets.concatenate_datasets([part] * 9)
    with Store(tmp_path / "store") as store:
        found = Pipeline([str_length], store=store).estimate_space(data)
    assert found.size > 130_000_000
    assert found.work_needs == bytes_at_once(1) < 110_000_000


def str_length(sample: dict[str, Any]) -> dict[str, Any]:
    return {"length": len(sample["text"])}


def test_a_checkpoint_needs_no_more_than_three_copies_on_one_disk(tmp_path: Path) -> None:
    found = estimate([KnownSize("map"), KnownSize("filter")], tmp_path, mode="checkpoint")
    assert found.size + found.peak == found.formula == 30 * GB
    shrinks = estimate([KnownSize("map", GB), KnownSize("map", GB)], tmp_path, mode="checkpoint")
    assert shrinks.peak == 11 * GB


def test_what_is_all_kept_needs_nothing(tmp_path: Path) -> None:
    found = estimate([KnownSize("map", GB, GB, kept=True)] * 3, tmp_path)
    assert (found.store_needs, found.work_needs, found.problems) == (0, 0, [])


def test_what_does_not_fit_is_told_with_what_to_do(tmp_path: Path) -> None:
    large = 10**16
    (problem,) = estimate([KnownSize("map")], tmp_path, size=large).problems
    assert "needs about" in problem
    assert "use_checkpoint: true" in problem
    shm = Path("/dev/shm")
    if shm.exists() and os.stat(shm).st_dev != os.stat(tmp_path).st_dev:
        problems = estimate([KnownSize("map")], tmp_path, size=large, temp_dir=shm).problems
        assert [problem.split(" needs")[0] for problem in problems] == [
            "the store",
            "the folder of temporary files",
        ]
    (problem,) = estimate(
        [KnownSize("map")] * 3, tmp_path, size=1000, settings=Settings(max_size=500)
    ).problems
    assert "in a store that may hold 500 B" in problem


def test_the_ratio_is_what_the_store_then_shows(store: Store, texts: datasets.Dataset) -> None:
    ratio = disk_space.measure_ratio(texts, "zstd")
    pipeline = Pipeline([registry.make("whitespace_normalization_mapper")], store=store)
    (report,) = pipeline.run(texts).steps
    assert ratio == pytest.approx(report.stored / report.logical, rel=0.35)
    assert disk_space.logical_size(texts) == pytest.approx(report.logical, rel=0.05)
    assert disk_space.logical_size(texts.select(range(len(texts) // 2))) < disk_space.logical_size(texts)
    assert disk_space.measure_ratio(texts.select([]), "zstd") == 1.0
    noise = datasets.Dataset.from_dict({"data": [os.urandom(5000) for _ in range(50)]})
    assert disk_space.measure_ratio(noise, "auto") > 0.95


def test_estimates_hold_what_a_run_then_takes(store: Store, texts: datasets.Dataset) -> None:
    operators = [registry.make(name) for name in ("clean_links_mapper", "whitespace_normalization_mapper")]
    pipeline = Pipeline(operators, store=store)
    before = pipeline.estimate_space(texts)
    assert before.measured == 0
    stored = sum(step.stored for step in pipeline.run(texts).steps)
    assert before.store_needs == pytest.approx(stored, rel=0.4)
    after = pipeline.estimate_space(texts)
    assert (after.measured, after.store_needs) == (2, 0)


def test_a_run_that_will_not_fit_warns_before_it_starts(tmp_path: Path, texts: datasets.Dataset) -> None:
    begun = []

    def begin(sample: dict[str, Any]) -> dict[str, Any]:
        begun.append(len(caught))
        return sample

    with Store(tmp_path / "small", max_size="1MB", memory=0) as small:
        pipeline = Pipeline([begin], store=small)
        pipeline.use_cache = True
        with pytest.warns(CacheWarning, match="in a store that may hold 1 MB") as caught:
            pipeline._warn_of_space(texts, pipeline._plan(texts))
        assert begun == []


def test_intermediate_steps_go_and_the_last_stays(store: Store, texts: datasets.Dataset) -> None:
    operators = [
        registry.make(name) for name in ("clean_links_mapper", "clean_email_mapper", "document_deduplicator")
    ]
    pipeline = Pipeline(operators, store=store)
    expected = pipeline.run(texts).dataset[:]
    gone = pipeline.drop_intermediate(budget=0)
    assert len(gone) == 2
    assert {entry.name.split("/")[1].split("_mapper")[0] for entry in store.entries("steps")} == {
        next(entry.name.split("/")[1] for entry in store.entries("steps") if "deduplicator" in entry.name)
    }
    again = pipeline.run(texts)
    assert [step.hit for step in again.steps] == [True] * 3
    assert again.dataset[:] == expected


def test_intermediate_steps_go_by_age_and_what_was_used_of_late_stays(
    store: Store, texts: datasets.Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["clean_links_mapper", "clean_email_mapper", "document_deduplicator"]
    Pipeline([registry.make(name) for name in names], store=store).run(texts)
    pass_time(monkeypatch, 3600)
    assert Pipeline([registry.make(names[0])], store=store).run(texts).hits == 1
    pipeline = Pipeline([registry.make(name) for name in names], store=store)
    (gone,) = pipeline.drop_intermediate(older_than=1800)
    assert "clean_email_mapper" in gone
    assert pipeline.run(texts).hits == 3
