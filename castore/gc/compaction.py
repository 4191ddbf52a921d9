"""Compaction: moves the live records of mostly dead packs into this process's pack, and drops the rest.

Records move unchanged, a few at a time under the write lock, so nobody waits long. The transaction that moves
a pack's last live record also retires the pack. A writer that still appends to it learns that when it
commits, and starts another. Readers that have the old file open go on reading it.
"""

from __future__ import annotations

import os
from itertools import islice
from typing import TYPE_CHECKING

from castore.errors import CorruptError
from castore.index import pack_rows
from castore.index.database import Index
from castore.index.lock_yield import LockYield
from castore.index.transaction import Write
from castore.objects.directory import ObjectDirectory, check_row
from castore.objects.packs import FILE_HEAD, Damage, PackRecord, read_record, scan
from castore.records import HEAD_SIZE, Blob

if TYPE_CHECKING:
    from castore.parts import Parts

#: Packs whose live part is below this are rewritten.
LIVE_SHARE = 0.5
#: Packs with fewer bytes are merged once there are more than MANY_SMALL: each short-lived writer leaves one.
SMALL_PACK = 1024 * 1024
MANY_SMALL_PACKS = 16
#: Part of all bytes in packs that may be neither live nor recorded as dead; above it, gc counts them.
UNRECORDED_SHARE = 1 / 16
#: Records that one transaction moves at most, and scans at most, so that nobody waits long for the lock.
_MAX_MOVED, _MAX_SCANNED = 200, 1000


def choose(index: Index, objects: ObjectDirectory, going: list[tuple[bytes, int, int]]) -> dict[int, int]:
    """Choose the packs to rewrite once the blobs ``going`` (digest, stored, pack) are removed.

    Returns:
        The live bytes to move, by pack. The pack with the fewest comes first: it makes room for the rest.
    """
    sizes = {pack: _records_size(objects, pack) for pack in pack_rows.pack_ids(index)}
    dead = _dead_bytes(index, sizes)
    for _, stored, pack in going:
        if pack in dead:
            dead[pack] += stored + HEAD_SIZE
    live = {pack: max(0, size - dead[pack]) for pack, size in sizes.items()}
    chosen = {pack for pack, size in sizes.items() if live[pack] < size * LIVE_SHARE or size == 0}
    small = {pack for pack, size in sizes.items() if size < SMALL_PACK} - chosen
    if len(small) > MANY_SMALL_PACKS:
        chosen |= small
    return {pack: live[pack] for pack in sorted(chosen, key=lambda pack: (live[pack], pack))}


def _records_size(objects: ObjectDirectory, pack: int) -> int:
    """Bytes of a pack's records, live and dead; 0 if its writer died before it made the file."""
    try:
        return max(0, objects.packs.path(pack).lstat().st_size - len(FILE_HEAD))
    except FileNotFoundError:
        return 0


def _dead_bytes(index: Index, sizes: dict[int, int]) -> dict[int, int]:
    """The dead bytes of each pack: the recorded ones, or counted ones if the records must be incomplete.

    Records of a writer that died before it committed are recorded nowhere. So the sizes of all packs
    are compared with the bytes that are live or recorded. Counted numbers are saved for the next gc, in a dry
    run too.
    """
    recorded = pack_rows.recorded_dead_bytes(index)
    dead = {pack: recorded.get(pack, 0) for pack in sizes}
    in_all = sum(sizes.values())
    if abs(in_all - index.totals().packed - sum(dead.values())) <= in_all * UNRECORDED_SHARE:
        return dead
    live = pack_rows.live_bytes(index)
    dead = {pack: max(0, size - live.get(pack, 0)) for pack, size in sizes.items()}
    with index.write() as txn:
        txn.set_dead(dead)
    return dead


def compact(parts: Parts, pack: int) -> bool:
    """Move a pack's live records elsewhere, retire it and unlink its file; False if another gc was first."""
    path = parts.objects.packs.path(pack)
    try:
        opened = parts.objects.packs.open(pack)  # the reference keeps it open until all is moved
        fd = opened.fd
    except FileNotFoundError:
        fd = -1
    done = damaged = False
    position, lock_yield = 0, LockYield()
    while not done:
        with parts.index.write() as txn:
            if not txn.has_pack(pack):
                return False
            parts.writer.abandon_if_open(pack)
            found = (
                list(islice(scan(path, pack, start=position, payloads=False), _MAX_SCANNED))
                if fd >= 0
                else []
            )
            damaged |= any(isinstance(item, Damage) for item in found)
            position, done = _move_some(parts, txn, fd, found)
            done &= len(found) < _MAX_SCANNED
            if done:
                if damaged or fd < 0:
                    _move_rest(parts, txn, fd, pack)
                txn.retire_pack(pack)
        lock_yield.pause_if_due()
    with parts.index.write() as txn:
        if not txn.has_pack(pack):  # else the index was rebuilt meanwhile: rows may refer to it
            parts.objects.discard(path)
    parts.objects.packs.forget(pack)
    return True


def _move_some(parts: Parts, txn: Write, fd: int, found: list[PackRecord | Damage]) -> tuple[int, bool]:
    """Move the first `_MAX_MOVED` live records of ``found``.

    Returns:
        The offset at which to go on, and whether all of ``found`` was handled.
    """
    records = [item for item in found if isinstance(item, PackRecord)]
    rows = parts.index.blobs_of([record.blob.digest for record in records])
    moved = position = 0
    for item in found:
        if isinstance(item, Damage):
            position = item.offset + item.length
            continue
        position = item.blob.offset + item.blob.stored
        # A record without a row is dead, and so is one whose row refers to other bytes, or whose blob is
        # away. Any other row that refers to no bytes was damaged.
        row = rows.get(item.blob.digest)
        if row == item.blob:
            _move(parts, txn, fd, item.blob)
        elif row is None or not parts.objects.lacks(row) or not _repair_row(parts, txn, fd, item.blob):
            continue
        moved += 1
        if moved == _MAX_MOVED:
            return position, item is found[-1]
    return position, True


def _move(parts: Parts, txn: Write, fd: int, blob: Blob) -> None:
    try:
        payload = _read(parts, fd, blob)
    except CorruptError:
        parts.objects.quarantine(blob)
        txn.mark_lost(blob)
    else:
        parts.writer.pack.rewrite(txn, blob, payload)


def _read(parts: Parts, fd: int, blob: Blob) -> bytes:
    """The payload of a record that is about to become the store's own, checked."""
    payload = read_record(fd, blob)
    if not blob.is_own:
        parts.objects.check_content(blob, payload)
    return payload


def _repair_row(parts: Parts, txn: Write, fd: int, blob: Blob) -> bool:
    """Have a damaged row refer to the bytes of this record; False if the record is damaged too."""
    try:
        payload = _read(parts, fd, blob)
    except CorruptError:
        return False
    parts.writer.pack.rewrite(txn, blob, payload)
    return True


def _move_rest(parts: Parts, txn: Write, fd: int, pack: int) -> None:
    """Move blobs in damaged stretches if only their record heads are damaged; record the others as lost."""
    for digest in pack_rows.digests_in(txn, pack):
        blob = txn.blob(digest)
        if blob is None:
            continue
        try:
            check_row(blob)
            parts.objects.read_small(blob)
        except (CorruptError, FileNotFoundError):
            txn.mark_lost(blob)
        else:
            parts.writer.pack.rewrite(txn, blob, os.pread(fd, blob.stored, blob.offset))
