"""Looking a store over from outside, and mending what can be mended without losing anything.

Works on stores that do not open: each step says what it found in a sentence, and what it did about it. Run twice in a
row, the second run finds nothing that the first could mend.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from castore import agreement, copies, foreign, leftovers, mounts, rebuild, schema, settings
from castore.beacon import Beacon
from castore.errors import StoreError
from castore.index import Index
from castore.journal import Journal
from castore.names import check_name
from castore.objects.codecs import FRAME_SIZE
from castore.objects.directory import ObjectDirectory
from castore.records import LOST, entry_check
from castore.serializers import SERIALIZERS
from castore.sqlerrors import SQL_ERRORS
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
    found = _foreign(folder)
    wrong = _index_damage(folder / "index.sqlite")
    if wrong:
        advice = "`castore doctor --rebuild-index` makes a new one from the object directory"
        return [*found, Finding(f"the index is damaged: {wrong}", False, advice)]
    with Store(folder, memory=0) as store:
        # Names first: to what the index does not know, the next step would say that it belongs to nothing.
        return [
            *found, *_dictionaries(store), *_forgotten(store), *_counts(store), *_lost(store), *_strays(store),
            *_mounts(store), *_journal(store.index),
        ]  # fmt: skip


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
    findings = _foreign(folder)
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
    settings.check_folders(folder, kept)
    settings.make_folders(folder, kept)
    return folder


def _foreign(folder: Path) -> list[Finding]:
    return [
        Finding(f"{path} is not what belongs there, and has been moved to quarantine", True)
        for path in foreign.set_aside(folder)
    ]


def _index_damage(file: Path) -> str | None:
    """What SQLite itself finds wrong with the index, or None."""
    if not file.exists():
        return f"{file} is missing"
    try:
        db = sqlite3.connect(file, timeout=120, isolation_level=None)
        try:
            if 0 < db.execute("PRAGMA user_version").fetchone()[0] < schema.SCHEMA_VERSION:
                schema.migrate(db)  # as opening the store would
            (row,) = db.execute("PRAGMA integrity_check(1)").fetchone()
            return row if row != "ok" else schema.foreign(db) or _senseless(db)
        finally:
            db.close()
    except SQL_ERRORS as error:
        return str(error)


# Rows that castore never writes. SQLite keeps no checksums of its pages: a flipped bit within a value looks like one.
_SENSELESS_BLOB = (
    "SELECT 1 FROM blobs WHERE typeof(digest) != 'blob' OR length(digest) != 32"
    " OR typeof(size) != 'integer' OR size NOT BETWEEN 0 AND 1 << 50"
    " OR typeof(stored) != 'integer' OR stored NOT BETWEEN 0 AND 1 << 50"
    " OR typeof(pack) != 'integer' OR pack < -1 OR typeof(offset) != 'integer' OR offset < 0"
    " OR typeof(refs) != 'integer' OR refs < 0 OR codec NOT IN ('zstd', 'lz4', 'gzip', 'none')"
)
_SENSELESS_ENTRY = (
    "SELECT 1 FROM entries WHERE typeof(digest) != 'blob' OR length(digest) != 32 OR typeof(size) != 'integer'"
    " OR typeof(created) != 'real' OR typeof(accessed) != 'real' OR typeof(expires) NOT IN ('real', 'null')"
    " OR abs(created) > 1e12 OR typeof(pinned) != 'integer'"
    " OR NOT EXISTS (SELECT 1 FROM blobs b WHERE b.digest = entries.digest)"
)
_SENSELESS_CHECKSUMS = (
    "SELECT 1 FROM blobs b LEFT JOIN checksums c ON c.digest = b.digest WHERE b.codec = 'none' AND b.pack = 0"
    f" AND b.size > {FRAME_SIZE} AND (typeof(c.frames) != 'blob' OR length(c.frames) % 8)"
)

_SENSELESS_RELEASED = "SELECT 1 FROM released WHERE typeof(digests) != 'blob' OR length(digests) % 32"


def _senseless(db: sqlite3.Connection) -> str | None:
    questions = (_SENSELESS_BLOB, _SENSELESS_ENTRY, _SENSELESS_CHECKSUMS, _SENSELESS_RELEASED)
    if any(db.execute(f"{sql} LIMIT 1").fetchone() for sql in questions):
        return "it has rows that cannot be"
    sql = "SELECT name, digest, serializer, metadata, checked FROM entries"
    for name, digest, serializer, metadata, checked in db.execute(sql):
        try:
            check_name(name)
            sound = checked == entry_check(name, digest) and serializer in SERIALIZERS
            sound = sound and (metadata is None or type(json.loads(metadata)) is dict)
        except ValueError:
            sound = False
        if not sound:
            return f"what it says of the name {name!r} cannot be"
    return None


def _counts(store: Store) -> list[Finding]:
    if rebuild.is_counted_right(store.index):
        return []
    # Transactions never leave counts that are off. If the names are not those of the journal either, the rows are not what
    # was written, and counting them would only make it look right.
    words = agreement.compare(store.index)
    if words.differing and not words.damaged:
        rebuild.rebuild(store.index, store.objects)
        return [Finding("the index contradicted itself and the names journal; it has been made anew", True)]
    with store.index.write() as txn:
        rebuild.recount(txn)
    return [Finding("totals or reference counts were off; they have been counted again", True)]


def _lost(store: Store) -> list[Finding]:
    sql = "SELECT count(*), coalesce(sum(refs), 0) FROM blobs WHERE pack = ?"
    blobs, entries = next(store.index.rows(sql, (LOST,)))
    if not blobs:
        return []
    advice = "`castore verify --repair` drops those entries; putting the same bytes again heals them"
    return [Finding(f"{blobs} blobs of {entries} entries are lost: damaged or missing", False, advice)]


def _strays(store: Store) -> list[Finding]:
    found = list(leftovers.find(store.index, store.objects))
    removed = leftovers.remove(store.index, store.objects, found)
    if not removed:
        return []
    freed = sum(leftover.size for leftover in removed)
    return [Finding(f"files that belong to nothing: {len(removed)} ({freed} bytes); removed", True)]


def _dictionaries(store: Store) -> list[Finding]:
    findings = []
    for _, problem, _, mended in copies.mend(store.index, store.objects):
        if mended:
            findings.append(Finding(f"{problem}; that copy of a dictionary has been made anew", True))
        else:
            advice = "blobs that need it are misses; `castore verify --repair` drops their entries"
            findings.append(Finding(f"{problem}, and no copy of that dictionary is whole", False, advice))
    findings += [Finding(what, True) for what in copies.set_right(store)]
    count, freed = copies.remove_unneeded(store.index, store.objects, store.prefixes)
    if count:
        findings.append(Finding(f"dictionaries that nothing needs: {count} ({freed} bytes); removed", True))
    return findings


def _mounts(store: Store) -> list[Finding]:
    gone = mounts.forget_dead(store.index)
    return [
        Finding(f"the mount at {mountpoint} is gone without saying so; forgotten", True)
        for mountpoint in gone
    ]


def _forgotten(store: Store) -> list[Finding]:
    """Names that only the journal knows, though their bytes are there: the index has lost its last transactions."""
    forgotten = agreement.compare(store.index).forgotten
    there = store.objects.digests() if forgotten else set()
    count = sum(digest in there for digest in forgotten.values())
    if not count:
        return []
    rebuild.rebuild(store.index, store.objects)
    return [Finding(f"the index had lost {count} names that the journal knows; it has been made anew", True)]


def _journal(index: Index) -> list[Finding]:
    """Whether the journal would give back every name."""
    words = agreement.compare(index)
    if not words.damaged and not words.differing:
        return []
    index.snapshot_journal()
    return [Finding("the names journal did not match the index; a new snapshot has been written", True)]
