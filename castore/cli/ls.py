"""`castore ls`: lists entries, one a line. Streams: ten million entries take no more memory than ten."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import cached_property
from typing import Annotated

import typer

from castore import Store
from castore.cli.completion import names
from castore.cli.output import Failures, json_text
from castore.cli.std_streams import need_output
from castore.cli.store_access import open_store
from castore.names import check_prefix
from castore.records import Entry
from castore.units import format_duration, format_size

_HEAD = f"{'SIZE':>9} {'STORED':>9}  {'CODEC':<5} {'AGE':>8} {'EXPIRES IN':>10}  PIN  NAME\n"


def ls(
    context: typer.Context,
    prefix: Annotated[
        list[str] | None,
        typer.Argument(metavar="PREFIX...", autocompletion=names, help="Names or folders of names."),
    ] = None,
    long: Annotated[
        bool, typer.Option("-l", "--long", help="Sizes, codec, age, expiry and pin, too.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, one object a line.")] = False,
) -> None:
    """List entries, one a line.

    \b
    castore ls -l imagenet
    """
    need_output()
    write = sys.stdout.write
    prefixes = [check_prefix(one) for one in prefix or [""]]
    failures = Failures()
    has_head = as_json or not long
    with open_store(context) as store:
        form: Callable[[Entry], str] = _json if as_json else _Long(store) if long else _plain
        for one in prefixes:
            found = False
            for entry in store.entries(one):
                if not has_head:
                    write(_HEAD)
                    has_head = True
                found = True
                write(form(entry))
            if one and not found:
                failures.add(f"there is no entry at or below {one!r} in {store.path}")
    failures.finish()


def _plain(entry: Entry) -> str:
    return entry.name + "\n"


def _json(entry: Entry) -> str:
    return json_text(entry._asdict()) + "\n"


class _Long:
    """Writes entries of a store in columns."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def __call__(self, entry: Entry) -> str:
        now = time.time()
        stored = self._away(entry) if entry.away else format_size(entry.stored)
        expires = "" if entry.expires is None else format_duration(max(0, entry.expires - now))
        return (
            f"{format_size(entry.size):>9} {stored:>9}  {entry.codec:<5}"
            f" {format_duration(max(0, round(now - entry.created))):>8} {expires:>10}"
            f"  {'pin' if entry.pinned else '   '}  {entry.name}\n"
        )

    @cached_property
    def _partly_here(self) -> set[bytes]:
        return self._store.source.partly_here()

    def _away(self, entry: Entry) -> str:
        """The share of the stored bytes that is only in a remote, if some of them are here."""
        digest = bytes.fromhex(entry.digest)
        facts = self._store.source.describe_away(digest) if digest in self._partly_here else {}
        if not facts:
            return "away"
        share = 100 * int(facts["here"]) // max(1, int(facts["stored"]))
        return f"{100 - max(1, share)}% away"
