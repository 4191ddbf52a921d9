"""The interface of a tree of files that a mount can show: names of a store, or of a commit of a remote.

Has types only. Rows leave a tree as it has them, unchecked: a damaged row may hold anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from castore.errors import CorruptError
from castore.records import Blob, FileRow
from castore.system.ram_cache import MemoryLRU


class Change(Protocol):
    """A change of a name: it points to another digest, or to none."""

    @property
    def name(self) -> str:
        """The name."""
        ...

    @property
    def digest(self) -> bytes | None:
        """The digest from now on."""
        ...


class Changes(Protocol):
    """The changes of names since it was made."""

    def poll(self) -> Sequence[Change] | None:
        """The changes since the last call; None if there are too many to list."""
        ...

    def close(self) -> None:
        """Stop following."""
        ...


class HeldBlob(Protocol):
    """A blob whose bytes stay readable until it is closed, decoded in frames of `FRAME_SIZE` bytes.

    Attributes:
        blob: the blob.
        frames: how many it has.
    """

    blob: Blob
    frames: int

    def view(self, offset: int, size: int) -> bytes | memoryview:
        """Up to ``size`` bytes from ``offset``; fewer only at the end.

        Raises:
            CorruptError: the stored bytes are damaged.
        """
        ...

    def prefetch(self, indices: range) -> None:
        """Have frames decoded that will be read soon."""
        ...

    def hold(self) -> bool:
        """Keep it open until `unhold`, even over a `close`; False if it is closed already."""
        ...

    def unhold(self) -> None:
        """Undo `hold`."""
        ...

    def close(self) -> None:
        """Let go of the bytes."""
        ...

    def unlinked(self) -> bool:
        """Whether its file has been unlinked, so that closing it frees disk space."""
        ...


class FileTree(Protocol):
    """A tree of files. Threads may share it. Times are seconds since the epoch."""

    # Names

    def file(self, name: str, now: float) -> FileRow | None:
        """The row of a name, unless it has expired by ``now``."""
        ...

    def files(self, low: str, high: str | None, now: float, limit: int) -> list[FileRow]:
        """The first rows from ``low`` on, in the order of names, that have not expired by ``now``.

        Args:
            low: the first name that may be among them.
            high: the first name behind them; None for no bound.
            now: the time.
            limit: number of rows.
        """
        ...

    def require_order(self, last: str, key: str) -> str:
        """Return ``key``, the ``low`` of the next `files`, after checking that it sorts behind ``last``.

        Raises:
            StoreError: it does not: the index is damaged, and the listing might never end.
        """
        ...

    def is_folder(self, path: str, now: float) -> bool:
        """Whether a name that has not expired by ``now`` lies inside ``path``."""
        ...

    def find_digest(self, name: str) -> bytes | None:
        """The digest that a name points to, expired or not, or None."""
        ...

    def follow(self) -> Changes:
        """The changes of names from now on. The caller closes it."""
        ...

    # Blobs

    def blob(self, digest: bytes) -> Blob | None:
        """A blob that can be reached by its digest alone, or None."""
        ...

    def is_named(self, digest: bytes) -> bool:
        """Whether a name points to a blob, so that gc keeps it."""
        ...

    def open(self, name: str, digest: bytes, cache: MemoryLRU[bytes]) -> HeldBlob:
        """Hold a blob's bytes, whatever gc does.

        Args:
            name: that points, or pointed, to the blob; "" if it was found by its digest.
            digest: of the blob.
            cache: keeps decoded frames for all readers.

        Raises:
            FileNotFoundError: the bytes are gone.
        """
        ...

    def read_small(self, name: str, digest: bytes) -> bytes | None:
        """All bytes of a blob of one frame, checked. None for a larger blob, and for unreadable bytes.

        `open` gives the error then.
        """
        ...

    def count_use(self, name: str, digest: bytes) -> None:
        """Count a read: gc removes what was used least recently first."""
        ...

    def quarantine(self, held: HeldBlob, error: CorruptError) -> bool:
        """Set a blob aside that failed its check; returns whether the bytes can be had again."""
        ...

    def attributes(self, name: str, digest: bytes) -> dict[str, str]:
        """Facts of a name and its blob, for people."""
        ...

    # Upkeep

    def maintain(self, seconds: float) -> None:
        """Flush counts of use for at most about ``seconds``, and let go of what gc has unlinked.

        Call it every few moments from a background thread.
        """
        ...

    def close(self) -> None:
        """Nobody reads any more."""
        ...
