"""Names of entries and of codecs, for the shell's completion.

A shell asks at every press of the tab key: nothing here may take long, make a store, or print.
"""

from __future__ import annotations

import sqlite3

import typer

from castore import settings
from castore.cli.store_access import open_store, store_path
from castore.errors import CastoreError
from castore.index.name_ranges import names_beginning
from castore.objects.codecs import CODECS

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
