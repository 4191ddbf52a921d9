"""Before gc removes blobs, live mounts open those that the kernel may still read.

The kernel sends a mount no FUSE_OPEN or FUSE_RELEASE: these would cost each open two round trips. A mount
sees which names changed and which inodes the kernel has forgotten. From both follows which blobs may still be
open although no name leads to them. gc asks every mount before it removes blobs: the mount opens the blobs
still in use, and answers. POSIX keeps an unlinked file for as long as it is open. So a blob that nobody uses
is freed at once, and another one as soon as its last user closes it.

Each mount listens on a socket in the store's ``locks``. The kernel refuses connections to a killed mount's
socket, whatever the index has on that mount and whichever container it ran in. gc never asks while it holds
the index's write lock.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from castore.errors import StoreError
from castore.index import mounts
from castore.index.database import Index
from castore.index.journal import JournalTail
from castore.system.local_sockets import address
from castore.system.temporary import give_to_owner, is_running, pid_namespace

# Imported where it is used: it takes a twentieth of the time of `import castore`, and few stores have mounts.
if TYPE_CHECKING:
    import socket

    from castore.parts import Parts

#: Seconds that a mount may take to answer.
ANSWER_SECONDS = 30.0
_HELD = b"held"
_NAME = re.compile(r"mount-([0-9]{1,20})-([0-9]{1,20})\.sock", re.ASCII)
_BACKLOG = 128


def is_socket_of_a_mount(name: str) -> bool:
    """Whether a file of ``locks`` is the socket of a mount."""
    return _NAME.fullmatch(name) is not None


class Listener:
    """A mount's side: the socket on which gc asks it, until `close`.

    Args:
        locks: the store's folder of that name.
        mode: permission bits of the socket.
    """

    def __init__(self, locks: Path, mode: int) -> None:
        import socket

        self._path = locks / f"mount-{pid_namespace()}-{os.getpid()}.sock"
        self._path.unlink(missing_ok=True)  # a killed process had the same pid
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        with address(self._path) as short:
            self._socket.bind(short)
        give_to_owner(self._path, locks)
        self._path.chmod(mode)
        self._socket.listen(_BACKLOG)

    def fileno(self) -> int:
        """For `select`: readable when gc asks."""
        return self._socket.fileno()

    def accept(self) -> list[socket.socket]:
        """Connections that wait for an answer."""
        waiting = []
        with suppress(BlockingIOError):
            while True:
                waiting.append(self._socket.accept()[0])
        return waiting

    @staticmethod
    def answer(waiting: list[socket.socket], failure: str = "") -> None:
        """Answer that all blobs are open, or why they are not."""
        for asker in waiting:
            with asker, suppress(OSError):  # the asking process may have ended
                asker.send(failure.encode() or _HELD)

    def close(self) -> None:
        """Stop listening."""
        self._socket.close()
        self._path.unlink(missing_ok=True)


class RegisteredMount:
    """A mount as gc knows it: its row in the index, and the socket on which gc asks it. Until `remove`.

    The row exists before the mount answers its first request: gc must know of a pin from that moment on.

    Args:
        parts: of the store.
        mountpoint: the path of the mount.
        prefix: the prefix of names that the mount shows.
        pinned: keep everything under the prefix from gc.

    Attributes:
        listener: the socket; its user closes it.
    """

    def __init__(self, parts: Parts, mountpoint: str, prefix: str, *, pinned: bool) -> None:
        self._parts = parts
        mounts.remove_dead(parts.index)  # may remove the row of a killed daemon on this same mountpoint
        self._registration = parts.relieve(
            lambda: mounts.Registration(parts.index, mountpoint, prefix, pinned=pinned)
        )
        try:
            self.listener = Listener(parts.path / "locks", parts.settings.file_mode)
        except BaseException:
            self.remove()
            raise

    def refresh(self) -> None:
        """Record that the mount is alive. Call it every few minutes."""
        self._registration.refresh()

    def remove(self) -> None:
        """Take the mount off the list."""
        self._parts.relieve(self._registration.remove)


class MountBarrier:
    """Blobs safe to remove: every mount has opened those it still uses.

    Args:
        index: of the store. This thread is in no transaction.
        digests: of the blobs that no entry named when they were chosen.

    Raises:
        StoreError: a mount does not answer, or cannot open all of them.
    """

    def __init__(self, index: Index, digests: list[bytes]) -> None:
        self._unnamed = digests
        self._tail: JournalTail | None = None
        locks = index.path.parent / "locks"
        sockets = [entry.name for entry in os.scandir(locks) if is_socket_of_a_mount(entry.name)]
        if not sockets:
            return
        # Under the lock the journal has no uncommitted records, so its tail shows every later change.
        with index.write() as txn:
            self._tail = JournalTail(index.journal, index.beacon)
            # Mounts do not open a blob that has a name again by now, and it may lose that name before the
            # removal.
            self._unnamed = txn.unnamed(digests)
        try:
            for name in sockets:
                _ask(locks / name)
        except BaseException:
            self.close()
            raise

    def still_unnamed(self) -> list[bytes]:
        """The blobs that are still safe to remove.

        Excludes a blob that was referenced again since the selection, even briefly: a mount may have opened
        it anew. The caller holds the index's write lock.
        """
        if self._tail is None:
            return self._unnamed
        records = self._tail.poll()
        if records is None:
            return []
        named = {record.digest for record in records}
        return [digest for digest in self._unnamed if digest not in named]

    def close(self) -> None:
        """Stop following the journal."""
        if self._tail is not None:
            self._tail.close()


def _is_gone(path: Path) -> bool:
    """Whether the daemon is known to have ended, although its socket still exists."""
    found = _NAME.fullmatch(path.name)
    return found is not None and int(found[1]) == pid_namespace() and not is_running(int(found[2]))


def _ask(path: Path) -> None:
    import socket

    if _is_gone(path):
        # Do not connect: if a thread of the killed daemon still waits in the kernel, the connection is not
        # refused.
        path.unlink(missing_ok=True)
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking, address(path) as short:
        asking.settimeout(ANSWER_SECONDS)
        try:
            asking.connect(short)
            answer = asking.recv(1000)
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)  # the socket of a killed mount
            return
        except (FileNotFoundError, ConnectionResetError):
            return  # the mount has just ended
        except OSError as error:
            raise StoreError(
                f"a mount of this store does not answer ({path}: {error}),"
                " so nothing that it may need can be removed;"
                " end its process, whose id is the second number of that name"
            ) from error
    if answer not in (_HELD, b""):  # empty: the mount ended meanwhile
        raise StoreError(
            "a mount of this store cannot open the blobs that it still uses:"
            f" {answer.decode(errors='replace')}"
        )
