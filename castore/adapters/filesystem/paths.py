"""`castore://` for universal_pathlib, which finds this class by its entry point: all that it needs is the file system."""

from __future__ import annotations

from upath import UPath


class CastorePath(UPath):  # type: ignore[misc]  # imported only where universal_pathlib is
    """A `pathlib`-like path of a store: ``UPath("castore://run/notes.txt", store="/nvme/cache")``."""

    __slots__ = ()
