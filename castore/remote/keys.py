"""The paths in a bucket, and the names that a ref may have. ``docs/format.md`` has the same list.

Has names only: never asks a bucket.
"""

from __future__ import annotations

import re
from typing import Any

from blake3 import blake3

from castore.errors import InvalidNameError

#: Format and options of the remote. A place that has this object is a remote.
SETTINGS = "castore-remote.json"
TREES, COMMITS, REFS, RESULTS, CLAIMS = "trees/", "commits/", "refs/", "keys/", "claims/"

_REF = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def object_key(digest: bytes, *, packed: bool) -> str:
    """Of an object with one blob, or of a pack with many; ``digest`` is that of all its bytes."""
    return f"packs/{digest.hex()}" if packed else f"objects/{digest.hex()[:2]}/{digest.hex()}"


def dictionary_key(number: int) -> str:
    """Of a Zstandard dictionary, by its number."""
    return f"dicts/{number:08x}"


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


def result_key(name: str) -> str:
    """Of the record of a computation's result, by the computation's key."""
    return RESULTS + _hashed(name)


def claim_key(name: str) -> str:
    """Of the claim of a computation, by the computation's key."""
    return CLAIMS + _hashed(name)


def _hashed(name: str) -> str:
    digest = blake3(name.encode()).hexdigest()
    return f"{digest[:2]}/{digest}"


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
        raise InvalidNameError(
            f"{ref!r} cannot be a {kind}: use up to 100 letters, digits, dots, dashes and underscores,"
            " the first a letter or a digit, the last no dot"
        )
    return str(ref)
