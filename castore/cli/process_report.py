"""Prints answers of `castore process` for people: the table of a run, the origin of a row, an estimate."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import typer

from castore.cli.output import console, plural
from castore.units import format_duration, format_size

if TYPE_CHECKING:
    from castore.adapters.datasets import Blame, Estimate
    from castore.recipes import Outcome, Recipe


def print_outcome(outcome: Outcome, recipe: Recipe) -> None:
    """Print a table of a run's steps, and its sums."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("step", no_wrap=not sys.stdout.isatty(), overflow="fold")
    table.add_column("cache")
    for name in ("rows run", "reused", "rows out", "seconds", "saved"):
        table.add_column(name, justify="right", no_wrap=True)
    found = "checkpoint" if recipe.use_checkpoint else "hit"
    missed = "miss" if recipe.use_cache and not recipe.use_checkpoint else "run"
    for step in outcome.steps:
        table.add_row(
            step.name,
            found if step.hit else missed,
            _rows(step.rows_run),
            _rows(step.rows_reused),
            _rows(step.rows_out),
            f"{step.seconds:.2f}",
            format_duration(_rounded(step.seconds_saved)) if step.seconds_saved else "-",
        )
    console().print(table)
    for line in _sums(outcome):
        typer.echo(line)


def _rounded(seconds: float) -> float:
    """Seconds with as many digits as the table has room for."""
    return round(seconds, 2 if seconds < 1 else 1)


def _sums(outcome: Outcome) -> Iterator[str]:
    if outcome.files_read:
        saved = format_duration(_rounded(outcome.seconds_saved)) if outcome.seconds_saved else ""
        kept = f"; the others are kept, and took {saved} when they were read" if saved else ""
        yield f"{outcome.files_read:,} of {plural(outcome.files, 'file')} read{kept}"
    stored, logical = (sum(getattr(step, name) for step in outcome.steps) for name in ("stored", "logical"))
    if stored:
        yield f"the steps take {format_size(stored)} in the store, {format_size(logical)} uncompressed"
    yield (
        f"{plural(outcome.rows_out, 'row')} of {outcome.rows_in:,} in {outcome.export_path} "
        f"({format_size(outcome.exported)}) after {format_duration(outcome.seconds)}"
    )


def _rows(count: int | None) -> str:
    return "-" if count is None else f"{count:,}"


def print_blame(found: Blame, row: int) -> None:
    """Print the steps that a row of the result has passed, and its place in the input."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("step", no_wrap=not sys.stdout.isatty(), overflow="fold")
    table.add_column("operator", no_wrap=True)
    for name in ("row in", "seconds"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("ran", no_wrap=True)
    table.add_column("changed", overflow="fold")
    for step in found.steps:
        table.add_row(
            step.name,
            step.operator[:8],
            _range(step.rows_in),
            "-" if step.seconds is None else f"{step.seconds:.2f}",
            "-" if step.when is None else time.strftime("%m-%d %H:%M", time.localtime(step.when)),
            "?" if step.changed is None else ", ".join(step.changed) or "-",
        )
    console().print(table)
    for step in found.steps:
        if step.note:
            typer.echo(f"{step.name}: {step.note}")
    typer.echo(f"row {row:,} of the result is {_place(found)}")


def _range(rows: tuple[int, int] | None) -> str:
    if rows is None:
        return "?"
    return f"{rows[0]:,}" if rows[0] == rows[1] else f"{rows[0]:,}-{rows[1]:,}"


def _place(found: Blame) -> str:
    """Where a row lies in the input, for people."""
    source = found.source
    assert source is not None  # a recipe has it
    rows = "an unknown row" if found.rows_in is None else f"row {_range(found.rows_in)}"
    if source.path is None:
        return f"{rows} of the input; its file is not known: {source.note}"
    if source.line is not None:
        return f"{rows} of the input: line {source.line:,} of {source.path}"
    if source.row is not None:
        return f"{rows} of the input: row {source.row:,} of {source.path}"
    return f"{rows} of the input, in {source.path}" + (f": {source.note}" if source.note else "")


def estimate_lines(found: Estimate) -> Iterator[str]:
    """Yield the lines of an estimate of the disk that a run takes."""
    yield f"input    {format_size(found.size):>8}  uncompressed"
    counts = ((found.mappers, "mapper"), (found.filters, "filter"), (found.deduplicators, "deduplicator"))
    steps = ", ".join(plural(*count) for count in counts)
    yield f"formula  {format_size(found.formula):>8}  for {steps}, if every step were kept as it is"
    yield f"peak     {format_size(found.peak):>8}  by measured sizes ({found.measured} steps) and compression"
    yield (
        f"store    {format_size(found.store_needs):>8}  more; {format_size(found.store_free)} are free there"
    )
    yield (
        f"work     {format_size(found.work_needs):>8}  at a time;"
        f" {format_size(found.work_free)} are free there"
    )
