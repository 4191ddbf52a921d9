"""The layer between `Store.put` and the writer: checks arguments, cuts batches, and words errors.

Has the store's defaults; reads and writes nothing itself.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Protocol

from castore.errors import FullError, InvalidValueError, NameConflictError, SerializationError, naming
from castore.index.transaction import Write
from castore.names import check_name
from castore.objects.codecs import FRAME_SIZE, Buffer, check_codec
from castore.records import Entry, Pointing
from castore.serialize.serializers import check_serializer
from castore.settings import Settings
from castore.system.sql_errors import is_full
from castore.units import parse_ttl
from castore.write.incoming import Creation, NewFile
from castore.write.open_pack import Vanished
from castore.write.prefixes import Prefixes
from castore.write.staging import Staged
from castore.write.writer import BlobWriter, open_source

#: Bytes and blobs that `put_many` commits at a time.
_BATCH_BYTES = 32 * 1024 * 1024
_BATCH_BLOBS = 2000


#: Stages bytes and returns them with their entry's specification. With False it must not rely on known blobs.
Make = Callable[[bool], tuple[Pointing, Staged]]


class Changed(Exception):
    """The name that a put depends on has another digest by now."""


class SupportsRead(Protocol):
    """A binary file, a pipe, an HTTP response: ``read(n)`` returns at most n bytes, and none at the end."""

    def read(self, size: int, /) -> bytes | None:
        """At most ``size`` bytes."""
        ...


class Putter:
    """Puts with a store's defaults.

    Args:
        writer: stages and commits.
        settings: the defaults.
        path: the store's folder, for messages.
        prefixes: gives the dictionary of a name.
    """

    def __init__(self, writer: BlobWriter, settings: Settings, path: Path, prefixes: Prefixes) -> None:
        self._writer = writer
        self._settings = settings
        self._path = path
        self._dictionary = prefixes.dictionary

    def pointing(
        self, name: str, ttl: float | str | None, metadata: dict[str, Any] | None, pin: bool, serializer: str
    ) -> Pointing:
        """The specification of an entry, checked."""
        check_name(name)
        check_serializer(serializer)
        seconds = self._seconds(ttl)
        expires = None if seconds is None else time.time() + seconds
        return Pointing(name, serializer, _metadata_text(metadata), expires, pin)

    def plain_pointings(
        self,
        items: Iterable[tuple[str, Buffer] | tuple[str, Buffer, dict[str, Any] | None]],
        ttl: float | str | None,
    ) -> Iterator[tuple[Pointing, Buffer]]:
        """`pointing` for many names, each with its bytes and perhaps metadata; all else has its default."""
        seconds = self._seconds(ttl)
        for item in items:
            name, data, metadata = parse_item(item)
            expires = None if seconds is None else time.time() + seconds
            yield Pointing(check_name(name), "bytes", _metadata_text(metadata), expires, False), data

    def _seconds(self, ttl: float | str | None) -> float | None:
        return self._settings.ttl if ttl is None else parse_ttl(ttl)

    def codec(self, codec: str | None, level: int | None) -> tuple[str, int | None]:
        """Codec and level of a put, checked."""
        if codec is None and level is None:
            return self._settings.codec, self._settings.level
        return check_codec(self._settings.codec if codec is None else codec, level)

    def put(self, pointing: Pointing, data: Buffer, codec: str, level: int | None) -> Entry:
        """See `Store.put`."""
        plain = _plain(data)
        return self._commit(lambda known: [(pointing, self._stage(pointing, plain, codec, level, known))])[0]

    def _stage(self, pointing: Pointing, data: Buffer, codec: str, level: int | None, known: bool) -> Staged:
        dictionary = self._dictionary(pointing.name)
        return self._writer.stage(data, codec, level, known=known, dictionary=dictionary)

    def put_file(
        self,
        pointing: Pointing,
        path: str | os.PathLike[str],
        codec: str,
        level: int | None,
        progress: Callable[[int], object] | None,
    ) -> Entry:
        """See `Store.put_file`."""
        fd = open_source(path)

        def stage(known: bool) -> list[tuple[Pointing, Staged]]:
            return [(pointing, self._stage_file(pointing, fd, path, codec, level, progress, known))]

        try:
            return self._commit(stage)[0]
        finally:
            os.close(fd)

    def create(self, pointing: Pointing, codec: str, level: int | None, *, replace: bool) -> Creation:
        """See `Store.create`."""

        def see_new(txn: Write) -> None:
            if not replace and txn.current(pointing.name, time.time()) is not None:
                raise NameConflictError(
                    f"{pointing.name!r} is there already; choose another name or delete it"
                )

        return self._create(pointing, codec, level, see_new)

    def _create(
        self, pointing: Pointing, codec: str, level: int | None, first: Callable[[Write], object]
    ) -> Creation:
        blob = self._writer.incoming(codec, level, self._dictionary(pointing.name))
        file = NewFile(pointing.name, blob, self._telling_full)
        return Creation(
            file, lambda: self._commit(lambda known: [(pointing, blob.stage(known))], first)[0], blob
        )

    def copy(self, entry: Entry, name: str, *, move: bool) -> Entry | None:
        """Point ``name`` to the blob of an entry, with its attributes; None if the entry has changed since.

        Args:
            move: remove the entry's own name, and take its pin along.
        """
        digest = bytes.fromhex(entry.digest)
        pointing = Pointing(
            check_name(name),
            entry.serializer,
            _metadata_text(entry.metadata),
            entry.expires,
            move and entry.pinned,
        )

        def first(txn: Write) -> None:
            if txn.current(entry.name, time.time()) != digest:
                raise Changed
            if move and name != entry.name:
                txn.delete_entry(entry.name)

        staged = self._writer.stage_known(digest)
        if staged is None:
            return None
        with self._telling_full():
            try:
                return self._writer.commit([(pointing, staged)], first)[0]
            except (Changed, Vanished):
                return None

    def put_stream(
        self,
        pointing: Pointing,
        source: SupportsRead,
        codec: str,
        level: int | None,
        progress: Callable[[int], object] | None,
    ) -> Entry:
        """See `Store.put_stream`."""
        if not hasattr(source, "read"):
            raise InvalidValueError(
                f"put_stream takes a file that can be read, not {type(source).__name__};"
                " `put` keeps bytes, `put_file` the file of a path"
            )
        with self.create(pointing, codec, level, replace=True) as file:
            while piece := source.read(FRAME_SIZE):
                file.write(piece)
                if progress is not None:
                    progress(len(piece))
            if piece is None:
                raise InvalidValueError(
                    f"the stream for {pointing.name!r} does not wait for its bytes;"
                    " make it blocking: os.set_blocking(fd, True)"
                )
        assert file.entry is not None  # the block has ended without an error
        return file.entry

    def put_many(
        self, items: Iterable[tuple[Pointing, Buffer]], codec: str, level: int | None
    ) -> list[Entry]:
        """See `Store.put_many`."""
        entries: list[Entry] = []
        batch: list[tuple[Pointing, Buffer]] = []
        size = 0
        # A batch takes at most half the budget: a larger one might evict everything and still fail.
        limit = min(_BATCH_BYTES, (self._settings.max_size or _BATCH_BYTES) // 2)
        for pointing, data in items:
            plain = _plain(data)
            if batch and (size + len(plain) > limit or len(batch) >= _BATCH_BLOBS):
                entries += self._put_batch(batch, codec, level)
                batch, size = [], 0
            if len(plain) > limit:
                entries += self._put_batch([(pointing, plain)], codec, level)
                continue
            batch.append((pointing, unchanging(plain)))
            size += len(plain)
        return entries + self._put_batch(batch, codec, level) if batch else entries

    def _put_batch(self, batch: list[tuple[Pointing, Buffer]], codec: str, level: int | None) -> list[Entry]:
        def stage(known: bool) -> list[tuple[Pointing, Staged]]:
            staged = self._writer.stage_many(
                [(data, self._dictionary(pointing.name)) for pointing, data in batch],
                codec,
                level,
                known=known,
            )
            return list(zip((pointing for pointing, _ in batch), staged, strict=True))

        return self._commit(stage)

    def put_if(
        self,
        expected: tuple[str, bytes | None],
        items: Sequence[tuple[Pointing, Buffer]],
        drop: Iterable[str],
        codec: str,
        level: int | None,
    ) -> list[Entry] | None:
        """See `Store.put_if`."""

        def stage(known: bool) -> list[tuple[Pointing, Staged]]:
            return [
                (pointing, self._stage(pointing, _plain(data), codec, level, known))
                for pointing, data in items
            ]

        def first(txn: Write) -> None:
            name, digest = expected
            if txn.current(name, time.time()) != digest:
                raise Changed
            for name in drop:
                txn.delete_entry(name)

        try:
            return self._commit(stage, first)
        except Changed:
            return None

    def _commit(
        self,
        stage: Callable[[bool], list[tuple[Pointing, Staged]]],
        first: Callable[[Write], object] | None = None,
    ) -> list[Entry]:
        # Not `_telling_full`: a context takes a fortieth of a put's time.
        try:
            try:
                return self._writer.commit(stage(True), first)
            except Vanished:
                return self._writer.commit(stage(False), first)
        except OSError as error:
            if not is_full(error):
                raise
            raise self._full() from error

    @contextmanager
    def _telling_full(self) -> Iterator[None]:
        """Turn the error of a full disk into one that advises what to do."""
        try:
            yield
        except OSError as error:
            if not is_full(error):
                raise
            raise self._full() from error

    def _full(self) -> FullError:
        return FullError(
            f"the disk of {self._path} is full; free some space, or lower the budget:"
            " `castore gc --max-size SIZE`"
        )

    def _stage_file(
        self,
        pointing: Pointing,
        fd: int,
        path: str | os.PathLike[str],
        codec: str,
        level: int | None,
        progress: Callable[[int], object] | None,
        known: bool,
    ) -> Staged:
        """See `BlobWriter.stage_file`; with the dictionary of the name, and errors that name the file."""
        dictionary = self._dictionary(pointing.name)
        with naming(path):
            return self._writer.stage_file(
                fd, codec, level, known=known, progress=progress, dictionary=dictionary
            )


class _Item(NamedTuple):
    """A put of a batch, and the function that stages it again if a known blob has vanished."""

    pointing: Pointing
    staged: Staged
    make: Make | None


def create_over(putter: Putter, name: str, entry: Entry | None, options: Mapping[str, Any]) -> Creation:
    """A block like that of `Store.create`, for new bytes that were worked out from an entry.

    What ``options`` does not say is taken from the entry: its expiry, its metadata, its pin and its
    serializer. The end of the block raises `Changed` if ``name`` points elsewhere by then.

    Args:
        putter: of the store.
        name: what the bytes are going to be named.
        entry: what ``name`` points to, or None if it is not there.
        options: as for `Store.create`.
    """
    codec, level = putter.codec(options.get("codec"), options.get("level"))
    pointing = putter.pointing(
        name,
        options.get("ttl"),
        options.get("metadata", entry and entry.metadata),
        options.get("pin", entry is not None and entry.pinned),
        "bytes" if entry is None else entry.serializer,
    )
    if entry is not None and options.get("ttl") is None:
        pointing = pointing._replace(expires=entry.expires)
    digest = None if entry is None else bytes.fromhex(entry.digest)

    def see_same(txn: Write) -> None:
        if txn.current(name, time.time()) != digest:
            raise Changed

    return putter._create(pointing, codec, level, see_same)


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
        plain = _plain(data)
        # Kept until the end of the block. Data that cannot change, such as a mapped file, needs no copy.
        is_fixed = self._is_run or (isinstance(plain, memoryview) and plain.readonly)
        kept = plain if is_fixed else unchanging(plain)
        used = self._used(codec, level)
        return add_staged(self, lambda known: (pointing, self._putter._stage(pointing, kept, *used, known)))

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
                return pointing, self._putter._stage_file(pointing, fd, path, *used, progress, known)
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
            entries = self._putter._commit(stage, self._delete)
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
            entries = self._putter._commit(stage, self._delete)
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
        life = None if given == math.inf else self._putter._seconds(given)
        if life is None:
            self._lives.pop(name, None)
        else:
            self._lives[name] = life
        return pointing

    def _used(self, codec: str | None, level: int | None) -> tuple[str, int | None]:
        return self._codec if codec is None and level is None else self._putter.codec(codec, level)


def parse_expected(expected: Any) -> tuple[str, bytes | None]:
    """Name and digest that a `Store.put_if` depends on.

    Raises:
        InvalidNameError: nothing can have that name.
        InvalidValueError: it is no pair of a name and a digest in hex.
    """
    shape = "expected is (name, digest), with the 64 hex digits of `Entry.digest`, or with None for no entry"
    if not isinstance(expected, tuple | list) or len(expected) != 2:
        raise InvalidValueError(f"{shape}, not {expected!r:.100}")
    name, digest = expected
    if digest is None:
        return check_name(name), None
    try:
        raw = bytes.fromhex(digest)
    except (TypeError, ValueError):
        raw = b""
    if len(raw) != 32:
        raise InvalidValueError(f"{shape}, not {digest!r:.100}")
    return check_name(name), raw


def parse_item(item: Any) -> tuple[str, Any, dict[str, Any] | None]:
    """Name, data and metadata of an item of `Store.put_many` or `Store.put_if`.

    Raises:
        InvalidValueError: it has another shape.
    """
    try:
        size = len(item)
    except TypeError:
        size = 0
    if isinstance(item, str) or size not in (2, 3):
        raise InvalidValueError(
            f"an item is (name, data) or (name, data, metadata), not {type(item).__name__} of length {size}"
        )
    name, data, *metadata = item
    return name, data, metadata[0] if metadata else None


def unchanging(data: Buffer) -> bytes:
    """``data``, or a copy of it if it is writable, since callers may reuse one buffer for each item.

    Raises:
        SerializationError: it is no run of bytes.
    """
    return bytes(_plain(data))


def _plain(data: Buffer) -> Buffer:
    """``data`` as a run of bytes, whose length is its size."""
    if isinstance(data, memoryview):
        return data.cast("B") if data.c_contiguous and data.nbytes else data.tobytes()
    if not isinstance(data, (bytes, bytearray)):
        raise SerializationError(
            f"put takes bytes, not {type(data).__name__}; `save` keeps objects, `put_file` files"
        )
    return data


def _metadata_text(metadata: dict[str, Any] | None) -> str | None:
    if not metadata:
        return None
    try:
        if any(not isinstance(key, str) for key in metadata):
            raise TypeError("its keys must be text")
        text = json.dumps(metadata, sort_keys=True, ensure_ascii=False, allow_nan=False)
        text.encode()  # the index takes UTF-8 only
    except UnicodeEncodeError as error:
        raise SerializationError(
            f"metadata must be JSON-like: {error.object[error.start]!r} cannot be written as UTF-8"
        ) from error
    except (TypeError, ValueError, RecursionError) as error:
        raise SerializationError(f"metadata must be JSON-like: {error}") from error
    return text


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
    return pointing, batch._putter._stage_file(pointing, fd, path, *batch._codec, progress, known)


def add_staged(batch: Batch, make: Make) -> str:
    """`Batch.put` for a room of castore that stages bytes in a way of its own.

    Args:
        batch: to add to.
        make: stages the bytes, and returns them with their entry's specification. It is called again, with
            False, if a known blob has vanished before the end of the block.

    Returns:
        The digest of the bytes, 64 hex characters.
    """
    with batch._putter._telling_full():
        pointing, staged = make(batch._known)
    batch._items.append(_Item(pointing, staged, None if batch._is_run else make))
    batch.stored += staged.stored
    return staged.digest.hex()
