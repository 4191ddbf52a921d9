"""Stores to damage, and the outcome of reading them: right bytes, an error, a miss, or (never) other bytes.

Random choices come from a seed that a failing test prints. Nothing here decides which outcome is right.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from castore import CastoreError, Store
from castore.objects.codecs import FRAME_SIZE
from castore.records import HEAD_SIZE
from castore_fuse import mountpoints
from tests.helpers import mixed, noise, payload, text

CODECS = ("zstd", "lz4", "gzip", "none")
#: Sizes of blobs: packed, of one frame, of several frames.
SMALL, SINGLE, SEVERAL = 3_000, 40_000, FRAME_SIZE + 40_000


class Stored(NamedTuple):
    """The place of an entry's bytes; for a packed one with the head of its record."""

    path: Path
    start: int
    end: int

    @property
    def length(self) -> int:
        """Length of that place in bytes."""
        return self.end - self.start


def fill(store: Store, count: int, *, several: int = 10) -> dict[str, bytes]:
    """Put ``count`` blobs of all codecs: two thirds into packs, each ``several``th with several frames."""
    values = {}
    for number in range(count):
        codec = CODECS[number % len(CODECS)]
        kind = number // len(CODECS)
        size = SEVERAL if kind % several == 0 else SINGLE if kind % 3 == 1 else SMALL
        make = (text, mixed, noise)[kind % 2] if codec != "none" else noise
        data = make(size + number, number)
        name = f"{codec}/{number:05d}"
        store.put(name, data, codec=codec)
        values[name] = data
    return values


def stored(store: Store, name: str) -> Stored:
    """The place of an entry's bytes."""
    path, offset, length = payload(store, name)
    head = HEAD_SIZE if path.suffix == ".pack" else 0
    return Stored(path, offset - head, offset + length)


def answer(read: Callable[[], bytes | None]) -> bytes | None:
    """The bytes that were read; None for a miss and for castore's own error."""
    try:
        return read()
    except CastoreError:
        return None


def ranges(store: Store, name: str, size: int) -> list[tuple[int, bytes]]:
    """The pieces of an entry that can be read by ranges, each with its offset."""
    found = []
    for start in range(0, size, FRAME_SIZE // 2):
        try:
            with store.open(name) as file:
                file.seek(start)
                found.append((start, file.read(FRAME_SIZE // 2)))
        except CastoreError:
            continue
    return found


def errno_of(read: Callable[[], object]) -> int | None:
    """The errno that a call on files ends with, or None."""
    try:
        read()
    except OSError as error:
        return error.errno
    return None


def files_below(folder: Path) -> dict[str, tuple[int, int, int]]:
    """Every file below a folder with mode, size and time of change, to detect changes outside of a store."""
    found = {}
    for here, folders, files in os.walk(folder):
        for name in folders + files:
            path = Path(here, name)
            status = path.lstat()
            found[os.fspath(path)] = status.st_mode, status.st_size, status.st_mtime_ns
    return found


@contextmanager
def shim(root: Path, *command: str | Path) -> Iterator[None]:
    """A file system that a Python program of the tests serves at ``root``, for the length of the block."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = subprocess.Popen([sys.executable, *command], env=environment)
    try:
        deadline = time.monotonic() + 240
        while mountpoints.mount_at(root) is None:
            assert time.monotonic() < deadline, "the shim did not mount"
            assert process.poll() is None, "the shim ended"
            time.sleep(0.02)
        yield
    finally:
        if mountpoints.mount_at(root):
            mountpoints.detach(root, lazy=True)
        process.terminate()
        process.wait(60)
