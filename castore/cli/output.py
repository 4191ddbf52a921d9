"""Output of commands: results go to standard output, complaints and progress to standard error.

rich is imported only when something is drawn with it. Progress is drawn on a terminal only.
"""

from __future__ import annotations

import json
import re
import shlex
import sqlite3
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Annotated, Any

import typer

from castore.cli.exit_codes import FAILED

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

#: The option of every command that reports.
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]

#: How many names a report lists before it says "and N more".
LISTED = 5


def print_error(sentence: str) -> None:
    """Print one line to standard error, under castore's name. If that is closed, the exit code remains."""
    with suppress(OSError):
        sys.stderr.write(f"castore: {' '.join(sentence.splitlines())}\n")


@contextmanager
def print_warnings() -> Iterator[None]:
    """Print warnings as complaints of one line."""

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        print_error(str(message))

    with warnings.catch_warnings():
        warnings.simplefilter("default", UserWarning)
        warnings.showwarning = show
        yield


def describe(error: Exception) -> str:
    """An error as a sentence for users."""
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{printable(str(error.filename))}: {error.strerror}"
    if isinstance(error, sqlite3.Error):
        return f"the index cannot be used ({error}); `castore doctor` tells more"
    return str(error) or type(error).__name__


def printable(path: str) -> str:
    """A path without characters that control a terminal."""
    return path if path.isprintable() else repr(path)


def quote_word(word: str) -> str:
    """A name or a path as the last word of a command, as a shell takes it.

    >>> quote_word("imagenet"), quote_word("my data"), quote_word("-x")
    ('imagenet', "'my data'", '-- -x')
    """
    return f"-- {shlex.quote(word)}" if word.startswith("-") else shlex.quote(word)


class Failures:
    """Complaints about single items; the command goes on with the others."""

    def __init__(self) -> None:
        self.sentences: list[str] = []

    @property
    def count(self) -> int:
        """The number of complaints."""
        return len(self.sentences)

    def add(self, sentence: str) -> None:
        """Complain, and remember that something failed."""
        self.sentences.append(sentence)
        print_error(sentence)

    def finish(self) -> None:
        """End the command with exit code 1 if anything failed."""
        if self.count:
            raise typer.Exit(FAILED)


def print_json(value: object) -> None:
    """Print one JSON document."""
    typer.echo(json_text(value, indent=2))


# Surrogates, which Python uses for bytes of a path that are not UTF-8. JSON must not have them, escaped or
# not.
_NO_TEXT = re.compile("[\ud800-\udfff]")


def json_text(value: object, indent: int | None = None) -> str:
    r"""A value as JSON: readable where the output can show it, escaped where it cannot.

    Bytes of a path that are no UTF-8 are written as Python writes them.

    >>> print(json_text("caf\udce9"))
    "caf\\xe9"
    """
    text = _NO_TEXT.sub(
        lambda found: rf"\\x{ord(found[0]) & 0xFF:02x}", json.dumps(value, ensure_ascii=False)
    )
    if indent is not None:
        text = json.dumps(json.loads(text), indent=indent, ensure_ascii=False)
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        return json.dumps(json.loads(text), indent=indent)
    return text


_UNFOLDED = 10_000  # columns; a panel and a table are as wide as their text


def console() -> Console:
    """A rich console on standard output, which colours and folds for terminals only."""
    from rich.console import Console

    out = Console(highlight=False, soft_wrap=False)
    if not out.is_terminal:
        out.width = _UNFOLDED  # a script that looks for a path must find the whole of it
    return out


def plural(count: int, noun: str, many: str | None = None) -> str:
    """A count and its noun.

    >>> plural(1, "blob"), plural(2000, "entry", "entries")
    ('1 blob', '2,000 entries')
    """
    return f"{count:,} {noun if count == 1 else many or noun + 's'}"


def abbreviate(names: list[str]) -> Iterator[str]:
    """The first names of a list, and the number of the others."""
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
    with _bar() as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.advance(task, done)


@contextmanager
def growing_progress(what: str, *, counts: bool = False) -> Iterator[Callable[[int, int], object] | None]:
    """`progress` for work whose total is found while it is done.

    Yields the function to call with all bytes done so far and the total so far, or None if nothing is drawn.

    Args:
        what: the words before the bar.
        counts: things are counted, and not bytes.
    """
    if not sys.stderr.isatty():
        yield None
        return
    with _bar(counts=counts) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _bar(*, counts: bool = False) -> Progress:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns: tuple[Any, ...] = (
        TextColumn("{task.description}"),
        BarColumn(),
        *([MofNCompleteColumn()] if counts else [DownloadColumn(), TransferSpeedColumn()]),
        TimeRemainingColumn(),
        TextColumn("left"),
    )
    return Progress(*columns, console=Console(stderr=True), transient=True)


def print_table(heads: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> None:
    """Print rows as a table on a terminal; else as lines with a tab between the cells, for other programs."""
    # A cell may come from another machine: it must neither control the terminal nor begin a line.
    shown = [tuple("".join(filter(str.isprintable, " ".join(cell.split()))) for cell in row) for row in rows]
    if not sys.stdout.isatty():
        for row in shown:
            typer.echo("\t".join(row))
        return
    from rich.table import Table
    from rich.text import Text

    table = Table(*heads, box=None, pad_edge=False, header_style="bold")
    for row in shown:
        table.add_row(*map(Text, row))
    console().print(table)


def _nothing(done: int) -> None:
    pass


@contextmanager
def spinner(what: str) -> Iterator[None]:
    """A spinner on standard error, for work of unknown length."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(what):
        yield
