"""The log of castore's core. The first line imports `logging`, which takes 5 ms, a twelfth of a start."""

from __future__ import annotations


def warning(message: str, *values: object) -> None:
    """Log a warning as `logging` does, with the values in the places of the message's ``%s``."""
    import logging

    logging.getLogger("castore").warning(message, *values, stacklevel=2)
