"""Exchanges what two names stand for, in one step that a crash cannot cut in two."""

from __future__ import annotations

import ctypes
import errno
import os

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
_libc = ctypes.CDLL(None, use_errno=True)
#: Error numbers of a file system, or a kernel, that cannot exchange.
UNSUPPORTED = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)


def exchange(one: str | os.PathLike[str], other: str | os.PathLike[str]) -> None:
    """Exchange two files, links or folders of one file system (renameat2 of Linux).

    Raises:
        FileNotFoundError: one of them is gone.
        OSError: the system refuses; with one of `UNSUPPORTED`, it always will.
    """
    call = getattr(_libc, "renameat2", None)
    if call is not None and not call(
        _AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE
    ):
        return
    error = errno.ENOSYS if call is None else ctypes.get_errno()
    raise OSError(error, os.strerror(error), os.fspath(other))
