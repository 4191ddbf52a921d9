"""`castore add`: files, and folders with all below them.

Small files are put in batches, several at a time in threads: a commit for each would cost more than the file. Large
ones go one after the other, since one alone keeps all cores busy.
"""

from __future__ import annotations

import time
from typing import Annotated

import typer

from castore.cli.opening import store_path
from castore.cli.output import AsJson, Failures, print_json, progress
from castore.cli.walk import destinations, find


def add(
    context: typer.Context,
    path: Annotated[
        list[str], typer.Argument(metavar="PATH...", help="Files, and folders with all below them.")
    ],
    prefix: Annotated[
        str | None,
        typer.Option("--as", metavar="PREFIX", help="Name for a file, or for the folder the names go into."),
    ] = None,
    codec: Annotated[str | None, typer.Option(metavar="CODEC", help="auto, zstd, lz4, gzip or none.")] = None,
    ttl: Annotated[
        str | None, typer.Option(metavar="TIME", help="How long the entries live, like 30d.")
    ] = None,
    meta: Annotated[list[str] | None, typer.Option(metavar="K=V", help="Metadata; may be repeated.")] = None,
    pin: Annotated[bool, typer.Option("--pin", help="Have gc leave the entries alone.")] = False,
    as_json: AsJson = False,
) -> None:
    """Put files into the store, and make the store if there is none.

    \b
    castore add shards/                     shards/train-0.tar is named shards/train-0.tar
    castore add shards/ --as imagenet       ... imagenet/train-0.tar
    castore add tokens.npy --as run2/tokens.npy
    """
    from castore import Store
    from castore.cli.putting import Options, Putter

    named = destinations(path, prefix)
    options = Options(codec, ttl, _metadata(meta or []), pin)
    failures = Failures()
    started = time.monotonic()
    with Store(store_path(context), memory=0) as store:
        folder = str(store.path)
        before, evictions = store.index.totals(), store.index.counters().get("evictions", 0)
        total = _measure(named, folder)
        with progress("adding", total) as done:
            putter = Putter(store, options, failures, done)
            for one, name in named.items():
                putter.put_all(find(one, name, store=folder, skip=failures.add))
        after = store.index.totals()
        report = {
            "store": folder,
            "files": putter.files,
            "bytes": putter.bytes,
            "new_blobs": max(0, after.blobs - before.blobs),
            "stored_bytes": max(0, after.stored - before.stored),
            "evicted": store.index.counters().get("evictions", 0) - evictions,
            "skipped": failures.count,
            "seconds": round(time.monotonic() - started, 3),
        }
    if as_json:
        print_json(report)
    else:
        _print(report)
    failures.finish()
