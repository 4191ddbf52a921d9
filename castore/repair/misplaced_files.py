"""What has no business in a store's folders: links, pipes, devices and folders where files belong.

Castore makes none of these, and opens none (temporary.py). What stands in the place of something of castore's, or among its
files, is moved to ``quarantine/`` as it is: nothing is followed, read or removed. What is in nobody's way stays where it is and
is told of: somebody may use it. So does a store, and so does what a live process works in.

What belongs is the list in contents.py, and nowhere else.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from castore import layout
from castore.layout import Kind
from castore.system.temporary import is_of_live_process


class Strangers(NamedTuple):
    """What was found that castore has not made; paths below the store.

    Attributes:
        moved: what is in quarantine now.
        stores: folders that are stores, or have one inside. They are left alone.
        left: what is in nobody's way, or used by somebody.
    """

    moved: list[str]
    stores: list[str]
    left: list[str]


def set_aside(path: Path) -> Strangers:
    """Move out of the way what is in it, and tell of the rest.

    The caller has seen that the folders of `contents.FOLDERS` are the store's own.
    """
    found = Strangers([], [], [])
    for entry, below in _strange(path, ""):
        if entry.is_dir(follow_symlinks=False) and _has_store(entry.path):
            found.stores.append(below)
        elif _is_in_the_way(entry, below) and _move(path, entry):
            found.moved.append(below)
        elif os.path.lexists(entry.path):
            found.left.append(below)
    return found


def _strange(folder: Path, above: str) -> Iterator[tuple[os.DirEntry[str], str]]:
    for entry in os.scandir(folder):
        below = above + entry.name
        place = layout.place_of(below)
        if place is None:
            # A file of any name hurts nobody; but `objects` has folders only.
            if above == "objects/" or not entry.is_file(follow_symlinks=False):
                yield entry, below
        elif place.kind is Kind.FOLDER and entry.is_dir(follow_symlinks=False):
            yield from _strange(Path(entry.path), f"{below}/")
        elif not _is(entry, place.kind):
            yield entry, below


def _is(entry: os.DirEntry[str], kind: Kind) -> bool:
    if kind is Kind.FILE:
        return entry.is_file(follow_symlinks=False)
    if kind is Kind.SOCKET:
        with suppress(FileNotFoundError):  # its mount has just ended
            return Path(entry.path).is_socket() and not entry.is_symlink()
        return True
    return entry.is_dir(follow_symlinks=False)


def _is_in_the_way(entry: os.DirEntry[str], below: str) -> bool:
    if layout.place_of(below) is not None:
        return True
    if "/" not in below:
        return False  # nothing of castore's is called so
    return not entry.is_dir(follow_symlinks=False) or not _is_used(entry.path)


def _has_store(folder: str) -> bool:
    return any(layout.SETTINGS in files for _, _, files in os.walk(folder))


def _is_used(folder: str) -> bool:
    """Whether somebody works there, by what can be seen: a mount, or what is named after a process that runs."""
    return os.path.ismount(folder) or any(
        is_of_live_process(name) for _, folders, files in os.walk(folder) for name in (*folders, *files)
    )


def _move(path: Path, entry: os.DirEntry[str]) -> bool:
    try:
        os.rename(entry.path, path / "quarantine" / f"{entry.name}-{time.time_ns()}")
    except FileNotFoundError:
        return False  # its maker has just finished
    return True
