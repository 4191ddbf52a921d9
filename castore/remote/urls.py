"""Opens the bucket that a URL names."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit

from castore.errors import InvalidValueError
from castore.remote.bucket import Bucket
from castore.remote.folder_bucket import FolderBucket


def open_bucket(url: str) -> Bucket:
    """The bucket of a URL.

    Raises:
        InvalidValueError: the URL names none.
    """
    parts = urlsplit(url)
    if parts.scheme == "file" and parts.path.startswith("/"):
        return FolderBucket(Path(unquote(parts.path)))
    raise InvalidValueError(f"{url!r} is no URL of a remote")
