"""URLs of remotes: what they may look like, and the bucket that one leads to."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from castore.errors import InvalidValueError
from castore.remote.bucket import Bucket, Patience

_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,221}")
_SEGMENT = re.compile(r"(?!\.\.?$)[A-Za-z0-9._=-]{1,200}")


class Place(NamedTuple):
    """The parts of a URL.

    Attributes:
        scheme: "s3", "gs", "az" or "file".
        bucket: "" for "file".
        path: of a folder; else a prefix without a slash at either end, "" for the whole bucket.
    """

    scheme: str
    bucket: str
    path: str


def parse_url(url: str) -> Place:
    """Take a URL apart, without asking anybody.

    Raises:
        InvalidValueError: it is no URL of a remote, or has a password or options in it.

    >>> parse_url("s3://team/castore/")
    Place(scheme='s3', bucket='team', path='castore')
    >>> parse_url("file:///mnt/shared/castore")
    Place(scheme='file', bucket='', path='/mnt/shared/castore')
    """
    try:
        parts = urlsplit(str.__str__(url))
    except (TypeError, ValueError):
        raise InvalidValueError(f"{_form()}; this is no URL") from None
    # No message repeats a URL that may have a password in it.
    if "@" in parts.netloc:
        raise InvalidValueError(
            f"a URL of a remote has no user and password: it is written down. {_form()}, and credentials come"
            " from the environment"
        )
    if parts.query or parts.fragment or "?" in url or "#" in url:
        raise InvalidValueError(f"a URL of a remote has no options after ? or #: {_form()}")
    if any(ord(character) < 32 or ord(character) == 127 for character in url):
        raise InvalidValueError(f"{url!r} has a control character: {_form()}")
    if parts.scheme == "file":
        return Place("file", "", _folder(parts.netloc, unquote(parts.path), url))
    if url and not parts.scheme:
        folder = Path(os.path.abspath(os.path.expanduser(url))).as_uri()
        raise InvalidValueError(f"{url!r} is no URL of a remote: write {folder} for that folder")
    if parts.scheme not in ("s3", "gs", "az"):
        raise InvalidValueError(f"{url!r} is no URL of a remote: {_form()}")
    if not _BUCKET.fullmatch(parts.netloc):
        raise InvalidValueError(f"{url!r} names no bucket: {_form()}")
    prefix = parts.path.strip("/")
    if prefix and not all(map(_SEGMENT.fullmatch, prefix.split("/"))):
        raise InvalidValueError(
            f"the prefix {prefix!r} cannot be used: take ASCII letters, digits, dots, dashes, underscores and"
            " equals signs, with single slashes between them"
        )
    return Place(parts.scheme, parts.netloc, prefix)


def _folder(host: str, path: str, url: str) -> str:
    if host or not path.startswith("/") or "\0" in path:
        raise InvalidValueError(f"{url!r} has no absolute path: write file:///path, with three slashes")
    if not path.strip("/") or ".." in path.split("/"):
        raise InvalidValueError(f"{url!r} names no folder of its own: write file:///path")
    return str(Path(path))


def _form() -> str:
    return "write s3://bucket/prefix, gs://bucket/prefix, az://container/prefix or file:///path"


def open_bucket(
    url: str, patience: Patience | None = None, retried: Callable[[], object] = lambda: None
) -> Bucket:
    """The bucket that a URL leads to. Asks nobody yet.

    For all but ``file://`` the process must not fork afterwards: see `castore.remote.cloud_bucket`.

    Args:
        url: see `parse_url`.
        patience: None for the usual times.
        retried: called before a request is tried again.

    Raises:
        MissingDependencyError: obstore is not installed.
        InvalidValueError: see `parse_url`.
        RemoteError: see `castore.remote.cloud_bucket.open_s3`.
    """
    scheme, bucket, path = parse_url(url)
    if scheme == "file":
        from castore.remote.folder_bucket import FolderBucket

        return FolderBucket(Path(path))
    from castore.remote import cloud_bucket

    openers = {"s3": cloud_bucket.open_s3, "gs": cloud_bucket.open_gcs, "az": cloud_bucket.open_azure}
    return openers[scheme](bucket, path, patience or Patience(), retried)
