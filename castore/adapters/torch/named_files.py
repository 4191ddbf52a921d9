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
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, NamedTuple

from castore.errors import warn

# A stat takes about a microsecond, and there are two for each file and sample that is read.
_MOST = 16
_OF_LIST = 4
_END = 256  # bytes
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


class NamedFiles:
    """The files and folders that some values name, and their states.

    Args:
        values: of a dataset, the nearest first.
    """

    def __init__(self, values: Iterable[Any]) -> None:
        named = dict.fromkeys(path for value in values for path in _paths(value))
        states = ((path, _state(path)) for path in named)
        self._states = dict(islice(((path, state) for path, state in states if state is not None), _MOST))
        self._ends = {path: _ends(path, state) for path, state in self._states.items()}
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
                and (before[path] == noted or self._has_grown(path, state))
            ):
                # The dataset itself has written to it, or it is a log.
                self._states[path], self._ends[path] = state, _ends(path, state)
            elif self.are_same:
                self.are_same = False
                warn(
                    f"{path} is another file, or has changed, since the dataset was wrapped: samples that are"
                    " read from now on are not kept; wrap the dataset anew, or say what identifies the data"
                    " with key=...",
                    RuntimeWarning,
                )

    def _has_grown(self, path: str, state: _State) -> bool:
        """Whether a file is a longer one with the same beginning: others append to a log."""
        now, then = state.content, self._states[path].content
        is_longer = isinstance(now, tuple) and isinstance(then, tuple) and now[0] > then[0]
        return is_longer and _ends(path, self._states[path]) == self._ends[path]


def _ends(path: str, state: _State) -> bytes:
    """The first and the last bytes of a file, as long as it was in a state."""
    if isinstance(state.content, str):
        return b""
    try:
        with open(path, "rb") as file:
            first = file.read(min(_END, state.content[0]))
            file.seek(max(0, state.content[0] - _END))
            return first + file.read(min(_END, state.content[0]))
    except OSError:
        return b""


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
