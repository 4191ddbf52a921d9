"""A small file system in memory, served by a process of its own, for the tests of `castore_fuse.session`.

Run as `python toyfs.py MOUNTPOINT [--pinned] [--many N] [--big BYTES] --ready-fd N`. It takes orders on the
FIFO given with `--orders`, one a line: `point NAME TEXT`, `remove NAME`. It carries out each order before it
reads the next; then the file `ORDERS.done` holds the number of orders done.
"""

from __future__ import annotations

import argparse
import errno
import itertools
import os
import stat
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from castore_fuse.daemon import serve
from castore_fuse.lifecycle import mount_options
from castore_fuse.lowlevel import ROOT, LowLevel
from castore_fuse.session import Session
from castore_fuse.wire import (
    CACHE_DIR,
    KEEP_CACHE,
    NO_FLUSH,
    Attr,
    DirEntryPlus,
    EntryReply,
    OpenReply,
    StatFs,
    pack_direntries,
)

FOREVER = 3600.0
FOLDER_MODE, FILE_MODE = stat.S_IFDIR | 0o555, stat.S_IFREG | 0o444
MTIME = 1_700_000_000_123_456_789


class Node:
    """A file's bytes, or a folder's children by name."""

    def __init__(self, number: int, data: bytes | None) -> None:
        self.number = number
        self.data = data
        self.children: dict[bytes, Node] = {}
        self.listing: list[tuple[bytes, Node]] | None = None
        self.parent = self
        self.references = 0

    def attr(self) -> Attr:
        if self.data is None:
            return Attr(self.number, FOLDER_MODE, 0, MTIME, os.getuid(), os.getgid(), 2)
        return Attr(self.number, FILE_MODE, len(self.data), MTIME, os.getuid(), os.getgid())


class ToyFS(LowLevel):
    """Files in memory. The root's xattrs count opens, open handles, and the kernel's references."""

    def __init__(self, pinned: bool) -> None:
        self.pinned = pinned
        self.numbers = itertools.count(ROOT)
        self.nodes: dict[int, Node] = {}
        self.root = self.folder(None, b"")
        self.opens = 0
        self.handles: set[int] = set()

    def folder(self, parent: Node | None, name: bytes) -> Node:
        return self._add(parent, name, None)

    def file(self, parent: Node, name: bytes, data: bytes) -> Node:
        return self._add(parent, name, data)

    def _add(self, parent: Node | None, name: bytes, data: bytes | None) -> Node:
        node = Node(next(self.numbers), data)
        self.nodes[node.number] = node
        if parent is not None:
            node.parent = parent
            parent.children[name] = node
            parent.listing = None
        return node

    def _entry(self, node: Node) -> EntryReply:
        node.references += 1
        return EntryReply(node.number, node.attr(), FOREVER, FOREVER)

    def lookup(self, parent: int, name: bytes) -> EntryReply:
        if name == b"broken":
            raise RuntimeError("a defect in a handler")
        if name == b"slow":
            sys.stderr.write("a slow look-up\n")
            sys.stderr.flush()
            threading.Event().wait()
        child = self.nodes[parent].children.get(name)
        if child is None:
            raise OSError(errno.ENOENT, "no such name")
        return self._entry(child)

    def forget(self, node: int, count: int) -> None:
        self.nodes[node].references -= count

    def getattr(self, node: int) -> tuple[Attr, float]:
        return self.nodes[node].attr(), FOREVER

    def open(self, node: int, flags: int) -> OpenReply:
        self.opens += 1
        if self.pinned:
            raise OSError(errno.ENOSYS, "pinned")
        handle = self.opens
        self.handles.add(handle)
        return OpenReply(handle, KEEP_CACHE | NO_FLUSH)

    def read(self, node: int, handle: int, size: int, offset: int) -> memoryview | bytes:
        data = self.nodes[node].data
        assert data is not None
        if len(data) <= size:
            return data[offset:]
        return memoryview(data)[offset : offset + size]

    def release(self, node: int, handle: int) -> None:
        self.handles.remove(handle)

    def opendir(self, node: int) -> OpenReply:
        if self.pinned:
            raise OSError(errno.ENOSYS, "pinned")
        return OpenReply(0, KEEP_CACHE | CACHE_DIR)

    def readdir(self, node: int, handle: int, offset: int) -> Iterator[bytes]:
        for name, position, child in self._lines(node, offset):
            mode = FOLDER_MODE if child.data is None else FILE_MODE
            yield from pack_direntries([name], [child.number], mode, position)

    def _lines(self, node: int, offset: int) -> Iterator[tuple[bytes, int, Node]]:
        folder = self.nodes[node]
        if (listing := folder.listing) is None:
            listing = folder.listing = [(b".", folder), (b"..", folder.parent), *folder.children.items()]
        for position in range(offset, len(listing)):
            name, child = listing[position]
            yield name, position + 1, child

    def readdirplus(self, node: int, handle: int, offset: int) -> Iterator[DirEntryPlus]:
        for name, position, child in self._lines(node, offset):
            entry = self._entry(child)
            if name in (b".", b".."):
                self.forget(child.number, 1)
                entry = entry._replace(node=0)
            yield DirEntryPlus(name, position, entry)

    def statfs(self) -> StatFs:
        return StatFs(1000, 250, 77)

    def getxattr(self, node: int, name: bytes) -> bytes:
        if name == b"user.castore.length" and (data := self.nodes[node].data) is not None:
            return b"%d" % len(data)
        if node == ROOT and name == b"user.castore.opens":
            return b"%d" % self.opens
        if node == ROOT and name == b"user.castore.handles":
            return b"%d" % len(self.handles)
        if node == ROOT and name == b"user.castore.references":
            return b"%d" % sum(node.references for node in self.nodes.values() if node is not self.root)
        raise OSError(errno.ENODATA, "no such attribute")

    def listxattr(self, node: int) -> list[bytes]:
        return [b"user.castore.length"] if self.nodes[node].data is not None else []


def pattern(size: int) -> bytes:
    """Bytes that differ from page to page, so that a page in the wrong place shows."""
    return b"".join(b"%015d\n" % n for n in range(size // 16 + 1))[:size]


def take_orders(path: Path, toy: ToyFS, session: Session) -> None:
    done = 0
    while True:
        for line in path.read_text().splitlines():
            order, name, *text = line.split(" ", 2)
            known = toy.root.children.pop(name.encode(), None)
            toy.root.listing = None
            if order == "point":
                toy.file(toy.root, name.encode(), text[0].encode())
            session.invalidate_entry(ROOT, name.encode())
            if known is None or order == "remove":
                session.invalidate_inode(ROOT)
            done += 1
            path.with_suffix(".done").write_text(str(done))


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("mountpoint", type=Path)
    parser.add_argument("--pinned", action="store_true")
    parser.add_argument("--many", type=int, default=0)
    parser.add_argument("--big", type=int, default=0)
    parser.add_argument("--small", type=int, default=0)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--orders", type=Path)
    parser.add_argument("--source", default="castore:toy")
    parser.add_argument("--allow-other", action="store_true")
    parser.add_argument("--ready-fd", type=int)
    parser.add_argument("--lifeline-fd", type=int)
    parser.add_argument("--record", type=Path)
    parser.add_argument("--grace", type=float, help="seconds that open files are served at the end")
    arguments = parser.parse_args()

    def make_session() -> Session:
        toy = ToyFS(arguments.pinned)
        toy.file(toy.root, b"hello.txt", b"hello\n")
        toy.file(toy.root, b"empty", b"")
        toy.file(toy.root, b"pattern", pattern(1_000_003))
        many = toy.folder(toy.root, b"many")
        for n in range(arguments.many):
            toy.file(many, b"shard-%06d.tar" % n, b"x")
        small, data = toy.folder(toy.root, b"small"), pattern(20_000)
        for n in range(arguments.small):
            toy.file(small, b"%06d.bin" % n, data)
        if arguments.big:
            toy.file(toy.root, b"big", pattern(1 << 20) * (arguments.big >> 20))
        options = mount_options(arguments.source, allow_other=arguments.allow_other)
        session = Session(toy, arguments.mountpoint, options, threads=arguments.threads)
        if arguments.grace:
            session.run = partial(session.run, grace=arguments.grace)  # type: ignore[method-assign]
        if arguments.orders:
            threading.Thread(target=take_orders, args=(arguments.orders, toy, session), daemon=True).start()
        return session

    return serve(
        make_session,
        ready_fd=arguments.ready_fd,
        lifeline_fd=arguments.lifeline_fd,
        record_path=arguments.record,
    )


if __name__ == "__main__":
    sys.exit(main())
