"""A blob's bytes as a file that processes can map: a raw object, a live mount's file, or a copy made once.

A materialised copy is a raw object of the store with the same bytes and a few more at the end, which readers
of Arrow streams ignore. It is an entry like any other under `MAPS`, so gc bounds the copies; mapped bytes
live until they are unmapped. Every object is checked before it is mapped: see
`castore.adapters.mapped_check`.

Callers get paths through a symbolic link in a folder of datasets' own cache: a plain `map` on a dataset
writes its cache file beside the dataset's file, a place that must not be the object directory and cannot be a
read-only mount.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import datasets
from blake3 import blake3

from castore.adapters import mapped_check
from castore.adapters.mapped_check import check, note_new
from castore.errors import CorruptError, NotFoundError
from castore.objects.encode import encode
from castore.read.open_blob import OpenBlob
from castore.records import LOOSE, Blob, EntrySpec
from castore.store import Store
from castore.system.single_flight import ComputeLocks
from castore.write.batch import add_staged
from castore.write.staging import LargeBlob

#: The folder of materialised copies, each named by the digest of its blob.
MAPS = ".datasets/maps"
#: gc removes a materialised copy after so many seconds even without a budget: it is only a second copy.
MAPS_SECONDS = 7 * 86400.0
#: The end of a materialised copy, after the blob's bytes.
TAIL = b"castore: mapped\n"
_ATTEMPTS = 5


@cache
def locks_of(path: Path, mode: int) -> ComputeLocks:
    """The locks of this adapter's computations in the store at ``path``, one object a process."""
    return ComputeLocks(path / "locks" / "datasets", mode)


def store_locks(store: Store) -> ComputeLocks:
    """The locks of this adapter's computations in a store."""
    return locks_of(store.path, store.settings.file_mode)


def mappable(store: Store, blob: Blob, opened: OpenBlob | None = None) -> str:
    """A path under which the bytes of a loose blob, and at most a few more, can be mapped.

    Args:
        store, blob: the store, and its blob.
        opened: the blob, if it is open already: its object may be gone by then.

    Raises:
        FileNotFoundError, NotFoundError: the bytes are gone.
        CorruptError: the bytes are damaged; they have been set aside.
        FullError, TooLargeError: a copy would not fit into the store's budget, or onto its disk.
    """
    for _ in range(_ATTEMPTS):
        target = _target(store, blob, opened)
        path = _link(blob, target)
        if os.path.exists(path):
            return path
    raise FileNotFoundError(f"the bytes of blob {blob.digest.hex()} vanish as soon as they are there")


def mapped_before(store: Store, blob: Blob) -> str | None:
    """As `mappable`, but only for a blob that is materialised already, and known to be intact."""
    found = store.find(f"{MAPS}/{blob.digest.hex()}")
    if found is None or found.blob.pack != LOOSE or mapped_check.unchecked(store, [found.blob]):
        return None
    return _link(blob, store.path_of(found.blob))


def _target(store: Store, blob: Blob, opened: OpenBlob | None) -> str:
    if blob.codec == "none":
        check(store, blob)
        return store.path_of(blob)
    mounted = _in_mount(store, blob)
    if mounted is not None:
        check(store, blob)
        return mounted
    raw = _materialised(store, blob, opened)
    return store.path_of(raw)


def _link(blob: Blob, target: str) -> str:
    """A symbolic link to ``target`` in a folder of datasets' own cache: plain `map` may write beside it."""
    link = path_of(blob)
    with contextlib.suppress(OSError):
        if os.readlink(link) == target:
            return link
    folder = Path(link).parent
    new = folder / f"{os.getpid()}-{threading.get_ident()}.link"
    new.unlink(missing_ok=True)
    new.symlink_to(target)
    new.replace(link)
    return link


def path_of(blob: Blob) -> str:
    """The path that `mappable` returns, in a folder that exists."""
    digest = blob.digest.hex()
    folder = Path(datasets.config.HF_DATASETS_CACHE) / "castore" / digest[:2] / digest
    folder.mkdir(parents=True, exist_ok=True)
    return str(folder / "data.arrow")


# --- forgetting ---------------------------------------------------------------------------------------------


def forget(store: Store, blobs: Iterable[Blob]) -> None:
    """Drop the materialised copies of blobs, and the notes about them."""
    gone = list(blobs)
    store.delete_many({f"{MAPS}/{blob.digest.hex()}" for blob in gone})
    mapped_check.forget(store, gone)


# --- places -------------------------------------------------------------------------------------------------


def _in_mount(store: Store, blob: Blob) -> str | None:
    """The blob's path in a live mount of this store, or None."""
    digest = blob.digest.hex()
    for mount in store.mounts():
        path = os.path.join(mount.mountpoint, ".castore", "objects", digest[:2], digest)
        try:
            if os.stat(path).st_size == blob.size:
                return path
        except OSError:
            continue  # unmounted a moment ago, or another user's or container's
    return None


def _materialised(store: Store, blob: Blob, opened: OpenBlob | None) -> Blob:
    name = f"{MAPS}/{blob.digest.hex()}"
    with store_locks(store).hold(name):
        found = store.find(name)
        if found is not None and found.blob.pack == LOOSE:
            try:
                check(store, found.blob)
                store.count_use(name)
                return found.blob
            except (NotFoundError, CorruptError):
                store.delete(name)  # the next call makes it again from the compressed bytes
        if opened is not None:
            return _materialise(store, blob, name, opened)
        with store.open_blob(blob.digest) as own:
            return _materialise(store, blob, name, own)


def _materialise(store: Store, blob: Blob, name: str, opened: OpenBlob) -> Blob:
    started = time.time()
    fd, temporary = store.objects.loose.create()
    try:
        frames = _Recut(opened.pieces(), blob)
        encoded = encode(frames, frames.size, "none", None, lambda piece: _write_all(fd, piece))
        store.objects.loose.seal(fd, durable=False)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    finally:
        os.close(fd)
    raw = Blob(frames.digest(), frames.size, encoded.stored, "none", LOOSE, 0)
    metadata = f'{{"of": "{blob.digest.hex()}"}}'
    store.flush()  # gc must not take entries in use for forgotten ones when it makes room
    staged = LargeBlob(store.objects, raw, temporary, encoded.checksums)
    expires = time.time() + MAPS_SECONDS
    with store.batch() as batch:
        add_staged(batch, lambda _: (EntrySpec(name, "bytes", metadata, expires, False), staged))
    note_new(store, [raw], started)
    return raw


class _Recut:
    """The frames of a blob with the tail after the last one."""

    def __init__(self, frames: Iterator[bytes], blob: Blob) -> None:
        self._frames = frames
        self._with_tail = blake3()
        self.size = blob.size + len(TAIL)

    def digest(self) -> bytes:
        """BLAKE3 of the blob's bytes with the tail."""
        return self._with_tail.digest()

    def __iter__(self) -> Iterator[bytes]:
        from castore.objects.codecs import FRAME_SIZE

        last = b""
        for frame in self._frames:
            if len(frame) == FRAME_SIZE:
                self._with_tail.update(frame)
                yield frame
            else:
                last = frame
        last += TAIL
        self._with_tail.update(last)
        for start in range(0, len(last), FRAME_SIZE):
            yield last[start : start + FRAME_SIZE]


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
