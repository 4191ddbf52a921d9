"""Opening the store that a command is about, and finding what its arguments name.

Only `init` and `add` may make a store: everything else would hide a mistyped folder behind an empty store.
"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Any

import typer

from castore import Store, settings
from castore.errors import CastoreError, NotFoundError, StoreError
from castore.records import LOST, Blob, Entry

_HEX = re.compile(r"[0-9a-f]{8,64}").fullmatch


def store_path(context: typer.Context) -> Path:
    """The folder that `--store`, the environment or the default names."""
    given = context.find_root().params.get("store")
    return Path(os.path.abspath(given or settings.default_path()))


def open_store(context: typer.Context, **options: Any) -> Store:
    """The store, which must exist.

    Raises:
        StoreError: there is none.
    """
    path = store_path(context)
    if settings.load(path) is None:
        raise StoreError(f"there is no store at {path}; `castore init` or `castore add` makes one")
    return Store(path, memory=0, **options)


def find_entry(store: Store, name: str) -> Entry | None:
    """The entry of a name that is not expired."""
    entry = store.index.entry(name)
    return None if entry is None or (entry.expires is not None and entry.expires <= time.time()) else entry


def find_blob(store: Store, name: str) -> Blob:
    """The blob that a name or a digest (or 8 and more of its first hex digits) stands for; names come first.

    Raises:
        NotFoundError: there is none.
        CastoreError: several digests begin so.
    """
    entry = find_entry(store, name)
    if entry is not None:
        blob = store.index.blob(bytes.fromhex(entry.digest))
        if blob is None or blob.pack == LOST:
            raise NotFoundError(
                f"the bytes of {name!r} were found damaged or missing; add it again, or `castore verify --repair`"
            )
        return blob
    found = _blobs_beginning(store, name) if _HEX(name) else []
    if len(found) > 1:
        raise CastoreError(f"several digests begin with {name}; give more of it")
    if not found:
        raise not_found(store, name, hint=f"`castore ls {name}` lists them")
    return found[0]


def not_found(store: Store, name: str, *, hint: str) -> NotFoundError:
    """The error for a name that no entry has; ``hint`` says what to do if it is a folder of names."""
    if next(store.entries(name), None) is not None:
        return NotFoundError(f"{name!r} is a folder of entries; {hint}")
    return NotFoundError(f"there is no entry {name!r} in {store.path}; `castore ls` lists what there is")


def _blobs_beginning(store: Store, digits: str) -> list[Blob]:
    low, high = (bytes.fromhex(digits.ljust(64, fill)) for fill in "0f")
    rows = store.index.connection().execute(
        "SELECT digest, size, stored, codec, pack, offset FROM blobs"
        f" WHERE digest BETWEEN ? AND ? AND pack != {LOST} LIMIT 2",
        (low, high),
    )
    return [Blob(*row) for row in rows]
