"""Finds the mount of a store that links can lead into: a live one that shows the names and answers."""

from __future__ import annotations

import json
import os
import shlex

from castore import Store
from castore.errors import CastoreError
from castore.records import Mount


class NoMountError(CastoreError):
    """No live mount of the store shows the names in question."""


def answers(mount: Mount) -> bool:
    """Whether a live mount can be reached from here, and answers."""
    try:
        os.statvfs(mount.mountpoint)
    except OSError:
        return False
    return os.path.ismount(mount.mountpoint)


def find_mount(store: Store, prefix: str) -> Mount:
    """A live mount that shows all names under ``prefix``: the oldest one of `castore mount`, else the oldest.

    Raises:
        NoMountError: there is none; the message has the command that makes one.
    """
    covering = [mount for mount in store.mounts() if mount.shows(prefix) and answers(mount)]
    if not covering:
        raise NoMountError(
            f"no live mount of {store.path} shows {prefix!r}, so links have nothing to lead into;"
            f" make one first: castore --store {shlex.quote(str(store.path))} mount MOUNTPOINT"
        )
    in_background = _background_mountpoints(store)
    return min(covering, key=lambda mount: mount.mountpoint not in in_background)


def _background_mountpoints(store: Store) -> set[str]:
    """Mountpoints of `castore mount`. A mount of a ``with`` block ends with the block and has no record."""
    found = set()
    for record in (store.path / "locks").glob("mount-*.json"):
        try:
            found.add(json.loads(record.read_text())["mountpoint"])
        except (OSError, ValueError, KeyError, TypeError):
            continue  # the mount is just being unmounted
    return found
