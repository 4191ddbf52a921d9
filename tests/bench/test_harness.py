"""The timing of contestants, and the sentences about their figures."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from tools.bench import glance, report
from tools.bench.harness import (
    MISSED,
    NOT_MEASURED,
    REACHED,
    Contestant,
    Goal,
    Result,
    Row,
    Study,
    measure,
    milliseconds,
    per_second,
    verdict,
)

GOALS = [
    Goal("castore", 2.0, "peer"),
    Goal("castore", 8.0, "peer"),
    Goal("castore", at_most=20),
    Goal("castore", 1.0, "absent"),
]


def timed(name: str, seconds: float, skipped: str = "") -> Contestant:
    return Contestant(name, lambda: seconds, ours=name == "castore", skipped=skipped)


def result(goals: list[Goal] | None = None, castore: float = 0.010) -> Result:
    """castore takes 10 ms and a peer 40; a third cannot run here."""
    contestants = [timed("castore", castore), timed("peer", 0.040), timed("absent", 0.001, "no such kernel")]
    return measure(Row("get", milliseconds(), contestants, reference="peer", goals=goals or []), 5)


def run(suite: str, results: list[Result], studies: list[Study] | None = None) -> dict[str, object]:
    return {
        "suite": suite,
        "title": suite,
        "about": "",
        "date": "2026-01-01",
        "command": "",
        "rounds": 5,
        "machine": {},
        "versions": {},
        "rows": [found.to_json() for found in results],
        "studies": [study.to_json() for study in studies or []],
    }


def test_contestants_take_turns_after_one_untimed_run_each() -> None:
    turns: list[str] = []
    contestants = [
        Contestant(name, partial(turns.append, name), partial(turns.append, f"prepare {name}"))
        for name in "ab"
    ]
    found = measure(Row("turns", milliseconds(), contestants), 2)
    assert turns == ["prepare a", "a", "prepare b", "b"] * 3
    assert [len(timing.figures) for timing in found.timings] == [2, 2]


def test_a_contestant_that_cannot_run_here_is_never_run() -> None:
    def fails() -> None:
        raise AssertionError

    row = Row(
        "get",
        milliseconds(),
        [timed("castore", 0.01), Contestant("absent", fails, fails, skipped="no kernel")],
    )
    assert [timing.figures for timing in measure(row, 3).timings] == [pytest.approx([10.0] * 3), []]


def test_a_peer_that_fails_costs_its_own_figures_and_no_others() -> None:
    def fails() -> float:
        turns.append("peer")
        if len(turns) > 2:
            raise RuntimeError("its worker\nhangs")
        return 1.0

    turns: list[str] = []
    contestants = [timed("castore", 0.010), Contestant("peer", fails)]
    found = measure(Row("get", milliseconds(), contestants, reference="peer"), 5)
    assert found.timing("castore").figures == [10.0] * 5
    assert (found.timing("peer").figures, found.timing("peer").skipped) == ([], "it failed: its worker hangs")
    assert len(turns) == 3
    ours = Contestant("castore", fails, ours=True)
    with pytest.raises(RuntimeError):
        measure(Row("get", milliseconds(), [ours]), 5)


def test_a_ratio_above_one_is_better_for_times_and_for_rates() -> None:
    assert result().ratio("castore", "peer") == pytest.approx(4)
    rates = measure(Row("read", per_second(1, "files/s"), [timed("castore", 0.01), timed("peer", 0.04)]), 5)
    assert rates.ratio("castore", "peer") == pytest.approx(4)


def test_a_result_survives_its_json() -> None:
    assert Result.from_json(result(GOALS).to_json()) == result(GOALS)


def test_each_goal_is_reached_missed_or_not_measured_and_says_by_what() -> None:
    assert report.goals([result(GOALS)]) == [
        "reached: get: castore, at least 2 times peer: 4.00 times",
        "**missed**: get: castore, at least 8 times peer: 4.00 times",
        "reached: get: castore, at most 20 ms: 10 ms",
        "*not measured*: get: castore, at least 1 times absent: no such kernel",
    ]


def test_a_peer_that_is_ahead_is_named_in_one_line_a_row() -> None:
    assert report.peers_ahead([result()]) == []
    assert report.peers_ahead([result(castore=0.080)]) == ["get: peer 2.00 times as good as castore's best"]


def test_the_page_says_why_a_contestant_has_no_figures() -> None:
    assert "|  | absent | not measured: no such kernel | | |" in report.render(run("kv", [result()]))


def test_the_glance_has_each_goal_of_the_suites_in_full_and_counts_the_others() -> None:
    study = Study(
        "memory", ["a"], [["b"]], goals=[verdict(False, "less: than: 300 MB"), verdict(True, "all equal")]
    )
    runs = {
        "torch": run("torch", [], [study]),
        "scale": run("scale", [], [study]),
        "kv": run("kv", [result(GOALS)]),
    }
    lines = glance.lines(runs)
    assert [(line.suite, line.verdict) for line in lines] == [
        ("kv", REACHED),
        ("kv", MISSED),
        ("kv", REACHED),
        ("kv", NOT_MEASURED),
        ("scale", MISSED),
        ("scale", REACHED),
    ]
    assert lines[1][1:3] == ("get: castore, at least 8 times peer", "4.00 times")
    assert [line[1:3] for line in lines[4:]] == [("less: than", "300 MB"), ("all equal", "")]
    assert glance.summarize_others(runs) == [("torch", 1, 2, ["less: than: 300 MB"])]
    assert glance.summarize(runs) == "8 goals: 4 reached, 3 missed, 1 not measured."
    assert glance.markdown(runs, ["kv", "mount", "scale"]).endswith("No results on file of: mount.")


def test_the_glance_is_replaced_between_its_markers_and_what_people_wrote_stays(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    report.write_glance(page, "an older one")
    page.write_text(page.read_text() + "\n## By hand\n")
    report.write_glance(page, "a newer one")
    text = page.read_text()
    parts = ["# Benchmarks", "bench:glance", "a newer one", "/bench:glance", "## By hand"]
    assert sorted(text.index(part) for part in parts) == [text.index(part) for part in parts]
    assert "an older one" not in text


def test_a_suite_has_a_page_of_its_own_that_its_next_run_replaces(tmp_path: Path) -> None:
    folder = tmp_path / "benchmarks"
    report.write(folder, "kv", run("kv", [result()]))
    report.write(folder, "mount", run("mount", [result()]))
    report.write(folder, "kv", run("kv", [result(castore=0.020)]))
    assert sorted(path.name for path in folder.iterdir()) == ["kv.md", "mount.md"]
    assert "20 ms" in (folder / "kv.md").read_text()
    assert "20 ms" not in (folder / "mount.md").read_text()
    assert (folder / "kv.md").read_text().startswith("# ")


def test_generated_prose_is_filled_and_only_tables_are_wide() -> None:
    study = Study(
        "memory", ["a"], [["b"]], note="a note " * 40, goals=[verdict(False, "less " * 50 + ": 1 s")]
    )
    page = report.render({**run("kv", [result(GOALS)], [study]), "about": "what it is about " * 20})
    assert [line for line in page.splitlines() if len(line) > 110 and not line.startswith("|")] == []
