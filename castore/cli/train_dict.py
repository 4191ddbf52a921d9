"""`castore train-dict`: trains a zstd dictionary for the small blobs below a prefix, and reports its gain."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from castore.cli.completion import names
from castore.cli.output import AsJson, plural, print_json, progress, spinner
from castore.cli.store_access import open_store
from castore.errors import InvalidValueError, NotFoundError
from castore.objects.dictionaries import DICTIONARY_LIMIT
from castore.units import format_size

if TYPE_CHECKING:
    from castore.training import Rewritten, Trained


def train_dict(
    context: typer.Context,
    prefix: Annotated[
        str, typer.Argument(metavar="PREFIX", autocompletion=names, help='Folder of names; "" for all.')
    ],
    samples: Annotated[int, typer.Option(metavar="N", help="How many blobs to learn from.")] = 10_000,
    size: Annotated[str, typer.Option(metavar="SIZE", help="The dictionary's bytes, at most.")] = "112KB",
    level: Annotated[
        int | None, typer.Option(metavar="N", help="zstd's level to train for.  [the store's]")
    ] = None,
    recompress: Annotated[
        bool, typer.Option("--recompress", help="Compress the small blobs that are there again with it.")
    ] = False,
    off: Annotated[
        bool, typer.Option("--off", help="Compress new blobs below PREFIX without a dictionary again.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Have small files that are alike take less.

    Trains a zstd dictionary from the small blobs below PREFIX, and compresses new ones with it.

    \b
    castore train-dict records
    castore train-dict records --recompress
    castore train-dict records --off
    """
    if off and recompress:
        raise InvalidValueError("--off and --recompress exclude each other")
    with open_store(context) as store:
        if off:
            if not store.drop_dictionary(prefix):
                raise NotFoundError(
                    f"{prefix or '/'} has no dictionary; `castore stat` lists those there are"
                )
            facts: dict[str, object] = {"prefix": prefix, "off": True}
            if as_json:
                print_json(facts)
            else:
                typer.echo(f"new blobs below {prefix or '/'} are compressed without a dictionary again")
            return
        with spinner("training"):
            trained = store.train_dictionary(prefix, samples=samples, size=size, level=level)
        rewritten = None
        if recompress:
            with progress("rewriting", None) as done:
                rewritten = store.recompress(prefix, progress=done)
    if as_json:
        rewriting = {} if rewritten is None else {"rewritten": rewritten._asdict()}
        print_json({**trained._asdict(), "saving": round(trained.saving, 4), **rewriting})
    else:
        _print(trained, rewritten)


def describe_gain(trained: Trained) -> str:
    """The gain of a dictionary, in a sentence."""
    return (
        f"{plural(trained.held_out, 'sample')} that it has not seen:"
        f" {trained.plain / trained.before:.2f}x smaller without it,"
        f" {trained.plain / trained.after:.2f}x with it, {trained.saving:.0%} fewer bytes"
    )


def _print(trained: Trained, rewritten: Rewritten | None) -> None:
    where = trained.prefix or "/"
    typer.echo(
        f"{where}: dictionary {trained.id}, {format_size(trained.size)},"
        f" from {plural(trained.samples, 'sample')}"
    )
    typer.echo(describe_gain(trained))
    limit = format_size(DICTIONARY_LIMIT)
    if rewritten is None:
        typer.echo(
            f"new blobs of at most {limit} there use it; --recompress compresses those again that are there"
        )
        return
    typer.echo(
        f"{rewritten.blobs:,} of {plural(rewritten.looked_at, 'blob')} compressed again:"
        f" {format_size(rewritten.before)} became {format_size(rewritten.after)};"
        " `castore gc` frees what they took before"
    )
