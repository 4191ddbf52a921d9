"""The interface of the place where bytes are that a store only knows of: a remote.

Has types only. `BlobSource` asks an origin for the bytes of a blob that is away.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Protocol

from castore.read.file_tree import HeldBlob
from castore.records import Blob
from castore.system.ram_cache import MemoryLRU

if TYPE_CHECKING:
    from castore.shm.shared_frames import SharedFrames


class BlobAccess(HeldBlob, Protocol):
    """A held blob, whose bytes may also be had as `bytes`."""

    def share(self, frames: SharedFrames | None) -> BlobAccess:
        """Take frames from shared memory where that pays. Returns this blob."""
        ...

    @property
    def is_sharing(self) -> bool:
        """Whether frames are searched in shared memory first."""
        ...

    def read(self, offset: int, size: int) -> bytes:
        """Up to ``size`` bytes from ``offset``; fewer only at the end.

        Raises:
            CorruptError: the stored bytes are damaged.
        """
        ...

    def read_all(self) -> bytes:
        """All bytes, whose digest is checked."""
        ...

    def in_order(self, *, whole: bool = True) -> Generator[bytes]:
        """All bytes in pieces; ``whole`` compares their digest at the end."""
        ...


class Origin(Protocol):
    """Has the bytes of blobs that are away.

    Raises:
        FileNotFoundError: any call, if the bytes cannot be had: a miss.
        RemoteError: any call, if the remote gives no answer now.
    """

    def bring(self, digests: Sequence[bytes], *, large: bool) -> None:
        """Have the bytes of blobs in the store, with ``large`` also of those that otherwise come in parts.

        Raises:
            FullError, TooLargeError: the store has no room for them; `open` serves them all the same.
        """
        ...

    def prefetch(self, digests: Sequence[bytes]) -> None:
        """Begin to bring blobs, in their order, and return at once."""
        ...

    def describe(self, digest: bytes) -> dict[str, str]:
        """Facts about a blob that is away, for people: where it is, and how much of it is here."""
        ...

    def partly_here(self) -> set[bytes]:
        """The digests of blobs of which parts are in the store. Costs as much as a listing of the parts."""
        ...

    def open(self, blob: Blob, cache: MemoryLRU[bytes] | None) -> BlobAccess | None:
        """Hold a blob whose bytes come in parts, or cannot be kept. None for another one, which is in the
        store by then.
        """
        ...
