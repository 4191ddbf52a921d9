"""Compares the names of a store with those of a commit, and with the state that both began with.

Where only one side has changed a name since then, that side is right. Where both have, it is a conflict, and
nothing decides it silently.

The state that both began with is a tree of this store's own, the *base*: names as they were when the store
and the ref last agreed on them. The base is not simply the last commit seen: a push may leave names in the
ref that others changed and that this store has not pulled.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterable, Iterator, Sequence
from enum import Enum, auto
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

from castore.records import Entry, is_file_record, parse_metadata
from castore.remote.page_cache import PageCache
from castore.remote.pages import Row
from castore.remote.tree import KeepPage, ReadPage, Tree, build, edit
from castore.write.arguments import dump_metadata

# Keys of the record of a file that was copied: `castore add` writes the first four, and `castore watch
# --replace` adds those of its link.
_OF_FILE = frozenset(("path", "size", "mtime_ns", "through", "link", "prefix", "pinned"))
#: Digest, serializer and metadata.
Content = tuple[bytes, str, str | None]


class Difference(Enum):
    """Which side has changed a name."""

    NONE = auto()
    OURS = auto()
    THEIRS = auto()
    BOTH = auto()


class Compared(NamedTuple):
    """A name on the sides that have it.

    Attributes:
        name: in the store.
        ours: its entry in the store.
        theirs: its row in the commit.
        base: its row in the state that both began with.
    """

    name: str
    ours: Entry | None
    theirs: Row | None
    base: Row | None

    @property
    def difference(self) -> Difference:
        """Which side has changed the name since ``base``.

        Bytes, serializer and metadata count. The record of the file that was copied does not.
        """
        ours = None if self.ours is None else content_of(self.ours)
        theirs, base = _of_row(self.theirs), _of_row(self.base)
        if _is_same(ours, theirs):
            return Difference.NONE
        if _is_same(theirs, base):
            return Difference.OURS
        return Difference.THEIRS if _is_same(ours, base) else Difference.BOTH


def compare(
    ours: Iterator[Entry], theirs: Tree | None, base: Tree | None, prefix: str, below: str = ""
) -> Iterator[Compared]:
    """All names of the three sides, in order.

    Args:
        ours: entries of the store, in the order of their names.
        theirs: the commit's names; None if there is none.
        base: the names of the state that both began with; None if that is not known.
        prefix: the part of the trees that counts.
        below: the folder in the store below which the trees' names are, "" for none.
    """
    start = f"{below}/" if below else ""
    is_one = base is not None and theirs is not None and base.root == theirs.root
    sides: list[Iterator[tuple[str, int, Any]]] = [((entry.name, 0, entry) for entry in ours)]
    for side, tree in ((1, theirs), (2, None if is_one else base)):
        if tree is not None:
            sides.append(_named(tree, prefix, start, side))
    for name, found in groupby(heapq.merge(*sides, key=itemgetter(0)), key=itemgetter(0)):
        values: list[Any] = [None, None, None]
        for _, side, value in found:
            values[side] = value
        yield Compared(name, values[0], values[1], values[1] if is_one else values[2])


def open_base(root: bytes | None, pages: PageCache) -> Tree | None:
    """The base of that root, or None: there is none, or some of its pages are lost. Differences are then
    conflicts.
    """
    base = None if root is None else Tree(root, pages.read, pages.expect)
    return base if base is not None and pages.has_tree(base) else None


def agree(
    base: Tree | None, agreed: Iterable[tuple[str, Row | None]], read: ReadPage, keep: KeepPage
) -> bytes:
    """The digest of the next base: the last one with the rows of names that both sides agree on now.

    Args:
        agreed: in the order of their names; None for a name that neither has.
    """
    if base is None:
        base = Tree(build((), keep), read)
    return edit(base, agreed, keep)


def _named(tree: Tree, prefix: str, start: str, side: int) -> Iterator[tuple[str, int, Row]]:
    return ((start + row.name, side, row) for row in tree.rows(prefix))


def content_of(entry: Entry) -> Content:
    """The facts of an entry that count when sides are compared."""
    return bytes.fromhex(entry.digest), entry.serializer, dump_metadata(entry.metadata)


def _of_row(row: Row | None) -> Content | None:
    return None if row is None else (row.digest, row.serializer, row.metadata)


def _is_same(one: Content | None, other: Content | None) -> bool:
    if one is None or other is None or one == other:
        return one == other
    # JSON is parsed for the few names whose metadata differ.
    return one[:2] == other[:2] and _without_file(one[2]) == _without_file(other[2])


def _without_file(text: str | None) -> str:
    """Metadata without the record of the file that was copied: its path and mtime differ from node to node.

    A user's own record with other keys besides is metadata like any other.
    """
    metadata = parse_metadata(text)
    source = metadata.get("source")
    if is_file_record(source) and source.keys() <= _OF_FILE:
        del metadata["source"]
    return json.dumps(metadata, sort_keys=True)


def list_names(names: Sequence[str]) -> str:
    """A few words on many names, for a message.

    >>> list_names(["a", "b", "c"])
    "'a' and 2 more names"
    """
    more = len(names) - 1
    others = f" and {more:,} more name{'s' * (more > 1)}" if more else ""
    return f"{names[0]!r}{others}"
