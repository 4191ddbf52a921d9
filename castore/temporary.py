"""Files that are on their way: names that tell who makes them, so that what the dead left can be told from the rest.

Also the two questions that go with them: whether a process still runs, and how a new file gets its permission bits
whatever the umask says.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

#: A file, or a mount, of another PID namespace (a container's, say) counts as left behind after this many seconds
#: without a sign of life: its processes cannot be looked up from here.
FOREIGN_AGE = 3600.0


@lru_cache(maxsize=1)
def pid_namespace() -> int:
    """What tells this process's PIDs from those of other containers."""
    return os.stat("/proc/self/ns/pid").st_ino


def process_started(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot, or None if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def create_temporary(folder: Path) -> tuple[int, Path]:
    """A new file in ``folder``, open for writing, whose name tells who makes it."""
    # The UUID keeps two threads, or two processes that got the same PID in turn, from meeting.
    started = process_started(os.getpid()) or 0
    path = folder / f"{pid_namespace()}-{os.getpid()}-{started}-{uuid.uuid4().hex}.part"
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), path


class Stray(NamedTuple):
    """A file that no living writer accounts for."""

    path: Path
    size: int


def left_behind(folder: Path) -> Iterator[Stray]:
    """Temporary files in ``folder`` whose writer is gone."""
    for path in folder.iterdir():
        try:
            status = path.stat()
        except FileNotFoundError:
            continue  # its writer just finished
        if _writer_gone(path.name, status.st_mtime):
            yield Stray(path, status.st_size)


def _writer_gone(name: str, modified: float) -> bool:
    parts = name.split("-")
    if len(parts) == 4 and all(part.isdigit() for part in parts[:3]) and int(parts[0]) == pid_namespace():
        return process_started(int(parts[1])) != int(parts[2])
    return abs(time.time() - modified) > FOREIGN_AGE


def open_with_mode(path: Path, flags: int, mode: int) -> int:
    """`os.open` that gives a file it makes exactly ``mode``: a shared store must not depend on anybody's umask."""
    fd = os.open(path, flags | os.O_CREAT | os.O_CLOEXEC, mode)
    status = os.fstat(fd)
    if status.st_mode & 0o777 != mode and status.st_uid == os.geteuid():
        os.fchmod(fd, mode)
    return fd


def sync_folder(folder: Path) -> None:
    """Have the names in a folder survive a power cut."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
