"""The table of mounts that this process sees. Reads /proc alone: never accesses a mount, which may hang."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

FSTYPE = "fuse.castore"
"""The file system type of castore's mounts, in /proc/mounts and for `mount -t`."""
SOURCE_PREFIX = "castore:"
"""The source of such a mount is this, and then the path of its store."""


class MountInfo(NamedTuple):
    """A line of /proc/self/mountinfo.

    Attributes:
        mountpoint: where it is mounted.
        fstype: type of the file system.
        source: whatever was mounted, in the words of the file system.
        device: numbers of its device, ``major:minor``.
    """

    mountpoint: Path
    fstype: str
    source: str
    device: str

    @property
    def store(self) -> str | None:
        """The real path of the store that a mount of castore's shows; None for other mounts."""
        if self.fstype != FSTYPE:
            return None
        return os.path.realpath(self.source.removeprefix(SOURCE_PREFIX))


def mounts(device: str = "") -> list[MountInfo]:
    """All mounts, the oldest first; with ``device``, those of that one (``major:minor``) alone."""
    found = []
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as lines:
        for line in lines:
            before, _, after = line.partition(" - ")
            fields, (fstype, source, *_) = before.split(" "), after.split(" ")
            if device not in ("", fields[2]):
                continue
            found.append(MountInfo(Path(_unescape(fields[4])), fstype, _unescape(source), fields[2]))
    return found


def _unescape(field: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)
