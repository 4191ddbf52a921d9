"""The events that a watcher reports: one for each thing that it did, or could not do."""

from __future__ import annotations

from typing import NamedTuple


class Event(NamedTuple):
    """One thing that a watcher did, or could not do.

    Attributes:
        event: ``added``, ``changed``, ``replaced``, ``kept`` (could not be replaced), ``relinked``,
            ``restored``, ``dropped``, ``unpinned`` (its link is gone), ``stale`` (computed from a file that
            changed), ``failed``, ``unmounted`` (links lead to nothing), ``mounted`` (they lead somewhere
            again), ``hidden`` (links are out of sight, and their bytes stay), ``rescan``, ``waiting`` (for
            the folder to exist), ``ready``.
        path: of the file, or "".
        name: of the entry, or "".
        size: in bytes.
        reason: the reason, unless it is plain.
    """

    event: str
    path: str = ""
    name: str = ""
    size: int = 0
    reason: str = ""


def reason_of(error: Exception) -> str:
    """The text of an error for an event, without the path, since the event has it."""
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)
