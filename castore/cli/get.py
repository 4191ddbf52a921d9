"""`castore get`: writes an entry's bytes into a file, whole or not at all."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Annotated, BinaryIO

import typer

from castore import Store
from castore.cli.completion import names
from castore.cli.output import printable, progress
from castore.cli.std_streams import need_output
from castore.cli.store_access import find_blob, open_store, require_path
from castore.errors import CastoreError, add_filename
from castore.records import Blob
from castore.system.local_files import replacing

#: Below this size a bar would be gone before it is seen.
_LARGE = 32_000_000


def get(
    context: typer.Context,
    name: Annotated[str, typer.Argument(autocompletion=names, metavar="NAME", help="A name or a digest.")],
    output: Annotated[
        str, typer.Option("-o", "--output", metavar="FILE", help='Where to; "-" is standard output.')
    ],
) -> None:
    """Write an entry's bytes into a file.

    \b
    castore get imagenet/train-00001.tar -o train.tar
    """
    require_path(output, "-o", "file")
    if output == "-":
        need_output()
    with open_store(context) as store:
        blob = find_blob(store, name)
        store.count_use(name)
        if output == "-":
            _write(store, blob, sys.stdout.buffer, name)
            sys.stdout.buffer.flush()
        else:
            _write_file(store, blob, output, name)


def _write_file(store: Store, blob: Blob, output: str, name: str) -> None:
    target = os.path.realpath(output)
    if os.path.isdir(target):
        raise CastoreError(f"{printable(output)} is a folder; give the name of a file in it with -o")
    if output.endswith(os.sep):
        raise CastoreError(f"there is no folder {printable(output)}; make it first, and name a file in it")
    folder = os.path.dirname(target)
    if not os.path.isdir(folder):
        raise CastoreError(
            f"there is no folder {printable(folder)} to write {printable(output)} into; make it first"
        )
    with add_filename(output), replacing(output) as file:
        _write(store, blob, file, name)


def _write(store: Store, blob: Blob, file: BinaryIO, name: str) -> None:
    from castore.cli.blob_stream import copy

    with progress(name, blob.size, wanted=blob.size >= _LARGE) as done:
        copy(store, blob, partial(_write_piece, file, done))


def _write_piece(file: BinaryIO, done: Callable[[int], object], piece: bytes) -> None:
    file.write(piece)
    done(len(piece))
