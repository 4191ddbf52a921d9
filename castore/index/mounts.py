"""The index's list of mounts: who serves one, and what pinned ones hold.

A pinned mount keeps gc away from everything under its prefix. A mount whose daemon died holds nothing: its row goes at the
next gc. What gc removes although the kernel may still read it through a mount, pinned or not, is the matter of gc/mount_barrier.py.
"""

from __future__ import annotations

import os
import time

from castore.index.database import Index
from castore.index.transaction import Write
from castore.system.temporary import FOREIGN_AGE, is_running, pid_namespace, process_started

_ADD = (
    "INSERT INTO mounts (mountpoint, prefix, pinned, namespace, pid, started, since, seen)"
    " VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
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

        It is on the list again if somebody took it for dead, by a clock that was set wrong or after a long sleep.
        """
        with self._index.write() as txn:
            txn.execute(_REMOVE, self._who)
            txn.execute(_ADD, (*self._what, time.time()))

    def remove(self) -> None:
        """Take the mount off the list."""
        with self._index.write() as txn:
            txn.execute(_REMOVE, self._who)


def forget_dead(index: Index) -> list[str]:
    """Take mounts whose daemon is gone off the list; returns their mountpoints."""
    rows = index.rows("SELECT id, mountpoint, namespace, pid, started, seen FROM mounts")
    dead = [row for row in rows if _gone(*row[2:])]
    if dead and not index.read_only:
        with index.write() as txn:
            txn.executemany("DELETE FROM mounts WHERE id = ?", [(row[0],) for row in dead])
    return [row[1] for row in dead]


def are_there(txn: Write) -> bool:
    """Whether any mount is on the list."""
    return txn.execute("SELECT 1 FROM mounts LIMIT 1").fetchone() is not None


def _gone(namespace: int, pid: int, started: int, seen: float) -> bool:
    if namespace == pid_namespace():
        return not is_running(pid, started)
    return abs(time.time() - seen) > FOREIGN_AGE
