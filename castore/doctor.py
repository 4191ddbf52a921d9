"""Looking a store over from outside, and mending what can be mended without losing anything.

Works on stores that do not open: each step says what it found in a sentence, and what it did about it. Run twice in a
row, the second run finds nothing that the first could mend.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from castore import leftovers, mounts, rebuild, settings
from castore.beacon import Beacon
from castore.errors import StoreError
from castore.index import Index
from castore.journal import Journal
from castore.objects.directory import ObjectDirectory
from castore.records import LOST
from castore.store import Store


class Finding(NamedTuple):
    """Something that was not in order.

    Attributes:
        what: in a sentence.
        mended: whether it is in order now.
        advice: what to do if it is not; empty if nothing needs doing.
    """

    what: str
    mended: bool
    advice: str = ""


def examine(path: str | os.PathLike[str]) -> list[Finding]:
    """Check a store, mend what can be, and tell.

    Raises:
        StoreError: there is no store at ``path``.
    """
    folder = _existing(path)
    wrong = _index_damage(folder / "index.sqlite")
    if wrong:
        advice = "`castore doctor --rebuild-index` makes a new one from the object directory"
        return [Finding(f"the index is damaged: {wrong}", False, advice)]
    with Store(folder, memory=0) as store:
        return [*_counts(store), *_lost(store), *_strays(store), *_mounts(store), *_journal(store.index)]


def rebuild_index(
    path: str | os.PathLike[str], progress: Callable[[int], object] | None = None
) -> tuple[list[Finding], rebuild.Rebuilt]:
    """Make the index anew from the object directory; what was there is used only if it can be written to.

    Raises:
        StoreError: there is no store at ``path``.
    """
    folder = _existing(path)
    kept = settings.load(folder) or settings.Settings()
    mode = kept.file_mode
    findings = []
    beacon = Beacon(folder / "locks" / "beacon", mode)
    wrong = _index_damage(folder / "index.sqlite")
    if wrong:
        aside = rebuild.set_index_aside(folder / "index.sqlite", folder / "quarantine", beacon)
        where = f"; it is kept as {aside}" if aside else ""
        findings.append(Finding(f"the index was damaged: {wrong}{where}", True))
    journal = Journal(folder / "objects" / "names", folder / "tmp", beacon, mode)
    objects = ObjectDirectory(
        folder, object_mode=kept.object_mode, file_mode=mode, folder_mode=kept.folder_mode, durable=True
    )
    index = Index(
        folder / "index.sqlite", beacon, journal, mode=mode, is_empty=objects.is_empty, rebuilding=True
    )
    try:
        return findings, rebuild.rebuild(index, objects, progress)
    finally:
        index.close()
        journal.close()
        beacon.close()


def _existing(path: str | os.PathLike[str]) -> Path:
    folder = Path(os.path.abspath(path))
    kept = settings.load(folder)
    if kept is None:
        raise StoreError(f"there is no store at {folder}; `castore init` makes one")
    settings.make_folders(folder, kept)
    return folder


def _index_damage(file: Path) -> str | None:
    """What SQLite itself finds wrong with the index, or None."""
    if not file.exists():
        return f"{file} is missing"
    try:
        db = sqlite3.connect(file, timeout=120, isolation_level=None)
        try:
            row = db.execute("PRAGMA quick_check(1)").fetchone()
            tables = {name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        finally:
            db.close()
    except sqlite3.DatabaseError as error:
        return str(error)
    if row[0] != "ok":
        return str(row[0])
    missing = {"entries", "blobs", "packs", "totals"} - tables
    return f"it lacks the tables {', '.join(sorted(missing))}" if missing else None


def _counts(store: Store) -> list[Finding]:
    if rebuild.is_counted_right(store.index):
        return []
    with store.index.write() as txn:
        rebuild.recount(txn)
    return [Finding("totals or reference counts were off; they have been counted again", True)]


def _lost(store: Store) -> list[Finding]:
    db = store.index.connection()
    found = []
    nameless = db.execute(
        "SELECT count(*) FROM entries e WHERE NOT EXISTS (SELECT 1 FROM blobs b WHERE b.digest = e.digest)"
    ).fetchone()[0]
    if nameless:
        found.append(Finding(f"{nameless} entries point to blobs the index does not know", False, _REBUILD))
    lost = db.execute("SELECT count(*), coalesce(sum(refs), 0) FROM blobs WHERE pack = ?", (LOST,)).fetchone()
    if lost[0]:
        advice = "`castore verify --repair` drops those entries; putting the same bytes again heals them"
        found.append(
            Finding(f"{lost[0]} blobs of {lost[1]} entries are lost: damaged or missing", False, advice)
        )
    return found


_REBUILD = "`castore doctor --rebuild-index` makes a new index from the object directory"


def _strays(store: Store) -> list[Finding]:
    strays = list(leftovers.find(store.index, store.objects))
    if not strays:
        return []
    freed = leftovers.remove(store.index, store.objects, strays)
    return [
        Finding(f"{len(strays)} files that belong to nothing ({freed} bytes) were left behind; removed", True)
    ]


def _mounts(store: Store) -> list[Finding]:
    gone = mounts.forget_dead(store.index)
    return [
        Finding(f"the mount at {mountpoint} is gone without saying so; forgotten", True)
        for mountpoint in gone
    ]


def _journal(index: Index) -> list[Finding]:
    """Whether the journal would give back every name."""
    last: dict[str, bytes | None] = {}
    damaged = 0
    for record in index.journal.replay():
        if record is None:
            damaged += 1
        else:
            last[record.name] = record.digest
    kept = {name: digest for name, digest in last.items() if digest is not None}
    if not damaged and kept == dict(
        index.connection().execute("SELECT name, digest FROM entries").fetchall()
    ):
        return []
    index.snapshot_journal()
    return [Finding("the names journal did not match the index; a new snapshot has been written", True)]
