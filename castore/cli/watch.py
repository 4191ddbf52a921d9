"""`castore watch`: adds a folder's files as they are written, and replaces them by links into a mount."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Annotated

import typer

from castore.cli.completion import codecs
from castore.cli.exit_codes import FAILED
from castore.cli.output import json_text, plural, print_error, printable, progress
from castore.cli.store_access import require_path, require_store, store_path
from castore.errors import InvalidValueError, NotFoundError
from castore.names import check_prefix
from castore.objects.codecs import check_codec
from castore.system.mount_table import mounts
from castore.units import format_size, parse_duration
from castore.watch.reports import Event

if TYPE_CHECKING:
    from castore import Store
    from castore.watch.folder import WatchedFolder
    from castore.watch.scanner import Stop
    from castore.watch.task import WatchOptions

#: Seconds between checks for a folder that does not exist yet.
_POLL_SECONDS = 0.2


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
    """Add files as they are written. Runs until SIGTERM or Ctrl-C.

    The store is made if there is none, and a folder that is not there yet is waited for.

    \b
    castore watch shards/ --as imagenet --mirror
    castore watch ~/.cache/huggingface/datasets --as hf --replace
    castore watch ~/.cache/huggingface/datasets --as hf --restore
    """
    from castore import Store
    from castore.watch.folder import WatchedFolder
    from castore.watch.restore import restore_all
    from castore.watch.scanner import Stop
    from castore.watch.task import WatchOptions

    if restore and (mirror or replace):
        raise typer.BadParameter("--restore goes with neither --mirror nor --replace")
    if codec is not None:
        check_codec(codec, None)
    names = check_prefix(prefix)
    options = WatchOptions(mirror, replace, codec, parse_duration(settle))
    path = store_path(context)
    if restore:
        require_store(path)
    root = _root(folder, os.path.realpath(path), is_needed=restore)
    printer = _EventPrinter(as_json)
    stop = Stop()
    with ExitStack() as at_end:
        if not restore:
            at_end.enter_context(_stopped_by_signals(stop.set))
        # The target of a link is the only copy of the file: it has to survive a power cut.
        store = at_end.enter_context(Store(path, memory=0, durable=replace))
        if not restore:
            store.require_writable()
        if restore:
            _require_prefix(store, root, names)
            with progress("restoring", None) as done:
                restore_all(store, WatchedFolder(root, names, str(path)), printer.print_event, done)
        elif _is_there(root, printer, stop):
            _watch(store, WatchedFolder(root, names, str(path)), options, printer, stop)
        printer.finish()
    if restore and printer.failed:
        raise typer.Exit(FAILED)


def _require_prefix(store: Store, root: str, prefix: str) -> None:
    """Check that the links of a folder, if there are any, were made with this prefix."""
    from castore.watch.dangling_links import prefixes_of

    found = prefixes_of(store, root)
    if found and prefix not in found:
        known = ", ".join(
            f"{plural(count, 'link')} with --as {one or repr('')}" for one, count in found.items()
        )
        raise NotFoundError(
            f"no link in {printable(root)} was made with --as {prefix or repr('')}; there are {known}"
        )


def _root(folder: str, store: str, *, is_needed: bool) -> str:
    root = os.path.realpath(require_path(folder, "DIR"))
    if root == "/":
        raise InvalidValueError("/ is the whole machine, which cannot be watched; watch a folder in it")
    if not os.path.isdir(root) and (is_needed or os.path.exists(root)):
        raise InvalidValueError(f"{printable(folder)} is not a folder; give one that is there")
    if os.path.commonpath([root, store]) == store:
        raise InvalidValueError(f"{printable(folder)} lies in the store {store}; watch another folder")
    shown = [mount.store for mount in mounts() if f"{root}/".startswith(f"{mount.mountpoint}/")]
    if shown and shown[-1] == store:
        raise InvalidValueError(f"{printable(folder)} is a mount of the store itself; watch another folder")
    try:
        root.encode()
    except UnicodeEncodeError as error:
        raise InvalidValueError(f"{root!r} is not UTF-8, so its files cannot be named; rename it") from error
    return root


@contextmanager
def _stopped_by_signals(stop: Callable[[], object]) -> Iterator[None]:
    before = {number: signal.signal(number, lambda *_: stop()) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _is_there(root: str, printer: _EventPrinter, stop: Stop) -> bool:
    """Wait until the folder exists; False if the user has stopped the command."""
    if not os.path.isdir(root):
        printer.print_event(Event("waiting", path=root, reason="it is not there yet"))
    while not os.path.isdir(root) and not stop.is_set():
        time.sleep(_POLL_SECONDS)
    return not stop.is_set()


def _watch(
    store: Store, folder: WatchedFolder, options: WatchOptions, printer: _EventPrinter, stop: Stop
) -> None:
    from castore.watch.task import Task
    from castore.watch.watcher import Watcher

    with ExitStack() as until_caught_up:
        total = _bytes_below(folder) if sys.stderr.isatty() else None
        done = until_caught_up.enter_context(progress("catching up", total))
        watcher = Watcher(Task(store, folder, options, printer.print_event, done))
        with _stopped_by_signals(watcher.stop):
            if stop.is_set():  # the signal came just before
                watcher.stop()
            watcher.run(until_caught_up.close)


def _bytes_below(folder: WatchedFolder) -> int:
    """Bytes of all files, for the time left that the bar shows: a separate walk that reports no problems."""
    found = folder.files(folder.root, lambda error: None, lambda path: None)
    total = 0
    for path in found:
        with suppress(FileNotFoundError):
            total += os.lstat(path).st_size
    return total


class _EventPrinter:
    """Prints each event, and in the end their numbers."""

    def __init__(self, as_json: bool) -> None:
        self._as_json = as_json
        self._counts: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()

    def print_event(self, event: Event) -> None:
        """Print one line and flush it, since its reader may wait for it."""
        self._counts[event.event] += 1
        self._bytes[event.event] += event.size
        if self._as_json:
            typer.echo(json_text(event._asdict()))
        elif event.event == "failed":
            print_error(f"{printable(event.path)}: {event.reason}" if event.path else event.reason)
        elif event.event in ("unmounted", "hidden"):
            print_error(event.reason)
        else:
            what = event.name or event.path
            size = f" ({format_size(event.size)})" if event.size else ""
            reason = f": {event.reason}" if event.reason else ""
            typer.echo(f"{event.event:<9}{printable(what)}{size}{reason}".rstrip())
        sys.stdout.flush()

    @property
    def failed(self) -> int:
        """The number of failures."""
        return self._counts["failed"]

    def finish(self) -> None:
        """Print the numbers of events, in a sentence."""
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
