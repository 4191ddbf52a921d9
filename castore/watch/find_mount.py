"""The mount of a store that links can lead into. Asks the store's list of mounts, and each mount whether it is there."""

from __future__ import annotations

import json
import os
import shlex
from typing import NamedTuple

from castore import Store
from castore.errors import CastoreError
from castore.index import mounts


class NoMountError(CastoreError):
    """No live mount of the store shows the names in question."""


class Mount(NamedTuple):
    """A live mount: where it is, and the prefix that it shows (without it)."""

    mountpoint: str
    prefix: str

    def path(self, name: str) -> str:
        """Where an entry lies in it."""
        return os.path.join(self.mountpoint, name[len(self.prefix) + 1 :] if self.prefix else name)

    def is_live(self) -> bool:
        """Whether it still answers."""
        try:
            os.statvfs(self.mountpoint)
        except OSError:
            return False
        return os.path.ismount(self.mountpoint)


def find_mount(store: Store, prefix: str) -> Mount:
    """A live mount that shows all names under ``prefix``: the oldest of those that outlive whoever made them.

    Raises:
        NoMountError: there is none; the message tells the command that makes one.
    """
    mounts.forget_dead(store.index)
    sql = "SELECT mountpoint, prefix FROM mounts ORDER BY since"
    found = [Mount(*row) for row in store.index.rows(sql)]
    covering = [mount for mount in found if _covers(mount.prefix, prefix) and mount.is_live()]
    if not covering:
        raise NoMountError(
            f"no live mount of {store.path} shows {prefix!r}, so there is nothing that links could lead into;"
            f" make one first: castore --store {shlex.quote(str(store.path))} mount MOUNTPOINT"
        )
    standing = _standing(store)
    return min(covering, key=lambda mount: mount.mountpoint not in standing)


def _covers(shown: str, prefix: str) -> bool:
    return not shown or prefix == shown or prefix.startswith(f"{shown}/")


def _standing(store: Store) -> set[str]:
    """Mountpoints of `castore mount`, which stay; those of a ``with`` block go with it and leave no record."""
    found = set()
    for record in (store.path / "locks").glob("mount-*.json"):
        try:
            found.add(json.loads(record.read_text())["mountpoint"])
        except (OSError, ValueError, KeyError, TypeError):
            continue  # its mount is just being taken away
    return found
