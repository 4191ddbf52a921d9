"""The page on the tree cache is true: its examples run from top to bottom in one session."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest

from castore.adapters.tree import level
from tests.test_docs import python_blocks

PAGE = Path(__file__).parents[2] / "docs" / "tree.md"


def test_the_python_of_the_tree_page_runs_and_prints_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    examples = doctest.DocTestParser().get_doctest(
        python_blocks(PAGE), {"__name__": "page"}, PAGE.name, str(PAGE), 0
    )
    assert len(examples.examples) > 30
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    failed, _ = doctest.DocTestRunner(optionflags=flags).run(examples)
    assert not failed, capsys.readouterr().out


def test_the_table_of_compressions_is_what_there_is() -> None:
    table = PAGE.read_text().split("## Compression")[1].split("##")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.M)) - {"compression"} == set(level.COMPRESSIONS)
