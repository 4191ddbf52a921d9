"""The view: names as a tree of files. The tree is defined here and only here, without any FUSE.

Names are files, and their parts are folders; a folder exists as long as a name lies in it. The folder
``.castore`` in the root is in no listing: ``.castore/objects/ab/<digest>`` is any blob,
``.castore/links/<digest>/<mtime>/<name>`` the file that a link of ``castore watch --replace`` stands for, and
``.castore/stat.json`` holds the figures of ``castore stat``. The names are those of a store, or of a commit
of one of its remotes.

A `File` is a name together with the blob it pointed to when it was looked up, and never changes: a name that
points to another blob looks up as another `File`. Threads may share a `View`; only its caches are written
after construction.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator
from typing import NamedTuple

import xxhash

from castore import Store
from castore.errors import CorruptError
from castore.names import PART_BYTES, RESERVED, below, is_own_name
from castore.read.file_tree import FileTree, HeldBlob
from castore.records import DIGEST_SIZE, FileRow, entry_check
from castore.system.ram_cache import MemoryLRU

#: Rows per query: few behind a folder, whose other names are skipped; many among files.
_FEW, _MANY = 8, 1000
_INODE_MASK = (1 << 63) - 1
#: The largest size in bytes, and the latest time in seconds since the epoch, that the kernel accepts.
_LARGEST, _LATEST = (1 << 63) - 1, float(1 << 40)
_NO_PARTS = frozenset(("", ".", ".."))


class File(NamedTuple):
    """A file of the view.

    Attributes:
        name: that of the entry; empty for a file that is reached by digest or generated.
        digest: 32 raw bytes; with `name`, the file's identity.
        size: in bytes.
        modified: when the name was last pointed at this blob, in seconds since the epoch.
        expires: when the entry stops existing, or None.
        content: the bytes of a generated file, else None.
    """

    name: str
    digest: bytes
    size: int
    modified: float
    expires: float | None = None
    content: bytes | None = None

    @property
    def inode(self) -> int:
        """Derived from the digest: the same after every remount, and never 0 or 1."""
        return _inode(self.digest)

    @property
    def is_sound(self) -> bool:
        """Whether its row's values are valid.

        An index that is damaged, or not made by castore, may hold anything.
        """
        _, digest, size, modified, expires, _ = self
        return (
            type(digest) is bytes
            and len(digest) == DIGEST_SIZE
            and type(size) is int
            and 0 <= size <= _LARGEST
            and type(modified) is float
            and abs(modified) <= _LATEST
            and (expires is None or type(expires) is float)
        )


def _file(name: str, digest: bytes, size: int, modified: float, expires: float | None, checked: int) -> File:
    """The file of a row. It gets no digest, so is not sound, if the row's check does not match."""
    return File(name, digest if checked == entry_check(name, digest) else b"", size, modified, expires)


def _inode(digest: object) -> int:
    return (int.from_bytes(digest[:8], "little") if isinstance(digest, bytes) else 0) & _INODE_MASK | 2


class Folder(NamedTuple):
    """A folder of the view, by its path below the mountpoint ("" for the root)."""

    path: str

    @property
    def inode(self) -> int:
        """Derived from the path; 1 for the root."""
        return xxhash.xxh3_64_intdigest(self.path.encode()) & _INODE_MASK | 2 if self.path else 1


class Page(NamedTuple):
    """A piece of a folder's listing: files, and behind them perhaps one folder.

    Attributes:
        parts: the names inside the folder; the last one is that of `folder`, if there is one.
        rows: name, digest, size, modified, expires and check of each file.
        folder: the folder of the last name, or None if that is a file.
    """

    parts: list[str]
    rows: list[FileRow]
    folder: Folder | None

    def items(self, start: int = 0) -> Iterator[tuple[str, File | Folder]]:
        """The names from number ``start`` on, each with its file or folder."""
        yield from zip(self.parts[start:], itertools.starmap(_file, self.rows[start:]), strict=False)
        if self.folder is not None:
            yield self.parts[-1], self.folder

    def inodes(self) -> list[int]:
        """The inodes of the files."""
        return [_inode(row[1]) for row in self.rows]


class Space(NamedTuple):
    """The figures of ``df``: bytes the store may hold, bytes still free, entries."""

    total: int
    free: int
    files: int


class View:
    """The tree of one store, or of a commit of a remote.

    Args:
        store: open for reading.
        tree: the names; of the store, or of one of its remotes.
        prefix: only names below this one are shown, without it; "" shows all.
        cache_bytes: bound on decoded frames kept in RAM for all files together.
    """

    def __init__(
        self,
        store: Store,
        prefix: str = "",
        cache_bytes: int = 64 * 1024 * 1024,
        tree: FileTree | None = None,
    ) -> None:
        self.store = store
        self.tree: FileTree = tree or store.tree
        self.prefix = prefix
        self.cache: MemoryLRU[bytes] = MemoryLRU(cache_bytes)
        self.since = (store.path / "castore.json").stat().st_mtime

    def _full_name(self, path: str) -> str:
        return f"{self.prefix}/{path}" if self.prefix and path else self.prefix or path

    # The tree

    def lookup(self, folder: str, part: str) -> File | Folder | None:
        """The file or folder of that name in the folder, or None.

        Args:
            folder: path below the mountpoint.
            part: one part of a name.

        Raises:
            CorruptError: the index has a row of that name with values that cannot be.
        """
        path = f"{folder}/{part}" if folder else part
        if path == RESERVED or path.startswith(RESERVED + "/"):
            return self._reserved(path)
        file = self._file_of(self._full_name(path))
        if file is not None:
            return file
        return Folder(path) if self.folder_exists(path) else None

    def _file_of(self, name: str) -> File | None:
        row = self.tree.file(name, time.time())
        if row is None:
            return None
        file = _file(*row)
        if not file.is_sound:
            raise CorruptError(
                f"the index row of {name!r} has impossible values; `castore doctor` tells more"
            )
        return file

    def folder_exists(self, path: str) -> bool:
        """Whether a name lies below that path."""
        return self.tree.is_folder(self._full_name(path), time.time())

    def listing(self, folder: str) -> Iterator[tuple[str, File | Folder]]:
        """The parts of names directly inside a folder, in the order of bytes."""
        for page in self.pages(folder):
            yield from page.items()

    def pages(self, folder: str) -> Iterator[Page]:
        """The listing in pages, one for each query of the index. A page may be empty."""
        if folder == RESERVED or folder.startswith(RESERVED + "/"):
            return
        base = self._full_name(folder)
        low, high = below(base) if base else ("", None)
        skip, limit = len(low), _MANY
        now = time.time()
        while True:
            rows = self.tree.files(low, high, now, limit)
            page, more = _page(folder, rows, skip)
            yield page
            if page.folder is None and len(rows) < limit:
                return
            low = self.tree.require_order(low, more)
            limit = _FEW if page.folder is not None else _MANY

    def _reserved(self, path: str) -> File | Folder | None:
        parts = path.split("/")[1:]
        if parts in ([], ["objects"]) or (len(parts) == 2 and parts[0] == "objects" and _is_hex(parts[1], 2)):
            return Folder(path)
        if parts == ["stat.json"]:
            return self._stat_file()
        if parts[0] == "links":
            return self._file_of(path) if is_own_name(path) else Folder(path) if len(parts) < 4 else None
        if len(parts) == 3 and parts[0] == "objects" and _is_hex(parts[2], 64) and parts[2][:2] == parts[1]:
            blob = self.tree.blob(bytes.fromhex(parts[2]))
            return File("", blob.digest, blob.size, self.since) if blob is not None else None
        return None

    def _stat_file(self) -> File:
        # The store behind a mount has no RAM tier of its own: the mount keeps decoded frames in RAM instead.
        figures = self.store.stat()._replace(memory_bytes=self.cache.bytes, memory_max=self.cache.max_bytes)
        content = json.dumps(figures._asdict(), indent=2).encode() + b"\n"
        return File("", xxhash.xxh3_128_digest(content) * 2, len(content), time.time(), 0.0, content)

    # Contents of files

    def open(self, file: File) -> HeldBlob:
        """A reader that holds the file's bytes until it is closed, whatever gc does.

        Raises:
            FileNotFoundError: the bytes are gone.
        """
        held = self.tree.open(file.name, file.digest, self.cache)
        if held.blob.size != file.size:
            held.close()
            raise _another_size(file, held.blob.size)
        return held

    def read_small(self, file: File) -> bytes | None:
        """All bytes of a small file, on the short path.

        None if it is large or unreadable: `open` gives the error.
        """
        data = self.tree.read_small(file.name, file.digest)
        if data is not None and len(data) != file.size:
            raise _another_size(file, len(data))
        return data

    def is_unnamed(self, digest: bytes) -> bool:
        """Whether no name points to those bytes, so that gc may remove them."""
        return not self.tree.is_named(digest)

    def count_use(self, file: File) -> None:
        """Count a use of the file: gc removes the least recently used files first."""
        self.tree.count_use(file.name, file.digest)

    def quarantine(self, held: HeldBlob, error: CorruptError) -> bool:
        """Quarantine an object that failed its check; returns whether the bytes can be had again."""
        return self.tree.quarantine(held, error)

    def is_known(self, file: File) -> bool:
        """Whether the file's bytes should be there, so that it is damage if they are not."""
        return self.tree.blob(file.digest) is not None

    def attributes(self, file: File) -> dict[str, str]:
        """Extended attributes of a file: facts of its entry and its blob."""
        return {"size": str(file.size)} | self.tree.attributes(file.name, file.digest)

    def space(self) -> Space:
        """Used and free space of the store: against its budget, or against its disk if it has no budget."""
        import shutil

        totals = self.store.totals()
        budget = self.store.settings.max_size
        disk = shutil.disk_usage(self.store.path).free
        free = disk if budget is None else max(0, min(disk, budget - totals.stored))
        return Space(totals.stored + free, free, totals.entries)


def _another_size(file: File, size: int) -> CorruptError:
    """The error for a listing that lies: the kernel would cut the file off, or fill it up."""
    return CorruptError(
        f"{file.name!r} has {size} bytes, and is listed with {file.size}: the tree of its remote lies, or the"
        " index is damaged, which `castore doctor` mends",
        digest=file.digest.hex(),
    )


def _page(folder: str, rows: list[FileRow], skip: int) -> tuple[Page, str]:
    """The page that begins with those rows, and the name at which the next query begins.

    The first ``skip`` characters of each name are those of the folder. A name ``PREFIX/.castore`` is not in
    the listing of a mount of that prefix, whose own folder stands there.
    """
    parts = [row[0][skip:] for row in rows]
    if not parts or (_are_parts(parts) and (folder or RESERVED not in parts)):
        return Page(parts, rows, None), rows[-1][0] + "\0" if rows else ""
    good, low = Page([], [], None), ""
    for row, path in zip(rows, parts, strict=True):
        part, slash, _ = path.partition("/")
        low = row[0] + "\0"
        if not _are_parts([part]) or (not folder and part == RESERVED):
            continue  # one bad row must not break the listing
        good.parts.append(part)
        if slash:
            inside = Folder(f"{folder}/{part}" if folder else part)
            # the first name behind the folder
            return good._replace(folder=inside), row[0][: skip + len(part)] + "0"
        good.rows.append(row)
    return good, low


def _are_parts(parts: list[str]) -> bool:
    """Whether the kernel accepts these as names of files. An index not made by castore may hold anything."""
    text = "/".join(parts)
    if text.count("/") != len(parts) - 1 or "\0" in text or not _NO_PARTS.isdisjoint(parts):
        return False
    longest = max(map(len, parts))
    return (
        longest <= PART_BYTES // 4 or max(len(part.encode(errors="replace")) for part in parts) <= PART_BYTES
    )


def _is_hex(text: str, length: int) -> bool:
    return len(text) == length and all(char in "0123456789abcdef" for char in text)
