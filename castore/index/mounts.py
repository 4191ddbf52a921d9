"""The index's list of mounts: who serves one, and what pinned ones hold.

A pinned mount keeps gc away from everything under its prefix. A mount whose daemon died holds nothing: its
row goes at the next gc. What gc removes although the kernel may still read it through a mount, pinned or not,
is the matter of gc/mount_barrier.py.
"""

from __future__ import annotations

import os
import time
from typing import NamedTuple

from castore.index.database import Index
from castore.index.transaction import Write
from castore.records import Mount
from castore.system.temporary import FOREIGN_AGE, is_running, pid_namespace, process_started

_ADD = (
    "INSERT INTO mounts (mountpoint, prefix, pinned, namespace, pid, started, since, seen)"
    " VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
)
_ALL = (
    "SELECT id, mountpoint, prefix, pinned, since, namespace, pid, started, seen FROM mounts ORDER BY since"
)
# A daemon serves one mount.
_REMOVE = "DELETE FROM mounts WHERE namespace = ? AND pid = ? AND started = ?"


class Registration:
    """This process's place on the list, from now until `remove`.

    Args:
        index: of the store that is mounted.
        mountpoint: where.
        prefix: what of the store is seen there.
        pinned: hold what is seen.
    """

    def __init__(self, index: Index, mountpoint: str, prefix: str, *, pinned: bool) -> None:
        self._index = index
        pid = os.getpid()
        self._who = pid_namespace(), pid, process_started(pid)
        self._what = mountpoint, prefix, int(pinned), *self._who, time.time()
        self.still_here()

    def still_here(self) -> None:
        """Say that the mount is alive, for those who cannot look up its process. Call it every few minutes.

        It is on the list again if somebody took it for dead, by a clock that was set wrong or after a long
        sleep.
        """
        with self._index.write() as txn:
            txn.execute(_REMOVE, self._who)
            txn.execute(_ADD, (*self._what, time.time()))

    def remove(self) -> None:
        """Take the mount off the list."""
        with self._index.write() as txn:
            txn.execute(_REMOVE, self._who)


def alive(index: Index) -> list[Mount]:
    """The mounts whose daemon runs, the oldest first: the one rule for which mounts count as alive.

    A daemon in this PID namespace is looked up. One of another (a container's, say) counts as alive for an
    hour after its last sign of life. That a mount is alive does not say that it can be reached from here:
    another container may have the mountpoint, or another user.
    """
    return [row.mount for row in _rows(index) if row.is_alive()]


def forget_dead(index: Index) -> list[str]:
    """Take mounts off the list that are not `alive`, unless the store is read-only; returns mountpoints."""
    dead = [row for row in _rows(index) if not row.is_alive()]
    if dead and not index.read_only:
        with index.write() as txn:
            txn.executemany("DELETE FROM mounts WHERE id = ?", [(row.id,) for row in dead])
    return [row.mount.mountpoint for row in dead]


def are_there(txn: Write) -> bool:
    """Whether any mount is on the list."""
    return txn.execute("SELECT 1 FROM mounts LIMIT 1").fetchone() is not None


class _Row(NamedTuple):
    """A mount with what tells whether its daemon runs."""

    id: int
    mount: Mount
    namespace: int
    pid: int
    started: int
    seen: float

    def is_alive(self) -> bool:
        if self.namespace == pid_namespace():
            return is_running(self.pid, self.started)
        return abs(time.time() - self.seen) <= FOREIGN_AGE


def _rows(index: Index) -> list[_Row]:
    return [
        _Row(number, Mount(mountpoint, prefix, bool(pinned), since), *daemon)
        for number, mountpoint, prefix, pinned, since, *daemon in index.file.all(_ALL)
    ]
