"""One place that tells live objects of a fork: locks, threads and connections do not survive into a child.

A class whose instances hold such things calls `reset_after_fork(self)`; in a forked child its `_after_fork()` then
runs before anything else can use the instance. Instances are held weakly: registering keeps nothing alive.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import Protocol


class ForkAware(Protocol):
    """What survives a fork only after `_after_fork` has replaced its locks, threads and connections."""

    def _after_fork(self) -> None: ...


#: Held by whoever is inside an SQLite write, and while this process forks: SQLite's own mutexes and lock tables are
#: copied into the child as they are, and a child born in the middle of a write would wait for it for ever.
fork_gate = threading.RLock()

_live: weakref.WeakSet[ForkAware] = weakref.WeakSet()


def reset_after_fork(instance: ForkAware) -> None:
    """Have ``instance._after_fork()`` called in every child forked from here on."""
    _live.add(instance)


def _after_fork_in_child() -> None:
    fork_gate.release()
    for instance in list(_live):
        instance._after_fork()


os.register_at_fork(
    before=fork_gate.acquire, after_in_parent=fork_gate.release, after_in_child=_after_fork_in_child
)
