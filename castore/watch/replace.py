"""Swaps files that are in the store for links into a mount. `restore` swaps them back.

The order of steps keeps the bytes safe. The entry is pinned and recorded as linked, and another one holds its
bytes for the link (link_registry.py). The digest of the file itself is compared. The object is synced to the
disk. The whole file is read back through the mount, and its digest compared. Only then a link, made under a
temporary name, is exchanged with the file in one atomic step (renameat2 with RENAME_EXCHANGE). The file that
came out is checked before it is unlinked: if it is not the very file that was verified, or an open(2) for
writing waits on its lease, or the entry is gone, both are exchanged back. After a kill at any moment, the
file's name has the file or the link, never neither and never a part.

Processes that have the old file open or mapped keep it until they close it.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import blake3

from castore import Store
from castore.errors import CastoreError, NotFoundError
from castore.records import LOOSE, Entry, Mount
from castore.system import exchange as swap
from castore.system.temporary import is_running, pid_namespace, process_started
from castore.watch import entry_sources, link_registry
from castore.watch.file_lease import (
    FileBusyError,
    NoLeaseError,
    Snapshot,
    is_same,
    is_writer_waiting,
    lease,
)
from castore.watch.folder import PART_PREFIX, SWAP_PREFIX, WatchedFolder

#: Seconds for which a mount may go on showing the old bytes of a name.
_MOUNT_SECONDS = 5.0
_PIECE = 1 << 20
# As `temporary_beside` makes them: namespace, PID, start and mark.
_OWN_NAME = re.compile(
    f"(?:{re.escape(SWAP_PREFIX)}|{re.escape(PART_PREFIX)})([0-9]+)-([0-9]+)-([0-9]+)-([0-9a-f]+)"
)


class KeptError(CastoreError):
    """A file stays as it is, for good; the message has the reason."""


class OtherBytesError(CastoreError):
    """A file has other bytes than its entry, of the same size and mtime. It must be put anew."""


Pair = tuple[Snapshot, Entry]
Done = Callable[[Snapshot, Entry, Exception | None], object]


def replace(
    store: Store,
    folder: WatchedFolder,
    mount: Mount,
    files: Sequence[Pair],
    check: Callable[[int], object],
    done: Done,
) -> None:
    """Replace files by links into a mount. Pass about a hundred files: each commit waits for the disk.

    Args:
        store: opened with ``durable=True``: a power cut must not take the bytes that the links lead to.
        folder: the watched folder that the files are in.
        mount: the links lead into it.
        files: snapshots of the files, and their entries; the caller closes the snapshots.
        check: called with the bytes of each piece that is read back. Its exceptions end everything.
        done: called for each file with None, or with the reason why it stays: `FileBusyError`,
            `KeptError` (it cannot be replaced), `OtherBytesError`, or another error.
    """
    ready = deque(_bind(store, folder, mount, [pair for pair in files if _is_replaceable(pair, done)], done))
    synced: set[Path] = set()
    stay: list[Entry] = []
    try:
        while ready:
            file, entry, binding = ready[0]
            error = _replace_one(store, file, entry, binding, synced, check)
            ready.popleft()
            if error is not None:
                stay.append(entry)
            done(file, entry, error)
    finally:
        if stay or ready:
            link_registry.unbind_links(store, stay + [entry for _, entry, _ in ready])


def _bind(
    store: Store, folder: WatchedFolder, mount: Mount, files: list[Pair], done: Done
) -> list[tuple[Snapshot, Entry, link_registry.Binding]]:
    bindings = []
    for file, entry in files:
        source = entry_sources.source_of(file.path, file.status)
        assert source is not None, "an entry's name is UTF-8, and so is its file's"
        modified = file.status.st_mtime_ns
        held = link_registry.held_name(entry.digest, modified, file.path)
        bindings.append(
            link_registry.Binding(
                entry, source, modified, _owner(file.status), held, link_registry.target_in(mount, held),
                mount.prefix, folder.as_root, file.status.st_ino,
            )
        )  # fmt: skip
    bound = []
    linked = link_registry.bind_links(store, bindings)
    for (file, entry), binding, now in zip(files, bindings, linked, strict=True):
        if now is None:
            done(file, entry, FileBusyError(file.path))  # gc removed it before it was pinned: put it again
        else:
            bound.append((file, now, binding))
    return bound


def _owner(status: os.stat_result) -> link_registry.Owner:
    return link_registry.Owner(status.st_uid, status.st_gid, stat.S_IMODE(status.st_mode))


def _replace_one(
    store: Store,
    file: Snapshot,
    entry: Entry,
    binding: link_registry.Binding,
    synced: set[Path],
    check: Callable[[int], object],
) -> Exception | None:
    try:
        if _digest_of(file.fd, check) != entry.digest:
            file.check()
            raise OtherBytesError(f"{file.path} has other bytes than {entry.name!r}")
        _sync(store, entry, synced)
        _verify(binding.link, entry, check)
        _swap(store, file, binding)
    except (FileBusyError, CastoreError, OSError) as error:
        return error
    return None


def _is_replaceable(pair: Pair, done: Done) -> bool:
    try:
        _require_replaceable(pair[0])
    except (FileBusyError, KeptError) as error:
        done(*pair, error)
        return False
    return True


def _is_lost(attribute: str) -> bool:
    # Copies of files in a mount may have castore's own attributes, which the mount shows for every file.
    own = attribute.startswith("user.castore.")
    return attribute.startswith(("user.", "system.posix_acl")) and not own


def _require_replaceable(file: Snapshot) -> None:
    if file.status.st_nlink > 1:
        raise KeptError("it has other hard links, which would go on taking its space")
    if file.status.st_mode & 0o7000:
        raise KeptError("it has a set-user-ID, set-group-ID or sticky bit, which would be lost")
    with suppress(OSError):  # a file system without them
        kept = [name for name in os.listxattr(file.fd) if _is_lost(name)]
        if kept:
            raise KeptError(f"it has an extended attribute ({kept[0]}), which would be lost")
    try:
        with lease(file.fd):
            pass
    except NoLeaseError as error:
        raise KeptError(
            f"without leases castore cannot tell whether it is being written ({error})"
        ) from error


def _sync(store: Store, entry: Entry, synced: set[Path]) -> None:
    """Sync the object to the disk: another process may have put it. The index is durable already."""
    blob = store.blob(entry.digest)
    try:
        blob = None if blob is None else store.bring(blob)
    except CastoreError as error:
        raise FileBusyError(entry.name) from error  # its bytes are in a remote, and cannot be had now
    if blob is None or not blob.is_here:
        raise FileBusyError(entry.name)
    path = Path(store.path_of(blob))
    for one in {path, path.parent} - synced:
        try:
            fd = os.open(one, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise FileBusyError(entry.name) from error  # it was moved to another pack just now
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    # A folder of loose objects is synced again for each object, since it gets new names all the time.
    synced |= {path} if blob.pack == LOOSE else {path, path.parent}


def _verify(link: str, entry: Entry, check: Callable[[int], object]) -> None:
    deadline = time.monotonic() + _MOUNT_SECONDS
    while True:
        try:
            if _digest(link, check) == entry.digest:
                return
            problem = "it shows other bytes"
        except OSError as error:
            problem = error.strerror or str(error)
        if time.monotonic() > deadline:
            raise KeptError(f"it could not be read back through the mount, at {link}: {problem}")
        time.sleep(0.1)


def _digest(path: str, check: Callable[[int], object]) -> str:
    with open(path, "rb", buffering=0) as file:
        return _digest_of(file.fileno(), check)


def _digest_of(fd: int, check: Callable[[int], object]) -> str:
    hasher, at = blake3.blake3(), 0
    while piece := os.pread(fd, _PIECE, at):
        hasher.update(piece)
        at += len(piece)
        check(len(piece))
    return hasher.hexdigest()


def _swap(store: Store, file: Snapshot, binding: link_registry.Binding) -> None:
    temporary = temporary_beside(file.path, SWAP_PREFIX)
    os.symlink(binding.link, temporary)
    is_kept = False  # whether the file's bytes are in the store, and the link is in its place
    try:
        # Tools read the mtime of the link or of its target: both are the file's.
        times = (file.status.st_atime_ns, file.status.st_mtime_ns)
        os.utime(temporary, ns=times, follow_symlinks=False)
        file.check()
        exchange(temporary, file.path)
        try:
            # Take the lease only after the exchange: a process that looked up the old name to write has the
            # file open by now, or waits on the lease. Accepted race: the kernel may delay a process, between
            # the lookup and the open, for longer than these lines take. That process writes to an unlinked
            # file, as it would had `rm` been a moment faster.
            with lease(file.fd):
                if not is_same(os.lstat(temporary), file.status) or is_writer_waiting(file.fd):
                    raise FileBusyError(file.path)
                # Another watcher may have unpinned the entry before the link was there.
                if not link_registry.confirm_link(store, binding):
                    raise FileBusyError(file.path)
                is_kept = True
        except BaseException:
            is_kept = False
            exchange(temporary, file.path)
            raise
    except NoLeaseError as error:
        raise FileBusyError(file.path) from error
    finally:
        # If the exchange back failed, the name has the only copy of somebody's file: `clean` sees to it.
        if is_kept or _target_of(temporary) == binding.link:
            with suppress(FileNotFoundError):
                os.unlink(temporary)


def exchange(one: str, other: str) -> None:
    """Exchange the files of two names in one step.

    Raises:
        BusyError: one of them is gone.
        KeptError: the file system does not support it.
    """
    try:
        swap.exchange(one, other)
    except FileNotFoundError as error:
        raise FileBusyError(other) from error
    except OSError as error:
        if error.errno in swap.UNSUPPORTED:
            raise KeptError("this file system cannot exchange two files in one step") from error
        raise


def relink(path: str, old: str, new: str) -> None:
    """Change the target of a watcher's link.

    Raises:
        BusyError: the path is no longer that link.
    """
    temporary = temporary_beside(path, SWAP_PREFIX)
    before = os.lstat(path)
    os.symlink(new, temporary)
    try:
        os.utime(temporary, ns=(before.st_atime_ns, before.st_mtime_ns), follow_symlinks=False)
        exchange(temporary, path)
        if _target_of(temporary) != old:
            exchange(temporary, path)
            raise FileBusyError(path)
    finally:
        # If the exchange back failed, the name has the only copy of somebody's file.
        if _target_of(temporary) in (old, new):
            os.unlink(temporary)


def _target_of(path: str) -> str | None:
    """The target of a symbolic link; None for anything else, and for nothing."""
    try:
        return os.readlink(path)
    except OSError:
        return None


def temporary_beside(path: str, kind: str) -> str:
    """A temporary name in the same folder; it has the process's identity and a mark of the file's name."""
    folder, name = os.path.split(path)
    process = f"{pid_namespace()}-{os.getpid()}-{process_started(os.getpid()) or 0}"
    return os.path.join(folder, f"{kind}{process}-{_mark(name)}")


def _mark(name: str) -> str:
    return hashlib.sha256(os.fsencode(name)).hexdigest()[:16]


def _is_replaced(held: Entry, found: os.stat_result) -> bool:
    """Whether a file is the one that the link of a held entry took the place of."""
    owner = link_registry.owner_of(held)
    return (link_registry.inode_of(held), owner.uid) == (found.st_ino, found.st_uid)


def clean(store: Store, leftover: str) -> None:
    """Clean up a temporary file of a killed process. Leaves files of live processes, and of others, alone.

    A process killed right after the exchange left the file under the temporary name, and the link under the
    file's name. Usually the file's bytes are in the store. If not (somebody wrote to it at that moment), both
    are exchanged back.
    """
    place, name = os.path.split(leftover)
    process = _OWN_NAME.fullmatch(name)
    if process is None:
        return
    namespace, pid, started, mark = process.groups()
    if int(namespace) == pid_namespace() and is_running(int(pid), int(started)):
        return
    try:
        found = os.lstat(leftover)
    except FileNotFoundError:
        return  # another watcher has just cleaned it up
    if name.startswith(SWAP_PREFIX) and not stat.S_ISLNK(found.st_mode):
        owner = next((one for one in os.listdir(place) if _mark(one) == mark), None)
        path = None if owner is None else os.path.join(place, owner)
        link = None if path is None else link_registry.link_at(path)
        try:
            held = None if link is None else link_registry.find_held(store, link)
        except NotFoundError:
            return  # the file may be the last copy
        # Other users who may write to the folder can give a file of theirs such a name. The inode number
        # alone proves nothing either: the file system gives it to a new file once the old one is gone.
        is_file = stat.S_ISREG(found.st_mode)
        if path is None or held is None or not is_file or not _is_replaced(held, found):
            return
        if entry_sources.digest_of(leftover) != held.digest:
            exchange(leftover, path)
            if not os.path.islink(leftover):
                return
    elif not stat.S_ISLNK(found.st_mode) and not stat.S_ISREG(found.st_mode):
        return
    with suppress(FileNotFoundError):
        os.unlink(leftover)
