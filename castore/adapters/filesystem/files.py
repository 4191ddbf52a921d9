"""Open files: a reader decodes only the frames that are read, and a written file is seen whole at its end."""

from __future__ import annotations

import io
import logging
import sys
import warnings
from types import TracebackType
from typing import TYPE_CHECKING, Any

from castore import Entry, NameConflictError, Store
from castore.adapters.filesystem.errors import exists, reading, writing

if TYPE_CHECKING:
    from castore.adapters.filesystem.filesystem import CastoreFileSystem

log = logging.getLogger("castore")

#: Bytes that are copied at a time when a file is appended to.
_PIECE = 1 << 20


class ReadFile(io.BufferedReader):
    """A seekable file over the bytes that a name had when it was opened. Pickles as its path and its
    position.
    """

    def __init__(self, fs: CastoreFileSystem, path: str) -> None:
        with reading(path):
            opened = fs.store.open(path)
        # Small pieces are buffered a frame at a time, as by `Store.open`, whose raw file this takes over.
        super().__init__(opened.detach(), 256 * 1024)
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

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopened, (self.fs, self.path, None if self.closed else self.tell())


def _reopened(fs: CastoreFileSystem, path: str, position: int | None) -> ReadFile:
    file = ReadFile(fs, path)
    if position is None:
        file.close()
    else:
        file.seek(position)
    return file


class _Discarded(Exception):
    """Ends the block of `Store.create` so that nothing is kept."""


class WriteFile(io.BufferedIOBase):
    """A file whose bytes are kept, all together, when it is closed; nothing of them after an error.

    Args:
        fs: the file system.
        path: what the bytes are going to be named.
        mode: ``wb``, ``xb`` (which is an error if the path is there by the end), or ``ab`` (what is there
            comes first).
        autocommit: False waits for `commit`, which fsspec's transactions call.
        options: as for `Store.create`.
    """

    def __init__(
        self, fs: CastoreFileSystem, path: str, mode: str, autocommit: bool, options: dict[str, Any]
    ) -> None:
        super().__init__()
        self._is_open = False
        self.fs = fs
        self.path = path
        self.mode = mode
        self.autocommit = autocommit
        self.entry: Entry | None = None
        store: Store = fs.store
        self._block = store.create(path, replace=mode != "xb", **options)
        self._file = self._block.__enter__()
        self._is_open = True
        # Of the exceptions that are being handled, those that were before count for nothing.
        self._before = sys.exc_info()[1]
        if mode == "ab" and path in store:
            with store.open(path) as old:
                while piece := old.read(_PIECE):
                    self._file.write(piece)

    def writable(self) -> bool:
        """True."""
        return True

    def tell(self) -> int:
        """How many bytes were written, with those that were there before."""
        return self._file.tell()

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Always an `io.UnsupportedOperation`; see `castore.NewFile.seek`."""
        return self._file.seek(offset, whence)

    def write(self, data: Any) -> int:
        """Take all of ``data``; see `castore.Store.create`."""
        return self._file.write(data)

    def close(self) -> None:
        """Keep the bytes, unless this happens since an exception is on its way out of the block that writes
        them.

        A text or compression layer, and `fsspec.open`, close the file without a word of that exception.
        """
        if self.closed or not self._is_open:
            super().close()
            return
        super().close()
        error = sys.exc_info()[1]
        before, self._before = self._before, None  # its traceback leads back to this file
        if error is not None and error is not before:
            self.discard()
            log.warning(
                "nothing of castore://%s is kept: it was closed while %r was being handled", self.path, error
            )
        elif self.autocommit:
            self.commit()

    def commit(self) -> None:
        """Keep the bytes: of a closed file of a transaction.

        Raises:
            FileExistsError: the mode is ``xb`` and the path is there by now.
            NotADirectoryError: the path is a folder, or lies inside a file.
        """
        if not self._is_open:
            return
        self._is_open = False
        with writing(self.path):
            try:
                self._block.__exit__(None, None, None)
            except NameConflictError as error:
                if self.mode == "xb" and self.path in self.fs.store:
                    raise exists(self.path) from error
                raise
        self.entry = self._file.entry

    def discard(self) -> None:
        """Keep nothing."""
        if self._is_open:
            self._is_open = False
            self._block.__exit__(_Discarded, _Discarded(), None)
        super().close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.discard()
        else:
            self.close()

    def __del__(self) -> None:
        if getattr(self, "_is_open", False) and self.autocommit:
            warnings.warn(
                f"castore://{self.path} was never closed, so nothing of it is kept; use `with fs.open(...)`",
                ResourceWarning,
                source=self,
                stacklevel=2,
            )
            self.discard()
