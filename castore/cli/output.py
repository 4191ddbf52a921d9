"""What commands say and where: results to standard output, complaints and progress to standard error.

rich is imported only when something is drawn with it. Progress is drawn on a terminal only.
"""

from __future__ import annotations

import json
import sqlite3
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

#: The option of every command that reports.
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]

#: How many names a report lists before it says "and N more".
LISTED = 5


def complain(sentence: str) -> None:
    """Print one line to standard error, under our name."""
    sys.stderr.write(f"castore: {' '.join(sentence.splitlines())}\n")


def describe(error: Exception) -> str:
    """An error as a sentence for users."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{printable(str(error.filename))}: {error.strerror}"
    if isinstance(error, sqlite3.Error):
        return f"the index cannot be used ({error}); `castore doctor` tells more"
    return str(error) or type(error).__name__


def printable(path: str) -> str:
    """A path that cannot play tricks on a terminal."""
    return path if path.isprintable() else repr(path)


class Failures:
    """Complaints about single items, which do not keep the others from being done."""

    def __init__(self) -> None:
        self.count = 0

    def add(self, sentence: str) -> None:
        """Complain, and remember that something failed."""
        self.count += 1
        complain(sentence)

    def finish(self) -> None:
        """End the command with exit code 1 if anything failed."""
        if self.count:
            raise typer.Exit(1)


def print_json(value: object) -> None:
    """Print one JSON document."""
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False))


def console() -> Console:
    """A rich console on standard output, which colours for terminals only."""
    from rich.console import Console

    return Console(highlight=False, soft_wrap=False)


def plural(count: int, noun: str, many: str | None = None) -> str:
    """A count and its noun.

    >>> plural(1, "blob"), plural(2000, "entry", "entries")
    ('1 blob', '2,000 entries')
    """
    return f"{count:,} {noun if count == 1 else many or noun + 's'}"


def listed(names: list[str]) -> Iterator[str]:
    """The first names of a list, and how many more there are."""
    yield from names[:LISTED]
    if len(names) > LISTED:
        yield f"and {len(names) - LISTED:,} more"


@contextmanager
def progress(what: str, total: int | None, *, wanted: bool = True) -> Iterator[Callable[[int], object]]:
    """A bar on standard error with rate and time left; yields the function to call with the bytes done.

    Args:
        what: the words before the bar.
        total: bytes to do, or None if nobody knows.
        wanted: False draws nothing, for work that is over before a bar is seen.
    """
    if not (wanted and sys.stderr.isatty()):
        yield _nothing
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns: tuple[Any, ...] = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        TextColumn("left"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.advance(task, done)


def _nothing(done: int) -> None:
    pass


@contextmanager
def spinner(what: str) -> Iterator[None]:
    """A spinner on standard error, for work whose length nobody knows."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(what):
        yield
