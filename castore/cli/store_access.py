"""Opens a command's store, and finds the entries and blobs that its arguments name.

Only `init`, `add` and `watch` may make a store: in other commands, an empty new store would hide a mistyped
folder.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

from castore import Store, settings
from castore.cli.output import printable, quote_word
from castore.errors import CastoreError, InvalidValueError, NotFoundError, StoreError
from castore.names import check_name, check_prefix
from castore.records import LOST, Blob, Entry
from castore.units import parse_ttl

_HEX = re.compile(r"[0-9a-f]{8,64}").fullmatch


def store_path(context: typer.Context) -> Path:
    """The folder that `--store`, the environment or the default names."""
    given = context.find_root().params.get("store")
    return settings.store_folder(None if given is None else require_path(given, "--store"))


def check_names(given: Sequence[str]) -> None:
    """Check that all names, or folders of names, are valid, before anything is done with the first of them.

    Raises:
        InvalidNameError: nothing can have one of the names.
        InvalidValueError: one is empty.
    """
    if "" in given:  # which would be the folder of all names
        raise InvalidValueError("a NAME is empty; give the names (is a variable unset?)")
    for name in given:
        check_name(name if name == "/" else name.removesuffix("/"))


def check_text(text: str, what: str) -> str:
    """Return ``text``, which must be UTF-8.

    Raises:
        InvalidValueError: it is not.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidValueError(f"{what} {printable(text)} is not UTF-8; write it in UTF-8") from error
    return text


def require_path(path: str, what: str, kind: str = "folder") -> str:
    """``path``, unless it is empty: the system would take "" for the working folder, which nobody has named.

    Raises:
        InvalidValueError: it is.
    """
    if not path:
        raise InvalidValueError(f"{what} is empty; give a {kind} (is a variable unset?)")
    return path


def open_store(context: typer.Context, **options: Any) -> Store:
    """The store, which must exist.

    Raises:
        StoreError: there is none.
    """
    path = store_path(context)
    require_store(path)
    return Store(path, memory=0, **options)


def require_store(path: Path) -> None:
    """Check that there is a store.

    Raises:
        StoreError: there is none.
    """
    if settings.load(path) is None:
        raise StoreError(settings.no_store_message(path))


def check_ttl(ttl: str) -> None:
    """Refuse a lifetime that no entry can have.

    Raises:
        InvalidValueError: it is no duration, or none at all.
    """
    if parse_ttl(ttl) == 0:
        raise InvalidValueError(
            f"--ttl {ttl} lets entries expire before they can be read;"
            " `--ttl never` is for entries that never do"
        )


def find_entry(store: Store, name: str) -> Entry | None:
    """The entry of a name that is not expired.

    Raises:
        InvalidNameError: nothing can have that name.
    """
    if (folder := name.removesuffix("/")) != name and folder:
        if find_entry(store, check_prefix(folder)) is not None:
            raise NotFoundError(f"{folder!r} is a file; leave out the '/' at its end")
        raise not_found(store, folder, hint=list_hint(folder))
    return store.entry(name)


def find_blob(store: Store, name: str, *, hint: str | None = None) -> Blob:
    """The blob that a name or a digest (or 8 and more of its first hex digits) stands for; names come first.
    ``hint`` is the advice if the name is a folder of names; by default how to list it.

    Raises:
        NotFoundError: there is none.
        CastoreError: several digests begin so.
    """
    entry = find_entry(store, name)
    if entry is not None:
        blob = store.blob(entry.digest)
        if blob is None or blob.pack == LOST:
            raise NotFoundError(
                f"the bytes of {name!r} were found damaged or missing;"
                " add it again, or `castore verify --repair`"
            )
        return blob
    found = store.blobs_starting_with(name) if _HEX(name) else []
    if len(found) > 1:
        raise CastoreError(f"several digests begin with {name}; give more digits")
    if not found:
        raise not_found(store, name, hint=hint or list_hint(name))
    return found[0]


def not_found(store: Store, name: str, *, hint: str) -> NotFoundError:
    """The error for a name that no entry has; ``hint`` is the advice if it is a folder of names."""
    if next(store.entries(name), None) is not None:
        return NotFoundError(f"{name!r} is a folder of entries; {hint}")
    return NotFoundError(f"there is no entry {name!r} in {store.path}; `castore ls` lists what there is")


def list_hint(folder: str) -> str:
    """The advice for a name that is a folder."""
    return f"`castore ls {quote_word(folder)}` lists them"
