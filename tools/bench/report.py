"""Results and studies as Markdown: a page for each suite, and all goals in `docs/benchmarks.md`.

Renders only from the JSON of a run, so the pages can be made again without measuring. Reports missed goals,
and rows with peers ahead, as plainly as the rest.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tools.bench.harness import NOT_MEASURED, Goal, Result, Study, verdict

_WIDTH = 110


def write(folder: Path, suite: str, run: dict[str, Any]) -> None:
    """Write the page of one suite. The page is generated as a whole, so edits by hand are lost."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{suite}.md").write_text(render(run) + "\n")


def write_glance(page: Path, section: str) -> None:
    """Put all goals between their markers, or at the end of a page without markers. The rest stays."""
    text = page.read_text() if page.exists() else "# Benchmarks\n"
    begin, end = "<!-- bench:glance -->", "<!-- /bench:glance -->"
    block = f"{begin}\n\n{section}\n\n{end}"
    pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
    found = pattern.search(text)
    text = pattern.sub(lambda _: block, text) if found else f"{text.rstrip()}\n\n{block}\n"
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(text)


def paragraph(words: str, *, item: bool = False) -> str:
    """Fill a paragraph, or an item of a list, to the width of the project's pages."""
    return textwrap.fill(
        words,
        _WIDTH,
        initial_indent="- " if item else "",
        subsequent_indent="  " if item else "",
        break_long_words=False,
        break_on_hyphens=False,
    )


def render(run: dict[str, Any]) -> str:
    """One suite's run as a page of Markdown."""
    results = [Result.from_json(row) for row in run["rows"]]
    studies = [Study(**study) for study in run.get("studies", ())]
    return "\n".join(
        [
            f"# {run['title']}\n",
            f"{paragraph(run['about'])}\n",
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
        yield f"![{run['title']}: how many times as good as each row's reference](../images/{picture})\n"


def _study(study: Study) -> Iterator[str]:
    yield f"## {study.name}\n"
    yield f"| {' | '.join(study.header)} |"
    yield "|---" * study.labels + "|---:" * (len(study.header) - study.labels) + "|"
    yield from (f"| {' | '.join(line)} |" for line in study.lines)
    yield ""
    if study.note:
        yield f"{paragraph(study.note)}\n"
    if study.picture:
        yield f"![{study.name}](../images/{study.picture})\n"


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
        yield f"## {title}\n"
        yield from (paragraph(line, item=True) for line in lines)
        yield ""


def _circumstances(run: dict[str, Any]) -> Iterator[str]:
    machine = ", ".join(f"{key}: {value}" for key, value in run["machine"].items())
    versions = ", ".join(f"{name} {version}" for name, version in run["versions"].items())
    yield "## Circumstances\n"
    yield paragraph(
        f"Made on {run['date']} with `{run['command']}`, {run['rounds']} rounds. Machine: {machine}."
    )
    yield f"\n{paragraph(f'Versions: {versions}.')}"
    if data := run.get("data"):
        parts = ", ".join(f"{size / 1e6:.0f} MB of {root}" for root, size in data["bytes_from"].items())
        facts = f"Data: {data['size'] / 1e6:.0f} MB, BLAKE3 `{data['blake3'][:16]}…`: {parts}."
        yield f"\n{paragraph(facts)}"


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
