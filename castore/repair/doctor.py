"""Checks a store from outside, and mends what can be mended without loss.

Works on stores that do not open. Each step returns a sentence for each problem, and for what it did about it.
A second run in a row finds nothing that the first could mend.
"""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, closing
from functools import partial
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from castore import layout, settings
from castore.errors import StoreError
from castore.gc import collect, leftovers
from castore.index import mounts, rebuild_rows, soundness
from castore.index.beacon import Beacon
from castore.index.database import Index
from castore.index.figures import lost_blobs
from castore.index.journal import Journal
from castore.objects.codecs import FRAME_SIZE
from castore.parts import Parts, object_directory, open_folder, open_parts
from castore.read.origin import Origin
from castore.repair import dictionary_repair, journal_check, misplaced_files, rebuild
from castore.serialize.serializers import SERIALIZERS
from castore.system import ownership
from castore.system.ballast import Ballast, full_disk_error
from castore.system.sql_errors import SQL_ERRORS


class Diagnosis(NamedTuple):
    """A problem.

    Attributes:
        what: the problem, in a sentence.
        mended: whether `doctor` mended it.
        advice: the step left to the user; empty if there is none.
    """

    what: str
    mended: bool
    advice: str = ""

    @property
    def left_to_do(self) -> bool:
        """Whether somebody has to act on it."""
        return not self.mended and bool(self.advice)


#: Checks an open store, mends what can be mended, and returns the problems.
Check = Callable[[Parts], list[Diagnosis]]


def examine(path: str | os.PathLike[str], further: Iterable[Check] = ()) -> list[Diagnosis]:
    """Check a store, mend what can be mended, and return the problems.

    Args:
        path: of the store's folder.
        further: checks of other packages, run last. They are left out if the store does not open.

    Raises:
        StoreError: there is no store at ``path``, or it is read-only.
        FullError: the disk is full.
    """
    folder, store_settings, found = _existing(path)
    if any(finding.left_to_do for finding in found):
        return found  # the other checks would fail halfway
    _make_folders(folder, store_settings)
    found += _misplaced(folder)
    wrong = Ballast(folder / "ballast", store_settings.file_mode).relieve(
        partial(_index_damage, folder / "index.sqlite")
    )
    if wrong:
        advice = "`castore doctor --rebuild-index` makes a new one from the object directory"
        state = "damaged" if (folder / layout.INDEX).exists() else "missing"
        return [*found, Diagnosis(f"the index is {state}: {wrong}", False, advice)]
    with closing(_open(folder)) as parts:
        # Names first: else the check for strays would remove objects whose names the index has lost.
        return [
            *found, *_dictionaries(parts), *_restore_forgotten(parts), *_counts(parts), *_lost(parts),
            *_leftovers(parts), *_mounts(parts), *_journal(parts.index),
            *chain.from_iterable(check(parts) for check in further),
        ]  # fmt: skip


def _open(folder: Path) -> Parts:
    store_settings, read_only = open_folder(folder)
    ballast = Ballast(folder / "ballast", store_settings.file_mode)
    return open_parts(
        folder,
        store_settings,
        ballast,
        collect.make_room,
        _no_origin,
        read_only=read_only,
        memory=0,
        durable=False,
    )


def _no_origin(parts: Parts) -> Origin:
    raise StoreError("nothing is fetched from a remote while the store is examined")


def rebuild_index(
    path: str | os.PathLike[str], progress: Callable[[int], object] | None = None
) -> tuple[list[Diagnosis], rebuild.Rebuilt]:
    """Rebuild the index from the object directory. Keeps the index file if it is not damaged.

    Raises:
        StoreError: there is no store at ``path``, or it is read-only, or not all of its files can be
            accessed: a rebuild would take unreadable objects for lost.
        FullError: the disk is full; the index is unchanged.
    """
    folder, store_settings, found = _existing(path)
    for finding in found:
        if finding.left_to_do:
            raise StoreError(f"{finding.what}; {finding.advice}")
    _make_folders(folder, store_settings)
    found += _misplaced(folder)
    ballast = Ballast(folder / "ballast", store_settings.file_mode)
    damage, rebuilt = ballast.relieve(partial(_rebuild, folder, store_settings, progress))
    return [*found, *damage], rebuilt


def _rebuild(
    folder: Path, store_settings: settings.Settings, progress: Callable[[int], object] | None
) -> tuple[list[Diagnosis], rebuild.Rebuilt]:
    file, mode = folder / "index.sqlite", store_settings.file_mode
    try:
        with ExitStack() as stack:
            beacon = stack.enter_context(closing(Beacon(folder / "locks" / "beacon", mode)))
            found, aside = [], rebuild.SetAside(None)
            if wrong := _index_damage(file):
                aside = stack.enter_context(rebuild.set_index_aside(file, folder / "quarantine", beacon))
                state = f"damaged: {wrong}; it is kept as {aside.moved_to}" if aside.moved_to else "missing"
                found = [Diagnosis(f"the index was {state}", True)]
            journal = Journal(folder / "objects" / "names", folder / "tmp", beacon, mode)
            stack.callback(journal.close)
            objects = object_directory(folder, store_settings, durable=True)
            index = Index(file, beacon, journal, mode=mode, is_empty=objects.is_empty, rebuilding=True)
            stack.callback(index.close)
            try:
                return found, rebuild.rebuild(index, objects, progress)
            except BaseException:
                aside.is_replaced = index.file.is_whole()
                raise
    except (OSError, *SQL_ERRORS) as error:
        if (no_room := full_disk_error(folder, error)) is not None:
            raise no_room from error
        raise


def _existing(path: str | os.PathLike[str]) -> tuple[Path, settings.Settings, list[Diagnosis]]:
    folder = Path(os.path.abspath(path))
    found = []
    try:
        store_settings = settings.load(folder)
    except settings.DamagedSettingsError:
        if not settings.is_used(folder):
            raise
        settings.require_writable(folder)
        found.append(_set_settings_aside(folder))
        store_settings = None
    if store_settings is None:
        if not settings.has_lost_settings(folder):
            raise StoreError(settings.no_store_message(folder))
        settings.require_writable(folder)
        store_settings = settings.rewrite(folder)
        found.append(Diagnosis(settings.describe_rewritten(folder, store_settings), True))
    settings.require_writable(folder)
    return folder, store_settings, found + _access(folder, store_settings)


def _set_settings_aside(folder: Path) -> Diagnosis:
    quarantine = folder / "quarantine"
    quarantine.mkdir(exist_ok=True)
    aside = quarantine / f"{settings.FILE}-{time.time_ns()}"
    (folder / settings.FILE).rename(aside)
    return Diagnosis(f"{folder / settings.FILE} was damaged, and has been moved to {aside}", True)


def _access(folder: Path, store_settings: settings.Settings) -> list[Diagnosis]:
    access = ownership.repair_access(
        folder,
        folder_mode=store_settings.folder_mode,
        file_mode=store_settings.file_mode,
        object_mode=store_settings.object_mode,
    )
    found = []
    if access.mended:
        found.append(
            Diagnosis(f"{_first_of(access.mended)} had too few permission bits; they have been set", True)
        )
    if access.barred:
        found.append(Diagnosis(
            f"the user {access.user} may not use {_first_of(access.barred)} of the store {folder}:"
            f" owned by {' and '.join(access.owners)}",
            False,
            f"run `{ownership.chown_command(folder)}` as root, then `castore doctor` again",
        ))  # fmt: skip
    return found


def _first_of(paths: list[str]) -> str:
    return paths[0] if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1:,} more"


def _make_folders(folder: Path, store_settings: settings.Settings) -> None:
    settings.check_folders(folder, store_settings)
    settings.make_folders(folder, store_settings)


def _misplaced(folder: Path) -> list[Diagnosis]:
    moved, stores, left = misplaced_files.set_aside(folder)
    findings = [
        Diagnosis(f"{path} is not what castore puts there, and has been moved to quarantine", True)
        for path in moved
    ]
    findings += [
        Diagnosis(
            f"{path} is another store, or contains one; it is left alone,"
            " and this store's budget does not count it",
            False,
        )
        for path in stores
    ]
    findings += [
        Diagnosis(f"{path} was not made by castore, and is left where it is", False) for path in left
    ]
    return findings


def _index_damage(file: Path) -> str | None:
    return soundness.find_damage(file, FRAME_SIZE, SERIALIZERS)


def _counts(parts: Parts) -> list[Diagnosis]:
    if rebuild_rows.has_right_counts(parts.index):
        return []
    # Transactions never leave wrong counts. If the names differ from the journal's too, the rows were
    # damaged, and a recount would only hide it.
    comparison = journal_check.compare(parts.index)
    if comparison.differing and not comparison.damaged:
        rebuild.rebuild(parts.index, parts.objects)
        return [Diagnosis("the index contradicted itself and the names journal; it has been rebuilt", True)]
    with parts.index.write() as txn:
        rebuild_rows.recount(txn)
    return [Diagnosis("totals or reference counts were wrong; they have been counted again", True)]


def _lost(parts: Parts) -> list[Diagnosis]:
    blobs, entries = lost_blobs(parts.index)
    if not entries:  # gc removes the rows of blobs without names
        return []
    advice = "`castore verify --repair` drops those entries; putting the same bytes again heals them"
    return [Diagnosis(f"{blobs} blobs of {entries} entries are lost: damaged or missing", False, advice)]


def _leftovers(parts: Parts) -> list[Diagnosis]:
    found = list(leftovers.find(parts.index, parts.objects))
    removed = leftovers.remove(parts.index, parts.objects, found)
    if not removed:
        return []
    freed = sum(leftover.size for leftover in removed)
    return [Diagnosis(f"leftover files of dead processes: {len(removed)} ({freed} bytes); removed", True)]


def _dictionaries(parts: Parts) -> list[Diagnosis]:
    findings = []
    for _, problem, _, mended in dictionary_repair.repair_copies(parts.index, parts.objects):
        if mended:
            findings.append(Diagnosis(f"{problem}; that copy of a dictionary has been written again", True))
        else:
            advice = "blobs that need it are misses; `castore verify --repair` drops their entries"
            findings.append(Diagnosis(f"{problem}, and no copy of that dictionary is intact", False, advice))
    findings += [Diagnosis(what, True) for what in dictionary_repair.repair_prefixes(parts)]
    count, freed = dictionary_repair.remove_unneeded(parts.index, parts.objects, parts.prefixes)
    if count:
        findings.append(Diagnosis(f"dictionaries that nothing needs: {count} ({freed} bytes); removed", True))
    return findings


def _mounts(parts: Parts) -> list[Diagnosis]:
    dead = mounts.remove_dead(parts.index)
    return [
        Diagnosis(
            f"the daemon of the mount at {mountpoint} has died; its record has been removed."
            " If the folder cannot be entered,"
            f" `castore umount {shlex.quote(str(mountpoint))}` clears it",
            True,
        )
        for mountpoint in dead
    ]


def _restore_forgotten(parts: Parts) -> list[Diagnosis]:
    """Restore names that only the journal has, if their bytes exist: the index lost its last transactions."""
    forgotten = journal_check.compare(parts.index).forgotten
    existing = parts.objects.digests() if forgotten else set()
    count = sum(digest in existing for digest in forgotten.values())
    if not count:
        return []
    rebuild.rebuild(parts.index, parts.objects)
    return [Diagnosis(f"the index had lost {count} names that the journal has; it has been rebuilt", True)]


def _journal(index: Index) -> list[Diagnosis]:
    """Check whether the journal has every name; if not, write a snapshot."""
    comparison = journal_check.compare(index)
    if not comparison.damaged and not comparison.differing:
        return []
    index.snapshot_journal()
    return [Diagnosis("the names journal did not match the index; a new snapshot has been written", True)]
