"""The page on datasets is true: its examples run from top to bottom in one session."""

from __future__ import annotations

from pathlib import Path

import pytest

from castore.adapters.datasets import wait
from tests.docs.test_pages import run_examples

PAGE = Path(__file__).parents[3] / "docs" / "datasets.md"


def test_the_python_of_the_datasets_page_runs_and_prints_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    try:
        run_examples(PAGE, more_than=25, capsys=capsys)
    finally:
        wait()
