"""Files that a program replaces, whole or as they were, and folders that go away."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from castore.errors import StoreError

_STREAMS = {"stdin": 0, "stdout": 1, "stderr": 2}
_DESCRIPTOR = re.compile(r"/dev/(?P<name>stdin|stdout|stderr)|(?:/dev|/proc/self)/fd/(?P<number>[0-9]{1,9})")


@contextmanager
def replacing(path: str) -> Iterator[BinaryIO]:
    """A file to write, which takes the place of ``path`` at the end of the block.

    An error in the block leaves ``path`` as it was: other programs take a file that they find for a whole
    one. A device or a pipe is written to directly, since a file must not take its place, and so is what a
    descriptor of this process leads to.
    """
    descriptor = descriptor_of(path)
    if descriptor is not None:
        with os.fdopen(os.dup(descriptor), "wb") as file:
            yield file
        return
    target = os.path.realpath(path)  # a symbolic link stays, and its target is replaced
    exists = os.path.exists(target)
    if exists and not os.path.isfile(target):  # a folder is an error of `open`
        with open(target, "wb") as file:
            yield file
        return
    temporary = os.path.join(os.path.dirname(target), f".castore-{os.urandom(8).hex()}.part")
    try:
        with open(temporary, "xb") as file:
            yield file
        if exists:
            os.chmod(temporary, stat.S_IMODE(os.stat(target).st_mode))
        os.replace(temporary, target)
    except BaseException as error:
        if isinstance(error, OSError) and error.filename == temporary:
            error.filename = path  # the caller does not know the temporary file
        with suppress(OSError):  # the first error counts
            os.unlink(temporary)
        raise


def descriptor_of(path: str) -> int | None:
    """The number of the descriptor of this process that a path stands for, or None.

    A file that standard output goes to may have been written to before, and must not be replaced.

    >>> descriptor_of("/dev/stdout"), descriptor_of("/dev/fd/7"), descriptor_of("stdout")
    (1, 7, None)
    """
    found = _DESCRIPTOR.fullmatch(os.path.abspath(path))
    return None if found is None else int(found["number"] or _STREAMS[found["name"]])


def raise_if_gone(path: Path, error: BaseException) -> None:
    """Raise the error for a store whose folder was removed, in place of an error that came of it.

    Raises:
        StoreError: there is no folder ``path``.
    """
    if not path.is_dir():
        raise StoreError(
            f"the folder of the store {path} is gone; open the store anew to make one"
        ) from error


@contextmanager
def explain_gone(path: Path) -> Iterator[None]:
    """Make an error of files name the folder of a store as gone, where it came of that."""
    try:
        yield
    except OSError as error:
        raise_if_gone(path, error)
        raise
