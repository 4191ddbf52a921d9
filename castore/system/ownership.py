"""Whether a store's files can be used by whom the store belongs to, and what gives them back if not.

castore makes files that can (temporary.py). What another program has made, copied or closed, or root before castore took
care of that, may be closed to the owner, who would hear of it in the middle of something else.
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

# Its files are their makers' alone until they are done.
_UNFINISHED = "tmp/"


class Access(NamedTuple):
    """What of a store could not be used.

    Attributes:
        mended: paths below the store whose permission bits have been put right.
        user: whose access is in question: this user, or the owner of the store's folder if this is root.
        barred: paths below the store that this user may not use; what lies in such a folder is left out.
        owners: whom those belong to.
    """

    mended: list[str]
    user: str
    barred: list[str]
    owners: list[str]


def look_over(store: Path, *, folder_mode: int, file_mode: int, object_mode: int) -> Access:
    """Look at every file and folder of a store, and put right the permission bits of those that are this user's own.

    Args:
        store: its folder, in which this user may write.
        folder_mode, file_mode, object_mode: the permission bits that folders, files that are written to, and others have
            at least.
    """
    user = os.geteuid() or os.stat(store).st_uid
    found = Access([], _user(user), [], [])
    owners = set()
    for entry, below, place in _ours(store, ""):
        wanted = (
            folder_mode if place.kind is Kind.FOLDER else file_mode if place.is_written else object_mode
        ) & 0o777
        with suppress(FileNotFoundError):  # whose it was has just removed it
            status = entry.stat(follow_symlinks=False)
            if status.st_mode & wanted != wanted and _set_bits(entry.path, status, wanted):
                found.mended.append(below)
            if not _may_use(entry.path, status, store, wanted):
                found.barred.append(below)
                owners.add(status.st_uid)
    found.owners.extend(_user(owner) for owner in sorted(owners))
    return found


def gives_back(store: Path) -> str:
    """The command that gives all of a store to whom its folder belongs."""
    status = os.stat(store)
    return f"chown -R {_user(status.st_uid)}:{_group(status.st_gid)} {shlex.quote(os.fspath(store))}"


def _ours(folder: Path, above: str) -> Iterator[tuple[os.DirEntry[str], str, layout.Place]]:
    """What castore has made; a folder comes before what is in it, and its bits may change in between."""
    for entry in os.scandir(folder):
        below = above + entry.name
        place = layout.place_of(below)
        if place is None or below.startswith(_UNFINISHED):
            continue
        if place.kind is Kind.FILE and entry.is_file(follow_symlinks=False):
            yield entry, below, place
        elif place.kind is Kind.FOLDER and entry.is_dir(follow_symlinks=False):
            yield entry, below, place
            with suppress(PermissionError):  # the folder itself has been told of
                yield from _ours(Path(entry.path), f"{below}/")


def _set_bits(path: str, status: os.stat_result, wanted: int) -> bool:
    if status.st_uid != os.geteuid():
        return False
    fd = os.open(
        path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
    )  # no link that others have put there meanwhile
    try:
        if not os.path.samestat(os.fstat(fd), status):
            return False
        os.chmod(f"/proc/self/fd/{fd}", status.st_mode & 0o7777 | wanted)
    finally:
        os.close(fd)
    return True


def _may_use(path: str, status: os.stat_result, store: Path, wanted: int) -> bool:
    if os.geteuid() == 0:  # who may use everything
        owner = os.stat(store)
        is_shared = wanted & 0o070 and status.st_gid == owner.st_gid
        return status.st_uid == owner.st_uid or bool(
            is_shared and status.st_mode & wanted & 0o070 == wanted & 0o070
        )
    # Bits of a user: read, write, enter.
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
