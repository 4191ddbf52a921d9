"""Lets go of the bytes of links that are gone.

A held entry (link_registry.py) knows where its link was last seen. If no link that leads to it is there, the
link was deleted, replaced or renamed, and only a look at the whole folder can tell. Temporary names count
there too: a link that was renamed to one still stands for its file. A rename during the look can hide a link,
so a held entry goes only after a second look, some seconds later.

A link that is merely out of sight is not gone. The disk of the watched folder may not be mounted, and an
empty folder be at its path; another file system may be mounted over a part of the folder; a part may not be
listable. The bytes of such links stay, until the links are seen again or the user lets go of them.
"""

from __future__ import annotations

import errno
import math
import os
import time
from collections.abc import Iterable

from castore import Store
from castore.records import Entry
from castore.system.mount_table import FSTYPE, mounts
from castore.watch import link_registry
from castore.watch.folder import Root, WatchedFolder

#: Seconds between two looks for one link, at least.
_LOOK_SECONDS = 2.0
# A look may take a twentieth of the time.
_SHARE = 20
# Records that are renewed at a time, while all are gone through.
_BATCH = 1000


class LinkCensus:
    """Looks for the links of held entries in one folder.

    Args:
        store: has the entries.
        folder: the folder.
    """

    def __init__(self, store: Store, folder: WatchedFolder) -> None:
        self._store, self._folder = store, folder
        # Held entries whose links may be gone, and when a look first missed them, by `time.monotonic`.
        self._missed: dict[str, float] = {}
        self._due = math.inf

    def suspect(self, names: Iterable[str]) -> None:
        """Look soon for the links of some held entries."""
        for name in names:
            self._missed.setdefault(name, math.inf)
        if self._missed:
            self._due = min(self._due, time.monotonic() + _LOOK_SECONDS)

    def suspect_all(self) -> int:
        """Look soon for all links of the folder that are not where they were last seen.

        Returns:
            The number of links that are out of sight, whose bytes stay.
        """
        hidden, moved, sight = 0, [], _Sight()
        # A link may have been renamed while nobody watched, and be behind any mount.
        is_covered = sight.is_covered(self._folder.root)
        for held in link_registry.all_held(self._store, self._folder.root):
            if not link_registry.is_led(held):
                if is_covered or sight.hides(held):
                    hidden += 1
                else:
                    self.suspect([held.name])
            elif not sight.has_root_of(held):
                moved.append((held, link_registry.path_of(held)))  # with its folder, to another disk say
                if len(moved) == _BATCH:
                    link_registry.hold_at(self._store, moved, self._folder)
                    moved = []
        if moved:
            link_registry.hold_at(self._store, moved, self._folder)
        return hidden

    def look_if_due(self) -> None:
        """Look for links, if it is time."""
        began = time.monotonic()
        if began < self._due:
            return
        self._due = math.inf
        found, sight = self._find(), _Sight()
        missing = {name: held for name, held in found.items() if not sight.hides(held)}
        due = [held for name, held in missing.items() if began - self._missed[name] >= _LOOK_SECONDS]
        for name in link_registry.release(self._store, due, self._folder) if due else ():
            del missing[name]
        self._missed = {name: min(self._missed[name], began) for name in missing}
        if self._missed:
            took = time.monotonic() - began
            self._due = time.monotonic() + max(_LOOK_SECONDS, _SHARE * took)

    def release_now(self, names: Iterable[str]) -> None:
        """Let go of those of some held entries, and of all suspects, to which no link leads. Nobody else
        renames links now.
        """
        self._missed = dict.fromkeys([*self._missed, *names], 0.0)
        link_registry.release(self._store, [*self._find().values()], self._folder)
        self._missed = {}

    def _find(self) -> dict[str, Entry]:
        """Those of the suspects that are held and that no link in the folder leads to; none if a part of the
        folder cannot be looked at.
        """
        found = ((name, link_registry.held_entry(self._store, name)) for name in self._missed)
        missing = {name: held for name, held in found if held is not None and not link_registry.is_led(held)}
        unknown: list[OSError] = []
        moved: list[tuple[Entry, str]] = []
        for path in self._folder.links(unknown.append) if missing else ():
            try:
                name = link_registry.held_of(os.readlink(path))
            except FileNotFoundError:
                continue
            except OSError as error:
                if error.errno != errno.EINVAL:  # it is a file by now
                    unknown.append(error)
                continue
            if name in missing:
                moved.append((missing.pop(name), path))
        if moved:
            link_registry.hold_at(self._store, moved, self._folder)
        return {} if unknown else missing


class _Sight:
    """Tells at one moment which links cannot be seen at their places, though they may be there."""

    def __init__(self) -> None:
        self._mountpoints = [str(mount.mountpoint) for mount in mounts() if mount.fstype != FSTYPE]
        self._there: dict[Root, bool] = {}

    def has_root_of(self, held: Entry) -> bool:
        """Whether the watched folder in which a link was last seen is there."""
        root = link_registry.root_of(held)
        if root is None:
            return False
        if root not in self._there:
            self._there[root] = root.is_there()
        return self._there[root]

    def is_covered(self, folder: str) -> bool:
        """Whether something but a store is mounted on a part of a folder."""
        return any(mountpoint.startswith(f"{folder}/") for mountpoint in self._mountpoints)

    def hides(self, held: Entry) -> bool:
        """Whether the folder of a link is another one now, or something is mounted between the two."""
        root, path = link_registry.root_of(held), link_registry.path_of(held)
        if root is None or not self.has_root_of(held):
            return True
        return any(
            path.startswith(f"{mountpoint}/") and mountpoint.startswith(f"{root.path}/")
            for mountpoint in self._mountpoints
        )
