"""Checking whole objects before their files are mapped, each once for as long as nobody touches it.

A mapped page that fails its check cannot raise: the kernel ends the process. So an object is read whole and
checked before it is first mapped, and what was found is noted with the object's inode, time of change and the
machine's boot. As long as those are the same, the object is taken for good; writing to it, or a power cut,
has it read again.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

from castore.records import LOOSE, Blob
from castore.store import Store

#: Where it is noted which objects were checked.
NOTES_FOLDER = ".checked"
#: For so many seconds a note is kept.
NOTE_SECONDS = 7 * 86400.0


def check_object(store: Store, blob: Blob) -> None:
    """Read a loose object whole and check it, unless that was done since it last changed.

    Raises:
        NotFoundError: the bytes are gone.
        CorruptError: the bytes are damaged; they have been set aside.
    """
    for blob_to_check in find_unchecked(store, [blob]):
        check_now(store, blob_to_check)


def find_unchecked(store: Store, blobs: Sequence[Blob]) -> list[Blob]:
    """Those of some loose objects that have to be read before they are mapped, found with one question."""
    seen = [_state(store, blob) for blob in blobs]
    notes = store.get_many(map(_note_name, blobs))
    return [blob for blob, now, noted in zip(blobs, seen, notes, strict=True) if now is None or noted != now]


def check_now(store: Store, blob: Blob) -> None:
    """Read and check an object, and note that it is good.

    Raises:
        NotFoundError, CorruptError: as for `check`.
    """
    seen = _state(store, blob)  # before it is read: a change meanwhile makes the note worthless, never wrong
    with store.open_blob(blob.digest) as opened:
        for _ in opened.pieces():
            pass
    if seen is not None:
        store.put(_note_name(blob), seen, ttl=NOTE_SECONDS)


def note_new(store: Store, blobs: Iterable[Blob], started: float) -> None:
    """Note objects as good if they were written since ``started``. Older ones may have changed since."""
    notes = []
    for blob in blobs:
        status = _status(store, blob)
        if status is not None and status.st_mtime >= started:
            notes.append((_note_name(blob), _state_text(status)))
    store.put_many(notes, ttl=NOTE_SECONDS)


def forget_notes(store: Store, blobs: Iterable[Blob]) -> None:
    """Drop what was noted of objects."""
    store.delete_many({_note_name(blob) for blob in blobs})


def _note_name(blob: Blob) -> str:
    return f"{NOTES_FOLDER}/{blob.digest.hex()}-{blob.codec}"


def _status(store: Store, blob: Blob) -> os.stat_result | None:
    """Of a loose object; None if there is none."""
    try:
        return os.stat(store.path_of(blob)) if blob.pack == LOOSE else None
    except FileNotFoundError:
        return None


def _state(store: Store, blob: Blob) -> bytes | None:
    status = _status(store, blob)
    return None if status is None else _state_text(status)


def _state_text(status: os.stat_result) -> bytes:
    """What tells that nobody has touched a file since."""
    return f"{_boot_id()} {status.st_dev} {status.st_ino} {status.st_size} {status.st_ctime_ns}".encode()


@cache
def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
