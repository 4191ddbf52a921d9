"""`castore pin` and `castore unpin`: have gc leave entries alone, and no longer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from castore import Store
from castore.cli.completion import names
from castore.cli.opening import not_found, open_store
from castore.cli.output import Failures, describe
from castore.errors import CastoreError, NotFoundError

_Names = Annotated[list[str], typer.Argument(metavar="NAME", autocompletion=names, help="Names.")]


def pin(context: typer.Context, name: _Names) -> None:
    """Pin entries: gc leaves them alone, expired or not.

    \b
    castore pin imagenet/train-00001.tar
    """
    with open_store(context) as store:
        _each(store, store.pin, name)


def unpin(context: typer.Context, name: _Names) -> None:
    """Undo `castore pin`.

    \b
    castore unpin imagenet/train-00001.tar
    """
    with open_store(context) as store:
        _each(store, store.unpin, name)


def _each(store: Store, do: Callable[[str], None], names: list[str]) -> None:
    failures = Failures()
    for name in names:
        try:
            do(name)
        except NotFoundError:
            failures.add(describe(not_found(store, name, hint=f"`castore ls {name}` lists them")))
        except CastoreError as error:
            failures.add(describe(error))
    failures.finish()
