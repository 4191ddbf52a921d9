"""A blob whose bytes come in pieces: what `Store.create` gives to be written to, and `Store.put_stream`
fills.

The first bytes are held in memory: a blob that ends within them is put as `Store.put` does it. Later
bytes are compressed at once, frame after frame, into a temporary file, so memory stays bounded however long
the stream goes on.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import NoReturn, Protocol

import blake3

from castore.errors import InvalidValueError, SerializationError, StoreError, add_filename
from castore.objects.codecs import FRAME_SIZE
from castore.objects.directory import ObjectDirectory
from castore.objects.encode import FrameEncoder, choose_codec
from castore.records import LOOSE, Blob, Buffer, Entry
from castore.write.staging import LargeBlob, Staged

#: A blob that is no longer than this is put whole. Of one that is longer, ``auto`` is settled from so much of
#: it.
BUFFERED_BYTES = 32 * FRAME_SIZE


def write_all(fd: int, data: Buffer, path: Path) -> None:
    """Write all of ``data``; an error names the file."""
    view = memoryview(data)
    with add_filename(path):
        while view:
            view = view[os.write(fd, view) :]


def incomplete_error(failure: BaseException) -> StoreError:
    """The error for a file of which an earlier write has failed."""
    return StoreError(
        f"an earlier write of this file failed ({failure!r}), so nothing of it is kept;"
        " write it anew from its start"
    )


class StageWhole(Protocol):
    """Stages a blob that is held in memory."""

    def __call__(self, data: Buffer, codec: str, level: int | None, *, reuse: bool) -> Staged:
        """See `BlobWriter.stage`."""
        ...


class IncomingBlob:
    """Bytes on their way to a blob.

    Args:
        stage_whole: stages a blob that ends within its first bytes.
        objects: where a longer one goes.
        codec, level: as for a put.
    """

    def __init__(
        self, stage_whole: StageWhole, objects: ObjectDirectory, codec: str, level: int | None
    ) -> None:
        self._stage_whole = stage_whole
        self._objects = objects
        self._codec = codec
        self._level = level
        self._buffer = bytearray()  # the first bytes, and later what is less than a frame
        self._encoder: FrameEncoder | None = None
        self._hash = blake3.blake3()
        self._fd = -1
        self._temporary: Path | None = None
        self._process = os.getpid()
        self._failure: BaseException | None = None
        self.size = 0

    def add(self, data: Buffer) -> None:
        """Take some more bytes. The caller may change the buffer afterwards.

        Raises:
            StoreError: an earlier call has failed: bytes may be missing, and the blob cannot be finished.
        """
        self._require_own_process()
        self._require_whole()
        try:
            self._buffer += data
            self.size += len(data)
            if self._encoder is not None:
                self._hash.update(data)
                self._encode_frames(self._encoder)
            elif self.size > BUFFERED_BYTES:
                self._begin_encoding()
        except BaseException as error:
            self._failure = error
            raise

    def _begin_encoding(self) -> None:
        head = memoryview(self._buffer)
        used = choose_codec(self._codec, len(head), lambda at, length: head[at : at + length])
        self._hash.update(head)
        head.release()  # the buffer cannot shrink before
        self._codec = used
        fd, temporary = self._objects.loose.create()
        self._fd, self._temporary = fd, temporary
        self._encoder = FrameEncoder(used, self._level, lambda piece: write_all(fd, piece, temporary))
        self._encode_frames(self._encoder)

    def _encode_frames(self, encoder: FrameEncoder) -> None:
        whole = len(self._buffer) // FRAME_SIZE * FRAME_SIZE
        if not whole:
            return
        frames = bytes(memoryview(self._buffer)[:whole])
        del self._buffer[:whole]
        view = memoryview(frames)
        for start in range(0, whole, FRAME_SIZE):
            encoder.add(view[start : start + FRAME_SIZE])

    def stage(self, reuse: bool) -> Staged:
        """All bytes, ready to be placed. Called again, with ``reuse=False``, for a blob that was seen to
        vanish.

        Raises:
            StoreError: a call of `add` has failed.
        """
        self._require_own_process()
        self._require_whole()
        if self._encoder is None:
            return self._stage_whole(bytes(self._buffer), self._codec, self._level, reuse=reuse)
        if self._buffer:
            self._encoder.add(bytes(self._buffer))
        encoded = self._encoder.finish(self.size)
        self._objects.loose.seal(self._fd, durable=self._objects.durable)
        self._close_file()
        temporary, self._temporary = self._temporary, None
        assert temporary is not None  # made with the encoder; a blob of this kind is staged once
        blob = Blob(self._hash.digest(), self.size, encoded.stored, self._codec, LOOSE, 0)
        return LargeBlob(self._objects, blob, temporary, encoded.checksums)

    def _require_own_process(self) -> None:
        if os.getpid() != self._process:
            raise InvalidValueError(
                f"process {self._process} began to write this file, and a forked child cannot continue it;"
                " create it again in the child"
            )

    def _require_whole(self) -> None:
        if self._failure is not None:
            raise incomplete_error(self._failure) from self._failure

    def abandon(self) -> None:
        """Keep nothing. A blob that was staged already belongs to its `LargeBlob`."""
        if self._encoder is not None:
            self._encoder.abandon()
        self._close_file()
        temporary, self._temporary = self._temporary, None
        # A forked child has a copy of this object: the file is its parent's.
        if temporary is not None and os.getpid() == self._process:
            temporary.unlink(missing_ok=True)

    def _close_file(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class NewFile(io.BufferedIOBase):
    """The file that `Store.create` gives: binary, written from its start to its end, for one thread at a
    time.

    Closing it ends the writing. Whether its bytes are kept depends on how the block of `Store.create` ends.
    """

    def __init__(
        self, name: str, blob: IncomingBlob, explain_full_disk: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self._blob = blob  # first, for `__del__` comes also after a Ctrl-C in here
        super().__init__()
        self.name = name
        self.mode = "wb"
        self._entry: Entry | None = None
        self._explain_full_disk = explain_full_disk

    @property
    def entry(self) -> Entry:
        """The new entry, once the block has ended.

        Raises:
            InvalidValueError: the block has not ended, or it ended with an error and nothing was kept.
        """
        if self._entry is None:
            raise InvalidValueError(
                f"{self.name!r} has no entry: the block of Store.create has not ended, or it ended with an"
                " error; read `entry` after the block"
            )
        return self._entry

    def writable(self) -> bool:
        """True."""
        return True

    def tell(self) -> int:
        """How many bytes were written."""
        return self._blob.size

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Always an `io.UnsupportedOperation`, which archives and others take as a word that they must write
        on.
        """
        raise io.UnsupportedOperation(
            f"{self.name!r} cannot seek: it is written from its start to its end;"
            " where a library has to seek, write a local file and put that"
        )

    def write(self, data: Buffer) -> int:  # type: ignore[override]  # typeshed's type of buffers is private
        """Take all of ``data``.

        Raises:
            FullError: the disk is full.
            StoreError: an earlier write has failed. The file cannot be kept any more.
            SerializationError: it is no run of bytes, but text, say.
        """
        if self.closed:
            raise ValueError(f"write to {self.name!r}, which is closed")
        try:
            view = memoryview(data)
        except TypeError as error:
            raise SerializationError(
                f"{self.name!r} is written as bytes, not as {type(data).__name__}; encode text first,"
                " or wrap the file in io.TextIOWrapper"
            ) from error
        plain = view.cast("B") if view.c_contiguous and view.nbytes else view.tobytes()
        with self._explain_full_disk():
            self._blob.add(plain)
        return len(plain)

    def __del__(self) -> None:
        self._blob.abandon()


class Creation:
    """The block of `Store.create`: its end keeps what was written, and an exception keeps nothing."""

    def __init__(self, file: NewFile, commit: Callable[[], Entry], blob: IncomingBlob) -> None:
        self._file = file
        self._commit = commit
        self._blob = blob

    def __enter__(self) -> NewFile:
        return self._file

    def __getattr__(self, name: str) -> NoReturn:
        if hasattr(NewFile, name) and not name.startswith("_"):
            raise InvalidValueError(
                "Store.create returns a context manager, not a file:"
                f" use `with store.create({self._file.name!r}) as file:"
                f" file.{name}{'(...)' if callable(getattr(NewFile, name)) else ''}`"
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        try:
            if kind is None:
                self._file._entry = self._commit()
        finally:
            self._blob.abandon()
