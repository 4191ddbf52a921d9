"""`castore mount`: placeholder."""

from __future__ import annotations


def umount() -> None:
    """End a mount."""
