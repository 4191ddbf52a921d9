"""Compaction: moving the live records of packs that are mostly dead into this process's pack, and dropping the rest.

Records move as they are, a few at a time under the write lock, so nobody waits long. A pack is retired in the
same transaction that moves its last live record: a writer that still appends to it finds out when it commits,
and starts another. Readers that hold the old file go on reading it.
"""

from __future__ import annotations

import os
from itertools import islice
from typing import TYPE_CHECKING

from castore.errors import CorruptError
from castore.index import pack_rows
from castore.index.database import Index
from castore.index.lock_yield import Turns
from castore.index.transaction import Write
from castore.objects.directory import ObjectDirectory, check_row
from castore.objects.packs import FILE_HEAD, Damage, PackRecord, read_record, scan
from castore.records import HEAD_SIZE, Blob

if TYPE_CHECKING:
    from castore.parts import Parts

#: Packs whose live part is below this are rewritten.
LIVE_PART = 0.5
#: Packs smaller than this are merged once there are more than MANY_SMALL: each short-lived writer leaves one.
SMALL = 1024 * 1024
MANY_SMALL = 16
#: Of all that packs hold, what may be neither live nor noted as dead before gc counts.
UNNOTED_PART = 1 / 16
#: Records that one transaction moves, and looks at: nobody is to wait long for the lock.
_BATCH, _LOOKED_AT = 200, 1000


def choose(index: Index, objects: ObjectDirectory, going: list[tuple[bytes, int, int]]) -> dict[int, int]:
    """Which packs to rewrite once the blobs ``going`` (digest, stored, pack) are gone, and how many bytes of each move.

    The least to move comes first: it makes room for the rest.
    """
    held = {pack: _held(objects, pack) for pack in pack_rows.pack_ids(index)}
    dead = _dead_bytes(index, held)
    for _, stored, pack in going:
        if pack in dead:
            dead[pack] += stored + HEAD_SIZE
    live = {pack: max(0, size - dead[pack]) for pack, size in held.items()}
    chosen = {pack for pack, size in held.items() if live[pack] < size * LIVE_PART or size == 0}
    small = {pack for pack, size in held.items() if size < SMALL} - chosen
    if len(small) > MANY_SMALL:
        chosen |= small
    return {pack: live[pack] for pack in sorted(chosen, key=lambda pack: (live[pack], pack))}


def _held(objects: ObjectDirectory, pack: int) -> int:
    """Bytes of a pack's records, live and dead; none if its writer died before it made the file."""
    try:
        return max(0, objects.packs.path(pack).lstat().st_size - len(FILE_HEAD))
    except FileNotFoundError:
        return 0


def _dead_bytes(index: Index, held: dict[int, int]) -> dict[int, int]:
    """Bytes of each pack's records that are dead: what was noted as they died, or counted where that can't be all.

    Nobody notes what a writer appends who dies before he commits, so all that packs hold is compared with
    what is known. What was counted is written down for the next gc, in a dry run too.
    """
    noted = pack_rows.noted_dead(index)
    dead = {pack: noted.get(pack, 0) for pack in held}
    in_all = sum(held.values())
    if abs(in_all - index.totals().packed - sum(dead.values())) <= in_all * UNNOTED_PART:
        return dead
    live = pack_rows.live_bytes(index)
    dead = {pack: max(0, size - live.get(pack, 0)) for pack, size in held.items()}
    with index.write() as txn:
        txn.set_dead(dead)
    return dead


def compact(parts: Parts, pack: int) -> bool:
    """Move the pack's live records elsewhere, retire it and unlink its file; False if another gc was here
    first.
    """
    path = parts.objects.packs.path(pack)
    try:
        opened = parts.objects.packs.open(pack)  # held by this name until all is moved
        fd = opened.fd
    except FileNotFoundError:
        fd = -1
    done = damaged = False
    position, turns = 0, Turns()
    while not done:
        with parts.index.write() as txn:
            if not txn.has_pack(pack):
                return False
            parts.writer.pack.leave(pack)
            found = (
                list(islice(scan(path, pack, start=position, payloads=False), _LOOKED_AT)) if fd >= 0 else []
            )
            damaged |= any(isinstance(item, Damage) for item in found)
            position, done = _move_some(parts, txn, fd, found)
            done &= len(found) < _LOOKED_AT
            if done:
                if damaged or fd < 0:
                    _move_rest(parts, txn, fd, pack)
                txn.retire_pack(pack)
        turns.give()
    with parts.index.write() as txn:
        if not txn.has_pack(pack):  # else the index was rebuilt meanwhile, and rows may mean what lies there
            parts.objects.discard(path)
    parts.objects.packs.forget(pack)
    return True


def _move_some(parts: Parts, txn: Write, fd: int, found: list[PackRecord | Damage]) -> tuple[int, bool]:
    """Move the first `_BATCH` live records of ``found``: where to go on, and whether those were all."""
    records = [item for item in found if isinstance(item, PackRecord)]
    rows = parts.index.blobs_of([record.blob.digest for record in records])
    moved = position = 0
    for item in found:
        if isinstance(item, Damage):
            position = item.offset + item.length
            continue
        position = item.blob.offset + item.blob.stored
        # One that has no row is dead, and so is one whose bytes lie elsewhere. A row that means no bytes was
        # damaged.
        row = rows.get(item.blob.digest)
        if row == item.blob:
            _move(parts, txn, fd, item.blob)
        elif row is None or parts.objects.holds(row) or not _mend(parts, txn, fd, item.blob):
            continue
        moved += 1
        if moved == _BATCH:
            return position, item is found[-1]
    return position, True


def _move(parts: Parts, txn: Write, fd: int, blob: Blob) -> None:
    try:
        payload = read_record(fd, blob)
    except CorruptError:
        parts.objects.quarantine(blob)
        txn.lose_blob(blob)
    else:
        parts.writer.pack.write_anew(txn, blob, payload)


def _mend(parts: Parts, txn: Write, fd: int, blob: Blob) -> bool:
    """Have a row that means no bytes mean those of this record; False if it is not whole."""
    try:
        payload = read_record(fd, blob)
    except CorruptError:
        return False
    parts.writer.pack.write_anew(txn, blob, payload)
    return True


def _move_rest(parts: Parts, txn: Write, fd: int, pack: int) -> None:
    """Move what damaged stretches held if its bytes are right, and only its head is not; else it is lost."""
    for digest in pack_rows.digests_in(txn, pack):
        blob = txn.blob(digest)
        if blob is None:
            continue
        try:
            check_row(blob)
            parts.objects.read_small(blob)
        except (CorruptError, FileNotFoundError):
            txn.lose_blob(blob)
        else:
            parts.writer.pack.write_anew(txn, blob, os.pread(fd, blob.stored, blob.offset))
