"""Fixtures of the tests on datasets: real text, and a private folder for the library's own cache."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import datasets
import pytest

from castore import Store
from castore.adapters.datasets import DatasetCache, cutting, wait


@pytest.fixture(autouse=True, scope="module")
def _same_blocks() -> Iterator[None]:
    """See that the tests of a module leave the size of blocks as it was: small ones make later tests slow.

    Has the scope of the module, since `monkeypatch` is undone behind all other fixtures of a test.
    """
    was = cutting.TARGET_BYTES, cutting.TARGET_ROWS
    yield
    assert was == (cutting.TARGET_BYTES, cutting.TARGET_ROWS), "a test of this module has changed them"


@pytest.fixture(autouse=True)
def _own_hugging_face_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hugging face")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "hugging face"))  # for children
    was = datasets.utils.is_progress_bar_enabled()
    datasets.utils.disable_progress_bars()
    yield
    wait()  # results that a test left pending belong to that test
    if was:
        datasets.utils.enable_progress_bars()


@pytest.fixture(scope="session")
def sources() -> dict[str, list[object]]:
    """About a hundred files of the standard library, as columns."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    return {
        "text": [path.read_text(encoding="utf-8", errors="replace") for path in files],
        "name": [path.name for path in files],
        "number": list(range(len(files))),
    }


@pytest.fixture
def texts(sources: dict[str, list[object]]) -> datasets.Dataset:
    """The same as a dataset in memory."""
    return datasets.Dataset.from_dict(sources)


@pytest.fixture
def cache(store: Store) -> DatasetCache:
    """Datasets by name, in an empty store."""
    return DatasetCache(store)
