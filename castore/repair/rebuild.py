"""Rebuilding the index from the object directory: blobs from the objects and packs, names from the names journal.

Done in one transaction in the index that is there, or, if that is damaged beyond use, in a new file that takes its
place while the old one is kept in quarantine. Objects are taken at the word of their names and trailers (what they
hold is checked whenever it is read), but raw ones are read whole: their checksums live in the index only.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from castore.errors import CorruptError
from castore.index.beacon import EPOCH, Beacon
from castore.index.database import Index
from castore.index.queries import Totals
from castore.index.schema import apply_migrations
from castore.index.transaction import Write
from castore.objects.codecs import FRAME_SIZE
from castore.objects.directory import ObjectDirectory, describe_loose
from castore.objects.packs import Damage, scan
from castore.records import HEAD_SIZE, Blob, entry_check
from castore.system.forks import unforked

_ADD_BLOB = "INSERT OR REPLACE INTO blobs VALUES (?, ?, ?, ?, ?, ?, 0, NULL)"
_SET_NAME = (
    "INSERT OR REPLACE INTO entries (name, digest, size, serializer, metadata, created, expires, accessed, pinned, checked)"
    " VALUES (?1, ?2, 0, ?3, ?4, ?5, ?6, ?5, ?7, ?8)"
)

# A digest for each name that its blob counts: of the entries, and of those that gc has removed but not taken off yet.
_NAMED = (
    "SELECT digest FROM entries UNION ALL SELECT digest FROM (WITH RECURSIVE cut (digest, rest) AS ("
    "SELECT substr(digests, 1, 32), substr(digests, 33) FROM released UNION ALL"
    " SELECT substr(rest, 1, 32), substr(rest, 33) FROM cut WHERE length(rest) > 0) SELECT digest FROM cut)"
)

_PACKED = f"coalesce(sum(CASE WHEN pack > 0 THEN stored + {HEAD_SIZE} END), 0)"


class Rebuilt(NamedTuple):
    """What a rebuild found.

    Attributes:
        entries, blobs: rows of the new index.
        lost: names whose bytes are not in the object directory; they are dropped.
        damaged: objects and stretches of packs or journal that could not be read.
    """

    entries: int
    blobs: int
    lost: list[str]
    damaged: list[str]


@dataclass
class Aside:
    """A damaged index while another is made.

    Attributes:
        kept: where the index is now; None if there was none.
        is_replaced: whether the new index is whole; if not, an error has the damaged one put back.
    """

    kept: Path | None
    is_replaced: bool = False


@contextmanager
def index_set_aside(path: Path, quarantine: Path, beacon: Beacon) -> Iterator[Aside]:
    """Move a damaged index out of the way, and tell every process not to use it any more.

    If the block fails before the new index is whole, the damaged one is put back where it was: the log beside it may
    hold what nothing else does.
    """
    now, suffixes = time.time_ns(), ("", "-wal", "-shm")
    files = [path.with_name(f"{path.name}{suffix}") for suffix in suffixes]
    places = [quarantine / f"index-{now}.sqlite{suffix}" for suffix in suffixes]
    moved: dict[Path, Path] = {}
    aside = Aside(None)
    try:
        for file, place in zip(files, places, strict=True):
            if file.exists():
                moved[file] = place
                file.rename(place)
        aside.kept = moved.get(path)
        _tell_of_another(beacon)
        yield aside
    except BaseException:
        if not aside.is_replaced:
            _put_back(files, moved)
            _tell_of_another(beacon)
        raise


def _put_back(files: list[Path], moved: dict[Path, Path]) -> None:
    for file in files:
        place = moved.get(file)
        if place is None:
            file.unlink(missing_ok=True)
        elif place.exists():
            place.rename(file)


def _tell_of_another(beacon: Beacon) -> None:
    beacon.words[EPOCH] = (beacon.words[EPOCH] + 1) % 2**64  # a damaged beacon may hold any number


def rebuild(
    index: Index, objects: ObjectDirectory, progress: Callable[[int], object] | None = None
) -> Rebuilt:
    """Replace every row of the index by what the object directory says, tables and all if it has none.

    Nobody sees an index that knows less than there is: all of it is one transaction, and until it commits a new file
    has no version, which others refuse.

    Args:
        index: can be written to.
        objects: what there is.
        progress: called with the stored bytes of each object and pack that was read.
    """
    damaged: list[str] = []
    # Others wait for the lock for two minutes, and then they end: what takes as long as the disk takes comes before it.
    read = _read_raw(objects, progress)
    with index.write() as txn:
        apply_migrations(index.connection())
        for table in ("entries", "blobs", "checksums", "packs", "released"):
            txn.execute(f"DELETE FROM {table}")
        for blob, checksums in _blobs(objects, txn, read, damaged, progress):
            txn.execute(_ADD_BLOB, blob)
            if checksums is not None:
                txn.execute("INSERT OR REPLACE INTO checksums VALUES (?, ?)", (blob.digest, checksums))
        _skip_pack_ids(txn)
        _names(index, txn, damaged)
        lost = [row[0] for row in txn.execute(
            "SELECT name FROM entries e WHERE NOT EXISTS (SELECT 1 FROM blobs b WHERE b.digest = e.digest)"
        )]  # fmt: skip
        txn.executemany("DELETE FROM entries WHERE name = ?", ((name,) for name in lost))
        recount(txn)
        txn.announce()
    index.snapshot_journal()
    totals = index.totals()
    return Rebuilt(totals.entries, totals.blobs, lost, damaged)


def _skip_pack_ids(txn: Write) -> None:
    """Have new packs take ids that no pack ever had: a process may still hold one open that was removed before."""
    txn.execute(
        "INSERT INTO packs (id, created) SELECT max(?, coalesce(max(id), 0) + 1), 0 FROM packs",
        (int(time.time()),),
    )
    txn.execute("DELETE FROM packs WHERE created = 0")


class _Raw(NamedTuple):
    """A raw object that was read whole: as it was, and what it holds."""

    identity: tuple[int, ...]
    blob: Blob
    checksums: bytes | None


def _read_raw(objects: ObjectDirectory, progress: Callable[[int], object] | None) -> dict[bytes, _Raw]:
    """Raw objects of several frames, without the lock. Those that are damaged, or gone again, are looked at under it."""
    found = {}
    for digest, codec, path in objects.loose.listing():
        if codec != "none":
            continue
        with suppress(CorruptError, OSError):
            status = path.lstat()
            if status.st_size > FRAME_SIZE:
                found[digest] = _Raw(_identity(status), *describe_loose(digest, codec, path))
                if progress is not None:
                    progress(status.st_size)
    return found


def _identity(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _blobs(
    objects: ObjectDirectory,
    txn: Write,
    read: dict[bytes, _Raw],
    damaged: list[str],
    progress: Callable[[int], object] | None,
) -> Iterator[tuple[Blob, bytes | None]]:
    for pack in objects.packs.ids():
        path = objects.packs.path(pack)
        txn.execute("INSERT INTO packs (id, created) VALUES (?, ?)", (pack, time.time()))
        try:
            for found in scan(path, pack):
                if isinstance(found, Damage):
                    damaged.append(f"{path}: {found.length} bytes at {found.offset} are no record")
                elif not found.intact:
                    damaged.append(f"{path}: the record at {found.blob.offset} fails its check")
                else:
                    yield found.blob, None
        except OSError as error:
            damaged.append(f"{path}: {error.strerror}")
        if progress is not None:
            progress(path.lstat().st_size)
    for digest, codec, path in objects.loose.listing():
        status = path.lstat()
        raw = read.get(digest) if codec == "none" else None
        if raw is not None and raw.identity == _identity(status):
            yield raw.blob, raw.checksums
            continue
        try:
            yield describe_loose(digest, codec, path)
        except (CorruptError, OSError) as error:
            damaged.append(f"{path}: {error}")
        if progress is not None:
            progress(status.st_size)


def _names(index: Index, txn: Write, damaged: list[str]) -> None:
    for record in index.journal.replay():
        if record is None:
            damaged.append(f"{index.journal.folder}: a stretch of the names journal is damaged")
        elif record.digest is None:
            txn.execute("DELETE FROM entries WHERE name = ?", (record.name,))
        else:
            txn.execute(_SET_NAME, (*record, entry_check(record.name, record.digest)))


def recount(txn: Write) -> None:
    """Make what is kept beside the rows (sizes, references, totals) what the rows say."""
    txn.execute(
        "UPDATE entries SET size = coalesce((SELECT size FROM blobs b WHERE b.digest = entries.digest), size)"
    )
    txn.execute("DROP TABLE IF EXISTS temp.named")
    txn.execute("CREATE TEMP TABLE named (digest BLOB PRIMARY KEY, refs INTEGER) WITHOUT ROWID")
    txn.execute("INSERT INTO named SELECT digest, count(*) FROM entries GROUP BY digest")
    txn.execute(
        "UPDATE blobs SET refs = coalesce((SELECT refs FROM named n WHERE n.digest = blobs.digest), 0)"
    )
    txn.execute("UPDATE blobs SET orphaned = NULL WHERE refs > 0")
    txn.execute("UPDATE blobs SET orphaned = ? WHERE refs = 0 AND orphaned IS NULL", (time.time(),))
    txn.execute("DROP TABLE temp.named")
    txn.execute("DELETE FROM released")
    txn.execute(
        "UPDATE totals SET (entries, logical) = (SELECT count(*), coalesce(sum(size), 0) FROM entries),"
        " (blobs, uniq, stored, packed) ="
        f" (SELECT count(*), coalesce(sum(size), 0), coalesce(sum(stored), 0), {_PACKED} FROM blobs)"
    )


def is_counted_right(index: Index) -> bool:
    """Whether what `recount` makes is what there is."""
    db = index.connection()
    with unforked():
        db.execute("BEGIN")  # all of it as of one moment
        try:
            return _is_counted_right(db, index.totals())
        finally:
            db.execute("ROLLBACK")


def _is_counted_right(db: sqlite3.Connection, totals: Totals) -> bool:
    row = db.execute(
        "SELECT (SELECT count(*) FROM entries), (SELECT coalesce(sum(size), 0) FROM entries), count(*),"
        f" coalesce(sum(size), 0), coalesce(sum(stored), 0), {_PACKED}, coalesce(sum(refs), 0),"
        " (SELECT coalesce(sum(length(digests) / 32), 0) FROM released) FROM blobs"
    ).fetchone()
    # Totals first, references by their sum, then one by one.
    if tuple(row[:6]) != tuple(totals) or row[6] != row[0] + row[7]:
        return False
    wrong = (
        f"SELECT 1 FROM (SELECT digest, count(*) AS named FROM ({_NAMED}) GROUP BY digest) n"
        " JOIN blobs b ON b.digest = n.digest WHERE b.refs != n.named"
        " UNION ALL SELECT 1 FROM blobs WHERE (refs = 0) != (orphaned IS NOT NULL)"
        " UNION ALL SELECT 1 FROM entries e JOIN blobs b ON b.digest = e.digest WHERE e.size != b.size LIMIT 1"
    )
    return db.execute(wrong).fetchone() is None
