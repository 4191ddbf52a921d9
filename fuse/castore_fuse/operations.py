"""The view as a FUSE file system: turns the kernel's requests into queries of the view, and nothing more.

`open` answers ENOSYS, and the kernel never asks again: it opens and closes the files it knows, and reads its
cached pages, without a request. So gc may remove the bytes of an open file, and gc asks first: `hold` then
keeps the bytes that the kernel may still read.
The kernel caches pages and names until `follower.Follower` invalidates them.
"""

from __future__ import annotations

import errno
import itertools
import logging
import math
import os
import stat
import time
from collections.abc import Iterable, Iterator

from castore.errors import CastoreError, CorruptError, RemoteError
from castore.objects.codecs import FRAME_SIZE
from castore_fuse.handles import Handle, Handles
from castore_fuse.kernel_read_ahead import KernelReadAhead
from castore_fuse.listing import Listing
from castore_fuse.lowlevel import BytesLike, LowLevel
from castore_fuse.nodes import Lookups, Node, NodeTable
from castore_fuse.view import File, Folder, Page, View
from castore_fuse.wire import (
    Attr,
    DirEntryPlus,
    EntryReply,
    OpenReply,
    StatFs,
    pack_direntries,
)

log = logging.getLogger("castore.fuse")

#: Seconds for which the kernel may cache an answer; earlier changes are invalidated.
CACHE_SECONDS = 3600.0
_BLOCK = 4096
# Attempts to read bytes that are damaged here and can be had again.
_ATTEMPTS = 3
_XATTR = b"user.castore."
#: Lines of a listing before the first name: `.` and `..`.
_DOTS = 2
#: The attributes of a name whose row is damaged. Its look-up gives the error.
_PLACEHOLDER = Attr(2, stat.S_IFREG, 0, 0, 0, 0)
#: Number of names that a listing returns with attributes at its beginning.
_FIRST_PLUS_LINES = 16


class Operations(LowLevel):
    """One mounted view.

    Args:
        view: the view that is mounted.
    """

    def __init__(self, view: View) -> None:
        self.view = view
        self.nodes = NodeTable()
        self.lookups = Lookups()
        self.handles = Handles(view)
        #: Follows the readers; None until the view is mounted.
        self.kernel_read_ahead: KernelReadAhead | None = None
        self._uid, self._gid = os.getuid(), os.getgid()
        self._listings: dict[int, Listing] = {}
        self._numbers = itertools.count(1)

    # Names

    def lookup(self, parent: int, name: bytes) -> EntryReply:
        folder = self.nodes[parent].item
        try:
            part = name.decode()
        except UnicodeDecodeError as error:
            raise OSError(errno.ENOENT, "names are UTF-8") from error
        self.lookups.begin()
        try:
            item = self.view.lookup(folder.path, part) if isinstance(folder, Folder) else None
            if item is None:
                raise OSError(errno.ENOENT, "no such name")
            node = self.nodes.refer(parent, part, item)
        except CorruptError as error:
            log.warning("%s", error)
            raise OSError(errno.EIO, str(error)) from error
        except CastoreError as error:
            raise _unread(error) from error
        finally:
            self.lookups.end()
        if isinstance(item, File):
            if not item.name:
                self.hold(node)  # no change of a name reports that these bytes go
            elif node.read:
                # The kernel has the file's pages and asks once an hour, so this request shows gc that the
                # file is in use.
                self.view.count_use(item)
        return self._reply(node)

    def _reply(self, node: Node) -> EntryReply:
        timeout = self._timeout(node.item)
        return EntryReply(node.number, self._attr(node.item), timeout, timeout)

    @staticmethod
    def _timeout(item: File | Folder) -> float:
        if isinstance(item, Folder) or item.expires is None:
            return CACHE_SECONDS
        return min(CACHE_SECONDS, max(0.0, round(item.expires - time.time(), 1)))

    def _attr(self, item: File | Folder) -> Attr:
        if isinstance(item, Folder):
            mode, size, modified, links = stat.S_IFDIR | 0o555, 0, self.view.since, 2
        else:
            mode, size, modified, links = stat.S_IFREG | 0o444, item.size, item.modified, 1
        # In integers: a product of floats is up to 128 ns off, and loaders compare times for equality.
        nanoseconds = math.floor(modified) * 10**9 + round(modified % 1 * 1e9)
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
        raise OSError(errno.ENOSYS, "no need to open: from now on the kernel does not ask")

    def read(self, node: int, handle: int, size: int, offset: int) -> BytesLike:
        known = self.nodes[node]
        file = known.item
        if isinstance(file, Folder):
            raise IsADirectoryError(errno.EISDIR, "is a folder")
        if file.content is not None:
            return file.content[offset : offset + size]
        known.read = True
        held = known.held
        if held is None and offset == 0 and file.size <= size:
            # The kernel caches the whole file with this read, so no second read comes.
            try:
                small = self.view.read_small(file)
            except CastoreError as error:
                raise _unread(error) from error
            if small is not None:
                self.view.count_use(file)
                return small
        for _ in range(_ATTEMPTS):
            opened = held if held is not None and held.reader.hold() else self._borrow(file)
            try:
                data = self._read(known, opened, size, offset)
            finally:
                opened.reader.unhold()
            if data is not None:
                return data
        raise OSError(errno.EIO, "its bytes are damaged each time that they are fetched")

    def _borrow(self, file: File) -> Handle:
        try:
            return self.handles.borrow(file)
        except FileNotFoundError as error:
            code = errno.EIO if self.view.is_known(file) else errno.ENOENT
            raise OSError(code, "its bytes are gone") from error
        except CastoreError as error:
            raise _unread(error) from error

    def _read(self, node: Node, opened: Handle, size: int, offset: int) -> BytesLike | None:
        """The bytes; None if they are damaged, and can be had again."""
        reader = opened.reader
        try:
            data = reader.view(offset, size)
        except RemoteError as error:
            raise _unread(error) from error
        except CorruptError as error:
            can_be_had = self.view.quarantine(reader, error)
            # Bytes that are put again lie in another object.
            self.handles.forget(opened)
            if node.held is opened:
                self.nodes.close_handle(node)
            if can_be_had:
                return None
            raise OSError(errno.EIO, str(error)) from error
        if reader.frames > 1 and data:
            end = offset + len(data)
            if self.kernel_read_ahead is not None:
                self.kernel_read_ahead.note(opened.end, offset, end)
            opened.end = end
            last = (end - 1) // FRAME_SIZE
            if read_ahead := opened.read_ahead.next_frames(offset // FRAME_SIZE, last):
                reader.prefetch(read_ahead)
        return data

    def hold(self, node: Node) -> None:
        """Keep a file's bytes, if they are still there, until the kernel forgets the node.

        Raises:
            OSError: the bytes cannot be opened, for example because too many files are open.
        """
        file = node.item
        if isinstance(file, Folder) or file.content is not None or node.held is not None:
            return
        try:
            handle = self.handles.open(file)
        except (FileNotFoundError, CorruptError):  # the read gives the error
            return
        if not self.nodes.hold(node, handle):
            handle.close()

    # Folders

    def opendir(self, node: int) -> OpenReply:
        item = self.nodes[node].item
        if not isinstance(item, Folder):
            raise NotADirectoryError(errno.ENOTDIR, "is a file")
        number = next(self._numbers)
        self._listings[number] = self._new_listing(item)
        return OpenReply(number)

    def _new_listing(self, folder: Folder) -> Listing:
        return Listing(self._pages(folder), self.lookups, _DOTS)

    def _listing(self, node: int, handle: int, offset: int) -> Listing:
        """The listing of an open folder; a new one for a program that begins again behind a change."""
        listing, item = self._listings[handle], self.nodes[node].item
        if not offset and isinstance(item, Folder) and listing.is_outdated():
            listing = self._listings[handle] = self._new_listing(item)
        return listing

    def _pages(self, folder: Folder) -> Iterator[Page]:
        try:
            yield from self.view.pages(folder.path)
        except CastoreError as error:
            raise _unread(error) from error

    def releasedir(self, node: int, handle: int) -> None:
        del self._listings[handle]

    def readdir(self, node: int, handle: int, offset: int) -> Iterable[bytes]:
        dots = [
            line
            for at, name, item in self._dots(node, offset)
            for line in pack_direntries([name], [item.inode], stat.S_IFDIR, at)
        ]
        return itertools.chain(dots, self._listing(node, handle, offset).packed(max(0, offset - _DOTS)))

    def readdirplus(self, node: int, handle: int, offset: int) -> Iterable[DirEntryPlus]:
        refer, reply, lookups = self.nodes.refer, self._reply, self.lookups
        for at, name, item in self._dots(node, offset):
            yield DirEntryPlus(name, at, EntryReply(0, self._attr(item), 0.0, 0.0))
        lines = self._listing(node, handle, offset).lines(max(0, offset - _DOTS))
        lookups.begin()
        try:
            now = lookups.age
            # The kernel always begins with a request for attributes. A program that reads the attributes gets
            # more of them. `find` reads none, so it gets the other names without attributes.
            for at, age, part, found in lines if offset else itertools.islice(lines, _FIRST_PLUS_LINES):
                if isinstance(found, File) and not found.is_sound:
                    yield DirEntryPlus(part.encode(), at, EntryReply(0, _PLACEHOLDER, 0.0, 0.0))
                elif age == now:
                    yield DirEntryPlus(part.encode(), at, reply(refer(node, part, found)))
                else:  # a page read before a change must not count as a look-up
                    yield DirEntryPlus(part.encode(), at, EntryReply(0, self._attr(found), 0.0, 0.0))
        finally:
            lookups.end()

    def _dots(self, node: int, offset: int) -> list[tuple[int, bytes, File | Folder]]:
        """`.` and `..`, as far as they lie behind the offset, each with the offset of the next line."""
        here = self.nodes[node]
        dots = [(1, b".", here.item), (2, b"..", self.nodes[here.parent].item)]
        return dots[offset:]

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


def _unread(error: CastoreError) -> OSError:
    """The answer to a request whose bytes do not come. The log says why, once a minute for each error."""
    log.error("%s", error)
    return OSError(errno.EIO, str(error))
