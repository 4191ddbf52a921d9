"""`castore watch`: keeps a folder's files in the store as they come, and puts links into a mount in their place."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections import Counter
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Annotated

import typer

from castore.cli.completion import codecs
from castore.cli.opening import store_path
from castore.cli.output import complain, plural, printable, progress
from castore.errors import InvalidValueError
from castore.names import check_prefix
from castore.objects.codecs import check_codec
from castore.sizes import format_size, parse_duration

if TYPE_CHECKING:
    from castore import Store
    from castore.watching.folder import Folder
    from castore.watching.task import Options
    from castore.watching.telling import Event


def watch(
    context: typer.Context,
    folder: Annotated[str, typer.Argument(metavar="DIR", help="The folder.")],
    prefix: Annotated[
        str, typer.Option("--as", metavar="PREFIX", help="The folder of names that its files go into.")
    ],
    mirror: Annotated[bool, typer.Option("--mirror", help="Drop entries whose file is gone.")] = False,
    replace: Annotated[
        bool,
        typer.Option("--replace", help="Put links into a live mount in the place of files that are stored."),
    ] = False,
    restore: Annotated[
        bool, typer.Option("--restore", help="Put the files back in the place of such links, and end.")
    ] = False,
    codec: Annotated[
        str | None,
        typer.Option(metavar="CODEC", autocompletion=codecs, help="auto, zstd, lz4, gzip or none."),
    ] = None,
    settle: Annotated[
        str, typer.Option(metavar="TIME", help="How long nothing may happen to a file before it is added.")
    ] = "2s",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")] = False,
) -> None:
    """Add files as they are written. Runs until SIGTERM or Ctrl-C; the store is made if there is none.

    \b
    castore watch shards/ --as imagenet --mirror
    castore watch ~/.cache/huggingface/datasets --as hf --replace
    castore watch ~/.cache/huggingface/datasets --as hf --restore
    """
    from castore import Store
    from castore.watching.folder import Folder
    from castore.watching.restoring import restore_all
    from castore.watching.task import Options

    if restore and (mirror or replace):
        raise typer.BadParameter("--restore goes with neither --mirror nor --replace")
    if codec is not None:
        check_codec(codec, None)
    options = Options(mirror, replace, codec, parse_duration(settle))
    path = store_path(context)
    root = _root(folder, os.path.realpath(path))
    teller = _Teller(as_json)
    # What a link leads to is the only copy: it has to survive a power cut.
    with Store(path, memory=0, durable=replace) as store:
        watched = Folder(root, check_prefix(prefix), str(path))
        if restore:
            with progress("restoring", None) as done:
                restore_all(store, watched, teller.tell, done)
        else:
            _watch(store, watched, options, teller)
    teller.finish()
    if restore and teller.failed:
        raise typer.Exit(1)


def _root(folder: str, store: str) -> str:
    root = os.path.realpath(folder)
    if not os.path.isdir(root):
        raise InvalidValueError(f"{printable(folder)} is not a folder; give one that is there")
    if os.path.commonpath([root, store]) == store:
        raise InvalidValueError(f"{printable(folder)} lies in the store {store}; watch another folder")
    try:
        root.encode()
    except UnicodeEncodeError as error:
        raise InvalidValueError(f"{root!r} is not UTF-8, so its files cannot be named; rename it") from error
    return root


def _watch(store: Store, folder: Folder, options: Options, teller: _Teller) -> None:
    from castore.watching.task import Task
    from castore.watching.watcher import Watcher

    with ExitStack() as until_caught_up:
        total = _bytes_below(folder) if sys.stderr.isatty() else None
        done = until_caught_up.enter_context(progress("catching up", total))
        watcher = Watcher(Task(store, folder, options, teller.tell, done))
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: watcher.stop())
        watcher.run(until_caught_up.close)


def _bytes_below(folder: Folder) -> int:
    """For the time that the bar says is left: a walk of its own, that complains of nothing."""
    found = folder.files(folder.root, lambda error: None, lambda path: None)
    total = 0
    for path in found:
        with suppress(FileNotFoundError):
            total += os.lstat(path).st_size
    return total


class _Teller:
    """Tells each thing that is done, and in the end how many there were."""

    def __init__(self, as_json: bool) -> None:
        self._as_json = as_json
        self._counts: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()

    def tell(self, event: Event) -> None:
        """One line, at once: whoever reads it waits for it."""
        self._counts[event.event] += 1
        self._bytes[event.event] += event.size
        if self._as_json:
            typer.echo(json.dumps(event._asdict()))  # escapes: a path may be no text at all
        elif event.event == "failed":
            complain(f"{printable(event.path)}: {event.reason}" if event.path else event.reason)
        else:
            what = event.name or event.path
            size = f" ({format_size(event.size)})" if event.size else ""
            reason = f": {event.reason}" if event.reason else ""
            typer.echo(f"{event.event:<9}{printable(what)}{size}{reason}".rstrip())
        sys.stdout.flush()

    @property
    def failed(self) -> int:
        """How many things could not be done."""
        return self._counts["failed"]

    def finish(self) -> None:
        """The sum, for people."""
        if self._as_json:
            return
        shown = [
            f"{kind} {plural(count, 'file')} ({format_size(self._bytes[kind])})"
            for kind, count in self._counts.items()
            if kind in ("added", "changed", "replaced", "restored", "dropped")
        ]
        if self.failed:
            shown.append(f"{self.failed:,} failed")
        typer.echo(", ".join(shown) or "nothing to do")
