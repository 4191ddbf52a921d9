"""Loose objects: one file per blob, named by digest, in a tree of 256 folders.

An object starts as a temporary file (temporary.py). A rename in the same file system gives it its final name
while the caller holds the index's write lock. So files appear and disappear under a digest only in step with
the index.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

from castore.errors import StoreError
from castore.objects.codecs import CODECS
from castore.system.temporary import create_temporary, make_folder, sync_folder, take_over

_SUFFIXES = {codec.suffix: codec.name for codec in CODECS.values()}
_OBJECT = re.compile(r"([0-9a-f]{64})(|\.zst|\.lz4|\.gz)")


class LooseFolder:
    """``objects/`` and ``tmp/`` of a store.

    Args:
        objects: folder of the digest tree.
        tmp: folder of unfinished files, in the same file system.
        mode: permission bits of objects.
        folder_mode: permission bits of folders.
    """

    def __init__(self, objects: Path, tmp: Path, *, mode: int, folder_mode: int) -> None:
        self.objects = objects
        self.tmp = tmp
        self.mode = mode
        self._folder_mode = folder_mode
        self._base = str(objects)

    def path(self, digest: bytes, codec: str) -> str:
        """Path of the object of ``digest`` stored with ``codec``."""
        name = digest.hex()
        return f"{self._base}/{name[:2]}/{name}{CODECS[codec].suffix}"

    def create(self) -> tuple[int, Path]:
        """Create a temporary file, open for writing."""
        return create_temporary(self.tmp)

    def resume(self, purpose: str) -> tuple[int, Path]:
        """Go on with the temporary file that a process which is gone has left for that purpose, or create it.

        Nothing is known of the bytes that it has.

        Args:
            purpose: of letters and digits.
        """
        return take_over(self.tmp, purpose) or create_temporary(self.tmp, purpose)

    def seal(self, fd: int, *, durable: bool) -> None:
        """Give a finished temporary file an object's permissions, and sync it if ``durable``."""
        os.fchmod(fd, self.mode)
        if durable:
            os.fsync(fd)

    def publish(self, temporary: Path, digest: bytes, codec: str, *, durable: bool) -> None:
        """Rename a sealed file to its final name. The caller holds the write lock.

        Raises:
            StoreError: something else lies in the place of the folder or of the file.
        """
        target = Path(self.path(digest, codec))
        try:
            # A symbolic link in the folder's place could lead out of the store.
            if not stat.S_ISDIR(os.lstat(target.parent).st_mode):
                raise StoreError(f"{target.parent} is not a folder; `castore doctor` sets it aside")
        except FileNotFoundError:
            make_folder(target.parent, self._folder_mode)
        try:
            os.rename(temporary, target)
        except IsADirectoryError as error:
            raise StoreError(f"{target} is a folder; `castore doctor` sets it aside") from error
        if durable:
            sync_folder(target.parent)
            sync_folder(self.objects)  # whoever has made the folder did not wait for the disk

    def listing(self) -> Iterator[tuple[bytes, str, Path]]:
        """Yield ``(digest, codec, path)`` of every loose object. Skips anything else."""
        for folder in sorted(self.objects.glob("[0-9a-f][0-9a-f]")):
            if folder.is_symlink() or not folder.is_dir():
                continue
            for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
                match = _OBJECT.fullmatch(entry.name)
                if match and match[1][:2] == folder.name and entry.is_file(follow_symlinks=False):
                    yield bytes.fromhex(match[1]), _SUFFIXES[match[2]], Path(entry.path)
