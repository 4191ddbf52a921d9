"""Reads from a disk with bad sectors: bytes that cannot be read count as damage, and do not stop a scan.

For scans, which check all bytes and skip those that fail. A caller that needs all bytes of one object reads
them itself and catches the errors in `AT_FAULT`.
"""

from __future__ import annotations

import errno
import os

#: Errors of a read where the disk is at fault (a bad sector), or the file (it is a folder or a pipe). A
#: process's own problems are not among them: they must not cost an intact object its place.
AT_FAULT = frozenset({errno.EIO, errno.EBADMSG, errno.EUCLEAN, errno.EISDIR, errno.ESPIPE, errno.EINVAL})
# The kernel reads from a disk in units of this many bytes.
_PAGE = 4096


def read_around(fd: int, length: int, offset: int) -> bytes:
    """`os.pread`, with zeros for pages that cannot be read. Returns fewer bytes only at the end of the file.

    Raises:
        OSError: the read failed with an error that is not in `AT_FAULT`.
    """
    data = _read(fd, length, offset)
    if len(data) == length:
        return data
    # The file ends here, or a bad sector follows: a read returns the bytes before it first.
    position, end = offset + len(data), min(offset + length, os.fstat(fd).st_size)
    pages = [data]
    while position < end:
        following = min(end, position - position % _PAGE + _PAGE)
        pages.append(_read(fd, following - position, position).ljust(following - position, b"\0"))
        position = following
    return b"".join(pages)


def _read(fd: int, length: int, offset: int) -> bytes:
    try:
        return os.pread(fd, length, offset)
    except OSError as error:
        if error.errno not in AT_FAULT:
            raise
        return b""
