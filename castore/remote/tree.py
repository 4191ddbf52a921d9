"""Trees: immutable sorted tables of names, cut into pages by content, so that two trees share what is equal.

A page ends after a row with a certain hash, in proportion to the row's bytes (a "prolly tree", as Noms and
Dolt have it). So a change of one name changes one leaf and the pages above it, whatever the order of changes
that led there, and the difference of two trees is found in the pages that they do not share. Pages are read
when they are needed. Nothing here uses a bucket: pages come from, and go to, the functions that are given.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, zip_longest
from operator import attrgetter
from typing import NamedTuple

import xxhash

from castore.errors import CorruptError
from castore.remote.pages import Child, Page, Row, decode, digest_of, encode_inner, encode_leaf
from castore.system.ram_cache import MemoryLRU

#: Mean bytes of a page before compression, and the bytes at which a page ends in any case.
PAGE_BYTES, LONGEST = 1 << 17, 1 << 20
_HASHES = 1 << 64
# Leaves that are fetched ahead of a reader who goes on in order.
_LEAVES_AHEAD = 16
_FIRST, _NAME = attrgetter("first"), attrgetter("name")
# Bytes of a row beside its name, its texts and its frames.
_ROW_BYTES, _CHILD_BYTES = 60, 50

#: Gives the bytes of a page by its digest.
ReadPage = Callable[[bytes], bytes]
#: Receives the digests of pages that will be read soon.
ExpectPages = Callable[[Iterable[bytes]], object]
#: Keeps the bytes of a page under its digest.
KeepPage = Callable[[bytes, bytes], object]


class Change(NamedTuple):
    """A name that differs between two trees: ``old`` or ``new`` is None where there is none."""

    name: str
    old: Row | None
    new: Row | None


class Tree:
    """A tree of names.

    Args:
        root: digest of its uppermost page.
        read: gives pages, for instance from a bucket or a cache.
        expect: may fetch ahead.
        decoded: keeps decoded pages, for a tree of which single names are read.

    Raises:
        CorruptError: any method, for a page that is damaged, or that is not where its parent refers to.
    """

    def __init__(
        self,
        root: bytes,
        read: ReadPage,
        expect: ExpectPages = lambda digests: None,
        decoded: MemoryLRU[Page] | None = None,
    ) -> None:
        self.root = root
        self._read = read
        self._decoded = decoded
        #: Fetches ahead.
        self.expect = expect

    def page(self, child: Child | None = None) -> Page:
        """The root, or the page of ``child``, checked against its parent's row."""
        digest = self.root if child is None else child.page
        if self._decoded is None:
            page = self._load(digest)
        else:
            page = self._decoded.get_or_load(digest, lambda: self._load(digest))
        first = page.children[0].first if page.level else page.rows[0].name if page.rows else None
        if child is not None and first != child.first:
            raise CorruptError(f"page {digest.hex()} does not begin at {child.first!r}, as its parent says")
        return page

    def _load(self, digest: bytes) -> Page:
        return decode(self._read(digest), digest)

    def totals(self) -> tuple[int, int, int]:
        """Names, and the sums of their sizes and of their stored sizes in bytes, from the root alone."""
        return _totals(self.page())

    def find(self, name: str) -> Row | None:
        """The row of a name, or None."""
        page = self.page()
        while page.level:
            at = bisect_right(page.children, name, key=_FIRST)
            if not at:
                return None
            page = self._below(page, page.children[at - 1])
        at = bisect_left(page.rows, name, key=_NAME)
        return page.rows[at] if at < len(page.rows) and page.rows[at].name == name else None

    def leaf_of(self, name: str) -> Sequence[Row]:
        """The rows of the leaf that has a name, or would have it."""
        page = self.page()
        while page.level:
            page = self._below(page, page.children[max(0, bisect_right(page.children, name, key=_FIRST) - 1)])
        return page.rows

    def rows_from(self, low: str) -> Iterator[Row]:
        """The rows from the name ``low`` on, in order. Leaves behind the first one are fetched ahead."""
        return self._rows_from(self.page(), low)

    def _rows_from(self, page: Page, low: str) -> Iterator[Row]:
        if not page.level:
            yield from page.rows[bisect_left(page.rows, low, key=_NAME) :]
            return
        start = max(0, bisect_right(page.children, low, key=_FIRST) - 1)
        for at in range(start, len(page.children)):
            if page.level == 1 and at > start:
                self.expect(child.page for child in page.children[at + 1 : at + 1 + _LEAVES_AHEAD])
            yield from self._rows_from(self._below(page, page.children[at]), low)

    def rows(self, prefix: str = "") -> Iterator[Row]:
        """All rows in the order of their names, or those at and below a folder; pages are read as needed."""
        return _rows(self, list(self.leaves(prefix)), set(), prefix)

    def leaves(self, prefix: str = "") -> Iterator[Child]:
        """The leaves in order, or those that may have names at and below a folder."""
        root = self.page()
        if not root.level:
            first = root.rows[0].name if root.rows else ""
            yield Child(first, self.root, True, *_totals(root))
            return
        yield from self._leaves(root, prefix)

    def _leaves(self, page: Page, prefix: str) -> Iterator[Child]:
        ends = [child.first for child in page.children[1:]]
        self.expect(child.page for child in page.children if page.level > 1 and not prefix)
        for child, end in zip_longest(page.children, ends):
            # "0" follows "/" in ASCII, so it ends the names below a folder.
            if prefix and (child.first >= prefix + "0" or (end is not None and end <= prefix)):
                continue
            if page.level == 1:
                yield child
            else:
                yield from self._leaves(self._below(page, child), prefix)

    def pages(self) -> Iterator[bytes]:
        """The digests of all pages. Leaves are not read."""
        yield self.root
        yield from self._pages(self.page())

    def _pages(self, page: Page) -> Iterator[bytes]:
        for child in page.children:
            yield child.page
            if page.level > 1:
                yield from self._pages(self._below(page, child))

    def rows_of(self, leaf: Child) -> list[Row]:
        """The rows of one of `leaves`."""
        page = self.page(leaf if leaf.first else None)
        if page.level:
            raise CorruptError(f"page {leaf.page.hex()} is no leaf, as its parent says")
        return list(page.rows)

    def _below(self, page: Page, child: Child) -> Page:
        below = self.page(child)
        if below.level != page.level - 1:
            raise CorruptError(f"page {child.page.hex()} is of level {below.level}, below {page.level}")
        return below


def difference(old: Tree, new: Tree, prefix: str = "") -> Iterator[Change]:
    """The names that differ between two trees, in order. Reads only leaves that the two do not share."""
    if old.root == new.root:
        return
    ours, theirs = list(old.leaves(prefix)), list(new.leaves(prefix))
    shared = {leaf.page for leaf in ours} & {leaf.page for leaf in theirs}
    left = _rows(old, ours, shared, prefix)
    right = _rows(new, theirs, shared, prefix)
    before, after = next(left, None), next(right, None)
    while before is not None or after is not None:
        if after is None or (before is not None and before.name < after.name):
            assert before is not None
            yield Change(before.name, before, None)
            before = next(left, None)
        elif before is None or after.name < before.name:
            yield Change(after.name, None, after)
            after = next(right, None)
        else:
            if before != after:
                yield Change(after.name, before, after)
            before, after = next(left, None), next(right, None)


def _rows(tree: Tree, leaves: list[Child], shared: set[bytes], prefix: str) -> Iterator[Row]:
    own = [leaf for leaf in leaves if leaf.page not in shared]
    tree.expect(leaf.page for leaf in own)
    for leaf in own:
        for row in tree.rows_of(leaf):
            if not prefix or row.name == prefix or row.name.startswith(prefix + "/"):
                yield row


def build(rows: Iterable[Row], keep: KeepPage) -> bytes:
    """Make a tree of rows in the order of their names; returns the digest of its root."""
    builder = _Builder(keep)
    for row in rows:
        builder.add(row)
    return builder.finish()


def edit(tree: Tree, changes: Iterable[tuple[str, Row | None]], keep: KeepPage) -> bytes:
    """The tree with some names set, or removed where the row is None; returns the digest of its root.

    The result is the tree that `build` would make of the same rows. Leaves without a change are taken over
    unread.

    Args:
        changes: in the order of their names.
        keep: gets all pages that are new, and some that are not.
    """
    builder = _Builder(keep)
    pending = iter(changes)
    change = next(pending, None)
    leaves = [leaf for leaf in tree.leaves() if leaf.entries]
    ends = [leaf.first for leaf in leaves[1:]]
    for leaf, end in zip_longest(leaves, ends):
        # The first leaf also takes the names before it.
        touched = []
        while change is not None and (end is None or change[0] < end):
            touched.append(change)
            change = next(pending, None)
        if not touched and leaf.is_start:
            builder.take(leaf, tree)
            continue
        for row in _merged(tree.rows_of(leaf), touched):
            builder.add(row)
    for _, added in chain([] if change is None else [change], pending):
        if added is not None:
            builder.add(added)
    return builder.finish()


def _merged(rows: list[Row], changes: list[tuple[str, Row | None]]) -> Iterator[Row]:
    by_name: dict[str, Row | None] = {row.name: row for row in rows}
    by_name.update(changes)
    for _, row in sorted(by_name.items()):
        if row is not None:
            yield row


def _row_bytes(row: Row) -> int:
    texts = len(row.name) + len(row.metadata or "") + len(row.serializer)
    return _ROW_BYTES + texts + len(row.place.frames)


def _is_start(hashed: bytes, size: int) -> bool:
    """Whether a row of ``size`` bytes begins a page: larger rows do so more often."""
    return xxhash.xxh3_64_intdigest(hashed) * PAGE_BYTES < _HASHES * size


class _Builder:
    """Cuts rows into leaves, and their pages into inner pages."""

    def __init__(self, keep: KeepPage) -> None:
        self._keep = keep
        self._rows: list[Row] = []
        self._bytes = 0
        self._starts = True
        self._children: list[Child] = []
        self._taken: Tree | None = None

    def add(self, row: Row) -> None:
        """Append a row; its name is above all before it."""
        size = _row_bytes(row)
        is_start = _is_start(row.name.encode(), size)
        if self._taken is not None and not is_start:
            self._reopen(self._taken)
        self._taken = None
        if is_start or self._bytes + size > LONGEST:
            self._flush()
            self._starts = is_start
        self._rows.append(row)
        self._bytes += size

    def take(self, leaf: Child, tree: Tree) -> None:
        """Append a leaf of ``tree`` that begins a page whatever comes before it."""
        self._flush()
        self._children.append(leaf)
        self._taken = tree

    def _reopen(self, tree: Tree) -> None:
        # The row that began the page after the leaf is gone, so the rows behind it belong to the leaf's page.
        leaf = self._children.pop()
        self._rows, self._starts = tree.rows_of(leaf), leaf.is_start
        self._bytes = sum(map(_row_bytes, self._rows))

    def _flush(self) -> None:
        if not self._rows:
            return
        page = Page(0, self._rows, ())
        self._children.append(self._kept(encode_leaf(self._rows), self._rows[0].name, self._starts, page))
        self._rows, self._bytes = [], 0

    def _kept(self, data: bytes, first: str, is_start: bool, page: Page) -> Child:
        digest = digest_of(data)
        self._keep(digest, data)
        return Child(first, digest, is_start, *_totals(page))

    def finish(self) -> bytes:
        """Write what is left; returns the root."""
        self._flush()
        children, level = self._children, 0
        if not children:
            data = encode_leaf([])
            self._keep(digest_of(data), data)
            return digest_of(data)
        while len(children) > 1:
            level += 1
            above: list[Child] = []
            part: list[Child] = []
            starts, size = True, 0
            for child in children:
                own = _CHILD_BYTES + len(child.first)
                is_start = _is_start(child.page, own)
                # A page of one child would not make the tree lower.
                if len(part) > 1 and (is_start or size + own > LONGEST):
                    above.append(self._inner(level, part, starts))
                    part, size, starts = [], 0, is_start
                part.append(child)
                size += own
            above.append(self._inner(level, part, starts))
            children = above
        return children[0].page

    def _inner(self, level: int, children: list[Child], is_start: bool) -> Child:
        page = Page(level, (), children)
        return self._kept(encode_inner(level, children), children[0].first, is_start, page)


def _totals(page: Page) -> tuple[int, int, int]:
    if page.level:
        children = page.children
        return (
            sum(child.entries for child in children),
            sum(child.logical for child in children),
            sum(child.stored for child in children),
        )
    rows = page.rows
    return len(rows), sum(row.size for row in rows), sum(row.place.stored for row in rows)
