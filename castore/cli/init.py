"""`castore init`: makes a store, or changes its defaults."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Annotated

import typer

from castore import settings
from castore.cli.completion import codecs
from castore.cli.output import AsJson, print_json
from castore.cli.store_access import check_ttl, store_path
from castore.errors import InvalidValueError, StoreError
from castore.settings import Settings
from castore.units import format_duration, format_size, parse_budget


def init(
    context: typer.Context,
    codec: Annotated[
        str | None,
        typer.Option(
            metavar="CODEC",
            autocompletion=codecs,
            help="auto, zstd, lz4, gzip or none.  [auto: zstd where it shrinks]",
        ),
    ] = None,
    level: Annotated[int | None, typer.Option(metavar="N", help="The codec's level.")] = None,
    max_size: Annotated[
        str | None, typer.Option(metavar="SIZE", help='Budget in stored bytes, like 200GB, or "unlimited".')
    ] = None,
    ttl: Annotated[
        str | None, typer.Option(metavar="TIME", help='How long new entries live, like 30d, or "never".')
    ] = None,
    shared: Annotated[
        str | None, typer.Option(metavar="GROUP", help="Let this group use the store, too.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Make a store, or change the defaults of one.

    \b
    castore init --max-size 200GB
    castore --store /nvme/cache init --codec lz4 --ttl 30d
    """
    from castore import Store

    if max_size is not None and parse_budget(max_size) == 0:
        raise InvalidValueError(
            f"--max-size {max_size} leaves room for nothing; say how much the store may hold, like 200GB,"
            " or unlimited"
        )
    if ttl is not None:
        check_ttl(ttl)
    path = store_path(context)
    old = settings.load(path)
    base = old or settings.recover(path)
    new = settings.merge(base, codec=codec, level=level, max_size=max_size, ttl=ttl, shared=shared)
    if old is None:
        settings.create(path, new)
    elif new != old:
        settings.require_writable(path)
        if new.shared is not None and new.shared != old.shared:
            settings.create(path, new)
            _share(path, new.shared)
        settings.save(path, new)
    Store(path, memory=0).close()  # makes the index, and refuses file systems that cannot hold one
    verb = "made" if old is None else "changed" if new != old else "unchanged"
    _report(path, new, verb, as_json)


def _share(path: Path, group: str) -> None:
    """Give existing files of the store to the group, with the owner's rights. Skips stores inside it."""
    for folder, folders, files in os.walk(path):
        folders[:] = [
            name for name in folders if not os.path.exists(os.path.join(folder, name, settings.FILE))
        ]
        for item in [folder, *(os.path.join(folder, name) for name in files)]:
            try:
                shutil.chown(item, group=group)
                mode = os.stat(item).st_mode & 0o777
                os.chmod(item, mode | (mode & 0o700) >> 3 | (0o2000 if item == folder else 0))
            except FileNotFoundError:
                continue  # a temporary file of a live process
            except PermissionError as error:
                raise StoreError(
                    f"{item} belongs to somebody else; run this as its owner or as root"
                ) from error


def _report(path: Path, new: Settings, verb: str, as_json: bool) -> None:
    if as_json:
        print_json({"path": str(path), "result": verb, **new._asdict()})
        return
    typer.echo(f"{path}: {verb}")
    level = "" if new.level is None else f", level {new.level}"
    typer.echo(f"  codec     {new.codec}{level}")
    typer.echo(f"  max size  {'no bound' if new.max_size is None else format_size(new.max_size)}")
    typer.echo(f"  ttl       {'entries never expire' if new.ttl is None else format_duration(new.ttl)}")
    typer.echo(f"  shared    {'with nobody' if new.shared is None else 'with group ' + new.shared}")
