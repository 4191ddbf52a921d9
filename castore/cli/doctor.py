"""`castore doctor`: checks a store, mends what can be mended, and gives advice on the rest."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from castore import layout
from castore.cli.exit_codes import FAILED
from castore.cli.output import AsJson, abbreviate, plural, print_json, progress, spinner
from castore.cli.store_access import open_store, store_path
from castore.units import format_size

if TYPE_CHECKING:
    from castore.repair.doctor import Diagnosis
    from castore.repair.rebuild import Rebuilt


def doctor(
    context: typer.Context,
    rebuild: Annotated[
        bool, typer.Option("--rebuild-index", help="Make a new index from the object directory.")
    ] = False,
    forget_links: Annotated[
        bool,
        typer.Option("--forget-links", help="Let go of the bytes of watched links that are gone for good."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Check a store, and mend what can be mended. Exit code 1 means that something is left to do.

    \b
    castore doctor
    castore doctor --rebuild-index
    """
    path = store_path(context)
    findings, rebuilt = _rebuild(path) if rebuild else (_examine(path), None)
    if forget_links and (forgotten := _forget_links(context)):
        findings = [*_examine(path), forgotten]
    if as_json:
        done = rebuilt._asdict() if rebuilt else {}
        print_json({"findings": [finding._asdict() for finding in findings], **done})
    else:
        _print(findings, rebuilt, path)
    if any(finding.left_to_do for finding in findings):
        raise typer.Exit(FAILED)


def _examine(path: Path) -> list[Diagnosis]:
    from castore.repair.doctor import examine
    from castore.watch import dangling_links

    with spinner("checking"):
        return examine(path, [dangling_links.examine])


def _forget_links(context: typer.Context) -> Diagnosis | None:
    from castore.repair.doctor import Diagnosis
    from castore.watch.link_registry import forget_lost

    with open_store(context) as store:
        lost = forget_lost(store)
    if not lost:
        return None
    size = format_size(sum(held.stored for held in lost))
    return Diagnosis(f"let go of the bytes of {plural(len(lost), 'lost link')} ({size})", True)


def _rebuild(path: Path) -> tuple[list[Diagnosis], Rebuilt]:
    from castore.repair.doctor import rebuild_index

    total = _bytes_below(path / "objects") if sys.stderr.isatty() else None
    with progress("reading objects", total) as done:
        return rebuild_index(path, done)


def _bytes_below(folder: Path) -> int:
    return sum(
        os.lstat(os.path.join(place, name)).st_size for place, _, files in os.walk(folder) for name in files
    )


def _print(findings: list[Diagnosis], rebuilt: Rebuilt | None, path: Path) -> None:
    for finding in findings:
        kind = "mended" if finding.mended else "to do" if finding.left_to_do else "noted"
        typer.echo(f"{kind}: {finding.what}")
        if finding.left_to_do:
            typer.echo(f"  {finding.advice}")
    if rebuilt is not None:
        entries = plural(rebuilt.entries, "entry", "entries")
        typer.echo(f"{path}: a new index of {entries} and {plural(rebuilt.blobs, 'blob')}")
        _list("names whose bytes are not here, dropped", rebuilt.lost)
        if rebuilt.lost and (path / layout.REMOTES).is_dir():
            typer.echo(
                "names that were pulled without bytes come back with `castore pull --lazy`; pin them again"
            )
        _list("could not be read", rebuilt.damaged)
    elif not any(finding.mended or finding.left_to_do for finding in findings):
        typer.echo(f"{path}: all in order")


def _list(what: str, items: list[str]) -> None:
    if items:
        typer.echo(f"{what}: {len(items):,}")
        for item in abbreviate(items):
            typer.echo(f"  {item}")
