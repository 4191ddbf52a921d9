"""What a watcher is given to do: which folder, into which store, how, and who is told. Values only, nothing is done here."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from castore import Store
from castore.watch.folder import Folder
from castore.watch.reports import Event


class Options(NamedTuple):
    """What a watcher does beside adding.

    Attributes:
        mirror: drop entries whose file is gone.
        replace: put links into a mount in the place of files.
        codec: of new entries; None for the store's.
        settle: seconds of quiet before a file is looked at.
    """

    mirror: bool = False
    replace: bool = False
    codec: str | None = None
    settle: float = 2.0


class Task(NamedTuple):
    """One folder to be watched.

    Attributes:
        store: open; with ``durable=True`` if files are replaced.
        folder: that is watched.
        options: what is done.
        report: told of everything that is done.
        progress: called with the bytes of files that are dealt with.
    """

    store: Store
    folder: Folder
    options: Options
    report: Callable[[Event], object]
    progress: Callable[[int], object] = lambda size: None
