"""All goals in one table: what castore should reach, what it reached, and which goals were not measured.

The table is made from the kept results of all suites, so it shows the last run of each. The suites that put
castore beside its alternatives are shown goal by goal. The others are shown as counts; their own sections
have the details.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from tools.bench import report
from tools.bench.harness import MISSED, NOT_MEASURED, REACHED, Result

#: In the order of the table.
IN_FULL = ("kv", "stream", "mount", "scale")
Runs = Mapping[str, dict[str, Any]]


class Line(NamedTuple):
    """One goal.

    Attributes:
        suite: name of the goal's suite.
        goal: what was asked, in words.
        found: the figure, or the reason why there is none.
        verdict: one of the three words of `harness`.
    """

    suite: str
    goal: str
    found: str
    verdict: str


def lines_of_run(run: dict[str, Any]) -> list[Line]:
    """The goals of one suite."""
    results = [Result.from_json(row) for row in run["rows"]]
    sentences = [
        *report.goals(results),
        *(goal for study in run.get("studies", ()) for goal in study["goals"]),
    ]
    return [_line(run["suite"], sentence) for sentence in sentences]


def _line(suite: str, sentence: str) -> Line:
    verdict, _, what = sentence.partition(": ")
    goal, _, found = what.rpartition(": ")
    return Line(suite, goal or found, found if goal else "", verdict)


def lines(runs: Runs) -> list[Line]:
    """The table: one line for each goal of the suites that are shown in full."""
    return [line for name in IN_FULL if name in runs for line in lines_of_run(runs[name])]


def summarize_others(runs: Runs) -> list[tuple[str, int, int, list[str]]]:
    """For each other suite with goals: its name, goals reached, goals in all, and the missed ones."""
    found = []
    for name in sorted(set(runs) - set(IN_FULL)):
        if goals := lines_of_run(runs[name]):
            reached = sum(line.verdict == REACHED for line in goals)
            missed = [f"{line.goal}: {line.found}" for line in goals if line.verdict == MISSED]
            found.append((name, reached, len(goals), missed))
    return found


def summarize(runs: Runs) -> str:
    """The goals reached and missed, in one sentence."""
    verdicts = [line.verdict for run in runs.values() for line in lines_of_run(run)]
    reached, missed, without = (verdicts.count(word) for word in (REACHED, MISSED, NOT_MEASURED))
    return f"{len(verdicts)} goals: {reached} reached, {missed} missed, {without} not measured."


def missing_suites(runs: Runs, suites: Sequence[str]) -> list[str]:
    """The suites that have no results on file."""
    return [name for name in suites if name not in runs]


def markdown(runs: Runs, suites: Sequence[str]) -> str:
    """The section of `docs/benchmarks.md` that is generated."""
    return "\n".join(_markdown(runs, suites)).rstrip()


def _markdown(runs: Runs, suites: Sequence[str]) -> Iterator[str]:
    yield "## At a glance\n"
    about = "Each figure is of its suite's last run. A suite's page has all its figures."
    yield report.paragraph(f"{summarize(runs)} {about}") + "\n"
    if goals := lines(runs):
        yield "| suite | goal | measured | |"
        yield "|---|---|---:|---|"
        previous = ""
        for line in goals:
            shown = "" if line.suite == previous else f"{_link(line.suite)} ({runs[line.suite]['date']})"
            yield f"| {shown} | {line.goal} | {line.found} | {line.verdict} |"
            previous = line.suite
        yield ""
    if counts := summarize_others(runs):
        yield "| other suite | date | goals reached |"
        yield "|---|---|---:|"
        for name, reached, goals_of_it, _ in counts:
            yield f"| {_link(name)} | {runs[name]['date']} | {reached} of {goals_of_it} |"
        yield ""
        if missed := [f"{name}: {goal}" for name, _, _, goals_of_it in counts for goal in goals_of_it]:
            yield "Missed goals of these suites:\n"
            yield from (report.paragraph(goal, item=True) for goal in missed)
            yield ""
    if without := missing_suites(runs, suites):
        yield report.paragraph(f"No results on file of: {', '.join(without)}.")


def _link(suite: str) -> str:
    return f"[{suite}](benchmarks/{suite}.md)"
