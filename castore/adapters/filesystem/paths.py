"""`castore://` for universal_pathlib, which finds this class by its entry point."""

from __future__ import annotations

from fsspec import get_filesystem_class
from upath import UPath

# universal_pathlib takes the rules of paths from classes that fsspec has imported, and warns where it finds
# none.
get_filesystem_class("castore")


class CastorePath(UPath):
    """A `pathlib`-like path of a store: ``UPath("castore://run/notes.txt", store="/nvme/cache")``."""

    __slots__ = ()
