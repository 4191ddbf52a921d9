"""What a read-only file system must answer, in plain Python types: the seam between a view and `session`.

Nodes are numbers that the file system gives out in its `EntryReply`s; node 1 is the root. A node stays valid until
`forget` has taken back as many references as `lookup` and `readdirplus` have given out.
Every method may be called from several threads at once. Errors are `OSError`s and reach the caller with their
`errno`; any other exception is logged and becomes EIO.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable

from castore_fuse.wire import Attr, DirEntryPlus, EntryReply, OpenReply, StatFs

ROOT = 1
"""The node of the mountpoint itself. It is never forgotten."""

BytesLike = bytes | bytearray | memoryview


class LowLevel:
    """A read-only file system. Override what it has; the rest answers as an empty one would."""

    def lookup(self, parent: int, name: bytes) -> EntryReply:
        """Find `name` in the folder `parent`, and count one more reference to the node that is returned.

        ENOENT is not remembered by the kernel; an `EntryReply` with node 0 is, for its `entry_timeout`.
        """
        raise OSError(errno.ENOENT, "no such name")

    def forget(self, node: int, count: int) -> None:
        """Take back `count` references to `node`."""

    def getattr(self, node: int) -> tuple[Attr, float]:
        """The attributes of `node`, and for how many seconds they hold."""
        raise NotImplementedError

    def open(self, node: int, flags: int) -> OpenReply:
        """Open a file. ENOSYS says "never ask again": from then on `read` gets the handle 0 and `release` is not called."""
        raise NotImplementedError

    def read(self, node: int, handle: int, size: int, offset: int) -> BytesLike:
        """Up to `size` bytes from `offset`; fewer only at the end of the file. Sent from where they lie, not copied."""
        raise NotImplementedError

    def release(self, node: int, handle: int) -> None:
        """The last descriptor or mapping of an opened handle is gone."""

    def opendir(self, node: int) -> OpenReply:
        """Open a folder. ENOSYS as for `open`; the kernel then keeps listings until the folder is invalidated."""
        return OpenReply()

    def readdir(self, node: int, handle: int, offset: int) -> Iterable[bytes]:
        """The lines of a listing from `offset` on (0: from the start), `.` and `..` among them, as `wire.pack_direntries`.

        The caller stops when its buffer is full and comes back with the `offset` of the last line it took.
        """
        raise NotImplementedError

    def readdirplus(self, node: int, handle: int, offset: int) -> Iterable[DirEntryPlus]:
        """The same lines, not packed yet, but each counts one reference at the moment it is yielded.

        The line that no longer fits is given back through `forget`.
        """
        raise NotImplementedError

    def releasedir(self, node: int, handle: int) -> None:
        """An opened folder is closed."""

    def statfs(self) -> StatFs:
        """What `df` shows."""
        return StatFs(0, 0, 0)

    def getxattr(self, node: int, name: bytes) -> bytes:
        """The value of an extended attribute; ENODATA when there is none of that name. Asked for `user.` names only."""
        raise OSError(errno.ENODATA, "no such attribute")

    def listxattr(self, node: int) -> Iterable[bytes]:
        """The names of all extended attributes."""
        return ()
