"""castore's errors as the errors that callers of a file system expect: `FileNotFoundError` and its kin."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from castore import CorruptError, InvalidNameError, NameConflictError, NotFoundError
from castore.settings import no_store_message


class DamagedFileError(CorruptError, OSError):
    """A file's bytes failed their check: a `castore.CorruptError`, and an `OSError` with ``EIO``."""

    def __init__(self, message: str, *, digest: str | None = None, where: str | None = None) -> None:
        super().__init__(message, digest=digest, where=where)
        self.errno = errno.EIO


def damage_error(path: str, error: CorruptError) -> DamagedFileError:
    """The error for a file whose bytes are damaged."""
    return DamagedFileError(f"castore://{path}: {error}", digest=error.digest, where=error.where)


def lost_error(path: str, digest: str) -> DamagedFileError:
    """The error for a file whose bytes were found damaged or gone before."""
    return DamagedFileError(
        f"castore://{path}: its bytes were found damaged or are gone; put them again, or remove the path",
        digest=digest,
    )


def not_found_error(path: str) -> FileNotFoundError:
    """The error for a path without a file or folder."""
    return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), f"castore://{path}")


def no_store_error(path: str, store: Path) -> FileNotFoundError:
    """The error for a path in a store that does not exist."""
    return FileNotFoundError(errno.ENOENT, no_store_message(store), f"castore://{path}")


def is_folder_error(path: str) -> IsADirectoryError:
    """The error for a path that is a folder of names."""
    return IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), f"castore://{path}")


def exists_error(path: str) -> FileExistsError:
    """The error for a path that exists already."""
    return FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), f"castore://{path}")


@contextmanager
def raising_read_errors(path: str) -> Iterator[None]:
    """Turn missing files and invalid names into `FileNotFoundError`, and damage into `DamagedFileError`."""
    try:
        yield
    except (NotFoundError, InvalidNameError) as error:
        raise not_found_error(path) from error
    except CorruptError as error:
        if isinstance(error, DamagedFileError):
            raise
        raise damage_error(path, error) from error


@contextmanager
def raising_write_errors(path: str) -> Iterator[None]:
    """Turn a conflict with a folder, or with a file above the path, into `NotADirectoryError`."""
    try:
        yield
    except NameConflictError as error:
        raise NotADirectoryError(errno.ENOTDIR, str(error), f"castore://{path}") from error
