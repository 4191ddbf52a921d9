"""A watched folder: decides which of its files count, and gives each its name in the store.

Regular files count, and so do links that stand for one, and links to files inside the folder. Files that
tools write under a temporary name do not count, nor do folders behind links, folders of other file systems (a
mount below the folder would be added to itself), the folders of version control, and the store.

Memory grows with the depth and the width of one folder, not with the number of files.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import NamedTuple

from castore.system.birth_time import birth_time
from castore.system.mount_table import FSTYPE, mounts

#: Prefixes of this package's own temporary files.
SWAP_PREFIX, PART_PREFIX = ".castore-swap-", ".castore-part-"
# Names of unfinished files, as Python's tempfile, browsers, rsync, editors, Hugging Face's libraries and
# others give them, and names of lock files.
_TEMPORARY = re.compile(
    r"\.castore-(?:swap|part)-.*|tmp[a-z0-9_]{8}|\.~.*|~\$.*|.*~|\.#.*|\.nfs[0-9a-f]{16,}|"
    r".*\.(?:tmp|temp|part|partial|incomplete|crdownload|download|lock|lck|swp|swx)",
    re.IGNORECASE,
).fullmatch


# The attribute of a watched folder that has its mark.
_MARK = "user.castore.folder"
# Folders of version control. Its programs rewrite files there in place, and read no links.
_VERSION_CONTROL = frozenset({".git", ".hg", ".svn", ".jj", ".bzr"})


def is_temporary(basename: str) -> bool:
    """Whether the name is one that tools give to unfinished files, or to files without content such as locks.

    >>> is_temporary("model.bin.incomplete"), is_temporary("train.arrow")
    (True, False)
    """
    return _TEMPORARY(basename) is not None


class Root(NamedTuple):
    """A watched folder itself, and not another one that is at its path while its disk is not mounted. For
    files of another file system that is mounted in the folder: the top of that file system.

    Attributes:
        path: of the folder.
        inode: its number. Two disks have folders of one number.
        born: when it was made, in ns; the number of the file system if that is not known.
        mark: a random text that the folder has, so that it differs from the same folder on a copy of the disk
            that was made before; "" if it has none.
    """

    path: str
    inode: int
    born: int
    mark: str

    @classmethod
    def at(cls, path: str) -> Root:
        """The folder that is at a path now."""
        try:
            mark = os.getxattr(path, _MARK).decode(errors="replace")
        except OSError:
            mark = ""
        inode = os.stat(path).st_ino
        return cls(path, inode, birth_time(path) or os.statvfs(path).f_fsid, mark)

    def is_there(self) -> bool:
        """Whether the folder at the path is still this one."""
        try:
            return Root.at(self.path) == self
        except OSError:
            return False


class WatchedFolder:
    """A folder and the prefix that its files are named under.

    Args:
        root: absolute, without links.
        prefix: checked; "" for none.
        store: the store's folder, which is left out if it lies in this one.

    Attributes:
        as_root: the folder itself, for the records of links in it.
    """

    def __init__(self, root: str, prefix: str, store: str) -> None:
        self.root = root
        self.prefix = prefix
        self._store = os.path.realpath(store)
        found = os.stat(root)
        self.identity = found.st_dev, found.st_ino
        self.as_root = Root.at(root)

    def mark(self) -> None:
        """Give the folder a mark, if it has none and its file system keeps such attributes."""
        if not self.as_root.mark:
            with suppress(OSError):
                os.setxattr(self.root, _MARK, os.urandom(16).hex().encode(), os.XATTR_CREATE)
            self.as_root = Root.at(self.root)

    def exists(self) -> bool:
        """Whether the folder is still the one that was there at the start."""
        try:
            found = os.stat(self.root)
        except OSError:
            return False
        return (found.st_dev, found.st_ino) == self.identity

    def name(self, path: str) -> str:
        """The name of a file in the folder; of the folder itself, the prefix."""
        below = path[len(self.root) :].lstrip("/")
        return f"{self.prefix}/{below}" if self.prefix and below else self.prefix or below

    def path(self, name: str) -> str:
        """The file that has a name under the prefix."""
        return os.path.join(self.root, self.below(name))

    def names(self, name: str) -> bool:
        """Whether a name is that of a file in the folder, whether it is there or not."""
        return f"{name}/".startswith(f"{self.prefix}/" if self.prefix else "")

    def below(self, name: str) -> str:
        """A name without the prefix: the path of its file, seen from the folder."""
        return name[len(self.prefix) :].lstrip("/")

    def has(self, path: str) -> bool:
        """Whether a path lies in the folder."""
        return path == self.root or path.startswith(self.root.rstrip("/") + "/")

    def is_real(self, path: str) -> bool:
        """Whether no folder on the path is a link: one that took a folder's place leads somewhere else.

        Raises:
            OSError: the path has no folder any more.
        """
        return self._device(path) is not None

    def is_followed(self, path: str) -> bool:
        """Whether a real path is on the file system of the folder, and relevant.

        Raises:
            OSError: the path has no folder any more.
        """
        return self._device(path) == self.identity[0] and self.is_relevant(path)

    @staticmethod
    def _device(path: str) -> int | None:
        """The device of a path's folder; None if a folder on the path is a link."""
        folder = os.path.dirname(path)
        fd = os.open(folder, os.O_PATH | os.O_CLOEXEC)
        try:
            # Not `realpath`: it looks at each part of the path, which took half the time of a full scan.
            return os.fstat(fd).st_dev if os.readlink(f"/proc/self/fd/{fd}") == folder else None
        finally:
            os.close(fd)

    def root_of(self, path: str) -> Root:
        """The folder itself; for a path on another file system, that file system's top.

        Raises:
            OSError: the path has no folder any more.
        """
        folder = os.path.dirname(path)
        device = os.stat(folder).st_dev
        if device == self.identity[0]:
            return self.as_root
        while self.has(above := os.path.dirname(folder)) and os.stat(above).st_dev == device:
            folder = above
        return Root.at(folder)

    def is_relevant(self, path: str) -> bool:
        """Whether events at a path in the folder count: no part of the path is temporary, or a folder of
        version control, or the store.
        """
        if self._is_store(path):
            return False
        parts = path[len(self.root) :].split("/")
        return _VERSION_CONTROL.isdisjoint(parts) and not any(map(is_temporary, parts))

    def _is_store(self, path: str) -> bool:
        return path == self._store or path.startswith(self._store + "/")

    def files(
        self, path: str, skip: Callable[[OSError], object], leftover: Callable[[str], object]
    ) -> Iterator[str]:
        """Files and links at or below a folder that count, each folder's in the order of their names.

        Args:
            path: the folder.
            skip: called with the error for each folder that cannot be listed.
            leftover: called with each of this package's own temporary files.
        """

        def inside(folder: str) -> Iterator[os.DirEntry[str]]:
            below = self._inside(folder, skip)
            for item in below:
                if item.name.startswith((SWAP_PREFIX, PART_PREFIX)):
                    leftover(item.path)
            return (item for item in below if self.is_relevant(item.path))

        return self._walk(path, inside, self._is_same_device)

    def links(self, skip: Callable[[OSError], object] = lambda error: None) -> Iterator[str]:
        """All links in the folder but those in the store and in mounts of stores: those of temporary names
        and those on other file systems too.

        Args:
            skip: called with the error for each folder that cannot be listed.
        """

        def inside(folder: str) -> Iterator[os.DirEntry[str]]:
            below = self._inside(folder, skip)
            return (item for item in below if item.is_symlink() or self._is_part(item))

        stores = {str(mount.mountpoint) for mount in mounts() if mount.fstype == FSTYPE}
        return self._walk(self.root, inside, lambda path: path not in stores)

    def _is_part(self, item: os.DirEntry[str]) -> bool:
        return item.is_dir(follow_symlinks=False) and not self._is_store(item.path)

    @staticmethod
    def _walk(
        path: str, inside: Callable[[str], Iterator[os.DirEntry[str]]], is_entered: Callable[[str], bool]
    ) -> Iterator[str]:
        """Files and links at or below a folder.

        Args:
            path: the folder.
            inside: gives those of a folder's contents that count.
            is_entered: whether a folder is entered.
        """
        waiting = [inside(path)] if is_entered(path) else []
        while waiting:
            item = next(waiting[-1], None)
            if item is None:
                waiting.pop()
            elif not item.is_dir(follow_symlinks=False):
                yield item.path
            elif is_entered(item.path):
                waiting.append(inside(item.path))

    def _is_same_device(self, path: str) -> bool:
        try:
            return os.lstat(path).st_dev == self.identity[0]
        except OSError:
            return False  # removed after the listing, or the mountpoint of a dead mount

    @staticmethod
    def _inside(path: str, skip: Callable[[OSError], object]) -> list[os.DirEntry[str]]:
        try:
            with os.scandir(path) as found:
                return sorted(found, key=lambda item: item.name)
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            skip(error)
            return []
