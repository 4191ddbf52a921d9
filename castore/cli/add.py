"""`castore add`: files, and folders with all below them.

Small files are put in batches, several at a time in threads: a commit for each would cost more than the file. Large
ones go one after the other, since one alone keeps all cores busy.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from castore.cli.completion import codecs
from castore.cli.opening import store_path
from castore.cli.output import AsJson, Failures, plural, print_json, progress, spinner
from castore.cli.walk import destinations, find
from castore.errors import InvalidValueError
from castore.sizes import format_size

if TYPE_CHECKING:
    from castore import Store


def add(
    context: typer.Context,
    path: Annotated[
        list[str], typer.Argument(metavar="PATH", help="Files, and folders with all below them.")
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
        str | None, typer.Option(metavar="TIME", help="How long the entries live, like 30d.")
    ] = None,
    meta: Annotated[list[str] | None, typer.Option(metavar="K=V", help="Metadata; may be repeated.")] = None,
    pin: Annotated[bool, typer.Option("--pin", help="Have gc leave the entries alone.")] = False,
    dictionary: Annotated[
        bool, typer.Option("--dict", help="First train a dictionary for each folder's small files.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Put files into the store, and make the store if there is none.

    \b
    castore add shards/                     shards/train-0.tar is named shards/train-0.tar
    castore add shards/ --as imagenet       ... imagenet/train-0.tar
    castore add tokens.npy --as run2/tokens.npy
    castore add records/ --dict             small files that are alike take much less together
    """
    from castore import Store
    from castore.cli.putting import Options, Putter

    named = destinations(path, prefix)
    options = Options(codec, ttl, _metadata(meta or []), pin)
    options.check()
    if dictionary and codec not in (None, "auto", "zstd"):
        raise InvalidValueError(f"--dict is for zstd, not for {codec}")
    failures = Failures()
    started = time.monotonic()
    with Store(store_path(context), memory=0) as store:
        folder = str(store.path)
        before, evictions = store.index.totals(), store.index.counters().get("evictions", 0)
        total = _total(named, folder) if sys.stderr.isatty() else None
        learnt = _learn(store, named) if dictionary else []
        with progress("adding", total) as done:
            putter = Putter(store, options, failures, done)
            for one, name in named.items():
                putter.put_all(find(one, name, store=folder, skip=failures.add))
        after = store.index.totals()
        report = {
            "store": folder,
            "files": putter.files,
            "bytes": putter.size,
            "new_blobs": max(0, after.blobs - before.blobs),
            "stored_bytes": max(0, after.stored - before.stored),
            "evicted": store.index.counters().get("evictions", 0) - evictions,
            "dictionaries": learnt,
            "failed": failures.count,
            "seconds": round(time.monotonic() - started, 3),
        }
    if as_json:
        print_json(report)
    elif putter.files or not failures.count:
        _print(report, list(named.values()))
    failures.finish()


def _learn(store: Store, named: dict[str, str]) -> list[dict[str, Any]]:
    from castore.cli.learning import learn

    with spinner("training a dictionary"):
        return learn(store, named)


def _metadata(pairs: list[str]) -> dict[str, str]:
    metadata = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not key or not equals:
            raise InvalidValueError(f"--meta {pair} is not of the form KEY=VALUE")
        metadata[key] = value
    return metadata


def _total(named: dict[str, str], store: str) -> int:
    """Bytes to put, for the time that the bar says is left: a walk of its own, that complains of nothing."""
    return sum(
        source.size for path, name in named.items() for source in find(path, name, store=store, skip=str)
    )


def _print(report: dict[str, Any], names: list[str]) -> None:
    shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    rate = f", {format_size(int(report['bytes'] / report['seconds']))}/s" if report["seconds"] > 1 else ""
    typer.echo(
        f"added {plural(report['files'], 'file')} ({format_size(report['bytes'])}) as {shown or '/'}"
        f" in {report['seconds']:.2f} s{rate}"
    )
    known = max(0, report["files"] - report["new_blobs"])
    typer.echo(
        f"{format_size(report['stored_bytes'])} more in {report['store']}: {plural(report['new_blobs'], 'new blob')},"
        f" {known:,} known already"
    )
    for learnt in report["dictionaries"]:
        if "error" in learnt:
            typer.echo(f"no dictionary: {learnt['error']}")
        else:
            typer.echo(
                f"dictionary {learnt['id']} of {learnt['prefix'] or '/'}: {learnt['saving']:.0%} fewer bytes on samples"
                " that it has not seen"
            )
    if report["evicted"]:
        typer.echo(f"{plural(report['evicted'], 'entry', 'entries')} evicted to stay under the budget")
