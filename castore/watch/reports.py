"""What a watcher tells whoever runs it: one event for each thing that it did, or could not do."""

from __future__ import annotations

from typing import NamedTuple


class Event(NamedTuple):
    """Something that was done, or could not be.

    Attributes:
        event: ``added``, ``changed``, ``replaced``, ``kept`` (could not be replaced), ``relinked``, ``restored``,
            ``dropped``, ``unpinned`` (its link is gone), ``stale`` (computed from a file that changed), ``failed``,
            ``unmounted`` (links lead to nothing), ``mounted`` (they lead somewhere again), ``rescan``, ``waiting`` (for
            the folder to be there), ``ready``.
        path: of the file, or "".
        name: of the entry, or "".
        size: in bytes.
        reason: why, where that is not plain.
    """

    event: str
    path: str = ""
    name: str = ""
    size: int = 0
    reason: str = ""


def reason_of(error: Exception) -> str:
    """An error as an event tells it, which names the path itself."""
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)
