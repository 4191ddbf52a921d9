"""`castore mount`: shows names as plain files."""

from __future__ import annotations

from enum import Enum
from itertools import islice
from pathlib import Path
from typing import Annotated

import typer

from castore.cli.completion import names
from castore.cli.output import print_error
from castore.cli.store_access import open_store, require_path, store_path
from castore.names import check_prefix


class Fetched(str, Enum):
    """The choices of `--prefetch`."""

    none = "none"
    open = "open"
    all = "all"


def mount(
    context: typer.Context,
    mountpoint: Annotated[
        str, typer.Argument(metavar="MOUNTPOINT", help="An empty folder, made if it is missing.")
    ],
    prefix: Annotated[
        str,
        typer.Option(
            metavar="PREFIX", autocompletion=names, help="Show only what is below this.", show_default=False
        ),
    ] = "",
    remote: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Show the names of a remote, without a pull: bytes come when they are read.",
            show_default=False,
        ),
    ] = "",
    ref: Annotated[
        str | None,
        typer.Option(metavar="REF[@COMMIT]", help="Of the remote: what to show.  [default: main]"),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", help="Show new commits of the ref as they come.")
    ] = False,
    prefetch: Annotated[
        Fetched,
        typer.Option(metavar="none|open|all", help="Fetch ahead: the rest of files in use, or all."),
    ] = Fetched.none,
    pin: Annotated[
        bool,
        typer.Option("--pin", help="Have gc leave all of it alone while mounted."),
    ] = False,
    foreground: Annotated[bool, typer.Option("--foreground", help="Serve until unmounted.")] = False,
    allow_other: Annotated[bool, typer.Option("--allow-other", help="Let other users in.")] = False,
    cache_size: Annotated[
        str, typer.Option(metavar="SIZE", help="Bound on decoded frames kept in RAM.")
    ] = "64MB",
    threads: Annotated[
        int | None, typer.Option(metavar="N", help="Requests handled at once.  [a few more than cores]")
    ] = None,
) -> None:
    """Show the store as plain files. They are read-only, and there until `castore umount`.

    \b
    castore mount /mnt/data
    castore mount /mnt/imagenet --prefix imagenet --pin
    castore mount /mnt/team --remote team --follow
    """
    from castore_fuse import api

    require_path(mountpoint, "MOUNTPOINT")
    store = store_path(context)
    if prefix and not remote:
        _warn_if_empty(context, prefix)
    serve = api.foreground if foreground else api.mount
    result: int | Path = serve(
        store,
        mountpoint,
        prefix=prefix,
        pin=pin,
        allow_other=allow_other,
        cache_size=cache_size,
        threads=threads,
        remote=remote,
        ref=ref,
        follow=follow,
        prefetch=prefetch.value,
    )
    if isinstance(result, int):
        raise typer.Exit(result)
    if remote and prefix and not any(result.iterdir()):
        print_error(f"{ref or 'main'} of remote {remote} has no name below {prefix!r}, so the mount is empty")
    what = f"{ref or 'main'} of remote {remote}" if remote else store
    typer.echo(f"{what} is mounted at {result}")


def _warn_if_empty(context: typer.Context, prefix: str) -> None:
    """Warn if the mount shows nothing: a mistyped prefix looks like a folder that is empty on purpose."""
    folder = check_prefix(prefix)
    with open_store(context) as store:
        found = [entry.name for entry in islice(store.entries(folder), 2)]
    if found == [folder]:
        print_error(f"{folder!r} is a file with no name below it, so the mount is empty")
    elif folder and not found:
        print_error(
            f"no name is below {folder!r} yet, so the mount is empty; `castore ls` lists what there is"
        )
