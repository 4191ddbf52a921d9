"""The view as a FUSE file system: requests of the kernel to questions to the view, and nothing more.

Default mode: an open handle holds its blob's bytes, so gc breaks no reader. Pinned mode: gc leaves everything under
the prefix alone, so `open` answers ENOSYS and the kernel never asks again; readers are kept by blob instead.
Either way the kernel keeps pages and names until `follow.Follower` says that a name changed.
"""

from __future__ import annotations

import errno
import itertools
import os
import stat
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator

from castore.errors import CorruptError
from castore.objects.codecs import FRAME_SIZE
from castore.objects.decode import BlobReader
from castore.objects.workers import cores
from castore_fuse.lowlevel import BytesLike, LowLevel
from castore_fuse.nodes import Node, NodeTable
from castore_fuse.view import File, Folder, View
from castore_fuse.wire import (
    KEEP_CACHE,
    NO_FLUSH,
    Attr,
    DirEntry,
    DirEntryPlus,
    EntryReply,
    OpenReply,
    StatFs,
)

#: Seconds for which the kernel need not ask again; what changes earlier is invalidated.
LONG = 3600.0
_BLOCK = 4096
_XATTR = b"user.castore."
_READERS = 256  # kept open by pinned mode


class _Handle:
    """An open file: its reader, and how far a sequential reader has come."""

    __slots__ = ("ahead", "reader")

    def __init__(self, reader: BlobReader | None, ahead: int = 0) -> None:
        self.reader = reader
        self.ahead = Sequence(ahead)


class Sequence:
    """Tells sequential reading from random, and which frames to decode ahead of it.

    Args:
        limit: most frames to be ahead.
    """

    __slots__ = ("_asked", "_limit", "_next", "_window")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._next = self._asked = 0
        self._window = 1

    def after(self, first: int, last: int) -> range:
        """The frames to start decoding now that ``first`` to ``last`` were read; each is given out once."""
        if first > self._next or last < self._next - 1:
            self._next = self._asked = last + 1  # a jump: wait and see
            self._window = 0
            return range(0)
        if last >= self._next:
            self._next = last + 1
            self._window = min(self._window * 2 or 1, self._limit)
        start, stop = max(self._asked, self._next), self._next + self._window
        if stop - start < (self._window + 1) // 2:
            return range(0)  # soon, and several together
        self._asked = stop
        return range(start, stop)


class Operations(LowLevel):
    """One mounted view.

    Args:
        view: what is shown.
        pinned: answer ENOSYS to `open`: the caller has seen to it that gc leaves everything alone.
    """

    def __init__(self, view: View, *, pinned: bool = False) -> None:
        self.view = view
        self.nodes = NodeTable()
        self._pinned = pinned
        self._uid, self._gid = os.getuid(), os.getgid()
        self._handles: dict[int, _Handle] = {}
        self._listings: dict[int, _Listing] = {}
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._kept: OrderedDict[bytes, _Handle] = OrderedDict()
        # What is decoded ahead must still be in the cache when its turn comes, also if several files are read at once.
        self._ahead = min(4 * cores(), view.cache.max_bytes // (4 * FRAME_SIZE))

    # Names

    def lookup(self, parent: int, name: bytes) -> EntryReply:
        folder = self.nodes[parent].item
        try:
            part = name.decode()
        except UnicodeDecodeError as error:
            raise OSError(errno.ENOENT, "names are UTF-8") from error
        item = self.view.lookup(folder.path, part) if isinstance(folder, Folder) else None
        if item is None:
            raise OSError(errno.ENOENT, "no such name")
        return self._reply(self.nodes.refer(parent, part, item))

    def _reply(self, node: Node) -> EntryReply:
        timeout = self._timeout(node.item)
        return EntryReply(node.number, self._attr(node.item), timeout, timeout)

    @staticmethod
    def _timeout(item: File | Folder) -> float:
        if isinstance(item, Folder) or item.expires is None:
            return LONG
        return min(LONG, max(0.0, round(item.expires - time.time(), 1)))

    def _attr(self, item: File | Folder) -> Attr:
        if isinstance(item, Folder):
            mode, size, modified, links = stat.S_IFDIR | 0o555, 0, self.view.since, 2
        else:
            mode, size, modified, links = stat.S_IFREG | 0o444, item.size, item.modified, 1
        # In whole numbers: a product of floats is up to 128 ns off, and loaders compare times for equality.
        nanoseconds = int(modified) * 10**9 + round(modified % 1 * 1e9)
        return Attr(item.inode, mode, size, nanoseconds, self._uid, self._gid, links)

    def forget(self, node: int, count: int) -> None:
        self.nodes.forget(node, count)

    def getattr(self, node: int) -> tuple[Attr, float]:
        item = self.nodes[node].item
        return self._attr(item), self._timeout(item)

    # Files

    def _file(self, node: int) -> File:
        item = self.nodes[node].item
        if isinstance(item, Folder):
            raise IsADirectoryError(errno.EISDIR, "is a folder")
        return item

    def open(self, node: int, flags: int) -> OpenReply:
        if self._pinned:
            raise OSError(errno.ENOSYS, "pinned: no need to open")
        handle = self._open(self._file(node))
        number = next(self._numbers)
        self._handles[number] = handle
        # A node stands for one blob for ever, so what the kernel has of it is good for every handle.
        return OpenReply(number, KEEP_CACHE | NO_FLUSH)

    def _open(self, file: File) -> _Handle:
        if file.content is not None:
            return _Handle(None)
        try:
            return _Handle(self.view.open(file), self._ahead)
        except FileNotFoundError as error:
            raise OSError(self._why_gone(file), "its bytes are gone") from error

    def _why_gone(self, file: File) -> int:
        """The error for a file whose bytes cannot be opened."""
        index = self.view.store.index
        if index.blob(file.digest) is not None:
            return errno.EIO  # known and not readable: damage
        # Re-pointed, and gc took what the name let go of: to ESTALE the kernel looks the name up again, and opens that.
        named = file.name and index.find_digest(file.name) not in (None, file.digest)
        return errno.ESTALE if named else errno.ENOENT

    def release(self, node: int, handle: int) -> None:
        reader = self._handles.pop(handle).reader
        if reader is not None:
            reader.close()

    def read(self, node: int, handle: int, size: int, offset: int) -> BytesLike:
        if handle:
            return self._read(node, self._handles[handle], size, offset)
        kept = self._keep(self._file(node))
        try:
            return self._read(node, kept, size, offset)
        finally:
            if kept.reader is not None:
                kept.reader.unhold()

    def _read(self, node: int, handle: _Handle, size: int, offset: int) -> BytesLike:
        reader = handle.reader
        if reader is None:
            return (self._file(node).content or b"")[offset : offset + size]
        try:
            data = reader.view(offset, size)
        except CorruptError as error:
            self.view.damaged(reader, error)
            self._let_go(handle)
            raise OSError(errno.EIO, str(error)) from error
        if reader.frames > 1 and data:
            last = (offset + len(data) - 1) // FRAME_SIZE
            if ahead := handle.ahead.after(offset // FRAME_SIZE, last):
                reader.prefetch(ahead)
        return data

    def _keep(self, file: File) -> _Handle:
        """A handle for pinned mode, held until the caller's `unhold`; the least recently used ones are closed."""
        with self._lock:
            handle = self._kept.get(file.digest)
            if handle is not None and (handle.reader is None or handle.reader.hold()):
                self._kept.move_to_end(file.digest)
                return handle
        handle = self._open(file)
        if handle.reader is not None:
            handle.reader.hold()
            with self._lock:
                old = self._kept.pop(file.digest, None)
                self._kept[file.digest] = handle
                closing = [old] if old is not None else []
                while len(self._kept) > _READERS:
                    closing.append(self._kept.popitem(last=False)[1])
            for gone in closing:
                if gone.reader is not None:
                    gone.reader.close()
        return handle

    def _let_go(self, handle: _Handle) -> None:
        """Keep a handle of pinned mode no longer: once its bytes are put again, they lie elsewhere."""
        reader = handle.reader
        with self._lock:
            kept = reader is not None and self._kept.get(reader.blob.digest) is handle
            if reader is None or not kept:
                return
            del self._kept[reader.blob.digest]
        reader.close()

    # Folders

    def opendir(self, node: int) -> OpenReply:
        item = self.nodes[node].item
        if not isinstance(item, Folder):
            raise NotADirectoryError(errno.ENOTDIR, "is a file")
        number = next(self._numbers)
        self._listings[number] = _Listing(self.view.listing(item.path))
        return OpenReply(number)

    def releasedir(self, node: int, handle: int) -> None:
        del self._listings[handle]

    def readdir(self, node: int, handle: int, offset: int) -> Iterable[DirEntry]:
        for position, name, found in self._lines(node, handle, offset):
            mode = stat.S_IFDIR if isinstance(found, Folder) else stat.S_IFREG
            yield DirEntry(name.encode(), position, found.inode, mode)

    def readdirplus(self, node: int, handle: int, offset: int) -> Iterable[DirEntryPlus]:
        for position, name, found in self._lines(node, handle, offset):
            if position <= 2:  # `.` and `..` are no lookups
                yield DirEntryPlus(name.encode(), position, EntryReply(0, self._attr(found), 0.0, 0.0))
            else:
                yield DirEntryPlus(name.encode(), position, self._reply(self.nodes.refer(node, name, found)))

    def _lines(self, node: int, handle: int, offset: int) -> Iterator[tuple[int, str, File | Folder]]:
        here = self.nodes[node]
        if offset < 1:
            yield 1, ".", here.item
        if offset < 2:
            yield 2, "..", self.nodes[here.parent].item
        for position, (name, found) in self._listings[handle].since(max(0, offset - 2)):
            yield position + 3, name, found

    # The rest

    def statfs(self) -> StatFs:
        space = self.view.space()
        return StatFs(space.total // _BLOCK, space.free // _BLOCK, space.files)

    def getxattr(self, node: int, name: bytes) -> bytes:
        item = self.nodes[node].item
        if isinstance(item, File) and name.startswith(_XATTR):
            value = self.view.attributes(item).get(name[len(_XATTR) :].decode(errors="replace"))
            if value is not None:
                return value.encode()
        raise OSError(errno.ENODATA, "no such attribute")

    def listxattr(self, node: int) -> Iterable[bytes]:
        item = self.nodes[node].item
        return (
            [_XATTR + name.encode() for name in self.view.attributes(item)] if isinstance(item, File) else []
        )


class _Listing:
    """A folder as it was when it was opened, remembered as far as it was read so that seeking back is exact."""

    def __init__(self, lines: Iterator[tuple[str, File | Folder]]) -> None:
        self._rest = lines
        self._read: list[tuple[str, File | Folder]] = []
        self._lock = threading.Lock()

    def since(self, start: int) -> Iterator[tuple[int, tuple[str, File | Folder]]]:
        """Lines from number ``start`` on, with their numbers."""
        for position in itertools.count(start):
            with self._lock:
                while position >= len(self._read):
                    line = next(self._rest, None)
                    if line is None:
                        return
                    self._read.append(line)
            yield position, self._read[position]
