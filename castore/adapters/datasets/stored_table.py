"""Data files of kept datasets as tables: in memory where they are small, mapped, or lazy.

A lazy table holds its objects open, so it stays readable after gc removed them. Frames are checked as they
are decoded; whole objects are checked when they are opened (`mapped_check`), while a damaged result can still
be computed again. Assumes nothing of the files as a whole, unlike `dataset_entries`.
"""

from __future__ import annotations

import contextlib
import copy
import os
import resource
import weakref
from collections.abc import Generator, Iterator, Sequence
from typing import Any

import pyarrow as pa
from datasets.table import Table, concat_tables

from castore import layout
from castore.adapters.datasets.lazy_table import LazyTable, MappedRows
from castore.adapters.datasets.mapped_files import (
    COPIES_FOLDER,
    existing_copy_paths,
    link_path,
    mappable_path,
)
from castore.adapters.datasets.tables import table_in_memory, table_mapped
from castore.adapters.mapped_check import check_now, find_unchecked
from castore.errors import CacheWarning, CorruptError, FullError, NotFoundError, TooLargeError, warn
from castore.read.open_blob import OpenBlob
from castore.records import LOOSE, LOST, Blob
from castore.store import Store

#: Data files up to this size are read into memory: mapping them would cost a file each.
SMALL_BYTES = 1024 * 1024
_NO_ROOM = (
    "the budget of {} does not hold them and an uncompressed copy (`castore init --max-size` raises it)"
)
# Files that a process can still open beside those of lazy tables.
_SPARE_FILES = 256


def damage_error(name: str) -> CorruptError:
    """The error for an entry whose bytes are damaged, or gone."""
    return CorruptError(f"the stored bytes of {name!r} are damaged, or gone", where=name)


def load_table(store: Store, name: str, blob: Blob) -> Table:
    """The rows of a data file. See `load_tables`."""
    return load_tables(store, [(name, blob)])[0]


def load_tables(
    store: Store, files: Sequence[tuple[str, Blob]], opened: Sequence[OpenBlob | None] | None = None
) -> list[Table]:
    """The rows of each of some data files, mapped, or in memory where the file is small.

    If the budget cannot hold the files and their copies, all are read into memory: the copies would evict the
    files.

    Args:
        store, files: the store, and the names and blobs of the files.
        opened: the blobs, if they are open already.

    Raises:
        CorruptError: a data file is damaged, or its bytes are gone.
    """
    may_copy = _copies_fit(store, [blob for _, blob in files])
    if not may_copy:
        _warn_of_memory(files[0][0], len(files), _NO_ROOM.format(store.path))
    each = zip(files, opened or [None] * len(files), strict=True)
    return [_load(store, *file, own, may_copy=may_copy) for file, own in each]


def _copies_fit(store: Store, blobs: Sequence[Blob]) -> bool:
    """Whether the budget holds some blobs beside the copies that would be mapped."""
    budget = store.settings.max_size
    if budget is None or store.mounts():
        return True
    copied = [blob for blob in blobs if blob.size > SMALL_BYTES and blob.codec != "none"]
    return sum(blob.size + blob.stored for blob in copied) <= budget


def _load(store: Store, name: str, blob: Blob, opened: OpenBlob | None, *, may_copy: bool) -> Table:
    try:
        blob = store.bring(blob)
        if blob.size <= SMALL_BYTES or blob.pack != LOOSE:
            data = None if blob.pack == LOST else store.get_blob(blob)
            if data is None:
                raise damage_error(name)
            return table_in_memory(data)
        if may_copy:
            return table_mapped(mappable_path(store, blob, opened))
    except (FileNotFoundError, NotFoundError) as error:
        raise damage_error(name) from error
    except (FullError, TooLargeError) as error:
        _warn_of_memory(name, 1, str(error))
    if opened is not None:
        return table_in_memory(opened.read_all())
    with store.open(name) as file:
        return table_in_memory(file.read())


def _warn_of_memory(name: str, count: int, why: str) -> None:
    others = f" and {count - 1} more files" if count > 1 else ""
    warn(
        f"the rows of {name!r}{others} are read into memory, since they cannot be mapped: {why}; mount the"
        " store to map them without a copy",
        CacheWarning,
    )


def open_lazy_table(
    store: Store, files: Sequence[tuple[str, Blob]], schema: pa.Schema, rows: int, *, names_files: bool
) -> LazyTable | None:
    """The rows of some data files, in order, read at first use.

    Args:
        store, files: the store, and the names and blobs of the files.
        schema, rows: the schema and the number of rows of all files together.
        names_files: whether rows name local files.

    Returns:
        None if a lazy table gains nothing: the files are small, not compressed, or too many to be held open.

    Raises:
        CorruptError: a file is damaged, or its bytes are gone.
    """
    blobs = [blob for _, blob in files]
    raw = all(blob.codec == "none" and blob.pack == LOOSE for blob in blobs)
    if raw or sum(blob.size for blob in blobs) <= SMALL_BYTES:
        return None
    if not all(blob.is_here for blob in blobs) or not _may_open(sum(blob.pack == LOOSE for blob in blobs)):
        return None
    return LazyTable(schema, rows, _StoredRows(store, files), names_files=names_files)


def _may_open(files: int) -> bool:
    """Whether this process may hold so many more files open.

    Raises the soft limit of open files, 1,024 by default, where the hard one allows that: a chain of steps
    holds a file for each block of each step.
    """
    wanted = len(os.listdir("/proc/self/fd")) + files + _SPARE_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or wanted <= soft:
        return True
    if hard != resource.RLIM_INFINITY and wanted > hard:
        return False
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return True


class _StoredRows:
    """The rows of compressed objects, which are held open."""

    was_scanned = False

    def __init__(self, store: Store, files: Sequence[tuple[str, Blob]]) -> None:
        self.size = sum(blob.size for _, blob in files)
        self._store = store
        self._files = files
        self._opened: list[OpenBlob] = []
        weakref.finalize(self, _close_all, self._opened)
        loose = [blob for _, blob in files if blob.pack == LOOSE]
        try:
            for blob in find_unchecked(store, loose):
                check_now(store, blob)
            for name, blob in files:  # nothing is noted of small blobs, which share a file
                if blob.pack != LOOSE and store.get_blob(blob) is None:
                    raise damage_error(name)
            self._opened += [store.open_blob(blob) for _, blob in files]
        except NotFoundError as error:
            raise damage_error(files[0][0]) from error
        # Asked now, since the store may be closed later.
        self._copy_paths = existing_copy_paths(store, self.blobs)

    def __reduce__(self) -> tuple[Any, ...]:
        paths = [link_path(self._store, blob) for _, blob in self._files]
        return _reopen, (self._store, self._files, self.size, paths)

    @property
    def path(self) -> str:
        return link_path(self._store, self._files[0][1])

    @property
    def blobs(self) -> Sequence[Blob]:
        return [blob for _, blob in self._files]

    def map_if_ready(self) -> Table | None:
        if not self._copy_paths:
            return None
        for _, blob in self._files:
            self._store.count_use(f"{COPIES_FOLDER}/{blob.digest.hex()}")
        with contextlib.suppress(FileNotFoundError):  # gc removed it meanwhile
            return concat_tables([table_mapped(path) for path in self._copy_paths])
        return None

    def map(self) -> Table:
        if not os.path.isfile(self._store.path / layout.SETTINGS):  # to open the store would make it again
            warn(
                f"the rows of {self._files[0][0]!r} are read into memory, since the store"
                f" {self._store.path} is gone",
                CacheWarning,
            )
            return concat_tables([table_in_memory(opened.read_all()) for opened in self._opened])
        # The copy is an open Store: the caller may have closed the original.
        with copy.copy(self._store) as store:
            return concat_tables(load_tables(store, self._files, self._opened))

    def batches(self, file: int | None = None) -> Generator[pa.RecordBatch, None, None]:
        for opened in self._opened if file is None else [self._opened[file]]:
            yield from decode_batches(opened)


def _reopen(
    store: Store, files: Sequence[tuple[str, Blob]], size: int, paths: list[str]
) -> _StoredRows | MappedRows:
    """Rows that come from another process: gc may have removed the copy since, or the objects."""
    try:
        return _StoredRows(store, files)
    except CorruptError:
        if not all(map(os.path.exists, paths)):
            raise
        return MappedRows(size, paths[0], concat_tables([table_mapped(path) for path in paths]))


def _close_all(opened: list[OpenBlob]) -> None:
    for blob in opened:
        blob.close()


def decode_batches(opened: OpenBlob) -> Generator[pa.RecordBatch, None, None]:
    """The batches of an Arrow stream in an object, decoded a little ahead of the reader.

    Raises:
        CorruptError: the object is damaged.
    """
    with (
        contextlib.closing(opened.pieces(whole=False)) as frames,
        pa.ipc.open_stream(pa.PythonFile(_FrameFile(frames), mode="r")) as stream,
    ):
        yield from stream


class _FrameFile:
    """Frames as a file that is read sequentially."""

    closed = False

    def __init__(self, frames: Iterator[bytes]) -> None:
        self._frames = frames
        self._rest = memoryview(b"")

    def read(self, size: int) -> Any:
        pieces, have = [self._rest], len(self._rest)
        while have < size and (frame := next(self._frames, None)) is not None:
            pieces.append(memoryview(frame))
            have += len(frame)
        over = max(0, have - size)
        last = pieces.pop()
        pieces.append(last[: len(last) - over])
        self._rest = last[len(last) - over :]
        return b"".join(pieces)

    def close(self) -> None: ...
