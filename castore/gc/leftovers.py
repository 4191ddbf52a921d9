"""What dead processes leave: temporary files, folders of work, objects and packs that no row means.

Also rewrites the names journal when it has grown well past what it describes. Everything here is found without the
write lock and looked at again with it before anything is removed.
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
from castore.system.temporary import left_behind, left_folders

#: The journal is rewritten when it is larger than this and than JOURNAL_GROWTH times its last snapshot.
JOURNAL_BYTES = 4 * 1024 * 1024
JOURNAL_GROWTH = 3


class Leftover(NamedTuple):
    """A file, or a folder of a process that is gone, to remove; ``digest`` or ``pack`` tell which row would forbid it."""

    path: Path
    size: int
    digest: bytes | None = None
    pack: int | None = None
    folder: bool = False


def find(index: Index, objects: ObjectDirectory) -> Iterator[Leftover]:
    """Every leftover file, as far as can be told without the write lock."""
    for stray in left_behind(objects.loose.tmp):
        yield Leftover(stray.path, stray.size)
    for folder in left_folders(objects.loose.tmp.parent / layout.WORK):
        yield Leftover(folder, sum(_size(path) or 0 for path in folder.rglob("*")), folder=True)
    yield from _unindexed_objects(index, objects)
    yield from _unregistered_packs(index, objects)


def _unindexed_objects(index: Index, objects: ObjectDirectory) -> Iterator[Leftover]:
    # A store has few objects beside its packs: it is asked for their rows, and not for all there are.
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
        with suppress(FileNotFoundError):  # another gc was quicker
            if not _is_wanted(index, objects, pack):
                yield Leftover(path, size, pack=pack)


def _is_wanted(index: Index, objects: ObjectDirectory, pack: int) -> bool:
    """Whether a row means no bytes, so it was damaged, and a record of its digest lies in this pack."""
    found = scan(objects.packs.path(pack), pack, payloads=False)
    digests = (one.blob.digest for one in found if isinstance(one, PackRecord))
    while batch := list(islice(digests, 1000)):
        if any(not objects.holds(row) for row in index.blobs_of(batch).values()):
            return True
    return False


def _wants(objects: ObjectDirectory, blob: Blob) -> bool:
    """Whether a row needs the object that lies here: it means no bytes, so it was damaged, and the object is whole."""
    return not objects.holds(blob) and objects.intact(blob.digest) is not None


def _size(path: Path) -> int | None:
    """Length of a file, or None if another gc was quicker."""
    try:
        return path.lstat().st_size
    except FileNotFoundError:
        return None


def remove(index: Index, objects: ObjectDirectory, leftovers: list[Leftover]) -> list[Leftover]:
    """Remove what is still a leftover now, and return that."""
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
                    continue  # another user's, in a shared store: it is for him to remove
            else:
                objects.discard(leftover.path)
            removed.append(leftover)
    return removed


def rotate_journal(index: Index) -> bool:
    """Replace the names journal by a snapshot if it has grown enough; returns whether it was."""
    size = index.journal.size()
    if size < JOURNAL_BYTES or size < JOURNAL_GROWTH * index.journal.snapshot_size():
        return False
    index.snapshot_journal()
    return True
