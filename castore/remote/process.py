"""The parts that the two processes of a remote share: how they open a store, and how errors reach callers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from castore import errors, parts
from castore.errors import CastoreError, ConflictError
from castore.gc import collect
from castore.parts import Parts
from castore.system.ballast import Ballast


def open_parts(path: Path, *, max_size: float | str | None, durable: bool) -> Parts:
    """The parts of a store, without a RAM tier. The arguments are those of `castore.Store`."""
    settings, read_only = parts.open_folder(path, max_size=max_size)
    return parts.open_parts(
        path,
        settings,
        Ballast(path / "ballast", settings.file_mode),
        collect.make_room,
        read_only=read_only,
        memory=0,
        durable=durable,
    )


def describe(error: CastoreError | OSError) -> dict[str, Any]:
    """An error as values that travel: `rebuild` makes it again."""
    kind = type(error).__name__
    known = isinstance(error, CastoreError) and getattr(errors, kind, None) is type(error)
    return {
        "kind": kind if known else "RemoteError",
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
