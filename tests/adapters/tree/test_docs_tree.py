"""The page on the tree cache is true: its examples run from top to bottom in one session."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from castore.adapters.tree import level
from tests.docs.test_pages import run_examples

PAGE = Path(__file__).parents[3] / "docs" / "tree.md"


def test_the_python_of_the_tree_page_runs_and_prints_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run_examples(PAGE, more_than=30, capsys=capsys)


def test_the_table_of_compressions_is_what_there_is() -> None:
    table = PAGE.read_text().split("## Compression")[1].split("##")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.M)) - {"compression"} == set(level.COMPRESSIONS)
