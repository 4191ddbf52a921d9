"""The interface of a bucket: the few operations on a place for objects that a remote needs.

All objects but refs are immutable and named by their own digest, so `put` may be repeated and overtaken
without harm. Refs change by `create` and `replace`, which are conditional. Nothing here depends on the
meaning of an object. Calls block, and may come from any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, Protocol

if TYPE_CHECKING:
    from castore.records import Buffer


#: Bytes that an object which is read whole into memory may have.
SMALL = 80 << 20


class Listed(NamedTuple):
    """An object in a listing.

    Attributes:
        key: relative to the remote's URL.
        size: in bytes.
        modified: by the storage's clock, seconds since the epoch.
    """

    key: str
    size: int
    modified: float


class Versioned(NamedTuple):
    """A small object and the version that `Bucket.replace` compares.

    Attributes:
        data: all bytes.
        version: opaque; another after each write. On S3 it is a digest of the bytes and recurs with them, so
            each write of a conditional object should have bytes of its own, an id of its writer for example.
        modified: by the storage's clock, seconds since the epoch.
    """

    data: bytes
    version: Any
    modified: float


class Patience(NamedTuple):
    """How long a request may take. All times in seconds.

    Attributes:
        connect: for a connection to be made.
        silence: without a byte of an answer; a part of an upload must be through in it as well.
        retries: tries after the first one, with pauses that double, of some chance.
        deadline: after it no other try begins, so a call without an answer ends by ``deadline + silence``.
            A stream and a listing have that time from each piece or page that came.
    """

    connect: float = 5.0
    silence: float = 60.0
    retries: int = 8
    deadline: float = 120.0

    @classmethod
    def within(cls, seconds: float) -> Patience:
        """A call without an answer ends by then."""
        return cls(connect=min(cls().connect, seconds / 3), silence=seconds / 3, deadline=seconds * 2 / 3)


class Bucket(Protocol):
    """A place for objects, below one URL.

    Every method but the conditional ones may be repeated. Keys are relative POSIX paths of ASCII letters,
    digits and ``._-``. An object is either written by `put` and `upload`, or by `create` and `replace`.

    Raises:
        RemoteMissingError: there is no such object.
        RemoteDeniedError: the credentials are missing, expired or do not suffice.
        RemoteUnreachableError: no answer in time, after retries. A conditional write may have happened.
        RemoteError: the storage refuses for another reason, or gives another answer than was asked for.
    """

    url: str

    def get(self, key: str) -> Versioned:
        """All bytes of a small object, and its version.

        Raises:
            RemoteError: it has more than `SMALL` bytes. None are read then.
        """
        ...

    def size(self, key: str) -> int | None:
        """Length in bytes of an object, or None if there is none."""
        ...

    def get_range(self, key: str, start: int, end: int) -> bytes:
        """The bytes of an object from ``start`` to ``end``, or to its own end if that comes before.

        Raises:
            RemoteError: the storage gave another number of bytes.
        """
        ...

    def stream(self, key: str) -> Iterator[bytes]:
        """The bytes of an object of any size, in pieces of some megabytes."""
        ...

    def put(self, key: str, data: Buffer) -> None:
        """Write an object, or write it again."""
        ...

    def upload(self, key: str, path: Path, progress: Callable[[int], object]) -> None:
        """`put` for a file of any size, in parts and in constant memory.

        Args:
            progress: called with the bytes of each piece that is read. Its exceptions end the upload, and
                nothing is written then.
        """
        ...

    def create(self, key: str, data: bytes) -> bool:
        """Write a small object if there is none; False if there is one.

        A request may be tried again after a lost answer, and then finds its own write: so False may also mean
        that. Read the object back where the difference matters. The same holds for `replace`.
        """
        ...

    def replace(self, key: str, data: bytes, version: Any) -> bool:
        """Write a small object if it still has ``version`` (compare and swap); False if it has not."""
        ...

    def renew(self, key: str, seen: Versioned) -> None:
        """Note that an object of `create` is in use: its time of change becomes the present one.

        Args:
            key: of the object.
            seen: the object as it was read. If it has changed since, nothing happens.
        """
        ...

    def listing(self, prefix: str) -> Iterator[Listed]:
        """All objects whose key begins with ``prefix``, a folder that ends with a slash or ""."""
        ...

    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects. Missing ones are passed over."""
        ...

    def remove_unfinished(self, before: float) -> None:
        """Remove leftovers of writes that were interrupted before a time, as far as they can be recognized.

        Args:
            before: by the storage's clock, seconds since the epoch.
        """
        ...


def pieces(file: BinaryIO, size: int, progress: Callable[[int], object]) -> Iterator[bytes]:
    """The rest of a file in pieces, each of which is reported before it is given out."""
    while piece := file.read(size):
        progress(len(piece))
        yield piece
