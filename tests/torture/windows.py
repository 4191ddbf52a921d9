"""Each crash window of docs/format.md: the operation, the point where it dies, and the state after that.

A table for test_windows.py. A window's `killed` is the first column of its row in the page, `there` checks
the second column on the disk, and `changed` has the names of the third.
"""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import castore_fuse
import castore_fuse.__main__ as daemon
from castore import Store, settings
from castore.gc import compaction, leftovers
from castore.index import database, deferred_refs, index_file, mounts, rebuild_rows, schema
from castore.index.beacon import Beacon
from castore.index.database import Index
from castore.index.journal import Journal
from castore.index.transaction import Write
from castore.objects.codecs import FRAME_SIZE
from castore.objects.directory import ObjectDirectory
from castore.objects.loose import LooseFolder
from castore.objects.packs import Damage, PackWriter, scan
from castore.repair import doctor
from castore.system import temporary as temporary_files
from castore.write import writer
from tests.helpers import agrees_with_disk, flip, mixed, noise, overwrite, payload, text
from tests.torture.kills import Stop, after, before, halfway

#: The names in the store before the operation.
BASE = {
    "old/small": text(3_000, 1),
    "old/large": noise(60_000, 2),
    "old/frames": mixed(2 * FRAME_SIZE + 5, 3),
}
SMALL, LARGE = text(4_000, 4), mixed(6 * FRAME_SIZE + 9, 5)
SMALLS = {f"new/{number}": noise(500, number) for number in range(3)}
FIRST = {f"many/{number:04}": b"%d" % number for number in range(2_000)}
SECOND = {f"many/{number:04}": b"%d" % number for number in range(2_000, 2_100)}
LOOSE = {f"dead/{number}": noise(40_000, number) for number in range(4)}
PACKED = {f"packed/{number:03}": noise(60, number) for number in range(700)}
LIVE = {name: data for name, data in PACKED.items() if int(name[-1]) < 4}
OLDEST = {f"oldest/{number:03}": b"oldest %d" % number for number in range(500)}
NEXT = {f"next/{number:03}": b"next %d" % number for number in range(100)}
GOING = NEXT | OLDEST
GOING_FIRST = dict(sorted(GOING.items())[:500])

Work = Callable[[Path], object]
There = Callable[[Store], bool]


class Task(NamedTuple):
    """An operation: ``ready`` ends, ``act`` runs until the process dies, ``kept`` are the names between."""

    act: Work
    ready: Work = lambda path: None
    kept: dict[str, bytes] = BASE


class Window(NamedTuple):
    """One way to die."""

    section: str
    killed: str
    task: Task
    stop: Stop
    there: There
    changed: Mapping[str, bytes | None] = MappingProxyType({})
    refused: bool = False


def within(work: Callable[[Store], object]) -> Work:
    """A piece of work with the store of a folder."""

    def opened(path: Path) -> None:
        with Store(path, memory=0) as store:
            work(store)

    return opened


def gone(names: dict[str, bytes]) -> dict[str, bytes | None]:
    return dict.fromkeys(names)


# Checks of the disk


def nothing(store: Store) -> bool:
    return not strays(store) and not dead_records(store) and not ahead(store)


def strays(store: Store) -> list[leftovers.Leftover]:
    return list(leftovers.find(store.index, store.objects))


def temporary(mode: int) -> There:
    """One file in ``tmp/`` with these permission bits, and nothing else."""
    return lambda store: (
        [stray.path.stat().st_mode & 0o777 for stray in strays(store)] == [mode]
        and strays(store)[0].path.parent == store.path / "tmp"
    )


def objects(count: int) -> There:
    """That many objects without a row."""
    return lambda store: [stray.digest is not None for stray in strays(store)] == [True] * count


def object_and_record(store: Store) -> bool:
    return objects(1)(store) and ahead(store)


def unregistered_pack(store: Store) -> bool:
    return [stray.pack is not None for stray in strays(store)] == [True]


def dead_records(store: Store) -> int:
    """Records of registered packs without a row, and stretches that are no records."""
    rows = {blob for blob in store.index.blobs() if blob.pack > 0}
    packs = [row[0] for row in store.index.connection().execute("SELECT id FROM packs")]
    found = [found for pack in packs for found in scan(store.objects.packs.path(pack), pack)]
    return sum(isinstance(item, Damage) or item.blob not in rows for item in found)


def dead(count: int) -> There:
    return lambda store: not strays(store) and dead_records(store) == count


def torn(store: Store) -> bool:
    """Whole records and half a record at the end of a registered pack."""
    newest = max(store.objects.packs.ids())
    found = list(scan(store.objects.packs.path(newest), newest))
    return not strays(store) and dead_records(store) >= 2 and isinstance(found[-1], Damage)


def ahead(store: Store) -> bool:
    """Whether replaying the journal gives other names than the index has."""
    last = {record.name: record.digest for record in store.index.journal.replay() if record is not None}
    rows = store.index.connection().execute("SELECT name, digest FROM entries")
    return {name: digest for name, digest in last.items() if digest is not None} != dict(rows.fetchall())


def in_quarantine(store: Store) -> bool:
    return len(list((store.path / "quarantine").iterdir())) == 1


def orphans(count: int, *, aged: bool = False) -> There:
    """That many blobs without an entry, for gc without a grace period if ``aged``; their bytes are there."""

    def look(store: Store) -> bool:
        sql = "SELECT orphaned FROM blobs WHERE refs = 0"
        since = [row[0] for row in store.index.connection().execute(sql)]
        return len(since) == count and all((when == 0) is aged for when in since) and not strays(store)

    return look


def counted(count: int) -> There:
    """That many removed entries that their blobs still count; the disk shows nothing of it."""

    def look(store: Store) -> bool:
        rows = store.index.connection().execute("SELECT length(digests) / 32 FROM released")
        return sum(row[0] for row in rows) == count and nothing(store)

    return look


def in_two_packs(store: Store) -> bool:
    """Whether a part of the names that compaction moves has been moved."""
    return len({found.blob.pack for found in store.index.find_many(list(LIVE)).values()}) == 2


def two_segments(store: Store) -> bool:
    return len(store.index.journal.segments()) == 2 and not store.index.journal.snapshots()


def old_segment_too(store: Store) -> bool:
    return store.index.journal.snapshots() == store.index.journal.segments()[1:]


def beside(path: Path) -> Path:
    """The place where another store is made."""
    return path.with_name("another")


def made_by_the_next(store: Store) -> bool:
    """Whether opening the other store completes it."""
    with Store(beside(store.path), memory=0) as other:
        other.put("a", SMALL)
        agrees_with_disk(other)
    return not doctor.examine(beside(store.path))


def mounted(count: int) -> There:
    return lambda store: len(store.index.connection().execute("SELECT id FROM mounts").fetchall()) == count


# Operations

_make = Task(lambda path: Store(beside(path), memory=0).close())
_put_small = Task(within(lambda store: store.put("new", SMALL)))
_put_again = Task(within(lambda store: (store.put("first", b"1"), store.put_many(SMALLS.items()))))
_put_large = Task(within(lambda store: store.put("new", LARGE)))
_put_many = Task(within(lambda store: store.put_many([*FIRST.items(), *SECOND.items()])))
_replace = Task(within(lambda store: store.put("old/large", LARGE)))
_delete = Task(within(lambda store: store.delete("old/large")))
_rotate = Task(within(lambda store: store.index.snapshot_journal()))


def _fill_and_pin(store: Store) -> None:
    for name in BASE:
        store.pin(name)
    store.put_many(OLDEST.items())
    store.put_many(NEXT.items())


def _fill_and_mount(store: Store) -> None:
    _fill_and_pin(store)
    mounts.Registration(store.index, "/somewhere", "", pinned=False)  # of this process, which lives


def _fill_loose_and_pin(store: Store) -> None:
    for name in BASE:
        store.pin(name)
    store.put_many(LOOSE.items())


def _fill_packs(store: Store) -> None:
    store.put_many(PACKED.items())
    store.delete_many(PACKED.keys() - LIVE.keys())


def _leave_objects(store: Store) -> None:
    for digest in (hashlib.sha256(name.encode()).hexdigest() for name in LOOSE):
        folder = store.path / "objects" / digest[:2]
        folder.mkdir(exist_ok=True)
        (folder / digest).write_bytes(b"nobody means it")


def _fill_loose(store: Store) -> None:
    store.put_many(LOOSE.items())
    store.delete_many(LOOSE)


_evict = Task(within(lambda store: store.gc(max_size=0, grace=0)), within(_fill_and_pin), {**BASE, **GOING})
_evict_mounted = Task(
    within(lambda store: store.gc(max_size=0, grace=0)), within(_fill_and_mount), {**BASE, **GOING}
)
_evict_loose = Task(
    within(lambda store: store.gc(max_size=0, grace=0)), within(_fill_loose_and_pin), {**BASE, **LOOSE}
)
_collect = Task(within(lambda store: store.gc(grace=0)), within(_fill_loose))
_sweep = Task(within(lambda store: store.gc(grace=0)), within(_leave_objects))
_compact = Task(within(lambda store: store.gc(grace=0)), within(_fill_packs), {**BASE, **LIVE})


def _damage_index(path: Path) -> None:
    overwrite(path / "index.sqlite", 0, bytes(4096))


_rebuild = Task(doctor.rebuild_index)
_replace_index = Task(doctor.rebuild_index, _damage_index)


def _damage_object(store: Store) -> None:
    path, offset, length = payload(store, "old/large")
    flip(path, offset + length // 2)


_set_aside = Task(
    within(lambda store: store.get("old/large")),
    within(_damage_object),
    {name: data for name, data in BASE.items() if name != "old/large"},
)


def mountpoint(path: Path) -> Path:
    """The mountpoint of the mount windows for the store at ``path``."""
    return path.parent / "mnt"


_serve = Task(lambda path: castore_fuse.foreground(path, mountpoint(path)))


def _told_to_end() -> None:
    before(mounts.Registration, "remove")()
    os.kill(os.getpid(), signal.SIGTERM)


def _committed(owner: Any, name: str, nth: int = 1) -> Stop:
    """After the commit of the transaction in which that call happens."""
    return after(owner, name, nth, then=after(Write, "commit"))


def _of(section: str, *rows: tuple[Any, ...]) -> list[Window]:
    """Windows of one section of the page."""
    return [Window(section, *row) for row in rows]


_REPLACED: dict[str, bytes | None] = {"old/large": LARGE}

WINDOWS = [
    *_of(
        "Making a store",
        ("before `castore.json` is there", _make, before(settings, "save"), made_by_the_next),
        ("before `castore.json` is there", _make, after(temporary_files, "create_temporary"),
        made_by_the_next),
        ("after it, before the index has its tables", _make, before(index_file, "migrate"), made_by_the_next),
        ("after it, before the index has its tables", _make, after(schema, "apply_migrations"),
        made_by_the_next),
    ),
    *_of(
        "Put of a small blob",
        ("while it hashes and compresses", _put_small, after(writer, "encode_small"), nothing),
        ("while it appends to the pack", _put_again, halfway(PackWriter, "add", 1, 2), torn, {"first": b"1"}),
        ("after the append", _put_again, after(PackWriter, "add", 2), dead(3), {"first": b"1"}),
        ("after the append", _put_small, after(PackWriter, "add"), unregistered_pack),
        ("after the journal record", _put_small, after(Journal, "append"), ahead),
        ("after the commit", _put_small, after(Write, "commit"), nothing, {"new": SMALL}),
    ),
    *_of(
        "Put of a large blob",
        ("while it writes `tmp/….part`", _put_large, halfway(writer, "write_all", 1, 2), temporary(0o600)),
        ("after it is sealed (mode 0400, synced if durable)", _put_large, after(LooseFolder, "seal"),
        temporary(0o400)),
        ("after the rename, before the commit", _put_large, after(LooseFolder, "publish"), objects(1)),
        ("after the commit", _put_large, after(Write, "commit"), nothing, {"new": LARGE}),
    ),
    *_of(
        "put_many",
        ("within a batch", _put_many, after(PackWriter, "add"), unregistered_pack),
        ("within a batch", _put_many, after(PackWriter, "add", 2), dead(len(SECOND)), {**FIRST}),
        ("between two batches", _put_many, after(Write, "commit"), nothing, {**FIRST}),
        ("after the last", _put_many, after(Write, "commit", 2), nothing, {**FIRST, **SECOND}),
    ),
    *_of(
        "Replace",
        ("before the commit", _replace, after(LooseFolder, "publish"), objects(1)),
        ("before the commit", _replace, after(Journal, "append"), object_and_record),
        ("after the commit, before `settled` is written", _replace, before(Beacon, "settle"), orphans(1),
        _REPLACED),
        ("after that", _replace, after(Write, "commit"), orphans(1), _REPLACED),
    ),
    *_of(
        "Delete",
        ("before the commit", _delete, after(Journal, "append"), ahead),
        ("after the commit", _delete, before(Beacon, "settle"), orphans(1), {"old/large": None}),
    ),
    *_of(
        "gc: entries",
        ("within a transaction that removes entries", _evict, after(Write, "evict_entries"), nothing),
        ("between two of those", _evict, _committed(Write, "evict_entries"), counted(500), gone(GOING_FIRST)),
        ("while `released` is put in order", _evict, after(deferred_refs, "add", 3), counted(600),
        gone(GOING)),
        ("between two that take it out", _evict, _committed(Write, "uncount"), dead(500), gone(GOING)),
        ("between two that take it out", _evict_mounted, _committed(Write, "uncount"),
        orphans(500, aged=True), gone(GOING)),
        ("after the last", _evict, _committed(Write, "uncount", 2), dead(600), gone(GOING)),
        ("after the last", _evict_loose, before(ObjectDirectory, "remove_loose"), objects(len(LOOSE)),
        gone(LOOSE)),
    ),
    *_of(
        "gc: blobs",
        ("before the first commit", _collect, after(Write, "drop_blob", 2), orphans(len(LOOSE))),
        ("after it: rows are gone", _collect, before(ObjectDirectory, "remove_loose"), objects(len(LOOSE))),
        ("while it unlinks, under the lock", _collect, after(ObjectDirectory, "remove_loose", 3),
        objects(len(LOOSE) - 3)),
        ("while it removes leftovers", _sweep, after(ObjectDirectory, "discard", 2), objects(len(LOOSE) - 2)),
    ),
    *_of(
        "Compaction",
        ("within a transaction", _compact, after(PackWriter, "add"), unregistered_pack),
        ("within a transaction", _compact, after(PackWriter, "add", 2), dead(len(PACKED))),
        ("between two", _compact, _committed(compaction, "_move", 200), in_two_packs),
        ("after the last commit, before the unlink", _compact, _committed(Write, "retire_pack"),
        unregistered_pack),
    ),
    *_of(
        "Journal rotation",
        ("after the new segment is made", _rotate, after(Journal, "switch"), two_segments),
        ("while it writes the snapshot", _rotate, before(database, "pack_record", 2), temporary(0o600)),
        ("after the rename", _rotate, before(temporary_files, "sync_folder"), old_segment_too),
    ),
    *_of(
        "Rebuild",
        ("within the transaction, in the index that was there", _rebuild, before(rebuild_rows, "recount"),
        nothing),
        ("after the old one was moved, before `epoch` is raised", _replace_index, after(Path, "rename"),
        nothing, {}, True),
        ("within the transaction, in a new file", _replace_index, before(rebuild_rows, "recount"), nothing,
        {}, True),
        ("after the commit, before the journal's new snapshot", _replace_index,
        before(Index, "snapshot_journal"), nothing),
    ),
    *_of(
        "Setting aside",
        ("after the object was moved, before the commit", _set_aside, after(ObjectDirectory, "quarantine"),
        in_quarantine),
        ("after the commit", _set_aside, after(Write, "commit"), in_quarantine),
    ),
    *_of(
        "Mount",
        ("before its row is committed", _serve, before(mounts.Registration, "refresh"), mounted(0)),
        ("before it is mounted", _serve, after(mounts.Registration, "refresh"), mounted(1)),
        ("while it serves", _serve, after(daemon.MountDaemon, "started"), mounted(1)),
        ("after it is unmounted, before its row is removed", _serve,
        after(daemon.MountDaemon, "started", then=_told_to_end), mounted(1)),
    ),
]  # fmt: skip
