"""The errors that all formats of this package raise in the same words."""

from __future__ import annotations

import importlib
from typing import Any, NoReturn

from castore.errors import CorruptError, MissingDependencyError, SerializationError


def refuse(what: str, serializer: str) -> NoReturn:
    """Raise the SerializationError for a serializer that the caller named and that cannot store ``what``."""
    raise SerializationError(
        f"the serializer {serializer!r} cannot store {what}; leave it out to choose by the object"
    )


def corrupt(serializer: str, error: object) -> CorruptError:
    """Return the error for bytes that a serializer cannot read."""
    return CorruptError(f"the bytes are no valid {serializer}: {error}", where=f"serializer {serializer}")


def need(package: str, extra: str | None = None) -> Any:
    """Import a package, or raise the MissingDependencyError that says what to install."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise MissingDependencyError.of(package, extra) from error
