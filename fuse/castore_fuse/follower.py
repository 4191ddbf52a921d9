"""Keep the kernel's caches true: follow the store's names journal, and invalidate what changed.

The follower also answers gc before gc removes bytes (castore/gc/mount_barrier.py). The kernel then forgets
the nodes that no process has open; the mount holds the bytes of the others.

The follower runs on a thread of its own and must never run inside a request: the kernel may hold a folder's
lock while it waits for our answer, and an invalidation waits for that lock.
"""

from __future__ import annotations

import logging
import math
import os
import select
import sqlite3
import threading
import time
from collections.abc import Callable
from typing import Protocol

from castore.errors import CastoreError
from castore.gc.mount_barrier import Listener
from castore.names import LINKS, RESERVED
from castore_fuse.lowlevel import ROOT
from castore_fuse.nodes import Node
from castore_fuse.operations import Operations
from castore_fuse.view import File, Folder

log = logging.getLogger("castore.fuse")

#: Seconds between two scans of the journal.
INTERVAL = 0.1
#: Seconds between two heartbeats in the index.
HEARTBEAT_SECONDS = 300.0
#: Seconds that flushing usage may add to a scan. Other processes write the index meanwhile, and names change.
_FLUSH_SECONDS = 0.03
#: Seconds after which a record that the index does not confirm counts as never committed.
_COMMIT_SECONDS = 10.0


class Invalidator(Protocol):
    """The part of a session that the follower needs."""

    def invalidate_entry(self, parent: int, name: bytes) -> object:
        """Drop the name in that folder from the kernel's cache."""
        ...

    def invalidate_inode(self, node: int) -> object:
        """Drop the node's attributes and listing from the kernel's cache."""
        ...


class Follower:
    """Keeps one mount's kernel caches true.

    Args:
        operations: those of the mount.
        session: takes the invalidations.
        listener: where gc asks the mount; `stop` closes it. None for a read-only store, where no gc could
            find it.
        heartbeat: called every few minutes to record that the mount is alive. None where this
            cannot be recorded.
    """

    def __init__(
        self,
        operations: Operations,
        session: Invalidator,
        listener: Listener | None,
        heartbeat: Callable[[], object] | None,
    ) -> None:
        self._operations = operations
        self._view = operations.view
        self._nodes = operations.nodes
        self._session = session
        self._listener = listener
        self._heartbeat = heartbeat
        self._next_heartbeat = time.monotonic() + HEARTBEAT_SECONDS
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC)
        self._waiting: dict[str, tuple[bytes | None, float]] = {}
        self._forget_again = math.inf  # when, by the monotonic clock
        self._tree = self._view.tree
        self._tail = self._tree.follow()
        self._thread = threading.Thread(target=self._run, name="castore-follow", daemon=True)

    def start(self) -> None:
        """Follow until `stop`. Changes since construction are not missed."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread, and close the listener and the journal."""
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
            except CastoreError as error:  # a full disk, say: the message is enough
                log.error("%s; the mount goes on, and tries again", error)  # noqa: TRY400
            except (OSError, sqlite3.Error):
                log.exception("cannot follow the store's changes; trying again")

    def _tick(self) -> None:
        self.poll()
        self._tree.maintain(_FLUSH_SECONDS)
        self._operations.handles.drop_unlinked()
        if self._heartbeat is not None and time.monotonic() > self._next_heartbeat:
            self._next_heartbeat = time.monotonic() + HEARTBEAT_SECONDS
            self._heartbeat()

    def _answer(self, listener: Listener) -> None:
        waiting = listener.accept()
        failure = "it failed; see its log"
        try:
            self.poll()
            self._hold_removable()
            failure = ""
        except OSError as error:
            failure = f"a file in use cannot be opened ({error})"
            raise
        finally:
            listener.answer(waiting, failure)

    def poll(self) -> None:
        """Handle the records appended to the journal since the last scan."""
        records = self._tail.poll()
        is_due = time.monotonic() > self._forget_again
        if records == [] and not self._waiting and not is_due:
            return
        # From here on the table has every node that was made from an older answer of the index.
        if not self._operations.lookups.settle():
            raise OSError("a look-up takes too long")
        if records is None or is_due:
            self._forget_everything()
        if records is None:  # some of them may not have committed yet
            self._forget_again = time.monotonic() + _COMMIT_SECONDS
            return
        if is_due:
            self._forget_again = math.inf
        deadline = time.monotonic() + _COMMIT_SECONDS
        for record in records:
            # The other reserved names are bytes kept of a remote, which are in no mount.
            if record.name.startswith(f"{LINKS}/") or not record.name.startswith(f"{RESERVED}/"):
                self._waiting[record.name] = record.digest, deadline
        # A record is in the journal before its transaction commits. If the kernel were invalidated before the
        # commit, it would ask again, get the old answer and keep it. So each record waits until the index
        # has its digest. Of several records of a name, the index may already show an earlier one: a node is
        # outdated as soon as the index differs from it.
        stale: set[int] = set()
        for name, (digest, until) in list(self._waiting.items()):
            found = self._tree.find_digest(name)
            if found == digest or time.monotonic() > until:
                del self._waiting[name]
            self._apply_change(name, found, stale)
        # Each node is invalidated once, however many names changed below it.
        for number in stale:
            self._session.invalidate_inode(number)

    def _apply_change(self, name: str, digest: bytes | None, stale: set[int]) -> None:
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
            # The name is invalidated also when the file has no node yet: a look-up that read the old row may
            # be under way, and the kernel delays the invalidation until that look-up is in its cache.
            self._session.invalidate_entry(known[-1].number if known else ROOT, parts[-1].encode())
        # Folders on the path may have appeared, vanished, or changed their listing.
        for node in reversed(known):
            stale.add(node.number)
            if isinstance(node.item, Folder) and not self._view.folder_exists(node.item.path):
                self._invalidate_name(node)

    def _invalidate_name(self, node: Node) -> None:
        """Make the kernel forget the node, unless a process uses it."""
        self._session.invalidate_entry(node.parent, node.part.encode())

    def _hold_removable(self) -> None:
        """Hold the bytes of nodes that the kernel still knows although no name points to them any more."""
        for node in self._nodes.nameless():
            # Nodes found by digest hold their bytes since their look-up. Only a process that has one open now
            # may keep it.
            if isinstance(node.item, File) and self._view.is_unnamed(node.item.digest):
                self._invalidate_name(node)
        for node in self._nodes.outdated():
            self._operations.hold(node)

    def _below_prefix(self, name: str) -> str | None:
        prefix = self._view.prefix
        if not prefix or name.startswith(f"{LINKS}/"):
            return name
        return name[len(prefix) + 1 :] if name.startswith(prefix + "/") else None

    def _forget_everything(self) -> None:
        for node in self._nodes.all():
            item = node.item
            if isinstance(item, File) and item.name and self._tree.find_digest(item.name) != item.digest:
                self._nodes.outdate(node)
            self._invalidate_name(node)
        self._session.invalidate_inode(ROOT)
