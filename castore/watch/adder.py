"""Puts files as they settle: hashes and compresses them, then names those that nobody touched meanwhile.

A file that is being written is never named half: it is staged, checked again, and discarded if it changed.
One commit takes up to two hundred files, since a commit for each small file would cost more than the file.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from castore import Store
from castore.errors import CastoreError, FullError, StoreError
from castore.objects.packs import PACK_LIMIT
from castore.records import LOST, Entry, EntrySpec
from castore.watch import entry_sources
from castore.watch.file_lease import FileBusyError, Snapshot
from castore.write.batch import Batch, add_staged, commit_checked, staged_file
from castore.write.staging import Staged

_BATCH_FILES = 200
_BATCH_BYTES = 32 << 20

Fail = Callable[[str, Exception], object]


class Added(NamedTuple):
    """A file that was put: the entry it has now, and the one its name had before."""

    path: str
    entry: Entry
    before: Entry | None


class _RestageError(Exception):
    """A file cannot be staged again for a commit that needs it anew.

    Attributes:
        error: of the file.
    """

    def __init__(self, error: OSError | FileBusyError) -> None:
        super().__init__(str(error))
        self.error = error


class _PendingFile(NamedTuple):
    name: str
    path: str
    before: Entry | None
    through: str | None


def is_current(store: Store, entry: Entry | None, path: str, size: int, mtime_ns: int) -> bool:
    """Whether an entry was made from this very file as it is now, and its bytes can be had."""
    source = entry.metadata.get("source") if entry is not None else None
    if entry is None or not isinstance(source, dict):
        return False
    if (source.get("path"), source.get("mtime_ns"), entry.size) != (path, mtime_ns, size):
        return False
    found = store.find(entry.name)
    return found is not None and found.blob.pack != LOST


class Adder:
    """Puts files into a store.

    Args:
        store: takes the files.
        codec: for all; None for the store's.
        done: called for each file that was put, after its commit.
        fail: called with the path of each file that cannot be put, and the error.
        progress: called with the bytes of each piece that is compressed. Its exceptions end everything.
    """

    def __init__(
        self,
        store: Store,
        codec: str | None,
        done: Callable[[Added], object],
        fail: Fail,
        progress: Callable[[int], object],
    ) -> None:
        self._store = store
        self._codec = codec
        self._batch = store.batch(codec=codec)
        self._done = done
        self._fail = fail
        self._progress = progress
        self._pending: list[_PendingFile] = []

    def add(self, name: str, path: str, before: Entry | None, through: str | None = None) -> None:
        """Stage a file; it is named with the next `flush`, or earlier.

        Args:
            name: of its entry.
            path: of the file.
            before: the entry that the name has now.
            through: the link that the entry is named after, if it is a link to the file.

        Raises:
            BusyError: somebody writes to the file.
            CastoreError, OSError: it cannot be put.
        """
        pending = _PendingFile(name, path, before, through)
        before_it = self._batch.stored
        add_staged(self._batch, partial(self._stage, self._batch, pending))
        self._pending.append(pending)
        is_large = self._batch.stored - before_it > PACK_LIMIT
        if is_large or len(self._pending) >= _BATCH_FILES or self._batch.stored > _BATCH_BYTES:
            self.flush()

    def is_staged(self, name: str) -> bool:
        """Whether a file of that name waits for the next `flush`."""
        return any(pending.name == name for pending in self._pending)

    def _stage(self, batch: Batch, pending: _PendingFile, reuse: bool) -> tuple[EntrySpec, Staged]:
        try:
            return self._stage_file(batch, pending, reuse)
        except FullError:
            raise
        except (OSError, FileBusyError) as error:
            if reuse:
                raise
            raise _RestageError(
                error
            ) from error  # during a commit: keeps the file's error apart from those of the store

    def _stage_file(self, batch: Batch, pending: _PendingFile, reuse: bool) -> tuple[EntrySpec, Staged]:
        name, path, _, through = pending
        with Snapshot(path) as file:
            if not file.is_regular:
                raise CastoreError(f"{path} is neither a file nor a folder")
            file.check()
            source = entry_sources.source_of(path, file.status)
            if source is not None and through is not None:
                source["through"] = through
            metadata = {} if source is None else {"source": source}
            staged = staged_file(
                batch, name, file.fd, path, metadata=metadata, progress=self._progress, reuse=reuse
            )
            try:
                file.check()
            except BaseException:
                staged[1].discard()
                raise
        return staged

    def flush(self) -> None:
        """Name the staged files.

        Raises:
            FullError, StoreError: the store cannot go on.
        """
        pending, self._pending = self._pending, []
        try:
            self._commit(self._batch, pending)
        except (FullError, StoreError):
            raise
        except (CastoreError, _RestageError):
            for file in pending:  # one file made the whole commit fail
                self._commit_alone(file)

    def _commit_alone(self, pending: _PendingFile) -> None:
        batch = self._store.batch(codec=self._codec)
        try:
            add_staged(batch, partial(self._stage, batch, pending))
            self._commit(batch, [pending])
        except (FullError, StoreError):
            raise
        except _RestageError as unstageable:
            self._fail(pending.path, unstageable.error)
        except (CastoreError, OSError, FileBusyError) as error:
            self._fail(pending.path, error)

    def _commit(self, batch: Batch, pending: list[_PendingFile]) -> None:
        def require_files() -> None:
            for file in pending:
                # Another watcher has replaced the file by a link, whose record the put would overwrite.
                if file.through is None and os.path.islink(file.path):
                    raise _RestageError(FileBusyError(file.path))

        for file, entry in zip(pending, commit_checked(batch, require_files), strict=True):
            self._done(Added(file.path, entry, file.before))
