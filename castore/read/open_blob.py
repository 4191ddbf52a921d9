"""A blob that is held open: any range of its bytes, or all of them in order, checked."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from types import TracebackType

from castore.errors import CorruptError, InvalidValueError
from castore.read.origin import BlobAccess
from castore.records import Blob
from castore.units import as_whole


class OpenBlob:
    """The bytes of a blob, held until `close` whatever gc does. Threads may share it.

    Bytes that fail their check are set aside in the store and are never given out: the blob is missing from
    then on.

    Attributes:
        blob: what is known of it: its digest, its sizes in bytes, its codec and where it lies.
    """

    def __init__(self, reader: BlobAccess, on_damage: Callable[[Blob, CorruptError], object]) -> None:
        self._reader = reader
        self._on_damage = on_damage
        self._is_closed = False
        self.blob = reader.blob

    @property
    def size(self) -> int:
        """Bytes of the blob, uncompressed."""
        return self.blob.size

    def read(self, offset: int, size: int) -> bytes:
        """Up to ``size`` bytes from ``offset``; fewer only at the end of the blob.

        Raises:
            InvalidValueError: an argument is negative or no whole number, or the blob is closed.
            CorruptError: the stored bytes are damaged.
        """
        first, length = as_whole(offset), as_whole(size)
        if first is None or length is None or first < 0 or length < 0:
            raise InvalidValueError(
                f"read({offset!r:.50}, {size!r:.50}) of a blob: the offset and the size are whole numbers of"
                " bytes from 0 on"
            )
        with self._reporting_damage():
            return self._reader.read(first, length)

    def read_all(self) -> bytes:
        """All bytes, decoded on all cores.

        Raises:
            InvalidValueError: the blob is closed.
            CorruptError: the stored bytes are damaged.
        """
        with self._reporting_damage():
            return self._reader.read_all()

    def pieces(self, *, whole: bool = True) -> Generator[bytes]:
        """All bytes in order, in pieces of 256 KiB, decoded ahead on all cores in bounded memory.

        Args:
            whole: compare the digest of all bytes at the end. Each piece is checked without it as well.

        Raises:
            InvalidValueError: the blob is closed.
            CorruptError: the stored bytes are damaged; with ``whole`` this may come after the last piece.
        """
        with self._reporting_damage():
            yield from self._reader.in_order(whole=whole)

    def close(self) -> None:
        """Let go of the bytes. A second call does nothing."""
        if not self._is_closed:
            self._is_closed = True
            self._reader.close()

    def __enter__(self) -> OpenBlob:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @contextmanager
    def _reporting_damage(self) -> Iterator[None]:
        if self._is_closed:
            raise InvalidValueError(f"the blob {self.blob.digest.hex()} is closed; open it again to read it")
        try:
            yield
        except CorruptError as error:
            self._on_damage(self.blob, error)
            raise
