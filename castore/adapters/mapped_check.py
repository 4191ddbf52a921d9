"""Checks whole objects before their files are mapped, each object once for as long as it does not change.

A mapped page that fails its check cannot raise an error: the kernel ends the process. So an object is read
whole and checked before it is first mapped. A note of the check holds the object's inode, its time of change,
and the machine's boot. While those are the same, the object counts as good. A write to the object, or a power
cut, makes it be read again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

from blake3 import blake3

from castore.errors import FullError, StoreError
from castore.records import LOOSE, Blob
from castore.store import Store

#: The folder of the notes of checked objects.
NOTES_FOLDER = ".checked"
#: Seconds after which a note expires.
NOTE_SECONDS = 7 * 86400.0
# Objects from which on they have a note in common.
_MANY = 8
# Linux' CLOCK_REALTIME_COARSE, which Python does not name.
_COARSE_CLOCK = 5


def check_object(store: Store, blob: Blob) -> None:
    """Read a loose object whole and check it, unless that was done since it last changed.

    Raises:
        NotFoundError: the bytes are gone.
        CorruptError: the bytes are damaged; they have been set aside.
    """
    for blob_to_check in find_unchecked(store, [blob]):
        check_now(store, blob_to_check)


def find_unchecked(store: Store, blobs: Sequence[Blob]) -> list[Blob]:
    """The loose objects that have to be read before they are mapped; asks the store once for all of them.

    If there are many, and none has to be read, one note is made for all of them, and asked for the next time.
    """
    seen = [_state(store, blob) for blob in blobs]
    name, state = _note_of_all(blobs, seen)
    if name is not None and store.get(name) == state:
        return []
    notes = store.get_many(map(_note_name, blobs))
    found = [blob for blob, now, noted in zip(blobs, seen, notes, strict=True) if now is None or noted != now]
    if name is not None and not found and not store.read_only:
        with suppress(StoreError, FullError):  # the disk is full, say; the notes of each do as well
            store.put(name, state, ttl=NOTE_SECONDS)
    return found


def _note_of_all(blobs: Sequence[Blob], seen: Sequence[bytes | None]) -> tuple[str | None, bytes]:
    """The name and the text of the note that stands for those of many objects; no name for few."""
    if len(blobs) < _MANY or None in seen:
        return None, b""
    objects, states = blake3(), blake3()
    for blob, state in zip(blobs, seen, strict=True):
        assert state is not None
        objects.update(_note_name(blob).encode())
        states.update(b"%d %s" % (len(state), state))
    return f"{NOTES_FOLDER}/all-{objects.hexdigest()}", states.digest()


def check_now(store: Store, blob: Blob) -> None:
    """Read and check an object, and note that it is good.

    Raises:
        NotFoundError, CorruptError: as for `check_object`.
    """
    seen = _state(store, blob)  # before the read: a change meanwhile makes the note worthless, never wrong
    with store.open_blob(blob.digest) as opened:
        for _ in opened.pieces():
            pass
    if seen is not None:
        store.put(_note_name(blob), seen, ttl=NOTE_SECONDS)


def file_time() -> float:
    """The time that the kernel gives to a file which is written now, in seconds since 1970.

    `time.time` is up to a tick of the kernel's clock ahead of this, which is longer than a write may take.
    """
    return time.clock_gettime(_COARSE_CLOCK)


def note_new(store: Store, blobs: Iterable[Blob], started: float) -> None:
    """Note objects as good if they were written since ``started``, a `file_time`.

    Older objects may have changed since.
    """
    notes = []
    for blob in blobs:
        status = _status(store, blob)
        if status is not None and status.st_mtime >= started:
            notes.append((_note_name(blob), _state_text(status)))
    store.put_many(notes, ttl=NOTE_SECONDS)


def forget_notes(store: Store, blobs: Iterable[Blob]) -> None:
    """Drop the notes of objects."""
    store.delete_many({_note_name(blob) for blob in blobs})


def _note_name(blob: Blob) -> str:
    return f"{NOTES_FOLDER}/{blob.digest.hex()}-{blob.codec}"


def _status(store: Store, blob: Blob) -> os.stat_result | None:
    """The status of a loose object's file; None if there is no such file."""
    try:
        return os.stat(store.path_of(blob)) if blob.pack == LOOSE else None
    except FileNotFoundError:
        return None


def _state(store: Store, blob: Blob) -> bytes | None:
    status = _status(store, blob)
    return None if status is None else _state_text(status)


def _state_text(status: os.stat_result) -> bytes:
    """A text that changes whenever somebody writes to the file."""
    return f"{_boot_id()} {status.st_dev} {status.st_ino} {status.st_size} {status.st_ctime_ns}".encode()


@cache
def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
