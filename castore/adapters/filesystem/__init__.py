"""A store as an fsspec file system, protocol ``castore``, for pandas, pyarrow, DuckDB, zarr, Dask, `datasets`
and others.

`filesystem` maps fsspec's calls to those of the store. `files` has the open files. `unfinished` ends files
that are never closed, and `unwinding` finds the exceptions that end a block. `stores` opens each store once a
process. `paths` is for universal_pathlib.

May import: fsspec, and the store and all below it.
Must never: show a part of a file that is still written, or a damaged file as a shorter one.
"""

from __future__ import annotations

from castore.errors import MissingDependencyError

try:
    from castore.adapters.filesystem.errors import DamagedFileError
    from castore.adapters.filesystem.filesystem import CastoreFileSystem, Mapper
except ModuleNotFoundError as error:
    if error.name != "fsspec":
        raise
    raise MissingDependencyError.of("fsspec", "fsspec") from error

__all__ = ["CastoreFileSystem", "DamagedFileError", "Mapper"]
