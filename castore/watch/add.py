"""Putting files as they settle: hashed and compressed first, named only if nobody touched them meanwhile.

A file that is being written is never named half: it is staged, looked at again, and thrown away if it changed. Files go
into commits of some hundred, since a commit for each small one would cost more than the file.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from castore import Store
from castore.errors import CastoreError, FullError, StoreError
from castore.names import check_name
from castore.records import LOST, Entry, Pointing
from castore.watch import entry_sources
from castore.watch.file_lease import BusyError, Snapshot
from castore.write.batch import Putter
from castore.write.open_pack import Vanished
from castore.write.staging import Large, Staged

_BATCH_FILES = 200
_BATCH_BYTES = 32 << 20

Fail = Callable[[str, Exception], object]


class Added(NamedTuple):
    """A file that was put: the entry it has now, and the one its name had before."""

    path: str
    entry: Entry
    before: Entry | None


class _Wanted(NamedTuple):
    name: str
    path: str
    before: Entry | None
    through: str | None


class _Ready(NamedTuple):
    wanted: _Wanted
    pointing: Pointing
    staged: Staged


def is_current(store: Store, entry: Entry | None, path: str, size: int, mtime_ns: int) -> bool:
    """Whether an entry was made from this very file as it is now, and its bytes are there."""
    source = entry.metadata.get("source") if entry is not None else None
    if entry is None or not isinstance(source, dict):
        return False
    if (source.get("path"), source.get("mtime_ns"), entry.size) != (path, mtime_ns, size):
        return False
    found = store.index.find(entry.name)
    return found is not None and found.blob.pack != LOST


class Adder:
    """Puts files into a store.

    Args:
        store: where to.
        codec: for all; None for the store's.
        done: told of each file that was put, after its commit.
        fail: told of each that cannot be, and why.
        progress: called with the bytes of each piece that is compressed. What it raises ends everything.
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
        self._putter = Putter(store.writer, store.settings, store.path, store.prefixes)
        self._codec = self._putter.codec(codec, None)
        self._done = done
        self._fail = fail
        self._progress = progress
        self._ready: list[_Ready] = []
        self._size = 0

    def add(self, name: str, path: str, before: Entry | None, through: str | None = None) -> None:
        """Stage a file; it is named with the next `flush`, or earlier.

        Args:
            name: of its entry.
            path: of the file.
            before: the entry that the name has now.
            through: a link to the file, if it is the link that the entry is named after.

        Raises:
            BusyError: somebody writes to it.
            CastoreError, OSError: it cannot be put.
        """
        check_name(name)
        ready = self._stage(_Wanted(name, path, before, through), known=True)
        self._ready.append(ready)
        self._size += ready.staged.stored
        if isinstance(ready.staged, Large) or len(self._ready) >= _BATCH_FILES or self._size > _BATCH_BYTES:
            self.flush()

    def _stage(self, wanted: _Wanted, *, known: bool) -> _Ready:
        name, path, _, through = wanted
        with Snapshot(path) as file:
            if not file.is_regular:
                raise CastoreError(f"{path} is neither a file nor a folder")
            file.check()
            source = entry_sources.own(path, file.status)
            if source is not None and through is not None:
                source["through"] = through
            metadata = {} if source is None else {"source": source}
            pointing = self._putter.pointing(name, None, metadata, False, "bytes")
            staged = self._store.writer.stage_file(
                file.fd,
                *self._codec,
                known=known,
                progress=self._progress,
                dictionary=self._store.prefixes.dictionary(name),
            )
            try:
                file.check()
            except BaseException:
                staged.discard()
                raise
        return _Ready(wanted, pointing, staged)

    def flush(self) -> None:
        """Name what is staged.

        Raises:
            FullError, StoreError: the store cannot go on.
        """
        ready, self._ready, self._size = self._ready, [], 0
        if not ready:
            return
        try:
            self._commit(ready)
        except (FullError, StoreError):
            raise
        except (CastoreError, Vanished):
            for one in ready:  # one of them spoilt it for all
                self._alone(one)

    def _alone(self, ready: _Ready) -> None:
        try:
            self._commit([self._stage(ready.wanted, known=False)])
        except (FullError, StoreError):
            raise
        except (CastoreError, OSError, BusyError) as error:
            self._fail(ready.wanted.path, error)

    def _commit(self, ready: list[_Ready]) -> None:
        entries = self._store.writer.commit([(one.pointing, one.staged) for one in ready])
        for one, entry in zip(ready, entries, strict=True):
            self._done(Added(one.wanted.path, entry, one.wanted.before))
