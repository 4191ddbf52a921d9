"""`docs/watching.md` is true: its Python runs as pasted, and its shell output is the command's output."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest

from castore import Store
from castore.watch.folder import is_temporary
from tests.docs.test_pages import python_blocks
from tests.watch.conftest import Watch, run

PAGE = Path(__file__).parents[2] / "docs" / "watching.md"
_FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def test_the_python_of_the_page_runs_and_prints_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    examples = doctest.DocTestParser().get_doctest(
        python_blocks(PAGE), {"__name__": "page"}, PAGE.name, str(PAGE), 0
    )
    assert len(examples.examples) > 8
    failed, _ = doctest.DocTestRunner(optionflags=_FLAGS).run(examples)
    assert not failed, capsys.readouterr().out


def test_every_option_and_every_event_is_on_the_page(store: Store, folder: Path, watch: Watch) -> None:
    page = PAGE.read_text()
    options = set(re.findall(r"^  +(--[a-z-]+)", run(store.path, "watch", "--help").stdout, re.M))
    assert len(options) > 6
    assert {option for option in options - {"--help"} if f"`{option}" not in page} == set()
    source = "".join(path.read_text() for path in (PAGE.parents[1] / "castore" / "watch").glob("*.py"))
    told = set(re.findall(r'Event\(\s*"([a-z]+)"', source)) | {"added", "changed", "dropped", "unpinned"}
    assert len(told) > 9
    assert {event for event in told if f"`{event}`" not in page} == set()


def test_the_temporary_names_of_the_page_are_skipped() -> None:
    listed = re.search(r"until they are renamed: (.*?), and others", PAGE.read_text(), re.S)
    assert listed is not None
    names = [name.replace("*", "x") for name in re.findall(r"`([^`]+)`", listed[1])] + ["tmpxxxxxxxx"]
    assert len(names) > 6
    assert [name for name in names if not is_temporary(name)] == []
