"""Errors as values that cross to another process, which raises them again."""

from __future__ import annotations

from typing import Any

from castore import errors
from castore.errors import CastoreError, ConflictError


def describe(error: CastoreError | OSError) -> dict[str, Any]:
    """An error as values that travel: `rebuild` makes it again."""
    known = [kind.__name__ for kind in type(error).__mro__ if getattr(errors, kind.__name__, None) is kind]
    return {
        "kind": known[0] if known else "RemoteError",
        "message": str(error),
        "names": list(getattr(error, "names", ())),
    }


def rebuild(described: dict[str, Any]) -> Exception:
    """The error of `describe`."""
    kind = getattr(errors, described["kind"])
    if kind is ConflictError:
        return ConflictError(described["message"], names=tuple(described["names"]))
    error: Exception = kind(described["message"])
    return error
