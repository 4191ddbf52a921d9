"""Commits and refs: a tree's history, and the only names in a remote that change.

A ref changes by compare-and-swap, after all that its commit means is in the bucket. An answer may be lost
after the storage acted, and a retry then looks like a conflict: so each write of a ref carries an id of its
writer, and is read back (Icechunk has it so: design document 017).
"""

from __future__ import annotations

import binascii
import json
import math
import re
import uuid
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from castore.errors import CorruptError, RemoteError, RemoteMissingError, RemoteUnreachableError
from castore.records import DIGEST_SIZE
from castore.remote.bucket import Bucket, Versioned
from castore.remote.collection_state import was_cut
from castore.remote.keys import REFS, check_ref, commit_key, is_ref, ref_key
from castore.remote.pages import digest_of

# Bytes; a note is the only part of any length.
_LONGEST = 1 << 20
# Bound of the numbers of a commit.
_LARGEST = 1 << 62
# Bytes of a commit and of a page that a ref carries at most. The root of a million names has some 30,000.
_CARRIED = 48 << 10
# A version of a ref in a folder.
_OF_FOLDER = re.compile("[^~]+~/[0-9]{8,}")
_CARRIED_KEYS = ("commit_bytes", "root_bytes")


class Commit(NamedTuple):
    """A state of a ref's names.

    Attributes:
        tree: digest of the root page, 32 raw bytes.
        parent: digest of the commit before it, or None.
        time: when it was made by its writer's clock, seconds since the epoch.
        writer: host name and user of its writer.
        note: text of its writer.
        entries, size: number of names, and the sum of their sizes in bytes.
    """

    tree: bytes
    parent: bytes | None
    time: float
    writer: str
    note: str
    entries: int
    size: int


class Ref(NamedTuple):
    """A ref as it was read.

    Attributes:
        commit: digest of its commit.
        version: to compare when the ref is moved.
        carried: bytes that spare a reader two requests if they are those of the commit and of the root of its
            tree, as nobody has checked; or nothing.
    """

    commit: bytes
    version: Any
    carried: tuple[bytes, bytes] | None = None


def encode_commit(commit: Commit) -> bytes:
    """The bytes of a commit's object."""
    fields = commit._asdict() | {
        "tree": commit.tree.hex(),
        "parent": None if commit.parent is None else commit.parent.hex(),
    }
    return json.dumps({"format": 1, **fields}, ensure_ascii=False, separators=(",", ":")).encode()


def read_commit(bucket: Bucket, digest: bytes) -> Commit:
    """A commit, checked by its digest.

    Raises:
        RemoteMissingError: the bucket has no such commit.
        CorruptError: its bytes are not those that were written.
        RemoteError: castore did not write them.
    """
    return parse_commit(read_commit_bytes(bucket, digest), digest, bucket)


def read_commit_bytes(bucket: Bucket, digest: bytes) -> bytes:
    """The bytes of a commit's object.

    Raises:
        RemoteMissingError, CorruptError: as for `read_commit`.
    """
    try:
        data = bucket.get(commit_key(digest)).data
    except RemoteMissingError as error:
        raise RemoteMissingError(
            f"{bucket.url} lacks commit {digest.hex()}; `castore remote check --repair` uploads it again from"
            " a store that has pushed or pulled it"
        ) from error
    if digest_of(data) != digest:
        raise CorruptError(
            f"commit {digest.hex()} in {bucket.url} is damaged: its bytes have another digest;"
            " `castore remote check --repair` uploads it again from a store that has pushed or pulled it",
            where=commit_key(digest),
        )
    return data


def parse_commit(data: bytes, digest: bytes, bucket: Bucket) -> Commit:
    """The commit of some bytes that have its digest.

    Raises:
        RemoteError: castore did not write them.
    """
    fields = _parse(data, commit_key(digest), bucket)
    try:
        commit = Commit(
            _digest(fields["tree"]),
            None if fields["parent"] is None else _digest(fields["parent"]),
            float(fields["time"]),
            str(fields["writer"]),
            str(fields["note"]),
            int(fields["entries"]),
            int(fields["size"]),
        )
        if not (
            math.isfinite(commit.time) and 0 <= commit.entries < _LARGEST and 0 <= commit.size < _LARGEST
        ):
            raise ValueError("a number cannot be")
        return commit
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise RemoteError(f"commit {digest.hex()} in {bucket.url} is none that castore wrote") from error


def read_ref(bucket: Bucket, ref: str) -> Ref | None:
    """Where a ref points, or None if there is none.

    Raises:
        RemoteError: its bytes are not what castore writes.
    """
    try:
        found = bucket.get(ref_key(ref))
    except RemoteMissingError:
        return None
    fields = _fields_of(found, ref, bucket)
    return Ref(_digest(fields["commit"]), found.version, _carried(fields))


def list_refs(bucket: Bucket) -> list[str]:
    """The names of all refs, sorted. Files that others have put beside the refs are passed over.

    Raises:
        RemoteError: a remote in a folder was copied here, where its refs are not found under their names.
    """
    names = [listed.key.removeprefix(REFS) for listed in bucket.listing(REFS)]
    refs = sorted(name for name in names if is_ref(name))
    of_folder = sorted(name for name in names if _OF_FOLDER.fullmatch(name))
    if of_folder and not refs:
        ref = of_folder[-1].rpartition("~")[0]
        raise RemoteError(
            f"{bucket.url} has refs as a folder has them, since somebody copied it from one: copy the highest"
            f" number of each to its name, as {REFS}{of_folder[-1]} to {REFS}{ref}"
        )
    return refs


def move_ref(
    bucket: Bucket,
    ref: str,
    seen: Ref | None,
    commit: bytes,
    now: float,
    carried: tuple[bytes, bytes] | None = None,
) -> bool:
    """Point a ref at a commit whose bytes are all there; False if the ref was moved since ``seen``.

    Args:
        seen: from `read_ref`, None to make the ref.
        commit: its digest.
        now: seconds since the epoch, for people.
        carried: bytes of the commit and of the root of its tree. They are left out if they are many.

    Raises:
        RemoteUnreachableError: whether the ref was moved is not known: the storage gave no answer, and could
            not be asked.
    """
    check_ref(ref)
    writer = uuid.uuid4().hex
    fields = {"format": 1, "commit": commit.hex(), "writer": writer, "time": now}
    if carried is not None and max(map(len, carried)) <= _CARRIED:
        fields |= {
            key: binascii.b2a_base64(data, newline=False).decode()
            for key, data in zip(_CARRIED_KEYS, carried, strict=True)
        }
    data = json.dumps(fields, separators=(",", ":")).encode()
    try:
        if seen is None:
            moved = bucket.create(ref_key(ref), data)
        else:
            moved = bucket.replace(ref_key(ref), data, seen.version)
    except RemoteUnreachableError:
        moved = False
    return moved or _wrote(bucket, ref, writer)


def _wrote(bucket: Bucket, ref: str, writer: str) -> bool:
    try:
        found = bucket.get(ref_key(ref))
    except RemoteMissingError:
        return False
    return _parse(found.data, ref_key(ref), bucket).get("writer") == writer


def history(
    bucket: Bucket, commit: bytes, known: Mapping[bytes, Commit] = MappingProxyType({})
) -> Iterator[tuple[bytes, Commit]]:
    """A commit and those before it, newest first. Ends where the collector has removed older ones.

    Args:
        known: commits that need not be read.

    Raises:
        RemoteMissingError: a commit is lost, and with it the way to older ones.
        CorruptError: a commit's bytes are not those that were written.
    """
    at: bytes | None = commit
    after = None
    while at is not None:
        try:
            found = known.get(at) or read_commit(bucket, at)
        except RemoteMissingError:
            if after is None or not was_cut(bucket, at, after):
                raise
            return
        yield at, found
        at, after = found.parent, at


def _fields_of(found: Versioned, ref: str, bucket: Bucket) -> dict[str, Any]:
    try:
        fields = _parse(found.data, ref_key(ref), bucket)
    except RemoteError as error:
        raise _damaged_ref(ref, bucket, "it is no JSON of castore's") from error
    try:
        _digest(fields["commit"])
    except (KeyError, TypeError, ValueError) as error:
        raise _damaged_ref(ref, bucket, "it names no commit") from error
    return fields


def _carried(fields: dict[str, Any]) -> tuple[bytes, bytes] | None:
    try:
        commit, root = (binascii.a2b_base64(fields[key]) for key in _CARRIED_KEYS)
    except (KeyError, TypeError, ValueError):  # a hint, without which readers do
        return None
    return commit, root


def _damaged_ref(ref: str, bucket: Bucket, why: str) -> RemoteError:
    return RemoteError(
        f"ref {ref!r} in {bucket.url} is damaged ({why}); bring back an older version of {ref_key(ref)}"
        " (docs/remote.md), or push to another ref; if no castore wrote that file, remove it"
    )


def _parse(data: bytes, key: str, bucket: Bucket) -> dict[str, Any]:
    try:
        if len(data) > _LONGEST:
            raise ValueError("too long")
        fields = json.loads(data)
        if type(fields) is not dict or fields.get("format") != 1:
            raise ValueError("another format")
    except (ValueError, RecursionError) as error:
        raise RemoteError(f"{key} in {bucket.url} is none that this castore can read: {error}") from error
    return fields


def _digest(text: str) -> bytes:
    digest = bytes.fromhex(text)
    if len(digest) != DIGEST_SIZE:
        raise ValueError("no digest")
    return digest
