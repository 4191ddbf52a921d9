"""Several puts and deletes that are staged one by one, and committed together.

Bytes are hashed and compressed as they are put. Nothing is named before the commit.
"""

from __future__ import annotations

import math
import os
import time
import warnings
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, NamedTuple

from castore.errors import InvalidValueError
from castore.index.transaction import Write
from castore.names import check_name
from castore.records import Buffer, Entry, EntrySpec
from castore.write.arguments import as_bytes, copy_if_writable
from castore.write.putter import Putter
from castore.write.staging import Staged
from castore.write.writer import open_source

#: Stages bytes and returns them with their entry's specification. With False it must not rely on known blobs.
StageItem = Callable[[bool], tuple[EntrySpec, Staged]]


class _StagedPut(NamedTuple):
    """A put of a batch, and the function that stages it again if a known blob has vanished."""

    spec: EntrySpec
    staged: Staged
    stage: StageItem | None


class Batch:
    """Puts and deletes that become visible together at the end of the block, or not at all.

    Made by `Store.batch`.

    Bytes are hashed and compressed as they are put. A batch holds them in memory until its end, since it may
    have to put them once more. So put large data as files, or by `run`, which holds nothing. After an
    exception in the block nothing is put or deleted. One thread uses a batch at a time. A batch that is used
    without a block ends with `commit` or `discard`; one that is dropped before gives a ResourceWarning.

    Attributes:
        entries: the entries that were put, in order, once the block has ended; empty before.
        stored: bytes that the staged blobs will add to the store.
    """

    _process = -1  # on the class, for a Ctrl-C may come before the first line of `__init__`

    def __init__(self, putter: Putter, codec: str | None, level: int | None, ttl: float | str | None) -> None:
        self._items: list[_StagedPut] = []
        self._dropped: dict[str, None] = {}
        self._process = os.getpid()
        self._putter = putter
        self._codec = putter.resolve_codec(codec, level)
        self._ttl = ttl
        self._lifetimes: dict[str, float] = {}  # lifetimes of names in seconds, from the commit on
        self._reuse, self._is_run = True, False
        self._has_ended = False
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
            InvalidNameError: nothing can have that name.
            InvalidValueError: an argument makes no sense, or the block has ended.
            SerializationError: ``data`` is no bytes, or the metadata is not JSON-like.
            FullError: the disk is full.
        """
        spec = self._make_spec(name, ttl, metadata, pin, serializer)
        plain = as_bytes(data)
        # Kept until the end of the block. Data that cannot change, such as a mapped file, needs no copy.
        is_fixed = self._is_run or (isinstance(plain, memoryview) and plain.readonly)
        kept = plain if is_fixed else copy_if_writable(plain)
        used, putter = self._choose_codec(codec, level), self._putter
        # Without `self`: a batch that refers to itself would be collected, and warn, late.
        return add_staged(self, lambda reuse: (spec, putter.stage(spec, kept, *used, reuse)))

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
            InvalidValueError: it is not a regular file, or changed while it was read; or an argument makes no
                sense, or the block has ended.
            InvalidNameError, SerializationError, FullError: as for `put`.
        """
        spec = self._make_spec(name, ttl, metadata, pin, "bytes")
        used, putter = self._choose_codec(codec, level), self._putter

        def stage(reuse: bool) -> tuple[EntrySpec, Staged]:
            fd = open_source(path)
            try:
                return spec, putter.stage_file(spec, fd, path, *used, progress, reuse)
            finally:
                os.close(fd)

        return add_staged(self, stage)

    def link(
        self,
        name: str,
        digest: str,
        *,
        ttl: float | str | None = None,
        metadata: dict[str, Any] | None = None,
        pin: bool = False,
    ) -> str:
        """Stage another name for bytes that the store has. Other arguments are those of `Store.put`.

        Args:
            name: the new name.
            digest: the digest of the bytes, 64 hex characters.

        Returns:
            The digest.

        Raises:
            InvalidNameError, SerializationError: the name or the metadata cannot be used.
            InvalidValueError: ``digest`` is no digest, another argument makes no sense, or the block has
                ended.
            NotFoundError: the store does not have the bytes, now or at the end of the block.
        """
        spec = self._make_spec(name, ttl, metadata, pin, "bytes")
        putter = self._putter
        return add_staged(self, lambda reuse: (spec, putter.stage_known(digest)))

    def delete(self, name: str) -> None:
        """Remove a name, and any put under it in this block. A missing name is no error.

        Raises:
            InvalidNameError: nothing can have that name.
            InvalidValueError: the block has ended.
        """
        self._require_open()
        self._dropped[check_name(name)] = None
        for item in self._items:
            if item.spec.name == name:
                item.staged.discard()
                self.stored -= item.staged.stored
        self._items = [item for item in self._items if item.spec.name != name]

    def rename(self, names: Mapping[str, str]) -> None:
        """Rename entries that this block has put, for example to names that contain their number.

        Raises:
            InvalidNameError: nothing can have one of the new names.
            InvalidValueError: the block has ended.
        """
        self._require_open()
        for new in names.values():
            check_name(new)
        # All at once, as the items: names may change places.
        self._lifetimes = {names.get(name, name): ttl for name, ttl in self._lifetimes.items()}
        self._items = [
            item._replace(spec=item.spec._replace(name=names.get(item.spec.name, item.spec.name)))
            for item in self._items
        ]

    def run(self, work: Callable[[], object]) -> list[Entry]:
        """Call ``work``, which puts into this batch and deletes, and commit. For streams, which are not kept.

        If a known blob has vanished before the commit, ``work`` is called once more, from the start.

        Returns:
            The entries that were put, in order.

        Raises:
            NameConflictError, TooLargeError, FullError: as for `commit`.
            InvalidValueError: the block has ended, or ``work`` cannot be called.
            Exception: what ``work`` raised; nothing was put or deleted then.
        """
        self._require_open()
        if not callable(work):
            raise InvalidValueError(f"work is a function that is called, not {type(work).__name__}")
        self._is_run = True

        def stage(reuse: bool) -> list[tuple[EntrySpec, Staged]]:
            self.discard()
            self._reuse = reuse
            try:
                work()
            except BaseException:
                self.discard()
                raise
            staged = [(item.spec, item.staged) for item in self._items]
            self._items, self.stored = [], 0
            return self._start_lifetimes(staged)

        try:
            entries = self._putter.commit(stage, self._delete_names)
        finally:
            self._reuse, self._is_run = True, False
            self.discard()
        self.entries += entries
        return entries

    def _start_lifetimes(self, staged: list[tuple[EntrySpec, Staged]]) -> list[tuple[EntrySpec, Staged]]:
        """Start all lifetimes now, however long staging took: entries of one batch expire together."""
        now, lifetimes = time.time(), self._lifetimes
        return [
            (
                spec._replace(expires=now + lifetimes[spec.name]) if spec.name in lifetimes else spec,
                item,
            )
            for spec, item in staged
        ]

    def _delete_names(self, txn: Write) -> None:
        for name in self._dropped:
            txn.delete_entry(name)

    def commit(self) -> list[Entry]:
        """Put and delete now; the batch is empty afterwards. The end of the block calls this.

        Names are deleted first, so a name that is also put exists afterwards.

        Returns:
            The entries that were put, in order.

        Raises:
            NameConflictError, TooLargeError, FullError: as for `Store.put`; nothing was put or deleted then.
            NotFoundError: the bytes of a `link` are gone; nothing was put or deleted then.
            InvalidValueError: the block has ended, or a file of `put_file` has changed and had to be read
                again.
        """
        return self._commit(lambda: None)

    def _commit(self, check: Callable[[], object]) -> list[Entry]:
        self._require_open()
        items, self._items, self.stored = self._items, [], 0
        if not items and not self._dropped:
            return []

        def stage(reuse: bool) -> list[tuple[EntrySpec, Staged]]:
            if reuse:
                return self._start_lifetimes([(item.spec, item.staged) for item in items])
            again: list[tuple[EntrySpec, Staged]] = []
            try:
                for item in items:
                    assert item.stage is not None  # `run` commits by itself
                    again.append(item.stage(False))  # on the list before the next one can fail
                    if again[-1][1].digest != item.staged.digest:
                        raise InvalidValueError(
                            f"the source of {item.spec.name!r} changed between two reads of it;"
                            " put it again when nobody writes to it"
                        )
            except BaseException:
                for _, staged in again:
                    staged.discard()
                raise
            return self._start_lifetimes(again)

        def begin(txn: Write) -> None:
            check()
            self._delete_names(txn)

        try:
            entries = self._putter.commit(stage, begin)
        finally:
            self.discard()
        self.entries += entries
        return entries

    def discard(self) -> None:
        """Forget all staged puts and deletes."""
        items, self._items, self.stored = self._items, [], 0
        self._dropped, self._lifetimes = {}, {}
        for item in items:
            item.staged.discard()

    def __enter__(self) -> Batch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.commit()
            else:
                self.discard()
        finally:
            self._has_ended = True

    def __del__(self) -> None:
        # A forked child has a copy of this object: the staged files are its parent's.
        if os.getpid() == self._process and (count := len(self._items) + len(self._dropped)):
            try:
                warnings.warn(
                    f"a batch was dropped with {count} staged {'change' if count == 1 else 'changes'}, which"
                    " are lost; use `with store.batch() as batch:`, or call commit() or discard()",
                    ResourceWarning,
                    source=self,
                    stacklevel=2,
                )
            finally:
                self.discard()

    def _require_open(self) -> None:
        """Check that the block has not ended: each method that stages, renames or commits begins so."""
        if self._has_ended:
            raise InvalidValueError("the block of this batch has ended; begin another one: store.batch()")

    def _make_spec(
        self, name: str, ttl: float | str | None, metadata: dict[str, Any] | None, pin: bool, serializer: str
    ) -> EntrySpec:
        spec = self._putter.make_spec(name, None, metadata, pin, serializer)._replace(expires=None)
        given = self._ttl if ttl is None else ttl
        lifetime = None if given == math.inf else self._putter.seconds(given)
        if lifetime is None:
            self._lifetimes.pop(name, None)
        else:
            self._lifetimes[name] = lifetime
        return spec

    def _choose_codec(self, codec: str | None, level: int | None) -> tuple[str, int | None]:
        return self._codec if codec is None and level is None else self._putter.resolve_codec(codec, level)


def staged_file(
    batch: Batch,
    name: str,
    fd: int,
    path: str,
    *,
    metadata: dict[str, Any] | None = None,
    progress: Callable[[int], object] | None = None,
    reuse: bool = True,
) -> tuple[EntrySpec, Staged]:
    """Stage an open file, for `add_staged`.

    Args:
        batch: takes the staged file.
        name, metadata, progress: as for `Batch.put_file`.
        fd: of the file; it stays open.
        path: of the file, for messages.
        reuse: the argument that `add_staged` gives.
    """
    spec = batch._make_spec(name, None, metadata, False, "bytes")
    return spec, batch._putter.stage_file(spec, fd, path, *batch._codec, progress, reuse)


def add_staged(batch: Batch, stage: StageItem) -> str:
    """`Batch.put` for a room of castore that stages bytes in a way of its own.

    Args:
        batch: to add to.
        stage: stages the bytes, and returns them with their entry's specification. It is called again, with
            False, if a known blob has vanished before the end of the block.

    Returns:
        The digest of the bytes, 64 hex characters.
    """
    batch._require_open()
    with batch._putter.explain_full_disk():
        spec, staged = stage(batch._reuse)
    batch._items.append(_StagedPut(spec, staged, None if batch._is_run else stage))
    batch.stored += staged.stored
    return staged.digest.hex()


def commit_checked(batch: Batch, check: Callable[[], object]) -> list[Entry]:
    """`Batch.commit` for a room of castore, with a check that no other writer can overtake.

    Args:
        batch: to commit.
        check: called under the index's write lock. Its exceptions keep all from being put.
    """
    return batch._commit(check)
