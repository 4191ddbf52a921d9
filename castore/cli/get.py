"""`castore get`: writes entries' bytes into files, each whole or not at all.

Must never write outside the folder that was named: names are relative, and have no "..".
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Annotated, BinaryIO

import typer

from castore import Store
from castore.cli.blob_stream import copy
from castore.cli.completion import names
from castore.cli.output import (
    AsJson,
    Failures,
    describe,
    plural,
    print_json,
    printable,
    progress,
    quote_word,
)
from castore.cli.signals import terminable
from castore.cli.std_streams import need_output
from castore.cli.store_access import find_blob, find_entry, open_store, require_path
from castore.errors import CastoreError, NotFoundError, RemoteError, add_filename
from castore.names import check_prefix
from castore.records import Blob, Entry
from castore.system.local_files import descriptor_of, replacing
from castore.system.sql_errors import is_full
from castore.units import format_size

#: Below this size a bar would be gone before it is seen.
_LARGE = 32_000_000


def get(
    context: typer.Context,
    name: Annotated[str, typer.Argument(autocompletion=names, metavar="NAME", help="A name or a digest.")],
    output: Annotated[
        str, typer.Option("-o", "--output", metavar="FILE", help='Where to; "-" is standard output.')
    ],
    recursive: Annotated[
        bool, typer.Option("-r", "--recursive", help="All files of a folder of names; FILE is a folder then.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Write an entry into a file, a folder of entries into a folder.

    \b
    castore get imagenet/train-00001.tar -o train.tar
    castore get -r imagenet -o shards
    """
    require_path(output, "-o", "folder" if recursive else "file")
    if recursive:
        if output == "-":
            raise typer.BadParameter("-r writes many files; name a folder with -o")
        with terminable(), open_store(context) as store:
            _write_folder(store, name, output, as_json)
        return
    if as_json:
        raise typer.BadParameter("--json reports what -r has written; without -r there is nothing to report")
    if output == "-":
        need_output()
    with terminable(), open_store(context) as store:
        blob = find_blob(store, name, hint=f"`castore get -r {quote_word(name)} -o FOLDER` writes its files")
        store.count_use(name)
        if output == "-":
            _write(store, blob, sys.stdout.buffer, name)
            sys.stdout.buffer.flush()
        else:
            _write_file(store, blob, output, name)


def _write_file(store: Store, blob: Blob, output: str, name: str) -> None:
    if descriptor_of(output) is None:
        _check_place(output)
    with add_filename(output), replacing(output) as file:
        _write(store, blob, file, name)


def _check_place(output: str) -> None:
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


def _write(store: Store, blob: Blob, file: BinaryIO, name: str) -> None:
    with progress(name, blob.size, wanted=blob.size >= _LARGE) as done:
        copy(store, blob, partial(_write_piece, file, done))


def _write_piece(file: BinaryIO, done: Callable[[int], object], piece: bytes) -> None:
    file.write(piece)
    done(len(piece))


def _write_folder(store: Store, prefix: str, output: str, as_json: bool) -> None:
    prefix = check_prefix(prefix)
    if os.path.lexists(output) and not os.path.isdir(output):
        raise CastoreError(f"{printable(output)} is no folder; give a folder with -o")
    began = time.monotonic()
    total = _total(store, prefix)
    failures = Failures()
    files = size = 0
    with progress(prefix or "all", total, wanted=total >= _LARGE) as done:
        for entry in store.entries(prefix):
            path = os.path.join(output, entry.name.removeprefix(prefix).lstrip("/"))
            try:
                with add_filename(path):
                    os.makedirs(os.path.dirname(path), exist_ok=True)
                    _write_entry(store, entry, path, done)
            except RemoteError as error:  # a name that was pulled lazily; the error tells of the remote
                failures.add(f"{printable(path)} is not written: {describe(error)}")
                continue
            except (CastoreError, OSError) as error:
                failures.add(describe(error))
                if is_full(error):
                    break  # no other file would fit
                continue
            files, size = files + 1, size + entry.size
    if as_json:
        print_json({"files": files, "bytes": size, "problems": failures.sentences})
    else:
        took = f"in {time.monotonic() - began:.2f} s"
        typer.echo(f"wrote {plural(files, 'file')} ({format_size(size)}) into {printable(output)} {took}")
    failures.finish()


def _total(store: Store, prefix: str) -> int:
    """Bytes of the files to write.

    Raises:
        NotFoundError: there are none, or the name is a file's.
    """
    if prefix and find_entry(store, prefix) is not None:
        raise CastoreError(f"{prefix!r} is a file; leave out -r")
    total = None
    for entry in store.entries(prefix):
        total = (total or 0) + entry.size
    if total is None:
        where = f"at or below {prefix!r} " if prefix else ""
        raise NotFoundError(f"there is no entry {where}in {store.path}; `castore ls` lists what there is")
    return total


def _write_entry(store: Store, entry: Entry, path: str, done: Callable[[int], object]) -> None:
    blob = find_blob(store, entry.name)
    with replacing(path) as file:
        copy(store, blob, partial(_write_piece, file, done))
    store.count_use(entry.name)
