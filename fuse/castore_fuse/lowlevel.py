"""The operations of a read-only file system, in plain Python types: the seam between a view and `session`.

Nodes are numbers that the file system gives out in its `EntryReply`s; node 1 is the root. A node stays valid
until `forget` has taken back as many references as `lookup` and `readdirplus` have given out.
Every method may be called from several threads at once. An `OSError` reaches the caller as its `errno`. Any
other exception is logged and becomes EIO.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable

from castore_fuse.wire import Attr, DirEntryPlus, EntryReply, OpenReply, StatFs

ROOT = 1
"""The node of the mountpoint itself. It is never forgotten."""

BytesLike = bytes | bytearray | memoryview


class LowLevel:
    """A read-only file system. Methods that are not overridden answer as an empty file system would."""

    def lookup(self, parent: int, name: bytes) -> EntryReply:
        """Find `name` in the folder `parent`, and count one more reference to the returned node.

        The kernel does not cache ENOENT. It caches an `EntryReply` with node 0 for its `entry_timeout`.
        """
        raise OSError(errno.ENOENT, "no such name")

    def forget(self, node: int, count: int) -> None:
        """Take back `count` references to `node`."""

    def getattr(self, node: int) -> tuple[Attr, float]:
        """The attributes of `node`, and the seconds for which they hold."""
        raise NotImplementedError

    def open(self, node: int, flags: int) -> OpenReply:
        """Open a file.

        After ENOSYS the kernel opens files without asking: `read` gets the handle 0, and `release` is not
        called.
        """
        raise NotImplementedError

    def read(self, node: int, handle: int, size: int, offset: int) -> BytesLike:
        """Up to `size` bytes from `offset`; fewer only at the end of the file. They are not copied."""
        raise NotImplementedError

    def release(self, node: int, handle: int) -> None:
        """The last descriptor or mapping of an open handle is gone."""

    def opendir(self, node: int) -> OpenReply:
        """Open a folder.

        After ENOSYS the kernel opens folders without asking, and keeps listings until they are invalidated.
        """
        return OpenReply()

    def readdir(self, node: int, handle: int, offset: int) -> Iterable[bytes]:
        """The lines of a listing from `offset` on (0: from the start), as `wire.pack_direntries` packs them.

        `.` and `..` are among them. The caller stops when its buffer is full and continues with the `offset`
        of the last line it took.
        """
        raise NotImplementedError

    def readdirplus(self, node: int, handle: int, offset: int) -> Iterable[DirEntryPlus]:
        """The same lines, not packed yet. Each line counts one reference at the moment it is yielded.

        The line that no longer fits is given back through `forget`.
        """
        raise NotImplementedError

    def releasedir(self, node: int, handle: int) -> None:
        """An open folder is closed."""

    def statfs(self) -> StatFs:
        """The figures that `df` shows."""
        return StatFs(0, 0, 0)

    def getxattr(self, node: int, name: bytes) -> bytes:
        """The value of an extended attribute; ENODATA if there is none. Called for `user.` names only."""
        raise OSError(errno.ENODATA, "no such attribute")

    def listxattr(self, node: int) -> Iterable[bytes]:
        """The names of all extended attributes."""
        return ()
