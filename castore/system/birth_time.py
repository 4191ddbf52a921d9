"""The birth time of a file, which Python's `os.stat` does not tell on Linux."""

from __future__ import annotations

import ctypes
import errno
import os
import struct

_AT_FDCWD, _STATX_BTIME = -100, 0x800
_SIZE, _MASK_AT, _BORN_AT = 256, 0, 80
_libc = ctypes.CDLL(None, use_errno=True)


def birth_time(path: str) -> int | None:
    """When a file was made, in ns. None if its file system, the kernel or the C library does not tell.

    Raises:
        OSError: there is no such file.
    """
    statx = getattr(_libc, "statx", None)
    if statx is None:
        return None
    found = ctypes.create_string_buffer(_SIZE)
    if statx(_AT_FDCWD, os.fsencode(path), 0, _STATX_BTIME, found):
        error = ctypes.get_errno()
        if error in (errno.ENOSYS, errno.EPERM):  # an old kernel, or a sandbox that knows no such call
            return None
        raise OSError(error, os.strerror(error), path)
    (mask,) = struct.unpack_from("=I", found, _MASK_AT)
    seconds, fraction = struct.unpack_from("=qI", found, _BORN_AT)
    return seconds * 1_000_000_000 + fraction if mask & _STATX_BTIME else None
