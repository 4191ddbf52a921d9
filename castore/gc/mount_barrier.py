"""Before bytes go, live mounts take hold of what the kernel may still read.

A mount is not told when a file is opened or closed: that would cost each open two round trips. It learns which names
changed and what the kernel has forgotten, and so which bytes somebody may still have open although no name leads there
any more. Whoever removes bytes asks every mount first; a mount opens what is still needed, and answers. POSIX keeps an
unlinked file for as long as it is open: so what nobody holds is freed at once, and what somebody holds when he lets go.

Each mount listens on a socket in the store's ``locks``. A killed mount's is refused by the kernel, whatever the index says
of it and whichever container it was in. Never asks while the caller holds the index's write lock.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from castore.errors import StoreError
from castore.index.database import Index
from castore.index.journal import JournalTail
from castore.system.temporary import give_to_owner, is_running, pid_namespace

# Imported where it is used: it is a twentieth of what `import castore` takes, and few have mounts.
if TYPE_CHECKING:
    import socket

#: Seconds that a mount may take to answer.
PATIENCE = 30.0
_HELD = b"held"
_NAME = re.compile(r"mount-([0-9]{1,20})-([0-9]{1,20})\.sock", re.ASCII)
_BACKLOG = 128


def is_socket_of_a_mount(name: str) -> bool:
    """Whether a file of ``locks`` is what a mount listens on."""
    return _NAME.fullmatch(name) is not None


@contextmanager
def _address(path: Path) -> Iterator[str]:
    """The socket's address: a path may be longer than the 107 bytes that an address has room for."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


class Listener:
    """A mount's side: where it is asked, until `close`.

    Args:
        locks: the store's folder for it.
        mode: permission bits of the socket.
    """

    def __init__(self, locks: Path, mode: int) -> None:
        import socket

        self._path = locks / f"mount-{pid_namespace()}-{os.getpid()}.sock"
        self._path.unlink(missing_ok=True)  # a killed process had that number
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        with _address(self._path) as address:
            self._socket.bind(address)
        give_to_owner(self._path, locks)
        self._path.chmod(mode)
        self._socket.listen(_BACKLOG)

    def fileno(self) -> int:
        """For `select`: readable when somebody asks."""
        return self._socket.fileno()

    def asked(self) -> list[socket.socket]:
        """Those who wait for an answer."""
        waiting = []
        with suppress(BlockingIOError):
            while True:
                waiting.append(self._socket.accept()[0])
        return waiting

    @staticmethod
    def answer(waiting: list[socket.socket], failure: str = "") -> None:
        """Say that all is held, or why not."""
        for asker in waiting:
            with asker, suppress(OSError):  # who asked may be gone
                asker.send(failure.encode() or _HELD)

    def close(self) -> None:
        """Be asked no more."""
        self._socket.close()
        self._path.unlink(missing_ok=True)


class Clearance:
    """What may be removed, now that every live mount holds what it needs of what had lost its names by then.

    Args:
        index: of the store. This thread is in no transaction.
        digests: of the blobs that nobody named when they were chosen.

    Raises:
        StoreError: a mount does not answer, or cannot hold all of it.
    """

    def __init__(self, index: Index, digests: list[bytes]) -> None:
        self._unnamed = digests
        self._tail: JournalTail | None = None
        locks = index.path.parent / "locks"
        sockets = [entry.name for entry in os.scandir(locks) if is_socket_of_a_mount(entry.name)]
        if not sockets:
            return
        # Under the lock nobody has a record in the journal that is not committed: what changes from here on is seen.
        with index.write() as txn:
            self._tail = JournalTail(index.journal, index.beacon)
            # Of one that has a name again by now mounts hold nothing, though it may lose that before it is removed.
            self._unnamed = txn.unnamed(digests)
        try:
            for name in sockets:
                _ask(locks / name)
        except BaseException:
            self.close()
            raise

    def still_unnamed(self) -> list[bytes]:
        """Those that no name was pointed at since they were chosen: mounts may know others anew, though it be gone again.

        The caller holds the index's write lock.
        """
        if self._tail is None:
            return self._unnamed
        records = self._tail.poll()
        if records is None:
            return []
        named = {record.digest for record in records}
        return [digest for digest in self._unnamed if digest not in named]

    def close(self) -> None:
        """Follow the journal no longer."""
        if self._tail is not None:
            self._tail.close()


def _is_gone(path: Path) -> bool:
    """Whether the daemon is known to have ended, although its socket is still there."""
    found = _NAME.fullmatch(path.name)
    return found is not None and int(found[1]) == pid_namespace() and not is_running(int(found[2]))


def _ask(path: Path) -> None:
    import socket

    if _is_gone(path):
        # Not asked: where a killed daemon leaves a thread behind that waits in the kernel, nobody would refuse.
        path.unlink(missing_ok=True)
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking, _address(path) as address:
        asking.settimeout(PATIENCE)
        try:
            asking.connect(address)
            answer = asking.recv(1000)
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)  # a killed mount's
            return
        except (FileNotFoundError, ConnectionResetError):
            return  # it has just ended
        except OSError as error:
            raise StoreError(
                f"a mount of this store does not answer ({path}: {error}), so nothing that it may need can be removed;"
                f" end it: its process is the second number of that name"
            ) from error
    if answer not in (_HELD, b""):  # it ended while it was asked
        raise StoreError(f"a mount of this store cannot let go of bytes: {answer.decode(errors='replace')}")
