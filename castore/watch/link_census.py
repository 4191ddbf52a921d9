"""Lets go of the bytes of links that are gone.

A held entry (link_registry.py) knows where its link was last seen. If no link that leads to it is there, the
link was deleted, replaced or renamed, and only a look at the whole folder can tell. Temporary names count
there too: a link that was renamed to one still stands for its file. A rename during the look can hide a link,
so a held entry goes only after a second look, some seconds later.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable

from castore import Store
from castore.records import Entry
from castore.watch import link_registry
from castore.watch.folder import WatchedFolder

#: Seconds between two looks for one link, at least.
_LOOK_SECONDS = 2.0
# A look may take a twentieth of the time.
_SHARE = 20


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

    def suspect_all(self) -> None:
        """Look soon for all links of the folder that are not where they were last seen."""
        held = link_registry.all_held(self._store, self._folder.root)
        self.suspect(one.name for one in held if not link_registry.is_led(one))

    def look_if_due(self) -> None:
        """Look for links, if it is time."""
        began = time.monotonic()
        if began < self._due:
            return
        self._due = math.inf
        missing = self._find()
        for name, held in list(missing.items()):
            since = self._missed[name]
            if began - since >= _LOOK_SECONDS and link_registry.release(self._store, held):
                del missing[name]
        self._missed = {name: min(self._missed[name], began) for name in missing}
        if self._missed:
            took = time.monotonic() - began
            self._due = time.monotonic() + max(_LOOK_SECONDS, _SHARE * took)

    def release_now(self, names: Iterable[str]) -> None:
        """Let go of those of some held entries to which no link leads. Nobody else renames links now."""
        self._missed = dict.fromkeys(names, 0.0)
        for held in self._find().values():
            link_registry.release(self._store, held)
        self._missed = {}

    def _find(self) -> dict[str, Entry]:
        """Those of the suspects that are held and that no link in the folder leads to."""
        found = ((name, link_registry.held_entry(self._store, name)) for name in self._missed)
        missing = {name: held for name, held in found if held is not None and not link_registry.is_led(held)}
        for path in self._folder.links() if missing else ():
            name = link_registry.held_of(link_registry.link_at(path) or "")
            if name in missing:
                link_registry.hold_at(self._store, missing.pop(name), path)
        return missing
