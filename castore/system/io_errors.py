"""Reading from a disk that has given up on some of its sectors: what it cannot give is damage, and no more than that.

For scans, which check all they read and step over what fails. Who reads one thing, and needs all of it, catches the error.
"""

from __future__ import annotations

import errno
import os

#: What a read fails with where the disk is at fault (a sector it gave up on), or what lies there (a folder, a pipe). Not a
#: process's own troubles, which must not cost a good object its place.
AT_FAULT = frozenset({errno.EIO, errno.EBADMSG, errno.EUCLEAN, errno.EISDIR, errno.ESPIPE, errno.EINVAL})
# The kernel reads no less.
_PAGE = 4096


def read_around(fd: int, length: int, offset: int) -> bytes:
    """`os.pread`, with zeros for pages that cannot be read.

    Raises:
        OSError: the disk is not at fault.
    """
    data = _read(fd, length, offset)
    if len(data) == length:
        return data
    # The file ends here, or a bad sector lies ahead: what comes before it is given first.
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
