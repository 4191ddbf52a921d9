"""The bars of `castore process` on a terminal: one for each step, and one for the export."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from castore.adapters.datasets import Progress


class CurrentStep:
    """The step that is running."""

    name = ""


_Bars = tuple[Callable[["Progress"], None], Callable[[int], None]]


@contextmanager
def step_bars(current: CurrentStep) -> Iterator[_Bars]:
    """A bar for each step, and for the export, on a terminal; yields the functions to call with progress."""
    if not sys.stderr.isatty():

        def note(progress: Progress) -> None:
            current.name = progress.name

        yield note, lambda rows: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as RichProgress

    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("rows"),
        TimeElapsedColumn(), TextColumn("{task.fields[note]}"),
    )  # fmt: skip
    with RichProgress(*columns, console=Console(stderr=True), transient=True) as bars:
        tasks: dict[int, Any] = {}

        def steps(progress: Progress) -> None:
            current.name = progress.name
            if progress.step not in tasks:
                title = f"{progress.step + 1}/{progress.steps} {progress.name}"
                tasks[progress.step] = bars.add_task(title, total=progress.total, note="")
            note = "from the cache" if progress.report is not None and progress.report.hit else ""
            bars.update(tasks[progress.step], completed=progress.done, total=progress.total, note=note)

        def rows(count: int) -> None:
            if -1 not in tasks:
                tasks[-1] = bars.add_task("exporting", total=None, note="")
            bars.advance(tasks[-1], count)

        yield steps, rows


def replace_lock_of_bars() -> None:
    """Give tqdm, which `datasets` uses, a lock that no process of Python's own keeps a list of.

    tqdm's own lock has a name from Python 3.14 on, and an interrupted command ends without taking it back.
    Python's resource tracker then prints a warning behind castore's last line.
    """
    from multiprocessing import get_context

    from tqdm import tqdm

    tqdm.set_lock(get_context("fork").RLock())
