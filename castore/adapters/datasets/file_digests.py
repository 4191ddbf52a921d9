"""Digests of files, and other short texts, remembered in the store for as long as a file does not change.

A file counts as unchanged while its path, device, inode, size and times are as they were. Assumes that nobody
changes a file in place and turns its clock back. Must never change a file.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

from castore.errors import UnhashableError
from castore.keys.encoder import key
from castore.objects.encode import hash_file
from castore.store import Store

#: The store's folder of remembered digests and texts.
DIGESTS_FOLDER = ".datasets/files"
# Hashing a smaller file again costs no more than asking the store.
_REMEMBERED_SIZE = 4 * 1024 * 1024
_REMEMBERED_SECONDS = 30 * 86400.0


def file_digest(path: str, store: Store | None, *, without: bytes = b"") -> str:
    """BLAKE3 of a file, in hexadecimal digits. The store remembers the digests of large unchanged files.

    Args:
        path: the file's path.
        store: remembers the digest; None remembers nothing.
        without: bytes that do not count at the file's end, if they are there.

    Raises:
        UnhashableError: the file is gone, or cannot be read.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise UnhashableError(
            f"{path} cannot be hashed: {error.strerror}; make the file readable, or, if it is gone, load the "
            "dataset again"
        ) from error
    try:
        status = os.fstat(fd)
        size = _size_without_end(fd, status.st_size, without)
        if store is None or size < _REMEMBERED_SIZE:
            return _hash_fd(fd, size)
        identity = [
            os.path.realpath(path),
            status.st_dev,
            status.st_ino,
            size,
            status.st_mtime_ns,
            status.st_ctime_ns,
        ]
        return remembered(store, identity, partial(_hash_fd, fd, size))
    finally:
        os.close(fd)


def _size_without_end(fd: int, size: int, end: bytes) -> int:
    before = size - len(end)
    return before if end and before >= 0 and os.pread(fd, len(end), before) == end else size


def _hash_fd(fd: int, size: int) -> str:
    return hash_file(fd, size)[0].hex()


def remembered(store: Store, identity: list[Any], compute: Callable[[], str]) -> str:
    """A short text about files, computed by ``compute`` unless the store remembers it.

    Args:
        store: remembers the text.
        identity: what the text depends on, in the form of `castore.key`.
        compute: returns the text.
    """
    name = f"{DIGESTS_FOLDER}/{key(identity)}"
    known = store.get(name)
    if known is not None:
        return known.decode()
    text = compute()
    store.put(name, text.encode(), ttl=_REMEMBERED_SECONDS)
    return text
