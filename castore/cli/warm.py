"""`castore warm`: bytes of a remote come into the store before they are read."""

from __future__ import annotations

from typing import Annotated

import typer

from castore.cli.completion import refs
from castore.cli.output import AsJson, growing_progress, plural, print_json
from castore.cli.remote_access import FromRemote, find_remote, parse_shard, short, split_ref
from castore.cli.store_access import open_store
from castore.names import check_prefix
from castore.system.job_rank import required_rank
from castore.units import format_size


def warm(
    context: typer.Context,
    prefix: Annotated[
        str, typer.Argument(metavar="[PREFIX]", help="Of the names.  [default: all]", show_default=False)
    ] = "",
    source: FromRemote = None,
    ref: Annotated[
        str, typer.Option(metavar="REF[@COMMIT]", autocompletion=refs, help="Whose names.")
    ] = "main",
    shard: Annotated[
        str,
        typer.Option(
            metavar="I/N",
            help='One part of N, counted from 0: N nodes share the work. Or "job": the part of this rank, by '
            "the variables of torchrun or Slurm.",
        ),
    ] = "0/1",
    as_json: AsJson = False,
) -> None:
    """Fetch what a mount of a remote will read. Bytes that are here already do not travel.

    \b
    castore warm imagenet/val --from team
    castore warm --from team --shard 3/8
    srun castore warm --from team --shard job
    """
    check_prefix(prefix)
    part = required_rank() if shard == "job" else parse_shard(shard)
    name, commit = split_ref(ref)
    with open_store(context) as store, growing_progress("warming") as progress:
        remote = find_remote(store, source, "--from")
        warmed = remote.warm(prefix, ref=name, commit=commit, shard=part, progress=progress)
    if as_json:
        print_json({"remote": remote.name, **warmed._asdict()})
    else:
        at = short(name, warmed.commit)
        typer.echo(f"here now: {plural(warmed.names, 'name')} of {at}, {format_size(warmed.stored)}")
