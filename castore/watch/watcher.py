"""Keeps the entries of a folder in step with its files: one full scan, then scans of paths with events.

Events only name paths to scan (see scanner.py), so two watchers of a folder come to the same result. Existing
paths are scanned before missing ones: a renamed link leads to the entry of its old name, and needs that entry
until it has its own.

One thread does everything; only events come from others. Memory does not grow with the number of files.
"""

from __future__ import annotations

import os
import shlex
import stat
import time
from collections.abc import Callable, Iterator

from castore.errors import FullError, StoreError
from castore.records import Entry
from castore.watch import entry_sources, link_registry
from castore.watch.dangling_links import Lookout
from castore.watch.events import Events, WatchError
from castore.watch.find_mount import NoMountError
from castore.watch.reports import Event
from castore.watch.scanner import Looker, Stop, Stopped
from castore.watch.task import Task

#: Seconds between checks for paths that are due.
_TICK = 0.1
#: Seconds until the next full scan after the store was full.
_RETRY = 60.0
#: Seconds between searches for a mount while there is none.
_MOUNT_SECONDS = 5.0
#: Seconds between full scans in any case: events get lost, and writes on another machine cause none.
_RESCAN = 3600.0


class Watcher:
    """Watches one folder.

    Raises:
        NoMountError: files are to be replaced, and there is no live mount that shows the names.
    """

    def __init__(self, task: Task) -> None:
        self._store, self._folder, self._options, self._report, _ = task
        self._stop = Stop()
        self._lookout = Lookout(self._store, self._folder.prefix, self._report)
        task = task._replace(report=self._tell)
        self._events = Events(self._folder.root, self._options.settle, self._folder.counts)
        try:
            self._looker = Looker(task, self._events.put, self._stop)
        except NoMountError:
            self._lookout.look()  # reports the links that lead to nothing
            raise
        self._rescan_at = self._mount_at = 0.0

    def _tell(self, event: Event) -> None:
        self._lookout.note(event)
        self._report(event)

    def stop(self) -> None:
        """Have `run` return soon, also from the middle of a large file. For signal handlers, too."""
        self._stop.set()

    def run(self, caught_up: Callable[[], object] = lambda: None) -> None:
        """Scan everything, then watch until `stop`.

        Args:
            caught_up: called once, after the first full scan.

        Raises:
            WatchError: the folder cannot be watched, or is gone.
        """
        self._events.start()
        try:
            self._refuse_empty()
            self._look_at_everything()
            caught_up()
            self._report(Event("ready"))
            while not self._stop.is_set():
                time.sleep(_TICK)
                self._turn()
        except Stopped:
            pass
        finally:
            self._events.stop()

    def _turn(self) -> None:
        now = time.monotonic()
        if not self._folder.is_there():
            raise WatchError(f"{self._folder.root} is gone; nothing was dropped")
        if self._events.lost:
            self._report(Event("rescan", reason="too much happened at once"))
            self._look_at_everything()
            # One more scan later: watchdog adds its watches again, and misses events meanwhile.
            self._rescan_at = time.monotonic() + _RETRY
        elif now >= self._rescan_at:
            self._look_at_everything()
        elif self._looker.waits_for_mount and now >= self._mount_at:
            self._mount_at = now + _MOUNT_SECONDS
            if self._looker.live_mount() is not None:
                self._look_at_everything()
        elif due := self._events.take():
            self._look_at(due)
        self._lookout.look_if_due()
        self._store.parts.usage.flush_if_due()

    def _refuse_empty(self) -> None:
        known = next(self._known(), None) if self._options.mirror else None
        files = self._folder.files(self._folder.root, lambda error: None, lambda path: None)
        if known is not None and next(files, None) is None:
            raise WatchError(
                f"{self._folder.root} is empty, and --mirror would drop every entry made from it,"
                f" {known.name!r} first; is its disk mounted?"
                " If it is meant to be empty:"
                f" castore rm -r {shlex.quote(self._folder.prefix or known.name)}"
            )

    def _look_at_everything(self) -> None:
        self._events.forget()
        self._rescan_at = time.monotonic() + _RESCAN
        self._guarded(self._looker.look_below, self._folder.root)
        self._guarded(self._looker.look_for_gone, self._known())
        self._guarded(self._looker.settle_conflicts)
        self._looker.touched.clear()
        self._drop_stale(self._folder.has)
        self._lookout.look()

    def _known(self) -> Iterator[Entry]:
        """Entries that were made from files of this folder."""
        return (
            entry
            for entry in self._store.entries(self._folder.prefix)
            if any(self._folder.has(source["path"]) for source in entry_sources.of(entry)[:1])
        )

    def _look_at(self, paths: list[str]) -> None:
        gone = []
        for path in paths:
            try:
                is_folder = stat.S_ISDIR(os.lstat(path).st_mode)
            except OSError:
                gone.append(path)  # or not readable: `look_for_gone` tells them apart
                continue
            self._guarded(self._looker.look_below if is_folder else self._looker.look, path)
        self._guarded(self._looker.flush)
        for path in gone:
            self._guarded(self._looker.look_for_gone, self._store.entries(self._folder.name(path)))
        self._guarded(self._looker.settle_conflicts)
        touched = self._looker.touched.copy()
        self._looker.touched.clear()
        if touched:
            for link in link_registry.through(self._store, self._folder.prefix, touched):
                self._events.put(link, 0)
            self._drop_stale(touched.__contains__)

    def _guarded(self, work: Callable[..., object], *arguments: object) -> None:
        """Call ``work``. An error of the store itself is reported, and a full scan follows later."""
        try:
            work(*arguments)
        except (FullError, StoreError) as error:
            self._report(Event("failed", reason=str(error)))
            self._rescan_at = min(self._rescan_at, time.monotonic() + _RETRY)

    def _drop_stale(self, concerns: Callable[[str], bool]) -> None:
        for stale in entry_sources.drop_stale(self._store, concerns):
            done = "" if stale.dropped else " (pinned, so it stays)"
            self._report(Event("stale", name=stale.name, reason="; ".join(stale.reasons) + done))
