"""Keeps the entries of a folder in step with its files: one full scan, then scans of paths with events.

Events only name paths to scan (see scanner.py), so two watchers of a folder come to the same result. Existing
paths are scanned before missing ones: a renamed file is known under its new name before its old one goes.

One thread does everything; only events come from others. Memory does not grow with the number of files.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import stat
import time
from collections.abc import Callable, Iterator

from castore.errors import FullError, StoreError
from castore.names import is_name
from castore.records import Entry
from castore.watch import entry_sources, link_registry
from castore.watch.dangling_links import LinkMonitor
from castore.watch.events import EventQueue, WatchError
from castore.watch.find_mount import NoMountError
from castore.watch.link_census import LinkCensus
from castore.watch.reports import Event
from castore.watch.scanner import Scanner, Stop, Stopped
from castore.watch.task import Task

#: Seconds between checks for paths that are due.
_TICK = 0.1
#: Seconds until the next full scan after the store was full.
_RETRY = 60.0
#: Seconds that writing usage counts may take between two checks.
_FLUSH_SECONDS = 0.03
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
        self._link_monitor = LinkMonitor(self._store, self._folder.prefix, self._report)
        task = task._replace(report=self._handle_event)
        self._events = EventQueue(self._folder.root, self._options.settle, self._is_relevant)
        try:
            self._scanner = Scanner(task, self._events.put, self._stop)
        except NoMountError:
            self._link_monitor.check_all()  # reports the links that lead to nothing
            raise
        self._census = LinkCensus(self._store, self._folder)
        self._rescan_at = self._mount_at = 0.0
        self._hidden = 0

    def _is_relevant(self, path: str) -> bool:
        """Whether events at a path count: also of links that stand for files, under temporary names."""
        if self._folder.is_relevant(path) or path in self._scanner.parked:
            return True
        return link_registry.held_of(link_registry.link_at(path) or "") is not None

    def _handle_event(self, event: Event) -> None:
        self._link_monitor.take_event(event)
        self._report(event)

    def stop(self) -> None:
        """Have `run` return soon, also from the middle of a large file. For signal handlers, too."""
        self._stop.set()

    def run(self, caught_up: Callable[[], object] = lambda: None) -> None:
        """Scan everything, then watch until `stop`.

        Args:
            caught_up: called once, after the first full scan.

        Raises:
            WatchError: the folder cannot be watched, or is gone; or the store was made anew.
        """
        # An open folder keeps its inode: no other one can have the number.
        store_folder = os.open(self._store.path, os.O_PATH | os.O_DIRECTORY)
        self._store_stat = os.fstat(store_folder)
        self._events.start()
        try:
            self._refuse_empty()
            self._scan_all()
            caught_up()
            self._report(Event("ready"))
            while not self._stop.is_set():
                time.sleep(_TICK)
                self._poll()
        except Stopped:
            pass
        finally:
            self._events.stop()
            os.close(store_folder)

    def _poll(self) -> None:
        now = time.monotonic()
        if not self._folder.exists():
            raise WatchError(f"{self._folder.root} is gone; nothing was dropped")
        self._require_store()
        if self._events.missed:
            self._report(Event("rescan", reason=self._events.missed))
            self._scan_all()
            # One more scan later: watchdog adds its watches again, and misses events meanwhile.
            self._rescan_at = time.monotonic() + _RETRY
        elif now >= self._rescan_at or (now >= self._mount_at and self._looks_for_mount()):
            self._scan_all()
        elif due := self._events.take():
            self._scan_paths(due)
        self._link_monitor.check_if_due()
        self._report_store_errors(self._census.look_if_due)
        self._store.flush(seconds=_FLUSH_SECONDS)

    def _require_store(self) -> None:
        """Check that the store is the one of the start, or gone: it may come back."""
        with contextlib.suppress(OSError):
            if not os.path.samestat(os.stat(self._store.path), self._store_stat):
                raise WatchError(
                    f"{self._store.path} is another store than the one that this watcher began with; start"
                    " `castore watch` again"
                )

    def _looks_for_mount(self) -> bool:
        """Whether a mount is there that links can lead into, after one was gone."""
        self._mount_at = time.monotonic() + _MOUNT_SECONDS
        return self._scanner.has_mount_moved()

    def _refuse_empty(self) -> None:
        known = next(self._own_entries(), None) if self._options.mirror else None
        files = self._folder.files(self._folder.root, lambda error: None, lambda path: None)
        if known is not None and next(files, None) is None:
            raise WatchError(
                f"{self._folder.root} is empty, and --mirror would drop every entry made from it,"
                f" {known.name!r} first; is its disk mounted?"
                " If it is meant to be empty:"
                f" castore rm -r {shlex.quote(self._folder.prefix or known.name)}"
            )

    def _scan_all(self) -> None:
        self._events.clear()
        self._rescan_at = time.monotonic() + _RESCAN
        self._report_store_errors(self._scanner.scan_folder, self._folder.root)
        self._report_store_errors(self._scanner.scan_parked)
        self._report_store_errors(self._scanner.scan_missing, self._own_entries())
        self._report_store_errors(self._scanner.rescan_conflicts)
        self._scanner.touched.clear()
        self._scanner.let_go.clear()
        self._report_hidden(self._census.suspect_all())
        self._drop_stale(self._folder.has)
        self._link_monitor.check_all()

    def _report_hidden(self, count: int) -> None:
        """Report how many links are out of sight, if it is another number than before."""
        before, self._hidden = self._hidden, count
        if count and count != before:
            reason = (
                f"links out of sight: {count:,}. Either {self._folder.root} is another folder than the one"
                " they were made in, or something is mounted in it, or no longer mounted. Their bytes stay."
                " Mount the disk that they are on; if they are gone for good, `castore doctor --forget-links`"
                " lets go of their bytes"
            )
            self._report(Event("hidden", path=self._folder.root, reason=reason))

    def _own_entries(self) -> Iterator[Entry]:
        """Entries that were made from files of this folder."""
        return (
            entry
            for entry in self._store.entries(self._folder.prefix)
            if any(self._folder.has(source["path"]) for source in entry_sources.sources_of(entry)[:1])
        )

    def _scan_paths(self, paths: list[str]) -> None:
        gone = []
        for path in paths:
            try:
                is_folder = stat.S_ISDIR(os.lstat(path).st_mode)
            except OSError:
                gone.append(path)  # or not readable: `scan_missing` distinguishes the two
                continue
            self._report_store_errors(self._scanner.scan_folder if is_folder else self._scanner.scan, path)
        self._report_store_errors(self._scanner.flush)
        for path in gone:
            self._scanner.note_unparked(path)
            name = self._folder.name(path)
            if self._folder.is_relevant(path) and is_name(name):
                self._report_store_errors(self._scanner.scan_missing, self._store.entries(name))
        self._report_store_errors(self._scanner.rescan_conflicts)
        touched = self._scanner.touched.copy()
        self._scanner.touched.clear()
        self._census.suspect(self._scanner.let_go)
        self._scanner.let_go.clear()
        if touched:
            for link in link_registry.copied_links(self._store, self._folder.prefix, touched):
                self._events.put(link, 0)
            self._drop_stale(touched.__contains__)

    def _report_store_errors(self, work: Callable[..., object], *arguments: object) -> None:
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
