"""`castore rm`: removes names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Annotated

import typer

from castore import Store
from castore.cli.completion import names
from castore.cli.output import AsJson, Failures, complain, describe, print_json, printable, typed
from castore.cli.store_access import find_entry, not_found, open_store, see_names
from castore.errors import CastoreError, InvalidValueError
from castore.records import Entry


def rm(
    context: typer.Context,
    name: Annotated[list[str], typer.Argument(metavar="NAME", autocompletion=names, help="Names.")],
    recursive: Annotated[bool, typer.Option("-r", "--recursive", help="Folders of names, too.")] = False,
    as_json: AsJson = False,
) -> None:
    """Remove names. `castore gc` frees the bytes that no name points to any more.

    \b
    castore rm imagenet/train-00001.tar
    castore rm -r imagenet
    """
    if "" in name:  # "" is the folder of all names
        raise InvalidValueError("a NAME is empty; say which names are to go (is a variable unset?)")
    see_names(name)
    failures = Failures()
    removed = 0
    links: list[tuple[str, Entry]] = []
    with open_store(context) as store:
        for one in name:
            try:
                count = (_remove_below if recursive else _remove)(store, one, links.append)
                if not count:
                    raise not_found(store, one, hint=f"`castore rm -r {typed(one)}` removes it")
                removed += count
            except CastoreError as error:
                failures.add(describe(error))
    for path, entry in links:
        complain(
            f"{printable(path)} is a link that stood for {entry.name!r}, and leads to nothing now;"
            f" until gc, `castore get {entry.digest} -o FILE` has the file's bytes"
        )
    if as_json:
        cut = [{"path": path, "name": entry.name, "digest": entry.digest} for path, entry in links]
        print_json({"removed": removed, "links": cut, "problems": failures.sentences})
    failures.finish()


_Note = Callable[[tuple[str, Entry]], object]


def _remove(store: Store, name: str, note: _Note) -> int:
    if name.endswith("/"):
        find_entry(store, name)  # raises the error that names the problem
    entry = store.entry(name, expired=True)
    if entry is not None:
        next(_noted(iter([entry]), note))
    return int(store.delete(name))


def _remove_below(store: Store, prefix: str, note: _Note) -> int:
    return store.delete_many(entry.name for entry in _noted(store.entries(prefix), note))


def _noted(entries: Iterator[Entry], note: _Note) -> Iterator[Entry]:
    """Entries; also collects those whose file was replaced by a link."""
    from castore.watch.dangling_links import link_of

    for entry in entries:
        path = link_of(entry)
        if path is not None:
            note((path, entry))
        yield entry
