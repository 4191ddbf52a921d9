"""Scrubbing: reads blobs back, all or a sample, and sets bad ones aside.

A bad blob is quarantined and from then on a miss. With ``repair`` its entries are removed too, so that no
listing has unreadable names. If the bytes are right and only the index or a record head is wrong, that is
corrected. Each blob is read frame by frame: the frames of the largest blob bound the memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from castore.errors import CorruptError
from castore.objects.decode import BlobReader
from castore.objects.packs import read_record
from castore.records import AWAY, LOOSE, LOST, Blob
from castore.repair import dictionary_repair

if TYPE_CHECKING:
    from castore.parts import Parts


_ROW_CORRECTED = "the object is intact, and its index row has been corrected"
_SET_ASIDE = "the object was set aside; a remote has its bytes, and they are fetched when they are read"


class Finding(NamedTuple):
    """One bad blob, or one bad copy of a dictionary.

    Attributes:
        digest: 64 hex characters; a dictionary's id.
        where: the file, and the offset in it.
        why: what is wrong.
        names: the entries that point to it.
        lost: whether reads of them are misses from now on. The others are mended, or a remote has the bytes.
    """

    digest: str
    where: str
    why: str
    names: list[str]
    lost: bool = False


class _Problem(NamedTuple):
    """The reason why a blob is bad, and whether its bytes are lost."""

    why: str
    lost: bool


class Report(NamedTuple):
    """The outcome of `Store.verify`.

    Attributes:
        checked: number of blobs read.
        stored: their stored bytes.
        bad: blobs and dictionary copies that were bad, and were set aside or corrected.
        dropped: names of entries that were removed (with ``repair``).
    """

    checked: int
    stored: int
    bad: list[Finding]
    dropped: list[str]


def run(parts: Parts, *, repair: bool, sample: float, progress: Callable[[int], object] | None) -> Report:
    """Verify. See `Store.verify`."""
    import random  # here: its imports are a twentieth of those of a `Store`

    draw = random.SystemRandom().random  # the state of the program's own generator stays as it is
    copies_found = [
        Finding(path.stem, str(path), f"{why}; it has been written again" if mended else why, [])
        for path, why, missing, mended in dictionary_repair.repair_copies(parts.index, parts.objects)
        if not (missing and mended)  # a killed process leaves a missing copy: no damage
    ]
    checked = stored = 0
    bad: list[tuple[Blob, _Problem]] = []
    for blob in parts.index.blobs():
        if blob.pack == AWAY:  # its bytes are checked when they come
            continue
        if blob.pack != LOST and draw() >= sample:
            continue
        problem = _check(parts, blob)
        if problem is not None:
            bad.append((blob, problem))
        checked += 1
        stored += blob.stored
        if progress is not None:
            progress(blob.stored)
    findings = [
        Finding(blob.digest.hex(), parts.objects.where(blob), why, parts.index.names_of(blob.digest), lost)
        for blob, (why, lost) in bad
    ]
    dropped = _drop(parts, [blob for blob, _ in bad]) if repair else []
    return Report(checked, stored, copies_found + findings, dropped)


def _check(parts: Parts, blob: Blob) -> _Problem | None:
    """Check a blob and set it aside if it is bad; returns the problem, or None."""
    if blob.pack == LOST:
        return _Problem("it was found damaged or missing before, and has not been put again since", True)
    try:
        reader = parts.source.open_here(blob)
    except FileNotFoundError:
        return _reason_if_lost(parts, blob, "its object is missing")
    try:
        blob = reader.blob  # compaction may have moved it, or a wrong row was corrected
        for _ in reader.in_order():
            pass
        why = _check_placement(parts, reader)
        return None if why is None else _Problem(why, False)
    except CorruptError as error:
        if parts.source.quarantine(blob, error):
            now = parts.index.blob(blob.digest)
            is_away = now is not None and now.pack == AWAY
            return _Problem(f"{_SET_ASIDE if is_away else _ROW_CORRECTED}: {error}", False)
        return _reason_if_lost(parts, blob, str(error))
    finally:
        reader.close()


def _reason_if_lost(parts: Parts, blob: Blob, why: str) -> _Problem | None:
    # If it is not recorded as lost, gc removed it or a put replaced it during the check.
    now = parts.index.blob(blob.digest)
    is_lost = now is not None and (now.pack == LOST or (parts.read_only and now == blob))
    return _Problem(why, True) if is_lost else None


def _check_placement(parts: Parts, reader: BlobReader) -> str | None:
    """Check the parts that reading the content does not: a record's head, a file's length."""
    blob = reader.blob
    if blob.pack == LOOSE:
        length = reader.file_length()
        if length != blob.stored:
            raise CorruptError(f"its file is {length} bytes long instead of {blob.stored}")
        return None
    try:
        read_record(reader.fileno(), blob)
    except CorruptError as error:
        if parts.read_only:
            return f"{error}; the bytes are right"
        with parts.index.write() as txn:
            if txn.blob(blob.digest) == blob:
                parts.writer.pack.rewrite(txn, blob, os.pread(reader.fileno(), blob.stored, blob.offset))
        return f"{error}; the bytes are right, and have been written again"
    return None


def _drop(parts: Parts, blobs: list[Blob]) -> list[str]:
    dropped = []
    for blob in blobs:
        for name in parts.index.names_of(blob.digest):
            with parts.index.write() as txn:
                now = txn.blob(blob.digest)
                if (now is None or now.pack == LOST) and txn.delete_entry(name):
                    dropped.append(name)
        with parts.index.write() as txn:
            now = txn.blob(blob.digest)
            if now is not None and now.pack == LOST:
                txn.drop_blob(now)
    return dropped
