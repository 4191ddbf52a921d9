"""Every error that castore raises on purpose, in one place.

Assumes nothing and imports nothing of castore. A message is one sentence: what, where, what to do. Each class
also derives from the built-in error that fits, so callers need not know castore to catch it. Constructors
take the message first and the rest by keyword: so errors survive pickling when a worker process raises them.
"""

from __future__ import annotations

import errno
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

# Where castore lies, and Python's library.
_OWN, _PYTHON = (os.path.join(os.path.dirname(file), "") for file in (__file__, os.__file__))


class CastoreError(Exception):
    """The base of all errors of this library."""


class InvalidNameError(CastoreError, ValueError):
    """A name, or a part of it, is not allowed."""


class InvalidValueError(CastoreError, ValueError):
    """An argument has a value that makes no sense."""


class SerializationError(CastoreError, TypeError):
    """An object cannot be turned into bytes, or bytes into an object, with the serializers allowed."""


class UnhashableError(CastoreError, TypeError):
    """A part of a config, or what a function refers to, has no stable hash."""


class CorruptError(CastoreError):
    """Stored bytes failed their check.

    Args:
        message: the sentence for the user.
        digest: hex digest of the blob, if it is known.
        where: the file, the record or the serializer that failed.
    """

    def __init__(self, message: str, *, digest: str | None = None, where: str | None = None) -> None:
        super().__init__(message)
        self.digest = digest
        self.where = where


class StoreError(CastoreError):
    """A store cannot be opened: wrong format, a network file system, missing permissions."""


class CacheWarning(UserWarning):
    """A result that could have been expected in the cache was computed again, or was not kept."""


def warn(message: str, category: type[Warning]) -> None:
    """Warn at the user's line: the innermost one in a file that no package manager has installed.

    Frames of castore, of Python's library and of packages between, as `datasets` and torch, are passed over.
    In a thread that runs no line of the user's, the warning names castore's own line.
    """
    frame, level, users = sys._getframe(1), 2, 2
    while frame.f_back is not None:
        frame, level = frame.f_back, level + 1
        if not _is_installed(frame.f_code.co_filename):
            users = level
            break
    warnings.warn(message, category, stacklevel=users)


def _is_installed(file: str) -> bool:
    """Whether a file of code belongs to castore, to Python or to an installed package."""
    is_package = "/site-packages/" in file or "/dist-packages/" in file
    return is_package or file.startswith((_OWN, _PYTHON, "<frozen "))


def warn_unkept(key: str, error: CastoreError) -> None:
    """Warn that the result of a computation is not kept."""
    warn(f"the result for {key!r} was computed and is not kept: {error}", CacheWarning)


class NestedStoreWarning(UserWarning):
    """A store is made inside another store's folder."""


class LostSettingsWarning(UserWarning):
    """A store had lost its ``castore.json``, and castore has written a new one."""


class TooLargeError(CastoreError):
    """A blob, or all blobs of a batch, are larger than the whole budget."""


class DictionaryError(CastoreError):
    """No dictionary can be made that pays: too few samples, or too little that they have in common."""


class OutOfRangeError(CastoreError, IndexError):
    """There is no sample, or no slot, of that index."""


class NotFoundError(CastoreError, KeyError):
    """There is no such entry or blob."""

    # KeyError prints the repr of its argument, which would put the sentence in quotes.
    __str__ = Exception.__str__


class NameConflictError(CastoreError):
    """A name cannot be both a file and a folder."""


class MissingDependencyError(CastoreError, ImportError):
    """An optional package is needed and not installed."""

    @classmethod
    def of(cls, package: str, extra: str | None = None) -> MissingDependencyError:
        """The error for `package`, which `pip install "castore[extra]"` brings; with None, no extra does.

        >>> print(MissingDependencyError.of("pyarrow", "datasets"))
        this needs the package pyarrow; install it with: pip install "castore[datasets]"
        """
        what = package if extra is None else f'"castore[{extra}]"'
        error = cls(f"this needs the package {package}; install it with: pip install {what}")
        error.name = package
        return error


class RemoteError(CastoreError):
    """A remote cannot be used, refuses, or holds what no castore wrote."""


class RemoteMissingError(RemoteError):
    """The remote has no such object, ref or commit."""


class RemoteDeniedError(RemoteError, PermissionError):
    """The credentials for a remote are missing, expired or do not suffice."""


class RemoteUnreachableError(RemoteError, ConnectionError):
    """A remote gave no answer in time."""


class RemoteWarning(UserWarning):
    """A remote can be used, and something about it may surprise."""


class ConflictError(RemoteError):
    """Two stores have changed the same names of a ref.

    Args:
        message: the sentence for the user.
        names: those that both changed, sorted.
    """

    def __init__(self, message: str, *, names: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.names = names


class SegmentError(CastoreError):
    """A shared memory segment cannot be used: another user's, of another layout, closed or gone."""


class SlotError(CastoreError, RuntimeError):
    """A slot of a shared cache is empty, or holds a sample already."""


class FullError(CastoreError, OSError):
    """The disk, or the store's budget, has no space left."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.errno = errno.ENOSPC


def read_only_error(folder: object) -> StoreError:
    """The error for a change to a store in whose folder nothing can be written."""
    return StoreError(
        f"the store {folder} can be read and not changed:"
        " its file system is read-only, or this user may not write there"
    )


@contextmanager
def add_filename(path: str | os.PathLike[str]) -> Iterator[None]:
    """Add the file's name to an `OSError` of the block: Python adds it only when it opens a file.

    >>> import errno
    >>> with add_filename("shards/0.tar"):
    ...     raise OSError(errno.EINVAL, "Invalid argument")
    Traceback (most recent call last):
    OSError: [Errno 22] Invalid argument: 'shards/0.tar'
    """
    try:
        yield
    except OSError as error:
        if error.filename is None and not isinstance(error, CastoreError):
            error.filename = os.fspath(path)
        raise
