"""Errors as values that cross to another process, which raises them again."""

from __future__ import annotations

from typing import Any

from castore import errors
from castore.errors import CastoreError, ConflictError, CorruptError


def describe(error: CastoreError | OSError) -> dict[str, Any]:
    """An error as values that travel: `rebuild` makes it again."""
    known = [kind.__name__ for kind in type(error).__mro__ if getattr(errors, kind.__name__, None) is kind]
    return {
        "kind": known[0] if known else "RemoteError",
        "message": str(error),
        "names": list(getattr(error, "names", ())),
        "digest": getattr(error, "digest", None),
        "where": getattr(error, "where", None),
    }


def rebuild(described: dict[str, Any]) -> Exception:
    """The error of `describe`."""
    kind = getattr(errors, described["kind"])
    if kind is ConflictError:
        return ConflictError(described["message"], names=tuple(described["names"]))
    if kind is CorruptError:
        return CorruptError(described["message"], digest=described["digest"], where=described["where"])
    error: Exception = kind(described["message"])
    return error
