"""`castore gc`: removes what has expired, what is over the budget, and what nobody names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import typer

from castore.cli.exit_codes import FAILED
from castore.cli.output import AsJson, abbreviate, plural, print_error, print_json, spinner
from castore.cli.store_access import open_store
from castore.gc import GRACE_SECONDS
from castore.gc.collect import Collected, Plan
from castore.units import format_duration, format_size, parse_budget


def gc(
    context: typer.Context,
    max_size: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help='Budget in stored bytes, like 200GB, or "unlimited"; default the store\'s.'
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print what would be removed.")] = False,
    grace: Annotated[
        str,
        typer.Option(
            metavar="TIME", help="How long bytes are kept whose last name is gone.", show_default=True
        ),
    ] = format_duration(GRACE_SECONDS),
    as_json: AsJson = False,
) -> None:
    """Free space. Expired entries go first, then the least recently used down to the budget, then bytes
    without a name.

    \b
    castore gc --max-size 100GB --dry-run
    """
    with open_store(context) as store, spinner("collecting"):
        budget = store.settings.max_size if max_size is None else parse_budget(max_size)
        plan = store.gc(max_size, dry_run=dry_run, grace=grace)
    if as_json:
        print_json({**plan._asdict(), "dry_run": dry_run, "remaining": plan.remaining})
    else:
        for line in _lines(plan):
            typer.echo(line)
    if plan.pinned and budget is not None:
        print_error(
            f"pins hold {format_size(plan.pinned)}, more than the budget of {format_size(budget)}:"
            " `castore unpin` entries, or end mounts that were made with --pin; links of `castore watch"
            " --replace` keep their bytes, too"
        )
        raise typer.Exit(FAILED)


def _lines(plan: Plan | Collected) -> Iterator[str]:
    if plan.expired or plan.evicted or plan.blobs or plan.away:
        yield _sum(plan)
    else:
        yield f"nothing to remove: {format_size(plan.stored)} stored"
    yield from _details(plan)


def _sum(plan: Plan | Collected) -> str:
    return (
        f"{'would remove' if isinstance(plan, Plan) else 'removed'}:"
        f" {plural(len(plan.expired) + len(plan.evicted), 'entry', 'entries')},"
        f" {plural(plan.blobs, 'blob')}, {format_size(plan.freed)} of {format_size(plan.stored)};"
        f" {format_size(plan.remaining)} {'would stay' if isinstance(plan, Plan) else 'stay'}"
    )


def _details(plan: Plan | Collected) -> Iterator[str]:
    groups = (
        ("expired", plan.expired),
        ("least recently used", plan.evicted),
        ("left by writers that died", plan.leftovers),
    )
    for what, items in groups:
        if items:
            yield f"{what}: {len(items):,}"
            yield from (f"  {item}" for item in abbreviate(items))
    if plan.away:
        yield f"kept by name, with bytes only in remotes: {plural(plan.away, 'blob')}"
    if plan.packs:
        yield f"packs {'to compact' if isinstance(plan, Plan) else 'compacted'}: {len(plan.packs):,}"
    if plan.waiting:
        yield (
            f"waiting: {format_size(plan.waiting)} that no name points to any more;"
            " `castore gc --grace 0` frees them at once"
        )
