"""`castore pin` and `castore unpin`: have gc keep entries, or no longer keep them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from castore import Store
from castore.cli.completion import names
from castore.cli.output import AsJson, Failures, describe, print_error, print_json, printable, quote_word
from castore.cli.store_access import check_names, find_entry, list_hint, not_found, open_store
from castore.errors import CastoreError, NotFoundError

_Names = Annotated[list[str], typer.Argument(metavar="NAME...", autocompletion=names, help="Names.")]


def pin(context: typer.Context, name: _Names, as_json: AsJson = False) -> None:
    """Pin entries: gc leaves them alone, expired or not.

    \b
    castore pin imagenet/train-00001.tar
    """
    check_names(name)
    with open_store(context) as store:
        _apply_to_each(store, store.pin, name, "pinned", as_json)


def unpin(context: typer.Context, name: _Names, as_json: AsJson = False) -> None:
    """Undo `castore pin`.

    \b
    castore unpin imagenet/train-00001.tar
    """
    check_names(name)
    with open_store(context) as store:

        def unpin_link(one: str) -> None:
            store.unpin(one)
            _warn_of_link(store, one)

        _apply_to_each(store, unpin_link, name, "unpinned", as_json)


def _warn_of_link(store: Store, name: str) -> None:
    from castore.watch.dangling_links import link_of

    entry = store.entry(name, expired=True)
    path = None if entry is None else link_of(entry)
    if path is not None:
        print_error(
            f"{printable(path)} is a link that stands for {name!r}: the bytes stay as long as the link does;"
            f" `castore rm {quote_word(name)}` lets go of them"
        )


def _apply_to_each(
    store: Store, action: Callable[[str], None], names: list[str], done: str, as_json: bool
) -> None:
    failures = Failures()
    count = 0
    for name in names:
        try:
            if name.endswith("/"):
                find_entry(store, name)  # raises the error that names the problem
            action(name)
            count += 1
        except NotFoundError as error:
            is_folder_named = name.endswith("/")
            failures.add(describe(error if is_folder_named else not_found(store, name, hint=list_hint(name))))
        except CastoreError as error:
            failures.add(describe(error))
    if as_json:
        print_json({done: count, "problems": failures.sentences})
    failures.finish()
