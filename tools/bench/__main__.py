"""`python -m tools.bench`: runs suites, keeps their figures as JSON, and writes the pages of figures.

A quick run prints its figures and keeps them apart. It must never replace a page: its jobs are too small to
quote.
"""

from __future__ import annotations

import argparse
import compileall
import datetime
import importlib
import json
import pkgutil
import shlex
import shutil
import sys
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, cast

from rich.console import Console
from rich.status import Status
from rich.table import Table
from rich.text import Text

import castore
import castore_fuse
from tools.bench import corpus, glance, machine, plots, report, suites
from tools.bench.harness import (
    MISSED,
    NOT_MEASURED,
    REACHED,
    Bench,
    Result,
    Row,
    Study,
    Suite,
    measure,
)

HERE = Path(__file__).resolve().parent
PROJECT = HERE.parent.parent
WORK = PROJECT / ".bench"
RESULTS = HERE / "results"
#: All goals of all suites, between markers in a page that is otherwise written by hand.
PAGE = PROJECT / "docs" / "benchmarks.md"
#: A page a suite, generated as a whole.
PAGES = PROJECT / "docs" / "benchmarks"
PICTURES = PAGE.parent / "images"
LEAST_ROUNDS = 5


def main() -> None:
    names = sorted(module.name for module in pkgutil.iter_modules(suites.__path__))
    options = _options(names)
    console = Console(highlight=False, stderr=options.json)
    _compile()
    failed = []
    for name in options.suite or names:
        try:
            _measure(name, options, console)
        except Exception:  # noqa: BLE001 (a failed suite costs its own figures, not the hours of the others)
            console.print_exception()
            failed.append(name)
    runs = _load_runs(names, quick=options.quick)
    _show_glance(runs, names, console)
    if not options.quick:
        report.write_glance(PAGE, glance.markdown(runs, names))
        written = f"{PAGE.relative_to(PROJECT)} and {PAGES.relative_to(PROJECT)}/"
        console.print(f"\nwritten to {written}", soft_wrap=True)
    if options.json:
        goals = [line._asdict() for run in runs.values() for line in glance.lines_of_run(run)]
        sys.stdout.write(json.dumps({"goals": goals, "suites": runs}, indent=1) + "\n")
    if failed:
        sys.exit(
            f"bench: broke: {', '.join(failed)} (why stands above); "
            "figures shown of these are of an earlier run"
        )


def _compile() -> None:
    """Compile castore's modules, as pip compiles those of the peers.

    Works also where PYTHONDONTWRITEBYTECODE forbids it on import.
    """
    for package in (castore, castore_fuse):
        folder = Path(package.__path__[0])
        if not compileall.compile_dir(folder, quiet=1):
            sys.exit(f"bench: the modules of {folder} cannot be compiled (why stands above)")


def _measure(name: str, options: argparse.Namespace, console: Console) -> None:
    """Run one suite; keep its figures and print them."""
    suite = cast("Suite", importlib.import_module(f"tools.bench.suites.{name}"))
    why_not = getattr(suite, "why_not", str)()
    if why_not:
        console.print(f"{name}: not run, {why_not}", soft_wrap=True)
        return
    folder = WORK / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    pictures = folder / "images" if options.quick else PICTURES
    pictures.mkdir(exist_ok=True)
    bench = Bench(folder, pictures, options.quick, options.rounds or (3 if options.quick else LEAST_ROUNDS))
    run = _run(name, suite, bench, console)
    _save_run(name, run, quick=options.quick)
    _print_findings(run, console)


def _options(names: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tools.bench", description="Measures castore beside its peers."
    )
    parser.add_argument("--suite", action="append", choices=names, help="only this suite; may be repeated")
    parser.add_argument(
        "--rounds",
        type=int,
        help=f"rounds a contestant runs (default and least {LEAST_ROUNDS}; with --quick, 3 and 1)",
    )
    parser.add_argument(
        "--quick", action="store_true", help="small jobs, for a glance; leaves the page alone"
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print goals and figures of all suites on file as JSON; what "
        "is for people goes to standard error",
    )
    options = parser.parse_args()
    if options.rounds is not None and options.rounds < (1 if options.quick else LEAST_ROUNDS):
        parser.error(f"figures for the page take at least {LEAST_ROUNDS} rounds; fewer go with --quick")
    return options


def _run(name: str, suite: Suite, bench: Bench, console: Console) -> dict[str, Any]:
    console.rule(f"[bold]{suite.TITLE}")
    run: dict[str, Any] = {
        "suite": name,
        "title": suite.TITLE,
        "about": suite.ABOUT,
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "command": f'make bench ARGS="{shlex.join(sys.argv[1:])}"' if sys.argv[1:] else "make bench",
        "rounds": bench.rounds,
        "machine": machine.describe(bench.work),
        "versions": machine.versions(),
        "rows": [],
        "studies": [],
        "picture": "",
    }
    with console.status("setting up") as status, closing(_iterator(suite, bench)) as rows:
        for item in rows:
            study: Study | None = None
            if isinstance(item, Row):
                result = measure(item, bench.rounds, partial(_progress, status, item.name))
                console.print(_show(result))
                run["rows"].append(result.to_json())
                if item.conclude is not None and not result.skipped:
                    study = item.conclude(result)
            else:
                study = item
            if study is not None:
                console.print(_make_table(study))
                run["studies"].append(study.to_json())
            status.update("setting up the next row")
    run["picture"] = _draw(name, run, bench.pictures)
    archive = next((WORK / "corpus").glob(f"archive-{bench.size(512, 64)}MB.tar"), None)
    if archive is not None and name in ("mount", "stream"):
        run["data"] = corpus.facts(archive)
    return run


def _draw(name: str, run: dict[str, Any], pictures: Path) -> str:
    """Draw the ratios of a suite that puts castore beside its peers; returns the file's name, if any."""
    results = [Result.from_json(row) for row in run["rows"]]
    bars = [bar for result in results for bar in plots.bars(result)]
    if name not in glance.IN_FULL or not bars:
        return ""
    picture = f"ratios-{name}.png"
    plots.ratios(pictures / picture, run["title"], bars)
    return picture


def _progress(status: Status, row: str, contestant: str) -> None:
    status.update(f"{row}: {contestant}")


def _iterator(suite: Suite, bench: Bench) -> Any:
    """The suite's generator. Closing it runs the suite's clean-up, whatever happened between two rows."""
    return suite.rows(bench)


def _show(result: Result) -> Table:
    table = Table(title=result.name, title_justify="left", box=None, padding=(0, 2), min_width=72)
    for header in ("contestant", f"median, {result.unit}", "spread", "ratio"):
        table.add_column(header, justify="left" if header == "contestant" else "right")
    if result.skipped:
        table.add_row(f"not measured: {result.skipped}")
        return table
    for timing in result.timings:
        if timing.skipped:
            table.add_row(timing.name, f"not measured: {timing.skipped}")
            continue
        spread = f"{report.figure(min(timing.figures))} – {report.figure(max(timing.figures))}"
        ratio = report.times(result, timing.name)
        style = "bold" if timing.ours else ""
        table.add_row(timing.name, report.figure(timing.median), spread, ratio, style=style)
    return table


def _make_table(study: Study) -> Table:
    table = Table(title=study.name, title_justify="left", box=None, padding=(0, 2), min_width=72)
    for number, header in enumerate(study.header):
        table.add_column(header, justify="right" if number >= study.labels else "left")
    for line in study.lines:
        table.add_row(*(cell.replace("**", "") for cell in line))
    return table


def _print_findings(run: dict[str, Any], console: Console) -> None:
    results = [Result.from_json(row) for row in run["rows"]]
    met = [goal for study in run["studies"] for goal in study["goals"]]
    for line in [*report.goals(results), *met, *report.peers_ahead(results)]:
        console.print("•", line.replace("*", ""), soft_wrap=True)


def _show_glance(runs: dict[str, dict[str, Any]], names: list[str], console: Console) -> None:
    """Print every goal of the run, reached or missed."""
    console.rule("[bold]At a glance")
    styles = {REACHED: "green", MISSED: "bold red", NOT_MEASURED: "yellow"}
    table = Table(box=None, padding=(0, 2))
    for header in ("suite", "goal", "measured", ""):
        table.add_column(header, justify="right" if header == "measured" else "left")
    for line in glance.lines(runs):
        word = Text(line.verdict.strip("*"), style=styles[line.verdict])
        table.add_row(line.suite, Text(line.goal), Text(line.found), word)
    if table.row_count:
        console.print(table)
    for name, reached, goals, missed in glance.summarize_others(runs):
        console.print(f"{name}: {reached} of {goals} reached", soft_wrap=True)
        for what in missed:
            console.print(Text(f"  missed: {what}"), soft_wrap=True)
    console.print(glance.summarize(runs))
    if without := glance.missing_suites(runs, names):
        console.print(f"no results on file of: {', '.join(without)}")


def _result_file(name: str, *, quick: bool) -> Path:
    return RESULTS / f"{name}{'-quick' if quick else ''}.json"


def _load_runs(names: list[str], *, quick: bool) -> dict[str, dict[str, Any]]:
    """The last run of each suite that has one."""
    files = {name: _result_file(name, quick=quick) for name in names}
    return {name: json.loads(file.read_text()) for name, file in files.items() if file.exists()}


def _save_run(name: str, run: dict[str, Any], *, quick: bool) -> None:
    RESULTS.mkdir(exist_ok=True)
    _result_file(name, quick=quick).write_text(json.dumps(run, indent=1) + "\n")
    if not quick:
        report.write(PAGES, name, run)


if __name__ == "__main__":
    main()
