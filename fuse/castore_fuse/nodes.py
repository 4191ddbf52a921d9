"""The kernel's references to what it has looked up: node numbers, and what they stand for.

A node of a file stands for a name and one blob. Looking up a name that points elsewhere by now makes another node; the
old one lives on for the handles that are open, until the kernel forgets it. Knows no store and no libfuse.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

from castore_fuse.lowlevel import ROOT
from castore_fuse.view import File, Folder


class Node:
    """One thing the kernel knows: a number, where it hangs, what it is, and how often it was handed out."""

    __slots__ = ("item", "number", "parent", "part", "references")

    def __init__(self, number: int, parent: int, part: str, item: File | Folder) -> None:
        self.number = number
        self.parent = parent
        self.part = part
        self.item = item
        self.references = 0


class NodeTable:
    """All nodes. Thread-safe; each call holds the one lock only for dictionary work."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last = ROOT
        root = Node(ROOT, ROOT, "", Folder(""))
        root.references = 1
        self._nodes = {ROOT: root}
        self._children: dict[tuple[int, str], Node] = {}

    def __len__(self) -> int:
        return len(self._nodes)

    def __getitem__(self, number: int) -> Node:
        return self._nodes[number]

    def refer(self, parent: int, part: str, item: File | Folder) -> Node:
        """The node of ``item`` under ``parent``, with one more reference."""
        key = (parent, part)
        with self._lock:
            node = self._children.get(key)
            if node is None or not _same(node.item, item):
                self._last += 1
                node = self._nodes[self._last] = self._children[key] = Node(self._last, parent, part, item)
            else:
                node.item = item  # the expiry may have moved
            node.references += 1
            return node

    def forget(self, number: int, count: int) -> None:
        """Take back references; the last one removes the node."""
        with self._lock:
            node = self._nodes.get(number)
            if node is None or number == ROOT:
                return
            node.references -= count
            if node.references <= 0:
                del self._nodes[number]
                if self._children.get((node.parent, node.part)) is node:
                    del self._children[node.parent, node.part]

    def find(self, path: str) -> list[Node]:
        """The nodes along a path below the root, as far as the kernel knows them; the root not included."""
        found: list[Node] = []
        parent = ROOT
        with self._lock:
            for part in path.split("/"):
                node = self._children.get((parent, part))
                if node is None:
                    break
                found.append(node)
                parent = node.number
        return found

    def all(self) -> Iterator[Node]:
        """Every node but the root, as of now."""
        with self._lock:
            nodes = list(self._nodes.values())
        return (node for node in nodes if node.number != ROOT)


def _same(old: File | Folder, new: File | Folder) -> bool:
    if isinstance(old, File) and isinstance(new, File):
        # The time too: a name that went to another blob and came back has a new modification time to show.
        return old[:4] == new[:4]
    return old == new
