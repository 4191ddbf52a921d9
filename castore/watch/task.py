"""The job of a watcher: the folder, the store, the options and the callbacks. Values only."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from castore import Store
from castore.watch.folder import WatchedFolder
from castore.watch.reports import Event


class WatchOptions(NamedTuple):
    """Options of a watcher beside adding.

    Attributes:
        mirror: drop entries whose file is gone.
        replace: replace files by links into a mount.
        codec: of new entries; None for the store's.
        settle: seconds of quiet before a file is scanned.
    """

    mirror: bool = False
    replace: bool = False
    codec: str | None = None
    settle: float = 2.0


class Task(NamedTuple):
    """One folder to be watched.

    Attributes:
        store: open; with ``durable=True`` if files are replaced.
        folder: the folder to watch.
        options: the watcher's options.
        report: called with an event for everything that is done.
        progress: called with the bytes of files that were handled.
    """

    store: Store
    folder: WatchedFolder
    options: WatchOptions
    report: Callable[[Event], object]
    progress: Callable[[int], object] = lambda size: None
