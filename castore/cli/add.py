"""`castore add`: puts files, folders with all below them, or the bytes of a pipe.

Small files are put in batches, several at a time in threads: a commit for each would cost more than the file.
Large ones go one after the other, since one alone keeps all cores busy.
"""

from __future__ import annotations

import sqlite3
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from castore.cli.completion import codecs
from castore.cli.output import (
    LISTED,
    AsJson,
    Failures,
    describe,
    plural,
    print_error,
    print_json,
    printable,
    progress,
    spinner,
)
from castore.cli.std_streams import standard_input
from castore.cli.store_access import check_text, store_path
from castore.cli.walk import Source, destinations, find
from castore.errors import CastoreError, InvalidValueError
from castore.names import check_name
from castore.units import format_size

if TYPE_CHECKING:
    from castore import Store
    from castore.cli.add_batches import FileAdder

#: The PATH that means standard input.
INPUT = "-"

Search = Callable[[str, str], Iterator[Source]]


def add(
    context: typer.Context,
    path: Annotated[
        list[str],
        typer.Argument(metavar="PATH...", help='Files, folders with all below them; "-" is standard input.'),
    ],
    prefix: Annotated[
        str | None,
        typer.Option("--as", metavar="PREFIX", help="Name for a file, or for the folder the names go into."),
    ] = None,
    codec: Annotated[
        str | None,
        typer.Option(metavar="CODEC", autocompletion=codecs, help="auto, zstd, lz4, gzip or none."),
    ] = None,
    ttl: Annotated[
        str | None, typer.Option(metavar="TIME", help='How long the entries live, like 30d, or "never".')
    ] = None,
    meta: Annotated[list[str] | None, typer.Option(metavar="K=V", help="Metadata; may be repeated.")] = None,
    pin: Annotated[bool, typer.Option("--pin", help="Have gc leave the entries alone.")] = False,
    dictionary: Annotated[
        bool, typer.Option("--dict", help="First train a dictionary for each folder's small files.")
    ] = False,
    cross_mounts: Annotated[
        bool, typer.Option("--cross-mounts", help="Enter file systems that are mounted below a folder, too.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Put files into the store, and make the store if there is none.

    \b
    castore add shards/                     shards/train-0.tar is named shards/train-0.tar
    castore add shards/ --as imagenet       ... imagenet/train-0.tar
    castore add tokens.npy --as run2/tokens.npy
    castore add records/ --dict             small files that are alike take much less together
    tar c photos | castore add - --as photos.tar
    """
    from castore import Store
    from castore.cli.add_batches import AddOptions, FileAdder

    is_input = INPUT in path
    named = {INPUT: _input_name(path, prefix)} if is_input else destinations(path, prefix)
    options = AddOptions(codec, ttl, _metadata(meta or []), pin)
    options.check()
    if dictionary and codec not in (None, "auto", "zstd"):
        raise InvalidValueError(f"--dict needs the codec zstd, not {codec}; leave out --codec")
    if dictionary and is_input:
        raise InvalidValueError("--dict is for folders of small files, not for standard input")
    failures = Failures()
    started = time.monotonic()
    with Store(store_path(context), memory=0) as store:
        folder = str(store.path)
        before, evictions = store.totals(), store.counters().get("evictions", 0)
        empty = _EmptyFolders()
        search = partial(find, store=folder, skip=failures.add, empty=empty.add, cross_mounts=cross_mounts)
        quietly = partial(search, skip=str, empty=str)
        total = _total(named, quietly) if sys.stderr.isatty() and not is_input else None
        trained = _train(store, named, quietly) if dictionary else []
        into: list[str] = []
        with progress("adding", total) as done:
            adder = FileAdder(store, options, failures, done)
            if is_input:
                end = None
                adder.put_input(named[INPUT], standard_input())
                into.append(named[INPUT])
            else:
                end = _put_all(adder, named, search, failures, into)
        after = store.totals()
        evicted = store.counters().get("evictions", 0) - evictions
        if evicted and (gone := adder.count_evicted()):
            failures.add(
                f"{gone:,} of {plural(adder.files, 'file')} had to go again to make room for the others;"
                " raise the budget with `castore init --max-size SIZE`"
            )
        report = {
            "store": folder,
            "files": adder.files,
            "bytes": adder.size,
            "new_blobs": max(0, after.blobs - before.blobs),
            "stored_bytes": max(0, after.stored - before.stored),
            "evicted": evicted,
            "dictionaries": trained,
            "failed": failures.count,
            "problems": failures.sentences,
            "empty_folders": empty.count,
            "error": end,
            "seconds": round(time.monotonic() - started, 3),
        }
    empty.report_omitted()
    if as_json:
        print_json(report)
    elif adder.files or not failures.count:
        _print(report, into)
    failures.finish()


def _input_name(paths: list[str], name: str | None) -> str:
    """The name for the bytes of standard input.

    Raises:
        InvalidValueError: there are other paths, or no name.
    """
    if len(paths) > 1:
        raise InvalidValueError(
            f"{INPUT} is standard input, which goes alone; add the other paths with another command"
            f" (a file of that name is ./{INPUT})"
        )
    if not name or name.endswith("/"):
        raise InvalidValueError(f"standard input has no name; give one: castore add {INPUT} --as NAME")
    return check_name(name)


class _EmptyFolders:
    """Empty folders: a store keeps nothing of them."""

    def __init__(self) -> None:
        self.count = 0
        self._first: list[str] = []

    def add(self, path: str) -> None:
        """Count one, and remember it if it is one of the first."""
        self.count += 1
        if self.count <= LISTED:
            self._first.append(printable(path))

    def report_omitted(self) -> None:
        """Report the folders that were left out. This is no failure: none of them has a byte."""
        if self.count:
            rest = f" and {self.count - LISTED:,} more" if self.count > LISTED else ""
            print_error(
                f"{plural(self.count, 'empty folder')} left out, since a store keeps only files:"
                f" {', '.join(self._first)}{rest}"
            )


def _put_all(
    adder: FileAdder, named: dict[str, str], search: Search, failures: Failures, into: list[str]
) -> str | None:
    """Put the files at each path; fills ``into`` with the names of the paths that gave any.

    Returns:
        The error that ended everything after some files had been put; else None.
    """
    for path, name in named.items():
        before = adder.files
        try:
            adder.put_all(search(path, name))
        except (CastoreError, OSError, sqlite3.Error, KeyboardInterrupt) as error:
            if not adder.files:
                raise
            so_far = f"{plural(adder.files, 'file')} added; the same command goes on from there"
            if isinstance(error, KeyboardInterrupt):
                print_error(so_far)
                raise
            failures.add(f"{describe(error)}; {so_far}")
            return describe(error)
        finally:
            if adder.files > before:
                into.append(name)
    return None


def _train(store: Store, named: dict[str, str], search: Search) -> list[dict[str, Any]]:
    from castore.cli.dictionary_sample import train_dictionaries

    with spinner("training a dictionary"):
        return train_dictionaries(store, named, search)


def _metadata(pairs: list[str]) -> dict[str, str]:
    metadata = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not key or not equals:
            raise InvalidValueError(f"--meta {printable(pair)} is not of the form KEY=VALUE")
        check_text(pair, "--meta")
        metadata[key] = value
    return metadata


def _total(named: dict[str, str], search: Search) -> int:
    """Bytes to put, for the time left that the bar shows: a separate walk, which reports no problems."""
    return sum(source.size for path, name in named.items() for source in search(path, name))


def _print(report: dict[str, Any], names: list[str]) -> None:
    shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    rate = f", {format_size(int(report['bytes'] / report['seconds']))}/s" if report["seconds"] > 1 else ""
    typer.echo(
        f"added {plural(report['files'], 'file')} ({format_size(report['bytes'])}) as {shown or '/'}"
        f" in {report['seconds']:.2f} s{rate}"
    )
    more = f"{format_size(report['stored_bytes'])} more in {report['store']}"
    if report["evicted"]:
        # After evictions, the totals do not show how many blobs were new.
        typer.echo(
            f"{more} after {plural(report['evicted'], 'entry', 'entries')} evicted to stay under the budget"
        )
    else:
        known = max(0, report["files"] - report["new_blobs"])
        typer.echo(f"{more}: {plural(report['new_blobs'], 'new blob')}, {known:,} known already")
    for trained in report["dictionaries"]:
        if "error" in trained:
            typer.echo(f"no dictionary: {trained['error']}")
        else:
            typer.echo(
                f"dictionary {trained['id']} of {trained['prefix'] or '/'}:"
                f" {trained['saving']:.0%} fewer bytes on samples that it has not seen"
            )
