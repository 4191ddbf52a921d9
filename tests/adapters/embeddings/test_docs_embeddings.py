"""The page on embeddings is true: its examples run from top to bottom in one session."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.test_pages import run_examples

PAGE = Path(__file__).parents[3] / "docs" / "embeddings.md"


def test_the_python_of_the_embeddings_page_runs_and_prints_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    run_examples(PAGE, more_than=20, capsys=capsys)
