"""The index's list of mounts: the daemon that serves each mount, and its prefix if it is pinned.

A pinned mount keeps gc from removing anything under its prefix. A mount whose daemon died keeps nothing: the
next gc deletes its row. gc may remove blobs that the kernel can still read through a mount, pinned or not:
gc/mount_barrier.py takes care of those.
"""

from __future__ import annotations

import os
import time
from typing import NamedTuple

from castore.index.database import Index
from castore.index.transaction import Write
from castore.records import Mount
from castore.system.temporary import OTHER_NAMESPACE_SECONDS, is_running, pid_namespace, process_started

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
        mountpoint: the path of the mount.
        prefix: the prefix of names that the mount shows.
        pinned: keep everything under the prefix from gc.
    """

    def __init__(self, index: Index, mountpoint: str, prefix: str, *, pinned: bool) -> None:
        self._index = index
        pid = os.getpid()
        self._daemon = pid_namespace(), pid, process_started(pid)
        self._row = mountpoint, prefix, int(pinned), *self._daemon, time.time()
        self.refresh()

    def refresh(self) -> None:
        """Refresh the row, for processes that cannot look up this daemon. Call it every few minutes.

        Adds the row again if another process took the mount for dead, because of a wrong clock or a long
        sleep.
        """
        with self._index.write() as txn:
            txn.execute(_REMOVE, self._daemon)
            txn.execute(_ADD, (*self._row, time.time()))

    def remove(self) -> None:
        """Take the mount off the list."""
        with self._index.write() as txn:
            txn.execute(_REMOVE, self._daemon)


def list_live(index: Index) -> list[Mount]:
    """The mounts whose daemon runs, the oldest first: the one rule for which mounts count as alive.

    The process table shows whether a daemon of this PID namespace runs. A daemon of another namespace (a
    container's, say) counts as alive for an hour after its last `refresh`. A mount that is alive may be
    out of reach: its mountpoint may belong to another container or another user.
    """
    return [row.mount for row in _rows(index) if row.is_alive()]


def remove_dead(index: Index) -> list[str]:
    """Delete the rows of mounts whose daemon is dead, unless the store is read-only; returns mountpoints."""
    dead = [row for row in _rows(index) if not row.is_alive()]
    if dead and not index.read_only:
        with index.write() as txn:
            txn.executemany("DELETE FROM mounts WHERE id = ?", [(row.id,) for row in dead])
    return [row.mount.mountpoint for row in dead]


def any_listed(txn: Write) -> bool:
    """Whether any mount is on the list."""
    return txn.execute("SELECT 1 FROM mounts LIMIT 1").fetchone() is not None


class _Row(NamedTuple):
    """A mount, and the identity of its daemon."""

    id: int
    mount: Mount
    namespace: int
    pid: int
    started: int
    seen: float

    def is_alive(self) -> bool:
        if self.namespace == pid_namespace():
            return is_running(self.pid, self.started)
        return abs(time.time() - self.seen) <= OTHER_NAMESPACE_SECONDS


def _rows(index: Index) -> list[_Row]:
    return [
        _Row(number, Mount(mountpoint, prefix, bool(pinned), since), *daemon)
        for number, mountpoint, prefix, pinned, since, *daemon in index.file.all(_ALL)
    ]
