"""The index's list of mounts: who serves one, and what pinned ones hold.

A pinned mount keeps gc away from everything under its prefix, and from bytes that lost their last name while it has
been there, since the kernel may read them without an open handle. A mount whose daemon died holds nothing: its row
goes at the next gc.
"""

from __future__ import annotations

import os
import time

from castore.index import Index
from castore.objects.loose import process_started


def register(index: Index, mountpoint: str, prefix: str, *, pinned: bool) -> int:
    """Put this process on the list as serving ``mountpoint``; returns the row for `unregister`."""
    with index.write() as txn:
        row = (mountpoint, prefix, int(pinned), os.getpid(), process_started(os.getpid()), time.time())
        return txn.execute(
            "INSERT INTO mounts (mountpoint, prefix, pinned, pid, started, since) VALUES (?, ?, ?, ?, ?, ?)", row
        ).lastrowid or 0  # fmt: skip


def unregister(index: Index, row: int) -> None:
    """Take a mount off the list."""
    with index.write() as txn:
        txn.execute("DELETE FROM mounts WHERE id = ?", (row,))


def forget_dead(index: Index) -> list[str]:
    """Take mounts whose daemon is gone off the list; returns their mountpoints."""
    rows = index.connection().execute("SELECT id, pid, started, mountpoint FROM mounts").fetchall()
    dead = [row for row in rows if process_started(row[1]) != row[2]]
    if dead:
        with index.write() as txn:
            txn.executemany("DELETE FROM mounts WHERE id = ?", [(row[0],) for row in dead])
    return [row[3] for row in dead]
