"""The pages under `docs/` are true: their Python runs as pasted, their links and the tests they name are there.

Examples of a page share one session, in a folder of their own. Must not need anything but what the page says.
"""

from __future__ import annotations

import ast
import doctest
import os
import re
from pathlib import Path

import pytest

from castore.errors import MissingDependencyError
from castore_fuse.lifecycle import check_fuse

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))
_FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def python_blocks(page: Path) -> str:
    """The ``>>>`` examples of a page, at the lines where they stand."""
    out = []
    inside = False
    for line in page.read_text().splitlines():
        inside = line == "```python" or (inside and line != "```")
        out.append(line if inside and line != "```python" else "")
    return "\n".join(out) + "\n"


def run_examples(page: Path, *, more_than: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Assert that the examples of a page, run in one session in the working folder, print what it says."""
    examples = doctest.DocTestParser().get_doctest(
        python_blocks(page), {"__name__": "page"}, page.name, str(page), 0
    )
    assert len(examples.examples) > more_than
    failed, _ = doctest.DocTestRunner(optionflags=_FLAGS).run(examples)
    assert not failed, capsys.readouterr().out


def test_the_python_of_the_python_page_runs_and_prints_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        check_fuse()
    except MissingDependencyError as error:
        pytest.skip(str(error))
    monkeypatch.chdir(tmp_path)
    run_examples(ROOT / "docs" / "python.md", more_than=50, capsys=capsys)


def test_the_python_of_the_file_system_page_runs_and_prints_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CASTORE_DIR", "set by the page")
    run_examples(ROOT / "docs" / "filesystem.md", more_than=30, capsys=capsys)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
        assert os.path.exists(page.parent / target), f"{page.name} links to {target}"


def test_every_page_stands_in_the_index() -> None:
    index = (ROOT / "docs" / "index.md").read_text()
    assert [page.name for page in PAGES if f"]({page.name})" not in index and page.name != "index.md"] == []


def test_every_test_that_a_page_names_is_there() -> None:
    """Pages say of their promises which test shows it: a renamed one would make it a rumour."""
    pages = "".join(page.read_text() for page in PAGES)
    sources = {path: path.read_text() for path in (ROOT / "tests").rglob("test_*.py")}
    named = set(re.findall(r"`(test_\w+)(?:\[.*?\])?`", pages))
    assert len(named) > 20
    there = {name for source in sources.values() for name in re.findall(r"def (test_\w+)", source)}
    assert named - there == set()


ROOMS = sorted(path.parent for path in (ROOT / "castore").glob("*/__init__.py"))


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: room.name)
def test_a_room_says_what_it_is_for_and_what_it_never_does(room: Path) -> None:
    said = ast.get_docstring(ast.parse((room / "__init__.py").read_text())) or ""
    assert "May import:" in said
    assert "Must never" in said
    assert f"`{room.name}/`" in (ROOT / "docs" / "architecture.md").read_text()


def test_at_the_top_of_castore_are_a_dozen_modules_at_most() -> None:
    assert len([*(ROOT / "castore").glob("*.py")]) <= 12


@pytest.mark.parametrize("page", ["architecture.md", "design.md"])
def test_the_modules_that_a_page_names_are_there(page: str) -> None:
    there = [
        f"/{path.relative_to(ROOT)}"
        for folder in ("castore", "fuse")
        for path in (ROOT / folder).rglob("*.py")
    ]
    named = set(re.findall(r"(?<![\w/])[\w/]+\.py\b", (ROOT / "docs" / page).read_text())) - {
        "tests/test_model.py"
    }
    assert len(named) > 10
    assert {name for name in named if not any(path.endswith(f"/{name}") for path in there)} == set()
