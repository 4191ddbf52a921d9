"""`castore cat`: entries' bytes to standard output."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from castore.cli.completion import names
from castore.cli.output import Failures, describe
from castore.cli.std_streams import need_output
from castore.cli.store_access import check_names, find_blob, open_store
from castore.errors import CastoreError


def cat(
    context: typer.Context,
    name: Annotated[
        list[str], typer.Argument(metavar="NAME...", autocompletion=names, help="Names or digests.")
    ],
) -> None:
    """Write the bytes of entries to standard output.

    \b
    castore cat imagenet/train-00001.tar | tar -t
    """
    from castore.cli.blob_stream import copy

    need_output()
    check_names(name)
    failures = Failures()
    with open_store(context) as store:
        for one in name:
            try:
                copy(store, find_blob(store, one), sys.stdout.buffer.write)
                store.count_use(one)
            except CastoreError as error:
                failures.add(describe(error))
        sys.stdout.buffer.flush()
    failures.finish()
