"""Detects whether anybody is writing to a file, with a read lease.

The kernel grants a read lease (fcntl(2), F_SETLEASE with F_RDLCK) only while nobody has the file open for
writing; a shared writable mapping counts as open. While the lease is held, an open(2) for writing blocks, and
the kernel sends us a signal. So this module releases a lease at once, or holds it for the few system calls of
a swap, never during a read.
"""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress


class FileBusyError(Exception):
    """Somebody writes to the file, or it changed: scan it again later. Never leaves this package."""


class NoLeaseError(Exception):
    """This file system or this user gets no lease, so a writer of the file cannot be detected."""


class Snapshot:
    """A file as it is now, open for reading.

    Args:
        path: of a regular file; a link is refused.

    Raises:
        BusyError: the path is gone, or is no longer a regular file.
        OSError: it cannot be opened.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                raise FileBusyError(path) from error
            raise
        self.status = os.fstat(self.fd)

    def __enter__(self) -> Snapshot:
        return self

    def __exit__(self, *exc: object) -> None:
        os.close(self.fd)

    @property
    def is_regular(self) -> bool:
        """Whether it is a file of bytes, and no socket or device."""
        return stat.S_ISREG(self.status.st_mode)

    def check(self) -> None:
        """Raise `FileBusyError` if the file was changed or replaced since, or is being written."""
        try:
            there = os.lstat(self.path)
        except OSError as error:
            raise FileBusyError(self.path) from error
        now = os.fstat(self.fd)
        # Tools can set a size and an mtime again, but no ctime.
        if now.st_ctime_ns != self.status.st_ctime_ns or not is_same(there, self.status):
            raise FileBusyError(self.path)
        # Without leases, it must do that the file is unchanged since the settling time began.
        with suppress(NoLeaseError), lease(self.fd):
            pass


def is_same(one: os.stat_result, other: os.stat_result) -> bool:
    """Whether two stats show the same file with the same content and permissions: `restore` sets both."""
    return _identity(one) == _identity(other)


def _identity(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_mode, status.st_size, status.st_mtime_ns


@contextmanager
def lease(fd: int) -> Iterator[None]:
    """Hold a read lease on a file, open for reading only, for some system calls.

    Raises:
        BusyError: it is open for writing.
        NoLeaseError: there are no leases here.
    """
    try:
        # By default the kernel signals a blocked open with SIGIO, which ends the process. SIGURG is ignored.
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES) and not _refused(fd):
            raise FileBusyError(str(fd)) from error
        raise NoLeaseError(error.strerror) from error
    try:
        yield
    finally:
        with suppress(OSError):  # the kernel breaks a lease by force after 45 seconds
            fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)


def _refused(fd: int) -> bool:
    """Whether the kernel refuses leases to this user: on files of others they need CAP_LEASE."""
    return os.geteuid() not in (0, os.fstat(fd).st_uid)


def is_writer_waiting(fd: int) -> bool:
    """Whether somebody waits to open a leased file for writing."""
    return fcntl.fcntl(fd, fcntl.F_GETLEASE) != fcntl.F_RDLCK
