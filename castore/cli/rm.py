"""`castore rm`: removes names."""

from __future__ import annotations

from typing import Annotated

import typer

from castore import Store
from castore.cli.completion import names
from castore.cli.opening import not_found, open_store
from castore.cli.output import Failures, describe
from castore.errors import CastoreError


def rm(
    context: typer.Context,
    name: Annotated[list[str], typer.Argument(metavar="NAME", autocompletion=names, help="Names.")],
    recursive: Annotated[bool, typer.Option("-r", "--recursive", help="Folders of names, too.")] = False,
) -> None:
    """Remove names. `castore gc` frees the bytes that no name points to any more.

    \b
    castore rm imagenet/train-00001.tar
    castore rm -r imagenet
    """
    failures = Failures()
    with open_store(context) as store:
        for one in name:
            try:
                if not (_remove_below(store, one) if recursive else store.delete(one)):
                    raise not_found(store, one, hint=f"`castore rm -r {one}` removes it")
            except CastoreError as error:
                failures.add(describe(error))
    failures.finish()


def _remove_below(store: Store, prefix: str) -> int:
    return store.delete_many(entry.name for entry in store.entries(prefix))
