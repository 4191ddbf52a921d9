"""Files that a program replaces: whole, or as they were."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import BinaryIO


@contextmanager
def replacing(path: str) -> Iterator[BinaryIO]:
    """A file to write, which takes the place of ``path`` at the end of the block.

    An error in the block leaves ``path`` as it was: other programs take a file that they find for a whole
    one. A device or a pipe is written to directly, since a file must not take its place.
    """
    target = os.path.realpath(path)  # a symbolic link stays, and its target is replaced
    exists = os.path.exists(target)
    if exists and not os.path.isfile(target):  # a folder is an error of `open`
        with open(target, "wb") as file:
            yield file
        return
    temporary = os.path.join(os.path.dirname(target), f".castore-{secrets.token_hex(8)}.part")
    try:
        with open(temporary, "xb") as file:
            yield file
        if exists:
            shutil.copymode(target, temporary)
        os.replace(temporary, target)
    except BaseException as error:
        if isinstance(error, OSError) and error.filename == temporary:
            error.filename = path  # the caller does not know the temporary file
        with suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
