"""Results and studies as Markdown, between markers in `docs/benchmarks.md`.

Renders only from the JSON of a run, so the page can be made again without measuring. Reports missed goals,
and rows with peers ahead, as plainly as the rest.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tools.bench.harness import NOT_MEASURED, Goal, Result, Study, verdict

_INTRODUCTION = """\
# Benchmarks

Figures from `make bench`, written here by it. Contestants of a row run in turn (A B C A B C …), each in \
every
round; a figure is the median of its rounds, with the least and the greatest beside it. The ratio says how \
many times as
good a contestant is as the row's reference: above 1 is better, for rates and for times alike. Ratios travel
between machines; absolute figures do not. Cold rows start with the kernel's caches dropped, and mounts put \
up anew.

`make bench` runs all suites, which takes the better part of an hour; `make bench ARGS="--suite kv --suite \
mount"` runs some, `--quick` shows small
ones and leaves this page alone, and `--json` prints all figures on file. Each run ends with every goal, \
reached or missed.
"""


def write(page: Path, suite: str, run: dict[str, Any]) -> None:
    """Put the report of one suite between its markers. If they are missing, it goes below the others."""
    text = page.read_text() if page.exists() else _INTRODUCTION
    others = [found.end() for found in re.finditer("<!-- /bench:[a-z]+ -->", text)]
    _put(page, text, suite, render(run), max(others, default=len(text)))


def write_first(page: Path, name: str, section: str) -> None:
    """Put a section between its markers; if they are missing, above those of all suites."""
    text = page.read_text()
    first = re.search("<!-- bench:[a-z]+ -->", text)
    _put(page, text, name, section, first.start() if first else len(text))


def _put(page: Path, text: str, name: str, section: str, place: int) -> None:
    begin, end = f"<!-- bench:{name} -->", f"<!-- /bench:{name} -->"
    block = f"{begin}\n{section}\n{end}"
    pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
    if pattern.search(text):
        text = pattern.sub(lambda _: block, text)
    else:
        text = f"{text[:place].rstrip()}\n\n{block}\n\n{text[place:].lstrip()}".rstrip() + "\n"
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(text)


def render(run: dict[str, Any]) -> str:
    """One suite's run as a section of Markdown."""
    results = [Result.from_json(row) for row in run["rows"]]
    studies = [Study(**study) for study in run.get("studies", ())]
    return "\n".join(
        [
            f"## {run['title']}\n",
            f"{run['about']}\n",
            *_table(results),
            *_picture(run),
            *(line for study in studies for line in _study(study)),
            *_section("Goals", [*goals(results), *(goal for study in studies for goal in study.goals)]),
            *_section("Where a peer is ahead", peers_ahead(results)),
            *_circumstances(run),
        ]
    ).rstrip()


def _table(results: list[Result]) -> Iterator[str]:
    if not results:
        return
    yield "| what | contestant | median | least – greatest | ratio |"
    yield "|---|---|---:|---:|---:|"
    for result in results:
        if result.skipped:
            yield f"| {result.name} | not measured: {result.skipped} | | | |"
            continue
        for number, timing in enumerate(result.timings):
            name = f"**{timing.name}**" if timing.ours else timing.name
            if timing.skipped:
                yield (
                    f"| {result.name if number == 0 else ''} | {name} | not measured: {timing.skipped} | | |"
                )
                continue
            spread = f"{figure(min(timing.figures))} – {figure(max(timing.figures))}"
            ratio = "1 (reference)" if timing.name == result.reference else times(result, timing.name)
            yield (
                f"| {result.name if number == 0 else ''} | {name} | {figure(timing.median)} {result.unit} "
                f"| {spread} | {ratio} |"
            )
    yield ""


def _picture(run: dict[str, Any]) -> Iterator[str]:
    if picture := run.get("picture"):
        yield f"![{run['title']}: how many times as good as each row's reference](images/{picture})\n"


def _study(study: Study) -> Iterator[str]:
    yield f"**{study.name}**\n"
    yield f"| {' | '.join(study.header)} |"
    yield "|---" * study.labels + "|---:" * (len(study.header) - study.labels) + "|"
    yield from (f"| {' | '.join(line)} |" for line in study.lines)
    yield ""
    if study.note:
        yield f"{study.note}\n"
    if study.picture:
        yield f"![{study.name}](images/{study.picture})\n"


def goals(results: list[Result]) -> list[str]:
    """One sentence for each goal: reached or missed, and by what."""
    return [_goal(result, goal) for result in results for goal in result.goals]


def _goal(result: Result, goal: Goal) -> str:
    if goal.against is not None:
        wanted = f"at least {goal.factor:.3g} times {goal.against}"
    else:
        assert goal.at_most is not None, "a goal has a peer or a figure"
        wanted = f"at most {goal.at_most:g} {result.unit}"
    question = f"{result.name}: {goal.contestant}, {wanted}"
    for name in (goal.contestant, goal.against):
        if why := result.why_not(name):
            return f"{NOT_MEASURED}: {question}: {why}"
    if goal.against is not None:
        got = result.ratio(goal.contestant, goal.against)
        return verdict(got >= goal.factor, f"{question}: {got:.2f} times")
    median = result.timing(goal.contestant).median
    return verdict(
        goal.at_most is None or median <= goal.at_most, f"{question}: {figure(median)} {result.unit}"
    )


def peers_ahead(results: list[Result]) -> list[str]:
    """One sentence for each row in which peers beat all of castore's contestants."""
    found = []
    for result in results:
        ran = [timing for timing in result.timings if not result.why_not(timing.name)]
        ours = [timing.name for timing in ran if timing.ours]
        leads = {
            timing.name: min((result.ratio(timing.name, name) for name in ours), default=0.0)
            for timing in ran
            if not timing.ours
        }
        if ahead := [f"{name} {lead:.2f}" for name, lead in leads.items() if lead > 1]:
            found.append(f"{result.name}: {'; '.join(ahead)} times as good as castore's best")
    return found


def _section(title: str, lines: list[str]) -> Iterator[str]:
    if lines:
        yield f"**{title}**\n"
        yield from (f"- {line}" for line in lines)
        yield ""


def _circumstances(run: dict[str, Any]) -> Iterator[str]:
    machine = ", ".join(f"{key}: {value}" for key, value in run["machine"].items())
    versions = ", ".join(f"{name} {version}" for name, version in run["versions"].items())
    yield f"Made on {run['date']} with `{run['command']}`, {run['rounds']} rounds. Machine: {machine}.\n"
    yield f"Versions: {versions}."
    if data := run.get("data"):
        parts = ", ".join(f"{size / 1e6:.0f} MB of {root}" for root, size in data["bytes_from"].items())
        yield f"\nData: {data['size'] / 1e6:.0f} MB, BLAKE3 `{data['blake3'][:16]}…`: {parts}."


def figure(value: float) -> str:
    """Three significant digits, thousands apart.

    >>> figure(91234.5), figure(0.7431), figure(12.34)
    ('91 200', '0.743', '12.3')
    """
    if value >= 1000:
        return f"{float(f'{value:.3g}'):,.0f}".replace(",", " ")
    return f"{value:.3g}"


def times(result: Result, name: str) -> str:
    """The ratio against the row's reference; empty if there is none."""
    if result.reference is None or result.why_not(name) or result.why_not(result.reference):
        return ""
    return f"{result.ratio(name, result.reference):.2f}"
