"""The index's list of mounts: who serves one, and what pinned ones hold.

A pinned mount keeps gc away from everything under its prefix, and from bytes that lost their last name while it has
been there, since the kernel may read them without an open handle. A mount whose daemon died holds nothing: its row
goes at the next gc.
"""

from __future__ import annotations

import os
import time

from castore.index import Index
from castore.temporary import FOREIGN_AGE, pid_namespace, process_started


def register(index: Index, mountpoint: str, prefix: str, *, pinned: bool) -> int:
    """Put this process on the list as serving ``mountpoint``; returns the row for the other calls."""
    now, pid = time.time(), os.getpid()
    row = (mountpoint, prefix, int(pinned), pid_namespace(), pid, process_started(pid), now, now)
    columns = "mountpoint, prefix, pinned, namespace, pid, started, since, seen"
    with index.write() as txn:
        sql = f"INSERT INTO mounts ({columns}) VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
        return txn.execute(sql, row).lastrowid or 0


def still_here(index: Index, row: int) -> None:
    """Say that a mount is alive, for those who cannot look up its process. Call it every few minutes."""
    with index.write() as txn:
        txn.execute("UPDATE mounts SET seen = ? WHERE id = ?", (time.time(), row))


def unregister(index: Index, row: int) -> None:
    """Take a mount off the list."""
    with index.write() as txn:
        txn.execute("DELETE FROM mounts WHERE id = ?", (row,))


def forget_dead(index: Index) -> list[str]:
    """Take mounts whose daemon is gone off the list; returns their mountpoints."""
    rows = (
        index.connection()
        .execute("SELECT id, mountpoint, namespace, pid, started, seen FROM mounts")
        .fetchall()
    )
    dead = [row for row in rows if _gone(*row[2:])]
    if dead:
        with index.write() as txn:
            txn.executemany("DELETE FROM mounts WHERE id = ?", [(row[0],) for row in dead])
    return [row[1] for row in dead]


def _gone(namespace: int, pid: int, started: int, seen: float) -> bool:
    if namespace == pid_namespace():
        return process_started(pid) != started
    return abs(time.time() - seen) > FOREIGN_AGE
