"""The daemon of one mount: ``python -m castore_fuse``. The daemon is started by `api`, not by hand.

The daemon opens the store, registers the mount with it, and serves the view until it is unmounted.
"""

from __future__ import annotations

import argparse
import logging
import os
import sqlite3
from pathlib import Path

from castore import Store
from castore.errors import CastoreError
from castore.gc.mount_barrier import RegisteredMount
from castore.read.file_tree import FileTree
from castore.system.mount_table import SOURCE_PREFIX
from castore_fuse.daemon import serve
from castore_fuse.errors import MountError
from castore_fuse.follower import Follower
from castore_fuse.kernel_read_ahead import KernelReadAhead
from castore_fuse.lifecycle import mount_options
from castore_fuse.operations import Operations
from castore_fuse.session import Session
from castore_fuse.view import View

log = logging.getLogger("castore.fuse")


#: Requests handled at once where some may wait for a network: others must not wait with them.
_WAITING_THREADS = 32


class MountDaemon:
    """The store, view and registration of one daemon, and how to close them."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options

    def open(self) -> Session:
        """Open the store and make the session that `daemon.serve` runs."""
        given = self._options
        self.store = Store(given.store, memory=0)
        if given.pin and self.store.read_only:
            raise MountError(
                f"the store {self.store.path} is read-only here, so no gc would learn of --pin; leave it out"
            )
        tree: FileTree = self.store.tree
        if given.remote:
            from castore.remote.remote_tree import RemoteTree  # other mounts start without it

            ref, _, commit = given.ref.partition("@")
            self._remote_tree = tree = RemoteTree(
                self.store.parts, given.remote, ref, commit or None, is_following=given.follow,
                prefetch=given.prefetch,
            )  # fmt: skip
        self.view = View(self.store, given.prefix, given.cache_size, tree)
        operations = self._operations = Operations(self.view)
        options = mount_options(f"{SOURCE_PREFIX}{self.store.path}", allow_other=given.allow_other)
        threads = given.threads
        if threads is None and self.store.remotes():
            threads = _WAITING_THREADS
        session = self._session = Session(operations, given.mountpoint, options, threads)
        listener = heartbeat = None
        # A mount of a remote can fetch its bytes again, so gc need not ask it.
        if not (self.store.read_only or given.remote):
            self._registered = RegisteredMount(
                self.store.parts, str(session.mountpoint), given.prefix, pinned=given.pin
            )
            listener, heartbeat = self._registered.listener, self._registered.refresh
        self.follower = Follower(operations, session, listener, heartbeat)
        return session

    def started(self) -> None:
        """Start the threads. Called once the mount answers."""
        if self._session.device is not None:
            self._operations.kernel_read_ahead = KernelReadAhead.of_device(self._session.device)
        self.follower.start()
        if hasattr(self, "_remote_tree"):
            self._remote_tree.begin(self.view.prefix)

    def close(self) -> None:
        """Undo everything that `open` did."""
        if hasattr(self, "follower"):
            self.follower.stop()
        if not hasattr(self, "store"):
            return
        try:
            if hasattr(self, "_registered"):
                self._registered.remove()
            if hasattr(self, "view"):
                self.view.tree.close()
            self.store.close()
        except (sqlite3.Error, CastoreError) as error:
            # The next process that opens the store sees that this one is gone.
            log.warning("could not remove the mount's row from the index: %s", error)


def main(arguments: list[str] | None = None) -> int:
    """Serve a mount until its end, and return the exit code."""
    parser = argparse.ArgumentParser(prog="castore_fuse", description=__doc__)
    parser.add_argument("--store", required=True)
    parser.add_argument("--prefix", default="")
    parser.add_argument("--remote")
    parser.add_argument("--ref", default="main")
    parser.add_argument("--follow", action="store_true")
    parser.add_argument("--prefetch", default="none")
    parser.add_argument("--pin", action="store_true")
    parser.add_argument("--allow-other", action="store_true")
    parser.add_argument("--cache-size", type=int, required=True)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--record", type=Path)
    parser.add_argument("mountpoint")
    parser.add_argument("--ready-fd", type=int)
    parser.add_argument("--lifeline-fd", type=int)
    given = parser.parse_args(arguments)
    mount = MountDaemon(given)
    try:
        return serve(
            mount.open,
            started=mount.started,
            ready_fd=given.ready_fd,
            lifeline_fd=given.lifeline_fd,
            record_path=given.record,
        )
    finally:
        mount.close()


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    # A thread that waits for a remote would keep the process for as long as the network hangs.
    os._exit(code)
