"""The page on datasets is true: its examples run from top to bottom in one session."""

from __future__ import annotations

import doctest
from pathlib import Path

import pytest

from castore.adapters.datasets import wait
from tests.test_docs import python_blocks

PAGE = Path(__file__).parents[2] / "docs" / "datasets.md"


def test_the_python_of_the_datasets_page_runs_and_prints_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    examples = doctest.DocTestParser().get_doctest(
        python_blocks(PAGE), {"__name__": "page"}, PAGE.name, str(PAGE), 0
    )
    assert len(examples.examples) > 25
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    failed, _ = doctest.DocTestRunner(optionflags=flags).run(examples)
    wait()
    assert not failed, capsys.readouterr().out
