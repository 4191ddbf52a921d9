"""Collects the changed paths of a folder, and hands each out once it has been quiet for the settling time.

watchdog delivers inotify events. Events come late, twice, or not at all, so only their paths count, not their
kinds. Each path waits until it has had no event for the settling time.

Memory is bounded: past `LIMIT` waiting paths, or when the inotify queue overflows, `missed` asks for a full
scan. So it does when two folders have changed places in one step, which watchdog takes for two moves: then it
has both under the wrong name, and is started anew.
"""

from __future__ import annotations

import ctypes
import errno
import importlib
import logging
import math
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from castore.errors import CastoreError, MissingDependencyError

if TYPE_CHECKING:
    from watchdog.events import FileSystemEvent

LIMIT = 100_000
# Seconds in which the second half of an exchange comes.
_EXCHANGE_SECONDS = 1.0
_FEW_MOVES = 1000
_OVERFLOW = "the queue of events overflowed"
_IN_DELETE_SELF = 0x400
_IN_Q_OVERFLOW = 0x4000
_libc = ctypes.CDLL(None, use_errno=True)


class WatchError(CastoreError):
    """A folder cannot be watched (any longer)."""


class EventQueue(logging.Handler):
    """Paths below a folder that had events.

    Args:
        root: the folder.
        settle: seconds of quiet after which a path is due.
        is_relevant: whether a path is of interest.

    Attributes:
        missed: why events may have been missed, "" if none were; `clear` forgets it.
    """

    def __init__(self, root: str, settle: float, is_relevant: Callable[[str], bool]) -> None:
        super().__init__(logging.WARNING)
        self._root = root
        self._settle = settle
        self._is_relevant = is_relevant
        self._guard = threading.Lock()
        self._due: dict[str, float] = {}
        self._observer: Any = None
        self._new_folders = False
        self._moved: dict[tuple[str, str], float] = {}  # folders: when each went from where to where
        self._is_astray = False  # watchdog has folders under wrong names
        self.missed = ""

    def start(self) -> None:
        """Start to watch. Events from after the return are not missed, unless `missed` is set.

        Raises:
            WatchError: inotify's limits are reached.
            MissingDependencyError: watchdog is not installed.
        """
        try:
            from watchdog import events
            from watchdog.observers import Observer
        except ImportError as error:
            raise MissingDependencyError.of("watchdog", "watch") from error
        # Other events, above all one for each write to a file, would only fill the inotify queue.
        kinds: list[type[FileSystemEvent]] = [
            events.FileClosedEvent, events.FileCreatedEvent, events.FileMovedEvent, events.FileDeletedEvent,
            events.DirCreatedEvent, events.DirMovedEvent, events.DirDeletedEvent,
        ]  # fmt: skip
        handler = events.FileSystemEventHandler()
        handler.on_any_event = self._on_event  # type: ignore[method-assign]
        if sys.version_info < (3, 11):
            _log_dropped_events()
        # Folders that cannot be watched all have the number -1 there.
        warnings.filterwarnings("ignore", "Callback with id .* already exists", RuntimeWarning)
        # watchdog reports dropped events only in its log.
        logging.getLogger("watchdog").addHandler(self)
        self._observer = Observer()
        try:
            self._observer.schedule(handler, self._root, recursive=True, event_filter=kinds)
            self._observer.start()
            self.check_limits()
        except OSError as error:
            self.stop()
            raise _limit_error(error, self._root) from error

    def stop(self) -> None:
        """End watching."""
        logging.getLogger("watchdog").removeHandler(self)
        if self._observer is not None and self._observer.is_alive():
            _untangle(self._observer)
            self._observer.stop()
            self._observer.join()

    def emit(self, record: logging.LogRecord) -> None:
        """Read watchdog's log for dropped events."""
        if "overflow" in record.getMessage():
            self.missed = _OVERFLOW

    def _on_event(self, event: FileSystemEvent) -> None:
        self._new_folders |= event.is_directory
        paths = [os.fsdecode(path) for path in (event.src_path, event.dest_path) if path]
        if event.is_directory and len(paths) == 2:
            self._note_move(*paths)
        self._put(paths, self._settle)

    def _note_move(self, source: str, target: str) -> None:
        now = time.monotonic()
        if now - self._moved.get((target, source), -math.inf) < _EXCHANGE_SECONDS:
            self._is_astray, self.missed = True, "two folders have changed places"
        if len(self._moved) > _FEW_MOVES:
            self._moved.clear()
        self._moved[source, target] = now

    def put(self, path: str, seconds: float) -> None:
        """Make a path due in ``seconds``. For a path that waits already, the time starts again."""
        self._put([path], seconds)

    def _put(self, paths: list[str], seconds: float) -> None:
        """Make paths due at the same time: the old and the new name of a file are scanned together."""
        relevant = [path for path in paths if path != self._root and self._is_relevant(path)]
        with self._guard:
            self._due.update(dict.fromkeys(relevant, time.monotonic() + seconds))
            if len(self._due) > LIMIT:
                self._due.clear()
                self.missed = _OVERFLOW

    def take(self) -> list[str]:
        """Remove and return the paths that are due.

        Raises:
            WatchError: new folders can no longer be watched.
        """
        now = time.monotonic()
        with self._guard:
            due = sorted(path for path, when in self._due.items() if when <= now)
            for path in due:
                del self._due[path]
            new_folders, self._new_folders = self._new_folders, False
        if new_folders:
            try:
                self.check_limits()
            except OSError as error:
                raise _limit_error(error, self._root) from error
        return due

    def clear(self) -> None:
        """Forget all waiting paths before a full scan. Later events are collected as usual.

        Raises:
            WatchError: as `start`.
        """
        if self._is_astray:
            self.stop()
            self._is_astray = False
            self._moved.clear()
            self.start()
        with self._guard:
            self._due.clear()
            self.missed = ""

    def check_limits(self) -> None:
        """Ask the kernel for one more watch. watchdog silently skips folders that it cannot watch.

        Raises:
            OSError: the kernel refuses it.
        """
        fd = _libc.inotify_init1(os.O_CLOEXEC)
        if fd < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        try:
            if _libc.inotify_add_watch(fd, os.fsencode(self._root), _IN_DELETE_SELF) < 0:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        finally:
            os.close(fd)


def _untangle(observer: Any) -> None:
    """Give each watch of watchdog 7 a path of its own: where two had one, stopping ends with a KeyError."""
    for emitter in observer.emitters:
        group = getattr(emitter, "_inotify", None)
        paths = getattr(group, "_active_callbacks_by_watch", None)
        if group is not None and paths is not None:
            with group._lock:
                paths.update({watch: b"%d" % watch for watch in paths})
                group._active_callbacks_by_path = {path: watch for watch, path in paths.items()}


def _limit_error(error: OSError, root: str) -> WatchError:
    what = {errno.ENOSPC: "max_user_watches", errno.EMFILE: "max_user_instances"}.get(error.errno or 0)
    if what is None:
        return WatchError(f"cannot watch {root}: {error.strerror}")
    try:
        with open(f"/proc/sys/fs/inotify/{what}", encoding="ascii") as file:
            limit = int(file.read())
    except (OSError, ValueError):
        limit = 8192
    return WatchError(
        f"cannot watch all folders below {root}: inotify's {what} ({limit:,}) is reached;"
        f" raise it: sysctl fs.inotify.{what}="
        f"{max(4 * limit, 524_288 if what == 'max_user_watches' else 1024)}"
    )


def _log_dropped_events() -> None:
    """Have watchdog 6, the last release for Python 3.10, log dropped events as watchdog 7 does."""
    inotify: Any = importlib.import_module("watchdog.observers.inotify_c").Inotify
    parse = inotify._parse_event_buffer
    if parse.__module__ == __name__:  # done by another watcher
        return

    def parse_and_log(buffer: bytes) -> Iterator[tuple[int, int, int, bytes]]:
        for event in parse(buffer):
            if event[1] & _IN_Q_OVERFLOW:
                logging.getLogger("watchdog").warning("the queue of inotify has overflowed")
            yield event

    inotify._parse_event_buffer = staticmethod(parse_and_log)
