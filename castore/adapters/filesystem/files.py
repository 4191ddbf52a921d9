"""Open files: a reader decodes only the frames that are read, and a written file appears whole at its end.

A written file ends when it is closed: by its own `with` block, by a layer above it, or by the garbage
collector. An exception that unwinds a `with` block around the file discards the file. Layers of text and
compression close the file below them without passing on that exception, so `unwinding` searches for the
exception in the stack.
"""

from __future__ import annotations

import codecs
import contextlib
import io
import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Protocol, SupportsIndex

from castore import Entry, NameConflictError, NotFoundError, Store
from castore.adapters.filesystem import unfinished
from castore.adapters.filesystem.errors import (
    damage_error,
    exists_error,
    lost_error,
    raising_write_errors,
)
from castore.adapters.filesystem.unwinding import unwinding_blocks
from castore.errors import CorruptError, InvalidValueError
from castore.write.incoming import incomplete_error
from castore.write.putter import NameChanged

log = logging.getLogger("castore")

#: Bytes that are copied at a time when a file is appended to.
_COPY_BYTES = 1 << 20
#: Appended bytes that are held in memory; more bytes go to a nameless file in the store.
_MEMORY_BYTES = 8 << 20


class FileSystem(Protocol):
    """The file system that opens a file, as far as the file knows it."""

    store: Store

    def entry(self, path: str) -> Entry | None:
        """See `CastoreFileSystem.entry`."""

    def info(self, path: str) -> Mapping[str, Any]:
        """See fsspec's `AbstractFileSystem.info`."""

    def unstrip_protocol(self, name: str) -> str:
        """See fsspec's `AbstractFileSystem.unstrip_protocol`."""

    def not_found_error(self, path: str) -> FileNotFoundError:
        """See `CastoreFileSystem.not_found_error`."""

    def append_options(self, entry: Entry | None, given: dict[str, Any]) -> dict[str, Any]:
        """See `CastoreFileSystem.append_options`."""


class _RawFile(io.RawIOBase):
    """The raw file of `Store.open`; damage raises a `DamagedFileError`."""

    def __init__(self, file: io.RawIOBase, path: str) -> None:
        super().__init__()
        self._file = file
        self._path = path
        self.name = path

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._file.tell()

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return self._file.seek(offset, whence)

    def readinto(self, buffer: Any) -> int | None:
        try:
            return self._file.readinto(buffer)
        except CorruptError as error:
            raise damage_error(self._path, error) from error

    def readall(self) -> bytes:
        try:
            return self._file.readall() or b""
        except CorruptError as error:
            raise damage_error(self._path, error) from error

    def close(self) -> None:
        self._file.close()
        super().close()


class ReadFile(io.BufferedReader):
    """A seekable file over the bytes that a name had when it was opened. Pickles as its path and position."""

    def __init__(self, fs: FileSystem, path: str) -> None:
        opened = _open_bytes(fs, path)
        # Takes over the raw file of `Store.open`, and buffers a frame at a time, as `Store.open` does.
        super().__init__(_RawFile(opened.detach(), path), 256 * 1024)
        self.fs = fs
        self.path = path
        self.full_name = fs.unstrip_protocol(path)
        self.size = self.seek(0, io.SEEK_END)
        self.seek(0)

    @property
    def mode(self) -> str:
        """``rb``."""
        return "rb"

    def info(self) -> dict[str, Any]:
        """The file system's `info` of the path now."""
        return dict(self.fs.info(self.path))

    # Not `__reduce__`: since Python 3.13 its base class has this one, which pickle asks first.
    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        return _reopen, (self.fs, self.path, None if self.closed else self.tell())


def _open_bytes(fs: FileSystem, path: str) -> io.BufferedReader:
    while True:
        entry = fs.entry(path)
        if entry is None:
            raise fs.not_found_error(path)
        try:
            return fs.store.open(path)
        except NotFoundError as error:
            now = fs.entry(path)
            if now is not None and (now.digest, now.created) == (entry.digest, entry.created):
                # A file system lists this path, so "no such file" would be wrong, and readers would skip it.
                raise lost_error(path, entry.digest) from error
            # The path was removed or written meanwhile.
        except CorruptError as error:
            raise damage_error(path, error) from error


def _reopen(fs: FileSystem, path: str, position: int | None) -> ReadFile:
    file = ReadFile(fs, path)
    if position is None:
        file.close()
    else:
        file.seek(position)
    return file


class _Discarded(Exception):
    """Ends the block of `Store.create` so that nothing is kept."""


class WriteFile(io.BufferedIOBase):
    """A file whose bytes are stored, all together, when it is closed; after an error nothing is stored.

    Args:
        fs: the file system.
        path: the path of the bytes.
        mode: ``wb``, or ``xb`` (an error if the path exists by the end).
        autocommit: False waits for `commit`, which fsspec's transactions call.
        options: as for `Store.create`.
    """

    def __init__(
        self, fs: FileSystem, path: str, mode: str, autocommit: bool, options: dict[str, Any]
    ) -> None:
        super().__init__()
        self._is_open = False
        self.fs = fs
        self.path = path
        self.mode = mode
        self.autocommit = autocommit
        self.entry: Entry | None = None
        self._process = os.getpid()
        # `with` blocks around this file that are being unwound already do not discard it.
        self._outer_blocks = unwinding_blocks()
        self._unwound_by: int | None = None  # the id of the exception during which the last bytes came
        self._start(options)
        self._is_open = True
        unfinished.add(self, self._resource())

    def _start(self, options: dict[str, Any]) -> None:
        self._block = self.fs.store.create(self.path, replace=self.mode != "xb", **options)
        self._file: Any = self._block.__enter__()

    def _resource(self) -> object:
        return self._block

    def writable(self) -> bool:
        """True."""
        return True

    def tell(self) -> int:
        """The number of bytes so far, with those that were there before."""
        return int(self._file.tell())

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Always raises `io.UnsupportedOperation`: archives and others then write sequentially."""
        raise io.UnsupportedOperation(
            f"castore://{self.path} is written from its start to its end; where a library has to seek, "
            "write a local file, and put that file"
        )

    def write(self, data: Any) -> int:
        """Take all of ``data``; see `castore.Store.create`."""
        # A layer that an exception closes still writes its last bytes.
        if not unfinished.is_collecting():
            self._unwound_by = self._find_unwinding()
        return self._write(data)

    def _write(self, data: Any) -> int:
        return int(self._file.write(data))

    def _find_unwinding(self) -> int | None:
        """The id of the exception that unwinds a `with` block begun after this file was opened, or None.

        Returns an id, since the exception and this file would otherwise keep each other alive.
        """
        error = sys.exc_info()[1]
        return None if error is None or unwinding_blocks() <= self._outer_blocks else id(error)

    def close(self) -> None:
        """Store the bytes, unless an exception unwinds the block that writes them.

        In a block that handles an exception (``except``, ``finally``) the bytes are stored, too, unless the
        same exception has unwound the `with` block of a layer that wrote them.
        """
        if self.closed or not self._is_open:
            super().close()
            return
        if unfinished.is_collecting():  # a layer's finaliser closes this file
            super().close()
            unfinished.finish(self)
            return
        error = sys.exc_info()[1]
        if error is not None and (self._find_unwinding() or self._unwound_by == id(error)):
            self.discard_with_warning(f"{error!r} ended the block that wrote it")
        else:
            super().close()
            if self.autocommit:
                self.commit()

    def discard_with_warning(self, why: str) -> None:
        """Store nothing, and log a warning, since no error reports it."""
        if not self._is_open:
            return
        self.discard()
        log.warning("castore://%s was discarded: %s", self.path, why)

    def commit(self) -> None:
        """Store the bytes of a closed file of a transaction.

        Raises:
            FileExistsError: the mode is ``xb``, and the path exists by now.
            NotADirectoryError: the path is a folder, or lies inside a file.
        """
        if not self._is_open:
            return
        self._is_open = False
        unfinished.forget(self, self._resource())
        with raising_write_errors(self.path):
            try:
                self.entry = self._keep()
            except NameConflictError as error:
                if self.mode == "xb" and self.fs.entry(self.path) is not None:
                    raise exists_error(self.path) from error
                raise

    def _keep(self) -> Entry:
        self._block.__exit__(None, None, None)
        entry: Entry = self._file.entry
        return entry

    def discard(self) -> None:
        """Store nothing."""
        if self._is_open:
            self._is_open = False
            unfinished.forget(self, self._resource())
            self._drop()
        super().close()

    def _drop(self) -> None:
        self._block.__exit__(_Discarded, _Discarded(), None)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is GeneratorExit:  # Python shows this exception to no caller
            self.discard_with_warning(
                "the generator that writes it was closed inside the file's `with` block"
            )
        elif kind is not None:
            self.discard()
        else:
            self.close()

    def finish(self) -> None:
        """End an unreferenced file: store it as `close` does, unless an exception has ended its layers."""
        if not self._is_open or not self.autocommit or self._process != os.getpid():
            self.discard()  # a forked child has only a copy of the parent's file
        elif self._unwound_by is not None:
            self.discard_with_warning("it was never closed, and an exception ended the block that wrote it")
        else:
            super().close()
            self.commit()

    def __del__(self) -> None:
        if getattr(self, "_is_open", False):
            try:
                if self.autocommit:
                    warnings.warn(
                        f"castore://{self.path} was never closed; use `with fs.open(...)`",
                        ResourceWarning,
                        source=self,
                        stacklevel=2,
                    )
            finally:
                unfinished.finish(self)


class AppendFile(WriteFile):
    """A file whose bytes are appended to those that the path has when it is closed. No append is lost."""

    def _start(self, options: dict[str, Any]) -> None:
        store: Store = self.fs.store
        self._options = options
        self._failure: OSError | None = None
        self._size_before = 0
        if store.entry(self.path) is not None:
            with ReadFile(self.fs, self.path) as old:  # an error if the bytes are gone
                self._size_before = old.size
        self._file = tempfile.SpooledTemporaryFile(_MEMORY_BYTES, dir=str(store.path / "tmp"))  # noqa: SIM115

    def _resource(self) -> object:
        return self._file

    def tell(self) -> int:
        """The number of bytes so far, with those that were there when the file was opened."""
        return self._size_before + int(self._file.tell())

    def _write(self, data: Any) -> int:
        if self.closed:
            raise ValueError(f"write to castore://{self.path}, which is closed")
        self._require_own_process()
        try:
            return super()._write(data)
        except OSError as error:  # a part of it may have been written
            self._failure = error
            raise

    def _require_own_process(self) -> None:
        if self._process != os.getpid():
            raise InvalidValueError(
                f"process {self._process} opened castore://{self.path} for appending, and a forked child "
                "cannot write to it; open it again in the child"
            )

    def _keep(self) -> Entry:
        self._require_own_process()
        with self._file:
            if self._failure is not None:
                raise incomplete_error(self._failure) from self._failure
            while True:
                try:
                    return self._append()
                except NameChanged:
                    continue  # another writer was faster: append after its bytes

    def _append(self) -> Entry:
        store: Store = self.fs.store
        entry = store.entry(self.path)
        self._file.seek(0)
        options = self.fs.append_options(entry, self._options)
        with store._putter.create_if_unchanged(self.path, entry, options) as new:
            if entry is not None:
                with ReadFile(self.fs, self.path) as old:
                    _copy(old, new)
            _copy(self._file, new)
        return new.entry

    def _drop(self) -> None:
        self._file.close()


def _copy(source: Any, target: Any) -> None:
    while piece := source.read(_COPY_BYTES):
        target.write(piece)


class CompressedFile(io.BufferedIOBase):
    """A layer of compression that ends the file below it.

    Args:
        layer: compresses into ``file``.
        file: the file below, which gets the compressed bytes.
    """

    def __init__(self, layer: Any, file: WriteFile) -> None:
        super().__init__()
        self._layer = layer
        self._below = file
        self._size = 0

    def writable(self) -> bool:
        """True."""
        return True

    def tell(self) -> int:
        """The number of bytes written, before compression."""
        return self._size

    def write(self, data: Any) -> int:
        """Compress ``data``."""
        if self.closed:
            raise ValueError(f"write to castore://{self._below.path}, which is closed")
        self._layer.write(data)
        size = memoryview(data).nbytes
        self._size += size
        return size

    def close(self) -> None:
        """Store the bytes; see `WriteFile.close`."""
        if not self.closed:
            super().close()
            self._layer.close()
            self._below.close()

    def discard(self) -> None:
        """Store nothing."""
        super().close()
        # The layer ends while the file below takes bytes: its finaliser would write the last ones to a closed
        # file, and Python 3.13 shows that error. A full disk is no error here: these bytes are not kept.
        with contextlib.suppress(OSError):
            self._layer.close()
        self._below.discard()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.discard()
        else:
            self.close()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._below, name)


class TextFile(io.TextIOWrapper):
    """A text layer that discards the file below it after an exception, and writes the byte order mark."""

    def __init__(self, file: WriteFile | CompressedFile, **options: Any) -> None:
        encoding = options.get("encoding")
        if encoding and codecs.lookup(encoding).name == "utf-8-sig" and file.tell() > 0:
            # `io.TextIOWrapper` writes the mark again behind other bytes where a file cannot seek.
            options["encoding"] = "utf-8"
        super().__init__(file, **options)  # type: ignore[arg-type]  # typeshed asks for more than is used
        # `io.TextIOWrapper` leaves out these marks where a file cannot seek.
        if codecs.lookup(self.encoding).name in ("utf-16", "utf-32") and file.tell() == 0:
            file.write("".encode(self.encoding))

    def tell(self) -> int:
        """The number of bytes so far, with those that were there before."""
        self.flush()
        return int(self.buffer.tell())  # type: ignore[attr-defined]  # one of the two above

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.buffer.discard()  # type: ignore[attr-defined]  # one of the two above
        else:
            self.close()
