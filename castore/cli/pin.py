"""`castore pin` and `castore unpin`: have gc keep entries, or no longer keep them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from castore import Store
from castore.cli.completion import names
from castore.cli.output import AsJson, Failures, complain, describe, print_json, printable, typed
from castore.cli.store_access import find_entry, lists, not_found, open_store, see_names
from castore.errors import CastoreError, NotFoundError

_Names = Annotated[list[str], typer.Argument(metavar="NAME", autocompletion=names, help="Names.")]


def pin(context: typer.Context, name: _Names, as_json: AsJson = False) -> None:
    """Pin entries: gc leaves them alone, expired or not.

    \b
    castore pin imagenet/train-00001.tar
    """
    see_names(name)
    with open_store(context) as store:
        _each(store, store.pin, name, "pinned", as_json)


def unpin(context: typer.Context, name: _Names, as_json: AsJson = False) -> None:
    """Undo `castore pin`.

    \b
    castore unpin imagenet/train-00001.tar
    """
    see_names(name)
    with open_store(context) as store:

        def let_go(one: str) -> None:
            store.unpin(one)
            _tell_of_link(store, one)

        _each(store, let_go, name, "unpinned", as_json)


def _tell_of_link(store: Store, name: str) -> None:
    from castore.watch.dangling_links import link_of

    entry = store.entry(name, expired=True)
    path = None if entry is None else link_of(entry)
    if path is not None:
        complain(
            f"{printable(path)} is a link that stands for {name!r},"
            " and leads to nothing once gc has taken that;"
            f" `castore pin {typed(name)}` keeps it"
        )


def _each(store: Store, do: Callable[[str], None], names: list[str], done: str, as_json: bool) -> None:
    failures = Failures()
    count = 0
    for name in names:
        try:
            if name.endswith("/"):
                find_entry(store, name)  # raises the error that names the problem
            do(name)
            count += 1
        except NotFoundError as error:
            said = name.endswith("/")
            failures.add(describe(error if said else not_found(store, name, hint=lists(name))))
        except CastoreError as error:
            failures.add(describe(error))
    if as_json:
        print_json({done: count, "problems": failures.sentences})
    failures.finish()
