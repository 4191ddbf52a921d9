"""A bucket in a folder, for stores that share a file system (NFS, Lustre, a disk).

Objects appear whole: they are written beside their place, synced, and renamed. Compare-and-swap needs
something that every shared file system has, and that is the exclusive creation of a name by ``link``: each
version of a conditional object is a file of its own, ``refs/imagenet~/00000007``, and its number is one above
the version that it replaces. An ETag made of time, inode and size would not do, because all three recur
(ClickHouse #112561).

The newest `_KEPT` versions stay. A writer that compares an older one finds its number free again, because the
versions around it are removed. Such a link is late by `_KEPT` versions at least, is never the newest, and is
found by a comparison of the numbers afterwards.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from castore.errors import RemoteDeniedError, RemoteError, RemoteMissingError, RemoteUnreachableError
from castore.records import Buffer
from castore.remote.bucket import SMALL, Listed, Versioned, pieces
from castore.system.temporary import open_regular, sync_folder

_PIECE = 4 << 20
# Ends the name of the folder with the versions of a conditional object. No key has it.
_VERSIONS = "~"
# The name of a version is its number, in eight digits or more.
_VERSION = re.compile("[0-9]{8}|[1-9][0-9]{8,17}")
# The name of a file on its way.
_TEMPORARY = re.compile("[0-9a-f]{32}")
# Versions of a conditional object that stay.
_KEPT = 64
#: Files on their way, in the bucket's own file system. The collector removes those that are left behind.
UNFINISHED = "tmp"


class FolderBucket:
    """See `castore.remote.bucket.Bucket`.

    Args:
        folder: absolute path; made with the first object.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.url = folder.as_uri()

    def get(self, key: str) -> Versioned:
        """See `Bucket`."""
        with _translated(self, key):
            file, number = self._open(key)
            with file:
                data = file.read(SMALL + 1)
                modified = os.fstat(file.fileno()).st_mtime
        if len(data) > SMALL:
            raise RemoteError(f"{key} in {self.url} is larger than castore writes it")
        return Versioned(data, number, modified)

    def size(self, key: str) -> int | None:
        """See `Bucket`."""
        with _translated(self, key):
            try:
                file, _ = self._open(key)
            except FileNotFoundError:
                return None
            with file:
                return os.fstat(file.fileno()).st_size

    def get_range(self, key: str, start: int, end: int) -> bytes:
        """See `Bucket`."""
        with _translated(self, key):
            file, _ = self._open(key)
            with file:
                file.seek(start)
                return file.read(end - start)

    def stream(self, key: str) -> Iterator[bytes]:
        """See `Bucket`."""
        with _translated(self, key):
            file, _ = self._open(key)
            with file:
                while piece := file.read(_PIECE):
                    yield piece

    def put(self, key: str, data: Buffer) -> None:
        """See `Bucket`."""
        with _translated(self, key):
            self._publish(self._write(data), key)

    def upload(self, key: str, path: Path, progress: Callable[[int], object]) -> None:
        """See `Bucket`."""
        with open(path, "rb") as source, _translated(self, key):
            self._publish(self._write(pieces(source, _PIECE, progress)), key)

    def create(self, key: str, data: bytes) -> bool:
        """See `Bucket`."""
        with _translated(self, key):
            try:
                file, _ = self._open(key)
            except FileNotFoundError:
                return self._link(key, data, 1)
            file.close()
            return False

    def replace(self, key: str, data: bytes, version: Any) -> bool:
        """See `Bucket`."""
        with _translated(self, key):
            # Object storage has no versions, so a copy of such a bucket has version 0.
            if not version and not self._begin_versions(key):
                return False
            return self._link(key, data, max(1, version) + 1)

    def renew(self, key: str, seen: Versioned) -> None:
        """See `Bucket`. A version more each day would take space."""
        with _translated(self, key), suppress(FileNotFoundError):  # another version has come, or none is left
            os.utime(self._version(key, seen.version))

    def listing(self, prefix: str) -> Iterator[Listed]:
        """See `Bucket`."""
        with _translated(self, prefix):
            for at, folders, files in os.walk(self.folder / prefix, onerror=_raise_unless_missing):
                folder = Path(at)
                if folder == self.folder and UNFINISHED in folders:
                    folders.remove(UNFINISHED)
                versioned = {name.removesuffix(_VERSIONS) for name in folders if name.endswith(_VERSIONS)}
                folders[:] = sorted(name for name in folders if not name.endswith(_VERSIONS))
                for name in sorted({*files, *versioned}):
                    key = (folder / name).relative_to(self.folder).as_posix()
                    with suppress(FileNotFoundError):
                        path = self._version(key, self._newest(key)) if name in versioned else folder / name
                        status = os.lstat(path)
                        # To read a version that is no file is an error. Nobody may take its object for gone.
                        if name in versioned or stat.S_ISREG(status.st_mode):
                            yield Listed(key, status.st_size, status.st_mtime)

    def delete(self, keys: Iterable[str]) -> None:
        """See `Bucket`."""
        for key in keys:
            with _translated(self, key):
                self._path(key).unlink(missing_ok=True)
                # Upwards, so that no reader takes an older version for the newest.
                for number in self._numbers(key):
                    self._version(key, number).unlink(missing_ok=True)
                with suppress(FileNotFoundError):
                    try:
                        self._versions(key).rmdir()
                    except OSError as error:
                        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                            raise

    def remove_unfinished(self, before: float) -> None:
        """See `Bucket`."""
        with _translated(self, UNFINISHED), suppress(FileNotFoundError):
            for name in filter(_TEMPORARY.fullmatch, os.listdir(self.folder / UNFINISHED)):
                path = self.folder / UNFINISHED / name
                with suppress(FileNotFoundError):
                    if path.lstat().st_mtime < before:
                        path.unlink()

    def _open(self, key: str) -> tuple[BinaryIO, int]:
        """The object's file, open for reading, and its version; 0 for an object that `put` wrote.

        A link, or a pipe, which would block, counts as missing. In the place of a version it is an error: an
        older version must not count instead.
        """
        with suppress(FileNotFoundError):
            return os.fdopen(open_regular(self._path(key)), "rb"), 0
        while number := self._newest(key):
            # Between the two calls newer versions may have come, and this one may have gone.
            with suppress(FileNotFoundError):
                path = self._version(key, number)
                if not stat.S_ISREG(os.lstat(path).st_mode):
                    raise OSError(errno.EINVAL, f"{path} is not a file; remove it")
                return os.fdopen(open_regular(path), "rb"), number
        raise FileNotFoundError(errno.ENOENT, "no such object", key)

    def _path(self, key: str) -> Path:
        return self.folder / key

    def _versions(self, key: str) -> Path:
        return self.folder / (key + _VERSIONS)

    def _version(self, key: str, number: int) -> Path:
        return self._versions(key) / f"{number:08d}"

    def _numbers(self, key: str) -> list[int]:
        try:
            names = os.listdir(self._versions(key))
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(int(name) for name in names if _VERSION.fullmatch(name))

    def _newest(self, key: str) -> int:
        return max(self._numbers(key), default=0)

    def _link(self, key: str, data: bytes, number: int) -> bool:
        temporary, target = self._write(data), self._version(key, number)
        try:
            if not _links(temporary, target, makes_folder=number == 1):
                return False
            sync_folder(target.parent)
        finally:
            temporary.unlink(missing_ok=True)
        numbers = self._numbers(key)
        if max(numbers, default=number) - number >= _KEPT or (number > 1 and number - 1 not in numbers):
            # Too late: the version that was compared is gone, with others after it or with the object.
            target.unlink(missing_ok=True)
            return False
        for old in numbers[: -_KEPT - 1]:
            self._version(key, old).unlink(missing_ok=True)
        return True

    def _begin_versions(self, key: str) -> bool:
        """Make an object that has no versions the first one; False if another process was faster."""
        plain, first = self._path(key), self._version(key, 1)
        if self._numbers(key):
            return False
        try:
            if not _links(plain, first, makes_folder=True):
                return False
        except FileNotFoundError:
            return False
        sync_folder(first.parent)
        # The version has the same bytes: there is no moment without the object.
        plain.unlink(missing_ok=True)
        sync_folder(plain.parent)
        return True

    def _write(self, data: Buffer | Iterator[bytes]) -> Path:
        folder = self.folder / UNFINISHED
        _make_folder(folder)
        temporary = folder / uuid.uuid4().hex
        try:
            with open(temporary, "xb") as file:
                if isinstance(data, bytes | bytearray | memoryview):
                    file.write(data)
                else:
                    file.writelines(data)
                file.flush()
                os.fsync(file.fileno())
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        return temporary

    def _publish(self, temporary: Path, key: str) -> None:
        target = self._path(key)
        try:
            _make_folder(target.parent)
            os.rename(temporary, target)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        sync_folder(target.parent)


def _links(temporary: Path, target: Path, *, makes_folder: bool) -> bool:
    """Give a file a second name; False if that is taken, or if its folder is gone.

    Raises:
        FileNotFoundError: the file is gone: another file system may have taken the bucket's place.
    """
    while True:
        if makes_folder:
            _make_folder(target.parent)
        try:
            os.link(temporary, target)
        except FileExistsError:
            return False
        except FileNotFoundError:
            if not makes_folder:
                return False
            if not temporary.exists():
                raise
            continue  # `delete` has just removed the folder
        except OSError:
            # An answer over the network may be lost after the server has linked: the link count shows it.
            if os.stat(temporary).st_nlink != 2:
                raise
        return True


def _make_folder(folder: Path) -> None:
    """Make a folder and those above it, so that they survive a power cut."""
    if not folder.is_dir():
        _make_folder(folder.parent)
        try:
            folder.mkdir()
        except FileExistsError:
            if folder.is_symlink() and not folder.is_dir():  # else another process made it, or it is a file
                raise NotADirectoryError(errno.ENOTDIR, "a link that leads nowhere", str(folder)) from None
        sync_folder(folder.parent)


class _translated:  # noqa: N801
    """Turns a file system's errors into errors of remotes."""

    def __init__(self, bucket: FolderBucket, key: str) -> None:
        self._what = f"{key or 'the objects'} in {bucket.url}"
        self._folder = bucket.folder

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RemoteError) or not isinstance(error, OSError):
            return
        if isinstance(error, NotADirectoryError):
            raise RemoteError(
                f"cannot use {self._what}: a file lies in the way, or a dead link, where a folder should be"
            ) from error
        if isinstance(error, IsADirectoryError):
            raise RemoteError(
                f"cannot use {self._what}: a folder lies where a file should be; remove it"
            ) from error
        if isinstance(error, FileNotFoundError):
            why = "" if self._folder.is_dir() else ", nor its folder; is the file system mounted?"
            raise RemoteMissingError(f"there is no {self._what}{why}") from error
        if isinstance(error, PermissionError) or error.errno == errno.EROFS:
            raise RemoteDeniedError(f"no permission for {self._what}: {error.strerror}") from error
        if error.errno in (errno.ESTALE, errno.EIO, errno.ETIMEDOUT, errno.EHOSTDOWN):
            raise RemoteUnreachableError(f"cannot reach {self._what}: {error.strerror}") from error
        raise RemoteError(f"cannot use {self._what}: {error.strerror}") from error


def _raise_unless_missing(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        raise error
