"""`castore pin` and `castore unpin`: have gc keep entries, or no longer keep them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Annotated

import typer

from castore import Store
from castore.cli.completion import names
from castore.cli.output import AsJson, Failures, describe, print_error, print_json, printable, quote_word
from castore.cli.store_access import check_names, find_entry, not_found, open_store
from castore.errors import CastoreError, NotFoundError

_Names = Annotated[list[str], typer.Argument(metavar="NAME...", autocompletion=names, help="Names.")]
_Recursive = Annotated[bool, typer.Option("-r", "--recursive", help="Folders of names, too.")]


def pin(
    context: typer.Context, name: _Names, recursive: _Recursive = False, as_json: AsJson = False
) -> None:  # fmt: skip
    """Pin entries: gc leaves them alone, expired or not.

    \b
    castore pin imagenet/train-00001.tar
    castore pin -r imagenet
    """
    check_names(name)
    with open_store(context) as store:
        _apply_to_each(store, store.pin, name, "pin", recursive, as_json)


def unpin(
    context: typer.Context, name: _Names, recursive: _Recursive = False, as_json: AsJson = False
) -> None:  # fmt: skip
    """Undo `castore pin`.

    \b
    castore unpin imagenet/train-00001.tar
    castore unpin -r imagenet
    """
    check_names(name)
    with open_store(context) as store:

        def unpin_and_warn(one: str) -> None:
            store.unpin(one)
            _warn_of_link(store, one)

        _apply_to_each(store, unpin_and_warn, name, "unpin", recursive, as_json)


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
    store: Store, action: Callable[[str], None], names: list[str], verb: str, recursive: bool, as_json: bool
) -> None:
    failures = Failures()
    count = 0
    for name in names:
        try:
            count += (_apply_below if recursive else _apply)(store, action, name)
        except NotFoundError as error:
            is_folder_named = name.endswith("/") and not recursive
            hint = f"`castore {verb} -r {quote_word(name)}` takes all of them"
            failures.add(describe(error if is_folder_named else not_found(store, name, hint=hint)))
        except CastoreError as error:
            failures.add(describe(error))
    if as_json:
        print_json({f"{verb}ned": count, "problems": failures.sentences})
    failures.finish()


def _apply(store: Store, action: Callable[[str], None], name: str) -> int:
    if name.endswith("/"):
        find_entry(store, name)  # raises the error that names the problem
    action(name)
    return 1


def _apply_below(store: Store, action: Callable[[str], None], prefix: str) -> int:
    count = 0
    for entry in store.entries(prefix, expired=True):
        with suppress(NotFoundError):  # removed meanwhile
            action(entry.name)
            count += 1
    if not count:
        raise NotFoundError(prefix)
    return count
