"""Loose objects: one file a blob, named by digest, in a tree of 256 folders; and the temporary files they start as.

A temporary file's name tells which process made it, so that what a dead writer left can be told from what a living
one is writing. The file gets its final name by a rename in the same file system, which the caller does while it holds
the index's write lock: no file appears or disappears under a digest but in step with the index.
"""

from __future__ import annotations

import os
import re
import time
import uuid
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from castore.objects.codecs import CODECS

_SUFFIXES = {codec.suffix: codec.name for codec in CODECS.values()}
_OBJECT = re.compile(r"([0-9a-f]{64})(|\.zst|\.lz4|\.gz)")
#: A temporary file of another PID namespace (a container's, say) counts as left behind after this many seconds.
FOREIGN_AGE = 3600.0


@lru_cache(maxsize=1)
def _pid_namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino


def process_started(pid: int) -> float | None:
    """Start time of a process in clock ticks since boot, or None if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in (b"Z", b"X") else float(fields[19])


class Stray(NamedTuple):
    """A file that no living writer and no row of the index accounts for."""

    path: Path
    size: int


class LooseFolder:
    """``objects/`` and ``tmp/`` of a store.

    Args:
        objects: folder of the digest tree.
        tmp: folder of files being written, in the same file system.
        mode: permission bits of objects.
        folder_mode: permission bits of folders.
    """

    def __init__(self, objects: Path, tmp: Path, *, mode: int, folder_mode: int) -> None:
        self.objects = objects
        self.tmp = tmp
        self._mode = mode
        self._folder_mode = folder_mode
        self._base = str(objects)

    def path(self, digest: bytes, codec: str) -> str:
        """Where the object of ``digest`` lies when stored with ``codec``."""
        name = digest.hex()
        return f"{self._base}/{name[:2]}/{name}{CODECS[codec].suffix}"

    def create(self) -> tuple[int, Path]:
        """A new temporary file, open for writing."""
        # The UUID keeps two threads, or two processes that got the same PID in turn, from meeting.
        started = int(process_started(os.getpid()) or 0)
        path = self.tmp / f"{_pid_namespace()}-{os.getpid()}-{started}-{uuid.uuid4().hex}.part"
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), path

    def seal(self, fd: int, *, durable: bool) -> None:
        """Make a finished temporary file what an object is: read-only, and on the disk if ``durable``."""
        os.fchmod(fd, self._mode)
        if durable:
            os.fsync(fd)

    def publish(self, temporary: Path, digest: bytes, codec: str, *, durable: bool) -> None:
        """Rename a sealed file to its final name. The caller holds the write lock."""
        target = Path(self.path(digest, codec))
        try:
            os.rename(temporary, target)
        except FileNotFoundError:
            self._make_folder(target.parent)
            os.rename(temporary, target)
        if durable:
            sync_folder(target.parent)

    def _make_folder(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        folder.chmod(self._folder_mode)
        sync_folder(folder.parent)

    def listing(self) -> Iterator[tuple[bytes, str, Path]]:
        """Every loose object: digest, codec, path. Files of other names are passed over."""
        for folder in sorted(self.objects.glob("[0-9a-f][0-9a-f]")):
            for path in sorted(folder.iterdir()):
                match = _OBJECT.fullmatch(path.name)
                if match and match[1][:2] == folder.name:
                    yield bytes.fromhex(match[1]), _SUFFIXES[match[2]], path

    def left_behind(self) -> Iterator[Stray]:
        """Temporary files whose writer is gone."""
        for path in self.tmp.iterdir():
            try:
                status = path.stat()
            except FileNotFoundError:
                continue  # its writer just finished
            if _writer_gone(path.name, status.st_mtime):
                yield Stray(path, status.st_size)


def _writer_gone(name: str, modified: float) -> bool:
    parts = name.split("-")
    if len(parts) == 4 and all(part.isdigit() for part in parts[:3]) and int(parts[0]) == _pid_namespace():
        started = process_started(int(parts[1]))
        return started is None or int(started) != int(parts[2])
    return abs(time.time() - modified) > FOREIGN_AGE


def sync_folder(folder: Path) -> None:
    """Have the names in a folder survive a power cut."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
