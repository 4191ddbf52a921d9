"""Telling the kernel what changed: follows the store's names journal and takes back what the kernel remembers.

Runs on a thread of its own and never in a request: the kernel may hold a folder's lock while it waits for an answer
of ours, and an invalidation waits for that lock.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from collections.abc import Callable
from typing import Protocol

from castore.errors import CastoreError
from castore.journal import JournalTail, NameRecord
from castore_fuse.lowlevel import ROOT
from castore_fuse.nodes import NodeTable
from castore_fuse.view import Folder, View

log = logging.getLogger("castore.fuse")

#: Seconds between two looks at the journal.
INTERVAL = 0.1
#: Seconds between two signs of life.
BEAT_SECONDS = 300.0
#: Seconds after which a record that the index does not confirm counts as never committed.
_PATIENCE = 10.0


class Invalidating(Protocol):
    """The part of a session that is needed here."""

    def invalidate_entry(self, parent: int, name: bytes) -> object:
        """Forget the name in that folder."""
        ...

    def invalidate_inode(self, node: int) -> object:
        """Forget attributes and listing of that node."""
        ...


class Follower:
    """Keeps one mount's kernel caches true.

    Args:
        view: of the mount.
        nodes: what the kernel knows.
        session: takes the invalidations.
        beat: called every few minutes, to say that the mount is alive.
    """

    def __init__(
        self, view: View, nodes: NodeTable, session: Invalidating, beat: Callable[[], object]
    ) -> None:
        self._view = view
        self._nodes = nodes
        self._session = session
        self._beat = beat
        self._next_beat = time.monotonic() + BEAT_SECONDS
        self._stop = threading.Event()
        self._waiting: dict[str, tuple[NameRecord, float]] = {}
        self._tail = JournalTail(view.store.index.journal, view.store.index.beacon)
        self._thread = threading.Thread(target=self._run, name="castore-follow", daemon=True)

    def start(self) -> None:
        """Follow until `stop`. What changed since construction is not missed."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stop.set()
        self._thread.join()
        self._tail.close()

    def _run(self) -> None:
        while not self._stop.wait(INTERVAL):
            try:
                self.look()
                self._view.store.flush_if_due()
                self._view.store.objects.packs.drop_unlinked()
                if time.monotonic() > self._next_beat:
                    self._next_beat = time.monotonic() + BEAT_SECONDS
                    self._beat()
            except (OSError, sqlite3.Error, CastoreError):
                log.exception("cannot follow the store's changes; trying again")

    def look(self) -> None:
        """Handle what was appended to the journal since the last look."""
        records = self._tail.poll()
        if records is None:
            self._forget_everything()
            return
        deadline = time.monotonic() + _PATIENCE
        for record in records:
            self._waiting[record.name] = record, deadline
        # A record is in the journal before its transaction commits. Told too early, the kernel would ask, get the
        # old answer and keep it; so each waits until the index says the same.
        for name, (record, until) in list(self._waiting.items()):
            found = self._view.store.index.find_digest(name)
            if found == record.digest or time.monotonic() > until:
                del self._waiting[name]
                self._changed(name)

    def _changed(self, name: str) -> None:
        path = self._below_prefix(name)
        if path is None:
            return
        parts = path.split("/")
        known = self._nodes.find("/".join(parts[:-1])) if len(parts) > 1 else []
        if len(known) == len(parts) - 1:
            # Also when the file is no node of ours yet: a look-up that read the old row may be on its way, and the
            # kernel holds this back until that look-up is in its cache.
            self._session.invalidate_entry(known[-1].number if known else ROOT, parts[-1].encode())
        # Folders on the way may have come, gone, or changed what they list.
        for node in reversed(known):
            self._session.invalidate_inode(node.number)
            if isinstance(node.item, Folder) and not self._view.folder_exists(node.item.path):
                self._session.invalidate_entry(node.parent, node.part.encode())
        self._session.invalidate_inode(ROOT)

    def _below_prefix(self, name: str) -> str | None:
        prefix = self._view.prefix
        if not prefix:
            return name
        return name[len(prefix) + 1 :] if name.startswith(prefix + "/") else None

    def _forget_everything(self) -> None:
        for node in self._nodes.all():
            self._session.invalidate_entry(node.parent, node.part.encode())
        self._session.invalidate_inode(ROOT)
