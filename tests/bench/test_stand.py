"""`python -m tools.bench` itself: a suite of milliseconds, run whole, with its page, files and exit code."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tools.bench import __main__ as stand
from tools.bench import suites

_SUITE = '''\
"""A suite that takes no time."""
from tools.bench.harness import Contestant, Goal, Row, Study, milliseconds, verdict

TITLE = "Tiny"
ABOUT = "Nothing is measured."


def rows(bench):
    try:
        contestants = [
            Contestant("castore", lambda: 0.001, ours=True),
            Contestant("peer", lambda: 0.003),
            Contestant("absent", lambda: 0.0, skipped="not on this machine"),
        ]
        yield Row("get", milliseconds(), contestants, reference="peer", goals=[Goal("castore", 2.0, "peer")])
        table = [["files", str(bench.size(9, 1))]]
        yield Study("a study", ["what", "figure"], table, goals=[verdict(False, "no: 1 s")])
    finally:
        (bench.work / "closed").touch()
'''

_BROKEN = '''\
"""A suite with a mistake in it."""
TITLE = "Broken"
ABOUT = "Nothing is measured."


def rows(bench):
    yield from [1 / 0]
'''

Run = Callable[..., None]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """`python -m tools.bench --suite tiny …`, with every folder that it writes to below `tmp_path`."""
    (tmp_path / "suites").mkdir()
    (tmp_path / "suites" / "tiny.py").write_text(_SUITE)
    (tmp_path / "suites" / "broken.py").write_text(_BROKEN)
    monkeypatch.setattr(suites, "__path__", [*suites.__path__, str(tmp_path / "suites")])
    for name in ("WORK", "RESULTS", "PICTURES", "PROJECT"):
        monkeypatch.setattr(stand, name, tmp_path / name.lower())
    monkeypatch.setattr(stand, "PAGE", tmp_path / "project" / "page.md")
    monkeypatch.setattr(stand, "PAGES", tmp_path / "project" / "pages")
    (tmp_path / "project").mkdir()

    def main(*words: str) -> None:
        monkeypatch.setattr(sys, "argv", ["bench", *words, "--suite", "tiny"])
        stand.main()

    return main


def test_a_run_writes_the_pages_and_ends_with_all_goals(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run()
    message = capsys.readouterr().out
    assert "tiny: 1 of 2 reached" in message.split("At a glance")[1]
    assert "missed: no: 1 s" in message
    glance = (tmp_path / "project" / "page.md").read_text()
    assert "| [tiny](benchmarks/tiny.md) |" in glance
    assert "- tiny: no: 1 s" in glance
    page = (tmp_path / "project" / "pages" / "tiny.md").read_text()
    assert page.startswith("# Tiny\n")
    assert "| files | 9 |" in page
    assert "reached: get: castore, at least 2 times peer: 3.00 times" in page
    assert (
        len(json.loads((tmp_path / "results" / "tiny.json").read_text())["rows"][0]["timings"][0]["figures"])
        == 5
    )
    assert (tmp_path / "work" / "tiny" / "closed").exists()


def test_a_suite_that_breaks_costs_the_others_nothing(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match=r"broke: broken \("):
        run("--suite", "broken", "--quick", "--rounds", "1")
    message = capsys.readouterr().out
    assert "ZeroDivisionError" in message
    assert "tiny: 1 of 2 reached" in message
    assert [path.name for path in (tmp_path / "results").iterdir()] == ["tiny-quick.json"]


def test_a_quick_run_leaves_the_pages_alone(run: Run, tmp_path: Path) -> None:
    run("--quick", "--rounds", "1")
    assert list((tmp_path / "project").iterdir()) == []
    assert [path.name for path in (tmp_path / "results").iterdir()] == ["tiny-quick.json"]


def test_json_is_all_that_standard_output_gets(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    run("--quick", "--json")
    message = capsys.readouterr()
    report = json.loads(message.out)
    assert [(goal["verdict"], goal["found"]) for goal in report["goals"]] == [
        ("reached", "3.00 times"),
        ("**missed**", "1 s"),
    ]
    assert list(report["suites"]) == ["tiny"]
    assert "At a glance" in message.err


def test_figures_for_the_page_take_five_rounds(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run("--rounds", "4")
    assert ended.value.code == 2
    assert "at least 5 rounds" in capsys.readouterr().err
