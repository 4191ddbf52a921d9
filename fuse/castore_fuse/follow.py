"""Telling the kernel what changed: follows the store's names journal and takes back what the kernel remembers.

Also answers who is about to remove bytes (castore/gc/mount_barrier.py): the kernel forgets what nobody has open; the rest is held.

Runs on a thread of its own and never in a request: the kernel may hold a folder's lock while it waits for an answer
of ours, and an invalidation waits for that lock.
"""

from __future__ import annotations

import logging
import os
import select
import sqlite3
import threading
import time
from collections.abc import Callable
from typing import Protocol

from castore.errors import CastoreError
from castore.gc.mount_barrier import Listener
from castore.index.journal import JournalTail, NameRecord
from castore_fuse.lowlevel import ROOT
from castore_fuse.nodes import Node
from castore_fuse.operations import Operations
from castore_fuse.view import File, Folder

log = logging.getLogger("castore.fuse")

#: Seconds between two looks at the journal.
INTERVAL = 0.1
#: Seconds between two signs of life.
BEAT_SECONDS = 300.0
#: Seconds a look may take longer for writing down what was read: beside it others write, and names change.
_FLUSHING = 0.03
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
        operations: of the mount.
        session: takes the invalidations.
        listener: where the mount is asked; closed by `stop`. None in a store that is read-only, where nobody could find it.
        beat: called every few minutes, to say that the mount is alive; None if nobody could be told.
    """

    def __init__(
        self,
        operations: Operations,
        session: Invalidating,
        listener: Listener | None,
        beat: Callable[[], object] | None,
    ) -> None:
        self._operations = operations
        self._view = operations.view
        self._nodes = operations.nodes
        self._session = session
        self._listener = listener
        self._beat = beat
        self._next_beat = time.monotonic() + BEAT_SECONDS
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC)
        self._waiting: dict[str, tuple[NameRecord, float]] = {}
        self._tail = JournalTail(self._view.store.index.journal, self._view.store.index.beacon)
        self._thread = threading.Thread(target=self._run, name="castore-follow", daemon=True)

    def start(self) -> None:
        """Follow until `stop`. What changed since construction is not missed."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        os.close(self._wake_write)
        if self._thread.ident is not None:
            self._thread.join()
        os.close(self._wake_read)
        if self._listener is not None:
            self._listener.close()
        self._tail.close()

    def _run(self) -> None:
        listener = self._listener
        watched = [self._wake_read] if listener is None else [listener.fileno(), self._wake_read]
        while True:
            ready, _, _ = select.select(watched, [], [], INTERVAL)
            if self._wake_read in ready:
                return
            try:
                if ready and listener is not None:
                    self._answer(listener)
                else:
                    self._tick()
            except CastoreError as error:  # a full disk, say: the sentence tells all
                log.error("%s; the mount goes on, and tries again", error)  # noqa: TRY400
            except (OSError, sqlite3.Error):
                log.exception("cannot follow the store's changes; trying again")

    def _tick(self) -> None:
        self.look()
        self._view.store.parts.usage.flush_for(_FLUSHING)
        self._view.store.objects.packs.drop_unlinked()
        self._operations.handles.drop_unlinked()
        if self._beat is not None and time.monotonic() > self._next_beat:
            self._next_beat = time.monotonic() + BEAT_SECONDS
            self._beat()

    def _answer(self, listener: Listener) -> None:
        waiting = listener.asked()
        failure = "it failed; its log says why"
        try:
            self.look()
            self._hold_what_may_go()
            failure = ""
        except OSError as error:
            failure = f"it cannot hold what is open ({error})"
            raise
        finally:
            listener.answer(waiting, failure)

    def look(self) -> None:
        """Handle what was appended to the journal since the last look."""
        records = self._tail.poll()
        if records == [] and not self._waiting:
            return
        # From here on every node that was made of what the index said before is in the table.
        if not self._operations.lookups.settle():
            raise OSError("a look-up takes too long")
        if records is None:
            self._forget_everything()
            return
        deadline = time.monotonic() + _PATIENCE
        for record in records:
            self._waiting[record.name] = record, deadline
        # A record is in the journal before its transaction commits. Told too early, the kernel would ask, get the
        # old answer and keep it; so each waits until the index says the same. What it said before the last record
        # of several counts as well: the node is outdated as soon as the index says something else than the node.
        stale: set[int] = set()
        for name, (record, until) in list(self._waiting.items()):
            found = self._view.store.index.find_digest(name)
            if found == record.digest or time.monotonic() > until:
                del self._waiting[name]
            self._changed(name, found, stale)
        # Once, however many names changed below them.
        for number in stale:
            self._session.invalidate_inode(number)

    def _changed(self, name: str, digest: bytes | None, stale: set[int]) -> None:
        path = self._below_prefix(name)
        if path is None:
            return
        stale.add(ROOT)
        parts = path.split("/")
        known = self._nodes.find(path)
        child = known.pop() if len(known) == len(parts) else None
        if child is not None and isinstance(child.item, File) and child.item.digest != digest:
            self._nodes.outdate(child)
        if len(known) == len(parts) - 1:
            # Also when the file is no node of ours yet: a look-up that read the old row may be on its way, and the
            # kernel holds this back until that look-up is in its cache.
            self._session.invalidate_entry(known[-1].number if known else ROOT, parts[-1].encode())
        # Folders on the way may have come, gone, or changed what they list.
        for node in reversed(known):
            stale.add(node.number)
            if isinstance(node.item, Folder) and not self._view.folder_exists(node.item.path):
                self._take_back(node)

    def _take_back(self, node: Node) -> None:
        """Have the kernel forget the node, unless somebody uses it."""
        self._session.invalidate_entry(node.parent, node.part.encode())

    def _hold_what_may_go(self) -> None:
        """Hold the bytes that nobody names and the kernel still knows."""
        for node in self._nodes.nameless():
            # Held since they were looked up: only who reads them now may keep them.
            if isinstance(node.item, File) and self._view.is_unnamed(node.item.digest):
                self._take_back(node)
        for node in self._nodes.outdated():
            self._operations.hold(node)

    def _below_prefix(self, name: str) -> str | None:
        prefix = self._view.prefix
        if not prefix:
            return name
        return name[len(prefix) + 1 :] if name.startswith(prefix + "/") else None

    def _forget_everything(self) -> None:
        index = self._view.store.index
        for node in self._nodes.all():
            item = node.item
            if isinstance(item, File) and item.name and index.find_digest(item.name) != item.digest:
                self._nodes.outdate(node)
            self._take_back(node)
        self._session.invalidate_inode(ROOT)
