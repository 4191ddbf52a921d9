"""`castore push`: names of the store come into a ref of a remote, and the bytes that the remote lacks."""

from __future__ import annotations

from typing import Annotated

import typer

from castore.cli.completion import names, refs, remotes
from castore.cli.output import AsJson, growing_progress, plural, print_json
from castore.cli.remote_access import conflicts_reported, count_changes, find_remote, short
from castore.cli.store_access import check_text, open_store
from castore.names import check_prefix
from castore.units import format_size


def push(
    context: typer.Context,
    prefix: Annotated[
        str,
        typer.Argument(
            metavar="PREFIX",
            autocompletion=names,
            show_default=False,
            help="Push the names at and below it.  [default: all]",
        ),
    ] = "",
    to: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", autocompletion=remotes, help="The remote.  [default: the only one there is]"
        ),
    ] = None,
    ref: Annotated[
        str,
        typer.Option(
            metavar="REF", autocompletion=refs, show_default=True, help="The ref; made if there is none."
        ),
    ] = "main",
    note: Annotated[
        str, typer.Option(metavar="TEXT", show_default=False, help="A note for the history.")
    ] = "",
    delete: Annotated[
        bool, typer.Option("--delete", help="Also remove names from the ref that the store does not have.")
    ] = False,
    restore: Annotated[
        bool, typer.Option("--restore", help="Also push names that others have removed from the ref.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Bring names into a ref of a remote. Only bytes that the remote lacks travel.

    \b
    castore push imagenet --to team
    castore push --to team --ref nightly --note "with the new labels"
    """
    check_prefix(prefix)
    check_text(note, "--note")
    advice = f"`castore pull {ref} --replace` takes the ref's bytes, and --ref OTHER pushes to another ref"
    with open_store(context) as store, conflicts_reported(ref, advice, as_json=as_json):
        remote = find_remote(store, to, "--to")
        with growing_progress("pushing") as progress:
            pushed = remote.push(
                prefix, ref=ref, note=note, delete=delete, restore=restore, progress=progress
            )
    if as_json:
        print_json({"remote": remote.name, **pushed._asdict()})
        return
    at = short(ref, pushed.commit)
    changes = count_changes(new=pushed.added, changed=pushed.changed, removed=pushed.removed)
    if changes:
        sent = f"{format_size(pushed.sent)} in {plural(pushed.objects, 'object')}"
        typer.echo(f"pushed {changes} to {at}: {sent}")
    else:
        typer.echo(f"nothing to push: {at} has {'the others' if pushed.gone else 'all that changed here'}")
    if pushed.gone:
        typer.echo(
            f"not pushed: {plural(pushed.gone, 'name')} that others have removed; --restore puts them back,"
            " and --ref OTHER takes them"
        )
