"""A file system that passes everything through to a folder, but for sectors that it cannot read, as a dying disk has them.

Run as ``python -m tests.torture.bad_sectors_fs FOLDER MOUNTPOINT BAD``; it serves until it is unmounted. BAD is a JSON file
of ``{"inode": [[offset, length], ...]}``, the inodes of FOLDER's files, which may change while it is mounted.
"""

from __future__ import annotations

import errno
import json
import os
import sys
from pathlib import Path

import mfusepy

from tests.torture.powercut_fs import Recorder


class Dying(Recorder):
    def __init__(self, folder: str, bad: str) -> None:
        super().__init__(folder, os.devnull)
        self._bad = Path(bad)

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        for start, length in json.loads(self._bad.read_text()).get(str(os.fstat(fh).st_ino), []):
            if offset < start + length and start < offset + size:
                raise mfusepy.FuseOSError(errno.EIO)
        return super().read(path, size, offset, fh)

    def mknod(self, path: str, mode: int, dev: int) -> None:
        os.mknod(self._at(path), mode, dev)


if __name__ == "__main__":
    mfusepy.FUSE(Dying(sys.argv[1], sys.argv[3]), sys.argv[2], foreground=True, nothreads=False)
