"""Sets aside foreign objects in a store's folders: links, pipes, devices and folders in the place of files.

castore makes none of these, and opens none (temporary.py). An object in the place of a file of castore's, or
among its files, is moved to ``quarantine/`` as it is: links are not followed, nothing is read or removed. An
object that is in nobody's way stays where it is and is reported: somebody may use it. A store stays too, and
so does a folder that a live process works in.

The list in layout.py, and nothing else, decides what belongs.
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


class MisplacedFiles(NamedTuple):
    """Paths, relative to the store, that castore has not made.

    Attributes:
        moved: those that are in quarantine now.
        stores: folders that are stores, or have one inside. They are left alone.
        left: those that are in nobody's way, or in use.
    """

    moved: list[str]
    stores: list[str]
    left: list[str]


def set_aside(path: Path) -> MisplacedFiles:
    """Move foreign objects that are in the way to quarantine, and return all foreign objects.

    The caller has checked that the folders of `layout.FOLDERS` are the store's own.
    """
    found = MisplacedFiles([], [], [])
    for entry, below in _find_misplaced(path, ""):
        if entry.is_dir(follow_symlinks=False) and _has_store(entry.path):
            found.stores.append(below)
        elif _is_in_the_way(entry, below) and _move(path, entry):
            found.moved.append(below)
        elif os.path.lexists(entry.path):
            found.left.append(below)
    return found


def _find_misplaced(folder: Path, above: str) -> Iterator[tuple[os.DirEntry[str], str]]:
    for entry in os.scandir(folder):
        below = above + entry.name
        place = layout.place_of(below)
        if place is None:
            # A foreign file does no harm, except in `objects`, which has folders only.
            if above == "objects/" or not entry.is_file(follow_symlinks=False):
                yield entry, below
        elif place.kind is Kind.FOLDER and entry.is_dir(follow_symlinks=False):
            yield from _find_misplaced(Path(entry.path), f"{below}/")
        elif not _is_of_kind(entry, place.kind):
            yield entry, below


def _is_of_kind(entry: os.DirEntry[str], kind: Kind) -> bool:
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
        return False  # no file of castore's has that name
    return not entry.is_dir(follow_symlinks=False) or not _is_used(entry.path)


def _has_store(folder: str) -> bool:
    return any(layout.SETTINGS in files for _, _, files in os.walk(folder))


def _is_used(folder: str) -> bool:
    """Whether the folder is visibly in use: it is a mount, or has something named after a live process."""
    return os.path.ismount(folder) or any(
        is_of_live_process(name) for _, folders, files in os.walk(folder) for name in (*folders, *files)
    )


def _move(path: Path, entry: os.DirEntry[str]) -> bool:
    try:
        os.rename(entry.path, path / "quarantine" / f"{entry.name}-{time.time_ns()}")
    except FileNotFoundError:
        return False  # its maker has just finished
    return True
