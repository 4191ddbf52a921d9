"""What has no business in a store's folders: links, pipes, devices and folders where files belong.

Castore makes none of these, and opens none (temporary.py). Here they are moved to ``quarantine/`` as they are: nothing is
followed, read or removed.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

from castore.clearance import is_socket_of_a_mount
from castore.settings import FOLDERS

_OBJECTS = re.compile("[0-9a-f]{2}")


def set_aside(path: Path) -> list[str]:
    """Move what does not belong out of the way; returns what was moved, as paths below the store.

    The caller has seen that the folders of `settings.FOLDERS` are the store's own.
    """
    moved = []
    for place in _misplaced(path):
        kept = path / "quarantine" / f"{place.name}-{time.time_ns()}"
        place.rename(kept)
        moved.append(os.fspath(place.relative_to(path)))
    return moved


def _misplaced(path: Path) -> Iterator[Path]:
    for folder in (path, *(path / name for name in FOLDERS if name != "quarantine")):
        own = {os.path.basename(name) for name in FOLDERS if (path / name).parent == folder}
        for entry in os.scandir(folder):
            if entry.name in own:
                continue
            if (
                folder.name == "objects"
                and _OBJECTS.fullmatch(entry.name)
                and entry.is_dir(follow_symlinks=False)
            ):
                yield from (
                    Path(inner.path)
                    for inner in os.scandir(entry)
                    if not inner.is_file(follow_symlinks=False)
                )
            elif folder.name == "locks" and is_socket_of_a_mount(entry.name):
                continue
            elif folder.name == "objects" or not entry.is_file(follow_symlinks=False):
                yield Path(entry.path)
