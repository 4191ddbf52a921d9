"""Leftovers of dead processes: temporary files, work folders, objects and packs that no row refers to.

Also replaces the names journal by a snapshot when it has grown well past the last one. Leftovers are found
without the write lock, and checked again under it before they are removed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from castore import layout
from castore.index.database import Index
from castore.index.pack_rows import pack_ids
from castore.objects.directory import ObjectDirectory
from castore.objects.packs import PackRecord, scan
from castore.records import Blob
from castore.system.temporary import leftover_files, leftover_folders

#: The journal is rewritten when it is larger than this and than JOURNAL_GROWTH times its last snapshot.
JOURNAL_BYTES = 4 * 1024 * 1024
JOURNAL_GROWTH = 3


class Leftover(NamedTuple):
    """A file, or a folder of a dead process, to remove. A row of ``digest`` or ``pack`` would forbid it."""

    path: Path
    size: int
    digest: bytes | None = None
    pack: int | None = None
    folder: bool = False


def find(index: Index, objects: ObjectDirectory) -> Iterator[Leftover]:
    """Every leftover, found without the write lock: `remove` checks again."""
    for leftover in leftover_files(objects.loose.tmp):
        yield Leftover(leftover.path, leftover.size)
    for folder in leftover_folders(objects.loose.tmp.parent / layout.WORK):
        yield Leftover(folder, sum(_size(path) or 0 for path in folder.rglob("*")), folder=True)
    yield from _unindexed_objects(index, objects)
    yield from _unregistered_packs(index, objects)


def _unindexed_objects(index: Index, objects: ObjectDirectory) -> Iterator[Leftover]:
    # A store has few loose objects: query the rows of those, not all rows.
    listing = objects.loose.listing()
    while batch := list(islice(listing, 1000)):
        rows = index.blobs_of([digest for digest, _, _ in batch])
        for digest, _, path in batch:
            row = rows.get(digest)
            if row is not None and (objects.where(row) == str(path) or _wants(objects, row)):
                continue
            if (size := _size(path)) is not None:
                yield Leftover(path, size, digest=digest)


def _unregistered_packs(index: Index, objects: ObjectDirectory) -> Iterator[Leftover]:
    registered = set(pack_ids(index))
    for pack in objects.packs.ids():
        path = objects.packs.path(pack)
        if pack in registered or (size := _size(path)) is None:
            continue
        with suppress(FileNotFoundError):  # another gc was faster
            if not _is_wanted(index, objects, pack):
                yield Leftover(path, size, pack=pack)


def _is_wanted(index: Index, objects: ObjectDirectory, pack: int) -> bool:
    """Whether this pack holds a record for a damaged row, that is, a row that refers to no bytes."""
    found = scan(objects.packs.path(pack), pack, payloads=False)
    digests = (one.blob.digest for one in found if isinstance(one, PackRecord))
    while batch := list(islice(digests, 1000)):
        if any(objects.lacks(row) for row in index.blobs_of(batch).values()):
            return True
    return False


def _wants(objects: ObjectDirectory, blob: Blob) -> bool:
    """Whether a damaged row, which refers to no bytes, needs the object here, which is intact."""
    return objects.lacks(blob) and objects.find_intact(blob.digest) is not None


def _size(path: Path) -> int | None:
    """Length of a file, or None if another gc was faster."""
    try:
        return path.lstat().st_size
    except FileNotFoundError:
        return None


def remove(index: Index, objects: ObjectDirectory, leftovers: list[Leftover]) -> list[Leftover]:
    """Remove those that are still leftovers, and return them."""
    removed = []
    for leftover in leftovers:
        with index.write() as txn:
            if leftover.digest is not None:
                blob = txn.blob(leftover.digest)
                if blob is not None and (objects.where(blob) == str(leftover.path) or _wants(objects, blob)):
                    continue
            if leftover.pack is not None and txn.has_pack(leftover.pack):
                continue
            if leftover.folder:
                import shutil

                shutil.rmtree(leftover.path, ignore_errors=True)
                if leftover.path.exists():
                    continue  # in a shared store, another user's: that user's gc removes it
            else:
                objects.discard(leftover.path)
            removed.append(leftover)
    return removed


def rotate_journal(index: Index) -> bool:
    """Replace the names journal by a snapshot if it has grown enough; returns whether it did."""
    size = index.journal.size()
    if size < JOURNAL_BYTES or size < JOURNAL_GROWTH * index.journal.snapshot_size():
        return False
    index.snapshot_journal()
    return True
