"""A bucket in a folder, for stores that share a file system (NFS, Lustre, a disk).

Objects appear whole: they are written beside their place, synced, and renamed. Compare-and-swap needs
something that every shared file system has, and that is the exclusive creation of a name by ``link``: each
version of a ref is a file of its own, and its number is one above the version that it replaces. An ETag made
of time, inode and size would not do, because all three recur (ClickHouse #112561).
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from castore.errors import RemoteDeniedError, RemoteError, RemoteMissingError, RemoteUnreachableError
from castore.objects.codecs import Buffer
from castore.remote.bucket import SMALL, Listed, Versioned
from castore.system.temporary import sync_folder

_PIECE = 4 << 20
# Versions of a small conditional object: `refs/imagenet~00000007`.
_VERSION = re.compile(r"(.+)~([0-9]{8})")
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
            path, number = self._path(key), 0
            if not path.is_file():
                number = self._newest(key)
                if not number:
                    raise RemoteMissingError(f"{self.url} has no {key}")
                path = self._version(key, number)
            with open(path, "rb") as file:
                data = file.read(SMALL + 1)
        if len(data) > SMALL:
            raise RemoteError(f"{key} in {self.url} is larger than castore writes it")
        return Versioned(data, number)

    def size(self, key: str) -> int | None:
        """See `Bucket`."""
        with _translated(self, key):
            try:
                return os.stat(self._path(key)).st_size
            except FileNotFoundError:
                return None

    def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """See `Bucket`."""
        with _translated(self, key), open(self._path(key), "rb") as file:
            found = [os.pread(file.fileno(), end - start, start) for start, end in ranges]
        if any(len(data) != end - start for data, (start, end) in zip(found, ranges, strict=True)):
            raise RemoteError(
                f"{key} in {self.url} is shorter than the tree says; `castore remote check` tells more"
            )
        return found

    def stream(self, key: str) -> Iterator[bytes]:
        """See `Bucket`."""
        with _translated(self, key), open(self._path(key), "rb") as file:
            while piece := file.read(_PIECE):
                yield piece

    def put(self, key: str, data: Buffer) -> None:
        """See `Bucket`."""
        with _translated(self, key):
            temporary = self._write(data)
            self._publish(temporary, key)

    def upload(self, key: str, path: Path) -> None:
        """See `Bucket`."""
        with _translated(self, key):
            temporary = self._temporary()
            try:
                with open(path, "rb") as source, open(temporary, "xb") as target:
                    shutil.copyfileobj(source, target, _PIECE)
                    os.fsync(target.fileno())
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise
            self._publish(temporary, key)

    def create(self, key: str, data: bytes) -> bool:
        """See `Bucket`."""
        with _translated(self, key):
            return not self._newest(key) and self._link(key, data, 1)

    def replace(self, key: str, data: bytes, version: Any) -> bool:
        """See `Bucket`."""
        with _translated(self, key):
            return self._newest(key) == version and self._link(key, data, version + 1)

    def listing(self, prefix: str) -> Iterator[Listed]:
        """See `Bucket`."""
        seen = set()
        with _translated(self, prefix):
            for folder, folders, files in os.walk(self.folder / prefix, onerror=_raise_unless_missing):
                folders.sort()
                if Path(folder) == self.folder:
                    folders[:] = [name for name in folders if name != UNFINISHED]
                for name in sorted(files):
                    match = _VERSION.fullmatch(name)
                    key = (Path(folder) / (match[1] if match else name)).relative_to(self.folder).as_posix()
                    if key not in seen:
                        with suppress(FileNotFoundError):
                            status = os.stat(os.path.join(folder, name))
                            yield Listed(key, status.st_size, status.st_mtime)
                        seen.add(key)

    def delete(self, keys: Iterable[str]) -> None:
        """See `Bucket`."""
        for key in keys:
            with _translated(self, key):
                path = self._path(key)
                path.unlink(missing_ok=True)
                for number in self._numbers(key):
                    self._version(key, number).unlink(missing_ok=True)

    def _path(self, key: str) -> Path:
        return self.folder / key

    def _version(self, key: str, number: int) -> Path:
        path = self._path(key)
        return path.with_name(f"{path.name}~{number:08d}")

    def _numbers(self, key: str) -> list[int]:
        path = self._path(key)
        try:
            names = os.listdir(path.parent)
        except (FileNotFoundError, NotADirectoryError):
            return []
        found = (_VERSION.fullmatch(name) for name in names)
        return [int(match[2]) for match in found if match and match[1] == path.name]

    def _newest(self, key: str) -> int:
        return max(self._numbers(key), default=0)

    def _link(self, key: str, data: bytes, number: int) -> bool:
        target = self._version(key, number)
        temporary = self._write(data)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(temporary, target)
            except FileExistsError:
                return False
            except OSError:
                # An answer over the network may be lost after the server has linked: the link count knows.
                if os.stat(temporary).st_nlink != 2:
                    raise
            sync_folder(target.parent)
            return True
        finally:
            temporary.unlink(missing_ok=True)

    def _write(self, data: Buffer) -> Path:
        temporary = self._temporary()
        try:
            with open(temporary, "xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        return temporary

    def _temporary(self) -> Path:
        folder = self.folder / UNFINISHED
        folder.mkdir(parents=True, exist_ok=True)
        return folder / uuid.uuid4().hex

    def _publish(self, temporary: Path, key: str) -> None:
        target = self._path(key)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            os.rename(temporary, target)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        sync_folder(target.parent)


class _translated:  # noqa: N801
    """Turns what a file system says into errors of remotes."""

    def __init__(self, bucket: FolderBucket, key: str) -> None:
        self._what = f"{key or 'the objects'} in {bucket.url}"

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RemoteError) or not isinstance(error, OSError):
            return
        if isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError):
            raise RemoteMissingError(f"there is no {self._what}") from error
        if isinstance(error, PermissionError) or error.errno == errno.EROFS:
            raise RemoteDeniedError(f"no permission for {self._what}: {error.strerror}") from error
        if error.errno in (errno.ESTALE, errno.EIO, errno.ETIMEDOUT, errno.EHOSTDOWN):
            raise RemoteUnreachableError(f"cannot reach {self._what}: {error.strerror}") from error
        raise RemoteError(f"cannot use {self._what}: {error.strerror}") from error


def _raise_unless_missing(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error
