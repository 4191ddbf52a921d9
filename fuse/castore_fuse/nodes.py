"""The kernel's references: node numbers, and the file or folder of each.

A file's node stands for a name and one blob. When the name points to another blob, the next look-up makes
another node, and the old node is *outdated*: it lives until the kernel forgets it, for processes that have
the file open. Knows no store and no libfuse.
"""

from __future__ import annotations

import math
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

from castore_fuse.handles import Handle
from castore_fuse.lowlevel import ROOT
from castore_fuse.view import File, Folder

# Digest, size, modified, expires (NaN: never).
_DIGEST_BYTES = 32
_FACTS = struct.Struct(f"={_DIGEST_BYTES}sqdd")


class Node:
    """One node: its number, its folder, its file or folder, and its number of references.

    The kernel may know millions of files, so a file's node keeps only the facts that the nodes above do not
    give.

    Attributes:
        above: the folder's node.
        inside: the children of a folder's node; None for files.
        held: an open handle that keeps the file's bytes when no name points to them; closed when the kernel
            forgets the node.
        read: whether the file was read through this node.
    """

    __slots__ = ("_packed", "above", "held", "inside", "number", "part", "read", "references")

    def __init__(self, number: int, above: Node | None, part: str, item: File | Folder) -> None:
        self.number = number
        self.above = above or self
        self.part = part
        self.inside = _Children() if isinstance(item, Folder) else None
        self.references = 0
        self.held: Handle | None = None
        self.read = False
        self.item = item

    @property
    def parent(self) -> int:
        """The folder's number."""
        return self.above.number

    @property
    def item(self) -> File | Folder:
        """The file or folder that the node stands for."""
        packed = self._packed
        if not isinstance(packed, bytes):
            return packed
        digest, size, modified, expires = _FACTS.unpack(packed)
        name = _inside(self.above).base + self.part
        return File(name, digest, size, modified, None if math.isnan(expires) else expires)

    @item.setter
    def item(self, item: File | Folder) -> None:
        self._packed: bytes | File | Folder = item
        if isinstance(item, File) and item.content is None and item.name.endswith(self.part):
            inside, base = _inside(self.above), item.name[: len(item.name) - len(self.part)]
            inside.base = inside.base or base
            # The values of a damaged row may not fit the struct; the item is then kept as it is.
            with suppress(struct.error, TypeError):
                if inside.base == base and len(item.digest) == _DIGEST_BYTES:
                    expires = math.nan if item.expires is None else item.expires
                    self._packed = _FACTS.pack(item.digest, item.size, item.modified, expires)


class _Children:
    """The children of a folder: nodes by their part of the name, and the common beginning of all names."""

    __slots__ = ("base", "children")

    def __init__(self) -> None:
        self.base = ""
        self.children: dict[str, Node] = {}


def _inside(folder: Node) -> _Children:
    assert folder.inside is not None, "only folders have anything inside"
    return folder.inside


class NodeTable:
    """All nodes. Thread-safe; each call holds the one lock only for dictionary work."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last = ROOT
        self._root = Node(ROOT, None, "", Folder(""))
        self._root.references = 1
        self._nodes = {ROOT: self._root}
        self._outdated: dict[int, Node] = {}
        self._nameless: dict[int, Node] = {}

    def __len__(self) -> int:
        return len(self._nodes)

    def __getitem__(self, number: int) -> Node:
        return self._nodes[number]

    def refer(self, parent: int, part: str, item: File | Folder) -> Node:
        """The node of ``item`` under ``parent``, with one more reference."""
        with self._lock:
            folder = self._nodes[parent]
            children = _inside(folder).children
            node = children.get(part)
            if node is None or not _same(node.item, item):
                if node is not None:
                    self._outdated[node.number] = node
                self._last += 1
                node = self._nodes[self._last] = children[part] = Node(self._last, folder, part, item)
                if isinstance(item, File) and not item.name:
                    self._nameless[self._last] = node
            else:
                node.item = item  # the expiry may have moved
            node.references += 1
            return node

    def forget(self, number: int, count: int) -> None:
        """Take back references; the last one removes the node and closes the handle it holds."""
        with self._lock:
            node = self._nodes.get(number)
            if node is None or number == ROOT:
                return
            node.references -= count
            if node.references > 0:
                return
            del self._nodes[number]
            self._outdated.pop(number, None)
            self._nameless.pop(number, None)
            self._unlink_child(node)
            held, node.held = node.held, None
        if held is not None:
            held.close()

    def outdate(self, node: Node) -> None:
        """Mark a node whose name points to other bytes, or is gone: the next look-up makes another node."""
        with self._lock:
            if node.number in self._nodes:
                self._outdated[node.number] = node
                self._unlink_child(node)

    @staticmethod
    def _unlink_child(node: Node) -> None:
        children = _inside(node.above).children
        if children.get(node.part) is node:
            del children[node.part]

    def outdated(self) -> list[Node]:
        """The nodes whose names point elsewhere by now. Processes may have them open."""
        with self._lock:
            return list(self._outdated.values())

    def nameless(self) -> list[Node]:
        """The nodes of files that were looked up by digest."""
        with self._lock:
            return list(self._nameless.values())

    def hold(self, node: Node, handle: Handle) -> bool:
        """Let a node hold its bytes. False if the kernel has just forgotten it, or it holds them already."""
        with self._lock:
            if node.number not in self._nodes or node.held is not None:
                return False
            node.held = handle
            return True

    def close_handle(self, node: Node) -> None:
        """Close the handle that a node holds."""
        with self._lock:
            held, node.held = node.held, None
        if held is not None:
            held.close()

    def find(self, path: str) -> list[Node]:
        """The nodes along a path below the root, as far as the kernel knows them, without the root."""
        found: list[Node] = []
        inside = self._root.inside
        with self._lock:
            for part in path.split("/"):
                node = inside.children.get(part) if inside is not None else None
                if node is None:
                    break
                found.append(node)
                inside = node.inside
        return found

    def all(self) -> Iterator[Node]:
        """Every node but the root, at this moment."""
        with self._lock:
            nodes = list(self._nodes.values())
        return (node for node in nodes if node.number != ROOT)


def _same(old: File | Folder, new: File | Folder) -> bool:
    if isinstance(old, File) and isinstance(new, File):
        # The time counts too: a name that went to another blob and came back has a new modification time.
        return old[:4] == new[:4]
    return old == new


class Lookups:
    """Look-ups under way, whose answers may come from an index older than a change.

    A thread that reads the index for a node calls `begin` before the query and `end` after the node is in the
    table. So after `settle`, the table has every node that was made from an older answer.
    """

    def __init__(self) -> None:
        self._running: set[int] = set()
        #: Number of calls of `settle`: a page read at an earlier age may be out of date.
        self.age = 0

    def begin(self) -> None:
        """This thread is about to read the index."""
        self._running.add(threading.get_ident())

    def end(self) -> None:
        """The node that this thread made is in the table."""
        self._running.discard(threading.get_ident())

    def settle(self, timeout: float = 10.0) -> bool:
        """Wait for the look-ups that are under way. False if one takes longer than ``timeout`` seconds."""
        # The set is copied at once, under the GIL. A thread that begins its next look-up meanwhile is waited
        # for as well, which does no harm.
        self.age += 1
        before = set(self._running)
        deadline = time.monotonic() + timeout
        while before := before & self._running:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.0005)
        return True
