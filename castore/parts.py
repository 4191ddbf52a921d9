"""The parts of an open store as one value, and the functions that assemble it.

Garbage collection, repair, training and statistics take this value, never the `Store`: the store uses those
rooms, so they must not use the store. Nothing here puts, gets or removes anything.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

from castore import settings
from castore.errors import LostSettingsWarning, StoreError, warn
from castore.index.beacon import Beacon
from castore.index.connections import CLOSE_SECONDS
from castore.index.database import Index
from castore.index.journal import Journal
from castore.objects.codecs import FRAME_SIZE
from castore.objects.directory import ObjectDirectory
from castore.read.origin import Origin
from castore.read.source import BlobSource
from castore.read.usage import Usage
from castore.settings import Settings
from castore.system.ballast import Ballast
from castore.system.forks import fork_gate
from castore.write.prefixes import Prefixes
from castore.write.writer import BlobWriter

T = TypeVar("T")


class Parts:
    """The objects that act on one store, in one process.

    Attributes:
        path: of the store's folder, absolute.
        settings: of the store, with this process's overrides.
        read_only: the store's folder cannot be written to.
        index: names, blobs and counts.
        objects: the files with the blobs' bytes.
        usage: hits, misses and last accesses that are not in the index yet.
        source: reads blobs.
        writer: puts blobs.
        prefixes: the dictionaries of names.
        ballast: disk space held back for a full disk.
    """

    def __init__(
        self,
        path: Path,
        settings: Settings,
        read_only: bool,
        index: Index,
        objects: ObjectDirectory,
        usage: Usage,
        source: BlobSource,
        writer: BlobWriter,
        prefixes: Prefixes,
        ballast: Ballast,
    ) -> None:
        self.path = path
        self.settings = settings
        self.read_only = read_only
        self.index = index
        self.objects = objects
        self.usage = usage
        self.source = source
        self.writer = writer
        self.prefixes = prefixes
        self.ballast = ballast

    def relieve(self, work: Callable[[], T]) -> T:
        """Call ``work`` and return its result. On a full disk, ``work`` gets the room of the ballast.

        For work that frees space, or takes little.
        """
        return self.ballast.relieve(work, self.index.truncate_wal)

    def close(self) -> None:
        """Flush usage counters if there is room for them, then close files and connections."""
        self.usage.flush_if_possible()
        self.release()

    def release(self) -> None:
        """Close files and connections, and write nothing.

        Waits for a write transaction of another thread. If that takes long, the files that the transaction
        uses stay open until the next `release`.
        """
        if fork_gate.acquire(timeout=CLOSE_SECONDS):
            try:
                self.writer.close()
                self.index.journal.close()
            finally:
                fork_gate.release()
        self.objects.close()
        self.index.close()
        if self.source.shared is not None:
            self.source.shared.close()


def open_folder(
    path: Path,
    *,
    codec: str | None = None,
    level: int | None = None,
    max_size: float | str | None = None,
    ttl: float | str | None = None,
) -> tuple[Settings, bool]:
    """The settings of the store at ``path``, overridden by the arguments, and whether the store is read-only.

    Makes a store if there is none. The arguments are those of `Store`.

    Raises:
        StoreError: the folder is no store, of another format, not accessible, or on a network file system.
    """
    store_settings = settings.load(path)
    is_new = store_settings is None
    if store_settings is None:
        is_lost, base = settings.has_lost_settings(path), settings.recover(path)
        store_settings = settings.merge(base, codec=codec, level=level, max_size=max_size, ttl=ttl)
        settings.create(path, store_settings)
        if is_lost:
            warn(settings.describe_rewritten(path, store_settings), LostSettingsWarning)
    merged = settings.merge(store_settings, codec=codec, level=level, max_size=max_size, ttl=ttl)
    settings.refuse_network(path)
    read_only = not is_new and settings.is_read_only(path)
    settings.check_folders(path, merged, read_only=read_only)
    return merged, read_only


def open_parts(
    path: Path,
    store_settings: Settings,
    ballast: Ballast,
    make_room: Callable[[Parts, int], None],
    find_origin: Callable[[Parts], Origin],
    *,
    read_only: bool,
    memory: int,
    durable: bool,
) -> Parts:
    """The parts of the store at ``path``. They work on a full disk too, where the ballast makes room.

    Args:
        path: of the store's folder, absolute.
        store_settings: from `open_folder`.
        ballast: of the store.
        make_room: called with the bytes that a put needs, when the put would pass the budget.
        find_origin: makes the origin of blobs whose bytes are only in a remote.
        read_only: from `open_folder`.
        memory: bound on the RAM tier in bytes.
        durable: a put that has returned survives a power cut.

    Raises:
        StoreError: the store is damaged or not accessible.
    """
    return ballast.relieve(
        partial(_connect, path, store_settings, ballast, make_room, find_origin, read_only, memory, durable)
    )


def _connect(
    path: Path,
    store_settings: Settings,
    ballast: Ballast,
    make_room: Callable[[Parts, int], None],
    find_origin: Callable[[Parts], Origin],
    read_only: bool,
    memory: int,
    durable: bool,
) -> Parts:
    mode = store_settings.file_mode
    try:
        beacon = Beacon(path / "locks" / "beacon", mode, read_only=read_only)
    except OSError as error:
        raise StoreError(
            f"cannot use the store {path}: {error.strerror}: {error.filename}; `castore doctor` tells more"
        ) from error
    journal = Journal(path / "objects" / "names", path / "tmp", beacon, mode, read_only=read_only)
    objects = object_directory(path, store_settings, durable=durable)
    index = Index(
        path / "index.sqlite",
        beacon,
        journal,
        mode=mode,
        is_empty=objects.is_empty,
        durable=durable,
        read_only=read_only,
    )
    if durable and not read_only:
        settings.sync_folders(path)
    usage = Usage(index)
    parts: Parts = Parts(
        path,
        store_settings,
        read_only,
        index,
        objects,
        usage,
        BlobSource(index, objects, beacon, usage, memory, lambda: find_origin(parts)),
        BlobWriter(index, objects, store_settings.max_size, lambda need: make_room(parts, need)),
        Prefixes(objects.dictionaries, path / "tmp", beacon, mode),
        ballast,
    )
    return parts


def object_directory(path: Path, store_settings: Settings, *, durable: bool) -> ObjectDirectory:
    """The object directory of the store at ``path``, with the permission bits of its settings."""
    return ObjectDirectory(
        path,
        object_mode=store_settings.object_mode,
        file_mode=store_settings.file_mode,
        folder_mode=store_settings.folder_mode,
        durable=durable,
    )


def share_frames(parts: Parts, size: int) -> None:
    """Share decoded frames, in ``size`` bytes of memory, between processes that open the store so.

    Raises:
        FullError: the machine has less memory free; the parts are closed then.
        SegmentError: other processes use the store with another size; the parts are closed then.
    """
    from castore.shm.shared_frames import SharedFrames  # imports multiprocessing

    try:
        parts.source.shared = SharedFrames(parts.path, size, FRAME_SIZE)
    except BaseException:
        parts.close()
        raise
