"""Puts one blob, or many, under the defaults of a store: the layer between `Store.put` and the writer.

Checks arguments, cuts batches, and stages again when a known blob has vanished. Turns the error of a full
disk into one sentence. Reads and writes nothing itself.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from castore.errors import FullError, InvalidValueError, NameConflictError, NotFoundError, add_filename
from castore.index.transaction import Write
from castore.names import check_name
from castore.objects.codecs import FRAME_SIZE, check_codec
from castore.records import Buffer, Entry, EntrySpec, parse_digest
from castore.settings import Settings
from castore.system.local_files import raise_if_gone
from castore.system.sql_errors import SQL_ERRORS, is_full, no_space_in
from castore.units import parse_flag, parse_ttl
from castore.write.arguments import as_bytes, copy_if_writable, dump_metadata, parse_items
from castore.write.incoming import Creation, NewFile
from castore.write.open_pack import Vanished
from castore.write.prefixes import Prefixes
from castore.write.staging import Staged
from castore.write.writer import BlobWriter, open_source

#: Bytes and blobs that `put_many` commits at a time.
_BATCH_BYTES = 32 * 1024 * 1024
_BATCH_BLOBS = 2000


class NameChanged(Exception):
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

    def make_spec(
        self, name: str, ttl: float | str | None, metadata: dict[str, Any] | None, pin: bool, serializer: str
    ) -> EntrySpec:
        """The specification of an entry, checked."""
        check_name(name)
        if serializer != "bytes":  # most are, and the module takes a fifteenth of castore's import
            from castore.serialize.serializers import check_serializer

            check_serializer(serializer)
        seconds = self.seconds(ttl)
        expires = None if seconds is None else time.time() + seconds
        return EntrySpec(name, serializer, dump_metadata(metadata), expires, parse_flag(pin, "pin"))

    def make_specs(
        self,
        items: Iterable[tuple[str, Buffer] | tuple[str, Buffer, dict[str, Any] | None]],
        ttl: float | str | None,
        pin: bool,
    ) -> Iterator[tuple[EntrySpec, Buffer]]:
        """`make_spec` for many names, each with its bytes and perhaps metadata; all else has its default."""
        seconds = self.seconds(ttl)
        pin = parse_flag(pin, "pin")
        for name, data, metadata in parse_items(items):
            expires = None if seconds is None else time.time() + seconds
            yield EntrySpec(check_name(name), "bytes", dump_metadata(metadata), expires, pin), data

    def seconds(self, ttl: float | str | None) -> float | None:
        """The lifetime that ``ttl`` means, None for no end; ``ttl=None`` is the store's default."""
        return self._settings.ttl if ttl is None else parse_ttl(ttl)

    def resolve_codec(self, codec: str | None, level: int | None) -> tuple[str, int | None]:
        """Codec and level of a put, checked."""
        if codec is None and level is None:
            return self._settings.codec, self._settings.level
        return check_codec(self._settings.codec if codec is None else codec, level)

    def put(self, spec: EntrySpec, data: Buffer, codec: str, level: int | None) -> Entry:
        """See `Store.put`."""
        plain = as_bytes(data)
        return self.commit(lambda reuse: [(spec, self.stage(spec, plain, codec, level, reuse))])[0]

    def stage(self, spec: EntrySpec, data: Buffer, codec: str, level: int | None, reuse: bool) -> Staged:
        """See `BlobWriter.stage`; with the dictionary of the name."""
        dictionary = self._dictionary(spec.name)
        return self._writer.stage(data, codec, level, reuse=reuse, dictionary=dictionary)

    def stage_known(self, digest: str) -> Staged:
        """Bytes that the store has already, here or in a remote.

        Raises:
            NotFoundError: the store does not have them.
        """
        staged = self._writer.stage_known(parse_digest(digest), may_be_away=True)
        if staged is None:
            raise NotFoundError(f"{self._path} has no bytes of the digest {digest}; put them again")
        return staged

    def put_file(
        self,
        spec: EntrySpec,
        path: str | os.PathLike[str],
        codec: str,
        level: int | None,
        progress: Callable[[int], object] | None,
    ) -> Entry:
        """See `Store.put_file`."""
        fd = open_source(path)

        def stage(reuse: bool) -> list[tuple[EntrySpec, Staged]]:
            return [(spec, self.stage_file(spec, fd, path, codec, level, progress, reuse))]

        try:
            return self.commit(stage)[0]
        finally:
            os.close(fd)

    def create(self, spec: EntrySpec, codec: str, level: int | None, *, replace: bool) -> Creation:
        """See `Store.create`."""

        def require_new(txn: Write) -> None:
            if not replace and not txn.holds(spec.name, None, time.time()):
                raise NameConflictError(
                    f"there is an entry {spec.name!r} already; choose another name or delete it"
                )

        return self._create(spec, codec, level, require_new)

    def _create(
        self, spec: EntrySpec, codec: str, level: int | None, on_begin: Callable[[Write], object]
    ) -> Creation:
        blob = self._writer.incoming(codec, level, self._dictionary(spec.name))
        file = NewFile(spec.name, blob, self.explain_full_disk)
        return Creation(
            file, lambda: self.commit(lambda reuse: [(spec, blob.stage(reuse))], on_begin)[0], blob
        )

    def create_if_unchanged(self, name: str, entry: Entry | None, options: Mapping[str, Any]) -> Creation:
        """A block like that of `Store.create`, for new bytes that were worked out from an entry.

        Options absent from ``options`` are taken from the entry: its expiry, its metadata, its pin and its
        serializer. The end of the block raises `NameChanged` if ``name`` points elsewhere by then.

        Args:
            name: what the bytes are going to be named.
            entry: what ``name`` points to, or None if it is not there.
            options: as for `Store.create`.
        """
        codec, level = self.resolve_codec(options.get("codec"), options.get("level"))
        spec = self.make_spec(
            name,
            options.get("ttl"),
            options.get("metadata", entry and entry.metadata),
            options.get("pin", entry is not None and entry.pinned),
            "bytes" if entry is None else entry.serializer,
        )
        if entry is not None and options.get("ttl") is None:
            spec = spec._replace(expires=entry.expires)
        digest = None if entry is None else bytes.fromhex(entry.digest)

        def require_same(txn: Write) -> None:
            if not txn.holds(name, digest, time.time()):
                raise NameChanged

        return self._create(spec, codec, level, require_same)

    def copy(self, entry: Entry, name: str, *, move: bool) -> Entry | None:
        """Point ``name`` to the blob of an entry, with its attributes; None if the entry has changed since.

        Args:
            move: remove the entry's own name, and take its pin along.
        """
        digest = bytes.fromhex(entry.digest)
        spec = EntrySpec(
            check_name(name),
            entry.serializer,
            dump_metadata(entry.metadata),
            entry.expires,
            move and entry.pinned,
        )

        def on_begin(txn: Write) -> None:
            if not txn.holds(entry.name, digest, time.time()):
                raise NameChanged
            if move and name != entry.name:
                txn.delete_entry(entry.name)

        staged = self._writer.stage_known(digest, may_be_away=True)
        if staged is None:
            return None
        with self.explain_full_disk():
            try:
                return self._writer.commit([(spec, staged)], on_begin)[0]
            except (NameChanged, Vanished):
                return None

    def put_stream(
        self,
        spec: EntrySpec,
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
        with self.create(spec, codec, level, replace=True) as file:
            while piece := source.read(FRAME_SIZE):
                file.write(piece)
                if progress is not None:
                    progress(len(piece))
            if piece is None:
                raise InvalidValueError(
                    f"the stream for {spec.name!r} is non-blocking and had nothing to read;"
                    " make it blocking: os.set_blocking(fd, True)"
                )
        return file.entry

    def put_many(
        self, items: Iterable[tuple[EntrySpec, Buffer]], codec: str, level: int | None
    ) -> list[Entry]:
        """See `Store.put_many`."""
        entries: list[Entry] = []
        batch: list[tuple[EntrySpec, Buffer]] = []
        size = 0
        # A batch takes at most half the budget: a larger one might evict everything and still fail.
        limit = min(_BATCH_BYTES, (self._settings.max_size or _BATCH_BYTES) // 2)
        for spec, data in items:
            plain = as_bytes(data)
            if batch and (size + len(plain) > limit or len(batch) >= _BATCH_BLOBS):
                entries += self._put_batch(batch, codec, level)
                batch, size = [], 0
            if len(plain) > limit:
                entries += self._put_batch([(spec, plain)], codec, level)
                continue
            batch.append((spec, copy_if_writable(plain)))
            size += len(plain)
        return entries + self._put_batch(batch, codec, level) if batch else entries

    def _put_batch(self, batch: list[tuple[EntrySpec, Buffer]], codec: str, level: int | None) -> list[Entry]:
        def stage(reuse: bool) -> list[tuple[EntrySpec, Staged]]:
            staged = self._writer.stage_many(
                [(data, self._dictionary(spec.name)) for spec, data in batch],
                codec,
                level,
                reuse=reuse,
            )
            return list(zip((spec for spec, _ in batch), staged, strict=True))

        return self.commit(stage)

    def put_if(
        self,
        expected: tuple[str, bytes | None],
        items: Sequence[tuple[EntrySpec, Buffer]],
        drop: Iterable[str],
        codec: str,
        level: int | None,
    ) -> list[Entry] | None:
        """See `Store.put_if`."""

        def stage(reuse: bool) -> list[tuple[EntrySpec, Staged]]:
            return [(spec, self.stage(spec, as_bytes(data), codec, level, reuse)) for spec, data in items]

        def on_begin(txn: Write) -> None:
            name, digest = expected
            if not txn.holds(name, digest, time.time()):
                raise NameChanged
            for name in drop:
                txn.delete_entry(name)

        try:
            return self.commit(stage, on_begin)
        except NameChanged:
            return None

    def commit(
        self,
        stage: Callable[[bool], list[tuple[EntrySpec, Staged]]],
        on_begin: Callable[[Write], object] | None = None,
    ) -> list[Entry]:
        """Place and name what ``stage`` returns.

        Args:
            stage: stages the bytes. Called with True, and once more with False if a known blob has vanished.
            on_begin: called in the transaction before anything else; its exceptions roll everything back.

        Raises:
            TooLargeError, FullError: as for `BlobWriter.commit`; a full disk gives a FullError too.
        """
        # Not `explain_full_disk`: a context takes a fortieth of a put's time.
        try:
            try:
                return self._writer.commit(stage(True), on_begin)
            except Vanished:
                return self._writer.commit(stage(False), on_begin)
        except (OSError, *SQL_ERRORS) as error:
            raise_if_gone(self._path, error)
            if not is_full(error):
                raise
            raise self._full_disk_error(error) from error

    @contextmanager
    def explain_full_disk(self) -> Iterator[None]:
        """Turn the error of a full disk, or of a folder that is gone, into one that advises what to do."""
        try:
            yield
        except (OSError, *SQL_ERRORS) as error:
            raise_if_gone(self._path, error)
            if not is_full(error):
                raise
            raise self._full_disk_error(error) from error

    def _full_disk_error(self, error: BaseException) -> FullError:
        return FullError(
            f"{no_space_in(self._path, error)}; free some space, or lower the budget:"
            " `castore gc --max-size SIZE`"
        )

    def stage_file(
        self,
        spec: EntrySpec,
        fd: int,
        path: str | os.PathLike[str],
        codec: str,
        level: int | None,
        progress: Callable[[int], object] | None,
        reuse: bool,
    ) -> Staged:
        """See `BlobWriter.stage_file`; with the dictionary of the name, and errors that name the file."""
        dictionary = self._dictionary(spec.name)
        with add_filename(path):
            return self._writer.stage_file(
                fd, codec, level, reuse=reuse, progress=progress, dictionary=dictionary
            )
