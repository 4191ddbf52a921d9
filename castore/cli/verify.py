"""`castore verify`: reads blobs back and sets bad ones aside."""

from __future__ import annotations

from typing import Annotated

import typer

from castore.cli.exit_codes import FAILED
from castore.cli.output import AsJson, abbreviate, plural, print_json, progress
from castore.cli.store_access import open_store
from castore.errors import InvalidValueError
from castore.names import LINKS
from castore.repair.verify import Report
from castore.units import format_size


def verify(
    context: typer.Context,
    sample: Annotated[
        str, typer.Option(metavar="PART", help="Read this part of the blobs only, chosen at random.")
    ] = "100%",
    repair: Annotated[
        bool, typer.Option("--repair", help="Drop the entries of bad blobs, so that they are computed again.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Read everything back and check it. Exit code 1 means that something was bad.

    \b
    castore verify
    castore verify --sample 5%
    """
    part = _part(sample)
    with open_store(context) as store:
        total = round(store.totals().stored * part)
        with progress("verifying", total) as done:
            report = store.verify(repair=repair, sample=part, progress=done)
    if as_json:
        print_json({**report._asdict(), "bad": [finding._asdict() for finding in report.bad]})
    else:
        _print(report, part, repair, store.read_only)
    if report.bad:
        raise typer.Exit(FAILED)


def _part(sample: str) -> float:
    percent = sample.strip().endswith("%")
    try:
        part = float(sample.strip().removesuffix("%")) / (100 if percent else 1)
    except ValueError:
        part = 0.0
    if not 0 < part <= 1:
        raise InvalidValueError(f"{sample!r} is not a part of the store; write it like 5% or 0.05")
    return part


def _print(report: Report, part: float, repair: bool, read_only: bool) -> None:
    read = f"{plural(report.checked, 'blob')} ({format_size(report.stored)} as stored) read"
    if not report.bad:
        is_too_small = part < 1 and not report.checked
        typer.echo(f"{read}: " + ("too small a sample of so few" if is_too_small else "all as they were put"))
        return
    done = "left where they are, for nothing can be written here" if read_only else "set aside in quarantine/"
    typer.echo(f"{read}, {len(report.bad):,} bad and {done}:")
    for finding in report.bad:
        names = ", ".join(abbreviate(finding.names)) or "no name points to it"
        typer.echo(f"  {finding.digest[:16]}  {names}\n    {finding.where}: {finding.why}")
    lost = sum(finding.lost for finding in report.bad)
    if not lost:
        return
    if repair:
        links = sum(name.startswith(f"{LINKS}/") for name in report.dropped)
        entries = plural(len(report.dropped) - links, "entry", "entries")
        typer.echo(f"{entries} dropped; add or compute them again")
        if links:
            typer.echo(
                f"{plural(links, 'file')} behind a link of `castore watch --replace` lost; `castore watch DIR"
                " --as PREFIX --restore` names what it cannot put back"
            )
    elif not read_only:
        typer.echo(
            f"{lost:,} of them {'is a miss' if lost == 1 else 'are misses'} now; putting the same bytes again"
            " heals that, --repair drops the entries"
        )
