"""Input files as a run has first seen them: each is read once for its digest, and a later change is an error.

Keys of results have the digests of files. So rows of a file that has changed since must not be kept under
them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from castore.adapters.datasets.file_digests import file_digest
from castore.errors import InvalidValueError
from castore.store import Store


class SeenFiles:
    """The states and digests of files, as they were when they were first asked for.

    Args:
        store: remembers the digests of large files, so that the files are read once; None remembers nothing.
    """

    def __init__(self, store: Store | None) -> None:
        self._store = store
        self._states: dict[str, os.stat_result] = {}
        self._digests: dict[str, str] = {}

    def state(self, path: str) -> os.stat_result:
        """The size and the times of a file.

        Raises:
            OSError: the file is gone.
        """
        if path not in self._states:
            self._states[path] = os.stat(path)
        return self._states[path]

    def digest(self, path: str) -> str:
        """BLAKE3 of a file, in hexadecimal digits.

        Raises:
            UnhashableError, OSError: the file is gone, or cannot be read.
        """
        if path not in self._digests:
            self.state(path)  # before the read: a change meanwhile is found then
            self._digests[path] = file_digest(path, self._store)
        return self._digests[path]

    def check(self, paths: Iterable[str]) -> None:
        """Check that files are as they were when they were first seen.

        Raises:
            InvalidValueError: a file has changed, or is gone.
        """
        for path in paths:
            if path in self._states and _stat(path) != _signs(self._states[path]):
                raise InvalidValueError(
                    f"{path!r} has changed since this run first read it; run again when nobody writes to it"
                )


def _stat(path: str) -> tuple[int, ...] | None:
    try:
        return _signs(os.stat(path))
    except OSError:
        return None


def _signs(state: os.stat_result) -> tuple[int, ...]:
    return state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns
