"""`castore log`: lists the commits of a ref, the newest first."""

from __future__ import annotations

from typing import Annotated

import typer

from castore.cli.completion import refs
from castore.cli.output import AsJson, print_json, print_table
from castore.cli.remote_access import FromRemote, find_remote, format_local, split_ref
from castore.cli.std_streams import need_output
from castore.cli.store_access import open_store
from castore.units import format_size


def log(
    context: typer.Context,
    ref: Annotated[
        str,
        typer.Argument(metavar="REF[@COMMIT]", autocompletion=refs, help="The ref, or a commit to begin at."),
    ],
    source: FromRemote = None,
    limit: Annotated[
        int, typer.Option(metavar="N", min=1, show_default=True, help="At most so many commits.")
    ] = 20,
    as_json: AsJson = False,
) -> None:
    """List the commits of a ref, the newest first.

    \b
    castore log main --from team
    """
    need_output()
    name, commit = split_ref(ref)
    with open_store(context) as store:
        found = find_remote(store, source, "--from").log(name, commit=commit, limit=limit)
    if as_json:
        print_json([one._asdict() for one in found])
        return
    rows = (
        (
            one.commit[:12],
            format_local(one.time),
            one.writer,
            f"{one.entries:,}",
            format_size(one.size),
            one.note,
        )
        for one in found
    )
    print_table(("ID", "TIME", "WRITER", "NAMES", "SIZE", "NOTE"), rows)
