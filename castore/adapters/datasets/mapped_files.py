"""A blob's bytes as a file that processes can map: a raw object, a live mount's file, or a copy made once.

A materialised copy is a raw object of the store with the same bytes and a few more at the end, which readers
of Arrow streams ignore. A copy is an entry like any other under `COPIES_FOLDER`, so gc bounds the copies;
mapped bytes live until they are unmapped. Every object is checked before it is mapped: see
`castore.adapters.mapped_check`.

Callers get paths through a symbolic link in a folder of datasets' own cache. A plain `map` on a dataset
writes its cache file beside the dataset's file. So datasets' files must not seem to lie in the object
directory, where nothing else may be, nor in a read-only mount.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import chain
from pathlib import Path

import datasets
from blake3 import blake3

from castore.adapters import mapped_check
from castore.adapters.mapped_check import check_object, file_time, note_new
from castore.errors import CorruptError, NotFoundError
from castore.read.open_blob import OpenBlob
from castore.records import LOOSE, Blob, EntrySpec
from castore.store import Store
from castore.system.single_flight import ComputeLocks
from castore.write.batch import add_staged

#: The folder of materialised copies, each named by the digest of its blob.
COPIES_FOLDER = ".datasets/maps"
#: gc removes a materialised copy after so many seconds even without a budget: it is only a second copy.
_COPY_SECONDS = 7 * 86400.0
#: The end of a materialised copy, after the blob's bytes.
TAIL = b"castore: mapped\n"
_ATTEMPTS = 5


@cache
def _process_locks(path: Path, mode: int) -> ComputeLocks:
    """The locks of this adapter's computations in the store at ``path``, one object a process."""
    return ComputeLocks(path / "locks" / "datasets", mode)


def store_locks(store: Store) -> ComputeLocks:
    """The locks of this adapter's computations in a store."""
    return _process_locks(store.path, store.settings.file_mode)


def mappable_path(store: Store, blob: Blob, opened: OpenBlob | None = None) -> str:
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
        target = _mapping_target(store, blob, opened)
        path = _link(store, blob, target)
        if os.path.exists(path):
            return path
    raise FileNotFoundError(
        f"blob {blob.digest.hex()} in {store.path} was removed during each of {_ATTEMPTS} attempts to map "
        "it; try again"
    )


def existing_copy_paths(store: Store, blobs: Sequence[Blob]) -> list[str]:
    """As `mappable_path` of each, but only if all blobs are materialised already, and known to be intact.

    Returns:
        A path for each blob; none at all if one lacks a copy.
    """
    names = [f"{COPIES_FOLDER}/{blob.digest.hex()}" for blob in blobs]
    found = store.find_many(names)
    copies = [found[name].blob for name in names if name in found and found[name].blob.pack == LOOSE]
    if len(copies) < len(blobs) or mapped_check.find_unchecked(store, copies):
        return []
    return [_link(store, blob, store.path_of(raw)) for blob, raw in zip(blobs, copies, strict=True)]


def _mapping_target(store: Store, blob: Blob, opened: OpenBlob | None) -> str:
    if blob.codec == "none":
        check_object(store, blob)
        return store.path_of(blob)
    mounted = _mount_path(store, blob)
    if mounted is not None:
        check_object(store, blob)
        return mounted
    raw = _find_or_materialise(store, blob, opened)
    return store.path_of(raw)


def _link(store: Store, blob: Blob, target: str) -> str:
    """A symbolic link to ``target`` in a folder of datasets' own cache: plain `map` may write beside it."""
    link = link_path(store, blob)
    with contextlib.suppress(OSError):
        if os.readlink(link) == target:
            return link
    folder = Path(link).parent
    new = folder / f"{os.getpid()}-{threading.get_ident()}.link"
    new.unlink(missing_ok=True)
    new.symlink_to(target)
    new.replace(link)
    return link


def link_path(store: Store, blob: Blob) -> str:
    """The path that `mappable_path` returns, in a folder that exists.

    Each store has its own: one that is removed takes nothing from the datasets of another.
    """
    digest = blob.digest.hex()
    place = blake3(os.fsencode(store.path)).hexdigest(length=8)
    folder = Path(datasets.config.HF_DATASETS_CACHE) / "castore" / place / digest
    folder.mkdir(parents=True, exist_ok=True)
    return str(folder / "data.arrow")


# --- forgetting ---------------------------------------------------------------------------------------------


def forget_copies(store: Store, blobs: Iterable[Blob]) -> None:
    """Drop the materialised copies of blobs, and the notes about them."""
    gone = list(blobs)
    store.delete_many({f"{COPIES_FOLDER}/{blob.digest.hex()}" for blob in gone})
    mapped_check.forget_notes(store, gone)


# --- places -------------------------------------------------------------------------------------------------


def _mount_path(store: Store, blob: Blob) -> str | None:
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


def _find_or_materialise(store: Store, blob: Blob, opened: OpenBlob | None) -> Blob:
    name = f"{COPIES_FOLDER}/{blob.digest.hex()}"
    with store_locks(store).hold(name):
        found = store.find(name)
        if found is not None and found.blob.pack == LOOSE:
            try:
                check_object(store, found.blob)
                store.count_use(name)
                return found.blob
            except (NotFoundError, CorruptError):
                store.delete(name)  # the next call makes it again from the compressed bytes
        if opened is not None:
            return _materialise(store, blob, name, opened)
        with store.open_blob(blob.digest) as own:
            return _materialise(store, blob, name, own)


def _materialise(store: Store, blob: Blob, name: str, opened: OpenBlob) -> Blob:
    started = file_time()
    copy = store.writer.incoming("none", None, None)
    try:
        for piece in chain(opened.pieces(), [TAIL]):
            copy.add(piece)
        staged = copy.stage(reuse=False)
    except BaseException:
        copy.abandon()
        raise
    raw = Blob(staged.digest, copy.size, staged.stored, "none", LOOSE, 0)
    metadata = f'{{"of": "{blob.digest.hex()}"}}'
    store.flush()  # gc must not take entries in use for forgotten ones when it makes room
    expires = time.time() + _COPY_SECONDS
    with store.batch() as batch:
        add_staged(batch, lambda _: (EntrySpec(name, "bytes", metadata, expires, False), staged))
    note_new(store, [raw], started)
    return raw
