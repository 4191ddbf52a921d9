"""A file system that passes everything through to a folder, and logs all changes to the disk in order.

Run as ``python powercut_fs.py FOLDER MOUNTPOINT LOG``; it serves until it is unmounted. The log is a stream
of msgpack arrays, for `powercut.py` to replay. A look-up of ``/.ack-TEXT`` writes TEXT into the log: this is
how a writer records, in step with its writes, which of them were acknowledged. SQLite's shared memory is no
part of the disk's content, and is not logged.
"""

from __future__ import annotations

import errno
import os
import sys
import threading
from typing import Any

import mfusepy
import msgpack

ACK = "/.ack-"


class Recorder(mfusepy.Operations):  # type: ignore[misc]  # ships no types
    use_ns = True

    def __init__(self, folder: str, log: str) -> None:
        self._folder = folder
        self._log = open(log, "ab")  # noqa: SIM115  (it lives as long as the mount)
        self._lock = threading.Lock()

    def _at(self, path: str) -> str:
        return self._folder + path

    def _say(self, *event: Any) -> None:
        with self._lock:
            self._log.write(msgpack.packb(event))
            self._log.flush()

    def _number(self, path_or_fd: str | int) -> int:
        return os.stat(path_or_fd).st_ino

    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
        if path.startswith(ACK):
            self._say("ack", path[len(ACK) :])
            raise mfusepy.FuseOSError(errno.ENOENT)
        status = os.lstat(self._at(path)) if fh is None else os.fstat(fh)
        told = {key: getattr(status, key) for key in dir(status) if key.startswith("st_")}
        return told | {name: getattr(status, name + "_ns") for name in ("st_atime", "st_mtime", "st_ctime")}

    def readdir(self, path: str, fh: int) -> list[str]:
        return [".", "..", *os.listdir(self._at(path))]

    def open(self, path: str, flags: int) -> int:
        fd = os.open(self._at(path), flags & ~os.O_APPEND)
        if flags & os.O_TRUNC:
            self._say("truncate", self._number(fd), 0)
        return fd

    def create(self, path: str, mode: int, flags: int) -> int:
        # The open is not exclusive: the kernel has checked already, and does not pass the flags on.
        there = os.path.lexists(self._at(path))
        fd = os.open(self._at(path), os.O_RDWR | os.O_CREAT, mode)
        if not there:
            self._say("create", path, self._number(fd))
        return fd

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        return os.pread(fh, size, offset)

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        if not path.endswith("-shm"):
            self._say("write", self._number(fh), offset, bytes(data))
        return os.pwrite(fh, data, offset)

    def truncate(self, path: str, length: int, fh: int | None = None) -> None:
        target: str | int = self._at(path) if fh is None else fh
        self._say("truncate", self._number(target), length)
        os.truncate(target, length)

    def fsync(self, path: str, datasync: int, fh: int) -> None:
        self._say("fsync", self._number(fh))

    def fsyncdir(self, path: str, datasync: int, fh: int) -> None:
        self._say("fsyncdir", path)

    def mkdir(self, path: str, mode: int) -> None:
        os.mkdir(self._at(path), mode)
        self._say("mkdir", path)

    def unlink(self, path: str) -> None:
        os.unlink(self._at(path))
        self._say("unlink", path)

    def rename(self, old: str, new: str) -> None:
        os.rename(self._at(old), self._at(new))
        self._say("rename", old, new)

    def chmod(self, path: str, mode: int) -> None:
        os.chmod(self._at(path), mode)

    def utimens(self, path: str, times: tuple[int, int]) -> None:
        os.utime(self._at(path), ns=times)

    def release(self, path: str, fh: int) -> None:
        os.close(fh)


if __name__ == "__main__":
    mfusepy.FUSE(Recorder(sys.argv[1], sys.argv[3]), sys.argv[2], foreground=True, nothreads=False)
