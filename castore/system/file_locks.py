"""Locks on single bytes of a file (open file description locks). The kernel releases a dead holder's locks.

Unlike POSIX record locks, these locks survive the closing of another descriptor of the file in the same
process. Unlike ``flock``, every byte has a lock of its own. Such locks do not exclude threads that share a
descriptor, nor a forked child that inherited it: the lock is held until that child has closed it too. So a
child must close inherited descriptors.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from contextlib import suppress
from pathlib import Path

_FLOCK = struct.Struct("hhqqi4x")  # struct flock: type, whence, start, length, pid


def lock_byte(fd: int, place: int) -> None:
    """Wait for the exclusive lock of the byte at offset ``place``. The byte need not exist."""
    fcntl.fcntl(fd, fcntl.F_OFD_SETLKW, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, place, 1, 0))


def try_lock_byte(fd: int, place: int) -> bool:
    """Take the exclusive lock of the byte at offset ``place``, unless it is held."""
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, place, 1, 0))
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True


def unlock_byte(fd: int, place: int) -> None:
    """Release the lock. Closing the file does not release it if a child forked meanwhile has the file too."""
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, place, 1, 0))


def is_locked(fd: int, place: int) -> bool:
    """Whether another open file description holds the lock of the byte at offset ``place``."""
    query = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, place, 1, 0)
    kind: int = _FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_OFD_GETLK, query))[0]
    return kind != fcntl.F_UNLCK


def close_inherited(path: Path) -> None:
    """Close every descriptor of a file. For a child that was just forked: all of them are its parent's."""
    with suppress(FileNotFoundError):  # the store was removed
        wanted = path.stat()
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):  # the directory listing's own descriptor is closed by now
                if os.path.samestat(os.fstat(int(name)), wanted):
                    os.close(int(name))
