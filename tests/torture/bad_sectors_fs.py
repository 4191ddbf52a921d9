"""A file system that passes everything through to a folder, except unreadable sectors, as a dying disk has.

It turns read-only on request, as file systems do that meet an error.

Run as ``python -m tests.torture.bad_sectors_fs FOLDER MOUNTPOINT BAD``; it serves until it is unmounted. BAD
is a JSON file of ``{"inode": [[offset, length], ...]}``, with the inodes of FOLDER's files, or of
``"read-only"``. BAD may change while the file system is mounted.
"""

from __future__ import annotations

import errno
import json
import os
import sys
from pathlib import Path

import mfusepy

from tests.torture.powercut_fs import Recorder

READ_ONLY = "read-only"


class Dying(Recorder):
    def __init__(self, folder: str, bad: str) -> None:
        super().__init__(folder, os.devnull)
        self._bad = Path(bad)

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        told = json.loads(self._bad.read_text())
        for start, length in () if told == READ_ONLY else told.get(str(os.fstat(fh).st_ino), []):
            if offset < start + length and start < offset + size:
                raise mfusepy.FuseOSError(errno.EIO)
        return super().read(path, size, offset, fh)

    def mknod(self, path: str, mode: int, dev: int) -> None:
        os.mknod(self._at(path), mode, dev)

    def _check_writable(self) -> None:
        if json.loads(self._bad.read_text()) == READ_ONLY:
            raise mfusepy.FuseOSError(errno.EROFS)

    def create(self, path: str, mode: int, flags: int) -> int:
        self._check_writable()
        return super().create(path, mode, flags)

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        self._check_writable()
        return super().write(path, data, offset, fh)

    def rename(self, old: str, new: str) -> None:
        self._check_writable()
        super().rename(old, new)

    def unlink(self, path: str) -> None:
        self._check_writable()
        super().unlink(path)


if __name__ == "__main__":
    mfusepy.FUSE(Dying(sys.argv[1], sys.argv[3]), sys.argv[2], foreground=True, nothreads=False)
