"""``castore-remote.json``: the object that makes a place a remote, with the version of its format."""

from __future__ import annotations

import json

from castore.errors import RemoteError, RemoteMissingError
from castore.remote.bucket import Bucket
from castore.remote.keys import SETTINGS

FORMAT = 1


def prepare(bucket: Bucket, *, create: bool = True) -> None:
    """Make the place a remote, if it is none yet and ``create`` is true.

    Raises:
        RemoteMissingError: it is none.
        RemoteError: its format is another.
    """
    try:
        check(bucket)
    except RemoteMissingError:
        if not create:
            raise
        bucket.put(SETTINGS, json.dumps({"format": FORMAT}).encode() + b"\n")
        check(bucket)


def check(bucket: Bucket) -> None:
    """Check that the place is a remote of a format that this castore supports.

    Raises:
        RemoteMissingError: it is no remote.
        RemoteError: its format is another.
    """
    try:
        data = bucket.get(SETTINGS).data
    except RemoteMissingError as error:
        mounted = "; is its file system mounted?" if bucket.url.startswith("file:") else ""
        raise RemoteMissingError(f"{bucket.url} is no remote: it has no {SETTINGS}{mounted}") from error
    try:
        found = json.loads(data)["format"]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise RemoteError(
            f"{SETTINGS} in {bucket.url} is damaged ({error}); remove this one object, and `castore remote"
            " add` makes it again: all others stay as they are"
        ) from error
    if found != FORMAT:
        raise RemoteError(
            f"{bucket.url} has format {found!r}, and this castore knows format {FORMAT}; upgrade castore"
        )
