"""An open folder: keeps the names of each page as they were when it was read, so that seeking back is exact.

Most listings are read once, from the front, for the names alone. For these, a page is packed in the kernel's
layout all at once, and no name becomes an object of its own. Knows nodes only by the age of their look-ups.
"""

from __future__ import annotations

import bisect
import stat
import threading
from collections.abc import Iterator

from castore_fuse.nodes import Lookups
from castore_fuse.view import File, Folder, Page
from castore_fuse.wire import pack_direntries


class _Piece:
    """A page, the number of its first line, and the age of the look-ups when it was read."""

    __slots__ = ("age", "first", "packed", "page")

    def __init__(self, first: int, age: int, page: Page) -> None:
        self.first, self.age, self.page = first, age, page
        self.packed: list[bytes] | None = None

    def lines(self, offset: int) -> list[bytes]:
        """The page's lines, packed. ``offset`` is that of the line after the first one."""
        if self.packed is None:
            page = self.page
            names = [part.encode() for part in page.parts]
            packed = pack_direntries(names, page.inodes(), stat.S_IFREG, offset)
            if page.folder is not None:
                folder = page.folder
                packed += pack_direntries(names[-1:], [folder.inode], stat.S_IFDIR, offset + len(packed))
            self.packed = packed
        return self.packed


class Listing:
    """The names directly inside a folder. Threads may share it.

    Args:
        pages: the pages that the view lists.
        lookups: gives the age of each page.
        dots: number of lines that the kernel gets before the names, which count in offsets.
    """

    def __init__(self, pages: Iterator[Page], lookups: Lookups, dots: int) -> None:
        self._rest = pages
        self._lookups = lookups
        self._dots = dots
        self._pieces: list[_Piece] = []
        self._firsts: list[int] = []
        self._age: int | None = None  # of the look-ups when the first page was read
        self._failure: OSError | None = None
        self._lock = threading.Lock()

    def is_outdated(self) -> bool:
        """Whether names have changed since its first page was read."""
        with self._lock:
            return self._age is not None and self._age != self._lookups.age

    def packed(self, start: int) -> Iterator[bytes]:
        """The lines from number ``start`` on, each a `struct fuse_dirent`."""
        for piece in self._from(start):
            yield from piece.lines(piece.first + self._dots + 1)[max(0, start - piece.first) :]

    def lines(self, start: int) -> Iterator[tuple[int, int, str, File | Folder]]:
        """The same lines: offset of the next line, age of the look-ups when it was read, name, item."""
        for piece in self._from(start):
            skip = max(0, start - piece.first)
            for offset, (part, item) in enumerate(
                piece.page.items(skip), piece.first + skip + self._dots + 1
            ):
                yield offset, piece.age, part, item

    def _from(self, start: int) -> Iterator[_Piece]:
        number = max(0, bisect.bisect_right(self._firsts, start) - 1)
        while (piece := self._piece(number)) is not None:
            if start < piece.first + len(piece.page.parts):
                yield piece
            number += 1

    def _piece(self, number: int) -> _Piece | None:
        with self._lock:
            while number >= len(self._pieces):
                age = self._lookups.age
                self._age = age if self._age is None else self._age
                if self._failure is not None:  # a generator that has failed would seem to be at its end
                    raise self._failure
                try:
                    page = next(self._rest, None)
                except OSError as error:
                    self._failure = error
                    raise
                if page is None:
                    return None
                last = self._pieces[-1] if self._pieces else None
                first = last.first + len(last.page.parts) if last else 0
                if page.parts:
                    self._pieces.append(_Piece(first, age, page))
                    self._firsts.append(first)
            return self._pieces[number]
