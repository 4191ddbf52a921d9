"""Detects that other files took the place of those that a dataset named when it was wrapped.

Samples are kept under a key that counts size and modification time of the files at wrapping. A file that is
read later in the place of another one belongs to no key that is known: its samples are handed out and not
kept. Watched are the files and folders that lie nearest in the dataset, and some of a long list: any of them
shows that somebody exchanged their folder.

A dataset may write to a file that it names while it is read: a log, a file of its own results. A file that
stays in its place and changes during such a read, or grows at any time, is no change. Must never raise an
error on account of a file: a training run goes on without the cache.
"""

from __future__ import annotations

import os
import stat
import warnings
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, NamedTuple

from castore.keys.doubts import outside

# A stat takes about a microsecond, and there are two for each file and sample that is read.
_MOST = 16
_OF_LIST = 4
_DEEPEST = 2
# Files that change by themselves.
_OF_KERNEL = ("/proc/", "/sys/", "/dev/")


class _State(NamedTuple):
    """The state of a file or a folder.

    Attributes:
        content: of a file the size and the time of modification, as in the dataset's key; of a folder the
            real path.
        place: device and number. A file system that was mounted anew gives others.
    """

    content: tuple[int, int] | str
    place: tuple[int, int]

    def has_grown_from(self, earlier: _State) -> bool:
        """Whether this is of a file that is longer now: others append to a log."""
        now, then = self.content, earlier.content
        return isinstance(now, tuple) and isinstance(then, tuple) and now[0] > then[0]


class NamedFiles:
    """The files and folders that some values name, and their states.

    Args:
        values: of a dataset, the nearest first.
    """

    def __init__(self, values: Iterable[Any]) -> None:
        named = dict.fromkeys(path for value in values for path in _paths(value))
        states = ((path, _state(path)) for path in named)
        self._states = dict(islice(((path, state) for path, state in states if state is not None), _MOST))
        #: Whether each file is the one of the beginning.
        self.are_same = True

    def states(self) -> dict[str, _State | None]:
        """The states of now, for `compare`."""
        return {path: _state(path) for path in self._states} if self.are_same else {}

    def compare(self, before: dict[str, _State | None]) -> None:
        """Compare the states of now with those of the beginning, after a read of the dataset.

        Args:
            before: the states before the read.

        Warns:
            RuntimeWarning: a file has changed, other than by this read; told once.
        """
        for path, state in self.states().items():
            noted = self._states[path]
            if state is not None and state.content == noted.content:
                continue
            if (
                state is not None
                and state.place == noted.place
                and (before[path] == noted or state.has_grown_from(noted))
            ):
                self._states[path] = state  # the dataset itself has written to it, or it is a log
            elif self.are_same:
                self.are_same = False
                warnings.warn(
                    f"{path} is another file, or has changed, since the dataset was wrapped: samples that are"
                    " read from now on are not kept; wrap the dataset anew, or say what identifies the data"
                    " with key=...",
                    RuntimeWarning,
                    stacklevel=outside(),
                )


def _paths(value: Any, depth: int = 0) -> Iterator[str]:
    """The texts in a value that may name a file: those that count as files in the dataset's key."""
    if isinstance(value, str):
        if "/" in value:
            yield value
    elif isinstance(value, os.PathLike):
        yield os.fsdecode(value)
    elif type(value) in (list, tuple) and depth < _DEEPEST:  # a list of files, or of files with labels
        for item in value[:: max(1, len(value) // _OF_LIST)]:
            yield from _paths(item, depth + 1)


def _state(path: str) -> _State | None:
    try:
        found = os.stat(path)
    except (OSError, ValueError):  # a text that is no possible path
        return None
    place = found.st_dev, found.st_ino
    if stat.S_ISDIR(found.st_mode):
        return _State(os.path.realpath(path), place)
    if not stat.S_ISREG(found.st_mode) or path.startswith(_OF_KERNEL):
        return None
    return _State((found.st_size, found.st_mtime_ns), place)
