"""Puts files back in the place of their links: verified bytes from the store, without a mount.

A file is written whole under a temporary name, then exchanged with its link in one step. Only then the link's
records are removed. Links under temporary names are put back, too.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from castore import Store
from castore.errors import CastoreError, FullError, InvalidNameError
from castore.records import Entry
from castore.system.temporary import give_to_owner
from castore.watch import link_registry, replace
from castore.watch.file_lease import FileBusyError
from castore.watch.folder import PART_PREFIX, WatchedFolder
from castore.watch.link_census import LinkCensus
from castore.watch.reports import Event, reason_of


def restore_all(
    store: Store, folder: WatchedFolder, report: Callable[[Event], object], progress: Callable[[int], object]
) -> None:
    """Put the files of a folder back in the place of their links. No watcher should run meanwhile."""

    def skip(error: OSError) -> None:
        report(Event("failed", str(error.filename), reason=reason_of(error)))

    def leftover(path: str) -> None:
        with suppress(FileBusyError):
            replace.clean(store, path)

    for _ in folder.files(folder.root, skip, leftover):
        continue
    restored: set[str] = set()
    for path in folder.links():
        name = folder.name(path)
        try:
            held = link_registry.find_held(store, os.readlink(path))
            if held is None:
                continue
            restore(store, path, held, progress)
            _unbind(store, name, path)
        except FullError:
            raise
        except FileBusyError:
            report(Event("failed", path, name, reason="it changed while it was restored"))
        except (CastoreError, OSError) as error:
            report(Event("failed", path, name, reason=reason_of(error)))
        else:
            restored.add(held.name)
            report(Event("restored", path, name, held.size))
    census = LinkCensus(store, folder)
    # Links that were removed just before the watcher ended, or restored by a restore that was killed.
    census.suspect_all()
    census.release_now(restored)


def _unbind(store: Store, name: str, path: str) -> None:
    """Take back the record of a link that is a file again, of an entry that is named after it."""
    try:
        entry = store.entry(name, expired=True)
    except InvalidNameError:  # a link was renamed to what can be no name
        return
    is_bound = entry is not None and link_registry.target_of(entry) is not None
    if entry is not None and is_bound and entry.metadata["source"]["path"] == path:
        link_registry.unbind_links(store, [entry])


def restore(store: Store, path: str, held: Entry, check: Callable[[int], object]) -> None:
    """Put the file back in the place of its link: its bytes, verified, with its mtime and permission bits.

    Args:
        store: has the bytes; no mount is needed.
        path: of the link.
        held: the entry that the link leads to.
        check: called with the bytes of each piece that is written. Its exceptions end everything.

    Raises:
        NotFoundError, CorruptError: the store does not have the right bytes; the link stays.
    """
    link = os.readlink(path)
    temporary = replace.temporary_beside(path, PART_PREFIX)
    written = None
    try:
        written = _write(store, held, temporary, os.lstat(path).st_mtime_ns, check)
        replace.exchange(temporary, path)
        # Somebody may have put another file in the place of either.
        if link_registry.link_at(temporary) != link or not os.path.samestat(os.lstat(path), written):
            replace.exchange(temporary, path)
            raise FileBusyError(path)
    finally:
        with suppress(FileNotFoundError):
            # If the exchange back failed, the name has the only copy of somebody's file.
            is_own = written is None or os.path.samestat(os.lstat(temporary), written)
            if is_own or link_registry.link_at(temporary) == link:
                os.unlink(temporary)


def _is_zero(piece: bytes) -> bool:
    """Whether all bytes are zeros."""
    return not piece[:16].strip(b"\0") and piece.count(0) == len(piece)


def _write(
    store: Store, held: Entry, path: str, modified: int, check: Callable[[int], object]
) -> os.stat_result:
    """Write the file; returns its status.

    All is done to the open file: somebody else may put a link in the place of the path.
    """
    owner = link_registry.owner_of(held)
    with store.open_blob(held.digest) as kept, open(path, "xb") as file:
        give_to_owner(file.fileno(), Path(path).parent)
        for piece in kept.pieces():
            if _is_zero(piece):  # a hole: a sparse file must not fill the disk when it comes back
                file.seek(len(piece), os.SEEK_CUR)
            else:
                file.write(piece)
            check(len(piece))
        file.truncate()
        file.flush()
        if not os.geteuid() and owner.uid >= 0:
            os.fchown(file.fileno(), owner.uid, owner.gid)
        # Nobody gets a set-user-ID file from here: the record may be another user's.
        os.fchmod(file.fileno(), owner.mode & 0o777)
        os.utime(file.fileno(), ns=(modified, modified))
        os.fsync(file.fileno())
        return os.fstat(file.fileno())
