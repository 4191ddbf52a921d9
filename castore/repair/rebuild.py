"""Rebuilds the index from the object directory: blobs from objects and packs, names from the names journal.

The rebuild is one transaction in the existing index. If that is damaged beyond use, a new file replaces it,
and the old one is kept in quarantine. The rebuild trusts the names and trailers of objects, since every read
checks their content. Raw objects are read whole: their checksums are in the index only.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from castore.errors import CorruptError
from castore.index import rebuild_rows
from castore.index.beacon import EPOCH, Beacon
from castore.index.database import Index
from castore.index.transaction import Write
from castore.objects.codecs import FRAME_SIZE
from castore.objects.directory import ObjectDirectory, describe_loose
from castore.objects.packs import Damage, scan
from castore.records import Blob, is_received


class Rebuilt(NamedTuple):
    """The outcome of a rebuild.

    Attributes:
        entries, blobs: rows of the new index.
        lost: names whose bytes are not in the object directory; the rebuild drops them.
        damaged: objects and stretches of packs or journal that could not be read.
    """

    entries: int
    blobs: int
    lost: list[str]
    damaged: list[str]


@dataclass
class SetAside:
    """A damaged index while a new one is made.

    Attributes:
        moved_to: the path of the damaged index now; None if there was none.
        is_replaced: whether the new index is whole; if not, the damaged one is put back after an error.
    """

    moved_to: Path | None
    is_replaced: bool = False


@contextmanager
def set_index_aside(path: Path, quarantine: Path, beacon: Beacon) -> Iterator[SetAside]:
    """Move a damaged index out of the way, and have every process stop using it.

    If the block fails before the new index is whole, the damaged one is put back: the WAL beside it may have
    changes that are nowhere else.
    """
    now, suffixes = time.time_ns(), ("", "-wal", "-shm")
    files = [path.with_name(f"{path.name}{suffix}") for suffix in suffixes]
    places = [quarantine / f"index-{now}.sqlite{suffix}" for suffix in suffixes]
    moved: dict[Path, Path] = {}
    aside = SetAside(None)
    try:
        for file, place in zip(files, places, strict=True):
            if file.exists():
                moved[file] = place
                file.rename(place)
        aside.moved_to = moved.get(path)
        _announce_replacement(beacon)
        yield aside
    except BaseException:
        if not aside.is_replaced:
            _put_back(files, moved)
            _announce_replacement(beacon)
        raise


def _put_back(files: list[Path], moved: dict[Path, Path]) -> None:
    for file in files:
        place = moved.get(file)
        if place is None:
            file.unlink(missing_ok=True)
        elif place.exists():
            place.rename(file)


def _announce_replacement(beacon: Beacon) -> None:
    beacon.words[EPOCH] = (beacon.words[EPOCH] + 1) % 2**64  # a damaged beacon may hold any number


def rebuild(
    index: Index, objects: ObjectDirectory, progress: Callable[[int], object] | None = None
) -> Rebuilt:
    """Replace every row of the index by rows made from the object directory; makes missing tables.

    Nobody sees an incomplete index: the rebuild is one transaction, and before it commits a new file has no
    schema version, so other processes refuse it.

    Args:
        index: open for writing.
        objects: the object directory.
        progress: called with the stored bytes of each object and pack that was read.
    """
    damaged: list[str] = []
    # Other writers wait for the lock for two minutes, and then fail. So the long reads come before the lock
    # is taken.
    read = _read_raw(objects, progress)
    with index.write() as txn:
        rebuild_rows.clear(index, txn)
        for blob, checksums in _blobs(objects, txn, read, damaged, progress):
            rebuild_rows.add_blob(txn, blob, checksums)
        rebuild_rows.skip_pack_ids(txn)
        _names(index, txn, damaged)
        lost = rebuild_rows.names_without_blob(txn)
        rebuild_rows.drop_names(txn, lost)
        rebuild_rows.recount(txn)
        txn.announce()
    index.snapshot_journal()
    totals = index.totals()
    return Rebuilt(totals.entries, totals.blobs, lost, damaged)


class _RawObject(NamedTuple):
    """A raw object that was read whole: the identity of its file, its blob and its checksums."""

    identity: tuple[int, ...]
    blob: Blob
    checksums: bytes | None


def _read_raw(objects: ObjectDirectory, progress: Callable[[int], object] | None) -> dict[bytes, _RawObject]:
    """Read raw objects of several frames, without the lock. The rebuild reads damaged ones again under it."""
    found = {}
    for digest, codec, path in objects.loose.listing():
        if codec != "none":
            continue
        with suppress(CorruptError, OSError):
            status = path.lstat()
            if status.st_size > FRAME_SIZE:
                found[digest] = _RawObject(_identity(status), *describe_loose(digest, codec, path))
                if progress is not None:
                    progress(status.st_size)
    return found


def _identity(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _blobs(
    objects: ObjectDirectory,
    txn: Write,
    read: dict[bytes, _RawObject],
    damaged: list[str],
    progress: Callable[[int], object] | None,
) -> Iterator[tuple[Blob, bytes | None]]:
    # Of two records of a blob the later one counts: the store's own one.
    for pack in sorted(objects.packs.ids(), key=is_received, reverse=True):
        path = objects.packs.path(pack)
        rebuild_rows.add_pack(txn, pack)
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
        else:
            rebuild_rows.replay(txn, record)
