"""Puts files back in the place of their links: verified bytes from the store, without a mount.

A file is written whole under a temporary name, then exchanged with its link in one step. Only then the link's
record is removed.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from castore import Store
from castore.errors import CastoreError, FullError
from castore.records import Entry
from castore.system.temporary import give_to_owner
from castore.watch import link_registry, replace
from castore.watch.file_lease import FileBusyError
from castore.watch.folder import PART_PREFIX, WatchedFolder
from castore.watch.reports import Event, reason_of


def restore_all(
    store: Store, folder: WatchedFolder, report: Callable[[Event], object], progress: Callable[[int], object]
) -> None:
    """Put the files of a folder back in the place of their links. No watcher should run meanwhile."""

    def skip(error: OSError) -> None:
        report(Event("failed", str(error.filename), reason=reason_of(error)))

    def leftover(path: str) -> None:
        with suppress(FileBusyError, ValueError):
            replace.clean(store, folder, path)

    for path in folder.files(folder.root, skip, leftover):
        if not os.path.islink(path):
            continue
        name = folder.name(path)
        try:
            entry = link_registry.find_bound(store, folder.prefix, name, os.readlink(path))
            if entry is None:
                continue
            restore(store, path, entry, progress)
        except FullError:
            raise
        except FileBusyError:
            report(Event("failed", path, name, reason="it changed while it was restored"))
        except (CastoreError, OSError) as error:
            report(Event("failed", path, name, reason=reason_of(error)))
        else:
            report(Event("restored", path, name, entry.size))


def restore(store: Store, path: str, entry: Entry, check: Callable[[int], object]) -> None:
    """Put the file back in the place of its link: its bytes, verified, with its mtime and permission bits.

    Args:
        store: has the bytes; no mount is needed.
        path: of the link.
        entry: of the file.
        check: called with the bytes of each piece that is written. Its exceptions end everything.

    Raises:
        NotFoundError, CorruptError: the store does not have the right bytes; the link stays.
    """
    link = os.readlink(path)
    source = entry.metadata["source"]
    temporary = replace.temporary_beside(path, PART_PREFIX)
    try:
        _write(store, entry, temporary, check)
        os.chmod(temporary, source["mode"])
        modified = os.lstat(path).st_mtime_ns
        os.utime(temporary, ns=(modified, modified))
        replace.exchange(temporary, path)
        if not os.path.islink(temporary) or os.readlink(temporary) != link:
            replace.exchange(temporary, path)
            raise FileBusyError(path)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(temporary)
    if (
        entry.metadata["source"]["path"] == path
    ):  # else the link was renamed, and its old name may have one again
        link_registry.unbind_links(store, [entry])


def _write(store: Store, entry: Entry, path: str, check: Callable[[int], object]) -> None:
    with store.open_blob(entry.digest) as kept, open(path, "xb") as file:
        give_to_owner(file.fileno(), Path(path).parent)
        for piece in kept.pieces():
            file.write(piece)
            check(len(piece))
        file.flush()
        os.fsync(file.fileno())
