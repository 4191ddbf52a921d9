"""`castore mount`: placeholder."""

from __future__ import annotations


def mount() -> None:
    """Show names as plain files."""
