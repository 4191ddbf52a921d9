"""The examples on whole datasets in EasyData's page on caching run unchanged, except for the import."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from datasets import Dataset

from castore.adapters.datasets import DatasetCache


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_dataset_cache() -> None:
    cache = DatasetCache("./dataset_cache")
    dataset = Dataset.from_dict({"text": ["hello", "world"]})
    cache.put("my_dataset", dataset)
    cached_dataset = cache.get("my_dataset")
    assert cached_dataset.to_dict() == dataset.to_dict()
    assert cached_dataset._fingerprint == dataset._fingerprint
    if cache.contains("my_dataset"):
        cache.invalidate("my_dataset")
    assert not cache.contains("my_dataset")
    assert cache.get("my_dataset") is None


def test_processed_dataset_cache(capsys: pytest.CaptureFixture[str]) -> None:
    cache = DatasetCache("./processed_datasets")

    def get_processed_dataset(name: str, process_fn: Callable[[], Dataset]) -> Dataset:
        cached: Dataset | None = cache.get(name)
        if cached:
            print(f"Loaded {name} from cache")
            return cached
        print(f"Processing {name}...")
        dataset = process_fn()
        cache.put(name, dataset)
        return dataset

    def process() -> Dataset:
        return Dataset.from_dict({"n": [1, 2, 3]}).map(lambda row: {"n": row["n"] ** 2})

    made, loaded = (get_processed_dataset("squares", process) for _ in range(2))
    assert made["n"][:] == loaded["n"][:] == [1, 4, 9]
    assert capsys.readouterr().out == "Processing squares...\nLoaded squares from cache\n"
