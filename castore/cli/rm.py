"""`castore rm`: removes names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Annotated

import typer

from castore import Store
from castore.cli.completion import names
from castore.cli.output import AsJson, Failures, describe, print_error, print_json, printable, quote_word
from castore.cli.store_access import check_names, find_entry, not_found, open_store
from castore.errors import CastoreError
from castore.records import Entry


def rm(
    context: typer.Context,
    name: Annotated[list[str], typer.Argument(metavar="NAME...", autocompletion=names, help="Names.")],
    recursive: Annotated[bool, typer.Option("-r", "--recursive", help="Folders of names, too.")] = False,
    as_json: AsJson = False,
) -> None:
    """Remove names. `castore gc` frees the bytes that no name points to any more.

    \b
    castore rm imagenet/train-00001.tar
    castore rm -r imagenet
    """
    check_names(name)
    failures = Failures()
    removed = 0
    links: list[tuple[str, Entry]] = []
    with open_store(context) as store:
        for one in name:
            try:
                count = (_remove_below if recursive else _remove)(store, one, links.append)
                if not count:
                    raise not_found(store, one, hint=f"`castore rm -r {quote_word(one)}` removes it")
                removed += count
            except CastoreError as error:
                failures.add(describe(error))
    for path, entry in links:
        print_error(
            f"{printable(path)} is a link that stood for {entry.name!r}, and leads to nothing now;"
            f" until gc, `castore get {entry.digest} -o FILE` has the file's bytes"
        )
    if as_json:
        cut = [{"path": path, "name": entry.name, "digest": entry.digest} for path, entry in links]
        print_json({"removed": removed, "links": cut, "problems": failures.sentences})
    failures.finish()


_CollectLink = Callable[[tuple[str, Entry]], object]


def _remove(store: Store, name: str, collect: _CollectLink) -> int:
    if name.endswith("/"):
        find_entry(store, name)  # raises the error that names the problem
    entry = store.entry(name, expired=True)
    if entry is not None:
        next(_collect_links(store, iter([entry]), collect))
    return int(store.delete(name))


def _remove_below(store: Store, prefix: str, collect: _CollectLink) -> int:
    return store.delete_many(entry.name for entry in _collect_links(store, store.entries(prefix), collect))


def _collect_links(store: Store, entries: Iterator[Entry], collect: _CollectLink) -> Iterator[Entry]:
    """Entries; also collects those whose file was replaced by a link, and lets go of the link's bytes."""
    from castore.watch.dangling_links import link_of
    from castore.watch.link_registry import LinkRemover

    remover = LinkRemover(store)
    for entry in entries:
        path = link_of(entry)
        if remover.release(entry) and path is not None:
            collect((path, entry))
        yield entry
