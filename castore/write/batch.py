"""Several puts and deletes that are staged one by one, and committed together.

Bytes are hashed and compressed as they are put. Nothing is named before the commit.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, NamedTuple

from castore.errors import InvalidValueError
from castore.index.transaction import Write
from castore.names import check_name
from castore.objects.codecs import Buffer
from castore.records import Entry, Pointing
from castore.write.arguments import flatten, unchanging
from castore.write.putter import Putter
from castore.write.staging import Staged
from castore.write.writer import open_source

#: Stages bytes and returns them with their entry's specification. With False it must not rely on known blobs.
Make = Callable[[bool], tuple[Pointing, Staged]]


class _Item(NamedTuple):
    """A put of a batch, and the function that stages it again if a known blob has vanished."""

    pointing: Pointing
    staged: Staged
    make: Make | None


class Batch:
    """Puts and deletes that become visible together at the end of the block, or not at all.

    Made by `Store.batch`.

    Bytes are hashed and compressed as they are put. A batch holds them in memory until its end, since it may
    have to put them once more. So put large data as files, or by `run`, which holds nothing. After an
    exception in the block nothing is put or deleted. One thread uses a batch at a time.

    Attributes:
        entries: the entries that were put, in order, once the block has ended; empty before.
        stored: bytes that the staged blobs will add to the store.
    """

    def __init__(self, putter: Putter, codec: str | None, level: int | None, ttl: float | str | None) -> None:
        self._putter = putter
        self._codec = putter.codec(codec, level)
        self._ttl = ttl
        self._items: list[_Item] = []
        self._dropped: dict[str, None] = {}
        self._lives: dict[str, float] = {}  # lifetimes of names in seconds, from the commit on
        self._known, self._is_run = True, False
        self.stored = 0
        self.entries: list[Entry] = []

    def put(
        self,
        name: str,
        data: Buffer,
        *,
        codec: str | None = None,
        level: int | None = None,
        ttl: float | str | None = None,
        metadata: dict[str, Any] | None = None,
        pin: bool = False,
        serializer: str = "bytes",
    ) -> str:
        """Stage bytes to be kept under ``name``. Arguments are those of `Store.put`, defaults the batch's.

        Returns:
            The digest of the bytes, 64 hex characters.

        Raises:
            InvalidNameError, SerializationError: the name or the metadata cannot be used.
            FullError: the disk is full.
        """
        pointing = self._pointing(name, ttl, metadata, pin, serializer)
        plain = flatten(data)
        # Kept until the end of the block. Data that cannot change, such as a mapped file, needs no copy.
        is_fixed = self._is_run or (isinstance(plain, memoryview) and plain.readonly)
        kept = plain if is_fixed else unchanging(plain)
        used = self._used(codec, level)
        return add_staged(self, lambda known: (pointing, self._putter.stage(pointing, kept, *used, known)))

    def put_file(
        self,
        name: str,
        path: str | os.PathLike[str],
        *,
        codec: str | None = None,
        level: int | None = None,
        ttl: float | str | None = None,
        metadata: dict[str, Any] | None = None,
        pin: bool = False,
        progress: Callable[[int], object] | None = None,
    ) -> str:
        """Stage a file of any size to be kept under ``name``; the arguments are those of `Store.put_file`.

        The file must stay as it is until the block has ended: it may be read again then.

        Returns:
            The digest of the bytes, 64 hex characters.

        Raises:
            OSError: the file cannot be read.
            InvalidValueError: it is not a regular file, or changed while it was read.
        """
        pointing = self._pointing(name, ttl, metadata, pin, "bytes")
        used = self._used(codec, level)

        def make(known: bool) -> tuple[Pointing, Staged]:
            fd = open_source(path)
            try:
                return pointing, self._putter.stage_file(pointing, fd, path, *used, progress, known)
            finally:
                os.close(fd)

        return add_staged(self, make)

    def delete(self, name: str) -> None:
        """Remove a name, and any put under it in this block. A missing name is no error.

        Raises:
            InvalidNameError: nothing can have that name.
        """
        self._dropped[check_name(name)] = None
        for item in self._items:
            if item.pointing.name == name:
                item.staged.discard()
                self.stored -= item.staged.stored
        self._items = [item for item in self._items if item.pointing.name != name]

    def rename(self, names: Mapping[str, str]) -> None:
        """Rename entries that this block has put, for example to names that contain their number.

        Raises:
            InvalidNameError: nothing can have one of the new names.
        """
        for name, new in names.items():
            check_name(new)
            if name in self._lives:
                self._lives[new] = self._lives.pop(name)
        self._items = [
            item._replace(
                pointing=item.pointing._replace(name=names.get(item.pointing.name, item.pointing.name))
            )
            for item in self._items
        ]

    def run(self, work: Callable[[], object]) -> list[Entry]:
        """Call ``work``, which puts into this batch and deletes, and commit. For streams, which are not kept.

        If a known blob has vanished before the commit, ``work`` is called once more, from the start.

        Returns:
            The entries that were put, in order.

        Raises:
            NameConflictError, TooLargeError, FullError: as for `commit`.
        """
        self._is_run = True

        def stage(known: bool) -> list[tuple[Pointing, Staged]]:
            self.discard()
            self._known = known
            try:
                work()
            except BaseException:
                self.discard()
                raise
            staged = [(item.pointing, item.staged) for item in self._items]
            self._items, self.stored = [], 0
            return self._from_now(staged)

        try:
            entries = self._putter.commit(stage, self._delete)
        finally:
            self._known, self._is_run = True, False
            self.discard()
        self.entries += entries
        return entries

    def _from_now(self, staged: list[tuple[Pointing, Staged]]) -> list[tuple[Pointing, Staged]]:
        """Start all lifetimes now, however long staging took: entries of one batch expire together."""
        now, lives = time.time(), self._lives
        return [
            (
                pointing._replace(expires=now + lives[pointing.name]) if pointing.name in lives else pointing,
                item,
            )
            for pointing, item in staged
        ]

    def _delete(self, txn: Write) -> None:
        for name in self._dropped:
            txn.delete_entry(name)

    def commit(self) -> list[Entry]:
        """Put and delete now; the batch is empty afterwards. The end of the block calls this.

        Names are deleted first, so a name that is also put exists afterwards.

        Returns:
            The entries that were put, in order.

        Raises:
            NameConflictError, TooLargeError, FullError: as for `Store.put`; nothing was put or deleted then.
        """
        items, self._items, self.stored = self._items, [], 0
        if not items and not self._dropped:
            return []

        def stage(known: bool) -> list[tuple[Pointing, Staged]]:
            if known:
                return self._from_now([(item.pointing, item.staged) for item in items])
            again: list[tuple[Pointing, Staged]] = []
            try:
                for item in items:
                    assert item.make is not None  # `run` commits by itself
                    again.append(item.make(False))  # on the list before the next one can fail
                    if again[-1][1].digest != item.staged.digest:
                        raise InvalidValueError(
                            f"what {item.pointing.name!r} is put from changed since it was first read;"
                            " put it again when nobody writes to it"
                        )
            except BaseException:
                for _, staged in again:
                    staged.discard()
                raise
            return self._from_now(again)

        try:
            entries = self._putter.commit(stage, self._delete)
        finally:
            self.discard()
        self.entries += entries
        return entries

    def discard(self) -> None:
        """Forget all staged puts and deletes."""
        items, self._items, self.stored = self._items, [], 0
        self._dropped, self._lives = {}, {}
        for item in items:
            item.staged.discard()

    def __enter__(self) -> Batch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.commit()
        else:
            self.discard()

    def _pointing(
        self, name: str, ttl: float | str | None, metadata: dict[str, Any] | None, pin: bool, serializer: str
    ) -> Pointing:
        pointing = self._putter.pointing(name, None, metadata, pin, serializer)._replace(expires=None)
        given = self._ttl if ttl is None else ttl
        life = None if given == math.inf else self._putter.seconds(given)
        if life is None:
            self._lives.pop(name, None)
        else:
            self._lives[name] = life
        return pointing

    def _used(self, codec: str | None, level: int | None) -> tuple[str, int | None]:
        return self._codec if codec is None and level is None else self._putter.codec(codec, level)


def staged_file(
    batch: Batch,
    name: str,
    fd: int,
    path: str,
    *,
    metadata: dict[str, Any] | None = None,
    progress: Callable[[int], object] | None = None,
    known: bool = True,
) -> tuple[Pointing, Staged]:
    """Stage an open file, for `add_staged`.

    Args:
        batch: takes the staged file.
        name, metadata, progress: as for `Batch.put_file`.
        fd: of the file; it stays open.
        path: of the file, for messages.
        known: the argument that `add_staged` gives.
    """
    pointing = batch._pointing(name, None, metadata, False, "bytes")
    return pointing, batch._putter.stage_file(pointing, fd, path, *batch._codec, progress, known)


def add_staged(batch: Batch, make: Make) -> str:
    """`Batch.put` for a room of castore that stages bytes in a way of its own.

    Args:
        batch: to add to.
        make: stages the bytes, and returns them with their entry's specification. It is called again, with
            False, if a known blob has vanished before the end of the block.

    Returns:
        The digest of the bytes, 64 hex characters.
    """
    with batch._putter.telling_full():
        pointing, staged = make(batch._known)
    batch._items.append(_Item(pointing, staged, None if batch._is_run else make))
    batch.stored += staged.stored
    return staged.digest.hex()
