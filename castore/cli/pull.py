"""`castore pull`: names of a ref come into the store, and the bytes that the store lacks."""

from __future__ import annotations

from typing import Annotated

import typer

from castore.cli.completion import refs
from castore.cli.output import AsJson, growing_progress, plural, print_json
from castore.cli.remote_access import (
    FromRemote,
    conflicts_reported,
    count_changes,
    find_remote,
    short,
    split_ref,
)
from castore.cli.store_access import open_store
from castore.names import check_prefix
from castore.units import format_size


def pull(
    context: typer.Context,
    ref: Annotated[
        str,
        typer.Argument(
            metavar="REF[@COMMIT]", autocompletion=refs, help="The ref, or an older commit of it."
        ),
    ],
    source: FromRemote = None,
    prefix: Annotated[
        str,
        typer.Option(
            metavar="PREFIX", show_default=False, help="Pull the names at and below it.  [default: all]"
        ),
    ] = "",
    below: Annotated[
        str,
        typer.Option(
            "--as", metavar="FOLDER", show_default=False, help="A folder of names for all to go into."
        ),
    ] = "",
    replace: Annotated[
        bool, typer.Option("--replace", help="Take the ref's bytes for names that changed here, too.")
    ] = False,
    lazy: Annotated[bool, typer.Option("--lazy", help="Names alone: bytes come when they are read.")] = False,
    as_json: AsJson = False,
) -> None:
    """Bring the names of a ref into the store. Only bytes that the store lacks travel, and each is checked.

    \b
    castore pull main --from team
    castore pull main --from team --lazy
    castore pull main@1a2b3c4d --from team --prefix imagenet --as old
    """
    check_prefix(prefix)
    check_prefix(below)
    name, commit = split_ref(ref)
    advice = "--replace takes the ref's bytes, and --as FOLDER brings its names in beside yours"
    with open_store(context) as store, conflicts_reported(name, advice, as_json=as_json):
        remote = find_remote(store, source, "--from")
        with growing_progress("naming" if lazy else "pulling", counts=lazy) as progress:
            pulled = remote.pull(
                name, commit=commit, prefix=prefix, below=below, replace=replace, lazy=lazy, progress=progress
            )
    if as_json:
        print_json({"remote": remote.name, **pulled._asdict()})
        return
    at = short(name, pulled.commit)
    changes = count_changes(new=pulled.added, changed=pulled.changed)
    if changes:
        fetched = (
            "bytes that are not here come when they are read"
            if lazy
            else f"{format_size(pulled.fetched)} fetched"
        )
        typer.echo(f"pulled {changes} from {at}: {fetched}")
    elif pulled.fetched:
        typer.echo(f"pulled bytes of names that were here, from {at}: {format_size(pulled.fetched)} fetched")
    else:
        what = "nothing that the store lacks" if pulled.unchanged or pulled.expired else "no names"
        typer.echo(f"nothing to pull: {at} has {what}")
    if pulled.removed:
        typer.echo(f"removed: {plural(pulled.removed, 'name')} whose place a file or folder of the ref takes")
    if pulled.expired:
        typer.echo(f"not pulled: {plural(pulled.expired, 'expired name')}")
