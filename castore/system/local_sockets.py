"""Unix sockets in a store's folder, whatever the length of its path."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def address(path: Path) -> Iterator[str]:
    """A short address of the socket: its path may be longer than the 107 bytes that fit into an address."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
