"""Locks on bytes of a file that belong to the open file description: they go with whoever held them, however that ends.

Unlike POSIX record locks they survive the closing of another descriptor of the file in the same process; unlike those
of ``flock`` there is one for each byte. Threads that share a descriptor are not kept apart, nor is a forked child that
still has its parent's: until that child ends, too, the lock is held. So a child closes what it inherits.
"""

from __future__ import annotations

import fcntl
import os
import struct
from contextlib import suppress
from pathlib import Path

_FLOCK = struct.Struct("hhqqi4x")  # struct flock: type, whence, start, length, pid


def lock_byte(fd: int, place: int) -> None:
    """Wait for the exclusive lock of the byte at ``place``, which need not exist."""
    fcntl.fcntl(fd, fcntl.F_OFD_SETLKW, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, place, 1, 0))


def unlock_byte(fd: int, place: int) -> None:
    """Let go of it. Closing would not do where a child forked meanwhile has the description too."""
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, place, 1, 0))


def is_locked(fd: int, place: int) -> bool:
    """Whether another open file description holds the lock of the byte at ``place``."""
    asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, place, 1, 0)
    kind: int = _FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_OFD_GETLK, asked))[0]
    return kind != fcntl.F_UNLCK


def close_inherited(path: Path) -> None:
    """Close every descriptor of a file: for a child that was just forked, which has only its parent's."""
    with suppress(FileNotFoundError):  # somebody has removed the store
        wanted = path.stat()
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):  # the descriptor of the listing is closed by now
                if os.path.samestat(os.fstat(int(name)), wanted):
                    os.close(int(name))
