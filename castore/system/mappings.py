"""The files that are mapped into this process, by address: the kernel knows them by number and by path.

A file that was mapped stays mapped until the program ends, or unmaps it. Meanwhile another file may be
written in its place, or its folder may be moved away and another one put there. A reader of the path must not
take the new file for the mapped bytes.

Cannot see that a file was changed in place.
"""

from __future__ import annotations

import array
import errno
import fcntl
import os
import struct
from bisect import bisect_right
from typing import NamedTuple

# PROCMAP_QUERY of Linux 6.11 asks for one mapping. All of them as text are read in a millisecond.
_QUERY, _CODE = struct.Struct("=9Q4I2Q"), 0xC0686611
_LONGEST_PATH = 4096 + 16


class Mapping(NamedTuple):
    """A mapping of a file: its addresses, and the device, the number and the path of the file."""

    start: int
    end: int
    device: int
    inode: int
    path: bytes

    def is_at(self, path: str) -> bool:
        """Whether the file lies at a path now."""
        try:
            state = os.stat(path)
        except OSError:
            return False
        # Overlays and Btrfs number their files otherwise in mappings. Their paths are true.
        is_same = (self.device, self.inode) == (state.st_dev, state.st_ino)
        return is_same or self.path == os.fsencode(os.path.realpath(path))


class Mappings:
    """The mappings of this process."""

    def __init__(self) -> None:
        #: All of them, by address, where the kernel cannot be asked for one.
        self._all: list[Mapping] | None = None

    def find(self, address: int) -> Mapping | None:
        """The mapping of a file at an address; None for memory that is of no file."""
        if self._all is None:
            with open("/proc/self/maps", "rb", buffering=0) as file:
                try:
                    found = _ask(file.fileno(), address)
                except OSError:
                    self._all = [_parse(line) for line in file.readall().splitlines()]
                else:
                    return found if found is not None and found.inode else None
        place = bisect_right(self._all, address, key=lambda mapping: mapping.start) - 1
        found = self._all[place] if place >= 0 else None
        return found if found is not None and address < found.end and found.inode else None

    def has(self, path: str) -> bool:
        """Whether the file that lies at a path now is mapped. Takes a millisecond."""
        with open("/proc/self/maps", "rb") as file:
            return any(mapping.inode and mapping.is_at(path) for mapping in map(_parse, file))


def _ask(maps: int, address: int) -> Mapping | None:
    """The mapping at an address, from the kernel; None if there is none.

    Raises:
        OSError: the kernel does not know the question.
    """
    path = array.array("B", bytes(_LONGEST_PATH))
    question = bytearray(_QUERY.size)
    _QUERY.pack_into(
        question, 0, _QUERY.size, 0, address, *[0] * 8, _LONGEST_PATH, 0, path.buffer_info()[0], 0
    )
    try:
        fcntl.ioctl(maps, _CODE, question)
    except OSError as error:
        if error.errno == errno.ENOENT:
            return None
        raise
    _, _, _, start, end, _, _, _, inode, major, minor, length, *_ = _QUERY.unpack(question)
    return Mapping(start, end, os.makedev(major, minor), inode, path.tobytes()[: max(0, length - 1)])


def _parse(line: bytes) -> Mapping:
    """A line of ``/proc/self/maps``."""
    addresses, _, _, device, inode, *path = line.split(maxsplit=5)
    start, end = (int(address, 16) for address in addresses.split(b"-"))
    major, minor = (int(part, 16) for part in device.split(b":"))
    # The kernel writes a line break in a path as an octal number.
    name = b"".join(path).replace(b"\\012", b"\n")
    return Mapping(start, end, os.makedev(major, minor), int(inode), name)
