"""`CastoreFileSystem`: names are paths, their parts are folders, and a folder exists as long as a name lies
in it.
"""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from fsspec import AbstractFileSystem
from fsspec.callbacks import DEFAULT_CALLBACK
from fsspec.compression import compr
from fsspec.config import apply_config
from fsspec.core import get_compression, has_magic
from fsspec.implementations.local import make_path_posix, trailing_sep
from fsspec.mapping import FSMap
from fsspec.utils import isfilelike, other_paths, stringify_path

from castore import Entry, InvalidNameError, Store, StoreError
from castore.adapters.filesystem import unfinished
from castore.adapters.filesystem.errors import (
    DamagedFileError,
    exists_error,
    is_folder_error,
    lost_error,
    no_store_error,
    not_found_error,
    raising_read_errors,
    raising_write_errors,
)
from castore.adapters.filesystem.files import AppendFile, CompressedFile, ReadFile, TextFile, WriteFile
from castore.adapters.filesystem.stores import is_in_place, shared_store
from castore.names import below, check_name, check_prefix
from castore.settings import has_lost_settings, load, store_folder
from castore.system.local_files import replacing

#: Options of a put, for all files of a file system or for one.
_PUT_OPTIONS = ("codec", "level", "ttl", "metadata", "pin")
#: The options that decide how bytes are compressed.
_COMPRESSION_OPTIONS = ("codec", "level")
#: Options of a text layer.
_TEXT_OPTIONS = ("encoding", "errors", "newline")
#: Rows that are read at a time behind a folder, which often stands beside others, and among files.
_FEW, _MANY = 8, 1000


class _StoreResolver(type(AbstractFileSystem)):  # type: ignore[misc]  # fsspec has no types
    """Caches instances by their store, wherever the store's path came from."""

    def __call__(cls, store: Any = None, **options: Any) -> Any:
        options = apply_config(cls, options)
        store = options.pop("store", None) if store is None else store
        if isinstance(store, Store):
            # Two `Store` objects of one folder may differ in their options, and one may be closed.
            options["skip_instance_cache"] = True
            return super().__call__(store=store, **options)
        return super().__call__(store=str(store_folder(store)), **options)


# fsspec has no types.
class CastoreFileSystem(AbstractFileSystem, metaclass=_StoreResolver):  # type: ignore[misc]
    """A store as a file system of fsspec: ``castore://NAME``.

    Files are read in any order, and only the frames that are read are decoded. A written file appears whole
    when it is closed, or not at all. A file whose path expires or is removed can be read until it is closed.

    Args:
        store: the store's folder, or a `castore.Store`; default ``$CASTORE_DIR``, then ``~/.cache/castore``.
        codec, level, ttl, metadata, pin: options of written files, as for `castore.Store.put`; `open`,
            `pipe_file` and `put_file` take them, too.
        options: options of fsspec's base class. Others are ignored, as in fsspec's own file systems, since
            libraries pass options of other file systems.

    Threads may share an instance, a forked child may go on with it, and it pickles as the path of its store
    (or as the `castore.Store` that it was given).

    >>> import fsspec, tempfile
    >>> fs = fsspec.filesystem("castore", store=tempfile.mkdtemp() + "/cache")
    >>> with fs.open("castore://run/notes.txt", "w") as file:
    ...     _ = file.write("hello")
    >>> fs.cat("run/notes.txt"), fs.ls("run", detail=False), fs.store.get("run/notes.txt")
    (b'hello', ['run/notes.txt'], b'hello')
    """

    protocol = "castore"
    root_marker = ""

    def __init__(self, store: str | os.PathLike[str] | Store | None = None, **options: Any) -> None:
        if self._cached:
            return  # fsspec's base class runs this again for a cached instance
        self._put_options = {name: options.pop(name) for name in _PUT_OPTIONS if name in options}
        super().__init__(**options)
        assert store is not None  # the metaclass has resolved it
        self._open_store = store if isinstance(store, Store) else None
        self._is_by_path = self._open_store is None
        self._place = store.path if isinstance(store, Store) else Path(os.path.abspath(store))
        self._made_folders: set[str] = set()  # folders of `mkdir`, which may be empty

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self._place)!r})"

    @property
    def store(self) -> Store:
        """The store; made if it does not exist, for whoever writes."""
        if self._open_store is None or self._is_replaced(self._open_store):
            self._open_store = shared_store(self._place)
        return self._open_store

    def _is_replaced(self, store: Store) -> bool:
        """Whether another store is at the path now. fsspec gives the same instance to all who ask."""
        return self._is_by_path and not is_in_place(store) and load(self._place) is not None

    def _has_store(self) -> bool:
        """Whether there is a store. Reading makes none, since its path may be mistyped."""
        if self._open_store is not None:
            return True
        try:
            return load(self._place) is not None or has_lost_settings(self._place)
        except StoreError:
            return True  # opening it raises the reason

    def not_found_error(self, path: str) -> FileNotFoundError:
        """The error for a path without a file or folder."""
        return not_found_error(path) if self._has_store() else no_store_error(path, self._place)

    # Paths

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, list):
            return [cls._strip_protocol(one) for one in path]
        return stringify_path(path).removeprefix("castore://").strip("/")

    @property
    def fsid(self) -> str:
        """Identifies this store among those of this machine."""
        return f"castore-{self._place}"

    # Finding

    def entry(self, path: str) -> Entry | None:
        """The entry of a path, also if its bytes are damaged or gone; None if there is none."""
        unfinished.finish_unreferenced()
        if not self._has_store():
            return None
        try:
            return self.store.entry(path)
        except InvalidNameError:
            return None

    def _is_folder(self, path: str) -> bool:
        if not self._has_store():
            return False
        try:
            return not path or self.store.tree.is_folder(check_prefix(path), time.time())
        except InvalidNameError:
            return False

    def _folder_exists(self, path: str) -> bool:
        return path in self._made_folders or self._is_folder(path)

    def _made_folders_below(self, path: str) -> list[str]:
        start = path + "/" if path else ""
        return [folder for folder in tuple(self._made_folders) if folder.startswith(start)]

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        """``name``, ``size`` and ``type``; for a file also ``mtime``, ``digest`` (and the same as ``ETag``),
        ``codec``, ``stored``, ``expires``, ``metadata``.

        Raises:
            FileNotFoundError: there is neither a file nor a folder.
        """
        path = self._strip_protocol(path)
        if (entry := self.entry(path)) is not None:
            return _file_info(entry)
        if self._folder_exists(path):
            return _folder_info(path)
        raise self.not_found_error(path)

    def exists(self, path: str, **kwargs: Any) -> bool:
        """Whether there is a file or a folder."""
        path = self._strip_protocol(path)
        return self.entry(path) is not None or self._folder_exists(path)

    def isfile(self, path: str) -> bool:
        """Whether there is a file."""
        return self.entry(self._strip_protocol(path)) is not None

    def isdir(self, path: str) -> bool:
        """Whether a name lies below the path, or this instance has made a folder there."""
        path = self._strip_protocol(path)
        return self._is_folder(path) or (path in self._made_folders and self.entry(path) is None)

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:
        """The direct contents of a folder, sorted by name; for a file, that file.

        Raises:
            FileNotFoundError: there is neither a file nor a folder.
        """
        path = self._strip_protocol(path)
        found: dict[str, Entry | str]
        if (entry := self.entry(path)) is not None:
            found = {entry.name: entry}
        else:
            with raising_read_errors(path):
                check_prefix(path)
            if not (path or self._has_store() or self._made_folders):
                raise self.not_found_error(path)
            files, folders = self._names_in(path) if self._has_store() else ([], [])
            found = self._entries_in(path, files) if detail else dict.fromkeys(files, "")
            found.update(zip(folders, folders, strict=True))
            for folder in self._made_folders_below(path):
                if self._parent(folder) == path:
                    found.setdefault(folder, folder)
            if not found and path and path not in self._made_folders:
                raise self.not_found_error(path)
        names = sorted(found)
        if not detail:
            return names
        return [
            _folder_info(one) if isinstance(one, str) else _file_info(one)
            for one in map(found.__getitem__, names)
        ]

    def _names_in(self, folder: str) -> tuple[list[str], list[str]]:
        """The names of the files and of the folders directly in a folder, also of damaged files.

        `Store.children` leaves those out. A data set without them would be smaller, without any error. The
        names below each inner folder are skipped, however many they are.
        """
        tree, now = self.store.tree, time.time()
        start = f"{folder}/" if folder else ""
        low, high = below(folder) if folder else ("", None)
        files: list[str] = []
        folders: list[str] = []
        limit, is_last = _FEW, False
        while not is_last:
            rows = tree.files(low, high, now, limit)
            is_last = len(rows) < limit
            limit = _MANY
            for row in rows:
                part, slash, _ = row[0][len(start) :].partition("/")
                if slash:
                    folders.append(start + part)
                    low = tree.require_order(low, below(start + part)[1])
                    limit, is_last = _FEW, False
                    break
                files.append(row[0])
                low = row[0] + "\0"
        return files, folders

    def _entries_in(self, folder: str, names: list[str]) -> dict[str, Entry | str]:
        """The entries of files directly in a folder."""
        # One pass gives nearly all of them.
        intact = {one.name: one for one in self.store.children(folder) if not isinstance(one, str)}
        found: dict[str, Entry | str] = {}
        for name in names:
            if (entry := intact.get(name) or self.store.entry(name)) is not None:
                found[name] = entry
        return found

    def find(
        self,
        path: str,
        maxdepth: int | None = None,
        withdirs: bool = False,
        detail: bool = False,
        **kwargs: Any,
    ) -> Any:
        """All files below a folder, in one pass over the index; see fsspec's `find`."""
        if maxdepth is not None and maxdepth < 1:
            raise ValueError(f"maxdepth must be at least 1, not {maxdepth!r}")
        path = self._strip_protocol(path)
        unfinished.finish_unreferenced()
        try:
            entries = list(self.store.entries(path)) if self._has_store() else []
        except InvalidNameError:
            entries = []
        start = len(path) + 1 if path else 0
        found: dict[str, dict[str, Any]] = {}
        for entry in entries:
            if withdirs:
                for folder in _parent_folders(entry.name, start, maxdepth):
                    found.setdefault(folder, _folder_info(folder))
            if maxdepth is None or entry.name.count("/", start) < maxdepth:
                found[entry.name] = _file_info(entry)
        if withdirs:
            for folder in self._made_folders_below(path):
                if maxdepth is None or folder.count("/", start) < maxdepth:
                    found.setdefault(folder, _folder_info(folder))
            if path and self.isdir(path):
                found[path] = _folder_info(path)
        names = sorted(found)
        return {name: found[name] for name in names} if detail else names

    def get_mapper(
        self,
        root: str = "",
        check: bool = False,
        create: bool = False,
        missing_exceptions: tuple[type[Exception], ...] | None = None,
    ) -> Mapper:
        """The files below a folder as a mapping from paths to bytes; see fsspec's `get_mapper`."""
        return Mapper(root, self, check, create, missing_exceptions)

    def created(self, path: str) -> datetime:
        """The time at which the path was last given other bytes."""
        info = self.info(path)
        if info["type"] != "file":
            raise is_folder_error(info["name"])
        return datetime.fromtimestamp(info["created"], tz=timezone.utc)

    def modified(self, path: str) -> datetime:
        """The same as `created`: bytes never change, only the path does."""
        return self.created(path)

    def checksum(self, path: str) -> int:
        """The digest of a file's bytes as a number."""
        return int(self.ukey(path), 16)

    def ukey(self, path: str) -> str:
        """The digest of a file's bytes: 64 hex digits."""
        info = self.info(path)
        if info["type"] != "file":
            raise is_folder_error(info["name"])
        return str(info["digest"])

    # Opening

    def open(
        self,
        path: str,
        mode: str = "rb",
        block_size: int | str | None = None,
        cache_options: dict[str, Any] | None = None,
        compression: str | None = None,
        **kwargs: Any,
    ) -> Any:
        """Open a file; see fsspec's `open`. Layers of text and compression end the file that they write.

        Args:
            mode: ``rb``, ``wb``, ``xb`` or ``ab``, or ``r``, ``w``, ``x`` or ``a`` for text.
            compression: ``gzip`` or another name of fsspec's, or ``infer`` to choose by the path.
            kwargs: ``encoding``, ``errors``, ``newline``; for written files ``codec``, ``level``, ``ttl``,
                ``metadata``, ``pin``. Others are ignored, as in fsspec's own file systems.
        """
        if "r" in mode:
            mode = "rb" if mode == "br" else mode  # as Python's `open`
            return super().open(path, mode, block_size, cache_options, compression, **kwargs)
        path = self._strip_protocol(path)
        text = {name: kwargs.pop(name) for name in _TEXT_OPTIONS if name in kwargs}
        compression = get_compression(path, compression)
        binary = mode.replace("t", "").replace("b", "") + "b"
        file: Any = super().open(path, binary, block_size, cache_options, None, **kwargs)
        try:
            if compression is not None:
                file = CompressedFile(compr[compression](file, mode=binary[0]), file)
            return file if "b" in mode else TextFile(file, **text)
        except BaseException:
            file.discard()
            raise

    def _open(
        self,
        path: str,
        mode: str = "rb",
        block_size: int | str | None = None,
        autocommit: bool = True,
        cache_options: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> ReadFile | WriteFile:
        path = self._strip_protocol(path)
        if mode == "rb":
            self._check_is_file(path)
            return ReadFile(self, path)
        if mode not in ("wb", "xb", "ab"):
            raise ValueError(f"castore:// opens files as rb, wb, xb or ab (and as text), not as {mode!r}")
        if mode == "xb" and self.exists(path):
            raise exists_error(path)
        self._check_is_no_folder(path)
        if mode == "ab":
            return AppendFile(self, path, mode, autocommit, _put_options(kwargs))
        return WriteFile(self, path, mode, autocommit, self._write_options(kwargs))

    def append_options(self, entry: Entry | None, given: dict[str, Any]) -> dict[str, Any]:
        """The options of the put that ends an append.

        An existing entry keeps its options, except for those given with the file and those that decide the
        compression.
        """
        if entry is None:
            return self._put_options | given
        return {
            name: self._put_options[name] for name in _COMPRESSION_OPTIONS if name in self._put_options
        } | given

    def _write_options(self, given: dict[str, Any]) -> dict[str, Any]:
        return self._put_options | _put_options(given)

    def _check_is_file(self, path: str) -> None:
        if self.entry(path) is None:
            raise is_folder_error(path) if self._is_folder(path) else self.not_found_error(path)

    def _check_is_no_folder(self, path: str) -> None:
        if self._is_folder(path):
            raise is_folder_error(path)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        """The bytes of a file, or those from ``start`` to ``end``; negative numbers count from its end."""
        path = self._strip_protocol(path)
        if start is None and end is None and self._has_store():
            with raising_read_errors(path):
                data = self.store.get(path)
            if data is not None:
                return data
            # `get` gives None for damage, too; opening the file shows which.
        self._check_is_file(path)
        with ReadFile(self, path) as file:
            return _read_range(file, start, end)

    def cat_ranges(
        self,
        paths: Sequence[str],
        starts: int | Sequence[int | None] | None,
        ends: int | Sequence[int | None] | None,
        max_gap: int | None = None,
        on_error: str = "return",
        **kwargs: Any,
    ) -> list[bytes | Exception]:
        """Ranges of files, in order. Each file is opened once, and its ranges are read from first to last.

        Args:
            on_error: ``"return"`` gives an exception in the place of the bytes, ``"raise"`` raises the first.
        """
        all_starts = [starts] * len(paths) if starts is None or isinstance(starts, int) else list(starts)
        all_ends = [ends] * len(paths) if ends is None or isinstance(ends, int) else list(ends)
        if not len(paths) == len(all_starts) == len(all_ends):
            raise ValueError(
                f"{len(paths)} paths, {len(all_starts)} starts and {len(all_ends)} ends do not match"
            )
        wanted: dict[str, list[int]] = {}
        for place, path in enumerate(paths):
            wanted.setdefault(self._strip_protocol(path), []).append(place)
        results: list[Any] = [b""] * len(paths)
        for path, places in wanted.items():
            places.sort(key=lambda place: all_starts[place] or 0)
            try:
                self._check_is_file(path)
                with ReadFile(self, path) as file:
                    for place in places:
                        try:
                            results[place] = _read_range(file, all_starts[place], all_ends[place])
                        except Exception as error:  # a damaged frame is no error of the other ranges
                            if on_error != "return":
                                raise
                            results[place] = error
            except Exception as error:
                if on_error != "return":
                    raise
                results = [error if place in places else one for place, one in enumerate(results)]
        return results

    # Writing

    def touch(self, path: str, truncate: bool = True, **kwargs: Any) -> None:
        """Put an empty file; with ``truncate=False`` only where there is none."""
        if truncate or not self.exists(path):
            self.pipe_file(path, b"", **kwargs)

    def pipe_file(self, path: str, value: Any, mode: str = "overwrite", **kwargs: Any) -> None:
        """Put bytes under a path.

        Raises:
            FileExistsError: ``mode`` is ``"create"``, and the path exists.
        """
        path = self._strip_protocol(path)
        if self._intrans:
            with self.open(path, "xb" if mode == "create" else "wb", **kwargs) as file:
                file.write(value)
            return
        options = self._write_options(kwargs)
        self._check_is_no_folder(path)
        with raising_write_errors(path):
            if mode == "create":
                if self.entry(path) is not None:
                    raise exists_error(path)
                with WriteFile(self, path, "xb", True, options) as file:
                    file.write(value)
            else:
                self.store.put(path, value, **options)

    def put_file(
        self, lpath: str, rpath: str, callback: Any = DEFAULT_CALLBACK, mode: str = "overwrite", **kwargs: Any
    ) -> None:
        """Put a local file, in constant memory. A local folder puts nothing, since folders exist by their
        names.
        """
        path = self._strip_protocol(rpath)
        if mode == "create" and self.exists(path):
            raise exists_error(path)
        if os.path.isdir(lpath):
            return
        self._check_is_no_folder(path)
        size = os.path.getsize(lpath)
        callback.set_size(size)
        if self._intrans:
            with open(lpath, "rb") as source, self.open(path, "wb", **kwargs) as file:
                shutil.copyfileobj(source, file)
            callback.absolute_update(size)
            return
        with raising_write_errors(path):
            self.store.put_file(path, lpath, progress=callback.relative_update, **self._write_options(kwargs))
        callback.absolute_update(size)  # the callback gets no steps for bytes that the store had

    def copy(
        self,
        path1: str | list[str],
        path2: str | list[str],
        recursive: bool = False,
        maxdepth: int | None = None,
        on_error: str | None = None,
        **kwargs: Any,
    ) -> None:
        """Copy files, and folders with all below them if ``recursive``; see fsspec's `copy`."""
        if on_error is None:
            on_error = "ignore" if recursive else "raise"
        if isinstance(path2, str):
            is_into = trailing_sep(path2) or self.isdir(path2)
            path1, path2 = self._pairs(path1, path2, is_into, recursive, maxdepth)
        super().copy(path1, path2, recursive, maxdepth, on_error, **kwargs)

    def get(
        self,
        rpath: str | list[str],
        lpath: str | list[str],
        recursive: bool = False,
        callback: Any = DEFAULT_CALLBACK,
        maxdepth: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Copy files to local ones, and folders with all below them if ``recursive``; see fsspec's `get`."""
        if not isinstance(lpath, list):
            local = make_path_posix(os.fspath(lpath))
            is_into = trailing_sep(local) or os.path.isdir(local)
            rpath, lpath = self._pairs(rpath, local, is_into, recursive, maxdepth)
        super().get(rpath, lpath, recursive, callback, maxdepth, **kwargs)

    def get_file(
        self,
        rpath: str,
        lpath: Any = None,
        callback: Any = DEFAULT_CALLBACK,
        outfile: Any = None,
        **kwargs: Any,
    ) -> None:
        """Copy a file to a local one, in constant memory; a folder makes a local folder.

        Args:
            lpath: a path, whose file is replaced when all bytes are there, and stays as it was after an
                error; or an open file.
            outfile: an open file, in place of ``lpath``.
        """
        if outfile is None and isfilelike(lpath):
            outfile = lpath
        if outfile is not None:
            self._copy_out(rpath, outfile, callback, kwargs)
            return
        local = os.path.abspath(os.fspath(lpath))
        if self.isdir(rpath):
            os.makedirs(local, exist_ok=True)
            return
        os.makedirs(os.path.dirname(local), exist_ok=True)
        with replacing(local) as file:
            self._copy_out(rpath, file, callback, kwargs)

    def _copy_out(self, path: str, target: Any, callback: Any, options: dict[str, Any]) -> None:
        with self.open(path, "rb", **options) as source:
            callback.set_size(getattr(source, "size", None))
            while piece := source.read(self.blocksize):
                target.write(piece)
                callback.relative_update(len(piece))

    def _require_bytes(self, entry: Entry) -> None:
        """Raise `DamagedFileError` if an entry's bytes are known to be damaged or gone, for no name can be
        given to those.
        """
        blob = self.store.blob(entry.digest)
        if blob is not None and not (blob.is_here or entry.away):
            raise lost_error(entry.name, entry.digest)

    def _pairs(
        self, source: str | list[str], target: str, is_into: bool, recursive: bool, maxdepth: int | None
    ) -> tuple[list[str], list[str]]:
        """All sources, and the target of each.

        fsspec computes the targets from paths that begin with a slash, so the paths get one here.

        Args:
            is_into: whether ``target`` is a folder.
        """
        found = self.expand_path(source, recursive=recursive, maxdepth=maxdepth)
        if isinstance(source, list):
            return found, other_paths(found, target, flatten=True)
        if not recursive or maxdepth is not None:  # a pattern alone gives no folders
            found = [path for path in found if not self.isdir(path)]
            if not found:
                return [], []
        inside = len(found) == 1 if has_magic(source) else is_into and not trailing_sep(source)
        return found, other_paths(["/" + path for path in found], target, exists=inside)

    def cp_file(self, path1: str, path2: str, **kwargs: Any) -> None:
        """Give the same bytes a second path, in a time that does not depend on their size; a folder gets
        none.
        """
        path1, path2 = self._strip_protocol(path1), self._strip_protocol(path2)
        if (entry := self.entry(path1)) is None:
            if self._folder_exists(path1):
                return
            raise self.not_found_error(path1)
        self._require_bytes(entry)
        with raising_read_errors(path1), raising_write_errors(path2):
            self.store.copy(path1, path2)

    def mv(
        self, path1: Any, path2: Any, recursive: bool = False, maxdepth: int | None = None, **kwargs: Any
    ) -> None:
        """Move each file in one step, visible under exactly one path. A folder is moved file by file.

        Files that are not among those to move stay: those below ``maxdepth``, and those put meanwhile.

        Raises:
            ValueError: a path would be moved into itself, onto another path to move, or two onto one; nothing
                is moved then. A path that is moved onto itself stays.
            DamagedFileError: the bytes of a file are known to be damaged; nothing is moved then.
        """
        if path1 == path2:
            return
        if isinstance(path1, str) and isinstance(path2, str) and not path2.endswith("/"):
            source, target = self._strip_protocol(path1), self._strip_protocol(path2)
            if source == target:
                return
            if self.entry(source) is not None and not self._is_folder(target):
                self._move(source, target)
                return
        files, folders = self._plan_moves(path1, path2, recursive, maxdepth)
        for source, target in files:
            self._move(source, target)
        for source, target in reversed(folders):  # the inner ones first
            is_empty = not self._is_folder(source) and not self._made_folders_below(source)
            if source in self._made_folders and is_empty:
                self._made_folders.discard(source)
                self._made_folders.add(target)

    def _move(self, source: str, target: str) -> None:
        if (entry := self.entry(source)) is None:
            raise self.not_found_error(source)
        self._require_bytes(entry)
        with raising_read_errors(source), raising_write_errors(target):
            self.store.rename(source, target)

    def _plan_moves(
        self, source: Any, target: Any, recursive: bool, maxdepth: int | None
    ) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
        """The files and folders to move, with their new paths, once it is certain that nothing gets lost."""
        if isinstance(target, list):
            sources = source if isinstance(source, list) else self.expand_path(source, recursive, maxdepth)
            targets = target
            if len(sources) != len(targets):
                raise ValueError(
                    f"mv has {len(sources)} paths and {len(targets)} new ones; give one for each"
                )
        else:
            target = stringify_path(target)
            is_into = trailing_sep(target) or self.isdir(target)
            sources, targets = self._pairs(source, target, is_into, recursive, maxdepth)
            if not sources:
                raise is_folder_error(str(source))
        pairs = [
            (self._strip_protocol(old), self._strip_protocol(new))
            for old, new in zip(sources, targets, strict=True)
        ]
        files = [(old, new) for old, new in pairs if self._is_file_to_move(old, new, recursive)]
        self._require_room([old for old, _ in files], [new for _, new in files])
        moved = {old for old, _ in files}
        return files, [(old, new) for old, new in pairs if old not in moved]

    def _is_file_to_move(self, old: str, new: str, recursive: bool) -> bool:
        if (entry := self.entry(old)) is not None:
            if old == new:
                raise ValueError(f"castore://{old} would be moved onto itself; give another path")
            self._require_bytes(entry)
            return True
        if not self._folder_exists(old):
            raise self.not_found_error(old)
        if not recursive:
            raise is_folder_error(old)
        if not old or old == new or new.startswith(old + "/"):
            raise ValueError(
                f"castore://{old} would be moved into itself, to castore://{new}; give another path"
            )
        return False

    def _require_room(self, sources: list[str], targets: list[str]) -> None:
        moved, taken = set(sources), set()
        for target in targets:
            if target in moved:
                raise ValueError(f"castore://{target} would be moved and replaced in one call; use two calls")
            if target in taken:
                raise ValueError(f"two paths would be moved to castore://{target}; move them one by one")
            taken.add(target)
            self._check_is_no_folder(target)

    def _rm(self, path: str) -> None:
        path = self._strip_protocol(path)
        if self.entry(path) is None:
            raise is_folder_error(path) if self._is_folder(path) else self.not_found_error(path)
        self.store.delete(path)

    def rm_file(self, path: str) -> None:
        """Remove a file."""
        self._rm(path)

    def rm(self, path: str | list[str], recursive: bool = False, maxdepth: int | None = None) -> None:
        """Remove files, and folders with all below them if ``recursive``.

        Raises:
            FileNotFoundError: there is nothing at a path; nothing is removed then.
            IsADirectoryError: it is a folder, and ``recursive`` is false.
        """
        found = self.expand_path(path, recursive=recursive, maxdepth=maxdepth)
        files, folders = [], []
        for one in found:
            if self.entry(one) is not None:
                files.append(one)
            elif not self._folder_exists(one):
                raise self.not_found_error(one)
            elif not recursive:
                raise is_folder_error(one)
            else:
                folders.append(one)
        self.store.delete_many(files)
        self._made_folders.difference_update(folders)

    def mkdir(self, path: str, create_parents: bool = True, **kwargs: Any) -> None:
        """Remember an empty folder, which this instance shows. Others see the folder once a name lies in it.

        Raises:
            FileExistsError: there is a file, or a folder.
            NotADirectoryError: the path lies below a file.
        """
        path = self._strip_protocol(path)
        if path and self.exists(path):
            raise exists_error(path)
        for folder in _parent_folders(path, 0, None):
            if self.entry(folder) is not None:
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), f"castore://{folder}")
        try:
            check_name(path)
        except InvalidNameError:  # nothing can lie there
            return
        self._made_folders.update((path, *_parent_folders(path, 0, None)))

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """The same as `mkdir`.

        Raises:
            FileExistsError: there is a file; or a folder, and ``exist_ok`` is false.
        """
        if not (exist_ok and self.isdir(path)):
            self.mkdir(path)

    def rmdir(self, path: str) -> None:
        """Forget an empty folder.

        Raises:
            FileNotFoundError: there is no folder.
            OSError: the folder is not empty.
        """
        path = self._strip_protocol(path)
        if self.entry(path) is not None:
            raise NotADirectoryError(f"castore://{path} is a file")
        if path and (self._is_folder(path) or self._made_folders_below(path)):
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), f"castore://{path}")
        if path and path not in self._made_folders:
            raise self.not_found_error(path)
        self._made_folders.discard(path)


class Mapper(FSMap):  # type: ignore[misc]  # fsspec has no types
    """fsspec's mapping. A damaged file is an error of each read, and never a missing key."""

    def getitems(self, keys: Any, on_error: str = "raise") -> dict[str, Any]:
        """The bytes of many keys; see fsspec's `FSMap.getitems`.

        Args:
            on_error: ``"omit"`` leaves out keys that are missing. zarr takes fill values for those, so damage
                is an error then, too.

        Raises:
            DamagedFileError: a file is damaged, unless ``on_error`` is ``"return"``.
        """
        if on_error != "omit":
            return dict(super().getitems(keys, on_error))
        found = super().getitems(keys, "return")
        for value in found.values():
            if isinstance(value, DamagedFileError):
                raise value
        return {key: value for key, value in found.items() if not isinstance(value, BaseException)}

    def __reduce__(self) -> tuple[Any, ...]:
        return Mapper, (self.root, self.fs, False, False, self.missing_exceptions)


def _put_options(given: dict[str, Any]) -> dict[str, Any]:
    return {name: given[name] for name in _PUT_OPTIONS if name in given}


def _file_info(entry: Entry) -> dict[str, Any]:
    return {
        "name": entry.name,
        "size": entry.size,
        "type": "file",
        "created": entry.created,
        "mtime": entry.created,
        "digest": entry.digest,
        "ETag": entry.digest,  # other caches detect changed files by it
        "codec": entry.codec,
        "stored": entry.stored,
        "expires": entry.expires,
        "metadata": entry.metadata,
    }


def _folder_info(path: str) -> dict[str, Any]:
    return {"name": path, "size": 0, "type": "directory"}


def _parent_folders(name: str, start: int, maxdepth: int | None) -> Iterable[str]:
    """The folders that a name lies in, below the folder whose path ends before ``start``."""
    end, depth = name.find("/", start), 0
    while end >= 0 and (maxdepth is None or depth < maxdepth):
        yield name[:end]
        end, depth = name.find("/", end + 1), depth + 1


def _read_range(file: ReadFile, start: int | None, end: int | None) -> bytes:
    first, last, _ = slice(start, end).indices(file.size)
    file.seek(first)
    return file.read(max(0, last - first))
