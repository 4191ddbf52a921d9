"""The replies of a file system: plain tuples, and their packing into the bytes that the kernel reads.

The layouts are those of `struct fuse_*_out` in the kernel's `linux/fuse.h` (protocol 7.9 and later). The
layouts are the same on every architecture and for every libfuse 3, unlike `struct stat` and `struct
fuse_file_info`. With them, every kind of reply is sent by one function, `fuse_reply_buf`. Packing an entry
takes 1 µs.

May assume that values are in range: sizes and node ids below 2**64, timeouts not negative. Knows neither
libfuse nor castore.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterable
from typing import NamedTuple

NANOSECONDS = 1_000_000_000
BLOCK_SIZE = 4096
"""`st_blksize`: what the kernel uses itself. Larger makes Python's `open` take larger buffers for no gain."""

KEEP_CACHE = 1 << 1
"""Flag of `OpenReply`: pages of earlier opens of this node are still good."""
CACHE_DIR = 1 << 3
"""Flag of `OpenReply` for folders: the kernel may keep the listing (until the folder is invalidated)."""
NO_FLUSH = 1 << 5
"""Flag of `OpenReply`: close() need not ask (Linux 5.16)."""

_ENTRY = struct.Struct("=QQQQIIQQQqqqIIIIIIIIII")
_ATTR = struct.Struct("=QIIQQQqqqIIIIIIIIII")
_OPEN = struct.Struct("=QIi")
_STATFS = struct.Struct("=QQQQQIIII24x")
_DIRENT = struct.Struct("=QQII")
_DIRENT_PLUS = struct.Struct("=QQQQIIQQQqqqIIIIIIIIIIQQII")
_XATTR_SIZE = struct.Struct("=II")
_PADDING = (b"", *(b"\0" * n for n in range(7, 0, -1)))  # _PADDING[length % 8] fills up to a multiple of 8


class Attr(NamedTuple):
    """The attributes that `stat` shows of a node. All three times are `mtime_ns`."""

    ino: int
    mode: int
    size: int
    mtime_ns: int
    uid: int
    gid: int
    nlink: int = 1


class EntryReply(NamedTuple):
    """A node found under a name. Timeouts are the seconds for which the kernel may cache the answer.

    Node 0 means that there is nothing of that name; the kernel caches that for `entry_timeout`.
    """

    node: int
    attr: Attr
    entry_timeout: float
    attr_timeout: float


class OpenReply(NamedTuple):
    """An open file or folder.

    `fh` is any number that the file system wants back; `flags` are ORed constants.
    """

    fh: int = 0
    flags: int = 0


class DirEntryPlus(NamedTuple):
    """A line of a listing that is a look-up as well. `.` and `..` have node 0, which counts as no look-up.

    `offset` is where a listing that continues after this line starts; never 0.
    """

    name: bytes
    offset: int
    entry: EntryReply


class StatFs(NamedTuple):
    """The figures that `df` shows. Blocks are of `block_size` bytes."""

    blocks: int
    free: int
    files: int
    block_size: int = BLOCK_SIZE
    name_max: int = 255


ABSENT = Attr(0, 0, 0, 0, 0, 0, 0)
"""The attributes of an `EntryReply` with node 0."""


def _attr_fields(attr: Attr) -> tuple[int, ...]:
    ino, mode, size, mtime_ns, uid, gid, nlink = attr
    seconds, fraction = divmod(mtime_ns, NANOSECONDS)
    return (
        ino, size, (size + 511) >> 9, seconds, seconds, seconds, fraction, fraction, fraction,
        mode, nlink, uid, gid, 0, BLOCK_SIZE, 0,
    )  # fmt: skip


def _entry_fields(entry: EntryReply) -> tuple[int, ...]:
    node, attr, entry_timeout, attr_timeout = entry
    entry_seconds, entry_fraction = _timeout(entry_timeout)
    attr_seconds, attr_fraction = _timeout(attr_timeout)
    # The generation is 0: a node id is never used for a second node while the mount lives.
    return (node, 0, entry_seconds, attr_seconds, entry_fraction, attr_fraction, *_attr_fields(attr))


@functools.lru_cache(maxsize=64)
def _timeout(seconds: float) -> tuple[int, int]:
    whole = int(seconds)
    return whole, int((seconds - whole) * NANOSECONDS)


def pack_entry(entry: EntryReply) -> bytes:
    """`struct fuse_entry_out`.

    >>> len(pack_entry(EntryReply(0, ABSENT, 1.5, 0.0)))
    128
    """
    return _ENTRY.pack(*_entry_fields(entry))


def pack_attr(reply: tuple[Attr, float]) -> bytes:
    """`struct fuse_attr_out` of attributes and the seconds for which they hold."""
    attr, timeout = reply
    seconds, fraction = _timeout(timeout)
    return _ATTR.pack(seconds, fraction, 0, *_attr_fields(attr))


def pack_open(reply: OpenReply) -> bytes:
    """`struct fuse_open_out`."""
    return _OPEN.pack(reply.fh, reply.flags, 0)


def pack_statfs(reply: StatFs) -> bytes:
    """`struct fuse_statfs_out`."""
    blocks, free, files, block_size, name_max = reply
    return _STATFS.pack(blocks, free, free, files, 0, block_size, name_max, block_size, 0)


def pack_xattr_size(size: int) -> bytes:
    """`struct fuse_getxattr_out`: the length of a value, for a caller that asks only for the length."""
    return _XATTR_SIZE.pack(size, 0)


def pack_direntries(names: Iterable[bytes], inodes: Iterable[int], mode: int, offset: int) -> list[bytes]:
    """A `struct fuse_dirent` for each name and inode, with its name, padded to 8 bytes; all are of one kind.

    `offset` is where a listing that continues after the first line starts. It is never 0, and grows by one a
    name.

    >>> pack_direntries([b"a.txt"], [7], 0o100644, 3)[0][24:]
    b'a.txt\\x00\\x00\\x00'
    """
    pack, padding, kind = _DIRENT.pack, _PADDING, mode >> 12 & 0o17
    return [
        pack(ino, at, len(name), kind) + name + padding[len(name) & 7]
        for at, (name, ino) in enumerate(zip(names, inodes, strict=False), offset)
    ]


def pack_direntry_plus(entry: DirEntryPlus) -> bytes:
    """`struct fuse_direntplus` with its name, padded to 8 bytes."""
    name, offset, found = entry
    length = len(name)
    kind = found.attr.mode >> 12 & 0o17
    line = _DIRENT_PLUS.pack(*_entry_fields(found), found.attr.ino, offset, length, kind)
    return line + name + _PADDING[length & 7]
