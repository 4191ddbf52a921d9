"""Checks that the owner of a store can use its files, and names the command that restores access.

castore creates files that the owner can use (temporary.py). The owner may lack access to files that another
program has created, copied or restricted, or that root has created with an older castore. Without this check
the owner would learn of such files in the middle of other work.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from castore import layout
from castore.layout import Kind

# Only its creator may use a file in this folder, until the file is finished.
_UNFINISHED = "tmp/"


class Access(NamedTuple):
    """Files and folders of a store that were not accessible.

    Attributes:
        mended: paths relative to the store whose permission bits were corrected.
        user: the user whose access was checked: this process's user, or the owner of the store's folder if
            this process runs as root.
        barred: paths relative to the store that this user may not use. Entries inside such a folder are left
            out.
        owners: the users that own the barred paths.
    """

    mended: list[str]
    user: str
    barred: list[str]
    owners: list[str]


def repair_access(store: Path, *, folder_mode: int, file_mode: int, object_mode: int) -> Access:
    """Check every file and folder of a store, and correct the permission bits of those that this user owns.

    Args:
        store: folder of the store, in which this user may write.
        folder_mode: permission bits that folders must have at least.
        file_mode: permission bits that files castore writes to must have at least.
        object_mode: permission bits that other files must have at least.
    """
    user = os.geteuid() or os.stat(store).st_uid
    found = Access([], _user(user), [], [])
    owners = set()
    for entry, below, place in _own_files(store, ""):
        wanted = (
            folder_mode if place.kind is Kind.FOLDER else file_mode if place.is_written else object_mode
        ) & 0o777
        with suppress(FileNotFoundError):  # another process has just removed it
            status = entry.stat(follow_symlinks=False)
            if status.st_mode & wanted != wanted and _set_bits(entry.path, status, wanted):
                found.mended.append(below)
            if not _may_use(entry.path, status, store, wanted):
                found.barred.append(below)
                owners.add(status.st_uid)
    found.owners.extend(_user(owner) for owner in sorted(owners))
    return found


def chown_command(store: Path) -> str:
    """Return the command that gives all files of a store to the owner of its folder."""
    status = os.stat(store)
    return f"chown -R {_user(status.st_uid)}:{_group(status.st_gid)} {shlex.quote(os.fspath(store))}"


def _own_files(folder: Path, above: str) -> Iterator[tuple[os.DirEntry[str], str, layout.Place]]:
    """Yield castore's own files and folders. The caller may correct a folder's mode before its entries."""
    for entry in os.scandir(folder):
        below = above + entry.name
        place = layout.place_of(below)
        if place is None or below.startswith(_UNFINISHED):
            continue
        if place.kind is Kind.FILE and entry.is_file(follow_symlinks=False):
            yield entry, below, place
        elif place.kind is Kind.FOLDER and entry.is_dir(follow_symlinks=False):
            yield entry, below, place
            with suppress(PermissionError):  # the caller has reported the folder itself
                yield from _own_files(Path(entry.path), f"{below}/")


def _set_bits(path: str, status: os.stat_result, wanted: int) -> bool:
    if status.st_uid != os.geteuid():
        return False
    # O_NOFOLLOW: another user may have put a symbolic link there meanwhile.
    fd = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if not os.path.samestat(os.fstat(fd), status):
            return False
        os.chmod(f"/proc/self/fd/{fd}", status.st_mode & 0o7777 | wanted)
    finally:
        os.close(fd)
    return True


def _may_use(path: str, status: os.stat_result, store: Path, wanted: int) -> bool:
    if os.geteuid() == 0:  # root may use everything, so check for the store's owner
        owner = os.stat(store)
        is_shared = wanted & 0o070 and status.st_gid == owner.st_gid
        return status.st_uid == owner.st_uid or bool(
            is_shared and status.st_mode & wanted & 0o070 == wanted & 0o070
        )
    # The owner's bits of the mode: read, write, search.
    return os.access(path, wanted >> 6 & 0o7, effective_ids=True)


def _user(uid: int) -> str:
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _group(gid: int) -> str:
    import grp

    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)
