"""Sizes of cache levels: bytes, texts such as "100GB", or a fraction of the free space.

A size is a limit, and a level grows into it. So a size beyond the free space is cut to the free space, with a
line in the log: the same script runs on a workstation and on a large node. No room at all is an error.
"""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

from castore.errors import FullError, InvalidValueError
from castore.shm.free_space import SHM, memory_free, shm_free
from castore.units import format_size, parse_size

Size = int | float | str
"""Bytes as an int or a text ("100GB"), or a fraction in (0, 1] as a float: of what is free."""

_log = logging.getLogger("castore.adapters.torch")
# A smaller level would hold nothing worth its tables.
_LEAST = 1 << 16


def memory_bytes(size: Size, what: str) -> int:
    """Bytes of shared memory for ``size``; a float is a fraction of the free space in ``/dev/shm`` and RAM.

    Raises:
        InvalidValueError: it is no size.
        FullError: nothing is free.
    """
    # A part stays for other processes, which take memory until the segment is made and compares again.
    free = min(shm_free(), memory_free()) * 63 // 64
    return _checked(size, what, free, f"{SHM} (or the machine's memory)")


def disk_bytes(size: Size, what: str, folder: str | os.PathLike[str], held: int = 0) -> int:
    """Bytes of the disk under ``folder`` for ``size``; a float is a fraction of the free space.

    Args:
        size: the size.
        what: its name in errors.
        folder: may be missing.
        held: bytes that a cache in the folder already holds. They count as free, so that a second run gets
            the limit of the first.

    Raises:
        InvalidValueError: it is no size.
        FullError: nothing is free.
    """
    return _checked(size, what, _disk_free(folder) + held, f"the disk of {folder}")


def refuse_full_disk(folder: str | os.PathLike[str]) -> None:
    """Raise FullError where not even an empty store would fit."""
    free = _disk_free(folder)
    if free < _LEAST:
        raise FullError(f"the disk of {folder} has only {format_size(free)} free: make room")


def _disk_free(folder: str | os.PathLike[str]) -> int:
    place = Path(os.path.abspath(folder))
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free


def is_off(size: Size, what: str) -> bool:
    """Whether ``size`` turns the level off.

    Raises:
        InvalidValueError: it is no size.
    """
    return _bytes(size, what, 1 << 40) == 0


def _checked(size: Size, what: str, free: int, where: str) -> int:
    wanted = _bytes(size, what, free)
    if free < min(wanted, _LEAST):
        raise FullError(f"{what}={size!r}, but {where} has only {format_size(free)} free: make room")
    if wanted > free:
        _log.warning(
            "%s=%r is more than %s has free, %s: that is the limit then", what, size, where, format_size(free)
        )
    return min(wanted, free)


def _bytes(size: Size, what: str, free: int) -> int:
    if isinstance(size, float) and size:
        if 0 < size <= 1:
            return int(free * size)
        raise InvalidValueError(
            f"{what}={size!r}: a float is the fraction of what is free, so from 0 to 1; give bytes as an "
            "int, or a text "
            'like "100GB"'
        )
    try:
        return parse_size(size)
    except InvalidValueError as error:
        raise InvalidValueError(f"{what}: {error}") from None
