"""`castore diff`: lists the names that differ between two commits of a remote, one a line."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from castore.cli.completion import refs
from castore.cli.output import json_text
from castore.cli.remote_access import FromRemote, find_remote, split_ref
from castore.cli.std_streams import need_output
from castore.cli.store_access import open_store
from castore.names import check_prefix
from castore.units import format_size

if TYPE_CHECKING:
    from castore import RemoteChange


def diff(
    context: typer.Context,
    old: Annotated[
        str, typer.Argument(metavar="REF[@A]", autocompletion=refs, help="A ref, or a commit of it.")
    ],
    new: Annotated[
        str,
        typer.Argument(metavar="REF[@B]", autocompletion=refs, help="Another, to compare with the first."),
    ],
    source: FromRemote = None,
    prefix: Annotated[
        str,
        typer.Option(
            metavar="PREFIX", show_default=False, help="Compare the names at and below it.  [default: all]"
        ),
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, one object a line.")] = False,
) -> None:
    """List what differs between two commits. Lines begin with + (new), - (gone) or ~ (changed).

    \b
    castore diff main@1a2b3c4d main --from team
    """
    need_output()
    check_prefix(prefix)
    with open_store(context) as store:
        remote = find_remote(store, source, "--from")
        changes = remote.diff(split_ref(old), split_ref(new), prefix=prefix)
    for change in changes:
        sys.stdout.write(f"{json_text(change._asdict()) if as_json else _line(change)}\n")


def _line(change: RemoteChange) -> str:
    mark = "+" if change.old is None else "-" if change.new is None else "~"
    sizes = (f"{'' if size is None else format_size(size):>9}" for size in (change.old, change.new))
    return f"{mark} {' '.join(sizes)}  {change.name}"
