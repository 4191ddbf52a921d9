"""The paths in a bucket, and the names that a ref may have. ``docs/format.md`` has the same list.

Has names only: never asks a bucket.
"""

from __future__ import annotations

import re
from typing import Any

from blake3 import blake3

from castore.errors import InvalidNameError, InvalidValueError

#: Format and options of the remote. A place that has this object is a remote.
SETTINGS = "castore-remote.json"
TREES, COMMITS, REFS, HINTS = "trees/", "commits/", "refs/", "hints/"
RESULTS, CLAIMS = "keys/", "claims/"
DICTIONARIES = "dicts/"

#: The folders of a remote. Its collector and its readers take what lies in them for their own.
FOLDERS = frozenset(
    folder.rstrip("/")
    for folder in ("objects", "packs", DICTIONARIES, TREES, COMMITS, REFS, HINTS, RESULTS, CLAIMS)
)
_OWN = re.compile(
    rf"(objects|{RESULTS[:-1]}|{CLAIMS[:-1]})/(?P<start>[0-9a-f]{{2}})/(?P=start)[0-9a-f]{{62}}"
    rf"|(packs|{TREES[:-1]}|{COMMITS[:-1]})/[0-9a-f]{{64}}|{HINTS}(?P<ref>.+)|{DICTIONARIES}[0-9a-f]{{8}}"
)
_COMMIT_ID = re.compile(r"[0-9a-f]{6,64}")
_REF = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def object_key(digest: bytes, *, packed: bool) -> str:
    """Of an object with one blob, or of a pack with many; ``digest`` is that of all its bytes."""
    return f"packs/{digest.hex()}" if packed else f"objects/{digest.hex()[:2]}/{digest.hex()}"


def dictionary_key(number: int) -> str:
    """Of a Zstandard dictionary, by its number."""
    return f"{DICTIONARIES}{number:08x}"


def page_key(digest: bytes) -> str:
    """Of a page of a tree."""
    return TREES + digest.hex()


def commit_key(digest: bytes) -> str:
    """Of a commit."""
    return COMMITS + digest.hex()


def ref_key(ref: str) -> str:
    """Of a ref.

    Raises:
        InvalidNameError: no ref can have this name.
    """
    return REFS + check_ref(ref)


def hint_key(ref: str) -> str:
    """Of the pages that a first pull of a ref wants.

    Raises:
        InvalidNameError: no ref can have this name.
    """
    return HINTS + check_ref(ref)


def result_key(name: str) -> str:
    """Of the record of a computation's result, by the computation's key."""
    return RESULTS + _hashed(name)


def claim_key(name: str) -> str:
    """Of the claim of a computation, by the computation's key."""
    return CLAIMS + _hashed(name)


def _hashed(name: str) -> str:
    digest = blake3(name.encode()).hexdigest()
    return f"{digest[:2]}/{digest}"


def is_own(key: str) -> bool:
    """Whether castore gives such a name to a blob, a page, a commit, a hint, a dictionary, a result or
    a claim.
    """
    found = _OWN.fullmatch(key)
    return found is not None and (found["ref"] is None or is_ref(found["ref"]))


def is_ref(name: str) -> bool:
    """Whether a ref can have that name."""
    return _REF.fullmatch(name) is not None and not name.endswith(".")


def check_ref(ref: Any, kind: str = "ref") -> str:
    """Return ``ref``.

    Args:
        ref: the name.
        kind: the thing that has the name, for the message. Remotes are named as refs are.

    Raises:
        InvalidNameError: no ref can have this name.

    >>> check_ref("imagenet-2012")
    'imagenet-2012'
    """
    if not isinstance(ref, str) or not is_ref(ref):
        name, at, commit = str(ref).partition("@")
        if kind == "ref" and at and is_ref(name):
            raise InvalidNameError(
                f"{ref!r} cannot be a ref: behind the @ stands a commit, which `Remote.pull` and `Remote.log`"
                f" take as commit={commit!r}"
            )
        raise InvalidNameError(
            f"{ref!r} cannot be a {kind}: use up to 100 letters, digits, dots, dashes and underscores,"
            " the first a letter or a digit, the last no dot"
        )
    return str(ref)


def check_commit(digits: Any) -> str:
    """Return ``digits``, if they can be the first of a commit's id.

    Raises:
        InvalidValueError: they cannot.
    """
    if not isinstance(digits, str) or not _COMMIT_ID.fullmatch(digits):
        raise InvalidValueError(
            f"{digits!r:.80} is no commit: give at least 6 of its hex digits, as `castore log` shows"
        )
    return digits
