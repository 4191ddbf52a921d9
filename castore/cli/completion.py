"""Names of entries, codecs, remotes and refs, for the shell's completion.

A shell asks at every press of the tab key: nothing here may take long, use a network, make a
store, or print.
"""

from __future__ import annotations

import sqlite3

import typer

from castore import settings
from castore.cli.store_access import open_store, store_path
from castore.errors import CastoreError
from castore.index.name_ranges import names_beginning
from castore.objects.codecs import CODECS
from castore.remote.remotes import Remotes

#: Largest number of names to show: more help nobody.
LIMIT = 200


def names(context: typer.Context, incomplete: str) -> list[str]:
    """Names that begin with what was typed."""
    try:
        if settings.load(store_path(context)) is None:
            return []
        with open_store(context) as store:
            return names_beginning(store.index, incomplete, LIMIT)
    except (CastoreError, OSError, sqlite3.Error):
        return []  # the command itself reports the error: a message here would disturb the prompt


def codecs(incomplete: str) -> list[str]:
    """Codecs that begin with what was typed."""
    return [codec for codec in ("auto", *CODECS) if codec.startswith(incomplete)]


def remotes(context: typer.Context, incomplete: str) -> list[str]:
    """Remotes of the store that begin with what was typed."""
    known = _remotes(context)
    return [] if known is None else [name for name in known.names() if name.startswith(incomplete)]


def refs(context: typer.Context, incomplete: str) -> list[str]:
    """Refs that the store has pushed to or pulled from, and that begin with what was typed."""
    known = _remotes(context)
    if known is None:
        return []
    found = {ref for name in known.names() for ref in known.refs(name)}
    return sorted(ref for ref in found if ref.startswith(incomplete))


def _remotes(context: typer.Context) -> Remotes | None:
    try:
        path = store_path(context)
        loaded = settings.load(path)
        return None if loaded is None else Remotes(path, loaded)
    except (CastoreError, OSError):
        return None
