"""Finds the files that `castore add` takes, and gives each its name.

Links are followed; other file systems below a folder are not entered unless asked for. Nothing is left out
silently. ``skip`` gets the reason for each path that is not taken: a mount, a loop of links, a socket, a
folder that may not be read, the store itself. ``empty`` gets the path of each empty folder. Memory grows with
the depth and the width of one folder, not with the number of files.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from castore.cli.output import describe, printable
from castore.errors import InvalidNameError, InvalidValueError
from castore.names import check_name, check_prefix
from castore.settings import filesystem_of

Skip = Callable[[str], object]
# Links there lead to a process's open files, working folder and root: all over the disk.
_PROC = "proc"


class Source(NamedTuple):
    """A file and the name that its bytes get."""

    name: str
    path: str
    size: int


def destinations(paths: Sequence[str], prefix: str | None) -> dict[str, str]:
    """The name that each path gets: of the entry for a file, of the folder for a folder.

    Args:
        paths: files and folders.
        prefix: the user's `--as`; None names everything after itself.

    Raises:
        InvalidValueError: two paths would get one name, or a path has none to give.
    """
    into = check_prefix(prefix) if prefix is not None else ""
    named: dict[str, str] = {}
    for path in dict.fromkeys(paths):
        if not path:
            raise InvalidValueError("a PATH is empty; give a file or a folder (is a variable unset?)")
        if prefix is not None and len(paths) == 1 and (os.path.isdir(path) or not prefix.endswith("/")):
            name = into
            if not name and not os.path.isdir(path):
                raise InvalidValueError(f"--as is empty, and {printable(path)} is no folder; give it a name")
        else:
            name = f"{into}/{_own_name(path)}" if into else _own_name(path)
        if name in named:
            raise InvalidValueError(
                f"{printable(named[name])} and {printable(path)} would both be named {name!r};"
                " add them one by one, each with its own --as"
            )
        named[name] = path
    return {path: name for name, path in named.items()}


def _own_name(path: str) -> str:
    name = os.path.basename(os.path.abspath(path))
    if not name:
        raise InvalidValueError(f"{printable(path)} has no name; give one with --as")
    return name


def find(
    path: str,
    name: str,
    *,
    store: str,
    skip: Skip,
    empty: Skip = lambda path: None,
    cross_mounts: bool = False,
) -> Iterator[Source]:
    """The files at or below ``path``, each folder's in the order of their names.

    Args:
        path: a file or a folder.
        name: its new name; "" for a folder whose files go to the top.
        store: the store's folder, which is never taken into itself.
        skip: called with a sentence about each path that is not taken.
        empty: called with the path of each empty folder.
        cross_mounts: enter file systems that are mounted below ``path``, too.
    """
    if Path(os.path.realpath(path)).is_relative_to(os.path.realpath(store)):
        skip(f"{printable(path)} is the store itself, or lies in it; skipped")
        return
    store_identity = _identity(store)
    # Folders on the current path: a link to one of them is a loop.
    inside: list[tuple[int, int]] = []
    waiting: list[Iterator[tuple[str, str]]] = [iter([(path, name)])]
    while waiting:
        item = next(waiting[-1], None)
        if item is None:
            waiting.pop()
            if inside:
                inside.pop()
            continue
        found = _stat_path(*item, skip)
        if found is None:
            continue
        if not stat.S_ISDIR(found.st_mode):
            if _is_taken(*item, found, skip):
                yield Source(item[1], item[0], found.st_size)
            continue
        identity = found.st_dev, found.st_ino
        if identity == store_identity:
            skip(f"{printable(item[0])} is the store itself; skipped")
        elif identity in inside:
            skip(f"{printable(item[0])} links to a folder that it lies in; skipped")
        elif (
            inside and identity[0] != inside[-1][0] and (why := _reason_to_skip(item[0], store, cross_mounts))
        ):
            skip(f"{printable(item[0])} {why}; skipped")
        else:
            inside.append(identity)
            waiting.append(_children(*item, skip, empty))


def _reason_to_skip(path: str, store: str, cross_mounts: bool) -> str | None:
    """The reason not to enter a folder of another file system, or None."""
    if os.path.islink(path):  # the user made the link, and wants its target
        if filesystem_of(Path(os.path.dirname(path))) == _PROC:
            return "is a link of a process that leads out of /proc"
        return None
    from castore_fuse import mountpoints

    found = mountpoints.mount_at(Path(os.path.realpath(path)))
    if found is not None and found.store == os.path.realpath(store):
        return "is a mount of the store itself"
    return None if cross_mounts else "is on another file system, which --cross-mounts enters"


def _identity(path: str) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def _stat_path(path: str, name: str, skip: Skip) -> os.stat_result | None:
    try:
        return os.stat(path)
    except OSError as error:
        broken = isinstance(error, FileNotFoundError) and os.path.islink(path)
        skip(f"{printable(path)} links to nothing; skipped" if broken else f"{describe(error)}; skipped")
        return None


def _is_taken(path: str, name: str, found: os.stat_result, skip: Skip) -> bool:
    if not stat.S_ISREG(found.st_mode):
        skip(f"{printable(path)} is neither a file nor a folder; skipped")
        return False
    try:
        check_name(name)
    except InvalidNameError as error:
        skip(f"{printable(path)}: {error}; skipped")
        return False
    return True


def _children(path: str, name: str, skip: Skip, empty: Skip) -> Iterator[tuple[str, str]]:
    try:
        below = sorted(os.listdir(path))
    except OSError as error:
        skip(f"{describe(error)}; skipped")
        return iter(())
    if not below:
        empty(path)
    return ((os.path.join(path, one), f"{name}/{one}" if name else one) for one in below)
