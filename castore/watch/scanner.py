"""Scans one path: compares the file with its entry in the store, and brings the entry up to date.

A scan depends only on the path's present state, so a path may be scanned any number of times. A path that
cannot be handled now (somebody writes to it, or it was touched a moment ago) is scheduled for a later scan.
An error of a single file is reported, and the other files are still scanned. An error of the store itself (a
full disk) is raised.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress

from castore.errors import CastoreError, FullError, NameConflictError, StoreError
from castore.names import check_name
from castore.records import Entry, Mount
from castore.watch import link_registry, replace
from castore.watch.adder import Added, Adder, is_current
from castore.watch.file_lease import FileBusyError, Snapshot
from castore.watch.find_mount import NoMountError, answers, find_mount
from castore.watch.folder import PART_PREFIX, SWAP_PREFIX
from castore.watch.reports import Event, reason_of
from castore.watch.task import Task

#: Least seconds until a file that somebody writes to is scanned again, if the settling time is less.
_BUSY_SECONDS = 0.1
#: Files that are replaced at a time, each open meanwhile, and links that are recorded in one transaction.
_BATCH_FILES = 100


class Stopped(Exception):
    """The watcher was asked to end."""


class Stop:
    """Whether to stop. Safe to set in a signal handler.

    `threading.Event` is not safe there: its lock is not re-entrant. A handler that runs while the same thread
    is about to wait would deadlock.
    """

    def __init__(self) -> None:
        self._set = False

    def set(self) -> None:
        """Ask to stop."""
        self._set = True

    def is_set(self) -> bool:
        """Whether `set` was called."""
        return self._set


class Scanner:
    """Scans paths of one folder.

    Args:
        task: the folder and the options.
        schedule: called with a path that has to be scanned again, and the seconds until then.
        stop: once it is set, the running method raises `Stopped`.

    Attributes:
        touched: files that were changed or removed since the set was last emptied.
        let_go: names of held entries whose links may be gone, collected since then.
        parked: held entries whose links have temporary names or are on other file systems, by their paths.
        waits_for_mount: whether files are not replaced because the mount is gone.

    Raises:
        NoMountError: files are to be replaced, and there is no live mount that shows the names.
    """

    def __init__(self, task: Task, schedule: Callable[[str, float], object], stop: Stop) -> None:
        self._store, self._folder, self._options, self._report, self._progress = task
        self._schedule = schedule
        self._stop = stop
        self._progressed = 0
        self._conflicts: list[str] | None = []
        self._to_replace: list[tuple[str, Entry]] = []
        # Links whose records are not written yet: path, target, the entry of that name before, the record.
        self._to_bind: list[tuple[str, str, Entry | None, link_registry.Binding]] = []
        # Files whose bytes have changed though size and mtime have not.
        self._to_put: list[tuple[str, Entry]] = []
        #: The names of files with several, by device and number.
        self._hard_links: dict[tuple[int, int], set[str]] = {}
        self.touched: set[str] = set()
        self.let_go: set[str] = set()
        self.parked: dict[str, str] = {}
        self.waits_for_mount = False
        replaces = self._options.replace
        if replaces:
            self._folder.mark()
        self._mount: Mount | None = find_mount(self._store, self._folder.prefix) if replaces else None
        self._adder = Adder(self._store, self._options.codec, self._on_added, self._on_failed, self._on_piece)

    @property
    def _busy_seconds(self) -> float:
        return max(self._options.settle, _BUSY_SECONDS)

    def scan_folder(self, folder: str) -> None:
        """Scan every file below a folder."""

        def skip(error: OSError) -> None:
            self._on_failed(str(error.filename), error)

        def leftover(path: str) -> None:
            with suppress(FileBusyError):
                replace.clean(self._store, path)

        for path in self._folder.files(folder, skip, leftover):
            self.scan(path)
        self.flush()

    def scan(self, path: str) -> None:
        """Scan a path: bring the entry of a file or a link up to date. The next `flush` names the entry."""
        if self._stop.is_set():
            raise Stopped
        self._progressed = 0
        try:
            found = os.lstat(path)
            if not self._folder.is_real(path):
                self.scan_missing(self._store.entries(self._folder.name(path)))
            elif not self._folder.is_followed(path):
                self._scan_parked(path)
            elif stat.S_ISLNK(found.st_mode):
                self._scan_link(path)
            elif stat.S_ISREG(found.st_mode):
                self._scan_file(path, found)
            self._progress(max(0, found.st_size - self._progressed))
        except (FullError, StoreError):
            raise
        except (CastoreError, OSError, FileBusyError) as error:
            self._on_error(path, error)

    def _scan_file(self, path: str, found: os.stat_result) -> None:
        name = self._folder.name(path)
        if self._is_unsettled(path, found):
            return
        if self._adder.is_staged(name):  # a new folder was listed, and the kernel told of its file as well
            self._adder.flush()
        entry = self._store.entry(name)
        others = self._other_names(path, found)
        if not is_current(self._store, entry, path, found.st_size, found.st_mtime_ns):
            self._adder.add(name, path, entry)
            for other in others:
                self._schedule(other, 0)
        elif self._options.replace:
            assert entry is not None, "what is current has an entry"
            self._replace_soon(path, entry)
        elif entry is not None and link_registry.target_of(entry) is not None:
            link_registry.unbind_links(self._store, [entry])  # a tool has replaced the link by a file
            self._note_let_go(entry)

    def _other_names(self, path: str, found: os.stat_result) -> set[str]:
        """The other names of a file in the folder, as far as they were scanned: the kernel tells of a change
        for the name alone through which it was made.
        """
        if found.st_nlink == 1:
            return set()
        names = self._hard_links.setdefault((found.st_dev, found.st_ino), set())
        names.add(path)
        return names - {path}

    def _is_unsettled(self, path: str, found: os.stat_result) -> bool:
        """Whether a file was changed a moment ago; if so, it is scheduled for a later scan."""
        # The ctime counts too: a tool may set permissions after a rename, and is not done before that.
        unchanged_for = time.time() - max(found.st_mtime, found.st_ctime)
        if not 0 <= unchanged_for < self._options.settle:
            return False
        self._schedule(path, self._options.settle - unchanged_for)
        return True

    def scan_parked(self) -> None:
        """Scan all links under temporary names, and on other file systems."""
        for path in [path for path in self.parked if not os.path.islink(path)]:
            self.note_unparked(path)
        for path in self._folder.links():
            try:
                is_parked = not self._folder.is_followed(path)
            except OSError:
                continue  # it has just gone, and an event tells of it
            if is_parked:
                self.scan(path)

    def _scan_parked(self, path: str) -> None:
        """Scan what has no name in the store: a link there that stands for a file goes on to do so."""
        self.note_unparked(path)
        link = link_registry.link_at(path)
        held = None if link is None else link_registry.find_held(self._store, link)
        if link is None or held is None or os.path.basename(path).startswith((PART_PREFIX, SWAP_PREFIX)):
            return
        self.parked[path] = held.name
        if link_registry.path_of(held) != path and not link_registry.is_led(held):
            link_registry.hold_at(self._store, [(held, path)], self._folder)
        wanted = self._target(link, held)
        if link != wanted:
            replace.relink(path, link, wanted)

    def note_unparked(self, path: str) -> None:
        """Have the link looked for that was last seen at a path, under a temporary name."""
        held = self.parked.pop(path, None)
        if held is not None:
            self.let_go.add(held)

    def _target(self, link: str, held: Entry) -> str:
        """The right target of a link: it stays if no mount answers."""
        is_there = self._mount is not None and answers(self._mount)
        return link_registry.target_in(self._mount, held.name) if self._mount and is_there else link

    def _scan_link(self, path: str) -> None:
        name, link = self._folder.name(path), os.readlink(path)
        held = link_registry.find_held(self._store, link)
        if held is not None:
            self._scan_own_link(path, name, link, held)
            return
        target = os.path.realpath(path)
        if not self._folder.has(target):
            self._scan_copied_link(path, name, link)
            return
        try:
            found = os.stat(target)
        except OSError:
            return  # the target is missing, or the link is part of a loop
        if (
            self._folder.is_relevant(target)
            and stat.S_ISREG(found.st_mode)
            and not self._is_unsettled(path, found)
        ):
            before = self._store.entry(name)
            if not is_current(self._store, before, target, found.st_size, found.st_mtime_ns):
                self._adder.add(name, target, before, through=path)

    def _scan_copied_link(self, path: str, name: str, link: str) -> None:
        """Scan a link that leads to another link in the folder, which leads into a mount.

        Any other link that leads outside the folder is ignored.
        """
        folder, last = os.path.split(os.path.join(os.path.dirname(path), link))
        target = os.path.join(os.path.realpath(folder), last)
        if not self._folder.has(target) or not os.path.islink(target):
            return  # files outside the folder are not added
        entry = link_registry.find_held(self._store, os.readlink(target))
        before = self._store.entry(name)
        if entry is not None and (before is None or before.digest != entry.digest):
            source = {
                "path": target,
                "size": entry.size,
                "mtime_ns": os.lstat(target).st_mtime_ns,
                "through": path,
            }
            link_registry.copy(self._store, entry, name, source)
            self._report(Event("added" if before is None else "changed", path, name, entry.size))

    def _scan_own_link(self, path: str, name: str, link: str, held: Entry) -> None:
        """Scan a link that stands for a file: the entry named after it must have its bytes, and the mount
        that it leads into must be there.
        """
        modified = link_registry.modified_of(held.name)
        if any(binding.held == held.name for *_, binding in self._to_bind):  # another link to the same bytes
            self._bind()
            held = link_registry.held_entry(self._store, held.name) or held
        if link_registry.path_of(held) != path and link_registry.is_led(held):  # a link that was copied
            held = held._replace(name=link_registry.held_name(held.digest, modified, path))
        wanted = self._target(link, held)
        before = self._store.entry(name, expired=True)
        if before is not None and before.digest == held.digest and before.pinned:
            source = before.metadata.get("source")
            is_held = link_registry.path_of(held) == path  # not once somebody has let go of it
            found = (source.get("link"), source.get("path")) if isinstance(source, dict) else None
            if is_held and found == (wanted, path):
                if link != wanted:  # a killed watcher had noted the new target
                    replace.relink(path, link, wanted)
                return
        source = {"path": path, "size": held.size, "mtime_ns": os.lstat(path).st_mtime_ns}
        prefix = (
            link_registry.prefix_of(held) if self._mount is None or wanted == link else self._mount.prefix
        )
        # Record the target before the link is redirected: a link leads to these bytes either way.
        binding = link_registry.Binding(
            held._replace(name=check_name(name), metadata={}), source, modified, link_registry.owner_of(held),
            held.name, wanted, prefix, self._folder.root_of(path),
        )  # fmt: skip
        self._to_bind.append((path, link, before, binding))
        if len(self._to_bind) >= _BATCH_FILES:
            self._bind()

    def _bind(self) -> None:
        """Record the links that were scanned, and redirect those that lead elsewhere."""
        found, self._to_bind = self._to_bind, []
        if not found:
            return
        try:
            bound = link_registry.bind_links(self._store, [binding for *_, binding in found])
        except (FullError, StoreError):
            raise
        except CastoreError as error:
            if len(found) == 1:
                self._on_error(found[0][0], error)
                return
            for one in found:  # only one of them is at fault
                self._to_bind = [one]
                self._bind()
            return
        for (path, link, before, binding), entry in zip(found, bound, strict=True):
            try:
                if entry is None:
                    name = binding.entry.name
                    raise CastoreError(
                        f"the bytes of {name!r} are not in the store any more; the link leads to nothing"
                    )
                self._note_let_go(before)
                if link != binding.link:
                    replace.relink(path, link, binding.link)
                self._report(Event("relinked", path, entry.name, entry.size))
            except (CastoreError, OSError, FileBusyError) as error:
                self._on_error(path, error)

    def _note_let_go(self, entry: Entry | None) -> None:
        """Have the link looked for that stood for the file of an entry until now."""
        link = None if entry is None else link_registry.target_of(entry)
        held = None if link is None else link_registry.held_of(link)
        if held is not None:
            self.let_go.add(held)

    def flush(self) -> None:
        """Name the entries of all files that were scanned, and replace those files by links if wanted."""
        self._bind()
        self._adder.flush()
        self._replace()

    def scan_missing(self, entries: Iterable[Entry]) -> None:
        """Drop entries whose file is gone, with ``mirror``; without it, unpin those that had a link."""
        for entry in entries:
            if self._stop.is_set():
                raise Stopped
            source = entry.metadata.get("source")
            if not isinstance(source, dict) or not self._folder.has(str(source.get("path"))):
                continue
            path = str(source.get("through", source["path"]))
            if not self._is_gone(path) or not self._folder.exists():
                continue
            self.touched.add(path)
            self._note_let_go(entry)
            if self._options.mirror:
                if self._store.delete_unchanged(entry):
                    self._report(Event("dropped", path, entry.name, entry.size))
            elif link_registry.target_of(entry) is not None:
                link_registry.unbind_links(self._store, [entry])
                self._report(Event("unpinned", path, entry.name, entry.size))

    def _on_added(self, added: Added) -> None:
        path, entry, before = added
        if before is None or before.digest != entry.digest:
            self._report(Event("added" if before is None else "changed", path, entry.name, entry.size))
        if before is not None and before.digest != entry.digest:
            self.touched.add(path)
        self._note_let_go(before)
        if (
            before is not None
            and link_registry.target_of(before) is not None
            and not link_registry.was_pinned(before)
        ):
            link_registry.unpin_file(self._store, entry, path)
        if self._options.replace and self._folder.path(entry.name) == path:
            self._replace_soon(path, entry)

    def _replace_soon(self, path: str, entry: Entry) -> None:
        if entry.size:  # a link takes more than an empty file
            self._to_replace.append((path, entry))
            if len(self._to_replace) >= _BATCH_FILES:
                self._replace()

    def _replace(self) -> None:
        wanted, self._to_replace = self._to_replace, []
        mount = self.live_mount() if wanted else None
        if mount is None:
            return
        with ExitStack() as opened:
            files = []
            for path, entry in wanted:
                try:
                    if not self._folder.is_followed(path):
                        self._schedule(path, 0)
                        continue
                    file = opened.enter_context(Snapshot(path))
                except (FileBusyError, OSError) as error:
                    self._on_failed(path, error)
                    continue
                if is_current(self._store, entry, path, file.status.st_size, file.status.st_mtime_ns):
                    files.append((file, entry))
                else:
                    self._schedule(path, self._busy_seconds)
            replace.replace(self._store, self._folder, mount, files, self._check_stop, self._on_replaced)
        others, self._to_put = self._to_put, []
        for path, entry in others:
            try:
                self._adder.add(entry.name, path, self._store.entry(entry.name))
            except (FullError, StoreError):
                raise
            except (CastoreError, OSError, FileBusyError) as error:
                self._on_failed(path, error)
        if others:
            self.flush()

    def _on_replaced(self, file: Snapshot, entry: Entry, error: Exception | None) -> None:
        if error is None:
            self._report(Event("replaced", file.path, entry.name, entry.size))
            return
        self._note_let_go(entry)
        if isinstance(error, replace.OtherBytesError):
            self._to_put.append((file.path, entry))
        elif isinstance(error, replace.KeptError):
            self._report(Event("kept", file.path, entry.name, entry.size, str(error)))
        else:
            self._on_failed(file.path, error)

    def live_mount(self) -> Mount | None:
        """The mount that links lead into; None while there is none, which is reported once."""
        if self._mount is None or not answers(self._mount):
            try:
                self._mount = find_mount(self._store, self._folder.prefix)
            except NoMountError as error:
                if not self.waits_for_mount:
                    self._report(Event("failed", reason=str(error)))
                self.waits_for_mount = True
                return None
        self.waits_for_mount = False
        return self._mount

    def has_mount_moved(self) -> bool:
        """Whether links have to lead into another mount than before, or into one again."""
        if not self._options.replace:
            return False
        if self._mount is not None and answers(self._mount) and not self.waits_for_mount:
            return False
        try:
            found = find_mount(self._store, self._folder.prefix)
        except NoMountError:
            return False
        before, self._mount = self._mount, found
        return self.waits_for_mount or before is None or before.mountpoint != found.mountpoint

    def rescan_conflicts(self) -> None:
        """Scan files with a name conflict again: the file or folder in conflict may be gone by now."""
        conflicts, self._conflicts = self._conflicts or [], None
        for path in conflicts:
            name = self._folder.name(path)
            above = (self._store.entry(name[:end]) for end, letter in enumerate(name) if letter == "/")
            self.scan_missing(entry for entry in above if entry is not None)
            self.scan_missing(self._store.entries(name))
            self.scan(path)
        self.flush()
        self._conflicts = []

    def _is_gone(self, path: str) -> bool:
        """Whether the path is no file any more. An unreadable parent folder is no proof of that."""
        try:
            return stat.S_ISDIR(os.lstat(path).st_mode) or not self._folder.is_real(path)
        except (FileNotFoundError, NotADirectoryError):
            return True
        except OSError:
            return False

    def _on_error(self, path: str, error: Exception) -> None:
        if self._is_gone(path):
            self._schedule(path, 0)  # removed during the scan
        else:
            self._on_failed(path, error)

    def _on_failed(self, path: str, error: Exception) -> None:
        if isinstance(error, FileBusyError):
            self._schedule(path, self._busy_seconds)
        elif isinstance(error, NameConflictError) and self._options.mirror and self._conflicts is not None:
            self._conflicts.append(path)
        else:
            self._report(Event("failed", path, reason=reason_of(error)))

    def _check_stop(self, size: int) -> None:
        if self._stop.is_set():
            raise Stopped

    def _on_piece(self, size: int) -> None:
        self._check_stop(size)
        self._progressed += size
        self._progress(size)
